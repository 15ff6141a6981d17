"""Prompts that are shorter than the log explains: content was cleared, or summarised, without a record."""

from __future__ import annotations

import pytest

from support.claude_log import Log, by_message, read, thinking

FIRST, NEXT, LAST = (f"msg_01{letter * 20}" for letter in "abc")
CLEARED, COMPACTED = ("cleared_not_logged",), ("compaction_not_logged",)
BEFORE = 140_000
THOUGHT = "so " * 10_000  # at most 12,000 tokens


def usage(tokens: int, cached: int = 10) -> dict[str, int]:
    return {"cache_read_input_tokens": cached, "cache_creation_input_tokens": 0, "input_tokens": tokens - cached}


def called(*thoughts: object, cached: int = 10, version: str = "2.1.15") -> Log:
    """A session up to the result of its first call, with a prompt of `BEFORE` tokens."""
    log = Log(version=version)
    log.user("look", todos=[])
    log.assistant(FIRST, *thoughts, ("t1", "Bash"), usage=usage(BEFORE, cached))
    log.result("t1", "one")
    return log


def label(log: Log, message_id: str) -> tuple[str, tuple[str, ...]]:
    state = by_message(*read(log))[message_id]
    return state.fidelity, state.notes


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        (BEFORE + 300, ("exact", ())),
        (BEFORE - 1500, ("exact", ())),  # reminders that are not logged come and go
        (BEFORE - 24_000, ("repaired", CLEARED)),
        (2110, ("repaired", CLEARED)),
    ],
)
def test_after_tool_results_a_prompt_is_not_shorter_than_the_one_before(
    tokens: int, expected: tuple[str, tuple[str, ...]]
) -> None:
    log = called()
    log.assistant(NEXT, "Looked.", usage=usage(tokens))
    log.user("go on", todos=[])
    log.assistant(LAST, "Going on.", usage=usage(tokens + 100))
    assert label(log, FIRST) == ("exact", ())
    assert label(log, NEXT) == label(log, LAST) == expected  # what was cleared stays cleared


@pytest.mark.parametrize(
    ("version", "expected"), [("1.0.69", COMPACTED), ("2.0.76", CLEARED), ("2.1.15", CLEARED)]
)
def test_only_early_versions_compact_without_a_record(version: str, expected: tuple[str, ...]) -> None:
    log = called(version=version)
    log.assistant(NEXT, "Looked.", usage=usage(BEFORE // 3))
    fidelity, notes = label(log, NEXT)
    assert set(expected) <= set(notes) and not ({*CLEARED, *COMPACTED} - {*expected}) & set(notes)
    assert fidelity == ("lossy" if expected == COMPACTED else "repaired")


@pytest.mark.parametrize(
    ("thoughts", "same_run", "tokens", "expected"),
    [
        ((), True, BEFORE - 5000, CLEARED),
        ((), False, BEFORE - 5000, ()),  # another run of the program may have fewer tools
        ((), False, BEFORE - 20_000, CLEARED),
        ((thinking(THOUGHT),), True, BEFORE - 5000, ()),  # earlier thinking is not sent after a prompt
        ((thinking(THOUGHT),), True, BEFORE - 20_000, CLEARED),
        ((thinking(""),), True, BEFORE - 20_000, ()),  # nothing says how long hidden thinking was
    ],
)
def test_after_a_prompt_it_is_shorter_by_earlier_thinking_and_by_what_another_run_lacks(
    thoughts: tuple[object, ...], same_run: bool, tokens: int, expected: tuple[str, ...]
) -> None:
    log = called(*thoughts)
    log.assistant(NEXT, "Looked.", usage=usage(BEFORE))
    log.user("go on", **({"todos": []} if same_run else {}))
    log.assistant(LAST, "Going on.", usage=usage(tokens))
    assert label(log, LAST)[1] == expected


def test_thinking_does_not_explain_a_shorter_prompt_after_tool_results() -> None:
    log = called(thinking(THOUGHT))
    log.assistant(NEXT, "Looked.", usage=usage(BEFORE - 5000))
    assert label(log, NEXT)[1] == CLEARED


def test_figures_that_cannot_be_compared_give_no_note() -> None:
    other_model = called()
    other_model.assistant(NEXT, "Looked.", usage=usage(BEFORE // 2), model="claude-haiku-4-5")
    without_cache = called(cached=0)  # such a server may count only what it had not cached
    without_cache.assistant(NEXT, "Looked.", usage=usage(2000, cached=0))
    not_reported = called()
    not_reported.assistant(NEXT, "Looked.")
    for log in (other_model, without_cache, not_reported):
        assert label(log, NEXT) == ("exact", ())


def test_what_the_log_says_to_be_cleared_or_compacted_gives_no_note() -> None:
    cleared = called()
    cleared.system("microcompact_boundary", microcompactMetadata={"compactedToolIds": ["t1"]})
    cleared.assistant(NEXT, "Looked.", usage=usage(BEFORE - 30_000))
    compacted = called()
    compacted.system("compact_boundary", parent=None, compactMetadata={"trigger": "auto"})
    compacted.user("This session is being continued.", isCompactSummary=True)
    compacted.assistant(NEXT, "Looked.", usage=usage(9000))
    for log in (cleared, compacted):
        assert not {*CLEARED, *COMPACTED}.intersection(label(log, NEXT)[1])


def test_a_rewound_turn_is_compared_with_what_precedes_it() -> None:
    log = Log()
    log.user("look", todos=[])
    first = log.assistant(FIRST, "Looked.", usage=usage(20_000))
    log.user("read all", parent=first, todos=[])
    log.assistant(NEXT, "Read.", usage=usage(90_000))
    log.user("only one", parent=first, todos=[])
    log.assistant(LAST, "Read one.", usage=usage(20_100))
    assert label(log, LAST) == ("exact", ())


def many_results(figures: list[int | None], cached: int = 0, version: str = "2.1.15", size: int = 50_000) -> Log:
    """A session with five results of 50,000 characters, and what a server says of each prompt (None: nothing)."""
    log = Log(version=version)
    log.user("read all", todos=[])
    for number, tokens in enumerate(figures):
        report = {} if tokens is None else {"usage": usage(tokens, cached)}
        log.assistant(f"msg_01{'abcdef'[number] * 20}", (f"t{number}", "Read"), **report)
        log.result(f"t{number}", "x" * size)
    return log


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        ([None] * 5, "clearing_unknown"),
        ([10] * 5, "clearing_unknown"),  # counted is what the server had not cached
        ([9000, 22_000, 35_000, 48_000, 61_000], None),  # all of the results are counted
        ([9000, 22_000, 35_000, 48_000, 41_000], "clearing_unknown"),
        ([9000, 9100, 9200, 9300, 9400], "clearing_unknown"),
    ],
)
def test_without_a_cache_results_that_may_have_been_cleared_are_noted(
    figures: list[int | None], expected: str | None
) -> None:
    log = many_results(figures)
    assert label(log, FIRST) == label(log, f"msg_01{'c' * 20}") == ("exact", ())
    fidelity, notes = label(log, f"msg_01{'e' * 20}")
    assert (fidelity, notes) == (("repaired", (expected,)) if expected else ("exact", ()))


def test_figures_of_a_cache_few_results_and_versions_that_clear_none_leave_no_doubt() -> None:
    cached = many_results([9000, 22_000, 35_000, 48_000, 61_000], cached=10)
    few = many_results([None] * 5, size=20_000)
    early = many_results([None] * 5, version="1.0.60")
    for log in (cached, few, early):
        assert "clearing_unknown" not in label(log, f"msg_01{'e' * 20}")[1]
