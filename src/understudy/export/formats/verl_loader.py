"""Reads conversations for verl's SFT trainer; an export writes this file beside its rows.

    data.custom_cls.path=DIR/verl_loader.py data.custom_cls.name=Conversations

verl's own class reads the rows too. This one gives chat templates the arguments of tool calls and the parameters
of tools as objects instead of JSON text, leaves out what a message does not have, and learns only the answers
that were chosen. It needs verl and nothing else.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import json
from typing import Any

from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset


class Conversations(MultiTurnSFTDataset):
    """Conversations of which the answers listed in the column `trained` are learned."""

    def _read_files_and_process(self) -> None:
        super()._read_files_and_process()
        tools_read: list[Any] = self.tools or []
        self.tools: Any = [[_tool(tool) for tool in tools] if _given(tools) else None for tools in tools_read]

    def _build_messages(self, example: dict[str, Any]) -> list[dict[str, Any]]:
        chosen = {int(index) for index in example["trained"]}
        messages = [_message(message) for message in super()._build_messages(example)]
        return [{**message, "learned": index in chosen} for index, message in enumerate(messages)]

    def _process_single_message(self, index: int, message: dict[str, Any], **given: Any) -> Any:
        ids, mask, attention, inputs = super()._process_single_message(index=index, message=message, **given)
        return ids, mask if message["learned"] else mask * 0, attention, inputs


def _given(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


def _message(message: dict[str, Any]) -> dict[str, Any]:
    fields = {key: value for key, value in message.items() if value is not None}
    if _given(fields.get("tool_calls")):
        fields["tool_calls"] = [_call(call) for call in fields["tool_calls"]]
    else:
        fields.pop("tool_calls", None)
    return fields


def _call(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    if not isinstance(arguments, dict):
        arguments = {"arguments": function["arguments"]}
    return {**call, "function": {"name": function["name"], "arguments": arguments}}


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool["function"]
    fields = {key: value for key, value in function.items() if value is not None}
    return {"type": "function", "function": {**fields, "parameters": json.loads(function["parameters"])}}
