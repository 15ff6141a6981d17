"""Runs Claude Code through its Python SDK in a sandbox. A self-contained script, which is copied beside the SDK.

Reads one JSON object from stdin: `prompt`, `cli` (the path of Claude Code), `options` (of the SDK) and `plans`,
whether a plan is to be approved. Writes Claude Code's messages to stdout, one per line as
`claude -p --output-format stream-json` does, and errors to stderr, with exit code 1.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import json
import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any


async def drive(job: dict[str, Any]) -> None:
    """Send one prompt and print all messages until the end."""
    sdk: Any = importlib.import_module("claude_agent_sdk")
    transports: Any = importlib.import_module("claude_agent_sdk._internal.transport.subprocess_cli")

    class Logged(transports.SubprocessCLITransport):
        """The SDK's own transport to Claude Code, which also prints every message that comes back."""

        async def read_messages(self) -> AsyncIterator[dict[str, Any]]:
            messages: Any = super()
            async for message in messages.read_messages():
                # What the SDK and the CLI settle between themselves is no part of the stream.
                if not str(message.get("type", "")).startswith("control_"):
                    sys.stdout.write(json.dumps(message) + "\n")
                    sys.stdout.flush()
                yield message

    approved = False

    async def permit(tool: str, arguments: dict[str, Any], context: Any) -> Any:
        """Approve the plan, and then whatever is asked for. Before it, nothing else is permitted."""
        nonlocal approved
        approved = approved or tool == "ExitPlanMode"
        if approved:
            return sdk.PermissionResultAllow(updated_input=arguments)
        return sdk.PermissionResultDeny(message=f"{tool} is not permitted while in plan mode.")

    async def prompt() -> AsyncIterator[dict[str, Any]]:
        yield {"type": "user", "message": {"role": "user", "content": job["prompt"]}}

    options = sdk.ClaudeAgentOptions(cli_path=job["cli"], max_buffer_size=1 << 30, **job["options"])
    if job["plans"]:
        asked = dataclasses.replace(options, permission_prompt_tool_name="stdio")
        options = dataclasses.replace(options, can_use_tool=permit)
        messages = sdk.query(prompt=prompt(), options=options, transport=Logged(prompt(), asked))
    else:
        messages = sdk.query(prompt=job["prompt"], options=options, transport=Logged(job["prompt"], options))
    async for _ in messages:
        pass


def main() -> int:
    """Return the exit code."""
    sys.path.insert(0, str(Path(__file__).resolve().with_name("site")))
    # The SDK's own limit for the first answer of Claude Code is a minute, which a busy machine may need.
    os.environ["CLAUDE_CODE_STREAM_CLOSE_TIMEOUT"] = "600000"
    try:
        asyncio.run(drive(json.load(sys.stdin)))
    except Exception as error:  # noqa: BLE001 - whatever the SDK raises, the stream before it tells how the run ended
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
