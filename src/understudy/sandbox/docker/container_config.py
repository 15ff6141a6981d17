"""From a sandbox's spec to what the engine is asked for, and what cannot be asked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from understudy.sandbox.base import SandboxLimits, SandboxSpec, check_spec
from understudy.sandbox.docker.images import HOME, USER_ID, PreparedImage

ROOT_CAPABILITIES = ["CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID"]
"""What root needs to unpack, install and become somebody else; none of it leads out of the container."""

# The first command of a container waits for ever, as root without rights: an ordinary user cannot end it.
IDLE = "while :; do read -r line || exit; done"


def check(spec: SandboxSpec) -> None:
    """Raise SandboxError for an invalid spec."""
    check_spec(
        spec, writable=(HOME, "/tmp"), taken=(HOME, "/tmp", "/etc", "/proc"), needs_tree=not spec.tree_in_image
    )


def user(spec: SandboxSpec) -> int:
    """The id, of user and group, that commands run with."""
    return 0 if spec.as_root else USER_ID


def container(
    spec: SandboxSpec, prepared: PreparedImage, labels: Mapping[str, str], *, cpus: float | None, quota: bool
) -> dict[str, Any]:
    """The container to make. `quota`: the engine's storage can bound what a container writes."""
    limits: SandboxLimits = spec.limits
    host: dict[str, Any] = {
        "NetworkMode": "none",
        "Init": True,
        "IpcMode": "private",
        "CapDrop": ["ALL"],
        "CapAdd": ROOT_CAPABILITIES if spec.as_root else [],
        "SecurityOpt": ["no-new-privileges"],
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
    if quota:
        host["StorageOpt"] = {"size": str(limits.disk_bytes)}
    return {
        "Image": prepared.id,
        "Entrypoint": ["/bin/sh", "-c", IDLE],
        "Cmd": [],
        "User": "0:0",
        "WorkingDir": "/",
        "Hostname": "sandbox",
        "OpenStdin": True,
        "NetworkDisabled": True,
        "Labels": dict(labels),
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }


def environment(spec: SandboxSpec, prepared: PreparedImage, extra: Mapping[str, str] | None) -> list[str]:
    """All the environment that a command gets, for the engine: a name alone takes a variable away.

    What the image itself sets stays: its programs are configured by it, as where pip finds its packages.
    """
    variables = {
        "PATH": path(spec, prepared),
        "HOME": HOME,
        **({} if "LANG" in prepared.variables else {"LANG": "C.UTF-8"}),
        "USER": "root" if spec.as_root else "agent",
        **spec.env,
        **(extra or {}),
    }
    return [f"{name}={value}" for name, value in variables.items()] + [
        name for name in ("HOSTNAME", "TERM") if name not in variables
    ]


def path(spec: SandboxSpec, prepared: PreparedImage) -> str:
    """PATH, unless the spec says otherwise: its prefixes, then the image's own."""
    return ":".join((*spec.path_prefixes, prepared.path))


def key(spec: SandboxSpec, image: str) -> tuple[object, ...]:
    """What two specs have in common that one container could serve."""
    tree = "" if spec.tree_in_image else str(spec.tree)
    mounts = tuple(mount for mount in spec.mounts if not mount.private)
    return (image, tree, spec.workdir, spec.as_root, mounts, spec.limits)
