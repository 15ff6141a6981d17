"""All dialects that agents may use, by name."""

from __future__ import annotations

from understudy.wire.anthropic import Anthropic
from understudy.wire.chat import OpenAIChat
from understudy.wire.dialect import Dialect
from understudy.wire.gemini import Gemini
from understudy.wire.responses import OpenAIResponses

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (Anthropic(), OpenAIChat(), OpenAIResponses(), Gemini())
}
