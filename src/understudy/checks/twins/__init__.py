"""Runs versions of hidden tests that report what they observe, which finds code that only makes tests pass."""
