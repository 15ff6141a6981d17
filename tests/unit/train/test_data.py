"""What a trainer is given: exact tokens by rollout and group, and what is left out of them."""

from __future__ import annotations

import math
import sqlite3
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest
from msgspec.structs import replace

from understudy import plugins
from understudy.errors import ConfigError, StoreError
from understudy.export.corpus import Corpus, ExportSelection
from understudy.store import Store
from understudy.train import groups
from understudy.train.groups import RolloutGroup, load_groups, read_groups, write_groups
from understudy.train.render import check_tokenizer_matches

from support.export import put_attempt, put_rollouts, wait
from support.tiny_model import write_tokenizer
from support.train import LOGPROB, LOOK, encoder, last_words, make_groups, put_training_run
from support.trajectory import Session, assistant, text, tool_result, tool_use, user


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """The tokenizer of a model; its weights are not needed here."""
    directory = tmp_path / "model"
    directory.mkdir()
    write_tokenizer(directory)
    return directory


@pytest.fixture
def run(tmp_path: Path, model: Path) -> Path:
    put_training_run(tmp_path / "run", model)
    return tmp_path / "run"


def test_groups_hold_the_rollouts_of_a_task_with_calls_merged_into_sequences(run: Path, model: Path):
    encode = encoder(model)
    loaded = list(load_groups([run]))
    assert [len(group.rollouts) for group in loaded] == [4, 4]
    assert [rollout.reward for rollout in loaded[0].rollouts] == [1.0, 0.0, 1.0, 0.0]
    for number, rollout in enumerate(loaded[0].rollouts):
        (sequence,) = rollout.sequences
        sampled = [token for token, mask in zip(sequence.token_ids, sequence.loss_mask, strict=True) if mask]
        assert sampled == encode(LOOK) + encode(last_words(number) + "<|im_end|>")
        assert sequence.sampled == len(sampled) < len(sequence.token_ids)
        assert sequence.logprobs == tuple(LOGPROB * mask for mask in sequence.loss_mask)
        assert sequence.policy_versions == ("step-0000", "step-0000")


def test_malformed_tool_calls_are_masked_for_imitation_only(tmp_path: Path):
    agent, ask = Session(), user(text("Mend it."))
    agent.ask([ask], [tool_use("t0", __unparsedToolInput={"raw": "{", "len": 1})], prompt=[1], completion=[2, 3])
    history = [ask, assistant(tool_use("t0")), user(tool_result("t0"))]
    agent.ask(history, [text("Done.")], prompt=[1, 2, 3, 4], completion=[5])
    with Store.open(tmp_path) as store:
        put_attempt(store, agent.calls)
    for imitation, mask in ((True, (0, 0, 0, 0, 1)), (False, (0, 1, 1, 0, 1))):
        (group,) = load_groups([tmp_path], logprobs=False, imitation=imitation)
        (sequence,) = group.rollouts[0].sequences
        assert (sequence.token_ids, sequence.loss_mask) == ((1, 2, 3, 4, 5), mask)


def test_a_token_export_loads_as_the_same_groups_as_the_store(run: Path, tmp_path: Path):
    pytest.importorskip("pyarrow")
    with Store.open(run, create=False) as store:
        function = plugins.load("exports", "trl-tokens")
        function(Corpus(store, ExportSelection(origins=("rollouts",), test_share=0.0)), tmp_path / "export")
    groups = list(load_groups([run]))
    assert list(load_groups([tmp_path / "export"])) == [without_calls(group) for group in groups]


def without_calls(group: RolloutGroup) -> RolloutGroup:
    """A group as an export has it, which does not say where in a sequence the completions of calls stand."""
    rollouts = [
        replace(each, sequences=tuple(replace(part, calls=()) for part in each.sequences))
        for each in group.rollouts
    ]
    return replace(group, rollouts=tuple(rollouts))


def members(groups: Iterable[RolloutGroup]) -> dict[str, list[str]]:
    """The rollouts of groups by the names of these."""
    return {group.name or group.task_id: [each.rollout_id for each in group.rollouts] for group in groups}


def test_rollouts_of_different_agents_or_versions_are_grouped_separately(run: Path, tmp_path: Path):
    pytest.importorskip("pyarrow")
    with sqlite3.connect(run / "store.db") as raw:
        raw.execute("UPDATE rollouts SET agent = 'shell' WHERE task_id = 'calc-0' AND sample_index < 2")
        raw.execute("UPDATE rollouts SET agent_version = '3.0' WHERE task_id = 'calc-0' AND sample_index = 2")
    raw.close()
    expected = {
        "calc-0 by shell": ["calc-0-0", "calc-0-1"],
        "calc-0 by claude-code 3.0": ["calc-0-2"],
        "calc-0 by claude-code": ["calc-0-3"],
        "calc-1": ["calc-1-0", "calc-1-1", "calc-1-2", "calc-1-3"],
    }
    assert members(load_groups([run])) == expected
    with Store.open(run, create=False) as store:
        for name, form in (("trl-tokens", {}), ("verl", {"form": "tokens"})):
            corpus = Corpus(store, ExportSelection(origins=("rollouts",), test_share=0.0))
            plugins.load("exports", name)(corpus, tmp_path / name, **form)
    assert members(load_groups([tmp_path / "trl-tokens"])) == expected
    rows = groups.read_rows(tmp_path / "verl" / "train.parquet", ["uid", "rollout_id"])
    assert {row["rollout_id"]: row["uid"] for row in rows} == {
        rollout_id: name for name, ids in expected.items() for rollout_id in ids
    }


def exported(run: Path, output: Path) -> Path:
    with Store.open(run, create=False) as store:
        function = plugins.load("exports", "trl-tokens")
        function(Corpus(store, ExportSelection(origins=("rollouts",), test_share=0.0)), output)
    return output


def test_invalid_rows_of_an_export_are_config_errors(run: Path, tmp_path: Path):
    pytest.importorskip("pyarrow")
    import pyarrow
    from pyarrow import parquet

    # A directory whose name pyarrow would make a column of, were it given the path.
    directory = exported(run, tmp_path / "reward=3")
    assert list(load_groups([directory])) == [without_calls(group) for group in load_groups([run])]
    path = directory / "train.parquet"
    whole = parquet.ParquetFile(path).read()
    masks = whole.column_names.index("assistant_masks")
    for change, message in (
        (whole.set_column(masks, "assistant_masks", pyarrow.array([[1]] * len(whole))), "the same length"),
        (whole.set_column(masks, "assistant_masks", whole["input_ids"]), "assistant_masks"),
        (whole.drop_columns(["reward"]), "cannot be read|missing required"),
    ):
        parquet.write_table(change, path)
        with pytest.raises(ConfigError, match=message):
            list(load_groups([directory]))
    path.unlink()
    with pytest.raises(ConfigError, match=r"train\.parquet: cannot be read"):
        list(load_groups([directory]))


def test_rollouts_sampled_at_another_temperature_are_refused(tmp_path: Path, model: Path):
    for number, (temperature, message) in enumerate(
        ((0.5, "give --temperature 0.5"), (0, "collect rollouts with a temperature"))
    ):
        put_training_run(tmp_path / str(number), model, sampling={"temperature": temperature})
        with pytest.raises(ConfigError, match=message):
            list(load_groups([tmp_path / str(number)], temperature=1.0))
        assert list(load_groups([tmp_path / str(number)]))
    assert list(load_groups([tmp_path / "0"], temperature=0.5))


def test_an_export_without_tokens_is_refused_naming_the_format_that_has_them(tmp_path: Path):
    put_rollouts(tmp_path / "run")
    with Store.open(tmp_path / "run", create=False) as store:
        function = plugins.load("exports", "openai")
        function(Corpus(store, ExportSelection(origins=("rollouts",))), tmp_path / "export")
    with pytest.raises(ConfigError, match=r"openai.*understudy export trl-tokens"):
        list(load_groups([tmp_path / "export"]))


def test_sequences_without_logprobs_load_only_for_imitation(tmp_path: Path, model: Path):
    put_training_run(tmp_path / "run", model, logprobs=None)
    left_out = Counter[str]()
    assert list(load_groups([tmp_path / "run"], left_out=left_out)) == []
    assert left_out == {groups.NO_LOGPROBS: 8, groups.NOTHING_LEFT: 8}
    loaded = list(load_groups([tmp_path / "run"], logprobs=False))
    assert len(loaded) == 2 and loaded[0].rollouts[0].sequences[0].logprobs is None


def test_calls_without_token_ids_are_left_out_and_counted(tmp_path: Path):
    put_rollouts(tmp_path / "run", tokens=False)
    left_out = Counter[str]()
    assert list(load_groups([tmp_path / "run"], left_out=left_out)) == []
    assert left_out == {groups.NO_TOKENS: 8, groups.NOTHING_LEFT: 4}


def test_sequences_with_non_finite_logprobs_are_left_out(tmp_path: Path, model: Path):
    put_training_run(tmp_path / "run", model, logprobs=-math.inf)
    left_out = Counter[str]()
    assert list(load_groups([tmp_path / "run"], left_out=left_out)) == []
    assert left_out[groups.BAD_LOGPROBS] == 8


def test_suspicious_rollouts_are_left_out_unless_included(run: Path):
    with Store.open(run, create=False) as store:
        rollout = store.runs.rollouts()[0]
        wait(store.runs.review(store.runs.attempts(rollout.id)[0].id, "suspicious", "it forges"))
    left_out = Counter[str]()
    first = next(iter(load_groups([run], left_out=left_out)))
    assert rollout.id not in {each.rollout_id for each in first.rollouts}
    assert list(load_groups([run], left_out=left_out)) and left_out[groups.SUSPICIOUS] == 2
    first = next(iter(load_groups([run], include_suspicious=True)))
    assert rollout.id in {each.rollout_id for each in first.rollouts}


def test_a_missing_store_or_run_is_an_error(tmp_path: Path, run: Path):
    with pytest.raises(StoreError, match="no store"):
        list(load_groups([tmp_path / "nothing"]))
    with pytest.raises(ConfigError, match="no run 'other'"):
        list(load_groups([run], run="other"))


def test_groups_round_trip_through_a_file_and_invalid_files_are_refused(tmp_path: Path):
    original = make_groups()
    write_groups(tmp_path / "groups", original)
    assert read_groups(tmp_path / "groups") == original
    (tmp_path / "groups").write_bytes(b"\xc1")
    with pytest.raises(ConfigError, match="expected rollout groups, but this file of one step is damaged"):
        read_groups(tmp_path / "groups")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_groups(tmp_path / "none")


def test_the_tokenizer_of_the_sampling_model_is_accepted(run: Path, model: Path):
    check_tokenizer_matches([run], model)
    check_tokenizer_matches([run], model, "run1")


def test_token_ids_outside_the_vocabulary_are_refused(tmp_path: Path, model: Path, run: Path):
    small = tmp_path / "small"
    small.mkdir()
    token_ids = encoder(model)("I")  # one byte a token: cut the vocabulary below the letters
    import json

    definition = json.loads((model / "tokenizer.json").read_text())
    vocabulary = definition["model"]["vocab"]
    definition["model"]["vocab"] = {token: id_ for token, id_ in vocabulary.items() if id_ < token_ids[0]}
    definition["added_tokens"] = [each for each in definition["added_tokens"] if each["id"] < token_ids[0]]
    (small / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ConfigError, match=r"has the token id \d+.*tokens, so the samples are from another model"):
        check_tokenizer_matches([run], small)


def test_a_tokenizer_that_decodes_to_other_text_is_refused(tmp_path: Path, model: Path, run: Path):
    import json

    other = tmp_path / "other"
    other.mkdir()
    definition = json.loads((model / "tokenizer.json").read_text())
    vocabulary: dict[str, int] = definition["model"]["vocab"]
    ids = sorted(vocabulary.values(), reverse=True)
    plain = {token: id_ for token, id_ in vocabulary.items() if len(token) == 1}
    shifted = sorted(plain.values())
    moved = dict(zip(sorted(plain, key=plain.__getitem__), [*shifted[50:], *shifted[:50]], strict=True))
    assert ids[0] == max(moved.values())
    definition["model"]["vocab"] = vocabulary | moved
    (other / "tokenizer.json").write_text(json.dumps(definition))
    with pytest.raises(ConfigError, match=r"8 of 16|16 of 16 answers differ from the text"):
        check_tokenizer_matches([run], other)
