"""Pause, drain, resume, publish, and which version sampled which tokens."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.control import GatewayState, GenerationControl, GenerationPaused, policy_spans
from understudy.types import PolicySpan


async def generate(control: GenerationControl, done: asyncio.Event) -> None:
    await control.wait_until_open()
    with control.generating():
        await done.wait()


async def ticks(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_requests_run_and_are_counted_in_flight_while_not_paused() -> None:
    control, done = GenerationControl("v1"), asyncio.Event()
    running = [asyncio.ensure_future(generate(control, done)) for _ in range(3)]
    await ticks()
    assert control.snapshot() == GatewayState(paused=False, version="v1", in_flight=3, waiting=0)
    done.set()
    await asyncio.gather(*running)
    assert control.snapshot().in_flight == 0


async def test_a_pause_holds_new_requests_and_drains_running_ones() -> None:
    control, done = GenerationControl("v1"), asyncio.Event()
    early = asyncio.ensure_future(generate(control, done))
    await ticks()
    control.pause()
    control.pause()
    waiting = asyncio.ensure_future(generate(control, done))
    await ticks()
    assert control.snapshot() == GatewayState(paused=True, version="v1", in_flight=1, waiting=1)
    assert await control.drain(0.01) == 1
    draining = asyncio.ensure_future(control.drain(30))
    done.set()
    assert await draining == 0
    assert early.done()
    assert not waiting.done()
    control.resume("v2")
    await waiting
    assert control.snapshot() == GatewayState(paused=False, version="v2", in_flight=0, waiting=0)


async def test_a_pause_right_after_a_resume_still_holds_waiting_requests() -> None:
    control, done = GenerationControl(), asyncio.Event()
    control.pause()
    waiting = [asyncio.ensure_future(generate(control, done)) for _ in range(3)]
    await ticks()
    control.resume()
    control.pause()
    await ticks()
    assert control.snapshot() == GatewayState(paused=True, version=None, in_flight=0, waiting=3)
    control.resume()
    await ticks()
    assert control.snapshot().in_flight == 3
    done.set()
    await asyncio.gather(*waiting)


async def test_a_held_request_fails_retryably_after_the_hold_limit() -> None:
    control = GenerationControl(hold_limit_s=0.01)
    control.pause()
    with pytest.raises(GenerationPaused, match=r"paused for more than 0\.01 s.*; retry later") as raised:
        await control.wait_until_open()
    assert raised.value.retryable
    assert control.snapshot().waiting == 0


async def test_cancelled_requests_leave_the_waiting_and_in_flight_counts() -> None:
    control = GenerationControl()
    running = asyncio.ensure_future(generate(control, asyncio.Event()))
    await ticks()
    control.pause()
    waiting = asyncio.ensure_future(generate(control, asyncio.Event()))
    await ticks()
    running.cancel()
    waiting.cancel()
    await asyncio.gather(running, waiting, return_exceptions=True)
    assert control.snapshot() == GatewayState(paused=True, version=None, in_flight=0, waiting=0)
    assert await control.drain(0) == 0


def test_policy_spans_use_reported_spans_or_the_versions_before_and_after() -> None:
    reported = (PolicySpan("v1", 0, 3), PolicySpan("v2", 3, 9))
    assert policy_spans("v8", "v9", reported, 9) == reported
    assert policy_spans(None, None, (), 9) == ()
    assert policy_spans("v1", "v1", (), 9) == (PolicySpan("v1", 0, 9),)
    assert policy_spans("v1", "v1", (), None) == (PolicySpan("v1", 0, None),)
    assert policy_spans("v1", "v2", (), 9) == (PolicySpan("v1"), PolicySpan("v2"))
    assert policy_spans(None, "v2", (), 9) == (PolicySpan("v2"),)


@given(st.none() | st.text(min_size=1), st.text(min_size=1), st.none() | st.integers(0, 1000))
def test_the_last_policy_span_has_the_version_at_the_end_of_the_call(
    before: str | None, after: str, tokens: int | None
):
    assert policy_spans(before, after, (), tokens)[-1].version == after
