"""SWE-bench's rows become tasks that do what its harness would do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from understudy.checks.log_parsers import PARSERS
from understudy.errors import ConfigError, TaskError
from understudy.grade.official import as_harness_row
from understudy.tasks import eval_script
from understudy.tasks.recipes import ImageChoice
from understudy.tasks.row_formats import task_of
from understudy.types import ImageTree, SuiteChecks

BASE = "0123456789" * 4
RECORDED = json.loads((Path(__file__).parents[2] / "data" / "swebench_recipes.json").read_text())
TEST_PATCH: str = RECORDED["test_patch"]


def row(**changes: Any) -> dict[str, Any]:
    """A classic row, as of SWE-bench Verified."""
    fields = {
        "repo": "pallets/flask",
        "instance_id": "pallets__flask-5014",
        "base_commit": BASE,
        "patch": "diff --git a/src/x.py b/src/x.py\n",
        "test_patch": TEST_PATCH,
        "problem_statement": "Require a non-empty name.",
        "hints_text": "Look at line 7.",
        "created_at": "2023-03-04T18:36:21Z",
        "version": "2.3",
        "FAIL_TO_PASS": '["tests/test_new.py::test_a"]',
        "PASS_TO_PASS": '["tests/test_new.py::test_b"]',
        "environment_setup_commit": BASE,
        "difficulty": "<15 min fix",
        **changes,
    }
    return {key: value for key, value in fields.items() if value is not ...}


def script(*before: str, after: tuple[str, ...] = (), tests: str = "pytest -rA tests/test_new.py") -> str:
    """An evaluation script as the harness writes it."""
    lines = [
        "#!/bin/bash",
        "set -uxo pipefail",
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        "cd /testbed",
        *before,
        f"git checkout {BASE} tests/mod/test_one.py",
        f"git apply -v - <<'EOF_114329324912'\n{TEST_PATCH}\nEOF_114329324912",
        *after,
        ": '>>>>> Start Test Output'",
        tests,
        ": '>>>>> End Test Output'",
        f"git checkout {BASE} tests/mod/test_one.py",
    ]
    return "\n".join(lines) + "\n"


def fifth(text: str, **changes: Any) -> dict[str, Any]:
    """A row of the fifth version."""
    own = {
        "image": "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest",
        "eval_script": text,
        "log_parser": "parse_log_pytest",
        "eval_type": "pass_and_fail",
    }
    return row(**{**own, **changes})


def checks_of(instance: dict[str, Any]) -> SuiteChecks:
    checks = task_of(instance).checks
    assert isinstance(checks, SuiteChecks)
    return checks


def test_a_classic_row_becomes_a_task():
    task = task_of(row())
    assert task.source == ImageTree(BASE)
    assert task.image == "swebench/sweb.eval.x86_64.pallets_1776_flask-5014:latest"
    assert task.workdir == "/testbed"
    assert "Require a non-empty name." in task.instruction
    assert "line 7" not in task.instruction
    assert task.meta["difficulty"] == "<15 min fix"
    assert task.meta["version"] == "2.3"
    checks = task.checks
    assert isinstance(checks, SuiteChecks)
    assert checks.command == "pytest -rA tests/mod/test_one.py tests/test_new.py"
    assert checks.files == ("tests/mod/test_one.py", "tests/test_new.py")
    assert checks.install == "python -m pip install -e ."
    assert "conda activate testbed" in checks.activate
    assert checks.fail_to_pass == ("tests/test_new.py::test_a",)
    assert checks.pass_to_pass == ("tests/test_new.py::test_b",)


def test_fail_and_pass_lists_may_be_lists_or_json_strings():
    assert checks_of(row(FAIL_TO_PASS=["a"], PASS_TO_PASS=[])).fail_to_pass == ("a",)
    assert checks_of(row(FAIL_TO_PASS=["a"], PASS_TO_PASS=...)).pass_to_pass == ()


@pytest.mark.parametrize(
    ("choice", "image"),
    [
        (ImageChoice("starryzhang"), "starryzhang/sweb.eval.x86_64.a_1776_b-1:latest"),
        (ImageChoice(instance_image_tag="v2"), "swebench/sweb.eval.x86_64.a_1776_b-1:v2"),
        (ImageChoice("none"), "sweb.eval.x86_64.a__b-1:latest"),
        (ImageChoice("here.example:5000/x", "t"), "here.example:5000/x/sweb.eval.x86_64.a_1776_b-1:t"),
    ],
)
def test_the_image_choice_applies_to_classic_and_new_rows(choice: ImageChoice, image: str):
    assert task_of(row(instance_id="A__b-1"), choice).image == image
    row_with_image = fifth(script(), image="swebench/sweb.eval.x86_64.a_1776_b-1:latest")
    assert task_of(row_with_image, choice).image == image


@pytest.mark.parametrize("choice", [{"namespace": "Not An Image"}, {"instance_image_tag": "a b"}])
def test_an_invalid_image_choice_is_refused(choice: dict[str, str]):
    with pytest.raises(ConfigError, match="; give "):
        ImageChoice(**choice)


@pytest.mark.parametrize("repo", sorted(RECORDED["recipes"]))
def test_commands_of_every_version_match_the_recorded_harness(repo: str):
    """The digests are of swebench 4.1.0's own scripts; scripts/record_recipes.py made them."""
    same_parser = {id(parser): name for name, parser in reversed(PARSERS.items())}
    for version, expected in RECORDED["recipes"][repo].items():
        checks = checks_of(row(repo=repo, version=version))
        exports = [line for line in checks.activate.split("\n") if line.startswith("export ")]
        own = [*checks.before.split("\n"), *exports, checks.install, checks.command]
        parser = same_parser[id(PARSERS[checks.parser])]
        steps = json.dumps([[line for line in own if line], parser])
        assert hashlib.sha256(steps.encode()).hexdigest()[:12] == expected, (repo, version)


def test_commands_of_every_version_match_the_installed_harness():
    """The same, and that its scripts are taken apart into what our table says, with the package itself."""
    constants = pytest.importorskip("swebench.harness.constants")
    if not hasattr(constants, "MAP_REPO_VERSION_TO_SPECS_PY"):
        pytest.skip("this swebench has no tables; they were in 4.1.0")
    from swebench.harness.test_spec.python import make_eval_script_list_py  # pyright: ignore

    for repo, recipes in RECORDED["recipes"].items():
        for version in recipes:
            instance = row(repo=repo, version=version)
            spec = constants.MAP_REPO_VERSION_TO_SPECS_PY[repo][version]
            lines = make_eval_script_list_py(instance, spec, "testbed", "/testbed", BASE, TEST_PATCH)
            text = "\n".join(["#!/bin/bash", "set -uxo pipefail", *lines]) + "\n"
            assert phases(checks_of(instance)) == phases(checks_of(fifth(text, repo=repo, version=version)))


def phases(checks: SuiteChecks) -> tuple[str, ...]:
    return checks.activate, checks.before, checks.install, checks.command, checks.test_patch


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repo": "some/thing"}, "repo: 'some/thing' has no test commands"),
        ({"version": "99"}, "version: pallets/flask has no version '99'"),
        ({"FAIL_TO_PASS": "[]"}, "FAIL_TO_PASS: is empty"),
        ({"FAIL_TO_PASS": ...}, "FAIL_TO_PASS: is empty"),
        ({"FAIL_TO_PASS": "[1]"}, "FAIL_TO_PASS: expected a list of strings"),
        ({"FAIL_TO_PASS": 7}, "FAIL_TO_PASS: expected a list of strings, or JSON of one, got a number"),
        ({"patch": ""}, "patch: is empty"),
        ({"patch": None}, "patch: expected a string, got nothing"),
        ({"problem_statement": " "}, "problem_statement: is empty"),
        ({"base_commit": "main; rm -rf /"}, "base_commit: invalid commit .*expected 40"),
        ({"instance_id": "../../x"}, "instance_id: got .*, expected letters"),
        ({"version": 2.3}, "version: expected a string, got a number"),
        ({"image_assets": '{"test_patch": [{"path": "a.png"}]}'}, "image_assets.test_patch: .* network"),
    ],
)
def test_invalid_rows_are_refused_with_the_reason(changes: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        task_of(row(**changes))


# --- evaluation scripts ----------------------------------------------------------------------------------


def test_an_eval_script_is_split_into_its_phases():
    checks = checks_of(
        fifth(
            script(
                "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen",
                "export LANG=en_US.UTF-8",
                "git config --global --add safe.directory /testbed",
                "cd /testbed",
                "git status",
                "git show",
                f"git -c core.fileMode=false diff {BASE}",
                "source /opt/miniconda3/bin/activate",
                "conda activate testbed",
                "python -m pip install -e .[test] --verbose",
            )
        )
    )
    assert checks.activate.split("\n") == [
        "set -o pipefail",
        "source /opt/miniconda3/bin/activate",
        "conda activate testbed",
        "export LANG=en_US.UTF-8",
    ]
    assert checks.before == "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen"
    assert checks.install == "python -m pip install -e .[test] --verbose"
    assert checks.command == "pytest -rA tests/test_new.py"
    assert checks.test_patch == TEST_PATCH
    assert not checks.only_failures_count


def test_commands_after_the_test_patch_are_build_steps():
    after = ("mkdir -p build", "export CC=gcc", "cd build", "cmake ..", "make tests", "cd ..", "echo built")
    checks = checks_of(fifth(script(after=after, tests="cd tests\n./run -v"), eval_type="fail_only"))
    assert checks.install == "mkdir -p build\nexport CC=gcc\ncd build\ncmake ..\nmake tests\ncd .."
    assert checks.command == "export CC=gcc\ncd tests\n./run -v"
    assert checks.only_failures_count


def test_the_test_command_runs_in_the_directory_where_the_build_ends():
    assert checks_of(fifth(script(after=("cd build && cmake ..",)))).command.startswith("cd /testbed/build\n")


def test_here_documents_comments_and_continued_lines_are_parsed():
    before = (
        "# a remark that doesn't end",
        "cat <<EOF > setup.cfg\n[x]\ngit reset\nEOF",
        "printf 'a\nb' > x \\\n  2>&1",
    )
    checks = checks_of(fifth(script(*before)))
    assert checks.before == "cat <<EOF > setup.cfg\n[x]\ngit reset\nEOF\nprintf 'a\nb' > x \\\n  2>&1"


def test_output_markers_inside_the_test_patch_are_ignored():
    patch = TEST_PATCH + ">>>>> Start Test Output\n: '>>>>> End Test Output'\n"
    text = script().replace(TEST_PATCH, patch)
    assert checks_of(fifth(text, test_patch=patch)).command == "pytest -rA tests/test_new.py"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pytest", "has no line with '>>>>> Start"),
        (script().replace(": '>>>>> End Test Output'", ""), "has no line with '>>>>> End"),
        (script(tests="  "), "no command between"),
        (script(tests="x\n: '>>>>> Start Test Output'\ny"), "twice"),
        (script().replace(": '>>>>> Start", "pytest; : '>>>>> Start"), "marks the start of the tests and does"),
        (script("&&"), "has no command"),
        (script("cd elsewhere"), "leaves /testbed before the test patch"),
        (script("cd $HOME"), "cannot be determined"),
        (script("cd sub && make"), "changes the directory and does something else"),
        (script("git reset --hard HEAD~1"), "changes the repository"),
        (script("git checkout main"), "changes the repository"),
        (script("patch -p1 < x.diff"), "changes the repository"),
        (script("git apply fix.diff"), "applies a patch; expected only the test patch"),
        (script("git apply - <<'X'\nother\nX"), "applies a patch; expected only the test patch"),
        (script("if true; then", "pip install x", "fi"), "begins with 'if' and does not end with 'fi'"),
        (script(tests="x").replace("apply -v", "status"), "does not apply the test patch"),
        (script("echo 'open"), "does not apply the test patch"),
        ("echo 'open", "a quote or a backslash at the end is not closed"),
        (f"echo {'x' * 20_000}", "begins here has more than 500 lines or 16384 characters"),
        (script("cat <<NEVER\nx"), "here-document, but no line is 'NEVER'"),
        (script().replace("+it's", "+its"), "applies another test patch"),
        ("\n".join(["true"] * 3000), "more than 2000 statements"),
    ],
)
def test_unsupported_eval_scripts_are_refused_with_the_reason(text: str, message: str):
    with pytest.raises(TaskError, match=f"^eval_script: .*{message}"):
        task_of(fifth(text))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_type": "best_of"}, "eval_type: expected pass_and_fail or fail_only"),
        ({"log_parser": "os.system"}, "log_parser: expected the name of a parser"),
        ({"log_parser": ...}, "log_parser: expected a string"),
        ({"image": "--privileged"}, "image: invalid name '--privileged'"),
    ],
)
def test_invalid_keys_of_new_rows_are_refused(changes: dict[str, Any], message: str):
    with pytest.raises(TaskError, match=message):
        task_of(fifth(script(), **changes))


# --- and back again --------------------------------------------------------------------------------------


def test_the_harness_row_equals_the_original_row():
    original = fifth(script("python -m pip install -e ."))
    harness_row = as_harness_row(task_of(original))
    for key in ("instance_id", "repo", "version", "base_commit", "patch", "test_patch", "eval_script"):
        assert harness_row[key] == original[key], key
    for key in ("image", "log_parser", "eval_type", "difficulty", "created_at"):
        assert harness_row[key] == original[key], key
    assert harness_row["FAIL_TO_PASS"] == json.loads(original["FAIL_TO_PASS"])
    assert len(json.dumps(task_of(original).meta)) < 1500  # nothing large is kept twice


def test_the_harness_row_of_a_classic_row_has_an_equivalent_eval_script():
    task = task_of(row(repo="django/django", version="3.0"))
    harness_row = as_harness_row(task)
    assert harness_row["log_parser"] == "parse_log_django"
    assert phases(checks_of(harness_row)) == phases(task.checks)  # pyright: ignore[reportArgumentType]
    assert harness_row["eval_script"].count(eval_script.START) == 1


def test_tasks_that_the_harness_cannot_grade_are_refused():
    smith = {
        "instance_id": "a__b.1.c",
        "repo": "swesmith/a__b.1",
        "image_name": "x/y",
        "patch": "--- a/x.py\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n",
        "problem_statement": "It breaks.",
        "FAIL_TO_PASS": ["t.py::a"],
        "PASS_TO_PASS": [],
    }
    with pytest.raises(TaskError, match="its bug is added by setup_patch"):
        as_harness_row(task_of(smith))
