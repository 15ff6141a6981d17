"""Where the `understudy` command begins: how errors and interrupts reach a person.

The commands are imported in `main`, so that Ctrl-C meanwhile is an interrupt like any other.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable

from understudy.cli.exit_codes import EXIT_ERROR, EXIT_INTERRUPTED

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def main() -> None:
    """Run the command line. Exit codes: 0 done, 1 done with failures, 2 a named error, 130 interrupted."""
    try:
        _replace_what_cannot_be_printed()
        from understudy.errors import UnderstudyError

        try:
            from understudy.cli.app import app
            from understudy.cli.compat import refuse_old_spelling

            refuse_old_spelling(sys.argv[1:])
            try:
                app()
            finally:
                sys.stdout.flush()  # here, so that its errors are reported below
        except UnderstudyError as error:
            from understudy.util.text import visible

            _end(visible(f"{error.boundary} error: {error}"), EXIT_ERROR)
        except OSError as error:
            if error.errno not in (*_NO_ROOM, errno.EPIPE):
                raise
            # Python would try to flush the rest at exit, and fail again: let it go nowhere.
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            if error.errno == errno.EPIPE:
                sys.exit(1)  # the reader has closed the pipe (`| head`): not an error
            _end(f"cannot write to stdout or to a file: {error.strerror}; free some disk space", EXIT_ERROR)
    except KeyboardInterrupt:
        _end("interrupted", EXIT_INTERRUPTED)


def _replace_what_cannot_be_printed() -> None:
    """Have signs that the terminal's encoding lacks, and bytes of names that are no Unicode, printed as `?`."""
    # What a test or a notebook has in its place may be another kind of file.
    reconfigure: Callable[..., None] | None = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="replace")


def _end(message: str, code: int) -> None:
    print(f"understudy: {message}", file=sys.stderr)  # noqa: T201
    sys.exit(code)
