"""The family that a model belongs to, by its name. A teacher must be of another family than the turn's author."""

from __future__ import annotations

import re
from functools import lru_cache

_FAMILIES: tuple[tuple[str, str], ...] = (
    # The name of a distilled model may hold two families: its teacher's and its base model's. The family that is
    # listed first here wins, so that the teacher decides.
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
# A match begins at the beginning of a word; digits and letters may follow directly (glm5, llama3).
_PATTERN = re.compile("|".join(f"(?P<{name}>(?<![a-z0-9])(?:{pattern}))" for name, pattern in _FAMILIES))
_ORDER = {name: at for at, (name, _) in enumerate(_FAMILIES)}


def model_family(model: str | None) -> str | None:
    """The family of a model by its name ("anthropic/claude-opus-4-7" → "claude"), None where it is unknown."""
    # There are few names and very many turns, so results are cached; but a hostile log may have huge names.
    return None if not model else _family(model) if len(model) > _LONG else _remembered(model)


def _family(model: str) -> str | None:
    matches = [match.lastgroup for match in _PATTERN.finditer(model.lower()) if match.lastgroup]
    return min(matches, key=_ORDER.__getitem__, default=None)


_LONG = 200
_remembered = lru_cache(maxsize=1024)(_family)
