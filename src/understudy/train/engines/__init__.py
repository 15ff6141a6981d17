"""Trainers of others, to which our samples are handed: a module each."""
