"""The dialects that agents may speak, by name."""

from __future__ import annotations

from understudy.wire.anthropic.dialect import Anthropic
from understudy.wire.chat.dialect import OpenAIChat
from understudy.wire.dialect import Dialect
from understudy.wire.responses.dialect import OpenAIResponses

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect for dialect in (Anthropic(), OpenAIChat(), OpenAIResponses())
}
