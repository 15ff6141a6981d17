"""A gateway as its operator sees it: its state, its clients, and control of it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import msgspec

from understudy.errors import ConfigError, GatewayError
from understudy.gateway.control import GatewayState, RunningCall
from understudy.gateway.serve.admin import ADDRESS, GatewayAddress, RunningCalls, send_admin_request
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.keys import CLIENT
from understudy.view.faults import ViewRefused
from understudy.view.schema.actions import GatewayClient, GatewayView, PauseRequest

_TIMEOUT_S = 10.0


def gateway_view(store: Store, location: StoreLocation) -> GatewayView:
    """Return a gateway's state, if it runs and its admin key can be read, and its clients from the store."""
    keys = {key.attempt_id: key for key in store.keys.all()}
    clients: list[GatewayClient] = []
    for client in store.keys.clients():
        key, usage = keys.get(client.id), store.calls.usage(client.id)
        clients.append(
            GatewayClient(
                name=client.id.removeprefix(CLIENT),
                attempt_id=client.id,
                created_at=client.started_at,
                expires_at=None if key is None else key.expires_at,
                revoked=key is None or key.revoked_at is not None,
                budget={} if key is None else key.budget,
                calls=usage.calls,
                prompt_tokens=usage.prompt_tokens,
                completion_tokens=usage.completion_tokens,
                cost_usd=usage.cost_usd,
            )
        )
    note, url, state, calls = "", None, None, list[RunningCall]()
    try:
        directory = _directory(location)
        state = msgspec.json.decode(_send_command(directory, "GET", "/state", None), type=GatewayState)
        calls = msgspec.json.decode(_send_command(directory, "GET", "/calls", None), type=RunningCalls).calls
        url = msgspec.json.decode((directory / ADDRESS).read_bytes(), type=GatewayAddress).url
    except (ConfigError, GatewayError, OSError, msgspec.MsgspecError) as error:
        note = str(error)
    return GatewayView(
        reachable=state is not None,
        note=note,
        url=url,
        paused=state is not None and state.paused,
        version=None if state is None else state.version,
        in_flight=0 if state is None else state.in_flight,
        waiting=0 if state is None else state.waiting,
        calls=tuple(calls),
        read_at=None if state is None else time.time(),
        clients=tuple(clients),
    )


def _directory(location: StoreLocation) -> Path:
    """Return the directory with a gateway's address and admin key. Raises ConfigError for a database."""
    if isinstance(location, StoreUrl):
        raise ConfigError(
            "a gateway's address and admin key are in its directory, and this store is a database; restart "
            "`understudy view` with the gateway's directory"
        )
    return location


def pause(directory: Path, request: PauseRequest) -> None:
    """Pause a gateway, or let it continue. Raises ViewRefused if it does not run, or rejects the request."""
    try:
        if request.paused:
            _send_command(directory, "POST", "/pause", {"drain_s": request.drain_s})
        else:
            _send_command(directory, "POST", "/resume", {})
    except (ConfigError, GatewayError) as error:
        raise ViewRefused(502, "gateway", str(error), "check that the gateway runs, then try again") from error


def _send_command(directory: Path, method: str, path: str, body: dict[str, object] | None) -> str:
    """Return a gateway's response to an admin request. Raises ConfigError and GatewayError."""
    drain = body.get("drain_s", 0.0) if body else 0.0
    timeout_s = _TIMEOUT_S + float(drain if isinstance(drain, int | float) else 0.0)

    async def send() -> str:
        async with asyncio.timeout(timeout_s):
            return await send_admin_request(directory, method, path, body)

    try:
        return asyncio.run(send())
    except TimeoutError as error:
        raise GatewayError(
            f"the gateway in {directory} has not answered {path} within {timeout_s:g} s; see its log, or restart "
            "it"
        ) from error
