"""The demonstrations of `understudy demo`: they run the commands that a person would type."""
