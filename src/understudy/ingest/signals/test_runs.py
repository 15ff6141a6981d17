"""Tests that a turn ran, and how they ended: which commands run tests, and what their programs say at the end."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Literal

from understudy.ingest.signals.calls import LoggedCall, ShellCommand

SuiteResult = Literal["passed", "failed"]

TAIL = 20_000
"""Characters of a result's end in which the programs' last words are looked for."""

_ESCAPES = re.compile(r"\x1b\[[0-9;]{0,20}m")


def _counted(bad: str | None, good: str | None) -> Callable[[re.Match[str]], SuiteResult | None]:
    """Judges a match by its counts: `bad` and `good` name the groups with failures and with passes."""

    def ended(match: re.Match[str]) -> SuiteResult | None:
        groups = match.groupdict()
        if bad and any(int(groups[name] or 0) for name in bad.split()):
            return "failed"
        return "passed" if good and any(int(groups[name] or 0) for name in good.split()) else None

    return ended


def _says(ended: SuiteResult) -> Callable[[re.Match[str]], SuiteResult | None]:
    return lambda _: ended


def _pytest(match: re.Match[str]) -> SuiteResult | None:
    line = match[0]
    if re.search(r"\b[1-9]\d{0,8} (?:failed|errors?)\b", line):
        return "failed"
    return "passed" if re.search(r"\b[1-9]\d{0,8} (?:passed|xfailed|xpassed)\b", line) else None


# A sign that must be in the text, a pattern, and how to judge a match. All patterns have bounds, so that no text
# makes them slow.
_SUMMARY_LINES: tuple[tuple[str, str, Callable[[re.Match[str]], SuiteResult | None]], ...] = (
    (
        " in ",
        r"^[= ]{0,200}(?:\d{1,9} (?:failed|passed|skipped|deselected|xfailed|xpa"
        r"ssed|errors?|warnings?|rerun|subtests passed)(?:, )?){1,10} in \d[\d.]"
        r"{0,12}s?.{0,60}$",
        _pytest,
    ),
    ("during collection", r"^!{3,200} Interrupted: \d{1,6} errors? during collection", _says("failed")),
    ("Ran ", r"^Ran [1-9]\d{0,8} tests? in [\d.]{1,12}s\s{1,4}(?:OK\b)", _says("passed")),
    (
        "FAILED (",
        r"^FAILED \((?:(?:failures|errors|skipped|expected failures|unexpected s"
        r"uccesses)=\d{1,9}(?:, )?){1,5}\)",
        _says("failed"),
    ),
    (
        "Tests",
        r"^\s{0,8}Tests:?\s{1,12}(?:(?P<a>\d{1,9}) failed)?(?:[,| ]{0,4}\d{1,9} "
        r"(?:skipped|todo|pending))*+(?:[,| ]{0,4}(?P<b>\d{1,9}) passed)?",
        _counted("a", "b"),
    ),
    ("Test ", r"^\s{0,8}Test (?:Suites|Files):?\s{1,12}(?P<a>\d{1,9}) failed", _counted("a", None)),
    ("passing", r"^\s{0,12}(?P<b>\d{1,9}) passing\b", _counted(None, "b")),
    ("failing", r"^\s{0,12}(?P<a>\d{1,9}) failing\b", _counted("a", None)),
    (
        "ok  ",
        r"^ok  \t?\s{0,4}\S{1,300}\s{1,8}(?:\(cached\)|[\d.]{1,12}s)(?!\s\[no te" r"sts to run\])",
        _says("passed"),
    ),
    ("--- FAIL", r"^\s{0,12}--- FAIL: ", _says("failed")),
    (
        "FAIL",
        r"^FAIL(?:\s{1,4}\S{1,300}\s{1,4}(?:[\d.]{1,12}s|\[(?:build|setup) faile" r"d\])|\s*$)",
        _says("failed"),
    ),
    ("test result:", r"^test result: FAILED\.", _says("failed")),
    ("test result:", r"^test result: ok\. (?P<b>\d{1,9}) passed", _counted(None, "b")),
    (
        "tests run:",
        r"^\s{0,12}Summary \[[^\]\n]{1,40}\]\s{1,8}\d{1,9}(?:/\d{1,9})? tests? r"
        r"un: (?P<b>\d{1,9}) passed(?:[^\n]{0,60}?, (?P<a>\d{1,9}) failed)?",
        _counted("a", "b"),
    ),
    (
        "Tests run:",
        r"Tests run: (?P<b>\d{1,9}), Failures: (?P<a>\d{1,9}), Errors: (?P<c>\d{" r"1,9})",
        _counted("a c", "b"),
    ),
    ("BUILD ", r"^(?:\[ERROR\] |\[INFO\] )?BUILD (?:FAILURE|FAILED)\b", _says("failed")),
    ("BUILD SUCCESSFUL", r"^BUILD SUCCESSFUL\b", _says("passed")),
    ("examples", r"^(?P<b>\d{1,9}) examples?, (?P<a>\d{1,9}) failures?", _counted("a", "b")),
    (
        " runs, ",
        r"^(?P<b>\d{1,9}) (?:runs|tests), \d{1,9} assertions, (?P<a>\d{1,9}) fai" r"lures, (?P<c>\d{1,9}) errors",
        _counted("a c", "b"),
    ),
    ("OK (", r"^OK \([1-9]\d{0,8} tests?, \d{1,9} assertions?\)", _says("passed")),
    ("OK, but", r"^OK, but (?:there were issues|incomplete|some tests)", _says("passed")),
    ("Assertions", r"^(?:FAILURES|ERRORS)!\s{1,4}Tests: \d", _says("failed")),
    (
        "tests passed,",
        r"^\d{1,3}% tests passed, (?P<a>\d{1,9}) tests? failed out of (?P<b>\d{1" r",9})",
        _counted("a", "b"),
    ),
    (
        "Failed:",
        r"^\s{0,8}(?:Passed|Failed)!\s{1,4}- Failed:\s{1,8}(?P<a>\d{1,9}), Passe" r"d:\s{1,8}(?P<b>\d{1,9})",
        _counted("a", "b"),
    ),
    ("# fail", r"^(?:# |ℹ )fail (?P<a>\d{1,9})", _counted("a", None)),
    ("pass ", r"^(?:# |ℹ )pass (?P<b>\d{1,9})", _counted(None, "b")),
    ("not ok", r"^not ok \d{1,9}\b(?![^\n]{0,300}# (?:TODO|SKIP))", _says("failed")),
    ("ok ", r"^ok \d{1,9}\b(?![^\n]{0,300}# SKIP)", _says("passed")),
    (" pass", r"^\s{0,4}(?P<b>\d{1,9}) pass\s*$", _counted(None, "b")),
    (" fail", r"^\s{0,4}(?P<a>\d{1,9}) fail\s*$", _counted("a", None)),
    (
        "failures",
        r"^(?:Finished in [^\n]{1,80}\n)?(?P<b>\d{1,9}) (?:tests?|doctests?)(?:,"
        r" \d{1,9} (?:tests?|doctests?|properties))?, (?P<a>\d{1,9}) failures?",
        _counted("a", "b"),
    ),
    (
        "passed |",
        r"^(?:ok|FAILED) \| (?P<b>\d{1,9}) passed[^|\n]{0,60} \| (?P<a>\d{1,9}) " r"failed",
        _counted("a", "b"),
    ),
    (
        "Executed ",
        r"Executed (?P<b>\d{1,9}) tests?, with (?:\d{1,9} tests? skipped and )?(" r"?P<a>\d{1,9}) failures?",
        _counted("a", "b"),
    ),
    ("passed (", r"^\s{0,8}(?P<b>\d{1,9}) passed \([\d.]{1,8}m?s", _counted(None, "b")),
    (" failed", r"^\s{0,8}(?P<a>\d{1,9}) failed\s*$", _counted("a", None)),
    (
        "tests finished",
        r"tests finished: (?P<b>\d{1,9}) passed(?:, (?P<a>\d{1,9}) failed)?[^\n]" r"{0,100}, in ",
        _counted("a", "b"),
    ),
    ("congratulations", r"^\s{0,4}congratulations :\)", _says("passed")),
    ("evaluation failed", r"^\s{0,4}evaluation failed :\(", _says("failed")),
    ("All tests", r"^All tests passed!?\s*$|^\d\d:\d\d \+\d{1,9}: All tests passed!", _says("passed")),
    ("Some tests", r"Some tests failed\.\s*$", _says("failed")),
)
_SUMMARIES = tuple((sign, re.compile(pattern, re.MULTILINE), judge) for sign, pattern, judge in _SUMMARY_LINES)


def result_from_output(text: str) -> SuiteResult | None:
    """The result of a test run by its last output; None where no known test program printed a summary."""
    tail = text[-TAIL:]
    if "\x1b" in tail:
        tail = _ESCAPES.sub("", tail)
    tail = tail.replace("\r\n", "\n")
    results: set[SuiteResult] = set()
    for sign, pattern, judge in _SUMMARIES:
        if sign not in tail:
            continue
        for match in pattern.finditer(tail):
            if (ended := judge(match)) is not None:
                results.add(ended)
                if ended == "failed":
                    return ended
    return "passed" if results else None


# Programs that run tests whatever their arguments are.
_RUNS_TEXT = """
pytest py.test tox nox nosetests nose2 trial stestr ctest phpunit pest paratest rspec jest vitest mocha
ava cypress gotestsum bats busted prove testem karma wtr jasmine tap lit ginkgo runtests.py runtests
runtests.sh
"""
_RUNS = frozenset(_RUNS_TEXT.split())
# Programs that run tests with one of these subcommands (or, for the scripts of a package, behind `run`).
_SUBCOMMANDS: dict[str, frozenset[str]] = {
    name: frozenset(subcommands.split())
    for names, subcommands in (
        ("go zig", "test"),
        ("cargo", "test nextest t"),
        ("mvn mvnw mvn.cmd", "test verify integration-test surefire:test"),
        ("gradle gradlew gradlew.bat", "test check connectedCheck connectedAndroidTest"),
        ("npm pnpm yarn bun", "test t tst"),
        (
            "deno dotnet swift flutter dart stack cabal forge hardhat truffle mix sbt lein bazel meson composer",
            "test",
        ),
        ("make gmake just task ninja rake", "test tests check unittest unittests unit-test spec"),
        ("rails", "test spec"),
        ("hatch", "test"),
        ("playwright", "test"),
        ("node", "--test"),
        ("cypress", "run"),
        ("xcodebuild", "test"),
        ("artisan", "test"),
    )
    for name in names.split()
}
_SIGNS = (
    *(
        "test",
        "spec",
        "check",
        "tox",
        "nox",
        "jest",
        "mocha",
        "karma",
        "cypress",
        "trial",
        "bats",
        "busted",
        "prove",
    ),
    *("ginkgo", "nose", "pest", "wtr", "jasmine", "verify", "ava ", "tap ", "lit ", "cargo t", "npm t"),
)
_SCRIPTS = frozenset(("npm", "pnpm", "yarn", "bun", "composer", "deno", "make", "just", "task", "rake", "hatch"))
_TEST_SCRIPT = re.compile(r"(?:tests?|specs?|unit|e2e|check)(?:[:_-][\w:.-]{0,60}|)|[\w.-]{1,40}[:_-]tests?")
_GRADLE_TASK = re.compile(r"(?::[\w:-]{1,80}:)?(?:\w{0,60}Test|test|check)")
_PYTHON = re.compile(r"(?:python|pypy|py)[\d.]*(?:\.exe)?")
_MODULES = frozenset(
    ("pytest", "unittest", "nose", "nose2", "tox", "nox", "django", "trial", "stestr", "testtools.run")
)
_TEST_FILE = re.compile(r"(?:test_[\w.-]{0,100}|[\w.-]{0,100}_tests?|run_?tests?|tests?)\.py")
# Arguments with which a program prints something and runs no tests.
_IDLE_TEXT = """
--help -h --version -V --collect-only --co --fixtures --markers --setup-plan --listTests --list-tests
-list --list --no-run -DskipTests --dry-run --showConfig -N --listenvs -l --init
"""
_IDLE = frozenset(_IDLE_TEXT.split())
_MAY_BE_MORE = frozenset(("-N", "-l", "-h", "-V", "--list", "-list"))  # mean something else to some programs

# Output that shows that no test was run at all.
_NOT_RUN = (
    "command not found",
    "is not recognized as",
    "No module named pytest",
    "No module named unittest",
    "No module named tox",
    "no such command",
    "Missing script:",
    "No rule to make target",
    "missing script: test",
    "running in background with ID",
    "Command running in background",
    "no test specified",
    "No tests found",
    "no tests ran",
    "No such file or directory",
    "error: unrecognized arguments",
    "can't open file",
    "could not find `Cargo.toml`",
    "Could not read package.json",
)
_CUT_SHORT = frozenset((124, 137, 143, 130))


def result_of_tests(calls: Iterable[LoggedCall]) -> SuiteResult | None:
    """The result of the tests that calls ran: failed if any did, None if none ran or the result is unknown."""
    results = {result for call in calls if call.completed and (result := _result_of(call)) is not None}
    return "failed" if "failed" in results else "passed" if results else None


def _result_of(call: LoggedCall) -> SuiteResult | None:
    script = call.script
    if not any(sign in script for sign in _SIGNS):
        return None
    run = [(at, command) for at, command in enumerate(call.shell()) if runs_tests(command)]
    if not run:
        return None
    reported = result_from_output(call.text or "")
    if reported is not None:
        return reported
    text = (call.text or "")[-TAIL:]
    if call.code is None or call.code in _CUT_SHORT or any(sign in text for sign in _NOT_RUN):
        return None
    at, command = run[-1]
    if any(_file_of(one) for _, one in run) and call.code == 0:
        return None  # a script that is named as a test may print that it failed and still exit with 0
    return _by_code(call.code, command, call.shell()[at + 1 :])


def _by_code(code: int, command: ShellCommand, after: list[ShellCommand]) -> SuiteResult | None:
    """The result of a test command by the exit code of the whole command line."""
    if command.program in ("pytest", "py.test") and code in (4, 5):
        return None  # called wrongly, or no test was found
    if all(one.ends == "&&" for one in (command, *after[:-1])) and after:
        return "passed" if code == 0 else None
    return None if after else "passed" if code == 0 else "failed"


def runs_tests(command: ShellCommand) -> bool:
    """Whether a simple command runs tests."""
    command_words = command.argv
    if not command_words:
        return False
    program = command.program
    rest = command_words[1:]
    if _idle(program, rest):
        return False
    if program in _RUNS:
        return program != "cypress" or "run" in rest
    if _PYTHON.fullmatch(program):
        return _python(rest)
    if program == "php" and rest:
        program, rest = rest[0].rpartition("/")[2], rest[1:]
        if program in _RUNS:
            return True
    wanted = _SUBCOMMANDS.get(program)
    if wanted is None:
        # The script of a package may be named by its runner: `yarn jest`, `bundle exec rspec` stand apart already.
        return False
    if program.startswith("gradle"):
        return any(_GRADLE_TASK.fullmatch(word) for word in rest)
    if program.startswith("mvn") or program in ("make", "gmake", "xcodebuild", "bazel", "lein", "sbt"):
        return any(word in wanted for word in rest)
    plain = [word for word in rest if not word.startswith(("-", "+", "@")) or word in wanted]
    if program in _SCRIPTS and plain[:1] in (["run"], ["run-script"]):
        script = plain[1].rpartition(":")[2] if program == "hatch" and len(plain) > 1 else "".join(plain[1:2])
        return script in _RUNS or _TEST_SCRIPT.fullmatch(script) is not None
    if program in ("npm", "pnpm", "yarn", "bun") and plain and plain[0] in _RUNS:
        return True
    if program in ("yarn", "pnpm", "just", "task", "rake") and plain and _TEST_SCRIPT.fullmatch(plain[0]):
        return plain[0] not in ("check", "unit") or plain[0] in wanted
    return any(word in wanted for word in plain[:1]) or _later(program, plain, wanted)


def _later(program: str, plain: list[str], wanted: frozenset[str]) -> bool:
    """Options with a value of their own stand before the word that counts: `npm --prefix web test`."""
    return (
        program in ("npm", "pnpm", "yarn", "cargo", "go", "dotnet")
        and len(plain) > 1
        and plain[1] in wanted
        and (
            program in ("npm", "pnpm", "yarn")
            and plain[0] not in ("install", "add", "i", "remove", "ls", "view", "run")
        )
    )


def _idle(program: str, rest: list[str]) -> bool:
    ambiguous = _MAY_BE_MORE if program not in ("tox", "ctest", "nox", "go") else frozenset(("-h", "-V"))
    return any(word in _IDLE and word not in ambiguous for word in rest) or rest[-1:] in (["-h"], ["-V"])


def _python(rest: list[str]) -> bool:
    at = 0
    while at < len(rest) and rest[at].startswith("-") and rest[at] not in ("-m", "-c"):
        at += 2 if rest[at] in ("-W", "-X") else 1
    if rest[at : at + 1] == ["-m"] and at + 1 < len(rest):
        module = rest[at + 1]
        if module in ("coverage",):
            return any(word in _MODULES for word in rest[at + 2 :])
        return module in _MODULES and (module != "django" or "test" in rest)
    if at >= len(rest) or rest[at] == "-c":
        return False
    name = rest[at].rpartition("/")[2]
    if name in ("manage.py", "setup.py"):
        return "test" in rest[at + 1 : at + 3]
    return name in _RUNS or name in ("pytest",) or _TEST_FILE.fullmatch(name) is not None


def _file_of(command: ShellCommand) -> bool:
    """Whether it runs a single Python file that is named as a test."""
    return (
        _PYTHON.fullmatch(command.program) is not None
        and any(_TEST_FILE.fullmatch(word.rpartition("/")[2]) for word in command.argv[1:3] if word != "-m")
        and "-m" not in command.argv[1:2]
    )
