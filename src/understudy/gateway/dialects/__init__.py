"""The wire formats that agents speak: one module a format, chosen by the path of the request."""
