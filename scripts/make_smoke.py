"""Make src/understudy/data/smoke.jsonl: a few instances in SWE-bench's row format, for smoke tests.

    python scripts/make_smoke.py [--check]

Each is a true shortcoming of a permissively licensed package, as its pinned sdist on the package index has it; the
statement, the fix and the tests are our own. The ids of the tests come from running them, before the fix and after
it. The rows are the same bytes whoever makes them; with --check the file is compared and not written.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

from smoke_instances import INSTANCES, Change, Instance

from understudy.config import cache_dir
from understudy.sandbox.base import Sandbox, load_sandboxes
from understudy.tasks.environment import python_environment
from understudy.tasks.generate.packages import find_package, unmodified_task
from understudy.tasks.prepare import prepare, sandbox_spec
from understudy.util import diffs

OUTPUT = Path(__file__).parents[1] / "src" / "understudy" / "data" / "smoke.jsonl"
IMAGE = "understudy/smoke:latest"
"""Not on any registry: a Python with pytest and git, for those who build one and want the rows in containers."""

_DELIMITER = "EOF_TEST_PATCH"
_PASSED = ("PASSED", "XFAIL")


def changed(tree: Path, changes: tuple[Change, ...]) -> str:
    """The changes as a unified diff."""
    old = {change.path: (tree / change.path).read_text(encoding="utf-8") for change in changes}
    new = dict(old)
    for change in changes:
        text = new[change.path]
        if change.old and text.count(change.old) != 1:
            raise SystemExit(f"{change.path}: {change.old!r} is there {text.count(change.old)} times")
        new[change.path] = text.replace(change.old, change.new) if change.old else text + change.new
    return diffs.unified(old, new)


async def apply(sandbox: Sandbox, patch: str) -> None:
    """Apply a patch in the sandbox."""
    place = f"{sandbox.home}/change.diff"
    await sandbox.write(place, patch.encode())
    done = await sandbox.run(["git", "apply", place], timeout_s=60, cwd=sandbox.workdir)
    if done.exit_code:
        raise SystemExit(done.stderr.decode())


async def passed(sandbox: Sandbox, command: str) -> set[str]:
    """The ids that pass."""
    done = await sandbox.run(["bash", "-c", command], timeout_s=300, cwd=sandbox.workdir)
    lines = done.stdout.decode().splitlines()
    return {line.split()[1] for line in lines if line.split(" ")[0] in _PASSED}


def head(git_dir: Path) -> str:
    """The root commit of a prepared tree, which depends on its content only."""
    git = ["git", f"--git-dir={git_dir}", "rev-parse", "HEAD"]
    return subprocess.run(git, check=True, capture_output=True, text=True).stdout.strip()


async def row(instance: Instance) -> dict[str, object]:
    """The row of an instance."""
    cache, sandboxes = cache_dir(), load_sandboxes("local")
    package = find_package(instance.package)
    prepared = prepare(unmodified_task(package), cache, sandboxes)
    patch, test_patch = changed(prepared.tree, instance.fix), changed(prepared.tree, instance.tests)
    files = " ".join(dict.fromkeys(change.path for change in instance.tests))
    command = f"pytest -rA {files}"
    sandbox = await sandboxes.open(sandbox_spec(prepared, python_environment(cache)))
    try:
        await apply(sandbox, test_patch)
        before = await passed(sandbox, command)
        await apply(sandbox, patch)
        after = await passed(sandbox, command)
    finally:
        await sandbox.close()
    if not after - before:
        raise SystemExit(f"{instance.package}-{instance.number}: its tests do not tell the fix")
    commit = head(prepared.git)
    script = f"""\
#!/bin/bash
set -uxo pipefail
source /opt/miniconda3/bin/activate 2>/dev/null || true
conda activate testbed 2>/dev/null || true
cd /testbed
git config --global --add safe.directory /testbed
cd /testbed
git status
git show
git -c core.fileMode=false diff {commit}
git checkout {commit} {files}
git apply -v - <<'{_DELIMITER}'
{test_patch}
{_DELIMITER}
: '>>>>> Start Test Output'
{command}
: '>>>>> End Test Output'
git checkout {commit} {files}
"""
    return {
        "instance_id": f"understudy__{instance.package}-{instance.number}",
        "repo": f"understudy/{instance.package}",
        "version": package.sdist.version,
        "base_commit": commit,
        "environment_setup_commit": commit,
        "created_at": "2026-11-21T00:00:00Z",
        "difficulty": "<15 min fix",
        "problem_statement": instance.statement,
        "hints_text": "",
        "patch": patch,
        "test_patch": test_patch,
        "FAIL_TO_PASS": sorted(after - before),
        "PASS_TO_PASS": sorted(after & before),
        "image": IMAGE,
        "eval_script": script,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
        "source": {
            "kind": "sdist",
            "name": package.sdist.name,
            "version": package.sdist.version,
            "sha256": package.sdist.sha256,
        },
        "meta": {"license": package.license},
    }


async def main() -> int:
    rows = [await row(instance) for instance in INSTANCES]
    text = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in rows)
    for entry in rows:
        print(entry["instance_id"], len(entry["FAIL_TO_PASS"]), "to pass,", len(entry["PASS_TO_PASS"]), "to keep")
    if "--check" in sys.argv[1:]:
        same = OUTPUT.read_text(encoding="utf-8") == text
        print("the same" if same else f"{OUTPUT} is another; run this without --check")
        return 0 if same else 1
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    OUTPUT.write_text(text, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
