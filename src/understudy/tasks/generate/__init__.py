"""Generates tasks: from mutated packages, from repositories' histories, and as modules of small functions."""
