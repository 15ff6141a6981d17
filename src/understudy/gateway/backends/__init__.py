"""Where answers come from: one module a kind of model server."""
