"""Pauses, drains and resumes generation around a change of weights, and records the policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from msgspec import Struct

from understudy.errors import GatewayError
from understudy.types import PolicySpan

HOLD_LIMIT_S = 240.0
"""How many seconds a request waits for a paused gateway.

Clients without streaming give up after 300 s. After this limit they get an overload error, which Claude Code waits
out and retries; the retry is held again.
"""


class GenerationPaused(GatewayError):
    """Generation was paused for longer than a request is held."""


class GatewayState(Struct, frozen=True):
    """What a gateway is doing: `in_flight` generations run, and `waiting` requests are held by a pause."""

    paused: bool
    version: str | None
    in_flight: int
    waiting: int


class RunningCall(Struct, frozen=True, kw_only=True):
    """A call of a gateway that has no answer yet.

    `started_at` is in Unix seconds. `generating`: the backend works on it; if not, it waits for a place, for its
    budget, or for the end of a pause. `sent_bytes` is how much of a stream the agent has got so far.
    """

    id: str
    attempt_id: str
    session_id: str | None
    agent_id: str | None
    model: str
    backend: str
    started_at: float
    generating: bool
    request_bytes: int
    sent_bytes: int


class GenerationControl:
    """The switch shared by the gateway and whoever controls it, within one event loop.

    `version` is the policy version that generates now, or None if none was published.
    """

    def __init__(self, version: str | None = None, *, hold_limit_s: float = HOLD_LIMIT_S) -> None:
        self.version = version
        self._hold_limit_s = hold_limit_s
        self._in_flight = 0
        self._waiting = 0
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()

    async def wait_until_open(self) -> None:
        """Return once nothing is paused. Enter `generating` before awaiting anything else.

        Raises GenerationPaused if that takes longer than the hold limit.
        """
        if self._open.is_set():
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self._hold_limit_s):
                # A pause that directly follows a resume must also hold requests that were already woken.
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError:
            message = (
                f"generation has been paused for more than {self._hold_limit_s:g} s, as while weights are "
                "exchanged; retry later, or resume it: understudy gateway resume"
            )
            raise GenerationPaused(message) from None
        finally:
            self._waiting -= 1

    @contextmanager
    def generating(self) -> Generator[None]:
        """Count one generation as in flight during the `with` block."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    def pause(self) -> None:
        """Start no further generation; those in flight continue. Pausing twice has no further effect."""
        self._open.clear()

    def resume(self, version: str | None = None) -> None:
        """Let generations start again, held requests first. `version` is published before that."""
        if version is not None:
            self.publish(version)
        self._open.set()

    def publish(self, version: str) -> None:
        """Record that tokens are sampled from this version of the weights from now on."""
        self.version = version

    async def drain(self, timeout_s: float) -> int:
        """Wait for up to `timeout_s` seconds until nothing is in flight. Returns how many generations are left."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_flight:
                    await self._idle.wait()
        except TimeoutError:
            pass
        return self._in_flight

    def snapshot(self) -> GatewayState:
        """Return what the gateway is doing now."""
        return GatewayState(not self._open.is_set(), self.version, self._in_flight, self._waiting)


def policy_spans(
    before: str | None, after: str | None, reported: tuple[PolicySpan, ...], tokens: int | None
) -> tuple[PolicySpan, ...]:
    """Return which version sampled which of the `tokens` of a completion.

    `reported` is what the server reports, which takes precedence. Otherwise `before` and `after` are the versions
    that were published when the generation began and ended: if they are equal, that version sampled everything; if
    not, it is unknown where one replaced the other. Empty if no version was published.
    """
    if reported:
        return reported
    if before == after:
        return () if after is None else (PolicySpan(after, 0, tokens),)
    return tuple(PolicySpan(version) for version in (before, after) if version is not None)
