"""LLaMA-Factory's files: rows, what is not written and why, dataset_info.json, the training config.

That LLaMA-Factory itself takes them is in tests/consumers.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.examples import Example
from understudy.export.formats import llamafactory as files
from understudy.export.formats import llamafactory_rows as made
from understudy.export.formats.llamafactory import TOO_LONG, export
from understudy.export.formats.llamafactory_rows import template_rules
from understudy.ingest.trace import Message, TurnAction, tool_call
from understudy.preference.checks import Pair
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support.export import Log, put_rollouts, put_sessions, session

QWEN = template_rules("qwen3")
USER: Message = {"role": "user", "content": "Go."}
DONE: Message = {"role": "assistant", "content": "Done."}


def says(text: str | None = None, *calls: tuple[str, str, Any], **more: Any) -> Message:
    message: Message = {"role": "assistant", "content": text, **more}
    return {**message, "tool_calls": [tool_call(*call) for call in calls]} if calls else message


def example(messages: list[Message], trained: tuple[int, ...] | None = None, **more: Any) -> Example:
    unit: Any = "turn" if trained is None else "conversation"
    learned = (len(messages) - 1,) if trained is None else trained
    return Example(
        example_id="e", origin="session", unit=unit, group="g", messages=messages, trained=learned, **more
    )


def row_or_flaw(make: Callable[..., made.Row], *arguments: Any) -> made.Row | made.RowFlaw:
    try:
        return make(*arguments)
    except made.RowFlaw as flaw:
        return flaw


def reason(row: made.Row | made.RowFlaw) -> str:
    assert isinstance(row, made.RowFlaw)
    return str(row)


def turns(row: made.Row | made.RowFlaw) -> list[tuple[str, str]]:
    assert not isinstance(row, made.RowFlaw)
    return [(turn["from"], turn["value"]) for turn in row["conversations"]]


def exported(directory: Path, output: Path, **options: Any) -> ExportSummary:
    chosen = {key: options.pop(key) for key in list(options) if key in ExportSelection.__struct_fields__}
    with Store.open(directory, create=False) as store:
        selection = ExportSelection(**{"test_share": 0.0, **chosen})
        return export(Corpus(store, selection, Redactor(bytes(32))), output, **options)


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- rows ----------------------------------------------------------------------------------------------


def test_roles_alternate_and_the_text_of_every_message_is_kept():
    conversation = [
        {"role": "system", "content": "You work."},
        USER,
        {"role": "user", "content": "Now."},
        says("I look.", ("a", "Read", {"path": "x"}), ("b", "Bash", {"command": "ls"}), reasoning_content="Hm."),
        {"role": "tool", "tool_call_id": "a", "content": "one"},
        {"role": "tool", "tool_call_id": "b", "content": "two"},
        {"role": "user", "content": "Quick!"},
        says(None, ("c", "Bash", {})),
        {"role": "tool", "tool_call_id": "c", "content": "three"},
        DONE,
    ]
    row = row_or_flaw(made.sft, example(conversation, (3, 7, 9)), QWEN, "sharegpt")
    assert not isinstance(row, made.RowFlaw) and row["system"] == "You work."
    calls = '[{"name":"Read","arguments":{"path":"x"}},{"name":"Bash","arguments":{"command":"ls"}}]'
    assert turns(row) == [
        ("human", "Go.\n\nNow."),
        ("function_call", f"<think>\nHm.\n</think>\n\nI look.\n<tool_call>{calls}</tool_call>"),
        ("observation", "one\n</tool_response>\n<tool_response>\ntwo\n\nQuick!"),
        ("function_call", '[{"name":"Bash","arguments":{}}]'),
        ("observation", "three"),
        ("gpt", "Done."),
    ]


def test_template_markers_are_escaped_in_calls_and_refused_in_text():
    command = "grep '</tool_call>' <think>"
    (_, call_turn) = turns(
        row_or_flaw(made.sft, example([USER, says(None, ("a", "Bash", {"command": command}))]), QWEN, "sharegpt")
    )
    assert "<" not in call_turn[1] and json.loads(call_turn[1])[0]["arguments"] == {"command": command}
    for text in ("I write <tool_call> now.", "<think>\nno\n</think>\n\n"):
        row = row_or_flaw(made.sft, example([USER, says(text, ("a", "Bash", {}))]), QWEN, "sharegpt")
        assert reason(row) == made.MARKERS
    assert turns(row_or_flaw(made.sft, example([USER, says("I write <tool_call> now.")]), QWEN, "sharegpt"))


def test_pictures_and_parallel_calls_are_refused_where_a_template_cannot_have_them():
    html = [{"role": "user", "content": "Add a <video> tag."}, DONE]
    assert reason(row_or_flaw(made.sft, example(html), template_rules("qwen3_5"), "sharegpt")) == made.PICTURES
    assert turns(row_or_flaw(made.sft, example(html), QWEN, "sharegpt"))
    called = [USER, says(None, ("a", "Bash", {"command": "<video>"}))]
    assert turns(row_or_flaw(made.sft, example(called), template_rules("qwen3_5"), "sharegpt"))
    both = [USER, says(None, ("a", "Bash", {}), ("b", "Bash", {}))]
    assert reason(row_or_flaw(made.sft, example(both), template_rules("glm4"), "sharegpt")) == made.PARALLEL


def test_rows_that_llamafactory_would_drop_or_mistrain_are_reported_with_a_reason():
    assert reason(row_or_flaw(made.sft, example([DONE]), QWEN, "sharegpt")) == made.NO_TURNS
    assert reason(row_or_flaw(made.sft, example([USER, DONE, USER], (1,)), QWEN, "sharegpt")) == made.NO_TURNS
    assert reason(row_or_flaw(made.sft, example([USER, DONE, USER, DONE], (3,)), QWEN, "sharegpt")) == made.PARTLY
    assert reason(row_or_flaw(made.sft, example([USER, DONE, DONE], (2,)), QWEN, "sharegpt")) == made.MIXED
    assert reason(row_or_flaw(made.kto, example([USER, DONE]), QWEN, "sharegpt")) == made.UNDECIDED
    assert reason(row_or_flaw(made.kto, example([USER, says("")], desirable=True), QWEN, "sharegpt")) == made.EMPTY


def test_an_earlier_call_with_invalid_json_is_rendered_verbatim():
    past = says(None, ("a", "Bash", "{oops"))
    result = {"role": "tool", "tool_call_id": "a", "content": "No JSON."}
    assert turns(row_or_flaw(made.sft, example([USER, past, result, DONE]), QWEN, "sharegpt"))[1:3] == [
        ("gpt", '<tool_call>\n{"name":"Bash","arguments":"{oops"}\n</tool_call>'),
        ("observation", "No JSON."),
    ]


def test_alpaca_has_the_conversation_before_as_history():
    past = says("I look.", ("a", "Bash", {"command": "ls"}))
    result = {"role": "tool", "tool_call_id": "a", "content": "x"}
    row = row_or_flaw(made.sft, example([USER, past, result, DONE]), QWEN, "alpaca")
    called = '<tool_call>\n{"name":"Bash","arguments":{"command":"ls"}}\n</tool_call>'
    assert row == {
        "id": "e",
        "system": "",
        "tools": "",
        "history": [["Go.", f"I look.\n{called}"]],
        "instruction": "<tool_response>\nx\n</tool_response>",
        "input": "",
        "output": "Done.",
    }


def test_preference_pairs_have_an_odd_number_of_turns():
    def pair(messages: list[Message]) -> Pair:
        chosen = TurnAction(content="A", thinking="B", tool_calls=[tool_call("x", "Bash", {})])
        return Pair(
            pair_id="p",
            origin="replay",
            group="g",
            messages=messages,
            tools=None,
            chosen=chosen,
            rejected=TurnAction(content="No."),
        )

    row = row_or_flaw(made.dpo, pair([USER, DONE, USER]), QWEN, "sharegpt")
    assert len(turns(row)) == 3 and not isinstance(row, made.RowFlaw)
    assert row["rejected"] == {"from": "gpt", "value": "No."}
    assert row["chosen"]["from"] == "function_call" and row["chosen"]["value"].startswith(
        "<think>\nB\n</think>\n\nA\n"
    )
    assert reason(row_or_flaw(made.dpo, pair([USER, DONE]), QWEN, "sharegpt")) == made.NO_TURNS


def test_tools_have_the_properties_that_the_plainest_template_reads():
    tools = [{"type": "function", "function": {"name": "Now", "parameters": {}}}]
    row = row_or_flaw(made.sft, example([USER, DONE], tools=tools), QWEN, "sharegpt")
    assert not isinstance(row, made.RowFlaw)
    (tool,) = json.loads(row["tools"])
    assert tool["function"] == {"name": "Now", "parameters": {"type": "object", "properties": {}}}


MESSAGE = st.one_of(
    st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=5)),
    st.builds(lambda text: {"role": "system", "content": text}, st.text(max_size=5)),
    st.builds(lambda text: {"role": "tool", "tool_call_id": "a", "content": text}, st.text(max_size=5)),
    st.builds(lambda text: says(text), st.text(max_size=5)),
    st.builds(lambda text: says(text, ("a", "Bash", {"command": text})), st.text(max_size=5)),
)


@given(st.lists(MESSAGE, max_size=8), st.sampled_from(["sharegpt", "alpaca"]))
def test_every_written_row_passes_the_filters_of_llamafactory(messages: list[Message], form: made.Form):
    row = row_or_flaw(made.sft, example([*messages, DONE]), QWEN, form)
    if isinstance(row, made.RowFlaw):
        assert str(row) in (made.NO_TURNS, made.MIXED)
        return
    if form == "alpaca":
        assert all(len(pair) == 2 for pair in row["history"]) and row["output"].endswith("Done.")
        return
    tags = [tag for tag, _ in turns(row)]
    assert len(tags) % 2 == 0
    assert all(tag in (("human", "observation"), ("gpt", "function_call"))[at % 2] for at, tag in enumerate(tags))


# --- the files -----------------------------------------------------------------------------------------


@pytest.fixture
def full(tmp_path: Path) -> Path:
    directory = tmp_path / "store"
    log = Log("plain", project="/srv/plain")
    log.answer(log.user(-1, "Hi /home/ann."), "Hello.")
    put_sessions(directory, [session("s"), log.trace])
    put_rollouts(directory)
    return directory


def test_each_named_export_has_a_directory_and_an_entry_in_dataset_info(full: Path, tmp_path: Path):
    output = tmp_path / "data"
    output.mkdir()
    before = '{"mine": {"hf_hub_url": "a/b", "num_samples": 1e3, "k": "\\u00e9"}}'
    (output / "dataset_info.json").write_text(before)
    summary = exported(full, output, name="first", solved_only=True)
    exported(full, output, name="second", form="alpaca", unit="turn")
    info = (output / "dataset_info.json").read_text()
    assert '"mine": {"hf_hub_url": "a/b", "num_samples": 1e3, "k": "\\u00e9"}' in info
    entries = json.loads(info)
    assert list(entries) == ["mine", "first", "second"]
    assert entries["first"] == {
        "file_name": "first/train.jsonl",
        "formatting": "sharegpt",
        "columns": {"messages": "conversations", "system": "system", "tools": "tools"},
    }
    assert entries["second"]["columns"]["prompt"] == "instruction"
    assert entries["second"]["columns"]["response"] == "output"
    # One path of the session goes off another, and is learned only in part.
    assert summary.rows == 4 and summary.left_out[made.PARTLY] == 1
    assert summary.origins == {"session": 2, "rollout": 2}
    assert len(lines(output / "first" / "train.jsonl")) == 4
    assert "/home/ann" not in (output / "first" / "train.jsonl").read_text()
    config = (output / "first" / "train.yaml").read_text()
    for line in (
        'stage: "sft"',
        f'dataset_dir: "{output}"',
        'dataset: "first"',
        'template: "qwen3"',
        "mask_history: false",
    ):
        assert line in config.splitlines()
    assert "mask_history: true" in (output / "second" / "train.yaml").read_text()
    assert shlex.split(summary.load) == ["llamafactory-cli", "train", str(output / "first" / "train.yaml")]
    exported(full, output, name="first", stage="kto", finetuning="full")
    again = json.loads((output / "dataset_info.json").read_text())
    assert again["first"]["columns"]["kto_tag"] == "kto_tag" and "mine" in again
    tags = [row["kto_tag"] for row in lines(output / "first" / "train.jsonl")]
    assert True in tags and False in tags


def test_pairs_of_rollouts_are_ranking_rows(full: Path, tmp_path: Path):
    summary = exported(full, tmp_path / "out", stage="dpo", name="pairs")
    assert (
        summary.rows
        and json.loads((tmp_path / "out" / "dataset_info.json").read_text())["pairs"]["ranking"] is True
    )
    row = lines(tmp_path / "out" / "pairs" / "train.jsonl")[0]
    assert row["chosen"]["value"] == "Done." and row["rejected"]["value"].startswith("I give up")
    assert 'pref_loss: "sigmoid"' in (tmp_path / "out" / "pairs" / "train.yaml").read_text()


def test_a_test_split_is_a_data_set_of_its_own(full: Path, tmp_path: Path):
    summary = exported(full, tmp_path / "out", test_share=0.5, seed=3)
    assert set(summary.splits) == {"train", "test"}
    entries = json.loads((tmp_path / "out" / "dataset_info.json").read_text())
    assert entries["understudy_test"]["file_name"] == "understudy/test.jsonl"
    config = (tmp_path / "out" / "understudy" / "train.yaml").read_text()
    assert 'eval_dataset: "understudy_test"' in config and "\neval_strategy" in config
    exported(full, tmp_path / "out", test_share=0.0)
    assert "understudy_test" not in json.loads((tmp_path / "out" / "dataset_info.json").read_text())


def test_rows_that_are_too_long_are_left_out_and_the_config_has_room_for_the_rest(full: Path, tmp_path: Path):
    summary = exported(full, tmp_path / "out", unit="turn", origins=("sessions",))
    assert "cutoff_len: 1024" in (tmp_path / "out" / "understudy" / "train.yaml").read_text()
    assert any("cutoff_len" in note and "about" in note for note in summary.notes)
    short = exported(full, tmp_path / "short", unit="turn", cutoff=560, origins=("sessions",))
    assert 0 < short.rows < summary.rows and short.left_out[TOO_LONG] == summary.rows - short.rows
    assert sum(short.origins.values()) == short.rows
    with pytest.raises(ConfigError, match="longer than --cutoff"):
        exported(full, tmp_path / "none", cutoff=10)
    assert not (tmp_path / "none" / "dataset_info.json").exists()


@pytest.mark.parametrize("broken", ["{", "[]", '{"a": ', '{"a": {"b": }}', "\xff"])
def test_a_broken_dataset_info_file_is_an_error_with_its_path_and_the_repair(
    full: Path, tmp_path: Path, broken: str
):
    path = tmp_path / "out" / "dataset_info.json"
    path.parent.mkdir()
    path.write_bytes(broken.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"dataset_info\.json: expected a JSON object .* repair the file"):
        exported(full, tmp_path / "out")
    assert path.read_bytes() == broken.encode("latin-1") and not (tmp_path / "out" / "understudy").exists()


def test_a_name_that_another_has_is_refused(full: Path, tmp_path: Path):
    path = tmp_path / "out" / "dataset_info.json"
    path.parent.mkdir()
    path.write_text('{"taken": {"hf_hub_url": "a/b"}}')
    with pytest.raises(ConfigError, match="choose another --name"):
        exported(full, tmp_path / "out", name="taken")
    for name in ("a,b", "", "../x", "x" * 101):
        with pytest.raises(ConfigError, match="--name"):
            exported(full, tmp_path / "out", name=name)
    with pytest.raises(ConfigError, match="--cutoff"):
        exported(full, tmp_path / "out", cutoff=0)


def test_cutoff_len_is_exact_with_a_local_tokenizer(full: Path, tmp_path: Path):
    from tokenizers import Tokenizer, models

    (tmp_path / "model").mkdir()
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "model" / "tokenizer.json"))
    summary = exported(full, tmp_path / "out", model=str(tmp_path / "model"))
    assert any("cutoff_len" in note and "about" not in note for note in summary.notes)
    (tmp_path / "model" / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="invalid tokenizer"):
        exported(full, tmp_path / "out", model=str(tmp_path / "model"))


NAMES = st.text(st.characters(exclude_categories=("Cs",)), min_size=1, max_size=8).filter(
    lambda name: name != "ours"
)
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
)


@given(st.dictionaries(NAMES, VALUES, max_size=4))
def test_merging_entries_leaves_other_data_sets_unchanged(
    tmp_path_factory: pytest.TempPathFactory, others: dict[str, Any]
):
    directory = tmp_path_factory.mktemp("info")
    (directory / "dataset_info.json").write_text(json.dumps(others))
    files.merge_entries(directory, {"ours": files.dataset_entry("ours/train.jsonl", "sharegpt", "sft")})
    assert json.loads((directory / "dataset_info.json").read_text()).pop("ours")["formatting"] == "sharegpt"
    files.merge_entries(directory, {"ours": None})
    assert json.loads((directory / "dataset_info.json").read_text()) == others
