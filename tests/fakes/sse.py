"""A strict reader of Anthropic event streams: it accepts the documented grammar and nothing else."""

from __future__ import annotations

import json
from typing import Any


def events(stream: bytes) -> list[dict[str, Any]]:
    """The events of a stream, each with a name line that agrees with its data."""
    assert stream.endswith(b"\n\n") or not stream
    read: list[dict[str, Any]] = []
    for chunk in stream.split(b"\n\n")[:-1]:
        name, data = chunk.split(b"\n")
        assert name.startswith(b"event: ")
        assert data.startswith(b"data: ")
        event = json.loads(data[6:])
        assert event["type"] == name[7:].decode()
        read.append(event)
    return read


def message(stream: bytes) -> dict[str, Any]:
    """The message that a client puts together from a whole stream; tool inputs are left as raw strings."""
    script = [event for event in events(stream) if event["type"] != "ping"]
    assert script[0]["type"] == "message_start"
    assert script[-1]["type"] == "message_stop"
    assert script[-2]["type"] == "message_delta"
    built = script[0]["message"]
    assert built["content"] == []
    open_block: dict[str, Any] | None = None
    for event in script[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert open_block is None, "a block opens before the last one is closed"
                assert event["index"] == len(built["content"])
                open_block = event["content_block"]
                built["content"].append(open_block)
                if open_block["type"] == "tool_use":
                    assert open_block["input"] == {}
                    open_block["input"] = ""
            case "content_block_delta":
                assert open_block is not None
                assert event["index"] == len(built["content"]) - 1
                _apply(open_block, event["delta"])
            case "content_block_stop":
                assert open_block is not None
                assert event["index"] == len(built["content"]) - 1
                open_block = None
            case other:
                raise AssertionError(f"{other} between message_start and message_delta")
    assert open_block is None
    built |= script[-2]["delta"]
    built["usage"] |= script[-2]["usage"]
    return built


def _apply(block: dict[str, Any], delta: dict[str, Any]) -> None:
    field, place = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("signature", "signature"),
        "input_json_delta": ("partial_json", "input"),
    }[delta["type"]]
    kinds = {"text": {"text"}, "thinking": {"thinking", "signature"}, "tool_use": {"input"}}
    assert place in kinds[block["type"]], f"{delta['type']} in a block of {block['type']}"
    block[place] += delta[field]
