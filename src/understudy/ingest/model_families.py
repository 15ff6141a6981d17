"""Tells a model's family from its name.

Teachers must be of another family than the model whose turn they judge.
"""

from __future__ import annotations

import re
from functools import lru_cache

_FAMILIES: tuple[tuple[str, str], ...] = (
    # A distilled model's name may contain two families: its teacher's and its base model's. The family listed
    # first wins, so that the teacher counts.
    ("claude", r"claude|anthropic|opus|sonnet|haiku"),
    ("gpt", r"gpt(?!-?(?:j|neo))|chatgpt|codex|davinci|o[1345](?![a-z0-9])"),
    ("gemini", r"gemini|gemma|palm"),
    ("deepseek", r"deepseek"),
    ("glm", r"glm|chatglm|zai|z-ai"),
    ("kimi", r"kimi|moonshot|moonshotai"),
    ("qwen", r"qwen|qwq|qvq|tongyi"),
    ("mistral", r"mistral|mixtral|ministral|magistral|codestral|devstral|pixtral"),
    ("grok", r"grok|xai|x-ai"),
    ("minimax", r"minimax|abab"),
    ("nova", r"nova(?=-(?:micro|lite|pro|premier))"),
    ("command", r"command(?=-?(?:a|r|light|nightly))|cohere|aya"),
    ("phi", r"phi(?=-?\d)"),
    ("granite", r"granite"),
    ("nemotron", r"nemotron"),
    ("llama", r"llama|codellama"),
    ("seed", r"seed-oss|doubao"),
    ("starcoder", r"starcoder"),
    ("yi", r"yi(?=-)"),
)
# A family's name must begin at a word boundary; digits and letters may follow directly (glm5, llama3).
_PATTERN = re.compile("|".join(f"(?P<{name}>(?<![a-z0-9])(?:{pattern}))" for name, pattern in _FAMILIES))
_ORDER = {name: rank for rank, (name, _) in enumerate(_FAMILIES)}


def model_family(model: str | None) -> str | None:
    """Return a model's family by its name ("anthropic/claude-opus-4-7" → "claude"), or None if it is unknown."""
    # Results are cached, since there are few names and very many turns. Huge names, as in hostile logs, are not
    # cached.
    return None if not model else _family(model) if len(model) > _MAX_CACHED_NAME_CHARS else _cached_family(model)


def _family(model: str) -> str | None:
    matches = [match.lastgroup for match in _PATTERN.finditer(model.lower()) if match.lastgroup]
    return min(matches, key=_ORDER.__getitem__, default=None)


_MAX_CACHED_NAME_CHARS = 200
_cached_family = lru_cache(maxsize=1024)(_family)
