"""The embedded model: a tokenizer, a chat template, policies, and a server with vLLM's API for them."""
