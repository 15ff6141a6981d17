"""The embedded server's application and its answers, without HTTP between."""

from __future__ import annotations

import asyncio
from typing import Any

from understudy.model.protocol import ModelChatRequest, ModelMessage
from understudy.model.responses import ChatResult, ControlRequest, ModelCompletion, chunk_bodies
from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.model.server import ModelServer


async def test_a_control_command_completes_after_its_client_disconnects() -> None:
    class Commanded:
        """A model with a command that takes its time."""

        vocabulary = scripted_tokenizer()

        def __init__(self) -> None:
            self.done = False
            self.controls = {"/command": {"POST": self.command}}

        async def command(self, _: ControlRequest) -> None:
            for _ in range(20):
                await asyncio.sleep(0)
            self.done = True

    served: Any = Commanded()
    events = [{"type": "http.request", "body": b""}, {"type": "http.disconnect"}]

    async def receive() -> dict[str, Any]:
        return events.pop(0)

    async def send(_: dict[str, Any]) -> None: ...

    scope = {"path": "/command", "method": "POST", "query_string": b"", "headers": []}
    await ModelServer(served)(scope, receive, send)
    assert served.done


def test_a_stream_without_content_still_reports_its_finish_reason() -> None:
    request = ModelChatRequest([ModelMessage("user", "hi")], stream=True)
    nothing = ModelCompletion([], [], [], "abort")
    *_, last = chunk_bodies(ChatResult("m", request, [1], nothing), scripted_tokenizer())
    assert last["choices"][0]["finish_reason"] == "abort"
