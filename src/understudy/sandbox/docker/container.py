"""A sandbox that is a container.

Programs inside the container are never trusted to report a fact: the engine starts commands and reads files. If a
process outlives its command, the whole container is killed, and started again for the next command. Written files
survive that, because they are in the container's own layer, including home and /tmp.
"""

from __future__ import annotations

import asyncio
import contextlib
import posixpath
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from understudy.errors import SandboxError, SandboxLost
from understudy.sandbox.base import (
    Completed,
    IgnoreFilter,
    IsolatedSandbox,
    Mount,
    SandboxSpec,
    TreeChanges,
    check_no_nul,
    check_spec,
)
from understudy.sandbox.docker.engine import (
    ContainerEngine,
    EngineNotFound,
    EngineRefused,
    ExecNotStarted,
    ExecStream,
    is_process_of,
    isolated,
    start_container,
    start_exec,
)
from understudy.sandbox.docker.files import ContainerFiles
from understudy.sandbox.docker.images import HOME, USER_ID, PreparedImage
from understudy.sandbox.process import CommandOutput, exit_code_of_shell, run_to_completion
from understudy.sandbox.time_limit import TimeLimit
from understudy.util.processes import available_cpus

_LOOK_S = 0.5
"""How often we look whether a command has ended whose output is held open by another one."""

_DISK_S = 5.0
_TOP = "-eo pid,stat"
_SETTLE_TRIES = 5
_OWN = 2
"""The number of processes of an idle container: the init process, and the IDLE command."""

_KILLED_CODES = (None, 128 + signal.SIGKILL, 128 + signal.SIGTERM)
"""Exit codes of a command whose container was ended; None if the engine did not report one in time."""

_SETTLE_S = (0.0, 0.02, 0.05, 0.1, 0.2, 0.4)

_LATE_CODES = (1, 126, 127, 255)
"""Exit codes of a command whose program's loader is missing, which differ by the version of the runtime."""

ROOT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"]
"""What root needs to unpack, install and switch users. None of these capabilities leads out of the container."""

# The first command of a container, which waits forever. It runs as root (without capabilities), so that an
# ordinary user cannot end it.
IDLE = "while :; do read -r line || exit; done"


def check_container_spec(spec: SandboxSpec) -> None:
    """Raise SandboxError for an invalid spec."""
    check_spec(
        spec, writable=(HOME, "/tmp"), taken=(HOME, "/tmp", "/etc", "/proc"), needs_tree=not spec.tree_in_image
    )


def user_id(spec: SandboxSpec) -> int:
    """Return the user id, also used as group id, that commands run with."""
    return 0 if spec.as_root else USER_ID


def container_config(
    spec: SandboxSpec, prepared: PreparedImage, *, cpus: float | None, quota: bool
) -> dict[str, Any]:
    """Return the config to create the container with. `quota`: the engine's storage can limit what a container
    writes.
    """
    limits = spec.limits
    host: dict[str, Any] = {
        "Init": True,
        "IpcMode": "private",
        "PidsLimit": limits.processes,
        "Memory": limits.memory_bytes,
        "MemorySwap": limits.memory_bytes,
        "Ulimits": [
            {"Name": "core", "Soft": 0, "Hard": 0},
            {"Name": "fsize", "Soft": limits.disk_bytes, "Hard": limits.disk_bytes},
        ],
        "LogConfig": {"Type": "none"},
        "Mounts": [
            {"Type": "bind", "Source": str(mount.source.absolute()), "Target": mount.target, "ReadOnly": True}
            for mount in spec.mounts
            if not mount.private
        ],
    }
    if cpus:
        host["NanoCpus"] = int(cpus * 1e9)
    # Shares only weight containers against each other. But some programs (such as pylint) divide them by 1024 to
    # count processors, and would take the engine's default of 1024 for a single one.
    host["CpuShares"] = 1024 * max(2, int(cpus or available_cpus()))
    if quota:
        host["StorageOpt"] = {"size": str(limits.disk_bytes)}
    capabilities = ROOT_CAPABILITIES if spec.as_root else ()
    config = isolated(prepared.id, ["/bin/sh", "-c", IDLE], (), "sandbox", capabilities=capabilities, **host)
    return config | {"Hostname": "sandbox", "OpenStdin": True}


def container_environment(
    spec: SandboxSpec, prepared: PreparedImage, extra: Mapping[str, str] | None
) -> list[str]:
    """Return the environment of a command for the engine; an entry without "=" removes that variable.

    Variables of the image stay, because its programs may depend on them, for example on where pip finds packages.
    """
    variables = {
        "PATH": ":".join((*spec.path_prefixes, prepared.path)),
        "HOME": HOME,
        **({} if "LANG" in prepared.variables else {"LANG": "C.UTF-8"}),
        "USER": "root" if spec.as_root else "agent",
        **spec.env,
        **(extra or {}),
    }
    return [f"{name}={value}" for name, value in variables.items()] + [
        name for name in ("HOSTNAME", "TERM") if name not in variables
    ]


def container_key(spec: SandboxSpec, image: str) -> tuple[object, ...]:
    """Return a key that is equal for two specs that the same container could serve."""
    tree = "" if spec.tree_in_image else str(spec.tree)
    mounts = tuple(mount for mount in spec.mounts if not mount.private)
    return (image, tree, spec.workdir, spec.as_root, mounts, spec.limits)


class Containers(Protocol):
    """Creates and removes containers."""

    engine: ContainerEngine
    quota: bool

    async def make(self, spec: SandboxSpec) -> tuple[str, PreparedImage]:
        """Create and start a container for a spec; return its id and image."""
        ...

    async def drop(self, container: str) -> None:
        """Remove a container; never raises."""
        ...


class DockerSandbox(IsolatedSandbox):
    """An open sandbox: a container, and what is needed to run commands in it. Only one command runs at a time."""

    def __init__(self, spec: SandboxSpec, home: Containers, container: str, prepared: PreparedImage) -> None:
        self._spec = spec
        self._containers = home
        self._engine = home.engine
        self._container = container
        self._prepared = prepared
        self._running = True
        self._started = ""  # when the container was started, by the engine's clock: another value means a restart
        self._first = 0  # the id of the container's first process
        self._execution = ""  # the id of the command that runs
        self._roots: tuple[int, ...] = ()  # its processes, if they are known
        self._killing = False
        self._closed = False
        self._turn = asyncio.Lock()

    @property
    def home(self) -> str:
        """The home directory, in the container's own layer."""
        return HOME

    @property
    def _files(self) -> ContainerFiles:
        return ContainerFiles(self._engine, self._container)

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxError("the sandbox is closed; open a new one")

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        reveal: bool = False,
    ) -> Completed:
        """Run a command. An exit code of 128 + n, a shell's notation for signal n, is returned as -n."""
        where = self._absolute(cwd or "")
        environment = container_environment(self._spec, self._prepared, env)
        check_no_nul("run", *argv, *environment)
        command = {"cmd": list(argv), "environment": environment, "workdir": where}
        async with self._turn:
            self._check_open()
            if not reveal or not any(mount.private for mount in self._spec.mounts):
                return await run_to_completion(lambda cancelled: self._watch(command, cancelled, timeout_s, stdin))
            revealed = await run_to_completion(lambda cancelled: self._reveal())
            try:
                return await run_to_completion(lambda cancelled: self._watch(command, cancelled, timeout_s, stdin))
            finally:
                await run_to_completion(lambda cancelled: self._hide(revealed))

    async def _watch(
        self, command: Mapping[str, Any], cancelled: asyncio.Event, timeout_s: float, stdin: bytes
    ) -> Completed:
        """Run a command until it ends, `over` is set or the timeout has passed; then none of its processes is
        left.
        """
        started = time.monotonic()
        limit = TimeLimit(timeout_s)
        output = CommandOutput(self._spec.limits.output_bytes)
        stop = asyncio.Event()
        work = asyncio.create_task(self._execute(command, output, stdin, stop))
        called_off = asyncio.create_task(cancelled.wait())
        try:
            while not (work.done() or called_off.done()) and (pause_s := limit.pause_s()) > 0:
                await asyncio.wait({work, called_off}, timeout=pause_s, return_when=asyncio.FIRST_COMPLETED)
                if not (work.done() or called_off.done()):
                    limit.count(await self._processes())
            duration_s = time.monotonic() - started
            timed_out = not work.done()
            stop.set()
            while not work.done():
                await self._kill()
                await asyncio.wait({work}, timeout=_LOOK_S)
        finally:
            called_off.cancel()
            work.cancel()  # for a command that could not be killed
            await asyncio.wait({work})
        try:
            code = work.result()
        except SandboxError:
            if not timed_out:
                raise
            self._check_open()
            code = None
        finally:
            await self._ensure_quiet()
        return output.completed(code, duration_s, timed_out=timed_out)

    async def _execute(
        self, command: Mapping[str, Any], output: CommandOutput, stdin: bytes, stop: asyncio.Event
    ) -> int | None:
        """Start a command and wait for its end; return its exit code, or None when `stop` was set before it
        started.
        """
        self._execution, self._roots = "", ()
        await self._ensure_running()
        execution = await self._create_exec(command, stdin)
        self._execution = execution["Id"]
        if stop.is_set():
            return None
        try:
            attached = await start_exec(self._engine.socket, execution["Id"])
        except ExecNotStarted as error:
            raise await self._start_error(command, str(error)) from error
        return await self._follow(attached, execution["Id"], command, output, stdin)

    async def _create_exec(self, command: Mapping[str, Any], stdin: bytes) -> Mapping[str, Any]:
        user = user_id(self._spec)
        options = {"stdin": bool(stdin), "user": f"{user}:{user}", **command}
        what = f"run {command['cmd'][0]!r}"
        try:
            return await self._call(what, self._engine.api.exec_create, self._container, **options)
        except SandboxError:
            self._check_open()
            if await self._is_up():
                raise
        await self._ensure_running()  # the previous command had ended the container
        return await self._call(what, self._engine.api.exec_create, self._container, **options)

    async def _follow(
        self, attached: ExecStream, execution: str, command: Mapping[str, Any], output: CommandOutput, stdin: bytes
    ) -> int | None:
        pump = asyncio.create_task(attached.pump(output, stdin))
        try:
            state = await self._until_ended(execution, pump, output)
            if not pump.done():  # another process holds the output pipes open
                await self._kill()
                await asyncio.wait({pump}, timeout=_LOOK_S)
        finally:
            pump.cancel()
            await asyncio.wait({pump})
            await attached.close()
        code: int | None = state.get("ExitCode")
        if code in _KILLED_CODES and not self._killing:
            await self._check_not_lost()
        if not state.get("Pid") and code not in (None, 0):
            raise await self._start_error(command, (output.stdout or output.stderr).decode(errors="replace"))
        if code in _LATE_CODES and output.stderr.startswith(b"exec ") and not output.stdout:
            await self._check_loader(command)
        if code is None:
            return -9
        return exit_code_of_shell(code)

    async def _until_ended(
        self, execution: str, pump: asyncio.Task[None], output: CommandOutput
    ) -> Mapping[str, Any]:
        """Wait for the end of a command; return its state as the engine reports it."""
        pause, looked = _LOOK_S, time.monotonic()
        while True:
            await asyncio.wait({pump}, timeout=pause)
            state = await self._state(execution)
            if not state["Running"]:
                return state
            pause = 0.005 if pump.done() else _LOOK_S
            if not self._containers.quota and time.monotonic() - looked > _DISK_S:
                if await self._too_much_written():
                    output.stderr += b"\nunderstudy: killed: it wrote more than a sandbox may\n"
                    await self._kill()
                looked = time.monotonic()

    async def _processes(self) -> tuple[int, ...]:
        """Return the processes from which those of the command that runs descend: its own, and the container's
        first one, which inherits children of ended processes. Empty if the engine's processes are not this
        machine's.
        """
        if self._execution and not self._roots:
            with contextlib.suppress(SandboxError, OSError):  # then all of the command's time counts
                pid = int((await self._state(self._execution)).get("Pid") or 0)
                if is_process_of(self._container, pid) and is_process_of(self._container, self._first):
                    self._roots = (pid, self._first)
        return self._roots

    async def _state(self, execution: str) -> Mapping[str, Any]:
        try:
            return await self._call("ask for a command's end", self._engine.api.exec_inspect, execution)
        except SandboxError:
            if await self._is_up():
                raise
            return {"Running": False, "ExitCode": None, "Pid": -1}  # it ended together with the whole container

    async def _too_much_written(self) -> bool:
        written = await self._call("measure a sandbox", self._engine.written, self._container)
        return written > self._spec.limits.disk_bytes

    async def _start_error(self, command: Mapping[str, Any], output: str) -> SandboxError:
        """Return an error that says why a command did not start."""
        program: str = command["cmd"][0]
        where: str = command["workdir"]
        variables = dict(variable.split("=", 1) for variable in command["environment"] if "=" in variable)
        directories = [where] if "/" in program else variables["PATH"].split(":")

        def look() -> SandboxError:
            if not self._files.is_directory(where):
                return SandboxError(
                    f"cannot run {program!r} in {where}: no such directory in the sandbox; create it first"
                )
            if any(self._files.is_program(posixpath.join(path, program)) for path in directories):
                return SandboxError(
                    f"cannot run {program!r} in the image {self._prepared.image}: it exists but does not start "
                    f"({' '.join(output.split())[-500:]}); check that the image has its interpreter or glibc's "
                    "loader"
                )
            return SandboxError(
                f"cannot run {program!r}: no such program in the image {self._prepared.image}; expected it in "
                f"{', '.join(directories)}: install it in the image"
            )

        if not await self._is_up():
            self._check_open()
            return SandboxError(
                f"cannot run {program!r}: the container has ended ({' '.join(output.split())[-300:]}); open a new "
                "sandbox"
            )
        return await self._engine.do("look for a program", look)

    async def _check_loader(self, command: Mapping[str, Any]) -> None:
        """Raise SandboxError when a program did not start because its interpreter or loader is missing in the
        image.

        The engine reports this in the program's own output, which a program could imitate, so the program's file
        is read.
        """
        program: str = command["cmd"][0]
        if "/" not in program:
            return
        absolute = posixpath.join(command["workdir"], program)
        loader = ""
        with contextlib.suppress(FileNotFoundError):
            loader = await self._engine.do("look at a program", self._files.missing_loader, absolute)
        if loader:
            raise SandboxError(
                f"cannot run {program!r} in the image {self._prepared.image}: it exists but does not start, "
                f"because the image has no {loader}; use an image with glibc, which agents need"
            )

    async def _call(self, what: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Call the engine about this container. Raises SandboxError, or SandboxLost when the container is gone."""
        try:
            return await self._engine.do(what, call, *args, **options)
        except EngineNotFound as error:
            self._check_open()
            raise SandboxLost(
                f"cannot {what}: the sandbox's container is gone, it was removed from outside; run the same "
                "command again, which opens a new sandbox"
            ) from error

    async def _is_up(self) -> bool:
        with contextlib.suppress(SandboxError):
            details = await self._call("look at a container", self._engine.api.inspect_container, self._container)
            self._running = bool(details["State"]["Running"])
            return self._running
        return False

    async def _check_not_lost(self) -> None:
        """Raise SandboxLost when the container ended during a command that cannot have caused this.

        An ordinary user cannot end the container's first processes, which are root's. Only a command that runs as
        root, or one that used up the container's memory, may be the cause.
        """
        for pause in _SETTLE_S:  # the engine reports the end of a command earlier than the end of its container
            await asyncio.sleep(pause)
            try:
                what = "look at a container"
                details = await self._call(what, self._engine.api.inspect_container, self._container)
            except SandboxLost:
                raise
            except SandboxError as error:
                raise SandboxLost(
                    f"the connection to the container engine was lost while a command ran: {error}; check "
                    "that the engine is running, and retry"
                ) from error
            state = details["State"]
            if not state["Running"] or state["StartedAt"] != self._started:
                break
        else:
            return
        self._running = bool(state["Running"])
        if not self._spec.as_root and not state.get("OOMKilled"):
            raise SandboxLost(
                "the sandbox's container was stopped or killed from outside while a command ran; check who did "
                "(docker events, dmesg), then run the same command again"
            )

    async def _ensure_running(self) -> None:
        """Start the container again if it was killed."""
        if self._running and self._started:
            return
        if not self._running:
            await self._call("start a container again", start_container, self._engine, self._container)
        details = await self._call("look at a container", self._engine.api.inspect_container, self._container)
        self._started, self._first = details["State"]["StartedAt"], int(details["State"]["Pid"])
        self._running, self._killing = True, False

    async def _kill(self) -> None:
        """Kill everything inside; the container can be started again."""

        def kill() -> None:
            try:
                self._engine.api.kill(self._container, signal="SIGKILL")
            except EngineNotFound:
                return
            except EngineRefused as error:
                if "not running" not in str(error):
                    raise

        self._running, self._killing = False, True
        await self._engine.do("kill what runs in a sandbox", kill)

    async def _ensure_quiet(self) -> None:
        """Make sure that no process of a command is left; otherwise kill the container."""
        if not self._running:
            return
        for attempt in range(_SETTLE_TRIES):
            try:
                top = await self._engine.do(
                    "look for processes left", self._engine.api.top, self._container, ps_args=_TOP
                )
            except (EngineNotFound, SandboxError):
                break
            running = sum(1 for _, state in top["Processes"] or () if not state.startswith("Z"))
            if running < _OWN and not await self._is_up():
                return  # a process inside has ended the container
            if running == _OWN:
                return
            # the engine reports the end of a command before its last processes are gone
            await asyncio.sleep(0.002 * attempt)
        await self._kill()

    async def _reveal(self) -> list[str]:
        """Copy the private mounts into the container; return the paths to remove afterwards."""
        private = [mount for mount in self._spec.mounts if mount.private]
        return await self._call("show what is private", self._show, private)

    async def _hide(self, paths: Sequence[str]) -> None:
        """Remove revealed files. If that fails, close the sandbox, so that the agent never sees them."""
        await self._ensure_running()
        if not await self._call("hide what was shown", self._remove, paths):
            await self.close()
            raise SandboxError(
                f"the hidden files {', '.join(paths)}, shown to the checks in a container of the image "
                f"{self._prepared.image}, could not be removed again, so the sandbox was closed and the agent "
                "cannot see them; run the same command again, and if it fails again, check the image's /bin/rm"
            )

    def _show(self, mounts: Sequence[Mount]) -> list[str]:
        """Copy the mounts' sources in, readable for all users; return the topmost paths that this created."""
        paths: list[str] = []
        for mount in mounts:
            above = posixpath.dirname(mount.target)
            while self._files.mode(above) is None:
                above = posixpath.dirname(above)
            inside = posixpath.relpath(mount.target, above)
            paths.append(posixpath.join(above, inside.split("/")[0]))
            self._files.put_tree(mount.source, above, 0, inside, read_only=True)
        return paths

    def _remove(self, paths: Sequence[str]) -> bool:
        """Remove revealed files; return whether they are gone, according to the engine."""
        execution = self._engine.api.exec_create(self._container, ["/bin/rm", "-rf", "--", *paths], user="0:0")
        self._engine.api.exec_start(execution["Id"])
        return all(self._files.mode(path) is None for path in paths)

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """Return the content of a regular file, read by the engine. Links cannot lead out of the container."""
        self._check_open()
        absolute = self._absolute(path)
        return await self._call(f"read {path}", self._files.read, absolute, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Write a file through the engine."""
        self._check_open()
        absolute, user = self._absolute(path), user_id(self._spec)
        await self._call(f"write {path}", self._files.write, absolute, data, mode=mode, user=user)

    async def read_changes(self, *, file_limit: int, ignored: IgnoreFilter) -> TreeChanges:
        """Return the differences from the prepared image, as the engine reports them; everything inside is killed
        first.
        """
        async with self._turn:
            self._check_open()
            await run_to_completion(lambda cancelled: self._kill())
            mounts = [mount.target for mount in self._spec.mounts]
            options = {"file_limit": file_limit, "ignored": ignored}
            return await self._call("take what changed", self._files.changes, self.workdir, mounts, **options)

    async def reset(self) -> None:
        """Replace the container by a new one."""
        async with self._turn:
            self._check_open()
            old = self._container
            self._container, self._prepared = await self._containers.make(self._spec)
            self._running, self._started = True, ""
            await self._containers.drop(old)
        if self._closed:
            await self._containers.drop(self._container)

    async def close(self) -> None:
        """Kill and remove the container."""
        self._closed = True
        await self._containers.drop(self._container)
