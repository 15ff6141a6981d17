"""The demonstrations of `understudy demo`, which run the commands that a user would type."""
