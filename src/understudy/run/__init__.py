"""The life of a rollout, and many at once."""
