"""Fields that model servers have in common: counts, token ids, logprobs, versions of weights."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from understudy.types import PolicySpan

Count = Annotated[int, Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
NegativeLog = Annotated[float, Meta(le=1e-3)]
"""A logprob; rounding may lift a certain token's above 0."""


class VersionSpan(Struct, gc=False):
    """The tokens from `start` up to `end` are of this version of the weights."""

    version: str | int
    start: Count
    end: Count


def policy_spans(spans: Sequence[VersionSpan] | None, version: str | int | None = None) -> tuple[PolicySpan, ...]:
    """The versions that sampled an answer: of its parts where the server tells them, else the one of all of it."""
    if spans:
        return tuple(PolicySpan(str(span.version), span.start, span.end) for span in spans)
    return () if version is None else (PolicySpan(str(version)),)
