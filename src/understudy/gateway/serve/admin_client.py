"""Finds and calls the admin API of a running gateway: its address and its key are files in its directory."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from understudy.errors import ConfigError, GatewayError
from understudy.util.atomic import atomic_write

ADDRESS = "gateway.json"
ADMIN_KEY = "admin.key"


class GatewayAddress(Struct, frozen=True):
    """Where a gateway listens: for agents, and for its operator."""

    url: str
    admin_url: str
    pid: int


def admin_key(directory: Path) -> str:
    """The admin key in a gateway's directory, created where it is missing; readable by its owner only."""
    path = directory / ADMIN_KEY
    if not path.exists():
        # Durably: a gateway that starts with half a key, as after a power cut, takes no orders.
        atomic_write(path, secrets.token_urlsafe(32).encode(), fsync=True, mode=0o600)
    return path.read_text().strip()


def announce(directory: Path, address: GatewayAddress) -> None:
    """Write the address file atomically."""
    atomic_write(directory / ADDRESS, msgspec.json.encode(address))


async def send_admin_request(directory: Path, method: str, path: str, body: dict[str, Any] | None = None) -> str:
    """The response of the gateway in a directory to an admin request. Raises ConfigError and GatewayError."""
    try:
        address = msgspec.json.decode((directory / ADDRESS).read_bytes(), type=GatewayAddress)
        key = (directory / ADMIN_KEY).read_text().strip()
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"no gateway is running in {directory} ({error}); give its directory with --dir, or start one with: "
            "understudy gateway serve"
        ) from error
    try:
        async with (
            # No timeout: a drain takes as long as the request asks for.
            aiohttp.ClientSession(
                headers={"authorization": f"Bearer {key}"}, timeout=aiohttp.ClientTimeout(total=None)
            ) as client,
            client.request(method, address.admin_url + path, json=body) as response,
        ):
            answer = await response.text()
    except (aiohttp.ClientError, OSError) as error:
        raise GatewayError(
            f"the gateway in {directory} does not respond at {address.admin_url}: {error}; is it still running?"
        ) from error
    if response.status != 200:
        raise GatewayError(f"the gateway rejected {path}: {answer[:500]}")
    return answer
