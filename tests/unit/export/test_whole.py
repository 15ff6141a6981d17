"""An export is whole or it is not there: interrupted, without room, two at once; and hostile sessions end none."""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import yaml

from understudy import plugins
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary, ProgressCallback, no_progress, traits_of
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.files import MANIFEST
from understudy.export.formats.openai import refusal_reason
from understudy.export.push import plan_push
from understudy.ingest.trace import RequestShape, TurnSignals
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support import files_of_at_most, optional
from support.export import Log, put_rollouts, put_sessions, session

datasets: Any = optional("datasets")


ROWS = ["atif", "llamafactory", "openai", "trl-kto", "trl-sft", "verl"]
"""Formats that have a row for any good turn."""


def export(
    directory: Path, name: str, output: Path, report: ProgressCallback = no_progress, **options: Any
) -> ExportSummary:
    chosen = {key: options.pop(key) for key in list(options) if key in ExportSelection.__struct_fields__}
    function = plugins.load("exports", name)
    selection = {"origins": traits_of(function).origins, "test_share": 0.0, **chosen}
    with Store.open(directory, create=False) as store:
        return function(
            Corpus(store, ExportSelection(**selection), Redactor(bytes(32))), output, report=report, **options
        )


def content(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def many(directory: Path, count: int = 40) -> Path:
    put_sessions(directory, [session(f"s{n}", project=f"/srv/p{n}") for n in range(count)])
    return directory


def stop(done: int, of: int) -> None:
    if done < of or not of:
        raise KeyboardInterrupt


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return many(tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("name", ROWS)
def test_an_interrupted_export_leaves_the_earlier_one(store: Path, tmp_path: Path, name: str):
    export(store, name, tmp_path, where="project = '/srv/p1'")
    before = content(tmp_path)
    with pytest.raises(KeyboardInterrupt):
        export(store, name, tmp_path, stop, **({"unit": "turn"} if name == "llamafactory" else {}))
    assert content(tmp_path) == before


@pytest.mark.parametrize("name", ROWS)
def test_a_full_disk_leaves_the_earlier_export(tmp_path: Path, name: str):
    noise = Log("noise", project="/srv/noise")
    ask = noise.user(-1, "".join(map(chr, range(0x4E00, 0x9E00))) * 20)
    noise.answer(ask, "Long.", signals=TurnSignals(commits=1))
    put_sessions(tmp_path / "store", [session("s"), noise.trace])
    out = tmp_path / "out"
    more = {"max_tokens": 0} if name == "openai" else {}
    export(tmp_path / "store", name, out, where="project != '/srv/noise'", **more)
    before = content(out)
    with files_of_at_most(50_000), pytest.raises(ConfigError, match="choose another --output"):
        export(tmp_path / "store", name, out, **more)
    assert content(out) == before


def test_datasets_of_a_run_are_whole_when_the_disk_is_full(tmp_path: Path):
    put_rollouts(tmp_path / "store")
    export(tmp_path / "store", "hf", tmp_path / "out")
    before = content(tmp_path / "out")
    with ExitStack() as full, pytest.raises(ConfigError, match="choose another --output"):
        export(tmp_path / "store", "hf", tmp_path / "out", lambda *_: full.enter_context(files_of_at_most(1_000)))
    assert content(tmp_path / "out") == before
    with pytest.raises(KeyboardInterrupt):
        export(tmp_path / "store", "hf", tmp_path / "out", stop)
    assert content(tmp_path / "out") == before


def test_a_second_export_to_a_directory_being_written_is_refused(store: Path, tmp_path: Path):
    refused: list[str] = []

    def again(done: int, of: int) -> None:
        if not refused:
            with pytest.raises(ConfigError, match="another export is being written") as caught:
                export(store, "openai", tmp_path)
            refused.append(str(caught.value))

    exported = export(store, "trl-sft", tmp_path, again)
    assert refused and sorted(content(tmp_path)) == sorted([*exported.files, MANIFEST])


def test_leftovers_of_a_killed_export_are_removed(store: Path, tmp_path: Path):
    (tmp_path / ".understudy-export").mkdir()
    (tmp_path / ".understudy-export" / "train.jsonl").write_text("half")
    exported = export(store, "openai", tmp_path)
    assert sorted(content(tmp_path)) == sorted([*exported.files, MANIFEST])


@pytest.mark.parametrize("name", ["openai", "hf"])
def test_an_export_refuses_to_overwrite_a_foreign_file(tmp_path: Path, name: str):
    put_rollouts(tmp_path / "store")
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    with pytest.raises(ConfigError, match=r"README.md already exists and was not written by an export"):
        export(tmp_path / "store", name, out)
    assert (out / "README.md").read_text() == "mine" and not (out / MANIFEST).exists()


@pytest.mark.parametrize("name", ["openai", "hf"])
def test_exporting_into_the_store_directory_works(tmp_path: Path, name: str):
    put_rollouts(tmp_path)
    first = export(tmp_path, name, tmp_path)
    assert export(tmp_path, name, tmp_path).rows == first.rows > 0
    assert set(plan_push(tmp_path, "ann/x").files) == {*first.files, MANIFEST} - {"redaction.json"}


def test_a_manifest_removes_nothing_outside_of_its_directory(store: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(store, "openai", out)
    (tmp_path / "mine").write_text("mine")
    manifest = json.loads((out / MANIFEST).read_text())
    manifest["files"] |= {"../mine": {}, str(tmp_path / "mine"): {}}
    (out / MANIFEST).write_text(json.dumps(manifest))
    export(store, "openai", out)
    assert (tmp_path / "mine").read_text() == "mine"


def test_pushed_files_contain_no_local_paths(store: Path, tmp_path: Path):
    out = tmp_path / "home" / "ann" / "data"
    export(store, "llamafactory", out, where="project like '/home/ann/%' or project like '/srv/%'")
    planned = plan_push(out / "understudy", "ann/x")
    assert "train.yaml" not in planned.files and (out / "understudy" / "train.yaml").exists()
    for name in planned.files:
        text = (out / "understudy" / name).read_text()
        assert "/home/ann" not in text and str(tmp_path) not in text


@pytest.mark.parametrize("share", [0.0, 0.999])
def test_a_negligible_test_share_yields_a_train_split_only(store: Path, tmp_path: Path, share: float):
    exported = export(store, "openai", tmp_path, test_share=share)
    assert exported.splits == {"train": 80}
    assert len(datasets.load_dataset(str(tmp_path), cache_dir=str(tmp_path / "c"))["train"]) == 80


def test_a_test_share_of_one_is_refused(store: Path, tmp_path: Path):
    with pytest.raises(ConfigError, match="--test-share"):
        export(store, "openai", tmp_path, test_share=1.0)


EVIL = 'evil\n---\nlicense: mit\n"}]: {*&!%@`\x1b[31m\x00\x85\u2028<b>|'


def hostile(directory: Path) -> Path:
    good = TurnSignals(commits=1)
    traces = [Log(f"../t/{n}\n{EVIL}", project=project) for n, project in enumerate((EVIL, "/\ud800\0", "", None))]
    for log in traces:
        log.trace.format = EVIL
        ask = log.user(-1, "say \ud800 \0 <|im_end|> <image>")
        call = ("c\0\ud801", "Bash", json.dumps({"k\ud800": "\0v\udfff"}))
        first = log.answer(ask, None, [call], thinking="\udc00", model=EVIL, signals=good)
        log.answer(log.result(first, "c\0\ud801", "r\ud9ff"), "end\0", model=EVIL, signals=good)
    empty = Log("empty")
    bare = Log(
        "bare", shape=RequestShape(None, [{"type": "function", "function": {"name": "x"}}, {"name": "y"}, {}])
    )
    bare.answer(-1, "Nobody asked.", signals=good)
    calls, tip = Log("calls"), -1
    for number in range(20):
        tip = calls.answer(tip, None, [(f"c{number}", "Bash", {"n": number})], signals=good)
    roles, tip = Log("roles"), -1
    odd: list[Any] = [{"type": "text", "text": None}, {"type": "image_url", "image_url": None}, 5, None, "s"]
    for role, value in (
        ("developer", "d"),
        ("function", None),
        ("user", odd),
        ("system", "s"),
        ("user", {"a": 1}),
    ):
        tip = roles.say(tip, {"role": role, "content": value})
    tip = roles.say(tip, {"role": "tool", "tool_call_id": None, "content": "of nothing"})
    roles.answer(tip, "Well.", signals=good)
    numbers = Log("numbers")
    tip = numbers.answer(
        numbers.user(-1, "x"), None, [("e", "Bash", '{"n": 1234567890123456789012345}')], signals=good
    )
    numbers.answer(numbers.user(tip, "y"), "z", [("d", "Bash", '{"a": NaN}')], signals=good)
    put_sessions(directory, [log.trace for log in (*traces, empty, bare, calls, roles, numbers)])
    return directory


@pytest.fixture(scope="module")
def evil(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hostile(tmp_path_factory.mktemp("evil"))


@pytest.mark.parametrize("name", ROWS)
def test_exports_of_hostile_sessions_load_as_datasets(evil: Path, tmp_path: Path, name: str):
    out = tmp_path / "out"
    more = {"unit": "turn", "form": "alpaca"} if name == "llamafactory" else {}
    exported = export(evil, name, out, origins=("sessions",), test_share=0.5, **more)
    directory = Path(exported.output_dir)
    loaded = datasets.load_dataset(str(directory), cache_dir=str(tmp_path / "cache"))
    assert {split: len(rows) for split, rows in loaded.items()} == exported.splits
    header = (directory / "README.md").read_text().split("\n---\n")[0].removeprefix("---\n")
    assert yaml.safe_load(header)["license"] == "unknown"
    assert {path.parent for path in directory.rglob("*")} == {directory}


def test_roles_that_openai_does_not_take_are_refused():
    assert refusal_reason({"messages": [{"role": "developer"}, {"role": "user"}]}, 0) is None
    assert refusal_reason({"messages": [{"role": "function"}]}, 0) == "rows with a role that OpenAI does not take"


def test_alpaca_rows_load_when_only_a_late_row_has_a_history(tmp_path: Path):
    logs = [Log(f"s{n:02}", project=f"/srv/p{n}") for n in range(13)]
    for number, log in enumerate(logs):
        tip = log.answer(log.user(-1, "x" * 1_000_000), f"Said {number}.")
        if number == 12:
            log.answer(log.user(tip, "Again."), "Said again.")
    put_sessions(tmp_path / "store", [log.trace for log in logs])
    export(tmp_path / "store", "llamafactory", tmp_path / "out", form="alpaca", unit="turn")
    lines = [json.loads(line) for line in (tmp_path / "out/understudy/train.jsonl").read_text().splitlines()]
    assert [bool(line["history"]) for line in lines] == [True] + [False] * 13
    assert len({line["id"] for line in lines}) == 14
    assert [line["output"] for line in lines[1:]] == [f"Said {number}." for number in range(13)]
    directory = str(tmp_path / "out" / "understudy")
    assert len(datasets.load_dataset(directory, cache_dir=str(tmp_path / "cache"))["train"]) == 14
