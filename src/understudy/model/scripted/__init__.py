"""Scripted policies behind the embedded server: they work from known patches and need no weights."""
