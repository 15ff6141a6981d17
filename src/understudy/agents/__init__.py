"""The programs that work on a task, each behind one protocol."""
