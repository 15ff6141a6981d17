"""The parsers of the `swebench` package, for other languages: run in a process of their own, within limits.

Importing the package's harness loads a container client and more that no parser needs, so the process steps round
that; and what it reads is hostile, so it has little time and memory and none of ours.
"""

from __future__ import annotations

import functools
import importlib.util
import subprocess
import sys
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.errors import GraderError

_TIMEOUT_S = 120


_MEMORY_BYTES = 4 << 30

_PROGRAM = r"""
import json, resource, sys, types
place, order, memory, name, instance = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_AS, (int(memory), int(memory)))
sys.path.append(place)
for package in "swebench", "swebench.harness":
    module = types.ModuleType(package)
    module.__path__ = [place + "/" + package.replace(".", "/")]
    sys.modules[package] = module
from swebench.harness.grading import SUITE_RAN
from swebench.harness.log_parsers import PARSER_REGISTRY
if order == "names":
    answer = {"names": sorted(PARSER_REGISTRY)}
else:
    log = sys.stdin.buffer.read().decode()
    row = types.SimpleNamespace(instance_id=instance, version=instance.rpartition(" ")[2])
    row.instance_id = instance.rpartition(" ")[0]
    statuses = {str(id): str(status) for id, status in PARSER_REGISTRY[name](log, row).items()}
    answer = {"statuses": statuses, "ran": bool(SUITE_RAN.search(log))}
sys.stdout.write(json.dumps(answer))
"""


class UnreadableLog(Exception):
    """A log on which a working parser failed: the fault of the tested code, which wrote the log."""


class _ParserReply(Struct):
    names: list[str] = []
    statuses: dict[str, str] = {}
    ran: bool = False


def package_directory() -> Path | None:
    """The directory that holds the `swebench` package; None when it is not installed."""
    spec = importlib.util.find_spec("swebench")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))).parent


@functools.cache
def names() -> frozenset[str]:
    """The names of the package's parsers. Raises GraderError when it has none that we know how to call."""
    return frozenset(_run_package("names", "", "", b"").names)


def parse(name: str, log: str, instance: str) -> tuple[dict[str, str], bool]:
    """The status of each test id, and whether there are other signs that tests ran.

    `instance` is the instance's id and its version with a space between: some parsers differ by them. Raises
    Unreadable when the parser fails on this log or takes too long, GraderError when it cannot be called at all.
    """
    if name not in names():
        raise GraderError(f"the swebench package in {package_directory()} has no parser {name!r}")
    try:
        answer = _run_package("parse", name, instance, log.encode(errors="replace"))
    except GraderError as error:
        raise UnreadableLog(str(error)) from error
    return answer.statuses, answer.ran


def _run_package(order: str, name: str, instance: str, log: bytes) -> _ParserReply:
    directory = package_directory()
    if directory is None:
        raise GraderError("the swebench package is not installed; expected: pip install 'understudy[swebench]'")
    argv = [sys.executable, "-I", "-c", _PROGRAM, str(directory), order, str(_MEMORY_BYTES), name, instance]
    try:
        done = subprocess.run(argv, input=log, capture_output=True, timeout=_TIMEOUT_S, check=False, env={})
    except subprocess.TimeoutExpired as error:
        raise GraderError(f"the parser {name!r} of swebench did not end in {_TIMEOUT_S} s") from error
    if done.returncode:
        message = done.stderr.decode(errors="replace").strip()[-1000:]
        raise GraderError(f"swebench in {directory} (expected version 5) failed to {order} {name!r}: {message}")
    return msgspec.json.decode(done.stdout, type=_ParserReply)
