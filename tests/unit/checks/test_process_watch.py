"""The watch over a Python that starts with it, without a sandbox: what it sends, and what it leaves alone."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy.checks.runtime_events import SEPARATE_OUTPUT, WATCH_MOUNT, read_processes
from understudy.sandbox.base import Completed

START = f'{SEPARATE_OUTPUT}export UNDERSTUDY_WATCH_PIPE="$(readlink /proc/self/fd/8)"\nexec "$@"\n'


def run_watched(
    program: str,
    *,
    tests: tuple[str, ...] = (),
    rewards: tuple[str, ...] = (),
    walled: bool = False,
    path: tuple[str, ...] = (),
) -> Completed:
    """The end of a Python that ran `program`, with exit code 0; the evidence is its stderr."""
    env = {
        "PATH": os.environ["PATH"],
        "PYTHONDONTWRITEBYTECODE": "1",  # else the next run opens no source
        "PYTHONPATH": ":".join((str(WATCH_MOUNT.source), *path)),
        "UNDERSTUDY_WATCH": "\n".join(
            ("/nowhere", "1" if walled else "", *map(str, (len(rewards), len(tests))), *rewards, *tests)
        ),
    }
    command = ["/bin/sh", "-c", START, "sh", sys.executable, "-c", program]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        output = process.stdout.read()  # to its end, so that nobody reads the evidence while the program runs
        evidence = process.stderr.read()
    assert process.returncode == 0, output
    return Completed(0, output, evidence, 0.0)


def rules(done: Completed) -> list[str]:
    return [line.split()[3] for line in done.stderr.decode().splitlines() if line]


def events(done: Completed) -> set[tuple[str, str]]:
    return {(each.rule, each.path.rpartition("/")[2]) for each in read_processes(done, finished=True)}


CLOSES_DESCRIPTORS = """\
import os, subprocess, sys
os.closerange(3, 100)
subprocess.run(["true"], check=True)
"""
OPENS_ANOTHER_FILE = """\
os.dup2(os.open(PLACE, os.O_RDWR | os.O_CREAT), 8, inheritable=True)
listing = "import os; print(sorted(map(int, os.listdir('/proc/self/fd')))[-1])"
assert subprocess.check_output([sys.executable, "-c", listing], env={}, text=True) == "3\\n"
import gc
gc.get_objects()
"""


def test_a_program_that_closes_all_descriptors_is_not_disturbed_by_the_watch(tmp_path: Path) -> None:
    assert rules(run_watched(CLOSES_DESCRIPTORS)) == ["start"]
    other = tmp_path / "other"
    run_watched(CLOSES_DESCRIPTORS + OPENS_ANOTHER_FILE.replace("PLACE", repr(str(other))))
    assert other.read_bytes() == b""


def test_a_process_is_watched_without_the_wall_where_ctypes_is_missing(tmp_path: Path) -> None:
    (tmp_path / "ctypes.py").write_text("raise ImportError('No module named _ctypes')\n")
    done = run_watched("", rewards=(f"{tmp_path}/reward.txt",), walled=True, path=(str(tmp_path),))
    assert rules(done) == ["start", "reward-open", "end"]


def test_a_process_is_watched_before_the_directory_of_the_reward_exists(tmp_path: Path) -> None:
    for walled in (False, True):
        sent = rules(run_watched("", rewards=(f"{tmp_path}/logs/reward.txt",), walled=walled))
        assert (sent[0], sent[-1]) == ("start", "end")


WITHHOLDS = """\
import os, sys
listdir = os.listdir
os.listdir = lambda path: [*listdir(path), "removed-by-now"]
sys.path.append({watch!r})
import landlock
print(landlock.deny_writing_below({{{place!r}}}))
"""


def test_a_file_that_is_removed_meanwhile_does_not_prevent_the_wall(tmp_path: Path) -> None:
    directory = tmp_path / "rewards"
    directory.mkdir()
    program = WITHHOLDS.format(watch=str(WATCH_MOUNT.source), place=str(directory))
    plain = program.replace(', "removed-by-now"', "")
    if subprocess.check_output([sys.executable, "-c", plain], text=True) != "True\n":
        pytest.skip("this kernel has no Landlock")
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "True\n"


def test_the_startup_file_uses_only_syntax_that_old_pythons_parse() -> None:
    tree = ast.parse((WATCH_MOUNT.source / "sitecustomize.py").read_text())
    calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
    passed_on = {id(argument) for call in calls for argument in call.args}
    newer = (ast.JoinedStr, ast.AnnAssign, ast.NamedExpr, ast.Nonlocal, ast.AsyncFunctionDef, ast.Await)
    for node in ast.walk(tree):
        assert not isinstance(node, newer), ast.dump(node)
        assert not isinstance(node, ast.Starred) or id(node) in passed_on, f"line {node.lineno}"
        if isinstance(node, ast.arguments):
            assert not node.kwonlyargs and not node.posonlyargs
            assert not any(each.annotation for each in node.args)


RUNS_TESTS = """\
import gc, importlib.machinery, importlib.util, os, subprocess, sys, sysconfig
import test_it
"""
TAKES_BACK = """\
gc.get_objects()
pipe = os.open("/proc/self/fd/8", os.O_RDONLY | os.O_NONBLOCK)
lines = os.read(pipe, 1 << 16)
assert b" objects-searched " in lines
os.close(pipe)
os.write(8, b"".join(line for line in lines.splitlines(True) if b" objects-searched " not in line))
"""
REPLACES = TAKES_BACK.replace(
    'b"".join(line for line in lines.splitlines(True) if b" objects-searched " not in line)',
    'lines.replace(b"objects-searched", b"seen")',
)
READS_IN_A_LOADER = """\
class Loader(importlib.machinery.SourceFileLoader):
    def source_to_code(self, data, path):
        return compile("", "<nothing>", "exec")
spec = importlib.util.spec_from_loader("other", Loader("other", test_it.__file__))
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""
LEADS_OUT = """\
name = sysconfig.get_path("purelib") + "/.." * 20 + PLACE + "/search.py"
spec = importlib.util.spec_from_file_location("search", name)
spec.loader.exec_module(importlib.util.module_from_spec(spec))
"""


@pytest.fixture
def place(tmp_path: Path) -> str:
    (tmp_path / "test_it.py").write_text("")
    (tmp_path / "search.py").write_text("import gc\ngc.get_objects()\n")
    return str(tmp_path)


def run_tests(directory: str, more: str) -> set[tuple[str, str]]:
    program = RUNS_TESTS + more.replace("PLACE", repr(directory))
    return events(run_watched(program, tests=(f"{directory}/test_it.py",), path=(directory,)))


def test_removing_evidence_from_the_pipe_is_reported_as_an_ended_watch(place: str) -> None:
    usual = run_tests(place, "gc.collect()\n")  # the program itself imports the tests here
    assert usual == {("tests-read", "<string>")}
    for program in (TAKES_BACK, REPLACES):
        assert run_tests(place, program) == usual | {("watch-ended", "")}


def test_a_forked_process_that_exits_is_not_reported_as_an_ended_watch(place: str) -> None:
    forks = "if os.fork() == 0:\n    gc.get_objects()\n    os._exit(0)\nos.wait()\n"
    assert run_tests(place, forks) == {("tests-read", "<string>"), ("objects-searched", "<string>")}


def test_tested_code_that_imports_the_tests_is_reported_as_reading_them(place: str) -> None:
    (Path(place) / "search.py").write_text(RUNS_TESTS + READS_IN_A_LOADER)
    program = "import unittest\nunittest.main('test_it', argv=[''], exit=False)\nimport search\n"
    done = run_watched(program, tests=(f"{place}/test_it.py",), path=(place,))
    assert events(done) == {("tests-read", "<string>"), ("tests-read", "search.py")}


def test_code_at_a_path_that_leaves_the_libraries_counts_as_tested_code(place: str) -> None:
    assert ("objects-searched", "search.py") in run_tests(place, LEADS_OUT)


def test_another_process_that_leaves_early_is_reported_beside_the_test_run(place: str) -> None:
    tests = run_watched(RUNS_TESTS, tests=(f"{place}/test_it.py",), path=(place,))
    other = run_watched("import os\nos._exit(0)\n")
    both = Completed(0, b"", tests.stderr + other.stderr, 0.0)
    assert events(both) - events(tests) == {("watch-ended", "another process"), ("program-left", "<string>")}
    child = "subprocess.run([sys.executable, '-c', 'import os; os._exit(0)'])\n"
    assert run_tests(place, child) == events(tests) | {("program-started", "<string>")}


def test_an_early_exit_is_reported_with_its_location(place: str) -> None:
    def exit_paths(more: str) -> set[str]:
        return {path for rule, path in run_tests(place, more) if rule == "program-left"}

    assert exit_paths("import json\nif json:\n    [].sort()\n") == set()
    exits = ["sys.exit()\n", "[].sort()\nsys.exit()\n", "[].sort()\nraise SystemExit\n"]
    assert len(set.union(*map(exit_paths, exits))) == len(exits)


def test_truncated_evidence_is_reported_as_an_ended_watch(place: str) -> None:
    done = run_watched(RUNS_TESTS, tests=(f"{place}/test_it.py",), path=(place,))
    assert ("watch-ended", "") in events(replace(done, truncated=True))
    noisy = replace(done, stdout=b"x" * 2 * len(done.stderr), truncated=True)
    assert events(noisy) == events(done)
