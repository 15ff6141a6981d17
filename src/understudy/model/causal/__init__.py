"""Real weights behind the embedded server: a checkpoint, an engine with a KV prefix cache, sampling."""
