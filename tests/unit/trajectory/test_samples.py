"""Merging calls into token sequences: every sampled token once, whatever the session did."""

from __future__ import annotations

import json
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.trajectory.samples import NO_TOKENS, merge, samples
from understudy.trajectory.tree import build
from understudy.types import Call

from support.trajectory import Session, assistant, prompt_ids, text, tool_result, tool_use, user

ASK = user(text("Mend it."))


def ids(content: str) -> tuple[int, ...]:
    return tuple(map(ord, content))


def chain(turns: int, break_at: int | None = None) -> Session:
    """A session of so many turns whose prompts extend each other, but for turn `break_at`."""
    session = Session()
    messages = [ASK]
    sampled: dict[int, str] = {}
    for turn in range(turns):
        answer = f"<call {turn}></>"
        rendered = sampled if turn != break_at else {**sampled, len(messages) - 2: "<CALL></>"}
        session.ask(
            messages,
            [tool_use(f"t{turn}")],
            prompt=prompt_ids(messages, sampled=rendered),
            completion=ids(answer),
            logprobs=[-0.5 - turn] * len(answer),
            policy="7",
        )
        sampled = {**rendered, len(messages): answer}
        messages = [*messages, assistant(tool_use(f"t{turn}")), user(tool_result(f"t{turn}"))]
    return session


def test_a_session_that_extends_is_one_segment():
    session = chain(4)
    (segment,) = merge(build(session.calls)).segments
    last = session.calls[-1]
    assert segment.token_ids == (last.prompt_token_ids or ()) + (last.completion_token_ids or ())
    assert segment.call_ids == tuple(call.id for call in session.calls)
    trained_text = "".join(
        chr(token) for token, on in zip(segment.token_ids, segment.loss_mask, strict=True) if on
    )
    assert trained_text == "<call 0></><call 1></><call 2></><call 3></>"
    trained_logprobs = [value for value, on in zip(segment.logprobs, segment.loss_mask, strict=True) if on]
    assert trained_logprobs == [-0.5 - turn for turn in range(4) for _ in "<call 0></>"]
    assert {value for value, on in zip(segment.logprobs, segment.loss_mask, strict=True) if not on} == {0.0}
    assert segment.policy_versions == ("7",) * 4


def test_a_break_begins_a_segment_and_is_counted():
    merged = merge(build(chain(5, break_at=3).calls))
    assert [len(segment.call_ids) for segment in merged.segments] == [3, 2]
    assert merged.reasons == {"first call": 1, "retokenized": 1}


def follow(**changes: object) -> list[Call]:
    """Two calls, the second following the first, with the second's fields changed."""
    first, second = chain(2).calls
    return [first, msgspec.structs.replace(second, **changes)]


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        (follow(prompt_token_ids=ids("other")), "prompt rendered anew"),
        (
            follow(
                prompt_token_ids=ids("other"),
                request=chain(2).calls[1].request.replace(b'"system": "S"', b'"system": "T"'),
            ),
            "tools or system changed",
        ),
        (
            follow(
                prompt_token_ids=(chain(1).calls[0].prompt_token_ids or ()) + ids("other"),
                request=chain(2).calls[1].request.replace(b'"input": {}', b'"input": {"replace_all": false}'),
            ),
            "answer rewritten",
        ),
    ],
)
def test_why_a_segment_begins(calls: list[Call], reason: str):
    assert merge(build(calls)).reasons == {"first call": 1, reason: 1}


def test_calls_without_token_ids_are_counted_and_left_out():
    first, second, third = chain(3).calls
    bare = msgspec.structs.replace(second, completion_token_ids=None, logprobs=None)
    merged = merge(build([first, bare, third]))
    assert merged.reasons == {"first call": 1, "call before not usable": 1, NO_TOKENS: 1}
    assert [segment.call_ids for segment in merged.segments] == [(first.id,), (third.id,)]


def test_logprobs_that_are_missing_are_not_made_up():
    first, second = chain(2).calls
    (segment,) = merge(build([first, msgspec.structs.replace(second, logprobs=None)])).segments
    on = [value for value, sampled in zip(segment.logprobs, segment.loss_mask, strict=True) if sampled]
    assert on == [-0.5] * 11 + [None] * 11


def test_samples_carry_the_reward_and_the_version_they_share():
    calls = chain(3).calls
    (sample,) = samples(build(calls), rollout_id="r1", reward=1.0)
    assert (sample.reward, sample.rollout_id, sample.attempt_id, sample.branch) == (1.0, "r1", "a1", "main")
    assert sample.policy_version == "7"
    mixed = [calls[0], msgspec.structs.replace(calls[1], policy_version="8"), calls[2]]
    assert samples(build(mixed), rollout_id="r1", reward=None)[0].policy_version is None


def test_samples_of_one_request_are_segments_of_their_own():
    calls = [msgspec.structs.replace(chain(1).calls[0], id=f"a1-{number}", sequence=number) for number in range(4)]
    merged = merge(build(calls))
    assert [segment.call_ids for segment in merged.segments] == [(call.id,) for call in calls]
    assert not any(segment.superseded for segment in merged.segments)
    assert merged.reasons == {"first call": 1, "sibling": 3}


def test_a_malformed_tool_call_is_no_target_of_imitation():
    calls = chain(2).calls
    broken = json.dumps({"__unparsedToolInput": {"raw": "{", "len": 1}})
    calls[0] = msgspec.structs.replace(
        calls[0], response=calls[0].response.replace(b'"input": {}', b'"input": ' + broken.encode())
    )
    (segment,) = merge(build(calls)).segments
    assert sum(segment.loss_mask) == 22, "rewards weigh every sampled token"
    targets = [token for token, on in zip(segment.token_ids, segment.target_mask, strict=True) if on]
    assert tuple(targets) == ids("<call 1></>")


@st.composite
def sessions(draw: st.DrawFn) -> list[Call]:
    """Calls of a session that goes on, retries, breaks, loses tokens, forks to subagents and compacts at will."""
    session = Session()
    lines: dict[str | None, tuple[list[dict[str, object]], dict[int, str]]] = {None: ([ASK], {})}
    for number in range(draw(st.integers(1, 14))):
        agent = draw(st.sampled_from([None, None, "x1", "y2"]))
        messages, sampled = lines.get(agent, ([user(text(f"Task of {agent}"))], {}))
        act = draw(
            st.sampled_from(["go", "go", "go", "retry", "rewrite", "retokenize", "bare", "fail", "compact"])
        )
        if act == "compact":
            messages, sampled = [user(text(f"Summary {number}"))], {}
        completion = draw(st.sampled_from(["", "ab", f"<{number}>"])) + "</>"
        answer = [tool_use(f"t{number}")]
        session.ask(
            messages,
            None if act == "fail" else answer,
            agent=agent,
            status="error" if act == "fail" else "ok",
            prompt=None if act in ("bare", "fail") else prompt_ids(messages, sampled=sampled),
            completion=None if act in ("bare", "fail") else ids(completion),
            logprobs=None if draw(st.booleans()) else [-1.0] * len(completion),
        )
        if act in ("retry", "fail"):
            continue
        echoed = tool_use(f"t{number}", added=True) if act == "rewrite" else answer[0]
        rendered = {} if act in ("rewrite", "retokenize", "bare") else {len(messages): completion}
        history = [*messages, assistant(echoed), user(tool_result(f"t{number}"))]
        lines[agent] = (history, {**sampled, **rendered})
    return session.calls


@given(sessions(), st.randoms(use_true_random=False))
def test_every_sampled_token_is_in_exactly_one_segment(calls: list[Call], random: object):
    merged = merge(build(calls))
    by_id = {call.id: call for call in calls}
    usable = [call for call in calls if call.status == "ok" and call.completion_token_ids is not None]
    assert Counter(id_ for segment in merged.segments for id_ in segment.call_ids) == Counter(
        call.id for call in usable
    )
    for segment in merged.segments:
        assert len(segment.token_ids) == len(segment.loss_mask) == len(segment.logprobs)
        members = [by_id[id_] for id_ in segment.call_ids]
        on = [token for token, sampled in zip(segment.token_ids, segment.loss_mask, strict=True) if sampled]
        assert on == [token for call in members for token in call.completion_token_ids or ()]
        for call in members:
            whole = (call.prompt_token_ids or ()) + (call.completion_token_ids or ())
            assert segment.token_ids[: len(whole)] == whole
    answered_bare = sum(call.status == "ok" for call in calls) - len(usable)
    assert merged.reasons.get(NO_TOKENS, 0) == answered_bare
    assert sum(merged.reasons.values()) == len(merged.segments) + answered_bare


@given(sessions(), st.data())
def test_the_order_in_which_calls_arrive_changes_nothing(calls: list[Call], data: st.DataObject):
    twice = data.draw(st.permutations([*calls, *calls[: len(calls) // 2]]))
    assert merge(build(twice)) == merge(build(calls))
