"""Grading: applies an agent's patch and judges it by the task's hidden checks."""
