"""The wire formats that agents speak, and the neutral model that all of them are read into and written from.

Two modules a dialect (`anthropic`, `chat`, `responses`): one writes responses, the one named `…_request` reads
requests. `model` has the neutral types, `layout` decides how a conversation is laid out for a model. Nothing here
knows of the gateway or the store.
"""
