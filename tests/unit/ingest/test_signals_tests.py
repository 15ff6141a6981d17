"""Which commands run tests, and how their programs say that they ended."""

from __future__ import annotations

import pytest

from understudy.ingest.signals.calls import LoggedCall, set_result, shell_commands
from understudy.ingest.signals.test_runs import result_from_output, result_of_tests, runs_tests

RUN = [
    "pytest -q",
    "python -m pytest tests/",
    "cd x && FOO=1 python3 -m pytest -k a 2>&1 | tail -20",
    "uv run pytest",
    "poetry run pytest tests",
    "timeout 60 python -m unittest discover",
    "tox -e py311",
    "npm test",
    "npm run test:unit -- --watch=false",
    "npm --prefix web test",
    "yarn test",
    "yarn jest src",
    "pnpm run test",
    "pnpm -r test",
    "pnpm --filter web test",
    "npx jest foo",
    "npx vitest run",
    "bun test",
    "node --test",
    "deno test -A",
    "go test ./...",
    "cargo test --all",
    "cargo nextest run",
    "cargo +nightly test",
    "mvn -q test",
    "./mvnw verify",
    "./gradlew :app:testDebugUnitTest",
    "gradle test",
    "bundle exec rspec spec/a_spec.rb",
    "bin/rspec",
    "vendor/bin/phpunit",
    "php artisan test",
    "ctest --output-on-failure",
    "make test",
    "make -C build check",
    'bash -c "cd x && pytest -x"',
    "source .venv/bin/activate && pytest",
    "for i in 1 2; do pytest; done",
    "python manage.py test app",
    "./tests/runtests.py admin",
    "python tests/test_a.py",
    "coverage run -m pytest",
    "sudo -u me pytest",
    "dotnet test",
    "mix test",
    "swift test",
    "rails test",
    "env CI=1 npm test",
    "if ! pytest -q; then echo no; fi",
    "(cd a; go test ./pkg -run TestX -v)",
    "docker compose exec web pytest",
    "python -m coverage run -m pytest",
    "time pytest",
    "npx playwright test",
    "hatch run test",
    "python setup.py test",
    "just test",
    "bazel test //...",
]

IDLE = [
    "cat test.log",
    "grep pytest setup.cfg",
    'rg "npm test" .',
    'echo "run pytest now"',
    "pip install pytest tox",
    "pytest --version",
    "pytest --collect-only",
    "npm install jest",
    "ls tests",
    "go build ./...",
    "cargo build",
    "cargo test --no-run",
    "go test -c ./pkg",
    "go test -c -o /tmp/pkg.test ./pkg && ls -l /tmp/pkg.test",
    "make",
    "make all",
    "test -f foo && echo yes",
    "[ -f pytest.ini ]",
    "vim tests/test_a.py",
    "python script.py test",
    "which pytest",
    "npm run build",
    "npm run lint",
    "git diff tests/test_a.py",
    "mvn package -DskipTests",
    'python -c "import pytest"',
    "sed -i s/a/b/ tests/test_a.py",
    "man ctest",
    "apt install npm test",
    "npm ls test",
    "rm -rf tests",
    "cd tests",
    "brew test-bot",
    "python tests/helper.py",
    'git commit -m "run pytest\npytest passes"',
    "cat > t.sh <<'EOF'\npytest -q\nEOF",
    "# pytest\nls",
]

PASSED = [
    "===== 3 passed, 1 warning in 0.12s =====",
    "3 passed in 0.12s",
    "............ [100%]\n12 passed, 2 skipped in 3.1s",
    "Ran 5 tests in 0.001s\n\nOK",
    "Ran 5 tests in 0.001s\n\nOK (skipped=1)",
    "Tests:       3 passed, 3 total\nSnapshots: 0 total",
    " Test Files  1 passed (1)\n      Tests  2 passed (2)",
    "  12 passing (30ms)",
    "ok  \tgithub.com/a/b\t0.3s",
    "ok  \tgithub.com/a/b\t(cached)\nok  \tx/y\t0.1s [no tests to run]",
    "test result: ok. 5 passed; 0 failed; 0 ignored",
    "Tests run: 5, Failures: 0, Errors: 0, Skipped: 0\n[INFO] BUILD SUCCESS",
    "BUILD SUCCESSFUL in 3s",
    "10 examples, 0 failures",
    "OK (5 tests, 10 assertions)",
    "100% tests passed, 0 tests failed out of 5",
    "Passed!  - Failed:     0, Passed:     5, Skipped: 0",
    "# pass 3\n# fail 0",
    "ℹ pass 3\nℹ fail 0",
    " 5 pass\n 0 fail",
    "5 tests, 0 failures",
    "ok | 5 passed | 0 failed (3ms)",
    "Executed 5 tests, with 0 failures (0 unexpected)",
    "  5 passed (3.2s)",
    "  py311: OK\n  congratulations :)",
    "3 runs, 4 assertions, 0 failures, 0 errors, 0 skips",
    "    Summary [   0.1s] 3 tests run: 3 passed, 0 skipped",
    "======== 1 passed, 2 subtests passed in 0.1s ========",
    "tests finished: 5 passed, in 0.1 seconds",
    "1..2\nok 1 a\nok 2 b",
    "\x1b[32m\x1b[1m==== \x1b[32m3 passed\x1b[0m in 0.1s ====",
]

FAILED = [
    "==== 1 failed, 2 passed in 0.1s ====",
    "FAILED (failures=1)",
    "Ran 1 test in 0.1s\n\nFAILED (errors=1)",
    "Tests:       1 failed, 2 passed, 3 total",
    " Test Files  1 failed | 2 passed (3)\n Tests  1 failed | 5 passed (6)",
    "  3 passing (3ms)\n  1 failing",
    "--- FAIL: TestX (0.00s)\nFAIL\nFAIL\tx/y\t0.1s",
    "FAIL\tx/y [build failed]",
    "test result: FAILED. 1 passed; 1 failed",
    "Tests run: 5, Failures: 1, Errors: 0\nBUILD FAILURE",
    "BUILD FAILED in 1s",
    "2 examples, 1 failure",
    "FAILURES!\nTests: 3, Assertions: 4, Failures: 1.",
    "80% tests passed, 1 tests failed out of 5",
    "Failed!  - Failed:     1, Passed:     5",
    "# pass 3\n# fail 1",
    "1..2\nok 1 a\nnot ok 2 b",
    "==== 2 errors in 0.3s ====",
    "!!!!!!!! Interrupted: 1 error during collection !!!!!!!!",
    "ok  \ta\t0.1s\nFAIL\tb\t0.2s",
    "4 failed, 31 passed in 0.39s",
    "  2 failed\n    a.spec.ts\n  5 passed (3s)",
]

UNTOLD = [
    "no tests ran in 0.01s",
    "Ran 0 tests in 0.000s\n\nOK",
    "?   \tx\t[no test files]",
    "hello",
    "==== 3 deselected in 0.1s ====",
    "ok  \tx/y\t0.1s [no tests to run]",
    "0 passed in 1s",
]


@pytest.mark.parametrize("command", RUN)
def test_commands_that_run_tests_are_recognised(command: str) -> None:
    assert any(runs_tests(one) for one in shell_commands(command))


@pytest.mark.parametrize("command", IDLE)
def test_a_command_that_only_mentions_tests_is_no_test_run(command: str) -> None:
    assert not any(runs_tests(one) for one in shell_commands(command))


@pytest.mark.parametrize(
    ("outcome", "text"),
    [("passed", text) for text in PASSED]
    + [("failed", text) for text in FAILED]
    + [(None, text) for text in UNTOLD],
)
def test_the_result_of_a_test_run_is_parsed_from_the_end_of_its_output(outcome: str | None, text: str) -> None:
    assert result_from_output(f"collecting\n{text}\n") == outcome


def ran(command: str, text: str, *, error: bool = False, marked: bool = True) -> str | None:
    call = LoggedCall("Bash", {"command": command})
    set_result(call, text, error, marked)
    return result_of_tests([call])


def test_the_exit_code_gives_the_test_result_where_the_output_does_not() -> None:
    assert ran("npm test", "all is well") == "passed"
    assert ran("npm test", "Exit code 1\nboom", error=True) == "failed"
    assert ran("cd a && npm test", "Exit code 1\nboom", error=True) == "failed"
    assert ran("npm test && npm run build", "done") == "passed"
    assert ran("npm test && npm run build", "Exit code 2", error=True) is None
    assert ran("npm test; echo done", "done") is None
    assert ran("npm test | tail -3", "nothing that is known") is None
    assert ran("npm test || true", "nothing that is known") is None
    assert ran("pytest", "Exit code 5\nno tests ran in 0.1s", error=True) is None
    assert ran("pytest", "Exit code 1\n/usr/bin/python: No module named pytest", error=True) is None
    assert ran("timeout 5 npm test", "Exit code 124", error=True) is None
    assert ran("npm test", "Command running in background with ID: b1") is None
    assert ran("python tests/test_a.py", "whatever it prints") is None
    assert ran("python tests/test_a.py", "Exit code 1\nAssertionError", error=True) == "failed"


def test_a_test_result_in_the_output_overrides_the_exit_code() -> None:
    assert ran("pytest | tail -1", "1 failed, 2 passed in 0.3s") == "failed"
    assert ran("pytest; true", "2 passed in 0.3s") == "passed"
    assert ran("cat test.log", "2 passed in 0.3s") is None
    assert ran("pytest && npm test", "2 passed in 0.3s\nTests:  1 failed, 1 total") == "failed"


def test_every_program_has_its_own_exit_code() -> None:
    for text in (
        "Exit code: 1\nWall time: 0.1 seconds\nOutput:\nboom",
        '{"output":"boom","metadata":{"exit_code":1,"duration_seconds":0.1}}',
        "Process exited with code 1\nboom",
        "<returncode>1</returncode>\n<output>boom</output>",
        "boom\n[Command finished with exit code 1]",
        "Command: npm test\nOutput: boom\nExit Code: 1\n",
    ):
        call = LoggedCall("run", {"command": "npm test"})
        set_result(call, text, False, False)
        assert call.code == 1 and call.failed and result_of_tests([call]) == "failed", text


def test_a_denied_or_unanswered_call_has_no_test_result() -> None:
    denied = "The user doesn't want to proceed with this tool use. The tool use was rejected."
    assert ran("pytest", denied, error=True) is None
    assert result_of_tests([LoggedCall("Bash", {"command": "pytest"})]) is None
