"""What the backends' HTTP client reads of a response."""

from __future__ import annotations

import base64

import pytest
from aiohttp import web

from understudy.errors import BackendError
from understudy.gateway.backends import http
from understudy.gateway.backends.http import HttpClient, ServerSentEvent, retry_after_s

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("-3", 0.0),
        ("99999999999999999999", http.MAX_RETRY_AFTER_S),
        ("9" * 400, http.MAX_RETRY_AFTER_S),
        ("Tue, 14 Nov 2023 22:14:00 GMT", 40.0),
        ("Tuesday, 14-Nov-23 22:14:00 GMT", 40.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("Tue, 14 Nov 9999 22:13:00 GMT", http.MAX_RETRY_AFTER_S),
        ("Tue, 99 Nov 2023 22:13:00 GMT", None),
    ],
)
def test_retry_after_is_parsed_as_seconds_or_a_date(value: str | None, expected: float | None) -> None:
    assert retry_after_s(value, NOW) == expected


def test_responses_share_a_memory_limit_that_small_ones_may_exceed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RESPONSES_LIMIT", 1000)
    memory = http._ResponseMemory()  # pyright: ignore[reportPrivateUsage]
    with memory.response() as large, memory.response() as small:
        large(990)
        small(100)  # above the limit together, and this one is below its half
        with pytest.raises(BackendError, match="more than 1000 bytes together"):
            large(1)
    with memory.response() as next_one:
        next_one(1000)


async def test_an_api_key_in_one_stream_event_is_masked_and_other_events_are_unchanged() -> None:
    key = "sk-of-the-gateway-0123456789"
    encoded = base64.b64encode(key.encode()).decode()
    datas = ["plain", f"has {key}", "{}", f"has {encoded}", "[DONE]"]
    stream = "".join(f"event: e\ndata: {data}\n\n" for data in datas).encode()
    plain_stream = "".join(f"data: {data}\n\n" for data in datas).encode()

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        body = plain_stream if request.path == "/plain" else stream
        return web.Response(body=body, content_type="text/event-stream")

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", key)
    try:
        events: list[ServerSentEvent] = []
        await client.stream("POST", f"{client.base}/v1", b"{}", events.extend)
        received_data: list[bytes] = []
        await client.stream_data("POST", f"{client.base}/plain", b"{}", received_data.extend)
    finally:
        await client.close()
        await runner.cleanup()
    received = b"".join(event.raw for event in events)
    assert len(events) == len(datas)
    assert key.encode() not in received
    assert encoded.rstrip("=")[:-1].encode() not in received
    assert [event.data for event in events][::2] == [b"plain", b"{}", b"[DONE]"]
    assert events[1].data == b"has ***"
    assert received_data == [event.data for event in events]


@pytest.mark.parametrize(
    ("says_remedies", "end"),
    [(True, "too many stops; send at most 4"), (False, "send at most 4; change the request as the server says")],
)
async def test_a_remedy_is_added_unless_the_server_says_its_own(says_remedies: bool, end: str):
    async def answer(request: web.BaseRequest) -> web.Response:
        return web.json_response({"error": {"message": "too many stops; send at most 4"}}, status=400)

    runner = web.ServerRunner(web.Server(answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    client = HttpClient(f"http://127.0.0.1:{runner.addresses[0][1]}", says_remedies=says_remedies)
    try:
        with pytest.raises(BackendError) as raised:
            await client.send("POST", f"{client.base}/v1", b"{}")
    finally:
        await client.close()
        await runner.cleanup()
    assert str(raised.value).endswith(end)
