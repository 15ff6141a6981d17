"""Tasks: reads and generates them, and prepares a task's tree, environment and hidden checks."""
