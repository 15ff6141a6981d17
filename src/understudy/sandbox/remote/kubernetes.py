"""The `kubernetes` kind of sandbox: a local sandbox in a pod of its own, which has the same release of Understudy.

    understudy run … --sandbox 'kubernetes:NAMESPACE?template=sandbox-pod.yaml'

For each sandbox, kubectl creates a pod from the template and starts a worker (`worker.py`) in its first container.
The pod ends with its worker, and the worker with its connection. Kubernetes itself ends the pod at its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import time
import uuid
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, ClassVar

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError, SandboxError
from understudy.sandbox.base import OpenSandbox, sandbox_labels
from understudy.sandbox.process import run_process, run_to_completion
from understudy.sandbox.remote.connection import ConnectionOptions, WorkerConnection, connect
from understudy.sandbox.remote.sandboxes import (
    DEADLINE_S,
    START_S,
    STARTING,
    WORKER_COMMAND,
    WorkerSandboxes,
    positive_seconds,
)

_ANSWER_S = 60.0
_OUTPUT_BYTES = 64 << 20
_ANNOTATION = "understudy/labels"
_LABELS = {"app.kubernetes.io/managed-by": "understudy", "app.kubernetes.io/component": "sandbox"}
_SELECTOR = ",".join(f"{name}={value}" for name, value in _LABELS.items())
_OPEN = ("Pending", "Running", "Unknown")
_TEMPLATE_ADVICE = "give the path of a file with one pod, in YAML or JSON"
_ADVICE = (
    "check that kubectl can execute commands in pods of that namespace, and that the template's image has "
    "the same release of Understudy"
)


class _PodMetadata(Struct, frozen=True, rename="camel"):
    name: str
    creation_timestamp: datetime
    annotations: dict[str, str] = field(default_factory=dict[str, str])
    deletion_timestamp: datetime | None = None


class _PodSpec(Struct, frozen=True, rename="camel"):
    active_deadline_seconds: int


class _Waiting(Struct, frozen=True):
    reason: str = ""
    message: str = ""


class _ContainerState(Struct, frozen=True):
    waiting: _Waiting | None = None


class _ContainerStatus(Struct, frozen=True):
    state: _ContainerState = _ContainerState()


class _PodCondition(Struct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class _PodStatus(Struct, frozen=True, rename="camel"):
    phase: str = ""
    reason: str = ""
    message: str = ""
    conditions: tuple[_PodCondition, ...] = ()
    container_statuses: tuple[_ContainerStatus, ...] = ()


class _Pod(Struct, frozen=True):
    metadata: _PodMetadata
    spec: _PodSpec
    status: _PodStatus = _PodStatus()


class _PodList(Struct, frozen=True):
    items: list[_Pod]


class KubernetesSandboxes(WorkerSandboxes):
    """Opens sandboxes in pods of the namespace `target`, or of the context's.

    `template` is a file with one pod in YAML or JSON; its first container gets the worker. `context` and
    `kubeconfig` are kubectl's; `command` starts the worker in the pod, and a pod may take `start_s` seconds until
    it is ready. See WorkerSandboxes for the others.
    """

    name: ClassVar[str] = "kubernetes"

    def __init__(
        self,
        target: str = "",
        *,
        template: str = "",
        context: str = "",
        kubeconfig: str = "",
        command: str = WORKER_COMMAND,
        deadline_s: str | float = DEADLINE_S,
        starting: str | int = STARTING,
        start_s: str | float = START_S,
    ) -> None:
        super().__init__(f"kubernetes:{target}", deadline_s=deadline_s, starting=starting)
        self._start_s = positive_seconds(self._address, "start_s", start_s)
        options = {"--namespace": target, "--context": context, "--kubeconfig": kubeconfig}
        self._kubectl = ("kubectl", *(f"{name}={value}" for name, value in options.items() if value))
        self._name = f"kubernetes {target}".strip()
        self._template_path = template
        self._template: dict[str, Any] | None = None
        self._command = command

    async def _connect(self, sockets: Sequence[Path] = ()) -> WorkerConnection:
        name = f"understudy-{uuid.uuid4().hex[:12]}"
        manifest = await self._manifest(name)
        # Creating is never cut off: the pod could come into being after it was deleted.
        creating = asyncio.ensure_future(self._run("create", "--filename=-", stdin=msgspec.json.encode(manifest)))
        try:
            await asyncio.shield(creating)
            await self._wait_until_ready(name)
        except BaseException:
            await asyncio.shield(self._delete_after(creating, name))
            raise

        async def delete() -> None:
            await self._delete(name)

        container: str = manifest["spec"]["containers"][0]["name"]
        worker = f'{self._command}; kill "$(cat {_pid_file(name)})"'
        argv = (*self._kubectl, "exec", "--stdin", f"--container={container}", name, "--", "/bin/sh", "-c", worker)
        options = ConnectionOptions(advice=_ADVICE, on_close=delete)
        try:
            return await connect(argv, f"{self._name}: pod {name}", sockets, options)
        except BaseException:  # kubectl may not have been started yet
            await asyncio.shield(self._delete(name))
            raise

    async def sandboxes(self) -> list[OpenSandbox]:
        """Return the sandboxes whose pods have not ended, the oldest first. Raises SandboxError."""
        pods = [
            pod for pod in await self._pods() if pod.status.phase in _OPEN and not pod.metadata.deletion_timestamp
        ]
        return sorted(map(_open_sandbox, pods), key=lambda sandbox: sandbox.opened)

    async def reap(self, ids: Sequence[str]) -> list[str]:
        """Delete the pods of these sandboxes, those past their deadline and those that have ended; return the ids
        of sandboxes that were open. Raises SandboxError.
        """
        ended: list[str] = []
        for pod in await self._pods():
            sandbox, has_ended = _open_sandbox(pod), pod.status.phase not in _OPEN
            if has_ended or sandbox.id in ids or sandbox.deadline < time.time():
                await self._run(*_deletion(sandbox.id))
                ended += [] if has_ended else [sandbox.id]
        return ended

    async def _pods(self) -> list[_Pod]:
        output = await self._run("get", "pods", f"--selector={_SELECTOR}", "--output=json")
        return msgspec.json.decode(output, type=_PodList).items

    async def _manifest(self, name: str) -> dict[str, Any]:
        """Return the template as a new pod. Raises ConfigError for an invalid template, SandboxError."""
        if self._template is None:
            self._template = await self._read_template()
        manifest = msgspec.json.decode(msgspec.json.encode(self._template))
        metadata, spec = manifest["metadata"], manifest["spec"]
        metadata.pop("generateName", None)
        metadata["name"] = name
        metadata["labels"] = {**(metadata.get("labels") or {}), **_LABELS}
        labels = msgspec.json.encode(sandbox_labels()).decode()
        metadata["annotations"] = {**(metadata.get("annotations") or {}), _ANNOTATION: labels}
        spec["restartPolicy"] = "Never"
        spec["activeDeadlineSeconds"] = max(1, round(self._deadline_s))
        # The pod's own process only waits, so that it can be ended when the worker has ended.
        waiting = f'echo $$ >{_pid_file(name)}; trap "exit 0" TERM; sleep {round(self._deadline_s) + 60} & wait'
        spec["containers"][0] |= {"command": ["/bin/sh", "-c", waiting], "args": []}
        return manifest

    async def _read_template(self) -> dict[str, Any]:
        path = self._template_path
        if not path:
            raise ConfigError(
                f"--sandbox {self._address}: no template; give kubernetes:NAMESPACE?template=FILE with a "
                "pod whose image has Understudy (docs/clusters.md shows one)"
            )
        # kubectl reads YAML and JSON; with --local it does not ask the cluster.
        reading = (
            "label",
            "--local",
            f"--filename={path}",
            "--output=json",
            *(f"{n}={v}" for n, v in _LABELS.items()),
        )
        try:
            template = msgspec.json.decode(await self._run(*reading, advice=_TEMPLATE_ADVICE))
        except SandboxError as error:
            raise ConfigError(f"{path}: cannot read the pod's template: {error}") from error
        except msgspec.DecodeError as error:
            raise ConfigError(f"{path}: cannot read the pod's template: {error}; {_TEMPLATE_ADVICE}") from error
        containers = template.get("spec", {}).get("containers")
        if template.get("kind") != "Pod" or not containers or not all(map(_is_container, containers)):
            raise ConfigError(
                f"{path}: invalid template: got {template.get('kind')!r}; give one object of kind Pod whose "
                "spec.containers have a name and an image"
            )
        return template

    async def _wait_until_ready(self, name: str) -> None:
        ready = f"--timeout={self._start_s:g}s"
        try:
            await self._run(
                "wait", "--for=condition=Ready", f"pod/{name}", ready, timeout_s=self._start_s + _ANSWER_S
            )
        except SandboxError as error:
            reasons = ""
            with contextlib.suppress(SandboxError, msgspec.DecodeError):
                pod = msgspec.json.decode(await self._run("get", "pod", name, "--output=json"), type=_Pod)
                reasons = _reasons(pod.status)
            raise SandboxError(
                f"{self._name}: the pod {name} was not ready within {self._start_s:g} s: {reasons or error}; "
                f"check the template {self._template_path} and the cluster's free resources, or give it more "
                "time with start_s"
            ) from error

    async def _delete_after(self, creating: asyncio.Future[bytes], name: str) -> None:
        await asyncio.wait([creating])
        if not creating.cancelled():
            creating.exception()  # retrieved, so that asyncio does not report it as never retrieved
        await self._delete(name)

    async def _delete(self, name: str) -> None:
        # What cannot be deleted now ends with its worker, at the latest at its deadline, and is deleted by `reap`.
        with contextlib.suppress(SandboxError):
            await self._run(*_deletion(name))

    async def _run(
        self,
        *arguments: str,
        stdin: bytes = b"",
        timeout_s: float = _ANSWER_S,
        advice: str = "check kubectl's context, its permissions, and that the cluster can be reached",
    ) -> bytes:
        """Return the output of a kubectl command. Raises SandboxError, with `advice`, and ConfigError if there is
        no kubectl.
        """
        argv = (*self._kubectl, *arguments)
        try:
            completed = await run_to_completion(
                lambda cancelled: run_process(
                    argv, cancelled, timeout_s=timeout_s, output_bytes=_OUTPUT_BYTES, stdin=stdin, env=os.environ
                )
            )
        except OSError as error:
            raise ConfigError(
                f"{self._name}: cannot start kubectl: {error}; install kubectl 1.31 or newer on this machine"
            ) from error
        if completed.exit_code != 0:
            problem = completed.stderr.decode(errors="replace").strip()[-1000:]
            problem = f"no answer within {timeout_s:g} s" if completed.timed_out else problem
            raise SandboxError(
                f"{self._name}: `{shlex.join(('kubectl', *arguments))}` failed: {problem or completed.exit_code}; "
                f"{advice}"
            )
        return completed.stdout


def _pid_file(name: str) -> str:
    """Return the file in the pod that names its waiting process."""
    return f"/tmp/{name}.pid"


def _deletion(name: str) -> tuple[str, ...]:
    return ("delete", "pod", name, "--ignore-not-found", "--grace-period=1", "--wait=false")


def _is_container(container: Any) -> bool:
    return isinstance(container, dict) and {"name", "image"} <= set(container)  # pyright: ignore[reportUnknownArgumentType]


def _open_sandbox(pod: _Pod) -> OpenSandbox:
    opened = pod.metadata.creation_timestamp.timestamp()
    labels = msgspec.json.decode(pod.metadata.annotations.get(_ANNOTATION, "{}"), type=dict[str, str])
    return OpenSandbox(
        id=pod.metadata.name, labels=labels, opened=opened, deadline=opened + pod.spec.active_deadline_seconds
    )


def _reasons(status: _PodStatus) -> str:
    """Return why a pod is not ready, as far as the cluster says."""
    waiting = [
        container.state.waiting for container in status.container_statuses if container.state.waiting is not None
    ]
    causes: list[Any] = [
        *waiting,
        *(condition for condition in status.conditions if condition.status == "False"),
        status,
    ]
    texts = [": ".join(filter(None, (cause.reason, cause.message))) for cause in causes]
    return "; ".join(dict.fromkeys(filter(None, texts)))
