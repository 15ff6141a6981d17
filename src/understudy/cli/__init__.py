"""The command line, with one module for each group of commands.

Heavy modules are imported only when a command runs.
"""

from __future__ import annotations

EXIT_ERROR = 2
"""Exit code for a named error: an option, a file or the machine is not as required."""
EXIT_INTERRUPTED = 130
"""Exit code after Ctrl-C or SIGTERM before the end. The same command continues where possible."""
