"""The command line: one file a command group. Heavy modules are imported when a command runs."""

from __future__ import annotations

EXIT_ERROR = 2
"""A named error: an option, a file or the machine is not as needed."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C or SIGTERM before the end; the same command continues where it can."""
