"""What model servers have in common: response fields, and how they reject a prompt that is too long."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta, Struct

from understudy.types import PolicySpan

Count = Annotated[int, Meta(ge=0, lt=2**31)]
TokenId = Annotated[int, Meta(ge=0, lt=2**31)]
NegativeLog = Annotated[float, Meta(le=1e-3)]
"""A logprob. Rounding may lift that of a certain token above 0."""


class VersionSpan(Struct, gc=False):
    """The tokens in [start, end) were sampled by this version of the weights."""

    version: str | int
    start: Count
    end: Count


class PromptTokenDetails(Struct, gc=False):
    cached_tokens: Count | None = None
    created_cache_tokens: Count | None = None
    cache_write_tokens: Count | None = None


class ServerUsage(Struct, gc=False):
    """Token counts of a response; a server may leave out any of them."""

    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    prompt_tokens_details: PromptTokenDetails | None = None


def policy_spans(spans: Sequence[VersionSpan] | None, version: str | int | None = None) -> tuple[PolicySpan, ...]:
    """Return the versions that sampled a response: those of its parts if the server reports them, else that of
    the whole.
    """
    if spans:
        return tuple(PolicySpan(str(span.version), span.start, span.end) for span in spans)
    return () if version is None else (PolicySpan(str(version)),)


_OVERFLOW = re.compile(
    r"context (length|window)|maximum model length|max_model_len|maximum allowed length|prompt is too long",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"(?:context length(?: is| of)?|(?:model|allowed) length(?: of)?)\s*\(?(\d{1,12})")
_PROMPT = re.compile(
    r"(?:has|contains|resulted in|input|length|total of \d{1,12} tokens:)\s*\(?(\d{1,12})(?: input)?(?: tokens|\))"
    r"|\((\d{1,12}) in the messages"
)


def is_overflow(message: str) -> bool:
    """Return whether an error says that the prompt exceeds the model's context."""
    return _OVERFLOW.search(message) is not None


def reported_prompt_tokens(message: str) -> int | None:
    """Return the number of prompt tokens that the error states, or None."""
    return _number(_PROMPT.search(message))


def reported_context_length(message: str) -> int | None:
    """Return the context length that the error states, or None."""
    return _number(_LIMIT.search(message))


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(next(group for group in match.groups() if group))
