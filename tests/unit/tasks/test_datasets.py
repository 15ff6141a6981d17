"""Rows of other datasets, the files and names they are read from, and what is refused."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError, TaskError
from understudy.run.runner import validate_tasks
from understudy.sandbox.unsafe import UnsafeSandboxes
from understudy.tasks import load as tasks_load
from understudy.tasks import records, rows
from understudy.tasks.environment import python_environment
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.records import LoadedTasks
from understudy.tasks.row_formats import task_of
from understudy.types import ImageTree, Sdist, SuiteChecks

from support import calc_task, example_count

BASE = "ab" * 20
TEST_PATCH = """\
diff --git a/tests/test_a.py b/tests/test_a.py
--- a/tests/test_a.py
+++ b/tests/test_a.py
@@ -1 +1 @@
-a
+b
"""
BUG = "diff --git a/x.py b/x.py\n--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-right\n+wrong\n"


def classic(number: int = 1, **changes: Any) -> dict[str, Any]:
    return {
        "repo": "pallets/flask",
        "instance_id": f"pallets__flask-{number}",
        "base_commit": BASE,
        "patch": BUG,
        "test_patch": TEST_PATCH,
        "problem_statement": "Mend it.",
        "hints_text": "",
        "created_at": "2023-01-01",
        "version": "2.3",
        "FAIL_TO_PASS": '["tests/test_a.py::test_a"]',
        "PASS_TO_PASS": "[]",
        "environment_setup_commit": BASE,
        **changes,
    }


def live(**changes: Any) -> dict[str, Any]:
    return {
        "repo": "a/b",
        "instance_id": "a__B-7",
        "pull_number": "7",
        "base_commit": BASE,
        "patch": BUG,
        "test_patch": TEST_PATCH,
        "problem_statement": "Mend it.",
        "rebuild_cmds": ["pip install ."],
        "test_cmds": ["export X=1", "pytest -rA"],
        "print_cmds": [],
        "log_parser": "pytest",
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
        **changes,
    }


def smith(**changes: Any) -> dict[str, Any]:
    return {
        "instance_id": "a__b.12345678.lm_rewrite__x",
        "repo": "swesmith/a__b.12345678",
        "image_name": "jyangballin/swesmith.x86_64.a_1776_b.12345678",
        "patch": BUG,
        "FAIL_TO_PASS": ["tests/test_a.py::test_a[x y]"],
        "PASS_TO_PASS": ["tests/test_b.py::test_b", "tests/test_a.py::test_c"],
        "problem_statement": "It is wrong.",
        **changes,
    }


def rebench(**changes: Any) -> dict[str, Any]:
    return {
        "repo": "Owner/name",
        "instance_id": "owner__name-1",
        "base_commit": BASE,
        "created_at": 1609298073000,
        "patch": BUG,
        "test_patch": TEST_PATCH,
        "problem_statement": "Mend it.",
        "image_name": "swerebenchv2/owner-name:1",
        "install_config": {"test_cmd": ["pytest -rA tests"], "log_parser": "parse_log_pytest", "install": ["x"]},
        "FAIL_TO_PASS": ["tests/test_a.py::test_a"],
        "PASS_TO_PASS": [],
        **changes,
    }


def multi(**changes: Any) -> dict[str, Any]:
    return {
        "org": "Cli",
        "repo": "cli",
        "number": 12,
        "title": "Mend",
        "base": {"label": "x", "ref": "trunk", "sha": BASE},
        "resolved_issues": [{"number": 3, "title": "It breaks", "body": "Badly."}],
        "fix_patch": BUG,
        "test_patch": TEST_PATCH,
        "f2p_tests": {"TestA": {"run": "NONE", "test": "FAIL", "fix": "PASS"}},
        "n2p_tests": {"TestN": {}},
        "p2p_tests": {"TestB": {}},
        **changes,
    }


def load(*specs: Path | str, cache: Path, **options: Any) -> LoadedTasks:
    loading = tasks_load.load_tasks(map(str, specs), sandboxes=UnsafeSandboxes(), cache=cache, **options)
    return asyncio.run(loading)


def jsonl(path: Path, rows: Iterable[Any]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
    return path


# --- formats ---------------------------------------------------------------------------------------------


def test_a_swe_bench_live_row_becomes_a_task():
    task = task_of(live())
    assert task.image == "starryzhang/sweb.eval.x86_64.a_1776_b-7:latest"
    assert task.source == ImageTree(BASE)
    checks = task.checks
    assert isinstance(checks, SuiteChecks)
    assert checks.command == "export X=1\npytest -rA"
    assert checks.install == "pip install ."
    assert checks.parser == "parse_log_pytest"
    assert task_of(live(), ImageChoice("mine")).image == "mine/sweb.eval.x86_64.a_1776_b-7:latest"
    assert task_of(live(docker_image="starryzhang/other:x")).image == "starryzhang/other:x"


def test_print_commands_of_swe_bench_live_keep_the_exit_code_of_the_tests():
    checks = task_of(live(test_cmds=["(exit 3)"], print_cmds=["echo read me"])).checks
    assert isinstance(checks, SuiteChecks)
    done = subprocess.run(["bash", "-c", checks.command], capture_output=True, check=False)
    assert (done.returncode, done.stdout) == (3, b"read me\n")


def test_a_swe_smith_row_becomes_a_task():
    task = task_of(smith(), ImageChoice("swebench", "t"))
    assert task.setup_patch == BUG
    assert "-wrong\n+right\n" in task.gold_patch
    assert task.image == "swebench/swesmith.x86_64.a_1776_b.12345678:t"
    checks = task.checks
    assert isinstance(checks, SuiteChecks)
    assert checks.command.endswith(" tests/test_a.py tests/test_b.py")
    assert checks.files == ("tests/test_a.py", "tests/test_b.py")
    assert checks.test_patch == ""


def test_rows_of_both_swe_rebench_versions_become_tasks():
    second = task_of(rebench())
    assert isinstance(second.checks, SuiteChecks)
    assert (second.workdir, second.image) == ("/name", "swerebenchv2/owner-name:1")
    assert (second.checks.command, second.checks.install) == ("pytest -rA tests", "")
    config = {"test_cmd": "pytest -rA", "log_parser": "parse_log_pytest", "install": "pip install -e ."}
    image = "swerebench/sweb.eval.x86_64.owner_1776_name-1"
    first = task_of(rebench(docker_image=image, image_name=None, install_config=json.dumps(config)))
    assert isinstance(first.checks, SuiteChecks)
    assert (first.workdir, first.image) == ("/testbed", image)
    assert first.checks.command == "pytest -rA tests/test_a.py"
    assert first.checks.install == "pip install -e ."


def test_a_multi_swe_bench_row_becomes_a_task():
    task = task_of(multi(log_parser="parse_log_gotest"))
    assert task.instance_id == "Cli__cli-12"
    assert task.image == "mswebench/cli_m_cli:pr-12"
    assert (task.workdir, task.source) == ("/home/cli", ImageTree(BASE))
    assert "It breaks\n\nBadly." in task.instruction
    checks = task.checks
    assert isinstance(checks, SuiteChecks)
    assert checks.fail_to_pass == ("TestA", "TestN")
    assert checks.pass_to_pass == ("TestB",)
    assert checks.command == "bash /home/run.sh"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (live(test_cmds=[]), "test_cmds: is empty"),
        (live(log_parser="def parser(log):\n    return {}"), "log_parser: is a program"),
        (live(log_parser="unknown"), "log_parser: expected the name of a parser"),
        (live(FAIL_TO_PASS=[]), "FAIL_TO_PASS: is empty"),
        (live(docker_image="starryzhang/sweb.eval.win.a_1776_b-7"), "docker_image: .* is for Windows"),
        (live(rebuild_cmds=[1]), "rebuild_cmds: expected a list of strings"),
        (smith(problem_statement=""), "problem_statement: is empty"),
        (smith(problem_statement=None), "problem_statement: is empty"),
        (smith(patch="nonsense"), "patch: cannot be reversed"),
        (smith(patch=""), "patch: is empty"),
        (
            smith(FAIL_TO_PASS=["TestX"]),
            "FAIL_TO_PASS, PASS_TO_PASS: expected ids of pytest, such as .*, got 'TestX'",
        ),
        (smith(FAIL_TO_PASS=["../../x.py::a"]), "checks.files: got .*, expected paths inside"),
        (rebench(image_name=None), "image_name: is missing"),
        (rebench(install_config={}), "parser: expected a string"),
        (rebench(install_config="{"), "install_config: expected an object"),
        (rebench(install_config={"log_parser": "parse_log_x"}), "install_config.test_cmd: is empty"),
        (rebench(repo="a/.."), "repo: expected OWNER/NAME"),
        (rebench(repo="a/etc"), "workdir: got .*, expected"),
        (multi(), "log_parser: missing"),
        (multi(number="12"), "number: expected a positive integer"),
        (multi(org="../x"), "org: expected letters"),
        (multi(log_parser="parse_log_gotest", f2p_tests={}, n2p_tests=None), "f2p_tests: is empty"),
        (multi(log_parser="parse_log_gotest", resolved_issues="x"), "resolved_issues: expected a list"),
        (
            multi(log_parser="parse_log_gotest", resolved_issues=[], title=""),
            "resolved_issues: have no title or body",
        ),
        ({"expected_output_json": "{}"}, "R2E-Gym rows are unsupported"),
        ({"before_repo_set_cmd": "", "selected_test_files_to_run": ""}, "SWE-bench Pro rows are unsupported"),
        ({"colour": "red"}, "unsupported row format"),
    ],
)
def test_invalid_rows_are_refused_with_the_reason(row: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        task_of(row)


_ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=12),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
_SCRIPT = (
    "cd /testbed\ngit apply - <<'E'\n"
    + TEST_PATCH
    + "\nE\n: '>>>>> Start Test Output'\nx\n: '>>>>> End Test Output'\n"
)
_ROWS = (
    classic(),
    classic(image="a/b", eval_script=_SCRIPT, log_parser="parse_log_x", eval_type="fail_only"),
    live(),
    smith(),
    rebench(),
    multi(log_parser="parse_log_gotest"),
)


@settings(max_examples=example_count(300))
@given(st.data())
def test_any_row_becomes_a_valid_task_or_is_refused(data: st.DataObject):
    row = dict(data.draw(st.sampled_from(_ROWS)))
    for key in data.draw(st.lists(st.sampled_from(sorted(row)), min_size=1, max_size=3)):
        value = row[key]
        if isinstance(value, str) and data.draw(st.booleans()):
            row[key] = value[: data.draw(st.integers(0, len(value)))]
        else:
            row[key] = data.draw(_ANYTHING)
    try:
        task = task_of(row)
    except TaskError as error:
        assert str(error)
    else:
        records.record(msgspec.to_builtins(task), "again", Path("/"))


# --- files and names -------------------------------------------------------------------------------------


def test_a_file_may_mix_dataset_formats_and_task_records(tmp_path: Path):
    rows = [classic(), msgspec.to_builtins(calc_task()), live(), smith(), rebench(), multi()]
    loaded = load(jsonl(tmp_path / "mixed.jsonl", rows), cache=tmp_path)
    assert [task.instance_id for task in loaded.tasks] == [
        "pallets__flask-1",
        "calc-0",
        "a__B-7",
        "a__b.12345678.lm_rewrite__x",
        "owner__name-1",
    ]
    assert loaded.tasks[1] == calc_task()
    (refusal,) = loaded.refused
    assert refusal.where == f"{tmp_path}/mixed.jsonl:6"
    assert "log_parser: missing" in refusal.reason


def test_refused_rows_are_counted_by_reason(tmp_path: Path):
    empty = [smith(instance_id=f"a-{number}", problem_statement="") for number in range(3)]
    loaded = load(jsonl(tmp_path / "t.jsonl", [*empty, classic(version="9"), classic(2)]), cache=tmp_path)
    assert len(loaded.tasks) == 1
    first, second = loaded.report()
    assert first.startswith("refused 3 rows, the first at ")
    assert "t.jsonl:1 (a-0): problem_statement: is empty" in first
    assert "refused 1 row, " in second
    assert loaded.report(max_reasons=1)[-1] == "and rows refused for 1 other reasons"


def test_a_file_without_valid_rows_is_an_error_with_the_reasons(tmp_path: Path):
    path = jsonl(tmp_path / "t.jsonl", [classic(version="9"), classic(2, version="9")])
    message = r"none of its rows can become a task; correct .*\nrefused 2 rows, the first at .*:1 "
    with pytest.raises(TaskError, match=message):
        load(path, cache=tmp_path)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b'{"a"', r"t\.jsonl:2: invalid JSON"),
        (b"[1]", r"t\.jsonl:2: invalid task record: expected an object"),
        (b"\xff\xfe", r"t\.jsonl:2: invalid JSON"),
        (b"[" * 100_000, r"t\.jsonl:2: invalid JSON"),
    ],
)
def test_lines_that_are_not_json_rows_are_refused(tmp_path: Path, data: bytes, message: str):
    path = jsonl(tmp_path / "t.jsonl", [classic()])
    path.write_bytes(path.read_bytes() + data)
    with pytest.raises(TaskError, match=message):
        load(path, cache=tmp_path)


def test_a_repeated_id_is_refused(tmp_path: Path):
    loaded = load(jsonl(tmp_path / "t.jsonl", [classic(), classic()]), cache=tmp_path)
    assert len(loaded.tasks) == 1
    assert "occurs twice" in loaded.refused[0].reason


def test_only_selected_ids_are_loaded_and_unknown_ids_reported(tmp_path: Path):
    one = jsonl(tmp_path / "a.jsonl", [classic(number) for number in range(5)])
    two = jsonl(tmp_path / "b.jsonl", [live(), smith(problem_statement="")])
    selected_ids = ["a__B-7", "pallets__flask-3", "absent-1", smith()["instance_id"]]
    loaded = load(one, two, cache=tmp_path, instance_ids=selected_ids)
    assert [task.instance_id for task in loaded.tasks] == ["pallets__flask-3", "a__B-7"]
    assert [refusal.instance_id for refusal in loaded.refused] == [smith()["instance_id"]]
    assert loaded.unknown == ("absent-1",)


def test_rows_load_from_a_json_list(tmp_path: Path):
    (tmp_path / "t.json").write_text(json.dumps([classic(), live()]))
    assert len(load(tmp_path / "t.json", cache=tmp_path).tasks) == 2
    (tmp_path / "t.json").write_text(json.dumps({"rows": []}))
    with pytest.raises(TaskError, match=r"t\.json: expected a list of objects, (?:found|got) an object"):
        load(tmp_path / "t.json", cache=tmp_path)
    (tmp_path / "t.json").write_text("[3]")
    with pytest.raises(TaskError, match=r"t\.json\[1\]: invalid task record"):
        load(tmp_path / "t.json", cache=tmp_path)


def test_rows_load_from_parquet_files_and_directories_by_split(tmp_path: Path):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    data = tmp_path / "set" / "data"
    data.mkdir(parents=True)
    for name, numbers in (("dev", (1,)), ("test", (2, 3))):
        rows = [classic(number, version="9" if number == 3 else "2.3") for number in numbers]
        parquet.write_table(arrow.Table.from_pylist(rows), data / f"{name}-00000-of-00001.parquet")
    loaded = load(tmp_path / "set", cache=tmp_path)
    assert [task.instance_id for task in loaded.tasks] == ["pallets__flask-2"]
    assert loaded.refused[0].where.endswith("test-00000-of-00001.parquet: row 2")
    assert len(load(f"{tmp_path}/set:dev", cache=tmp_path).tasks) == 1
    assert len(load(data / "dev-00000-of-00001.parquet", cache=tmp_path).tasks) == 1
    with pytest.raises(ConfigError, match="has no split 'train'; available: dev, test"):
        load(f"{tmp_path}/set:train", cache=tmp_path)
    (data / "dev-00000-of-00001.parquet").write_bytes(b"PAR1 not at all")
    with pytest.raises(TaskError, match="cannot be read as Parquet"):
        load(f"{tmp_path}/set:dev", cache=tmp_path)


def test_without_pyarrow_the_error_says_what_to_install(tmp_path: Path):
    (tmp_path / "t.parquet").write_bytes(b"PAR1")
    program = (
        "import sys; sys.modules['pyarrow'] = None\n"
        "from pathlib import Path\n"
        "from understudy.tasks import rows\n"
        "list(rows.read_rows(Path(sys.argv[1])))\n"
    )
    argv = [sys.executable, "-c", program, str(tmp_path / "t.parquet")]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert "ConfigError" in done.stderr
    assert "pip install 'understudy[hf]'" in done.stderr


def test_datasets_load_from_the_hub_and_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    dataset = datasets.DatasetDict(
        {name: datasets.Dataset.from_list([classic(number)]) for number, name in enumerate(("dev", "test"))}
    )
    dataset.save_to_disk(str(tmp_path / "saved"))
    loaded = load(tmp_path / "saved", cache=tmp_path)
    assert [task.instance_id for task in loaded.tasks] == ["pallets__flask-1"]
    assert len(load(f"{tmp_path}/saved:dev", cache=tmp_path).tasks) == 1
    for name, split in dataset.items():
        split.to_parquet(tmp_path / "repository" / "data" / f"{name}-00000-of-00001.parquet")
    # `load_dataset` takes the path of a local repository where a name on the hub can stand.
    loaded = list(rows.hub_rows(rows.HubName(str(tmp_path / "repository"), "dev")))
    assert [row["instance_id"] for _, row in loaded] == ["pallets__flask-0"]
    assert loaded[0][0] == f"{tmp_path}/repository:dev: row 1"
    with pytest.raises(ConfigError, match="has no split 'train'"):
        list(rows.hub_rows(rows.HubName(str(tmp_path / "repository"), "train")))
    with pytest.raises(ConfigError, match="the dataset cannot be loaded"):
        list(rows.hub_rows(rows.HubName(str(tmp_path / "absent"))))


def test_hub_names_are_parsed_with_split_and_revision():
    assert rows.parse_hub_name("SWE-bench/SWE-bench_Verified") == rows.HubName("SWE-bench/SWE-bench_Verified")
    assert rows.parse_hub_name("a/b:test@v1.0/x") == rows.HubName("a/b", "test", "v1.0/x")
    assert rows.parse_hub_name("a/b@abc") == rows.HubName("a/b", "", "abc")
    for other in ("verified", "/a/b", "./a/b", "a/b/c", "a/b:", "a /b"):
        assert rows.parse_hub_name(other) is None, other


@pytest.mark.parametrize("spec", ["verified", "tasks/absent.jsonl", "a/b/c", "nothing:test", ""])
def test_a_source_that_is_neither_path_nor_hub_name_is_refused(spec: str, tmp_path: Path):
    message = "unsupported kind|does not exist; give a file of task records"
    with pytest.raises(TaskError, match=message):
        load(spec, cache=tmp_path)


def test_thousands_of_rows_load(tmp_path: Path):
    ids = json.dumps([f"tests/test_a.py::test_{number}" for number in range(200)])
    path = jsonl(tmp_path / "t.jsonl", [classic(number, PASS_TO_PASS=ids) for number in range(3000)])
    assert len(load(path, cache=tmp_path).tasks) == 3000


# --- the smoke set ---------------------------------------------------------------------------------------


def test_the_smoke_rows_are_valid_tasks(tmp_path: Path):
    loaded = load("smoke", cache=tmp_path)
    assert len(loaded.tasks) == 5
    assert not loaded.refused
    for task in loaded.tasks:
        assert isinstance(task.source, Sdist)
        assert task.meta["license"] in ("MIT", "BSD-3-Clause")
        assert isinstance(task.checks, SuiteChecks)
        assert task.checks.files
        records.check(task, "smoke")


@pytest.mark.services
@pytest.mark.usefixtures("isolation")
def test_the_smoke_instances_pass_intake():
    from understudy.config import cache_dir
    from understudy.sandbox.local.sandboxes import LocalSandboxes

    cache, sandboxes = cache_dir(), LocalSandboxes()

    async def validated() -> dict[str, str]:
        loaded = await tasks_load.load_source("smoke", sandboxes=sandboxes, cache=cache)
        intake = await validate_tasks(
            loaded.tasks,
            cache=cache,
            sandboxes=sandboxes,
            environment=python_environment(cache),
            concurrency=2,
        )
        return intake.refused

    assert asyncio.run(validated()) == {}


@pytest.mark.services
@pytest.mark.usefixtures("isolation")
def test_the_smoke_rows_equal_the_output_of_their_script():
    script = Path(__file__).parents[3] / "scripts" / "make_smoke.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_directory_without_parquet_files_has_no_split(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"has no split; expected \.parquet files in this directory"):
        list(rows.read_rows(tmp_path))
