"""A child process leaves nothing open, also when what is to kill it fails."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
from collections.abc import Callable, Coroutine
from functools import partial
from pathlib import Path

import pytest
import uvloop

from understudy.errors import SandboxError
from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes
from understudy.sandbox.process import run_process, run_to_completion
from understudy.sandbox.spawn import spawn

from support import until


def has_died(pid: int) -> bool:
    """Whether a process is gone, or has ended and waits for its parent."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return True


async def test_a_kill_that_fails_leaves_no_process_and_no_open_pipe() -> None:
    killed: list[int] = []

    def fail(leader: int) -> None:
        killed.append(leader)
        raise OSError("its sandbox is closed")

    settings = {"timeout_s": 0.01, "output_bytes": 1, "stdin": b"", "env": {"PATH": "/usr/bin:/bin"}}
    run = partial(run_process, ["sleep", "60"], kill=fail, **settings)
    with pytest.raises(OSError, match="its sandbox is closed"):
        await run_to_completion(run)
    await until(lambda: has_died(killed[0]))
    gc.collect()  # a transport that is still open would warn here, and a warning fails the test


@pytest.mark.usefixtures("isolation")
async def test_a_command_whose_sandbox_was_closed_is_killed_without_its_proc(tmp_path: Path) -> None:
    sandbox = await LocalSandboxes().open(SandboxSpec(tree=tmp_path))
    running = asyncio.create_task(sandbox.run(["sh", "-c", "echo begun > started; sleep 60"], timeout_s=30))
    while True:
        try:
            await sandbox.read("started")
            break
        except FileNotFoundError:
            await asyncio.sleep(0.01)
    await sandbox.close()
    with pytest.raises(SandboxError):
        await running
    gc.collect()


class Ended(asyncio.SubprocessProtocol):
    """What a child wrote, and its end."""

    def __init__(self) -> None:
        self.output = {1: b"", 2: b""}
        self.closed = asyncio.Event()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        self.output[fd] += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed.set()


BOTH_LOOPS = pytest.mark.parametrize("runner", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])


@BOTH_LOOPS
def test_a_child_starts_with_default_signals_its_descriptors_and_a_session_of_its_own(
    runner: Callable[[Coroutine[None, None, None]], None], tmp_path: Path
) -> None:
    script = "cat; cat /proc/self/fd/9; echo err >&2; pwd; ls /proc/self/fd; "
    script += "sed -n 's/^Sig\\(Ign\\|Blk\\)://p' /proc/self/status"

    async def main() -> None:
        watch = Ended()
        with (tmp_path / "in").open("w+b") as stdin, (tmp_path / "more").open("w+b") as more:
            for file in (stdin, more):
                file.write(file.name.encode() + b"\n")
                file.seek(0)
            leak = os.open(tmp_path, os.O_RDONLY)  # not inheritable, as all that Python opens
            command = script.replace("/fd/9;", f"/fd/{more.fileno()};")
            child = spawn(
                ["sh", "-c", command],
                watch,
                stdin=stdin,
                env={"PATH": "/usr/bin:/bin"},
                cwd=str(tmp_path),
                pass_fds=[more.fileno()],
            )
            assert os.getsid(child.pid) == child.pid
            await watch.closed.wait()
            os.close(leak)
            child.close()
            allowed = {0, 1, 2, 3, more.fileno()}
        first, second, where, *descriptors, blocked, ignored = watch.output[1].decode().split()
        assert (first, second, where) == (str(tmp_path / "in"), str(tmp_path / "more"), str(tmp_path))
        assert watch.output[2] == b"err\n" and child.returncode == 0
        assert set(map(int, descriptors)) <= allowed
        of_libc = 1 << 31 | 1 << 32  # signals that no program can name
        assert int(ignored, 16) & ~of_libc == int(blocked, 16) == 0

    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as in a background job of a shell
    try:
        runner(main())
    finally:
        signal.signal(signal.SIGINT, before)


@BOTH_LOOPS
def test_a_child_that_waits_for_its_stdin_ends_when_that_is_closed(
    runner: Callable[[Coroutine[None, None, None]], None],
) -> None:
    async def main() -> None:
        watch = Ended()
        child = spawn(["sh", "-c", "echo ready; cat; exit 3"], watch, stdin=None, env={"PATH": "/usr/bin:/bin"})
        await until(lambda: watch.output[1] == b"ready\n")
        assert not watch.closed.is_set()
        child.close_stdin()
        await watch.closed.wait()
        assert child.returncode == 3
        child.close()
        killed = spawn(["sleep", "60"], watch := Ended(), stdin=None, env={"PATH": "/usr/bin:/bin"})
        killed.close()
        await until(lambda: killed.returncode is not None)
        assert killed.returncode == -signal.SIGKILL

    runner(main())


@pytest.mark.parametrize("name", ["program", "name=value"])
async def test_in_a_directory_a_program_gets_its_variables_and_none_is_among_its_arguments(
    tmp_path: Path, name: str
) -> None:
    program = tmp_path / name
    program.write_text("#!/bin/sh\ncat /proc/$$/environ /proc/$$/cmdline\nread line\n")
    program.chmod(0o755)
    env = {"PATH": "/usr/bin:/bin", "KEY": "sk-secret", "ODD-NAME": "x y"}
    child = spawn([f"./{name}", "a b"], watch := Ended(), stdin=None, env=env, cwd=str(tmp_path))
    await until(lambda: watch.output[1].endswith(b"a b\0"))
    arguments = Path(f"/proc/{child.pid}/cmdline").read_bytes()  # noqa: ASYNC240
    child.close_stdin()
    await watch.closed.wait()
    child.close()
    shown = {each for each in watch.output[1].decode().split("\0") if "=" in each and each != f"./{name}"}
    # /bin/sh, which runs the script, may add its own.
    assert {each for each in shown if each.partition("=")[0] not in ("PWD", "OLDPWD", "SHLVL", "_")} == {
        f"{key}={value}" for key, value in env.items()
    }
    assert b"secret" not in arguments and b"a b" in arguments


@pytest.mark.parametrize(
    ("argv", "cwd", "error"),
    [
        (["understudy-no-such-program"], None, FileNotFoundError),
        (["/nowhere/program"], "/", FileNotFoundError),
        (["true"], "/nowhere", FileNotFoundError),
        (["/etc/passwd"], None, PermissionError),
        (["/etc/passwd"], "/", PermissionError),
        (["true", "a\0b"], None, ValueError),
        (["true", "x" * (1 << 22)], None, OSError),
    ],
)
async def test_what_cannot_be_started_raises_and_leaves_no_descriptor(
    argv: list[str], cwd: str | None, error: type[Exception]
) -> None:
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(error):
        spawn(argv, Ended(), stdin=None, env={"PATH": "/usr/bin:/bin"}, cwd=cwd)
    assert set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
