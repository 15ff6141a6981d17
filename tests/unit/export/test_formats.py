"""What each format writes: rows that read back as they were, splits, a card, a manifest; and the commands."""

from __future__ import annotations

import hashlib
import json
import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from understudy import plugins
from understudy.cli.commands.export import app, shortened_list
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary, traits_of
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.files import MANIFEST
from understudy.export.formats import trl
from understudy.export.formats.openai import refusal_reason
from understudy.export.formats.trl import message_rows
from understudy.export.parquet import ExportParquetWriter, JsonLinesWriter, json_bytes
from understudy.export.push import plan_push
from understudy.ingest.trace import RequestShape
from understudy.preference.rollouts import _main_nodes as main_line  # pyright: ignore[reportPrivateUsage]
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.train.groups import load_groups
from understudy.types import Call

import support
from support import optional
from support.export import Log, export_hf, put_attempt, put_rollouts, put_sessions, rows, session
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

datasets: Any = optional("datasets")


TEMPLATE = """\
{%- if tools %}<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools>{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{%- if 'reasoning_content' in message %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{ message.content }}
{%- if 'tool_calls' in message %}{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments | items %}<{{ key }}>{{ value | tojson }}</{{ key }}>{% endfor %}
</tool_call>{% endfor %}{% endif %}
{%- if 'tool_call_id' in message %}<id>{{ message.tool_call_id }}</id>{% endif %}<|im_end|>
{% endfor %}"""
"""As Qwen's for coders: what is not there, and what is null, would be seen."""


def render(messages: list[dict[str, Any]], tools: Any) -> str:
    return jinja2.Environment(autoescape=False).from_string(TEMPLATE).render(messages=messages, tools=tools)


def export(directory: Path, name: str, output: Path, *, unredacted: bool = False, **options: Any) -> ExportSummary:
    chosen = {key: options.pop(key) for key in list(options) if key in ExportSelection.__struct_fields__}
    function = plugins.load("exports", name)
    traits = traits_of(function)
    with Store.open(directory, create=False) as store:
        selection = ExportSelection(
            **{"roles": traits.roles, "origins": traits.origins, "test_share": 0.0, **chosen}
        )
        corpus = Corpus(store, selection, Redactor(bytes(32)), unredacted=unredacted)
        return function(corpus, output, **options)


def understudy(*arguments: object, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "HF_HUB_OFFLINE": "1", **environment}
    return support.understudy(*arguments, env=env, inherit=False)


def best_of_four(directory: Path) -> list[Call]:
    """A store with a rollout whose agent made one request four times at once, and went on from the second."""
    agent = Session()
    ask = user(text("Mend it."))
    prompt = list(range(10))
    for number in range(4):
        agent.ask([ask], [tool_use(f"t{number}")], prompt=prompt, completion=[20 + number], logprobs=[-0.5])
    samples = [msgspec.structs.replace(call, started_at=100.0, ended_at=101.0) for call in agent.calls]
    history = [ask, assistant(tool_use("t1")), user(tool_result("t1"))]
    agent.ask(history, [text("Done.")], prompt=[*prompt, 21, 9], completion=[30], logprobs=[-0.5])
    with Store.open(directory) as store:
        put_attempt(store, [*samples, agent.calls[-1]])
    return agent.calls


@pytest.mark.parametrize(
    ("name", "options", "learned"),
    [
        ("trl-sft", {}, 4),
        ("trl-kto", {}, 5),
        ("trl-tokens", {}, 4),
        ("verl", {}, 4),
        ("verl", {"form": "tokens"}, 4),
        ("openai", {}, 4),
        ("llamafactory", {"unit": "turn"}, 5),
        ("atif", {}, 4),
    ],
)
def test_every_sample_of_a_request_made_several_times_at_once_is_exported(
    tmp_path: Path, name: str, options: dict[str, Any], learned: int
):
    best_of_four(tmp_path / "store")
    output = tmp_path / "out"
    exported = export(tmp_path / "store", name, output, origins=("rollouts",), **options)
    assert (exported.rows, exported.left_out) == (learned, {})
    if name == "atif":
        documents = [json.loads((output / row["file"]).read_text()) for row in rows(output / "train.jsonl")]
        agents = [[step for step in each["steps"] if step["source"] == "agent"] for each in documents]
        assert [len(steps) for steps in agents] == [2, 1, 1, 1]
        assert all(set(step["extra"]["loss_mask"]) == {1} for steps in agents for step in steps)
        assert len({step["tool_calls"][0]["tool_call_id"] for steps in agents for step in steps[:1]}) == 4


def test_every_sample_is_a_row_of_hf_and_a_sequence_to_train_on(tmp_path: Path):
    calls = best_of_four(tmp_path / "store")
    with Store.open(tmp_path / "store", create=False) as store:
        exported = export_hf(store, tmp_path / "out")
    assert (exported.rows, exported.segments) == (5, {"first call": 1, "sibling": 3})
    for imitation in (False, True):
        (group,) = load_groups([tmp_path / "store"], imitation=imitation)
        sampled = [
            tuple(token for token, on in zip(each.token_ids, each.loss_mask, strict=True) if on)
            for each in group.rollouts[0].sequences
        ]
        assert sorted(sampled) == [(20,), (21, 30), (22,), (23,)]
    with Store.open(tmp_path / "store", create=False) as store:
        (graded,) = Corpus(store, ExportSelection(origins=("rollouts",))).rollouts()
        assert [node.call.id for node in main_line(store, graded)] == [
            f"{calls[1].id}",
            f"{calls[4].id}",
        ], "pairs are made of what the agent went on with"


@pytest.fixture
def full(tmp_path: Path) -> Path:
    """A store with sessions of three projects and rollouts of two tasks."""
    directory = tmp_path / "store"
    put_sessions(directory, [session(f"s{n}", project=f"/srv/p{n}") for n in range(3)])
    put_rollouts(directory)
    return directory


def test_messages_and_tools_are_unchanged_after_load_dataset(full: Path, tmp_path: Path):
    export(full, "trl-sft", tmp_path / "out")
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))["train"]
    with Store.open(full, create=False) as store:
        corpus = Corpus(store, ExportSelection(), Redactor(bytes(32)))
        original = list(corpus.examples("conversation"))
    assert len(loaded) == len(original) == 10
    for row, example in zip(loaded, original, strict=True):
        assert row["messages"] == message_rows(example.messages)
        assert json.loads(row["tools"]) == example.tools
        text = render(row["messages"], json.loads(row["tools"]))
        assert text == render(message_rows(example.messages), example.tools)
        assert "None" not in text and "null" not in text
        assert row["trained"] == list(example.trained)
    assert '<path>"a.py"</path>' in render(loaded[1]["messages"], None)


def test_exact_rows_have_each_chosen_message_once(full: Path, tmp_path: Path):
    export(full, "trl-sft", tmp_path / "out", exact=True, origins=("sessions",))
    exported_rows = rows(tmp_path / "out" / "train.parquet")
    learned = [m["content"] for row in exported_rows for m in row["completion"] if m["role"] == "assistant"]
    assert sorted(learned) == sorted(["I look.", "", "Done ✓.", "Then I stop."] * 3)
    assert all(row["prompt"][-1]["role"] in ("user", "tool") for row in exported_rows)


def test_turns_are_prompt_and_completion(full: Path, tmp_path: Path):
    exported = export(full, "trl-sft", tmp_path / "out", unit="turn", solved_only=True)
    exported_rows = rows(tmp_path / "out" / "train.parquet")
    assert exported.rows == len(exported_rows) == 12 + 4
    assert all(len(row["completion"]) == 1 for row in exported_rows)
    assert exported.left_out == {"calls without an answer": 2, "not solved": 2}
    assert exported.origins == {"session": 12, "rollout": 4}
    assert exported.licences == {"unknown": 16}


def test_kto_rows_have_labels_and_undecided_turns_are_left_out(full: Path, tmp_path: Path):
    exported = export(full, "trl-kto", tmp_path / "out")
    exported_rows = rows(tmp_path / "out" / "train.parquet")
    labels = [(row["origin"], row["label"]) for row in exported_rows]
    assert labels.count(("session", True)) == 6 and labels.count(("session", False)) == 3
    assert labels.count(("rollout", True)) == labels.count(("rollout", False)) == 4
    assert exported.left_out["turns of which nothing tells whether they were good"] == 3
    assert exported.origins == {"session": 9, "rollout": 8}


def test_tokens_are_exactly_those_that_were_sampled(full: Path, tmp_path: Path):
    export(full, "trl-tokens", tmp_path / "out")
    exported_rows = rows(tmp_path / "out" / "train.parquet")
    assert len(exported_rows) == 4
    row = exported_rows[0]
    assert row["input_ids"] == [*range(20), 100, 101, 102, 5, 6, 7, 110, 111]
    assert row["labels"] == [-100] * 20 + [100, 101, 102] + [-100] * 3 + [110, 111]
    assert row["assistant_masks"] == [int(label != -100) for label in row["labels"]]
    assert row["logprobs"] == [-0.25 if mask else 0.0 for mask in row["assistant_masks"]]
    assert (row["reward"], row["policy_version"], row["policy_versions"]) == (1.0, "3", ["3", "3"])
    assert [each["reward"] for each in exported_rows] == [1.0, 0.0, 1.0, 0.0]


def test_pairs_of_rollouts_are_preferences(full: Path, tmp_path: Path):
    exported = export(full, "trl-dpo", tmp_path / "out")
    exported_rows = rows(tmp_path / "out" / "train.parquet")
    assert exported.rows == len(exported_rows) == 1
    assert sum(exported.left_out.values()) == 1, "the other task's is nearly the same"
    for row in exported_rows:
        assert [message["role"] for message in row["prompt"]] == ["system", "user", "assistant", "tool"]
        assert row["prompt"][2]["tool_calls"][0]["function"]["arguments"] == {"command": "ls"}
        (chosen,), (rejected,) = row["chosen"], row["rejected"]
        assert (chosen["content"], rejected["content"]) == ("Done.", "I give up 1.")
        assert row["origin"] == "rollouts"
        assert isinstance(row["evidence"], dict)


def test_openai_rows_have_weights_and_respect_token_and_name_limits(full: Path, tmp_path: Path):
    long = Log("long", project="/srv/long")
    ask = long.user(-1, "x" * 50_000)
    long.answer(ask, "Well.", [("i" * 50, "Bash", {"command": "ls"})])
    named = Log("named", project="/srv/named", shape=RequestShape())
    named.answer(named.user(-1, "go"), None, [("c", "not a name!", {})])
    put_sessions(full, [long.trace, named.trace])
    exported = export(full, "openai", tmp_path / "out", max_tokens=2_000)
    exported_rows = rows(tmp_path / "out" / "train.jsonl")
    assert exported.rows == len(exported_rows) == 10
    assert exported.left_out["rows of more than 2000 tokens by estimate"] == 1
    assert exported.left_out["rows with a tool whose name OpenAI does not take"] == 1
    branch, main = exported_rows[:2]
    assert [m.get("weight") for m in branch["messages"]] == [None, None, 1, None, None, 1]
    assert [m.get("weight") for m in main["messages"]] == [None, None, 0, None, 1, None, 1]
    assert main["messages"][4]["content"] is None
    assert main["messages"][4]["tool_calls"][0]["function"]["arguments"] == '{"path":"a.py","old":"x","new":"y"}'
    assert not any("reasoning_content" in message for row in exported_rows for message in row["messages"])
    export(full, "openai", tmp_path / "out", max_tokens=0, where="project = '/srv/long'", origins=("sessions",))
    (row,) = rows(tmp_path / "out" / "train.jsonl")
    assert len(row["messages"][-1]["tool_calls"][0]["id"]) == 40
    assert refusal_reason({"messages": [], "tools": main["tools"] * 100}, 0) == "rows with more than 128 tools"


def test_splits_never_cut_a_group_and_the_card_loads(full: Path, tmp_path: Path):
    put_sessions(full, [session(f"more{n}", project=f"/srv/more{n}") for n in range(20)])
    exported = export(full, "trl-sft", tmp_path / "out", test_share=0.4, seed=3)
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=str(tmp_path / "cache"))
    assert set(loaded) == {"train", "test"}
    assert {split: len(loaded[split]) for split in loaded} == exported.splits
    groups = {split: set(loaded[split]["group"]) for split in loaded}
    assert groups["train"] and groups["test"] and not groups["train"] & groups["test"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert 'license: "unknown"' in card
    assert "| session | 46 |" in card and "| glm |" in card
    manifest = json.loads((tmp_path / "out" / MANIFEST).read_text())
    assert manifest["unredacted"] is False
    assert manifest["selection"]["seed"] == 3
    for name, entry in manifest["files"].items():
        content = (tmp_path / "out" / name).read_bytes()
        assert (entry["bytes"], entry["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
        assert entry.get("kept", False) is (name == "redaction.json")
    assert "redaction.json" in manifest["files"]
    again = export(full, "trl-sft", tmp_path / "again", test_share=0.4, seed=3)
    for name in again.files:
        same = (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
        assert same or name == "README.md"


def test_a_new_export_replaces_the_earlier_one_and_keeps_foreign_files(full: Path, tmp_path: Path):
    out = tmp_path / "out"
    export(full, "trl-sft", out, test_share=0.4, seed=3)
    (out / "mine.txt").write_text("mine")
    export(full, "openai", out)
    assert sorted(path.name for path in out.iterdir()) == [
        "README.md", "mine.txt", "redaction.json", "train.jsonl", MANIFEST,
    ]  # fmt: skip
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    with pytest.raises(ConfigError, match="nothing to export as openai"):
        export(full, "openai", out, where="model = 'none'", origins=("sessions",))
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_a_single_group_goes_into_the_train_split(tmp_path: Path):
    put_sessions(tmp_path / "store", [session()])
    for seed in range(6):
        exported = export(tmp_path / "store", "trl-sft", tmp_path / "out", test_share=0.5, seed=seed)
        assert exported.splits == {"train": 2}
    assert (tmp_path / "out" / "train.parquet").exists()


def test_an_unredacted_export_is_marked_and_readable_by_its_owner_only(full: Path, tmp_path: Path):
    exported = export(full, "trl-sft", tmp_path / "out", unredacted=True)
    assert exported.unredacted
    assert "NOT REDACTED" in (tmp_path / "out" / "README.md").read_text()
    assert json.loads((tmp_path / "out" / MANIFEST).read_text())["unredacted"] is True
    for name in exported.files:
        assert stat.S_IMODE((tmp_path / "out" / name).stat().st_mode) == 0o600
    alone = export(full, "trl-sft", tmp_path / "alone", unredacted=True, origins=("rollouts",))
    assert not alone.unredacted


def test_model_names_cannot_inject_markup_into_the_card(tmp_path: Path):
    log = Log("t")
    evil = "glm | x |\n\n---\nlicense: mit\n# <img src=x>"
    log.answer(log.user(-1, "go"), "Well.", model=evil)
    log.trace.format = evil
    put_sessions(tmp_path / "store", [log.trace])
    export(tmp_path / "store", "trl-sft", tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count("\n---\n") == 1
    assert "\nlicense: mit" not in card and "<img" not in card.replace("\\<img", "")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(st.characters(codec="utf-8")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(st.characters(codec="utf-8")), JSON, max_size=3), min_size=1, max_size=4))
def test_json_columns_read_back_as_they_were(
    tmp_path_factory: pytest.TempPathFactory, values: list[dict[str, Any]]
):
    directory = tmp_path_factory.mktemp("json")
    file = ExportParquetWriter(directory / "train.parquet", {"messages": ["json"], "one": "json"})
    for value in values:
        file.write({"messages": values, "one": value})
    file.close()
    loaded = rows(directory / "train.parquet")
    assert [row["messages"] for row in loaded] == [values] * len(values)
    assert [row["one"] for row in loaded] == values


def test_lone_surrogates_are_written_without_error(tmp_path: Path):
    for kind in (JsonLinesWriter, lambda path: ExportParquetWriter(path, {"a": "string", "b": "json"})):
        path = tmp_path / f"x{kind.suffix if kind is JsonLinesWriter else '.parquet'}"
        file = kind(path)
        file.write({"a": "x\ud800y", "b": {"k": "\udfff"}})
        file.close()
        (row,) = rows(path)
        assert row == {"a": "x?y", "b": {"k": "?"}}
    assert json_bytes({"a": "\ud800"}) == b'{"a":"?"}'


# --- the commands --------------------------------------------------------------------------------------


def test_the_export_command_redacts_splits_and_prints_next_steps(full: Path, tmp_path: Path):
    done = understudy("export", "trl-sft", full, "-o", tmp_path / "out", "--unsolved-too", home=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "10 rows as trl-sft" in done.stdout
    assert "load_dataset" in done.stdout and "understudy push" in done.stdout
    assert "/srv" not in done.stdout
    as_json = understudy(
        "export", "trl-sft", full, "-o", tmp_path / "out", "--from", "sessions", "--json", home=tmp_path
    )
    exported = json.loads(as_json.stdout)
    assert (exported["rows"], exported["origins"]) == (6, {"session": 6})
    loud = understudy("export", "openai", full, "-o", tmp_path / "raw", "--unredacted", home=tmp_path)
    assert loud.returncode == 0 and "not redacted" in loud.stderr and "understudy push" not in loud.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("trl-sft", "{store}"), "--output"),
        (
            ("trl-sft", "{store}", "-o", "{out}", "--from", "logs"),
            "unknown value 'logs'; give one of sessions, rollouts, all",
        ),
        (("trl-sft", "{store}", "-o", "{out}", "--roles", "boss"), "unknown role 'boss'"),
        (("trl-sft", "{store}", "-o", "{out}", "--where", "nonsense = 1"), "nonsense"),
        (("trl-sft", "{store}", "-o", "{out}", "--run", "none"), "no run 'none'"),
        (("trl-tokens", "{store}", "-o", "{out}", "--where", "1"), "No such option"),
        (("trl-sft", "{store}/nowhere", "-o", "{out}"), "nowhere"),
        (("trl-sft", "{store}", "-o", "{store}/understudy.db"), "choose another --output"),
        (("nothing", "{store}"), "No such command"),
    ],
)
def test_impossible_exports_are_refused_with_the_reason(
    full: Path, tmp_path: Path, arguments: tuple[str, ...], message: str
):
    (full / "understudy.db").touch()
    filled = [each.format(store=full, out=tmp_path / "out") for each in arguments]
    done = understudy("export", *filled, home=tmp_path)
    assert done.returncode == 2
    assert re.sub(r"\s+", " ", message) in re.sub(r"[\s│]+", " ", done.stderr)
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.glob("out/*"))


def test_help_lists_every_format_and_its_own_options():
    def help_text(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments, "--help"])
        assert done.exit_code == 0, done.output
        return done.output

    listed = help_text()
    for name in plugins.names("exports"):
        assert f"{name} " in listed
        assert ("--from" in help_text(name)) == (len(traits_of(plugins.load("exports", name)).origins) > 1)
    assert "--exact" in help_text("trl-sft")


def test_a_summary_names_a_few_files_of_many(tmp_path: Path):
    put_sessions(tmp_path / "store", [session(f"s{n}") for n in range(20)])
    done = CliRunner().invoke(
        app, ["atif", str(tmp_path / "store"), "-o", str(tmp_path / "out")], env={"HOME": str(tmp_path)}
    )
    assert done.exit_code == 0, done.output
    assert re.search(r"and 3\d more\)", done.output) and len(done.output) < 2_000
    planned = plan_push(tmp_path / "out", "ann/x")
    assert len(planned.files) > 40 and "more" in shortened_list(list(planned.files))


def test_every_format_is_an_exporter():
    for name in plugins.names("exports"):
        function = plugins.load("exports", name)
        assert callable(function) and function.__doc__
        assert traits_of(function).origins
    assert traits_of(trl.export_sft).solved_only
