"""What an attempt's calls were: one tree, its branches, and the token sequences to learn from."""
