"""Reading the output of test suites: the same as the `swebench` package reads, in bounded time and memory."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from understudy.checks.log_parsers import PARSERS, UnreadableLog, check_parser, parse_log, swebench_parsers
from understudy.errors import TaskError

from support import example_count
from support.swebench import Harness, package_directory

DISTINCT = sorted({parser: name for name, parser in PARSERS.items()}.values())


def ours(name: str, log: str) -> dict[str, str]:
    return dict(PARSERS[name](log))


STATUSES = ["PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS"]
WORDS = st.sampled_from(
    [
        *STATUSES,
        *[
            "tests/test_a.py::test_b",
            "test_x[a b - c]",
            "t::p[/abs/olute]",
            "t::p[//x]",
            "t::p[/a/*]",
            "[1]",
            "[100%]",
        ],
        *[
            "t[",
            "]t[x",
            "a]b[c",
            "t[x]]",
            "MouseButton.LEFT",
            "\x1b[31m",
            "\x1b[0m",
            "[32m",
            "test_x (mod.Case)",
            "test_y",
        ],
        *[
            " - ",
            " ... ",
            "ok",
            "OK",
            " OK",
            "FAIL",
            "FAIL:",
            "ERROR:",
            "skipped",
            "F",
            "E",
            "...",
            " silenced).",
            "/",
        ],
        *["Testing against Django installed in '/x'", "Internal Server Error: /", "(0 silenced)", "silenced)."],
        *[
            "System check identified no issues (0 silenced)",
            "--version is equivalent to version",
            "___",
            "_",
            ".py:",
        ],
        *["sympy/core/tests/test_a.py:test_b", "Applying sites.0002_alter_domain_unique...test_no_migrations"],
        *["assert 1 == 2", "\t", "\r", "\x0b", "\x1c", "\u2028", "\u00e9", "\u00a0", "RERUN"],
    ]
)
LINES = st.lists(WORDS, max_size=6).flatmap(
    lambda words: st.sampled_from([" ".join(words), "".join(words), "  " + " ".join(words), " ".join(words) + " "])
)
LOGS = st.lists(LINES, max_size=8).map("\n".join)


@pytest.mark.parametrize("name", DISTINCT)
def test_made_up_logs_are_read_as_the_package_reads_them(harness: Harness, name: str) -> None:
    @settings(max_examples=example_count(500))
    @given(LOGS)
    def same(log: str) -> None:
        expected = harness.parse(name, log)
        assume(expected is not None)
        assert ours(name, log) == expected

    same()


def test_every_parser_of_python_has_the_package_s_name(harness: Harness) -> None:
    names = harness.names()
    assert set(PARSERS) <= set(names)
    assert names.index("parse_log_xarray") and not {"parse_log_jest", "parse_log_gotest"} & set(PARSERS)


SUITE = """
import unittest
import warnings

import pytest


@pytest.mark.parametrize("text", ["plain", "two words", "a - b", "/abs/path", "//x", "uml\\u00e4ut", "[x]", ""])
def test_params(text):
    assert text != "two words"


def test_fails():
    assert {"a": 1} == {"a": 2}


def test_prints():
    print("PASSED not::a_test")
    raise ValueError("PASSED - FAILED")


@pytest.mark.skip(reason="later - or never")
def test_skipped():
    pass


@pytest.mark.xfail(reason="known")
def test_known():
    assert 0


@pytest.mark.xfail
def test_surprise():
    pass


@pytest.fixture
def broken():
    yield
    raise RuntimeError("teardown")


def test_teardown(broken):
    warnings.warn("odd")


@pytest.fixture
def unborn():
    raise RuntimeError("setup")


def test_setup(unborn):
    pass


class TestCase(unittest.TestCase):
    def test_sub(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertNotEqual(n, 1)
"""
MODES = [
    ["-rA"],
    ["-rA", "--tb=no", "-p", "no:cacheprovider", "--no-header"],
    ["-rA", "-vv", "-o", "console_output_style=classic", "--tb=no"],
    ["-rA", "-v"],
    ["-v"],
    ["-q"],
    ["-qq", "-rA"],
    ["-rA", "--color=yes"],
    ["-vv", "--color=yes"],
    ["-p", "xdist", "-rA", "-n", "2"],
    ["-p", "xdist", "-v", "-n", "2"],
    ["-rA", "-s"],
    ["-rA", "--tb=long", "-l"],
    ["-rpf", "-x"],
]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What pytest prints of one suite in many modes."""
    home = tmp_path_factory.mktemp("suite")
    (home / "test_all.py").write_text(SUITE, encoding="utf-8")
    (home / "test_broken.py").write_text("import nothing_of_this_name\n")
    (home / "pytest.ini").write_text("[pytest]\n")
    env = {"PATH": str(Path(sys.executable).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "COLUMNS": "80"}
    logs = []
    for mode in MODES:
        argv = [
            sys.executable,
            "-m",
            "pytest",
            *mode,
            "test_all.py",
            "--continue-on-collection-errors",
            "test_broken.py",
        ]
        done = subprocess.run(argv, cwd=home, env=env, capture_output=True, check=False, timeout=120)
        assert done.returncode in (1, 2), done.stderr.decode()
        logs.append(done.stdout.decode())
    return logs


@pytest.mark.parametrize("name", DISTINCT)
def test_what_pytest_prints_is_read_as_the_package_reads_it(
    harness: Harness, outputs: list[str], name: str
) -> None:
    for output in outputs:
        assert ours(name, output) == harness.parse(name, output)


def test_every_status_of_a_test_is_kept() -> None:
    log = "PASSED a::b\nFAILED a::b - x\nPASSED a::b\nPASSED c::d\nSKIPPED [1] e.py:1: no\n"
    reading = parse_log("parse_log_pytest", log, ["a::b"])
    assert set(reading.tests) == {"a::b"}
    assert (reading.tests["a::b"].last, reading.tests["a::b"].counts) == ("PASSED", {"PASSED": 2, "FAILED": 1})
    assert reading.failures and reading.any_test


def test_a_truncated_test_id_matches_ids_that_begin_with_it() -> None:
    reading = parse_log("parse_log_pytest", "PASSED a::b[c(d]\nPASSED a::bc\n", ["a::b[c("])
    assert set(reading.tests) == {"a::b[c(d]"}


HOSTILE = {
    "parse_log_pytest_options": "PASSED " + "[" * 2_000_000,
    "parse_log_sympy": "_ " + ".py: " * 500_000 + "x",
    "parse_log_django": "x ... Internal Server Error: /" * 100_000
    + "\n"
    + "a ... Testing against Django installed in \n" * 50_000,
    "parse_log_pytest_v2": "PASSED " + "\x1b[1111" * 500_000,
    "parse_log_pytest": "PASSED - " * 500_000,
    "parse_log_seaborn": "FAILED \n" * 500_000,
    "parse_log_matplotlib": "MouseButton.LEFT" * 500_000,
}


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.timeout(60)
def test_no_log_takes_more_than_linear_time(name: str) -> None:
    for _ in PARSERS[name](HOSTILE[name]):
        pass


def test_memory_of_the_parser_is_bounded_by_the_wanted_tests() -> None:
    log = "\n".join(f"PASSED t::x{n}" for n in range(200_000))
    tracemalloc.start()
    reading = parse_log("parse_log_pytest", log, ["t::x5"])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert set(reading.tests) == {"t::x5"}
    assert peak < 1 << 20


def test_an_unknown_parser_is_an_error_that_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [path for path in sys.path if not (Path(path) / "swebench").exists()])
    with pytest.raises(TaskError, match=r"task x: checks\.parser 'parse_log_jest'.*understudy\[swebench\]"):
        check_parser("parse_log_jest", "task x")


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch, harness: Harness) -> None:
    monkeypatch.syspath_prepend(str(package_directory()))
    swebench_parsers.cache_clear()


@pytest.mark.usefixtures("package")
def test_parsers_for_other_languages_are_the_package_s() -> None:
    check_parser("parse_log_gotest", "task x")
    log = "--- PASS: TestA (0.00s)\n--- FAIL: TestB (0.00s)\n"
    reading = parse_log("parse_log_gotest", log, ["TestA", "TestB"], instance="a__b-1 1.2")
    assert {id: statuses.last for id, statuses in reading.tests.items()} == {"TestA": "PASSED", "TestB": "FAILED"}
    with pytest.raises(TaskError, match="parse_log_nothing"):
        check_parser("parse_log_nothing", "task x")


@pytest.mark.usefixtures("package")
def test_a_log_on_which_a_foreign_parser_fails_is_told_apart_from_a_broken_package() -> None:
    with pytest.raises(UnreadableLog):  # this one knows two instances only
        parse_log("parse_log_immutable_js", "x\n", ["a"], instance="a__b-x ")
