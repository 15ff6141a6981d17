"""The exit codes of `understudy`, beside 0 (done) and 1 (done, with failures)."""

from __future__ import annotations

EXIT_ERROR = 2
"""A named error: an option, a file or the machine is not as needed."""
EXIT_INTERRUPTED = 130
"""Stopped by Ctrl-C or SIGTERM before the end; the same command continues where it can."""
