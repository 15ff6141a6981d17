"""A server of Kubernetes' API on loopback, for kubectl: pods of one namespace, with processes as containers.

It has what kubectl asks for to create, wait for, list, delete and exec: discovery, watches, and the WebSocket
protocol of exec (v5.channel.k8s.io). Pods end with their first process, at their deadline, or when deleted.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from aiohttp import WSMsgType, web
from msgspec import Struct

KUBECTL = os.environ.get("UNDERSTUDY_KUBECTL") or shutil.which("kubectl")
NAMESPACE = "agents"
TOKEN, READER = "a-token-of-tests", "a-token-that-may-only-read"
MISSING_IMAGE = "no-such-image:1"
_PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
_STDIN, _STDOUT, _STDERR, _ERROR, _CLOSE = 0, 1, 2, 3, 255


class Cluster(Struct, frozen=True):
    """Where kubectl finds the server, and the template of pods; `cache` is the cache of the pods."""

    kubeconfig: Path
    template: Path
    command: str
    cache: Path
    server: ApiServer

    @property
    def options(self) -> dict[str, str]:
        """The options of a kind of sandbox there."""
        return {
            "target": NAMESPACE,
            "template": str(self.template),
            "kubeconfig": str(self.kubeconfig),
            "command": self.command,
        }

    @property
    def name(self) -> str:
        """The same as one name, for `--sandbox`."""
        command = self.command.replace(" ", "%20")
        return f"kubernetes:{NAMESPACE}?template={self.template}&kubeconfig={self.kubeconfig}&command={command}"


class _Pod:
    """A pod: what the API shows of it, and its processes."""

    def __init__(self, manifest: dict[str, Any]) -> None:
        self.manifest = manifest
        self.processes: list[asyncio.subprocess.Process] = []

    def kill(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


class ApiServer:
    """The server. All methods but `start` run in its own thread's loop."""

    def __init__(self) -> None:
        self.port = 0
        self.pods: dict[str, _Pod] = {}
        self.created: list[dict[str, Any]] = []
        self._version = 0
        self._changed = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()

    def start(self, certificate: Path, key: Path) -> None:
        """Serve in a thread; returns when the port is known."""
        ready = threading.Event()
        # kubectl sends no token without TLS.
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(certificate, key)

        async def serve() -> None:
            app = web.Application()
            app.router.add_get("/api", self._api)
            app.router.add_get("/apis", self._apis)
            app.router.add_get("/api/v1", self._resources)
            app.router.add_get("/openapi/v3", self._openapi)
            app.router.add_get("/openapi/v3/api/v1", self._openapi_v1)
            app.router.add_post(_PODS, self._create)
            app.router.add_get(_PODS, self._list)
            app.router.add_get(_PODS + "/{name}", self._get)
            app.router.add_delete(_PODS + "/{name}", self._delete)
            app.router.add_get(_PODS + "/{name}/exec", self._exec)
            self._runner = runner = web.AppRunner(app, shutdown_timeout=1.0)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=tls)
            await site.start()
            self.port = runner.addresses[0][1]
            ready.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(serve())
            self._loop.run_forever()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert ready.wait(30)

    def stop(self) -> None:
        """Kill all pods and end the thread's loop."""

        async def end() -> None:
            for pod in self.pods.values():
                pod.kill()
            await self._runner.cleanup()
            left = asyncio.all_tasks() - {asyncio.current_task()}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
        self._loop.close()

    # --- discovery --------------------------------------------------------------------------------------------

    async def _api(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIVersions", "versions": ["v1"]})

    async def _apis(self, request: web.Request) -> web.Response:
        return web.json_response({"kind": "APIGroupList", "apiVersion": "v1", "groups": []})

    async def _resources(self, request: web.Request) -> web.Response:
        verbs = ["create", "delete", "get", "list", "watch"]
        pods = {"name": "pods", "singularName": "pod", "namespaced": True, "kind": "Pod", "verbs": verbs}
        exec_ = {"name": "pods/exec", "namespaced": True, "kind": "PodExecOptions", "verbs": ["create", "get"]}
        listed = {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": "v1", "resources": [pods, exec_]}
        return web.json_response(listed)

    async def _openapi(self, request: web.Request) -> web.Response:
        return web.json_response({"paths": {"api/v1": {"serverRelativeURL": "/openapi/v3/api/v1"}}})

    async def _openapi_v1(self, request: web.Request) -> web.Response:
        pod = {"x-kubernetes-group-version-kind": {"group": "", "version": "v1", "kind": "Pod"}}
        parameter = {"name": "fieldValidation", "in": "query", "schema": {"type": "string"}}
        operations = {method: {"parameters": [parameter], **pod} for method in ("post", "patch")}
        return web.json_response(
            {
                "openapi": "3.0.0",
                "info": {"title": "Kubernetes", "version": "v1.33.0"},
                "paths": {_PODS: operations},
            }
        )

    # --- pods -------------------------------------------------------------------------------------------------

    async def _create(self, request: web.Request) -> web.Response:
        if problem := _unauthorized(request, writes=True):
            return problem
        manifest = await request.json()
        name = manifest["metadata"]["name"]
        if name in self.pods:
            return _failure(409, "AlreadyExists", f'pods "{name}" already exists')
        manifest["metadata"] |= {"namespace": NAMESPACE, "uid": name, "creationTimestamp": _timestamp()}
        self.created.append(json.loads(json.dumps(manifest)))
        pod = self.pods[name] = _Pod(manifest)
        self._set_status(pod, "Pending", waiting=("ContainerCreating", ""))
        task = asyncio.create_task(self._run(pod))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return web.json_response(manifest, status=201)

    async def _run(self, pod: _Pod) -> None:
        container = pod.manifest["spec"]["containers"][0]
        if container["image"] == MISSING_IMAGE:
            self._set_status(pod, "Pending", waiting=("ErrImagePull", f'image "{MISSING_IMAGE}" not found'))
            return
        await asyncio.sleep(0.2)
        process = await asyncio.create_subprocess_exec(
            *container["command"], *container.get("args", []), start_new_session=True, stdin=subprocess.DEVNULL
        )
        pod.processes.append(process)
        if pod not in self.pods.values():  # deleted while it was started
            pod.kill()
        self._set_status(pod, "Running")
        try:
            async with asyncio.timeout(pod.manifest["spec"].get("activeDeadlineSeconds")):
                code = await process.wait()
            phase, reason = ("Succeeded", "") if code == 0 else ("Failed", "Error")
        except TimeoutError:
            phase, reason = "Failed", "DeadlineExceeded"
        pod.kill()
        self._set_status(pod, phase, reason=reason)

    def _set_status(
        self, pod: _Pod, phase: str, *, reason: str = "", waiting: tuple[str, str] | None = None
    ) -> None:
        ready = "True" if phase == "Running" else "False"
        state = {"waiting": {"reason": waiting[0], "message": waiting[1]}} if waiting else {}
        pod.manifest["status"] = {
            "phase": phase,
            **({"reason": reason} if reason else {}),
            "conditions": [{"type": "Ready", "status": ready}],
            "containerStatuses": [{"name": pod.manifest["spec"]["containers"][0]["name"], "state": state}],
        }
        self._change(pod)

    def _change(self, pod: _Pod) -> None:
        self._version += 1
        pod.manifest["metadata"]["resourceVersion"] = str(self._version)
        self._changed.set()
        self._changed = asyncio.Event()

    def _selected(self, request: web.Request) -> list[dict[str, Any]]:
        labels = dict(each.split("=") for each in request.query.get("labelSelector", "").split(",") if each)
        fields = dict(each.split("=") for each in request.query.get("fieldSelector", "").split(",") if each)
        name = fields.get("metadata.name")
        return [
            pod.manifest
            for pod in self.pods.values()
            if labels.items() <= pod.manifest["metadata"]["labels"].items()
            and name in (None, pod.manifest["metadata"]["name"])
        ]

    async def _list(self, request: web.Request) -> web.StreamResponse:
        if problem := _unauthorized(request):
            return problem
        if request.query.get("watch") not in ("1", "true"):
            metadata = {"resourceVersion": str(self._version)}
            items = self._selected(request)
            return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": metadata, "items": items})
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        last = int(request.query.get("resourceVersion") or 0)
        while True:
            changed = self._changed
            for pod in self._selected(request):
                if int(pod["metadata"]["resourceVersion"]) <= last:
                    continue
                try:
                    await response.write(json.dumps({"type": "MODIFIED", "object": pod}).encode() + b"\n")
                except ConnectionError:
                    return response
            last = self._version
            await changed.wait()

    async def _get(self, request: web.Request) -> web.Response:
        if problem := _unauthorized(request):
            return problem
        pod = self.pods.get(request.match_info["name"])
        return _not_found(request) if pod is None else web.json_response(pod.manifest)

    async def _delete(self, request: web.Request) -> web.Response:
        if problem := _unauthorized(request, writes=True):
            return problem
        pod = self.pods.pop(request.match_info["name"], None)
        if pod is None:
            return _not_found(request)
        pod.kill()
        return web.json_response(pod.manifest)

    # --- exec -------------------------------------------------------------------------------------------------

    async def _exec(self, request: web.Request) -> web.StreamResponse:
        if problem := _unauthorized(request, writes=True):
            return problem
        pod = self.pods.get(request.match_info["name"])
        if pod is None:
            return _not_found(request)
        socket = web.WebSocketResponse(protocols=["v5.channel.k8s.io"], max_msg_size=0)
        await socket.prepare(request)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *request.query.getall("command"), stdin=pipe, stdout=pipe, stderr=pipe, start_new_session=True
        )
        pod.processes.append(process)
        receiving = asyncio.create_task(_receive(socket, process))
        assert process.stdout is not None and process.stderr is not None
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(
                _send(socket, _STDOUT, process.stdout), _send(socket, _STDERR, process.stderr), process.wait()
            )
            await socket.send_bytes(bytes([_ERROR]) + json.dumps(_exit_status(process.returncode)).encode())
            await socket.close()
        receiving.cancel()
        return socket


async def _receive(socket: web.WebSocketResponse, process: asyncio.subprocess.Process) -> None:
    """Give the client's input to the process; its stdin ends when the client closes it, or is gone."""
    assert process.stdin is not None
    async for message in socket:
        if message.type is not WSMsgType.BINARY:
            break
        channel, content = message.data[0], message.data[1:]
        if channel == _CLOSE and content == bytes([_STDIN]):
            process.stdin.close()
        elif channel == _STDIN:
            with contextlib.suppress(ConnectionError):
                process.stdin.write(content)
                await process.stdin.drain()
    process.stdin.close()


async def _send(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    while content := await stream.read(32 << 10):
        await socket.send_bytes(bytes([channel]) + content)


def _exit_status(code: int | None) -> dict[str, Any]:
    if code is not None and code < 0:
        code = 128 - code  # as a shell says it
    if code == 0:
        return {"metadata": {}, "status": "Success"}
    return {
        "metadata": {},
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "message": f"command terminated with non-zero exit code: exit status {code}",
        "details": {"causes": [{"reason": "ExitCode", "message": str(code)}]},
    }


def _unauthorized(request: web.Request, *, writes: bool = False) -> web.Response | None:
    token = request.headers.get("Authorization", "").removeprefix("Bearer ")
    if token not in (TOKEN, READER):
        return _failure(401, "Unauthorized", "Unauthorized")
    if writes and token == READER:
        return _failure(403, "Forbidden", 'pods is forbidden: User "reader" cannot create resource "pods"')
    return None


def _not_found(request: web.Request) -> web.Response:
    return _failure(404, "NotFound", f'pods "{request.match_info["name"]}" not found')


def _failure(code: int, reason: str, message: str) -> web.Response:
    status = {"kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure"}
    return web.json_response({**status, "message": message, "reason": reason, "code": code}, status=code)


def _timestamp() -> str:
    return datetime.fromtimestamp(time.time(), UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def problems() -> list[str]:
    """Why kubectl cannot be used here."""
    if KUBECTL is None:
        return ["UNDERSTUDY_KUBECTL names no kubectl, and there is none in PATH"]
    return []


def kubeconfig(directory: Path, port: int, token: str = TOKEN) -> Path:
    """Write a configuration by which kubectl reaches the server."""
    path = directory / f"kubeconfig-{token}.json"
    server = {"server": f"https://127.0.0.1:{port}", "certificate-authority": str(directory / "tls.crt")}
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "tests", "cluster": server}],
        "users": [{"name": "tests", "user": {"token": token}}],
        "contexts": [{"name": "tests", "context": {"cluster": "tests", "user": "tests"}}],
        "current-context": "tests",
    }
    path.write_text(json.dumps(config))
    return path


@contextlib.contextmanager
def cluster(directory: Path) -> Iterator[Cluster]:
    """Start a server, with a template whose image stands for this machine; kubectl is in PATH meanwhile."""
    assert KUBECTL is not None
    (directory / "bin").mkdir()
    (directory / "bin" / "kubectl").symlink_to(KUBECTL)
    template = directory / "pod.yaml"
    template.write_text(
        "apiVersion: v1\nkind: Pod\nmetadata:\n  generateName: agents-\n  labels: {team: research}\n"
        "spec:\n  automountServiceAccountToken: false\n  containers:\n"
        "    - name: sandbox\n      image: understudy:0.1.0\n      securityContext: {privileged: true}\n"
    )
    cache = directory / "cache"
    cache.mkdir()
    command = f"env UNDERSTUDY_CACHE={cache} {Path(sys.executable).with_name('understudy')} sandboxes serve"
    certificate, key = directory / "tls.crt", directory / "tls.key"
    request = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=tests")
    names = ("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate))
    subprocess.run((*request, *names), check=True, capture_output=True)
    server = ApiServer()
    server.start(certificate, key)
    path = os.environ["PATH"]
    os.environ["PATH"] = f"{directory / 'bin'}:{path}"
    try:
        yield Cluster(kubeconfig(directory, server.port), template, command, cache, server)
    finally:
        os.environ["PATH"] = path
        server.stop()
