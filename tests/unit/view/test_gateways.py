"""A gateway that does not answer the viewer."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from understudy.gateway.serve.admin import GatewayAddress, admin_key, announce
from understudy.view import gateways
from understudy.view.faults import ViewRefused
from understudy.view.schema.actions import PauseRequest


def test_a_gateway_that_never_answers_is_named_with_the_time_that_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateways, "_TIMEOUT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        announce(tmp_path, GatewayAddress(url=address, admin_url=address, pid=1))
        admin_key(tmp_path)
        with pytest.raises(
            ViewRefused, match=r"the gateway in .* has not answered /resume within 0\.2 s; see its log"
        ):
            gateways.pause(tmp_path, PauseRequest(paused=False))
