"""Understudy teaches any language model to do Claude Code's job.

Importing this package does nothing: no I/O, no environment, no heavy modules.
"""

__version__ = "0.1.0"
