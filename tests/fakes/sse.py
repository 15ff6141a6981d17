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


def message(stream: bytes, *, overlapping: bool = False) -> dict[str, Any]:
    """The message that a client puts together from a whole stream; tool inputs are left as raw strings.

    Blocks come one after the other unless they may be `overlapping`, as where none is closed before the end.
    """
    script = [event for event in events(stream) if event["type"] != "ping"]
    assert script[0]["type"] == "message_start"
    assert script[-1]["type"] == "message_stop"
    assert script[-2]["type"] == "message_delta"
    built = script[0]["message"]
    assert built["content"] == []
    open_blocks: dict[int, dict[str, Any]] = {}
    for event in script[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert overlapping or not open_blocks, "a block opens before the last one is closed"
                assert event["index"] == len(built["content"])
                block = open_blocks[event["index"]] = event["content_block"]
                built["content"].append(block)
                if block["type"] == "tool_use":
                    assert block["input"] == {}
                    block["input"] = ""
            case "content_block_delta":
                _apply(open_blocks[event["index"]], event["delta"])
            case "content_block_stop":
                del open_blocks[event["index"]]
            case other:
                raise AssertionError(f"{other} between message_start and message_delta")
    assert not open_blocks
    built |= script[-2]["delta"]
    built["usage"] |= script[-2]["usage"]
    return built


def _apply(block: dict[str, Any], delta: dict[str, Any]) -> None:
    field, target = {
        "text_delta": ("text", "text"),
        "thinking_delta": ("thinking", "thinking"),
        "signature_delta": ("signature", "signature"),
        "input_json_delta": ("partial_json", "input"),
    }[delta["type"]]
    kinds = {"text": {"text"}, "thinking": {"thinking", "signature"}, "tool_use": {"input"}}
    assert target in kinds[block["type"]], f"{delta['type']} in a block of {block['type']}"
    block[target] += delta[field]
