"""Runs a gateway with its sockets and worker processes, as `understudy gateway serve` does.

The supervisor holds the sockets, starts and restarts the workers, and passes admin requests to them.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import secrets
import signal
import socket
import sys
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.errors import ConfigError, GatewayError, LeaseLost, StoreError
from understudy.gateway.config import GatewayConfig
from understudy.gateway.control import GatewayState, RunningCall
from understudy.gateway.serve.admin import (
    AdminApp,
    GatewayAddress,
    RunningCalls,
    admin_key,
    announce,
    rejection,
)
from understudy.gateway.serve.stored_keys import issue
from understudy.gateway.serve.worker import READY, WorkerSpec
from understudy.gateway.server.listen import Listener, tcp_socket, unix_socket
from understudy.gateway.telemetry.metrics import merged
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.postgresql import PostgresqlDriver
from understudy.store.runs import Lease
from understudy.util.files import locked

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 30.0
RESTART_PAUSES_S = (0.1, 0.5, 1.0, 2.0, 5.0)
"""The pauses before each restart, in seconds. A worker that fails to start this often is given up."""


ORDER_TIMEOUT_S = 30.0
"""How long an admin request waits for a restarting worker, in seconds.

A worker that can start has done so by then.
"""
ORDER_PAUSE_S = 0.1


class WorkerUnavailable(GatewayError):
    """A worker does not respond to an admin request, because it has ended and is being replaced."""


class WorkerProcess:
    """One worker process, and the client of its admin API."""

    def __init__(self, spec: WorkerSpec, lock: int) -> None:
        self.spec = spec
        self._lock = lock
        self.process: asyncio.subprocess.Process | None = None
        self._client: aiohttp.ClientSession | None = None

    async def start(self, *, paused: bool, version: str | None) -> None:
        """Return once the worker accepts requests. Raises GatewayError with the reason if it cannot start.

        Its log goes to our own log; on stdout it reports only that it is ready, or why not.
        """
        pipe = asyncio.subprocess.PIPE
        # In a session of its own, so that Ctrl-C at the terminal reaches only the supervisor, which passes it on.
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "understudy.gateway.serve.worker",
            stdin=pipe,
            stdout=pipe,
            start_new_session=True,
            pass_fds=(*self.spec.listeners, self._lock),
        )
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        spec = msgspec.structs.replace(self.spec, paused=paused, version=version)
        stdin.write(msgspec.json.encode(spec) + b"\n")
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                output = await stdout.readline()
        except TimeoutError:
            output = b"no output within %d s" % START_TIMEOUT_S
        if output != READY:
            await self.stop()
            reason = output.decode(errors="replace").strip() or "it exited without a message; see its log above"
            raise GatewayError(
                f"worker {self.spec.index} of the gateway failed to start: {reason}; correct the cause, then "
                "start the gateway again"
            )

    async def wait(self) -> str:
        """Wait for the end of the process, and return how it ended."""
        assert self.process is not None
        assert self.process.stdout is not None
        output = await self.process.stdout.read()
        code = await self.process.wait()
        return f"exit code {code}" + (f": {output.decode(errors='replace').strip()}" if output else "")

    async def send(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """Send an admin request to the worker, and return the response. Raises GatewayError."""
        if self._client is None:
            self._client = aiohttp.ClientSession(
                connector=aiohttp.UnixConnector(self.spec.orders),
                headers={"authorization": f"Bearer {self.spec.admin_key}"},
                timeout=aiohttp.ClientTimeout(total=None),  # draining takes as long as the operator asks for
            )
        try:
            url = f"http://worker{path}"
            async with self._client.request(method, url, json=body) as response:
                answer = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise WorkerUnavailable(
                f"worker {self.spec.index} does not respond: {error}; send the request again once it has restarted"
            ) from error
        if response.status != 200:
            raise GatewayError(
                f"worker {self.spec.index} rejected {path} (status {response.status}, expected 200): "
                f"{rejection(answer)}; see the gateway's log"
            )
        return answer

    async def stop(self) -> None:
        """Let the worker finish its calls in flight. It is killed after STOP_TIMEOUT_S."""
        client, self._client = self._client, None
        if client is not None:
            await client.close()
        if self.process is None:
            return
        if self.process.returncode is None:
            self.process.terminate()
            try:
                async with asyncio.timeout(STOP_TIMEOUT_S):
                    await self.process.wait()
            except TimeoutError:
                pass
            finally:  # even if this is cancelled, no process may be left behind
                if self.process.returncode is None:
                    with suppress(ProcessLookupError):
                        self.process.kill()
            await self.process.wait()


class Supervisor:
    """The workers of one gateway, controlled together (see AdminTarget)."""

    def __init__(self, workers: Sequence[WorkerProcess]) -> None:
        self._workers = workers
        self._paused = False
        self._version: str | None = None

    async def start(self) -> None:
        """Start all workers. Raises GatewayError."""
        await _together(self._start(worker) for worker in self._workers)

    async def watch(self) -> None:
        """Restart workers that end, until this is cancelled. Raises GatewayError if one cannot be started."""
        await _together(self._watch(worker) for worker in self._workers)

    async def _watch(self, worker: WorkerProcess) -> None:
        while True:
            how = await worker.wait()
            _log.warning(
                "worker %d of the gateway ended (%s); it is restarted, and agents retry the calls that it was "
                "answering",
                worker.spec.index,
                how,
            )
            await worker.stop()
            for pause in (*RESTART_PAUSES_S, None):
                try:
                    await self._start(worker)
                    break
                except GatewayError:
                    if pause is None:
                        raise
                    await asyncio.sleep(pause)

    async def _start(self, worker: WorkerProcess) -> None:
        paused, version = self._paused, self._version
        await worker.start(paused=paused, version=version)
        # Admin requests that came while the worker started did not reach it.
        try:
            if self._version != version:
                await worker.send("POST", "/publish", {"version": self._version})
            if self._paused != paused:
                await worker.send("POST", *(("/pause", {"drain_s": 0.0}) if self._paused else ("/resume", {})))
        except BaseException:
            # The worker listens on sockets that all workers share. Left running, it would go on answering beside
            # its replacement, with the wrong version or despite a pause.
            await worker.stop()
            raise

    async def stop(self) -> None:
        """Stop all workers."""
        await asyncio.gather(*(worker.stop() for worker in self._workers))

    # --- admin requests ------------------------------------------------------------------------------------

    async def pause(self, drain_s: float) -> int:
        self._paused = True
        answers = await self._all("POST", "/pause", {"drain_s": drain_s})
        return sum(msgspec.json.decode(answer, type=_PauseResponse).in_flight for answer in answers)

    async def resume(self, version: str | None) -> None:
        self._paused = False
        self._version = version or self._version
        await self._all("POST", "/resume", {} if version is None else {"version": version})

    async def publish(self, version: str) -> None:
        self._version = version
        await self._all("POST", "/publish", {"version": version})

    async def state(self) -> GatewayState:
        states = [msgspec.json.decode(answer, type=GatewayState) for answer in await self._all("GET", "/state")]
        return GatewayState(
            paused=self._paused,
            version=self._version,
            in_flight=sum(state.in_flight for state in states),
            waiting=sum(state.waiting for state in states),
        )

    async def calls(self) -> list[RunningCall]:
        answers = await self._all("GET", "/calls")
        calls = [call for answer in answers for call in msgspec.json.decode(answer, type=RunningCalls).calls]
        return sorted(calls, key=lambda call: call.started_at)

    async def metrics(self) -> bytes:
        answers = await self._all("GET", "/metrics")
        return merged({str(index): answer for index, answer in enumerate(answers)})

    async def _all(self, method: str, path: str, body: dict[str, Any] | None = None) -> list[bytes]:
        return await asyncio.gather(*(self._send(worker, method, path, body) for worker in self._workers))

    async def _send(self, worker: WorkerProcess, method: str, path: str, body: dict[str, Any] | None) -> bytes:
        """Return a worker's response.

        If the worker ends meanwhile, its replacement (see `watch`) gets the request too.

        Repeating it is harmless, because all admin requests are idempotent. Raises GatewayError if no worker has
        responded ORDER_TIMEOUT_S after the first failure.
        """
        deadline = None
        while True:
            try:
                return await worker.send(method, path, body)
            except WorkerUnavailable:
                deadline = deadline or time.monotonic() + ORDER_TIMEOUT_S
                if time.monotonic() > deadline:
                    raise
                await asyncio.sleep(ORDER_PAUSE_S)


class _PauseResponse(Struct):
    in_flight: int


async def _together(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Await all of them concurrently. The first GatewayError cancels the others, and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for work in works:
                group.create_task(work)
    except* GatewayError as errors:
        raise errors.exceptions[0] from None


@asynccontextmanager
async def supervise(
    config: GatewayConfig, store: StoreLocation, listeners: Sequence[socket.socket], *, workers: int, lock: int
) -> AsyncGenerator[Supervisor]:
    """Run a gateway on listening sockets. It ends with the context. Raises GatewayError.

    `lock` is the descriptor of a lock that each worker also holds while it lives.
    """
    async with AsyncExitStack() as stack:
        # The paths of Unix sockets are limited in length, so they cannot be in a store's directory, which may be
        # deep.
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="understudy-gateway-")))
        sockets = [str(directory / f"{index}.sock") for index in range(workers)]
        spec = WorkerSpec(
            config=config,
            store=store.secret_url if isinstance(store, StoreUrl) else str(store),
            index=0,
            sockets=sockets,
            listeners=[listener.fileno() for listener in listeners],
            admin_key=secrets.token_urlsafe(32),
        )
        specs = [msgspec.structs.replace(spec, index=index) for index in range(workers)]
        supervisor = Supervisor([WorkerProcess(spec, lock) for spec in specs])
        stack.push_async_callback(supervisor.stop)
        await supervisor.start()
        yield supervisor


FIRST_CLIENT = "default"
_LEASE_S, _HEARTBEAT_S = 30.0, 5.0
"""How long a gateway's lease of a database's clients lasts, and how often it is renewed, in seconds."""
_LEFT_OVER_S = 30.0
"""How long the workers of a killed gateway may take to finish what they began, in seconds."""


class ServicePaths(Struct, frozen=True):
    """Where a gateway keeps its calls, and where it listens. Ports may be 0 for a free one.

    `directory` holds its admin key, address and locks, and also its store unless that is the database `store`.
    """

    directory: Path
    host: str
    port: int
    socket: Path | None
    admin_port: int
    store: StoreUrl | None = None


@asynccontextmanager
async def service(
    config: GatewayConfig, places: ServicePaths, *, workers: int, stop: asyncio.Future[None]
) -> AsyncGenerator[tuple[Supervisor, GatewayAddress, str | None]]:
    """Run a gateway, and yield its address and the first key of a store that had none. It ends with the context.

    `stop` gets the error if another gateway serves its database. Raises ConfigError, StoreError or GatewayError.
    """
    directory, location = places.directory, places.store or places.directory
    alone = locked(
        directory / ".gateway.lock",
        busy=f"another gateway is using {directory}; stop it, or give another --dir",
        remedy="give a --dir that you can write",
    )
    with alone:
        with Store.open(location) as store:  # created here once, instead of by all workers at the same moment
            store.bucket.check()
            first_time = not store.keys.clients()
        async with AsyncExitStack() as stack:
            lock = await _alone_at_work(stack, directory)
            if places.store is not None:
                await stack.enter_async_context(_alone_on_database(places.store, directory, stop))
            listener, url = tcp_socket(places.host, places.port)
            listeners = [stack.enter_context(listener)]
            if places.socket is not None:
                listeners.append(stack.enter_context(unix_socket(places.socket)))
                stack.callback(places.socket.unlink, missing_ok=True)
            supervisor = await stack.enter_async_context(
                supervise(config, location, listeners, workers=workers, lock=lock)
            )
            operator = AdminApp(supervisor, admin_key(directory))
            admin_socket, admin_url = tcp_socket("127.0.0.1", places.admin_port)
            admin = Listener(operator, admin_socket)
            await admin.start()
            stack.push_async_callback(admin.stop)
            database = None if places.store is None else str(places.store)
            address = GatewayAddress(url, admin_url, os.getpid(), database)
            with Store.open(location) as store:
                # The key is made last, because it is shown only once, and a gateway that cannot start would not
                # show it.
                key = await issue(store, FIRST_CLIENT) if first_time else None
            announce(directory, address)
            yield supervisor, address, key


@asynccontextmanager
async def _alone_on_database(url: StoreUrl, directory: Path, stop: asyncio.Future[None]) -> AsyncGenerator[None]:
    """Keep other gateways on any machine from serving a database's clients, because two would give calls the same
    numbers.

    The database rejects a call whose number is taken, and the call is then not answered, so nothing is lost if a
    lease ended unnoticed. `stop` gets the error if another gateway has the lease; an unavailable server is tried
    again. Raises StoreError if another gateway serves the database.
    """
    # The lease is named by the directory's admin key, so a gateway that restarts there need not wait for its own
    # old lease.
    key_hash = hashlib.sha256(admin_key(directory).encode()).hexdigest()[:8]
    lease = Lease(f"gateway {key_hash} in {socket.gethostname()}:{directory}", _LEASE_S)
    # Wait no longer than a heartbeat for an unavailable server, so that signals can still stop the gateway.
    driver = PostgresqlDriver(url, create=False, read_only=False, outage_s=_HEARTBEAT_S)
    with Store(url, driver) as store:

        async def keep() -> None:
            while True:
                await asyncio.sleep(_HEARTBEAT_S)
                try:
                    await asyncio.wrap_future(store.leases.serve_alone(lease, __version__))
                except LeaseLost as error:
                    if not stop.done():
                        stop.set_exception(error)
                    return
                except StoreError as error:
                    _log.warning(
                        "the gateway's lease on %s could not be renewed, and is tried again in %g s: %s",
                        url,
                        _HEARTBEAT_S,
                        error,
                    )

        keeping = None
        try:
            for _ in range(2):  # the second renewal detects another gateway that started at the same moment
                await asyncio.wrap_future(store.leases.serve_alone(lease, __version__))
            keeping = asyncio.create_task(keep())
            yield
        finally:
            if keeping is not None:
                keeping.cancel()
                await asyncio.gather(keeping, return_exceptions=True)
            with suppress(StoreError):  # the lease expires by itself, and the first error is the informative one
                await asyncio.wrap_future(store.leases.give_back(lease))


async def _alone_at_work(stack: AsyncExitStack, directory: Path) -> int:
    """Hold the lock that workers also hold. The workers of a killed gateway keep it until their calls are stored.

    Two gateways that number the calls of one attempt would lose some, so the new one waits.
    """
    deadline = time.monotonic() + _LEFT_OVER_S
    while True:
        try:
            busy = (
                f"workers of a gateway that was killed are still using {directory} after {_LEFT_OVER_S:g} s; wait "
                "until they have stored their calls, or end the processes `understudy.gateway.serve.worker`"
            )
            return stack.enter_context(locked(directory / ".workers.lock", busy=busy))
        except ConfigError:
            if time.monotonic() > deadline:
                raise
            await asyncio.sleep(0.1)


async def serve_until_signal(
    config: GatewayConfig,
    places: ServicePaths,
    *,
    workers: int,
    started: Callable[[GatewayAddress, str | None], None],
) -> None:
    """Serve until SIGINT or SIGTERM. `started` gets the address and the first key. Raises like `service`."""
    loop = asyncio.get_running_loop()
    signalled = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signalled.set)
    stop: asyncio.Future[None] = loop.create_future()
    async with service(config, places, workers=workers, stop=stop) as (supervisor, address, key):
        started(address, key)
        watch = asyncio.ensure_future(supervisor.watch())
        end = asyncio.ensure_future(signalled.wait())
        await asyncio.wait({watch, end, stop}, return_when=asyncio.FIRST_COMPLETED)
        end.cancel()
        if stop.done():
            watch.cancel()
            stop.result()
        stop.cancel()
        if watch.done():
            watch.result()
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)
