"""The embedded model's server in this process, where torch has been imported already: a process of its own needs
five seconds of a core for that.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator
from pathlib import Path

import uvicorn

from understudy.model.directory import fingerprint
from understudy.model.server import DEFAULT_MODEL, ModelServer


@contextlib.asynccontextmanager
async def serve_weights(weights: Path, max_model_len: int | None = None) -> AsyncGenerator[str]:
    """Serve the weights in a directory at a free port of this machine while the context lasts; its URL."""
    from understudy.model.causal.serving import CausalModel

    model = CausalModel(weights, name=DEFAULT_MODEL, version=fingerprint(weights))
    app = ModelServer(model, context=max_model_len or model.context)
    config = uvicorn.Config(app, lifespan="off", ws="none", log_level="warning", access_log=False)  # type: ignore[arg-type]
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving
            model.close()
