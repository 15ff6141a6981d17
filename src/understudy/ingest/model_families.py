"""Which family of models a name belongs to: what a turn's author and a teacher must not share."""

from __future__ import annotations

import re
from functools import lru_cache

_FAMILIES: tuple[tuple[str, str], ...] = (
    # A distillation is of the family that taught it as well as of the one it was made of; the name that stands
    # first here wins, so that the rarer word decides over the base model's.
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
# A name is matched from the beginning of a word; digits and letters may follow at once (glm5, llama3).
_PATTERN = re.compile("|".join(f"(?P<{name}>(?<![a-z0-9])(?:{pattern}))" for name, pattern in _FAMILIES))
_ORDER = {name: at for at, (name, _) in enumerate(_FAMILIES)}


def model_family(model: str | None) -> str | None:
    """The family of a model by its name ("anthropic/claude-opus-4-7" → "claude"), None where none is known."""
    # Few names, very many turns; a log may have anything for a name, though.
    return None if not model else _family(model) if len(model) > _LONG else _remembered(model)


def _family(model: str) -> str | None:
    matches = [match.lastgroup for match in _PATTERN.finditer(model.lower()) if match.lastgroup]
    return min(matches, key=_ORDER.__getitem__, default=None)


_LONG = 200
_remembered = lru_cache(maxsize=1024)(_family)
