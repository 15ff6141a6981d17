"""A scripted provider that speaks OpenAI's chat completions: no token ids, and unknown parameters are refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from aiohttp import web

from fakes.turns import ChatModel

REQUEST_FIELDS = """
    model messages tools tool_choice parallel_tool_calls stream stream_options max_completion_tokens max_tokens
    temperature top_p n seed stop frequency_penalty presence_penalty logit_bias logprobs top_logprobs
    reasoning_effort response_format service_tier store metadata user
""".split()  # noqa: SIM905


class OpenAIModel(ChatModel):
    """The script as OpenAI's API says it."""

    def __init__(self) -> None:
        super().__init__()
        self.refused: list[str] = []

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        if unknown := sorted(body.keys() - set(REQUEST_FIELDS)):
            self.refused += unknown
            error = {
                "message": f"Unrecognized request arguments supplied: {unknown}",
                "type": "invalid_request_error",
            }
            return web.json_response({"error": error}, status=400)
        return await super()._chat(request)

    def whole(self, answer: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
        return _bare(answer)

    def chunks(self, answer: dict[str, Any], body: dict[str, Any], piece: int) -> Iterator[dict[str, Any]]:
        return map(_bare, super().chunks(answer, body, piece))


def _bare(response: dict[str, Any]) -> dict[str, Any]:
    """An answer or a chunk without what only vLLM tells."""
    reduced = {name: value for name, value in response.items() if name != "prompt_token_ids"}
    reduced["choices"] = [
        {name: value for name, value in choice.items() if name not in ("token_ids", "logprobs", "stop_reason")}
        for choice in response["choices"]
    ]
    for choice in reduced["choices"]:
        for part in ("message", "delta"):
            if part in choice:
                choice[part] = {name: value for name, value in choice[part].items() if name != "reasoning"}
    return reduced
