"""A fake's application, at a free port of this machine."""

from __future__ import annotations

from typing import Any

from aiohttp import web


async def listen(app: web.Application, port: int = 0, **options: Any) -> tuple[web.AppRunner, str]:
    """Start an application; returns its runner, whose `cleanup` ends it, and its URL."""
    runner = web.AppRunner(app, shutdown_timeout=0.1, **options)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    host, port = runner.addresses[0][:2]
    return runner, f"http://{host}:{port}"
