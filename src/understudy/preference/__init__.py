"""Preference pairs: what teachers agree on, which actions have the same effect, and the evidence of each pair."""
