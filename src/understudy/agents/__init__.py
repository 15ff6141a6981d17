"""Agents: the programs that work on a task, all behind one protocol."""
