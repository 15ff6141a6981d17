"""Runs a task's checks in an open sandbox: pytest files, a script that writes a reward, or a whole test suite."""
