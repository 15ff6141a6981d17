"""Executing a task's checks in an open sandbox: pytest files, a script with a reward, or a whole test suite."""
