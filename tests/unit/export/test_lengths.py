"""How long rows of exports are, and how long ones are cut at turns: each answer once, results with their calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy import plugins
from understudy.errors import ConfigError
from understudy.export.base import ExportSummary
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.examples import Example
from understudy.export.lengths import CANNOT_BE_CUT, CUT, PIECES, LengthRule, length_figures
from understudy.ingest.trace import tool_call
from understudy.preference.checks import NOT_RENDERED
from understudy.redact.redactor import Redactor
from understudy.store import Store

from support import example_count
from support.export import TOOLS, Log, put_rollouts, put_sessions, rows


class WordTemplate:
    """A template whose tokens are words, three more for each message, and that refuses the word "refuse"."""

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> list[int] | None:
        text = json.dumps([messages, tools])
        return None if "refuse" in text else list(range(len(text.split()) + 3 * len(messages)))


def conversation(
    sizes: Sequence[int], users: frozenset[int] = frozenset(), skipped: frozenset[int] = frozenset()
) -> Example:
    """A turn for each size, its result so long; behind some stands a user message; some are not learned."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "You code."},
        {"role": "user", "content": "Mend it."},
    ]
    trained: list[int] = []
    for number, size in enumerate(sizes):
        if number not in skipped or number == len(sizes) - 1:
            trained.append(len(messages))
        call = tool_call(f"c{number}", "Bash", {"command": f"step {number}"})
        last = number == len(sizes) - 1
        messages.append(
            {"role": "assistant", "content": f"answer {number}", **({} if last else {"tool_calls": [call]})}
        )
        if not last:
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": "x " * size})
            if number in users:
                messages.append({"role": "user", "content": f"wish {number}"})
    return Example(
        example_id=f"id{len(sizes) - 1}", origin="session", unit="conversation", group="p", messages=messages,
        trained=tuple(trained), answer_ids=tuple(messages[at]["content"] for at in trained), tools=TOOLS,
    )  # fmt: skip


examples = st.builds(
    conversation,
    st.lists(st.integers(0, 60), min_size=1, max_size=12),
    st.frozensets(st.integers(0, 11)),
    st.frozensets(st.integers(0, 11)),
)


@settings(max_examples=example_count(150), deadline=None)
@given(examples, st.integers(1, 1600), st.booleans())
def test_cut_pieces_fit_the_limit_and_train_each_answer_once_after_its_turn(
    example: Example, limit: int, tokens: bool
):
    rule = LengthRule(WordTemplate(), max_tokens=limit) if tokens else LengthRule(max_chars=limit)
    left_out: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    pieces = list(rule.pieces(example, left_out, notes))
    taught = [answer for piece in pieces for answer in piece.answer_ids]
    assert len(taught) == len(set(taught)) == len(example.trained) - left_out[CANNOT_BE_CUT]
    whole = rule.measure(example.messages, example.tools)
    assert whole is not None and notes[CUT] == (whole > limit)
    assert notes[PIECES] == (len(pieces) if whole > limit else 0)
    for piece in pieces:
        assert piece.length == rule.measure(piece.messages, piece.tools) and piece.length <= limit
        assert piece.messages[0] == example.messages[0]
        assert piece.messages[1]["content"].startswith("Mend it.")
        assert [piece.messages[at]["content"] for at in piece.trained] == list(piece.answer_ids)
        roles = [message["role"] for message in piece.messages]
        assert all(one != "user" or other != "user" for one, other in pairwise(roles))
        calls: set[str] = set()
        for message in piece.messages:
            calls |= {call["id"] for call in message.get("tool_calls", ())}
            assert message["role"] != "tool" or message["tool_call_id"] in calls
        for at in piece.trained:
            before = example.messages.index(piece.messages[at]) - 1
            content = example.messages[before]["content"]
            assert piece.messages[at - 1]["content"] == content or content in piece.messages[at - 1]["content"]


@given(examples, st.integers(200, 1600))
def test_a_piece_keeps_as_many_earlier_turns_as_fit_the_limit(example: Example, limit: int):
    rule = LengthRule(max_chars=limit)
    for piece in rule.pieces(example, Counter(), Counter()):
        last = example.messages.index(piece.messages[-1])
        cut = last + 1 - (len(piece.messages) - 2)
        longer = [*example.messages[:2], *example.messages[max(cut - 3, 2) : last + 1]]
        size = rule.measure(longer, example.tools)
        assert len(longer) <= len(piece.messages) or (size is not None and size > limit - len("Mend it.wish 10"))


class CountingTemplate(WordTemplate):
    """Counts how often it renders, and how many tokens."""

    def __init__(self) -> None:
        self.renderings = 0
        self.tokens = 0

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> list[int] | None:
        tokens = super().render(messages, tools, generation_prompt=generation_prompt)
        self.renderings += 1
        self.tokens += len(tokens or ())
        return tokens


def test_each_piece_takes_few_renderings_however_uneven_the_turns_are():
    template = CountingTemplate()
    rule = LengthRule(template, max_tokens=1000)
    sizes = [5 if number % 7 else 250 for number in range(400)]
    pieces = list(rule.pieces(conversation(sizes), Counter(), Counter()))
    assert len(pieces) > 20
    assert template.renderings <= 5 * len(pieces)


def test_turns_late_in_a_long_conversation_are_not_rendered_with_all_before_them():
    template = CountingTemplate()
    rule = LengthRule(template, max_tokens=1000)
    whole = conversation([60] * 600)
    lengths: list[int] = []
    for end in range(101, 600, 50):
        last = whole.trained[end]
        turn = replace(whole, messages=whole.messages[: last + 1], trained=(last,), answer_ids=(str(end),))
        (piece,) = rule.pieces(turn, Counter(), Counter())
        lengths.append(piece.length or 0)
    assert all(900 < length <= 1000 for length in lengths)
    assert template.tokens <= 5 * sum(lengths)


def test_conversations_that_cannot_be_cut_or_rendered_are_left_out_and_counted():
    left_out: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    example = conversation([1, 5000, 1, 1])
    (first, second) = LengthRule(max_chars=1500).pieces(example, left_out, notes)
    assert (first.answer_ids, second.answer_ids) == (("answer 3",), ("answer 0", "answer 1"))
    assert left_out == {CANNOT_BE_CUT: 1}, "answer 2 follows a result that is longer than the limit"
    assert notes == {CUT: 1, PIECES: 2}
    refused = conversation([1])
    refused.messages[1]["content"] = "refuse"
    assert list(LengthRule(WordTemplate()).pieces(refused, left_out, notes)) == []
    assert left_out[NOT_RENDERED] == 1
    refused = conversation([200] * 4)
    refused.messages[-1]["content"] = "refuse"
    left_out.clear()
    pieces = list(LengthRule(WordTemplate(), max_tokens=300).pieces(refused, left_out, notes))
    assert pieces == [] and left_out == {NOT_RENDERED: 1}


def test_limits_that_make_no_sense_are_refused():
    with pytest.raises(ConfigError, match="--tokenizer MODEL_DIR"):
        LengthRule(max_tokens=100)
    with pytest.raises(ConfigError, match="--max-chars"):
        LengthRule(WordTemplate(), max_chars=100)


def test_length_figures_and_histogram_cover_all_rows():
    figures = length_figures(Counter({10: 3, 300: 1, 1500: 0, 5000: 1}), "tokens", "qwen", 8000)
    assert figures is not None
    assert (figures.shortest, figures.median, figures.p90, figures.longest) == (10, 10, 5000, 5000)
    assert figures.total == 5330 and sum(figures.histogram.values()) == 5
    assert figures.histogram == {
        "to 256": 3,
        "to 512": 1,
        "to 1,024": 0,
        "to 2,048": 0,
        "to 4,096": 0,
        "to 8,192": 1,
    }
    bars = list(figures.bars())
    assert bars[0].endswith(" 3") and bars[0].count("#") == 40 and bars[2].count("#") == 0
    assert length_figures(Counter({10: 0}), "tokens", None, None) is None


def long_session(turns: int = 30) -> Log:
    log = Log("long")
    node = log.user(-1, "Mend it.")
    for number in range(turns):
        call = (f"c{number}", "Bash", {"command": f"cat {number}"})
        node = log.result(log.answer(node, None, [call]), f"c{number}", f"{number} " + "y" * 500)
    log.answer(node, "Done.")
    return log


def export(directory: Path, output: Path, name: str = "trl-sft", **options: Any) -> ExportSummary:
    own = {key: options.pop(key) for key in ("unit", "stage", "form", "exact") if key in options}
    with Store.open(directory, create=False) as store:
        selection = ExportSelection(test_share=0.0, **options)
        return plugins.load("exports", name)(Corpus(store, selection, Redactor(bytes(32))), output, **own)


def test_card_and_manifest_report_lengths_and_cuts(tmp_path: Path):
    put_sessions(tmp_path / "store", [long_session().trace])
    whole = export(tmp_path / "store", tmp_path / "whole", origins=("sessions",))
    assert whole.lengths is not None and whole.lengths.longest > 15_000 and whole.lengths.unit == "characters"
    cut = export(tmp_path / "store", tmp_path / "cut", "openai", origins=("sessions",), cut_chars=4000)
    assert cut.lengths is not None and cut.lengths.longest <= 4000 and cut.rows > 4
    written = rows(tmp_path / "cut" / "train.jsonl")
    assert sum(message.get("weight", 0) for row in written for message in row["messages"]) == 31
    card = (tmp_path / "cut" / "README.md").read_text()
    assert "cut to 4,000 characters at turns" in card and f"1 {CUT}" in card and "## Lengths" in card
    manifest = json.loads((tmp_path / "cut" / "understudy.json").read_text())
    assert manifest["lengths"]["longest"] == cut.lengths.longest and manifest["selection"]["cut_chars"] == 4000
    assert "cut_chars" not in json.loads((tmp_path / "whole" / "understudy.json").read_text())["selection"]
    assert "cut to" not in (tmp_path / "whole" / "README.md").read_text()


def test_lengths_are_those_of_rows_where_a_conversation_gives_several(tmp_path: Path):
    put_sessions(tmp_path / "store", [long_session().trace])
    made = export(
        tmp_path / "store", tmp_path / "out", origins=("sessions",), exact=True, where="position NOT IN (10, 20)"
    )
    assert made.rows == 3 and made.lengths is not None
    assert sum(made.lengths.histogram.values()) == 3
    assert made.lengths.shortest < 0.5 * made.lengths.longest


def test_turn_rows_are_cut_to_the_limit_too(tmp_path: Path):
    put_sessions(tmp_path / "store", [long_session().trace])
    cut = export(
        tmp_path / "store", tmp_path / "out", "openai", origins=("sessions",), cut_chars=4000, unit="turn"
    )
    assert cut.rows == 31 and cut.lengths is not None and 3000 < cut.lengths.median <= 4000


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("hf", {"origins": ("rollouts",)}),
        ("llamafactory", {"stage": "dpo", "origins": ("rollouts",)}),
        ("verl", {"form": "tokens", "origins": ("rollouts",)}),
    ],
)
def test_formats_that_cannot_be_cut_refuse_max_chars(tmp_path: Path, name: str, options: dict[str, Any]):
    put_rollouts(tmp_path / "store", tasks=1, samples=1)
    with pytest.raises(ConfigError, match="--max-chars: applies to conversations"):
        export(tmp_path / "store", tmp_path / "out", name, cut_chars=100, **options)
