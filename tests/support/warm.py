"""`understudy` in processes that are forked from one which has imported it already.

Most of what a short command costs is the start of Python and the imports, and the tests run hundreds of commands.
Run as a program, this file imports every command and then waits at a socket. For each command that comes there it
forks a process, with the arguments, environment, directory, limits and open files of whoever asked. With the path
of the socket in UNDERSTUDY_TEST_WARM it is the command `understudy`, for scripts that find it on their PATH.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

SOCKET = "UNDERSTUDY_TEST_WARM"
COMMAND = (sys.executable, "-IS", __file__)
"""The command `understudy` as a program, with SOCKET in its environment."""
_LIMITS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE, resource.RLIMIT_AS)
_READ_AT_START = (
    *("PYTHONPATH", "PYTHONHOME", "PYTHONIOENCODING", "PYTHONUTF8", "PYTHONWARNINGS", "LC_", "LANG"),
    "OMP_",
)
"""What Python, or numpy, reads of the environment once, when it starts."""
_READ_ON_IMPORT = {"torch", "huggingface_hub"}
"""Libraries that read it once, when they are imported, and that few commands import."""
_IMPORTED_LATER = (
    *("agents.claude_code", "agents.claude_install", "cli.main", "cli.page", "cli.session_page", "export.verify"),
    *("gateway.serve.admin", "gateway.serve.stored_keys", "ingest.collect", "ingest.formats.registry"),
    *(
        "ingest.redaction_preview",
        "ingest.state_files",
        "ingest.verify",
        "report.picture",
        "report.status_metrics",
    ),
    *("sandbox.local.sandboxes", "view.export", "view.server"),
)
"""Modules that commands import when they need them, with what stands on these."""
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", **os.environ}
"""What it is started with: conftest.py sets the number of threads, but imports this file before."""


def read_at_start(env: Mapping[str, str] = _ENVIRONMENT) -> dict[str, str]:
    """Those variables that Python, or numpy, reads once, when it starts."""
    return {name: value for name, value in env.items() if name.startswith(_READ_AT_START)}


def can_run(env: Mapping[str, str]) -> bool:
    """Whether a fork of a process that this one started is the same as a process started with this environment."""
    return read_at_start(env) == read_at_start()


def ask(
    path: str, argv: Sequence[str], env: Mapping[str, str], cwd: str, files: Sequence[int]
) -> tuple[socket.socket, int]:
    """Start a command with these open files; returns the connection that its exit code comes by, and its pid."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    limits = [resource.getrlimit(limit) for limit in _LIMITS]
    order = json.dumps({"argv": list(argv), "env": dict(env), "cwd": cwd, "limits": limits}).encode()
    socket.send_fds(connection, [struct.pack("I", len(order))], list(files))
    connection.sendall(order)
    return connection, struct.unpack("i", _exactly(connection, 4))[0]


def result(connection: socket.socket) -> int:
    """The exit code of a command, once it has ended; negative for a signal."""
    with connection:
        return struct.unpack("i", _exactly(connection, 4))[0]


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise ConnectionError("the process that starts commands has ended")
        data += part
    return data


def _serve(path: str) -> None:
    """Fork a process for each connection; returns in those processes only, when `main` is to be called."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(16)
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps those that wait for a command
        os.write(1, b"ready\n")
        poll = select.poll()
        poll.register(listener, select.POLLIN)
        poll.register(0, select.POLLIN)
        while True:
            ready = {file for file, _ in poll.poll()}
            if 0 in ready:  # whoever started this process has ended
                os._exit(0)
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    # The process in between waits for the command, so that commands can run side by side.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    head, files, _, _ = socket.recv_fds(connection, 4, 3)
    order = json.loads(_exactly(connection, struct.unpack("I", head)[0]))
    if pid := os.fork():
        for file in files:
            os.close(file)
        with contextlib.suppress(OSError):  # whoever asked may have gone
            connection.sendall(struct.pack("i", pid))
            connection.sendall(struct.pack("i", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
        os._exit(0)
    connection.close()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    for limit, (soft, hard) in zip(_LIMITS, order["limits"], strict=True):
        resource.setrlimit(limit, (soft, hard))
    os.environ.clear()
    os.environ.update(order["env"])
    time.tzset()
    os.chdir(order["cwd"])
    sys.argv[:] = order["argv"]


def _import_commands() -> None:
    """Import what commands need, but for what starts threads: those do not outlive a fork."""
    import gc
    import io
    from importlib import import_module

    from understudy import plugins
    from understudy.cli import app

    for module in sorted({module for module, _ in app._COMMANDS.values()}):
        import_module(f"understudy.cli.commands.{module}")
    for module in _IMPORTED_LATER:
        import_module(f"understudy.{module}")
    for name in plugins.names("exports"):
        plugins.load("exports", name)
    with contextlib.suppress(ImportError):
        import_module("numpy")
    with contextlib.redirect_stdout(io.StringIO()):  # typer imports more when it reads the first command line
        app.app(["states", "--help"], standalone_mode=False)
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a process with threads must not be forked"
    assert not _READ_ON_IMPORT & set(sys.modules), "these must see the environment of the command"
    gc.collect()
    gc.freeze()


def _run_command() -> None:
    """Run the command and end as Python does, but for freeing all that was imported, which takes longest.

    Each page of memory that is shared with the process which imported it would be copied for that.
    """
    import atexit
    import threading

    from understudy.cli.main import main

    code: object = None
    try:
        main()
    except SystemExit as end:
        code = end.code
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if not (code is None or isinstance(code, int)):
        print(code, file=sys.stderr)  # noqa: T201
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _be_understudy(path: str) -> None:
    """Run a command in a fork, on the files of this process, and end as it does."""
    argv = ["understudy", *sys.argv[1:]]
    connection, pid = ask(path, argv, os.environ, str(Path.cwd()), (0, 1, 2))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = result(connection)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if SOCKET in os.environ:
        _be_understudy(os.environ[SOCKET])
    _import_commands()
    _serve(sys.argv[1])
    _run_command()
