"""Rows of every format we run, from a file to validated tasks, in images made as theirs are."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.run.runner import ValidatedTasks, validate_tasks
from understudy.sandbox.docker.sandboxes import DockerSandboxes
from understudy.tasks import load
from understudy.tasks.environment import TaskEnvironment
from understudy.util.diffs import reverse, unified

from support import docker_engine, understudy

pytestmark = pytest.mark.services

WRONG = "def add(a, b):\n    return a - b\n"
RIGHT = WRONG.replace("-", "+")
TESTS = "from calc import add\n\n\ndef test_zero():\n    assert add(0, 0) == 0\n"
MORE = TESTS + "\n\ndef test_add():\n    assert add(1, 2) == 3\n"
FIX = unified({"calc.py": WRONG}, {"calc.py": RIGHT})
TEST_PATCH = unified({"tests/test_calc.py": TESTS}, {"tests/test_calc.py": MORE})
IDS = {"FAIL_TO_PASS": ["tests/test_calc.py::test_add"], "PASS_TO_PASS": ["tests/test_calc.py::test_zero"]}
COMMAND = "pytest -rA tests/test_calc.py"


def validate_rows(rows: list[dict[str, Any]], directory: Path) -> ValidatedTasks:
    path = directory / "rows.jsonl"
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))

    async def work() -> ValidatedTasks:
        sandboxes = DockerSandboxes()
        try:
            loaded = await load.load_source(str(path), sandboxes=sandboxes, cache=directory)
            assert loaded.refused == ()
            environment = TaskEnvironment()
            return await validate_tasks(
                loaded.tasks, cache=directory, sandboxes=sandboxes, environment=environment, concurrency=2
            )
        finally:
            await sandboxes.aclose()

    return asyncio.run(work())


@pytest.mark.parametrize("namespace", ["swebench", "starryzhang"])
def test_rows_become_validated_tasks(engine: docker_engine.Engine, tmp_path: Path, namespace: str):
    one, two = "rows__calc-1", "rows__calc-2"
    files = {"calc.py": WRONG, "tests/test_calc.py": TESTS}
    image = docker_engine.instance_image(engine, one, files, namespace=namespace)
    common = {
        "repo": "rows/calc",
        "instance_id": one,
        "base_commit": image.base_commit,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts.",
        "version": "1.0",
        **IDS,
    }
    if namespace == "starryzhang":
        rows = [
            {
                **common,
                "test_cmds": [". /opt/miniconda3/bin/activate", "conda activate testbed", COMMAND],
                "log_parser": "pytest",
                "rebuild_cmds": [],
            }
        ]
    else:
        whole = docker_engine.instance_image(engine, two, {"calc.py": RIGHT, "tests/test_calc.py": MORE})
        script = "\n".join(
            [
                "#!/bin/bash",
                "set -uxo pipefail",
                "source /opt/miniconda3/bin/activate",
                "conda activate testbed",
                "cd /testbed",
                "git status",
                f"git checkout {image.base_commit} tests/test_calc.py",
                f"git apply -v - <<'EOF'\n{TEST_PATCH}\nEOF",
                ": '>>>>> Start Test Output'",
                COMMAND,
                ": '>>>>> End Test Output'",
            ]
        )
        fifth = {"image": image.name, "eval_script": script, "log_parser": "parse_log_pytest"}
        config = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest"}
        classic = {"repo": "pallets/flask", "version": "2.3", "instance_id": one}
        smith = {
            "instance_id": "rows__calc.bug",
            "repo": "swesmith/calc",
            "image_name": whole.name,
            "patch": reverse(FIX),
            "problem_statement": "add subtracts.",
            **IDS,
        }
        rows = [
            {**common, **classic},
            {**common, **fifth, "instance_id": "rows__calc-fifth"},
            {**common, "install_config": config, "image_name": image.name, "instance_id": "rows__calc-rebench"},
            smith,
        ]
    intake = validate_rows(rows, tmp_path)
    assert intake.refused == {}
    assert [task.instance_id for task in intake.accepted] == [row["instance_id"] for row in rows]


def test_check_takes_containers_where_rows_need_them(engine: docker_engine.Engine, tmp_path: Path):
    """As `understudy run` does; and images from elsewhere where that is said."""
    files = {"calc.py": WRONG, "tests/test_calc.py": TESTS}
    image = docker_engine.instance_image(engine, "rows__calc-4", files, namespace="elsewhere")
    row = {
        "repo": "rows/calc",
        "instance_id": "rows__calc-4",
        "base_commit": image.base_commit,
        "patch": FIX,
        "test_patch": TEST_PATCH,
        "problem_statement": "add subtracts.",
        "test_cmds": [". /opt/miniconda3/bin/activate", "conda activate testbed", COMMAND],
        "log_parser": "pytest",
        "rebuild_cmds": [],
        **IDS,
    }
    (tmp_path / "rows.jsonl").write_bytes(msgspec.json.encode(row))
    done = understudy("tasks", "check", tmp_path / "rows.jsonl", "--namespace", "elsewhere", "--json")
    report = json.loads(done.stdout)
    assert (done.returncode, report["accepted"], report["refused"]) == (0, ["rows__calc-4"], {})
