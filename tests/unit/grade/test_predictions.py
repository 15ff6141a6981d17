"""Predictions files: as the harness takes them, row by row, with what is wrong named by its line."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.grade.predictions import MAX_ROW_BYTES, open_predictions
from understudy.tasks.patch import MAX_PATCH_BYTES

from support import calc_task
from support.grading import gate_of

PATCH = "--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-a é\n+b \u2028\n"


def row(name: str, patch: Any = PATCH, **more: Any) -> dict[str, Any]:
    return {"instance_id": name, "model_name_or_path": "org/m", "model_patch": patch, **more}


def jsonl(path: Path, *rows: Any) -> str:
    path.write_text("".join(f"{each if isinstance(each, str) else json.dumps(each)}\n" for each in rows))
    return str(path)


@pytest.mark.parametrize("shape", ["jsonl", "list", "dict"])
def test_predictions_are_read_from_jsonl_lists_and_mappings(shape: str, tmp_path: Path):
    rows = [row("a"), row("b", ""), row("c", None, extra=[1])]
    path = tmp_path / ("p.jsonl" if shape == "jsonl" else "p.json")
    if shape == "jsonl":
        jsonl(path, *rows, "")
    else:
        path.write_text(json.dumps(rows if shape == "list" else {each["instance_id"]: each for each in rows}))
    predictions = open_predictions(str(path), ())
    assert [(each.instance_id, each.model, each.empty) for each in predictions.rows.values()] == [
        ("a", "org/m", False),
        ("b", "org/m", True),
        ("c", "org/m", True),
    ]
    assert [predictions.patch(each).data for each in predictions.rows.values()] == [PATCH.encode(), b"", b""]
    assert predictions.rejected.count == 0


def test_gold_predictions_are_the_gold_patches_of_the_tasks(tmp_path: Path):
    tasks = [calc_task(number) for number in range(3)]
    predictions = open_predictions("gold", tasks, {"calc-0", "calc-2"})
    assert {each.instance_id: each.model for each in predictions.rows.values()} == {
        "calc-0": "gold",
        "calc-2": "gold",
    }
    assert predictions.patch(predictions.rows["calc-2"]).data == tasks[2].gold_patch.encode()


def test_bad_rows_are_reported_and_the_others_read(tmp_path: Path):
    bad = [
        "nonsense",
        {"model_patch": "x"},
        {"instance_id": "x"},
        row("x", 3),
        row("x", ["a"]),
        row("x", model_name_or_path=".."),
        row("x", model_name_or_path="a\nb"),
        '{"instance_id": "x", "model_patch": "\\ud800"}',
        "[" * 100_000,
        "\x00",
    ]
    predictions = open_predictions(jsonl(tmp_path / "p.jsonl", row("a"), *bad, row("b")), ())
    assert list(predictions.rows) == ["a", "b"]
    assert predictions.rejected.count == len(bad)
    assert [message.split(": ")[0] for message in predictions.rejected.messages] == [
        f"{tmp_path}/p.jsonl:{number}" for number in range(2, 12)
    ]


def test_many_bad_rows_are_counted_and_some_shown(tmp_path: Path):
    predictions = open_predictions(jsonl(tmp_path / "p.jsonl", *["?"] * 500, row("a")), ())
    assert (predictions.rejected.count, len(predictions.rejected.messages)) == (500, 20)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("p.jsonl", "", "has no prediction, expected at least one"),
        ("p.json", "[]", "has no prediction, expected at least one"),
        ("p.json", "{", "expected a JSON list of predictions or an object"),
        ("p.json", '{"instance_id": "a"}\n{"instance_id": "b"}', "one prediction per line in a .jsonl file"),
        ("p.csv", "a,b", "give a .jsonl or .json file"),
        ("p.jsonl", None, "cannot be read: No such file"),
        (
            "p.jsonl",
            "\n".join(json.dumps(row("a")) for _ in range(2)),
            r"p.jsonl:2: 'a' has another prediction at .*:1;",
        ),
        ("p.json", json.dumps([row("a"), row("a")]), r"prediction 2: 'a' has another prediction"),
    ],
)
def test_unusable_prediction_files_are_config_errors(name: str, content: str | None, message: str, tmp_path: Path):
    if content is not None:
        (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message):
        open_predictions(str(tmp_path / name), ())


def test_only_rows_of_the_selected_instances_are_read(tmp_path: Path):
    given_rows = jsonl(tmp_path / "p.jsonl", row("a"), row("b"), row("b"))
    assert list(open_predictions(given_rows, (), {"a"}).rows) == ["a"]
    with pytest.raises(ConfigError, match="that --instance-ids selects"):
        open_predictions(given_rows, (), {"c"})


def test_a_file_that_changes_while_it_is_graded(tmp_path: Path):
    predictions = open_predictions(jsonl(tmp_path / "p.jsonl", row("a"), row("b")), ())
    jsonl(tmp_path / "p.jsonl", row("b"), row("a"))
    with pytest.raises(ConfigError, match="the file changed"):
        predictions.patch(predictions.rows["a"])
    (tmp_path / "p.jsonl").unlink()
    with pytest.raises(ConfigError, match="can no longer be read"):
        predictions.patch(predictions.rows["a"])


def test_a_patch_of_100_mb_is_refused_without_being_held(tmp_path: Path):
    """Read in a process of its own: the row is held once while it is read, the patch never."""
    path = tmp_path / "p.jsonl"
    with path.open("w") as file:
        file.write(json.dumps(row("small")) + "\n")
        file.write('{"instance_id": "large", "model_patch": "')
        for _ in range(100):
            file.write("+x\\n" * (1 << 18))
        file.write('"}\n' + json.dumps(row("last")) + "\n")
    script = (
        "import sys, resource; from understudy.grade.predictions import open_predictions\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "predictions = open_predictions(sys.argv[1], ())\n"
        "patches = [predictions.patch(row).data for row in predictions.rows.values()]\n"
        "grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before\n"
        "print(grown, *map(len, patches), patches[1].decode())"
    )
    done = subprocess.run([sys.executable, "-c", script, str(path)], capture_output=True, text=True, check=True)
    memory_growth_kib, small, large, last, *large_text = done.stdout.split()
    assert (int(small), int(last)) == (len(PATCH.encode()),) * 2
    assert int(large) < 200
    assert int(memory_growth_kib) * 1024 < 2.5 * path.stat().st_size
    refused = gate_of(" ".join(large_text).encode(), calc_task()).refused
    assert refused == f"the patch is larger than {MAX_PATCH_BYTES} bytes"


def test_a_row_over_the_size_limit_is_skipped(tmp_path: Path):
    path = tmp_path / "p.jsonl"
    with path.open("wb") as file:
        file.write(json.dumps(row("a")).encode() + b"\n")
        file.truncate(file.tell() + MAX_ROW_BYTES + 5)  # a hole takes no room on the disk
        file.seek(0, 2)
        file.write(b"\n" + json.dumps(row("b")).encode())
    predictions = open_predictions(str(path), ())
    assert list(predictions.rows) == ["a", "b"]
    assert predictions.rejected.messages == [
        f"{path}:2: not a prediction: the line is longer than {MAX_ROW_BYTES} bytes, the maximum; shorten its "
        "model_patch, or remove the line"
    ]
    assert predictions.patch(predictions.rows["b"]).data == PATCH.encode()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    patches=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=1, max_size=5),
    ascii=st.booleans(),
)
def test_patches_are_read_back_unchanged(patches: list[str], ascii: bool, tmp_path: Path):
    path = tmp_path / "p.jsonl"
    rows = [json.dumps(row(str(number), patch), ensure_ascii=ascii) for number, patch in enumerate(patches)]
    path.write_bytes("\n".join(rows).encode())
    predictions = open_predictions(str(path), ())
    assert [predictions.patch(each).data for each in predictions.rows.values()] == [
        patch.encode() for patch in patches
    ]
    assert [each.empty for each in predictions.rows.values()] == [not patch for patch in patches]


def test_the_digest_is_that_of_the_patch_as_given(tmp_path: Path):
    predictions = open_predictions(jsonl(tmp_path / "p.jsonl", row("a"), row("b"), row("c", "other")), ())
    digests = [predictions.patch(each).digest for each in predictions.rows.values()]
    assert digests[0] == digests[1] == hashlib.sha256(json.dumps(PATCH).encode()).hexdigest()
    assert digests[2] != digests[0]
