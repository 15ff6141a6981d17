"""Runs: the life of one rollout, and the scheduling of many."""
