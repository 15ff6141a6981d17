"""How servers say that a prompt does not fit, and the two numbers in what they say."""

from __future__ import annotations

import re

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
    """Whether a refusal speaks of the model's context."""
    return _OVERFLOW.search(message) is not None


def reported_prompt_tokens(message: str) -> int | None:
    """The tokens of the prompt, where the refusal tells them."""
    return _number(_PROMPT.search(message))


def reported_context_length(message: str) -> int | None:
    """The tokens that the model's context holds, where the refusal tells them."""
    return _number(_LIMIT.search(message))


def _number(match: re.Match[str] | None) -> int | None:
    return None if match is None else int(next(group for group in match.groups() if group))
