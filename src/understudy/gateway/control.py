"""Pauses, drains and resumes generation around a change of weights, and records the policy version."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from contextlib import contextmanager

from msgspec import Struct

from understudy.errors import GatewayError
from understudy.types import PolicySpan

HOLD_LIMIT_S = 240.0
"""How long a request waits for a paused gateway, in seconds.

Clients give up after 300 s without streaming. After this limit they get an overload, which Claude Code waits out
and retries; the retry is held again.
"""


class GenerationPaused(GatewayError):
    """Generation has been paused for longer than a request is held."""


class GatewayState(Struct, frozen=True):
    """What a gateway is doing: `in_flight` generations run, `waiting` requests are held by a pause."""

    paused: bool
    version: str | None
    in_flight: int
    waiting: int


class GenerationControl:
    """The switch that the gateway and whoever steers it share, within one event loop.

    `version` is the policy version that generates now, None where none was published.
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
        """Returns once nothing is paused; `generating` has to follow before anything is awaited.

        Raises Paused when that takes longer than the hold limit.
        """
        if self._open.is_set():
            return
        self._waiting += 1
        try:
            async with asyncio.timeout(self._hold_limit_s):
                # A pause that follows a resume at once must hold those too that had already been woken.
                while not self._open.is_set():
                    await self._open.wait()
        except TimeoutError:
            message = f"generation has been paused for more than {self._hold_limit_s:g} s; try again in a while"
            raise GenerationPaused(message) from None
        finally:
            self._waiting -= 1

    @contextmanager
    def generating(self) -> Generator[None]:
        """Counts one generation as in flight."""
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    def pause(self) -> None:
        """Let no further generation begin; those in flight go on. Pausing twice is pausing once."""
        self._open.clear()

    def resume(self, version: str | None = None) -> None:
        """Let generations begin again, those that are held first; `version` is published before."""
        if version is not None:
            self.publish(version)
        self._open.set()

    def publish(self, version: str) -> None:
        """From now on tokens are sampled from this version of the weights."""
        self.version = version

    async def drain(self, timeout_s: float) -> int:
        """Wait for up to `timeout_s` seconds until nothing is in flight; returns how many generations are left."""
        try:
            async with asyncio.timeout(timeout_s):
                while self._in_flight:
                    await self._idle.wait()
        except TimeoutError:
            pass
        return self._in_flight

    def snapshot(self) -> GatewayState:
        """What the gateway is doing at this moment."""
        return GatewayState(not self._open.is_set(), self.version, self._in_flight, self._waiting)


def policy_spans(
    before: str | None, after: str | None, reported: tuple[PolicySpan, ...], tokens: int | None
) -> tuple[PolicySpan, ...]:
    """Which version sampled which of the `tokens` of a completion.

    `told` is what the server says of it, and decides where it says anything. Else `before` and `after` are the
    versions that were published when the generation began and ended: one version has sampled all of it; of two,
    nobody knows where the one gave way to the other. Empty where no version was published.
    """
    if reported:
        return reported
    if before == after:
        return () if after is None else (PolicySpan(after, 0, tokens),)
    return tuple(PolicySpan(version) for version in (before, after) if version is not None)
