"""The `swebench` package beside ours: its parsers and its verdicts, and an evaluation run in its way.

The package is taken with the one dependency that its parsers and verdicts import, without the others (170 MB), and
runs in a process of its own.
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from understudy.config import cache_dir
from understudy.sandbox.base import Sandboxes
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.prepare import PreparedTask, sandbox_spec
from understudy.types import SuiteChecks
from understudy.util.files import locked

VERSION = "5.0.2"
UNIDIFF = "1.0.1"

_SERVER = r"""
import json, sys, tempfile, types
place = sys.argv[1]
sys.path.append(place)
for name in "swebench", "swebench.harness":
    module = types.ModuleType(name)
    module.__path__ = [place + "/" + name.replace(".", "/")]
    sys.modules[name] = module
from swebench.harness.grading import get_eval_report
from swebench.harness.log_parsers import PARSER_REGISTRY
from swebench.types import TestSpec
for line in sys.stdin:
    asked = json.loads(line)
    if "names" in asked:
        answer = sorted(PARSER_REGISTRY)
    elif "spec" in asked:
        with tempfile.NamedTemporaryFile("w", suffix=".txt", newline="", encoding="utf-8") as file:
            file.write(asked["log"])
            file.flush()
            answer = get_eval_report(TestSpec(**asked["spec"]), asked["prediction"], file.name, True)
    else:
        try:
            answer = PARSER_REGISTRY[asked["parser"]](asked["log"], None)
        except IndexError:
            answer = None
    print(json.dumps(answer), flush=True)
"""


@functools.cache
def package_directory() -> Path:
    """The directory with the package, installed into the cache the first time. Raises subprocess errors."""
    home = cache_dir() / f"swebench-{VERSION}-parsers"
    complete = home / "complete"
    with locked(home.with_name(f"{home.name}.lock")):
        if not complete.exists():
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-qq",
                "--disable-pip-version-check",
                "--no-deps",
                "--upgrade",
            ]
            packages = [f"swebench=={VERSION}", f"unidiff=={UNIDIFF}"]
            subprocess.run([*pip, "--target", home, *packages], check=True, timeout=300)
            complete.touch()
    return home


class Harness:
    """The package, answering questions."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", _SERVER, str(package_directory())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def names(self) -> list[str]:
        return self._ask(names=True)

    def parse(self, parser: str, log: str) -> dict[str, str] | None:
        """What a parser finds; None where it fails, as on a heading with nothing after it."""
        return self._ask(parser=parser, log=log)

    def report(self, prepared: PreparedTask, patch: bytes, log: str) -> dict[str, Any]:
        """The report of one instance, as `report.json` has it."""
        task, checks = prepared.task, prepared.task.checks
        assert isinstance(checks, SuiteChecks)
        spec = {
            "instance_id": task.instance_id,
            "image": "",
            "eval_script_list": [],
            "repo": task.repo,
            "version": "1",
            "FAIL_TO_PASS": checks.fail_to_pass,
            "PASS_TO_PASS": checks.pass_to_pass,
            "log_parser": checks.parser,
            "eval_type": "fail_only" if checks.only_failures_count else "pass_and_fail",
        }
        prediction = {
            "instance_id": task.instance_id,
            "model_name_or_path": "m",
            "model_patch": patch.decode(errors="replace"),
        }
        return self._ask(spec=spec, prediction=prediction, log=log)[task.instance_id]


def eval_script(checks: SuiteChecks) -> str:
    """What the harness runs, with its markers in the output."""
    files = " ".join(checks.files)
    return f"""#!/bin/bash
set -uxo pipefail
{checks.activate}
{checks.before}
git status
git show
{checks.install}
git checkout HEAD {files}
git apply -v - <<'EOF_114329324912'
{checks.test_patch}
EOF_114329324912
: '>>>>> Start Test Output'
{checks.command}
SWEBENCH_TEST_EXIT_CODE=$?
: '>>>>> End Test Output'
echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"
git checkout HEAD {files}
"""


# The four ways of applying, with the tree made clean between them, and the look whether it is applied already.
_APPLY = """
ok=0
for way in "git apply --verbose" "git apply --verbose --3way" "git apply --verbose --reject" \\
           "patch --batch --forward --fuzz=5 -p1 -i"; do
  $way /tmp/patch.diff && { ok=1; break; }
  case $way in patch*) ;; *) git checkout -- . ; git clean -fd ;; esac
done
[ $ok = 1 ] || git apply --check --reverse /tmp/patch.diff
"""


async def harness_log(
    prepared: PreparedTask, patch: bytes, *, sandboxes: Sandboxes, environment: TaskEnvironment
) -> str | None:
    """The output of the harness's own evaluation script in a sandbox; None when the patch does not apply."""
    checks = prepared.task.checks
    assert isinstance(checks, SuiteChecks)
    sandbox = await sandboxes.open(sandbox_spec(prepared, environment))
    try:
        if patch:
            await sandbox.write("/tmp/patch.diff", patch)
            if (await sandbox.run(["bash", "-c", _APPLY], timeout_s=60)).exit_code != 0:
                return None
        await sandbox.write("/tmp/eval.sh", eval_script(checks).encode())
        done = await sandbox.run(["bash", "-c", "exec /bin/bash /tmp/eval.sh 2>&1"], timeout_s=checks.timeout_s)
        return done.stdout.decode(errors="ignore")
    finally:
        await sandbox.close()
