"""Tasks: reading and making them, and turning one into a tree, an environment and hidden checks."""
