"""Exact mode (token-in-token-out): a prompt is the tokens that were sampled before, and those of what is new."""
