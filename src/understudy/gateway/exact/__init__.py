"""Exact mode (token-in-token-out): a prompt consists of the tokens that were sampled before, and the tokens of
what is new.
"""
