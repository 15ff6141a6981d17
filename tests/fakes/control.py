"""Servers with the control endpoints of vLLM 0.33 and SGLang 0.5.23, and what those refuse, on a loopback socket.

Their "weights" are the content of a file; what is "sampled" is that content under the version at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, ClassVar, Self

from aiohttp import web

from fakes.listen import listen

Handler = Callable[..., Awaitable[web.StreamResponse]]


def weights_in(directory: Path) -> str:
    """What a directory of weights holds, as the fakes see it. Raises FileNotFoundError."""
    (file,) = [*directory.glob("*model*.safetensors")] or [directory / "model.safetensors"]
    return file.read_bytes().decode()


def refusal(status: int, message: str, kind: str) -> web.Response:
    """An error as vLLM answers it."""
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


def invalid(message: str) -> web.Response:
    """What vLLM answers to a request without a field, or with one that is none of those allowed."""
    return refusal(400, f"1 validation error:\n  {{'msg': {message!r}}}", "Bad Request")


class Served:
    """A server of the routes of a class; `orders` are the paths that were called, with their bodies or queries."""

    routes: ClassVar[dict[tuple[str, str], str]] = {}

    def __init__(self, weights: str = "first", *, key: str | None = None) -> None:
        self.weights = weights
        self.version = "default"
        self.paused = False
        self.cached: str | None = None
        """The weights that the prefix cache was computed with."""
        self.orders: list[tuple[str, Any]] = []
        self.keys: list[str | None] = []
        self.key = key
        self.fails: dict[str, web.Response | BaseException] = {}
        """What an endpoint answers instead, once."""
        self.url = ""

    async def __aenter__(self) -> Self:
        app = web.Application()
        for (method, path), name in self.routes.items():
            app.router.add_route(method, path, self._noting(path, getattr(self, name)))
        self._runner, self.url = await listen(app)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    @property
    def called(self) -> list[str]:
        """The paths that were called, in order."""
        return [path for path, _ in self.orders]

    def sample(self) -> tuple[str, str]:
        """The weights that a token is computed with, and the version that it is said to be of."""
        assert not self.paused, "a paused server samples nothing"
        assert self.cached in (None, self.weights), "a token would be computed with the cache of other weights"
        self.cached = self.weights
        return self.weights, self.version

    def _noting(self, path: str, handler: Handler) -> Handler:
        async def noted(request: web.Request) -> web.StreamResponse:
            body = await request.json() if request.can_read_body else None
            self.orders.append((path, body if body is not None else dict(request.query)))
            self.keys.append(request.headers.get("authorization"))
            if (instead := self.fails.pop(path, None)) is not None:
                if isinstance(instead, BaseException):
                    assert request.transport is not None
                    request.transport.close()
                    return web.Response()
                return instead
            return await handler(request, body)

        return noted


class FakeVLLMControl(Served):
    """vLLM with VLLM_SERVER_DEV_MODE=1, and all of what its options allow."""

    routes: ClassVar[dict[tuple[str, str], str]] = {
        ("POST", "/pause"): "_pause",
        ("POST", "/resume"): "_resume",
        ("POST", "/collective_rpc"): "_rpc",
        ("POST", "/reset_prefix_cache"): "_reset",
        ("POST", "/update_weight_version"): "_name",
        ("GET", "/weight_info"): "_info",
        ("POST", "/sleep"): "_sleep",
        ("POST", "/wake_up"): "_wake",
        ("GET", "/is_sleeping"): "_sleeping",
        ("POST", "/v1/load_lora_adapter"): "_lora",
        ("GET", "/get_world_size"): "_world",
        ("POST", "/init_weight_transfer_engine"): "_transfer_init",
        ("POST", "/shutdown_weight_transfer_engine"): "_transfer_end",
        ("POST", "/start_weight_update"): "_transfer_start",
        ("POST", "/update_weights"): "_transfer",
        ("POST", "/finish_weight_update"): "_transfer_finish",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.mode: str | None = None
        self.busy_resets = 0
        self.asleep: set[str] = set()
        self.adapters: dict[str, str] = {}
        self.group: dict[str, Any] | None = None
        self.loading: Callable[[str], object] = lambda _: None
        """Told the path of whole weights, before they are loaded."""
        self.receiving: list[str] | None = None
        self.received: asyncio.Queue[str] = asyncio.Queue()

    async def _pause(self, request: web.Request, _: Any) -> web.Response:
        self.mode = request.query.get("mode", "abort")
        if self.mode not in ("abort", "wait", "keep"):
            return invalid("Input should be 'abort', 'wait' or 'keep'")
        self.paused = True
        if self.mode != "keep":
            self.cached = None
        return web.json_response({"status": "paused"})

    async def _resume(self, *_: Any) -> web.Response:
        self.paused = False
        return web.json_response({"status": "resumed"})

    async def _rpc(self, _: web.Request, body: Any) -> web.Response:
        assert body["method"] == "reload_weights" and set(body["kwargs"]) == {"weights_path"}
        assert self.paused or "kv_cache" in self.asleep
        assert "weights" not in self.asleep
        self.loading(body["kwargs"]["weights_path"])
        try:
            self.weights = weights_in(Path(body["kwargs"]["weights_path"]))
        except FileNotFoundError as error:
            message = f"Call to collective_rpc method failed: Worker failed with error '{error}'"
            return refusal(500, message, "InternalServerError")
        return web.json_response({"results": [None]})

    async def _reset(self, request: web.Request, _: Any) -> web.Response:
        assert request.query["reset_running_requests"] == "true"
        done = self.busy_resets == 0
        self.busy_resets -= not done
        self.cached = None if done else self.cached
        return web.json_response({"success": done})

    async def _name(self, _: web.Request, body: Any) -> web.Response:
        if "new_version" not in body:
            return invalid("Field required")
        self.version = body["new_version"]
        return web.json_response({"success": True, "new_version": self.version})

    async def _info(self, *_: Any) -> web.Response:
        return web.json_response({"weight_version": self.version})

    async def _sleep(self, request: web.Request, _: Any) -> web.Response:
        level = int(request.query["level"])
        self.paused = True
        self.asleep, self.cached = {"weights", "kv_cache"}, None
        self.weights = "" if level == 2 else self.weights
        return web.json_response({"status": "sleeping", "level": level})

    async def _wake(self, request: web.Request, _: Any) -> web.Response:
        tags = request.query.getall("tags")
        self.asleep -= set(tags)
        awake = not self.asleep
        self.paused = not awake
        return web.json_response({"status": "awake" if awake else "sleeping", "tags": tags})

    async def _sleeping(self, *_: Any) -> web.Response:
        return web.json_response({"is_sleeping": self.paused or bool(self.asleep)})

    async def _lora(self, _: web.Request, body: Any) -> web.Response:
        if not {"lora_name", "lora_path"} <= set(body):
            return invalid("Field required")
        name = body["lora_name"]
        if name in self.adapters and not body.get("load_inplace"):
            return refusal(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        try:
            self.adapters[name] = weights_in(Path(body["lora_path"]))
        except FileNotFoundError:
            message = f"Loading lora {name} failed: No adapter found for {body['lora_path']}"
            return refusal(404, message, "NotFoundError")
        return web.Response(text=f"Success: LoRA adapter '{name}' added successfully.")

    async def _world(self, *_: Any) -> web.Response:
        return web.json_response({"world_size": 2})

    async def _transfer_init(self, _: web.Request, body: Any) -> web.Response:
        self.group = body["init_info"]
        return web.json_response({"message": "Weight transfer initialized"})

    async def _transfer_end(self, *_: Any) -> web.Response:
        if self.receiving is not None:
            return web.Response(status=500, text="Cannot release a trainer connection during a weight update")
        self.group = None
        return web.json_response({"message": "Weight transfer shut down"})

    async def _transfer_start(self, *_: Any) -> web.Response:
        assert self.paused and self.group is not None
        self.receiving = []
        return web.json_response({"message": "Weight update started"})

    async def _transfer(self, _: web.Request, body: Any) -> web.Response:
        assert self.receiving is not None
        for _name in body["update_info"]["names"]:
            self.receiving.append(await self.received.get())
        return web.json_response({"message": "Weights updated"})

    async def _transfer_finish(self, _: web.Request, body: Any) -> web.Response:
        assert self.receiving is not None
        self.weights, self.receiving = "".join(self.receiving), None
        self.version = body["weight_version"] or self.version
        return web.json_response({"message": "Weight update finished"})


class FakeSGLangControl(Served):
    """SGLang, with --enable-lora."""

    routes: ClassVar[dict[tuple[str, str], str]] = {
        ("POST", "/pause_generation"): "_pause",
        ("POST", "/continue_generation"): "_continue",
        ("POST", "/update_weights_from_disk"): "_update",
        ("POST", "/update_weight_version"): "_name",
        ("GET", "/model_info"): "_info",
        ("GET", "/v1/models"): "_models",
        ("POST", "/load_lora_adapter"): "_load",
        ("POST", "/unload_lora_adapter"): "_unload",
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.model = "base"
        self.adapters: dict[str, str] = {}

    async def _pause(self, _: web.Request, body: Any) -> web.Response:
        if body["mode"] not in ("abort", "retract", "in_place"):
            return web.Response(status=422, text="mode")
        self.paused = True
        return web.json_response({"message": "Generation paused successfully.", "status": "ok"})

    async def _continue(self, *_: Any) -> web.Response:
        self.paused = False
        return web.json_response({"message": "Generation continued successfully.", "status": "ok"})

    async def _update(self, _: web.Request, body: Any) -> web.Response:
        assert self.paused
        path = Path(body["model_path"])
        try:
            self.weights = weights_in(path)
        except FileNotFoundError:
            failure = {
                "success": False,
                "message": f"Failed to get weights iterator: {path}",
                "num_paused_requests": 0,
            }
            return web.json_response(failure, status=400)
        self.model, self.version = str(path), body["weight_version"]
        self.cached = None if body["flush_cache"] else self.cached
        return web.json_response({"success": True, "message": "Succeeded", "num_paused_requests": 0})

    async def _name(self, _: web.Request, body: Any) -> web.Response:
        assert body["abort_all_requests"] is False
        self.version = body["new_version"]
        return web.json_response({"success": True, "message": "", "new_version": self.version})

    async def _info(self, *_: Any) -> web.Response:
        return web.json_response({"model_path": self.model, "weight_version": self.version})

    async def _models(self, *_: Any) -> web.Response:
        cards = [{"id": self.model, "root": self.model, "parent": None}]
        cards += [{"id": name, "root": path, "parent": self.model} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _load(self, _: web.Request, body: Any) -> web.Response:
        name = body["lora_name"]
        if name in self.adapters:
            message = f"Failed to load LoRA adapter {name} because it is already loaded"
            return web.json_response({"success": False, "error_message": message}, status=400)
        self.adapters[name] = weights_in(Path(body["lora_path"]))
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": self.adapters})

    async def _unload(self, _: web.Request, body: Any) -> web.Response:
        if self.adapters.pop(body["lora_name"], None) is None:
            return web.json_response({"success": False, "error_message": "not loaded"}, status=400)
        return web.json_response({"success": True, "error_message": None, "loaded_adapters": self.adapters})
