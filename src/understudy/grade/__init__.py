"""Grading: the patch an agent leaves behind, and what the hidden checks say of it."""
