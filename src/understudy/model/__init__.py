"""The embedded model: a tokenizer, a chat template, policies, and the server that speaks for them."""
