"""What several tests need: small tasks of our own, and the real CLI where it is installed."""

from __future__ import annotations

import asyncio
import atexit
import functools
import importlib
import importlib.util
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from understudy.store import Store
from understudy.types import Files, PytestChecks, Task

from support import warm

UNDERSTUDY = Path(sys.executable).with_name("understudy")

# An agent in plain Python: so many calls through the gateway, the id of each answer noted in a file.
CLIENT = """
import http.client, json, os, socket, sys
instruction = sys.stdin.read()

class Gateway(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(os.environ["UNDERSTUDY_GATEWAY_SOCKET"])

for turn in range(int(sys.argv[1])):
    body = {"model": "m", "max_tokens": 64, "messages": [{"role": "user", "content": f"{turn} {instruction}"}]}
    gateway = Gateway("localhost")
    gateway.request("POST", "/v1/messages", json.dumps(body), {
        "authorization": "Bearer " + os.environ["UNDERSTUDY_API_KEY"], "anthropic-version": "2023-06-01"})
    answer = json.loads(gateway.getresponse().read())
    with open(sys.argv[2], "a") as seen:
        seen.write(answer["id"] + "\\n")
"""


def calc_task(number: int = 0) -> Task:
    """A task of one file and one hidden test; every number makes another bug, statement and gold patch."""
    step = number + 1
    body = f'"""Arithmetic."""\n\n\ndef shift(x):\n    return x - {step}\n\n\ndef same(x):\n    return x\n'
    visible = "def test_same():\n    assert same(3) == 3\n"
    hidden = f"def test_shift():\n    assert shift(1) == {1 + step}\n"
    return Task(
        instance_id=f"calc-{number}",
        repo="example/calc",
        instruction=f"`calc.shift(x)` must return x + {step}, but shift(1) gives {1 - step}. Mend calc.py.",
        source=Files({"calc.py": body, "test_calc.py": f"from calc import same\n\n\n{visible}"}),
        checks=PytestChecks(
            files={"test_calc.py": f"from calc import same, shift\n\n\n{visible}\n\n{hidden}"},
            fail_to_pass=("test_calc.py::test_shift",),
            pass_to_pass=("test_calc.py::test_same",),
        ),
        gold_patch="--- a/calc.py\n+++ b/calc.py\n@@ -2,7 +2,7 @@\n \n \n def shift(x):\n"
        f"-    return x - {step}\n+    return x + {step}\n \n \n def same(x):\n",
    )


@functools.cache
def warm_socket() -> str:
    """The socket of a process that forks itself for each command; it ends with this one."""
    directory = tempfile.mkdtemp(prefix="understudy-warm-")
    path = f"{directory}/socket"
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-P", warm.__file__, path], stdin=pipe, stdout=pipe)
    assert process.stdin is not None and process.stdout is not None
    assert process.stdout.readline() == b"ready\n"

    def end() -> None:
        process.communicate()
        shutil.rmtree(directory)

    atexit.register(end)
    return path


def understudy(
    *arguments: object,
    env: dict[str, str] | None = None,
    inherit: bool = True,
    cwd: Path | None = None,
    timeout: float = 240,
) -> subprocess.CompletedProcess[str]:
    """Run the command line as a person would, in a process of its own.

    Without `inherit`, `env` is all it has, beside what Python itself reads.
    """
    command = [str(UNDERSTUDY), *map(str, arguments)]
    environment = {**(os.environ if inherit else warm.read_at_start()), **(env or {})}
    if not warm.can_run(environment):
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            env=environment,
            cwd=cwd,
            timeout=timeout,
            check=False,
        )
    (out, out_end), (err, err_end) = os.pipe(), os.pipe()
    with (
        Path(os.devnull).open() as nothing,
        os.fdopen(out) as stdout,
        os.fdopen(err) as stderr,
        ThreadPoolExecutor(2) as pool,
    ):
        try:
            files = (nothing.fileno(), out_end, err_end)
            connection, pid = warm.ask(warm_socket(), command, environment, str(cwd or Path.cwd()), files)
        finally:
            os.close(out_end)
            os.close(err_end)
        texts = pool.submit(stdout.read), pool.submit(stderr.read)
        connection.settimeout(timeout)
        try:
            code = warm.result(connection)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(command, code, *(text.result() for text in texts))


def close_pipes(process: asyncio.subprocess.Process) -> None:
    """Close our ends of a process that has ended: one of its children may hold the others.

    Else the garbage collector finds an unclosed transport in some later test, and warns there.
    """
    process._transport.close()  # type: ignore[attr-defined]


def kills(usual: int) -> int:
    """How often a test kills what it tests, at random moments; CONTRIBUTING.md says when there have to be more."""
    return int(os.environ.get("UNDERSTUDY_TEST_KILLS", usual))


def example_count(full: int) -> int:
    """How many examples of `full` a property is tried with; CONTRIBUTING.md says when there have to be more."""
    return max(1, round(full * float(os.environ.get("UNDERSTUDY_TEST_EXAMPLES", "0.2"))))


@contextmanager
def files_of_at_most(size: int) -> Generator[None]:
    """No file can grow beyond so many bytes, as if the disk were full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def wait_for(happened: Callable[[], bool], process: subprocess.Popen[str], seconds: float = 60) -> None:
    """Wait until something has happened; fails when the process ends before, or it takes too long."""
    deadline = time.monotonic() + seconds
    while not happened():
        if process.poll() is not None:
            pytest.fail(f"it ended with exit code {process.returncode}: {process.communicate()}")
        assert time.monotonic() < deadline, f"nothing happened within {seconds} s"
        time.sleep(0.05)


async def until(happened: Callable[[], object], seconds: float = 60) -> None:
    """Wait for what happens behind a socket, or in another process."""
    async with asyncio.timeout(seconds):
        while not happened():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def statuses(out: Path) -> Counter[str]:
    """How many rollouts of a run that may not have begun yet are in each state."""
    if not (out / "store.db").exists():
        return Counter()
    with Store.open(out, create=False) as store:
        return Counter(rollout.status for rollout in store.runs.rollouts())


def require(problems: list[str]) -> None:
    """Skip the test when the machine lacks something; in CI, where set-up has run, that is a failure."""
    if problems and os.environ.get("CI"):
        pytest.fail("; ".join(problems))
    if problems:
        pytest.skip("; ".join(problems))


class LazyModule:
    """A module that is imported when a name of it is first used.

    Every process that runs tests imports all files of tests, and few of them need torch and what stands on it.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks at these of every name of a file, and must not begin the import
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


class LazyName:
    """A function or class of a module, which is imported when it is called or an attribute of it is read."""

    def __init__(self, module: str, name: str) -> None:
        self._module, self._name = module, name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._resolved(), name)

    def __call__(self, *arguments: Any, **more: Any) -> Any:
        return self._resolved()(*arguments, **more)

    def _resolved(self) -> Any:
        return getattr(importlib.import_module(self._module), self._name)


def lazily(module: str, *names: str) -> list[Any]:
    """Functions and classes of a module of ours that imports torch; see `LazyModule`."""
    return [LazyName(module, name) for name in names]


@functools.cache
def imports_torch(module: ModuleType) -> bool:
    """Whether a file of tests imports torch: it names it by `lazily` or `optional`, or makes a model."""
    names = vars(module)
    lazy = [value for value in names.values() if isinstance(value, LazyModule | LazyName)]
    return "make_model" in names or any(isinstance(each, LazyName) or each._name == "torch" for each in lazy)


def optional(*names: str) -> Any:
    """The first of these packages, imported when it is used; the file's tests are skipped where one is missing."""
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"could not import {missing[0]!r}", allow_module_level=True)
    return LazyModule(names[0])
