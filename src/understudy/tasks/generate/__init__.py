"""Tasks that are made rather than found: mutated packages, and modules of small functions."""
