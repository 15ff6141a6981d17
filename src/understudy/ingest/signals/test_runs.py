"""Recognises test runs in a turn and how they ended, by the commands and by the summaries that test programs
print.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

from understudy.ingest.signals.calls import LoggedCall, ShellCommand

SuiteResult = Literal["passed", "failed"]

TAIL = 20_000
"""Only this many characters at the end of a result are searched for summaries."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]{0,20}m")


# Summary lines: a substring that must occur in the output, then a pattern. All quantifiers are bounded, so that no
# output makes matching slow. Group `f` counts failures, `e` errors and `p` passes.
_COUNTING = (
    ("Tests", r"^\s{0,8}Tests:?\s{1,12}(?:(?P<f>\d{1,9}) failed)?(?:[,| ]{0,4}\d{1,9} "
              r"(?:skipped|todo|pending))*+(?:[,| ]{0,4}(?P<p>\d{1,9}) passed)?"),
    ("Test ", r"^\s{0,8}Test (?:Suites|Files):?\s{1,12}(?P<f>\d{1,9}) failed"),
    ("passing", r"^\s{0,12}(?P<p>\d{1,9}) passing\b"),
    ("failing", r"^\s{0,12}(?P<f>\d{1,9}) failing\b"),
    ("test result:", r"^test result: ok\. (?P<p>\d{1,9}) passed"),
    ("tests run:", r"^\s{0,12}Summary \[[^\]\n]{1,40}\]\s{1,8}\d{1,9}(?:/\d{1,9})? tests? run:"
                   r" (?P<p>\d{1,9}) passed(?:[^\n]{0,60}?, (?P<f>\d{1,9}) failed)?"),
    ("Tests run:", r"Tests run: (?P<p>\d{1,9}), Failures: (?P<f>\d{1,9}), Errors: (?P<e>\d{1,9})"),
    ("examples", r"^(?P<p>\d{1,9}) examples?, (?P<f>\d{1,9}) failures?"),
    (" runs, ", r"^(?P<p>\d{1,9}) (?:runs|tests), \d{1,9} assertions, (?P<f>\d{1,9}) failures,"
                r" (?P<e>\d{1,9}) errors"),
    ("tests passed,", r"^\d{1,3}% tests passed, (?P<f>\d{1,9}) tests? failed out of (?P<p>\d{1,9})"),
    ("Failed:", r"^\s{0,8}(?:Passed|Failed)!\s{1,4}- Failed:\s{1,8}(?P<f>\d{1,9}), Passed:\s{1,8}(?P<p>\d{1,9})"),
    ("# fail", r"^(?:# |ℹ )fail (?P<f>\d{1,9})"),
    ("pass ", r"^(?:# |ℹ )pass (?P<p>\d{1,9})"),
    (" pass", r"^\s{0,4}(?P<p>\d{1,9}) pass\s*$"),
    (" fail", r"^\s{0,4}(?P<f>\d{1,9}) fail\s*$"),
    ("failures", r"^(?:Finished in [^\n]{1,80}\n)?(?P<p>\d{1,9}) (?:tests?|doctests?)(?:, \d{1,9} "
                 r"(?:tests?|doctests?|properties))?, (?P<f>\d{1,9}) failures?"),
    ("passed |", r"^(?:ok|FAILED) \| (?P<p>\d{1,9}) passed[^|\n]{0,60} \| (?P<f>\d{1,9}) failed"),
    ("Executed ", r"Executed (?P<p>\d{1,9}) tests?, with (?:\d{1,9} tests? skipped and )?(?P<f>\d{1,9}) failures?"
                  ""),
    ("passed (", r"^\s{0,8}(?P<p>\d{1,9}) passed \([\d.]{1,8}m?s"),
    (" failed", r"^\s{0,8}(?P<f>\d{1,9}) failed\s*$"),
    ("tests finished", r"tests finished: (?P<p>\d{1,9}) passed(?:, (?P<f>\d{1,9}) failed)?[^\n]{0,100}, in "),
)  # fmt: skip
_PASSING = (
    ("Ran ", r"^Ran [1-9]\d{0,8} tests? in [\d.]{1,12}s\s{1,4}(?:OK\b)"),
    ("ok  ", r"^ok  \t?\s{0,4}\S{1,300}\s{1,8}(?:\(cached\)|[\d.]{1,12}s)(?!\s\[no tests to run\])"),
    ("BUILD SUCCESSFUL", r"^BUILD SUCCESSFUL\b"),
    ("OK (", r"^OK \([1-9]\d{0,8} tests?, \d{1,9} assertions?\)"),
    ("OK, but", "^OK, but (?:there were issues|incomplete|some tests)"),
    ("ok ", r"^ok \d{1,9}\b(?![^\n]{0,300}# SKIP)"),
    ("congratulations", r"^\s{0,4}congratulations :\)"),
    ("All tests", r"^All tests passed!?\s*$|^\d\d:\d\d \+\d{1,9}: All tests passed!"),
)  # fmt: skip
_FAILING = (
    ("during collection", r"^!{3,200} Interrupted: \d{1,6} errors? during collection"),
    ("FAILED (", r"^FAILED \((?:(?:failures|errors|skipped|expected failures|unexpected successes)=\d{1,9}"
                 r"(?:, )?){1,5}\)"),
    ("--- FAIL", r"^\s{0,12}--- FAIL: "),
    ("FAIL", r"^FAIL(?:\s{1,4}\S{1,300}\s{1,4}(?:[\d.]{1,12}s|\[(?:build|setup) failed\])|\s*$)"),
    ("test result:", r"^test result: FAILED\."),
    ("BUILD ", r"^(?:\[ERROR\] |\[INFO\] )?BUILD (?:FAILURE|FAILED)\b"),
    ("Assertions", r"^(?:FAILURES|ERRORS)!\s{1,4}Tests: \d"),
    ("not ok", r"^not ok \d{1,9}\b(?![^\n]{0,300}# (?:TODO|SKIP))"),
    ("evaluation failed", r"^\s{0,4}evaluation failed :\("),
    ("Some tests", r"Some tests failed\.\s*$"),
)  # fmt: skip
_PYTEST = (
    r"^[= ]{0,200}(?:\d{1,9} (?:failed|passed|skipped|deselected|xfailed|xpassed|errors?|warnings?|rerun"
    r"|subtests passed)(?:, )?){1,10} in \d[\d.]{0,12}s?.{0,60}$"
)


def _by_counts(match: re.Match[str]) -> SuiteResult | None:
    counts = {name: int(number or 0) for name, number in match.groupdict().items()}
    if counts.get("f") or counts.get("e"):
        return "failed"
    return "passed" if counts.get("p") else None


def _by_words(match: re.Match[str]) -> SuiteResult | None:
    line = match[0]
    if re.search(r"\b[1-9]\d{0,8} (?:failed|errors?)\b", line):
        return "failed"
    return "passed" if re.search(r"\b[1-9]\d{0,8} (?:passed|xfailed|xpassed)\b", line) else None


_JUDGES: tuple[tuple[Sequence[tuple[str, str]], Callable[[re.Match[str]], SuiteResult | None]], ...] = (
    (((" in ", _PYTEST),), _by_words),
    (_COUNTING, _by_counts),
    (_PASSING, lambda _: "passed"),
    (_FAILING, lambda _: "failed"),
)
_SUMMARIES = [
    (sign, re.compile(pattern, re.MULTILINE), judge) for lines, judge in _JUDGES for sign, pattern in lines
]


def result_from_output(text: str) -> SuiteResult | None:
    """Return the result of a test run by the end of its output, or None if no known test program printed a
    summary.
    """
    tail = text[-TAIL:]
    if "\x1b" in tail:
        tail = _ESCAPES.sub("", tail)
    tail = tail.replace("\r\n", "\n")
    results: set[SuiteResult] = set()
    for sign, pattern, judge in _SUMMARIES:
        if sign not in tail:
            continue
        for match in pattern.finditer(tail):
            if (result := judge(match)) is not None:
                results.add(result)
                if result == "failed":
                    return result
    return "passed" if results else None


# Programs that run tests whatever their arguments.
_TEST_PROGRAMS = frozenset((
    "pytest", "py.test", "tox", "nox", "nosetests", "nose2", "trial", "stestr", "ctest", "phpunit", "pest",
    "paratest", "rspec", "jest", "vitest", "mocha", "ava", "cypress", "gotestsum", "bats", "busted", "prove",
    "testem", "karma", "wtr", "jasmine", "tap", "lit", "ginkgo", "runtests.py", "runtests", "runtests.sh",
))  # fmt: skip
# Programs that run tests with one of these subcommands. Package scripts may also follow `run`.
_SUBCOMMANDS = {
    name: frozenset(subcommands.split())
    for names, subcommands in (
        ("go zig hatch playwright xcodebuild artisan deno dotnet swift flutter dart stack cabal", "test"),
        ("forge hardhat truffle mix sbt lein bazel meson composer", "test"),
        ("rails", "test spec"),
        ("cargo", "test nextest t"),
        ("mvn mvnw mvn.cmd", "test verify integration-test surefire:test"),
        ("gradle gradlew gradlew.bat", "test check connectedCheck connectedAndroidTest"),
        ("npm pnpm yarn bun", "test t tst"),
        ("make gmake just task ninja rake", "test tests check unittest unittests unit-test spec"),
        ("node", "--test"),
        ("cypress", "run"),
    )
    for name in names.split()
}
# Every script that runs tests contains one of these words, so that others need not be parsed.
_SCRIPT_WORDS = (
    "test", "spec", "check", "tox", "nox", "jest", "mocha", "karma", "cypress", "trial", "bats", "busted", "prove",
    "ginkgo", "nose", "pest", "wtr", "jasmine", "verify", "ava ", "tap ", "lit ", "cargo t", "npm t",
)  # fmt: skip
_SCRIPTS = frozenset(("npm", "pnpm", "yarn", "bun", "composer", "deno", "make", "just", "task", "rake", "hatch"))
_TEST_SCRIPT = re.compile(r"(?:tests?|specs?|unit|e2e|check)(?:[:_-][\w:.-]{0,60}|)|[\w.-]{1,40}[:_-]tests?")
_GRADLE_TASK = re.compile(r"(?::[\w:-]{1,80}:)?(?:\w{0,60}Test|test|check)")
_PYTHON = re.compile(r"(?:python|pypy|py)[\d.]*(?:\.exe)?")
_MODULES = frozenset((
    "pytest", "unittest", "nose", "nose2", "tox", "nox", "django", "trial", "stestr", "testtools.run",
))  # fmt: skip
_TEST_FILE = re.compile(r"(?:test_[\w.-]{0,100}|[\w.-]{0,100}_tests?|run_?tests?|tests?)\.py")
# Arguments with which a program prints something instead of running tests.
_IDLE = frozenset((
    "--help", "-h", "--version", "-V", "--collect-only", "--co", "--fixtures", "--markers", "--setup-plan",
    "--listTests", "--list-tests", "-list", "--list", "--no-run", "-DskipTests", "--dry-run", "--showConfig", "-N",
    "--listenvs", "-l", "--init",
))  # fmt: skip
_MAY_BE_MORE = frozenset(("-N", "-l", "-h", "-V", "--list", "-list"))  # these mean something else to some programs

# Output showing that no test was run at all.
_NOT_RUN = (
    "command not found", "is not recognized as", "No module named pytest", "No module named unittest",
    "No module named tox", "no such command", "Missing script:", "No rule to make target", "missing script: test",
    "running in background with ID", "Command running in background", "no test specified", "No tests found",
    "no tests ran", "No such file or directory", "error: unrecognized arguments", "can't open file",
    "could not find `Cargo.toml`", "Could not read package.json",
)  # fmt: skip
_CUT_SHORT = frozenset((124, 137, 143, 130))


def result_of_tests(calls: Iterable[LoggedCall]) -> SuiteResult | None:
    """Return the result of the tests that calls ran: failed if any failed, None if none ran or no result is
    known.
    """
    results = {result for call in calls if call.completed and (result := _result_of(call)) is not None}
    return "failed" if "failed" in results else "passed" if results else None


def _result_of(call: LoggedCall) -> SuiteResult | None:
    script = call.script
    if not any(sign in script for sign in _SCRIPT_WORDS):
        return None
    test_commands = [(index, command) for index, command in enumerate(call.shell()) if runs_tests(command)]
    if not test_commands:
        return None
    reported = result_from_output(call.text or "")
    if reported is not None:
        return reported
    text = (call.text or "")[-TAIL:]
    if call.code is None or call.code in _CUT_SHORT or any(sign in text for sign in _NOT_RUN):
        return None
    index, command = test_commands[-1]
    if any(_file_of(test_command) for _, test_command in test_commands) and call.code == 0:
        return None  # a test script may print that it failed and still exit with 0
    return _by_code(call.code, command, call.shell()[index + 1 :])


def _by_code(code: int, command: ShellCommand, later_commands: list[ShellCommand]) -> SuiteResult | None:
    """Derive the result of a test command from the exit code of the whole command line; None if unclear."""
    if command.program in ("pytest", "py.test") and code in (4, 5):
        return None  # pytest was called wrongly, or found no test
    if all(joined_command.ends == "&&" for joined_command in (command, *later_commands[:-1])) and later_commands:
        return "passed" if code == 0 else None
    return None if later_commands else "passed" if code == 0 else "failed"


def runs_tests(command: ShellCommand) -> bool:
    """Return whether a simple command runs tests."""
    program, arguments = command.program, command.argv[1:]
    if not command.argv or _idle(program, arguments):
        return False
    if program in _TEST_PROGRAMS:
        return program != "cypress" or "run" in arguments
    if _PYTHON.fullmatch(program):
        return _python(arguments)
    if program == "php" and arguments:
        program, arguments = arguments[0].rpartition("/")[2], arguments[1:]
        if program in _TEST_PROGRAMS:
            return True
    subcommands = _SUBCOMMANDS.get(program)
    if subcommands is None:
        # Commands such as `bundle exec rspec` were reduced to the test program before.
        return False
    if program.startswith("gradle"):
        return any(_GRADLE_TASK.fullmatch(word) for word in arguments)
    if program.startswith("mvn") or program in ("make", "gmake", "xcodebuild", "bazel", "lein", "sbt"):
        return any(word in subcommands for word in arguments)
    words = [word for word in arguments if not word.startswith(("-", "+", "@")) or word in subcommands]
    if program in _SCRIPTS and words[:1] in (["run"], ["run-script"]):
        script = words[1].rpartition(":")[2] if program == "hatch" and len(words) > 1 else "".join(words[1:2])
        return script in _TEST_PROGRAMS or _TEST_SCRIPT.fullmatch(script) is not None
    if program in ("npm", "pnpm", "yarn", "bun") and words and words[0] in _TEST_PROGRAMS:
        return True
    if program in ("yarn", "pnpm", "just", "task", "rake") and words and _TEST_SCRIPT.fullmatch(words[0]):
        return words[0] not in ("check", "unit") or words[0] in subcommands
    if any(word in subcommands for word in words[:1]):
        return True
    # An option with a value may come before the subcommand: `npm --prefix web test`.
    has_option_first = program in ("npm", "pnpm", "yarn") and len(words) > 1 and words[1] in subcommands
    return has_option_first and words[0] not in ("install", "add", "i", "remove", "ls", "view", "run")


def _idle(program: str, arguments: list[str]) -> bool:
    ambiguous = _MAY_BE_MORE if program not in ("tox", "ctest", "nox", "go") else frozenset(("-h", "-V"))
    only_builds = program == "go" and "-c" in arguments
    return (
        only_builds
        or any(word in _IDLE and word not in ambiguous for word in arguments)
        or arguments[-1:] in (["-h"], ["-V"])
    )


def _python(arguments: list[str]) -> bool:
    index = 0
    while index < len(arguments) and arguments[index].startswith("-") and arguments[index] not in ("-m", "-c"):
        index += 2 if arguments[index] in ("-W", "-X") else 1
    if arguments[index : index + 1] == ["-m"] and index + 1 < len(arguments):
        module = arguments[index + 1]
        if module == "coverage":
            return any(word in _MODULES for word in arguments[index + 2 :])
        return module in _MODULES and (module != "django" or "test" in arguments)
    if index >= len(arguments) or arguments[index] == "-c":
        return False
    name = arguments[index].rpartition("/")[2]
    if name in ("manage.py", "setup.py"):
        return "test" in arguments[index + 1 : index + 3]
    return name in _TEST_PROGRAMS or _TEST_FILE.fullmatch(name) is not None


def _file_of(command: ShellCommand) -> bool:
    """Return whether the command runs a single Python file whose name marks it as a test."""
    return (
        _PYTHON.fullmatch(command.program) is not None
        and any(_TEST_FILE.fullmatch(word.rpartition("/")[2]) for word in command.argv[1:3] if word != "-m")
        and "-m" not in command.argv[1:2]
    )
