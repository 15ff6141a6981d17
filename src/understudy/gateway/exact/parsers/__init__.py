"""The formats in which models write thinking and tool calls, by name."""

from __future__ import annotations

from understudy.errors import ConfigError
from understudy.gateway.exact.parsers.base import CompletionFormat, ParsedOutput, opens_thinking
from understudy.gateway.exact.parsers.json_calls import find_deepseek, find_hermes, find_llama3
from understudy.gateway.exact.parsers.tagged_calls import find_glm, find_qwen3_coder

__all__ = ["FORMATS", "CompletionFormat", "ParsedOutput", "format_named", "opens_thinking"]

_CHATML_ENDS = ("<|im_end|>", "<|endoftext|>")

FORMATS = {
    format_.name: format_
    for format_ in (
        CompletionFormat("hermes", _CHATML_ENDS, find_hermes),
        CompletionFormat("qwen3-coder", _CHATML_ENDS, find_qwen3_coder),
        CompletionFormat("glm", ("<|user|>", "<|observation|>", "<|endoftext|>"), find_glm),
        CompletionFormat("deepseek", ("<｜end▁of▁sentence｜>",), find_deepseek),
        CompletionFormat("llama3", ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"), find_llama3),
    )
}


def format_named(name: str) -> CompletionFormat:
    """The format of this name. Raises ConfigError."""
    try:
        return FORMATS[name]
    except KeyError:
        raise ConfigError(
            f"unsupported output format {name!r}; expected one of {', '.join(sorted(FORMATS))}"
        ) from None
