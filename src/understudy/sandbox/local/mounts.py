"""The mounts of a local sandbox, as arguments for bubblewrap.

There are two bubblewraps, one inside the other. The outer one lives as long as the sandbox and holds every mount:
the tree, the spec's mounts, a tmpfs for everything that is written, and under `BOX` the root file system for
commands. The inner one is started for each run; it shows only BOX, as "/".
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path, PurePosixPath

from understudy.errors import SandboxError
from understudy.sandbox.base import SandboxLimits, SandboxSpec, below, check_spec

BOX = "/state/box"
NOFILE = 65536
HOME = "/home/agent"
USER_ID = 1000
SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MADE_DIRECTORIES = "/var/attic"
"""Where top-level directories live that `write` makes: the root itself is read-only and has links to here."""

AREAS = (HOME, "/tmp", "/var", "/dev/shm")
"""Writable directories besides the workdir, all on the one bounded tmpfs."""

ETC_DIRECTORIES = ("alternatives", "pki/ca-trust/extracted", "pki/tls/certs", "ssl/certs")
ETC_FILES = (
    "ca-certificates.conf",
    "ld.so.cache",
    "localtime",
    "mime.types",
    "nsswitch.conf",
    "protocols",
    "services",
    "ssl/openssl.cnf",
)
"""What of the host's /etc is shown, where it exists: how programs find libraries, certificates and the time."""

ETC_WRITTEN = {
    "passwd": f"root:x:0:0:root:/root:/bin/sh\nagent:x:{USER_ID}:{USER_ID}:agent:{HOME}:/bin/sh\n"
    "nobody:x:65534:65534:nobody:/:/bin/false\n",
    "group": f"root:x:0:\nagent:x:{USER_ID}:\nnogroup:x:65534:\n",
    "hosts": "127.0.0.1 localhost\n::1 localhost\n",
}

_MACHINE_COUNTERS = ("vmstat", "sys/fs/dentry-state", "sys/fs/inode-nr", "sys/fs/inode-state")
"""Files of /proc that are empty in a sandbox.

They count exactly what the whole machine did, so a program could leave a number there for a later sandbox, as so
many locked pages or looked-up names.
"""

_BYTES_PER_FILE = 8192
_MIN_FILES = 4096

SETUP = """set -e
mount --options-mode=ignore -o "remount,nosuid,nodev,nr_inodes=$1" /state
: > /state/empty
shift
mount -t overlay overlay -o "$1" "$2"
shift 2
while read -r _ _ _ _ place _; do
  case "$place" in /dev|/dev/full|/dev/null|/dev/random|/dev/tty|/dev/urandom|/dev/zero)
    mount -o remount,bind,ro "$place" ;;
  esac
done </proc/self/mountinfo
while [ $# -gt 0 ]; do
  if [ -d "$1" ]; then mkdir -p "$2"; else mkdir -p "${2%/*}"; [ -e "$2" ] || : > "$2"; fi
  mount --bind "$1" "$2"
  shift 2
done
echo ready
read -r _
"""
"""The script of the outer bubblewrap: limits the number of files (empty files use memory too), mounts the overlay
and what is on top of it, then waits until our end of stdin closes.

This machine's devices become read-only: they can still be written to, but a sandbox that changes their timestamps
would leave notes there for others.
"""


def check(spec: SandboxSpec) -> None:
    """Raise SandboxError for an invalid spec."""
    check_spec(spec, writable=AREAS, taken=AREAS)
    for mount in spec.mounts:
        if below(mount.target, spec.workdir):
            path = spec.tree / PurePosixPath(mount.target).relative_to(spec.workdir)
            if any(part.is_symlink() for part in (path, *path.parents)[: len(path.parts) - len(spec.tree.parts)]):
                raise SandboxError(
                    f"cannot mount {mount.source} at {mount.target}: a symbolic link of the task's tree is at or "
                    "above this path, expected none; choose another target, or remove the link from the tree"
                )


@cache  # what a machine has does not change while a process runs, and each sandbox asks for it
def _system() -> tuple[str, ...]:
    """Return arguments that mount this machine's programs and libraries read-only; links such as /bin stay links.

    The outer bubblewrap needs the programs too, so it gets links to those in BOX.
    """
    args: list[str] = []
    for name in ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            args += ["--symlink", str(path.readlink()), f"{BOX}/{name}"]
        elif path.is_dir():
            args += ["--ro-bind", str(path), f"{BOX}/{name}"]
        else:
            continue
        args += ["--symlink", f"{BOX}/{name}", f"/{name}"]
    for name in ETC_DIRECTORIES:
        if Path("/etc", name).is_dir():
            for parent in reversed(PurePosixPath("/etc", name).parents[:-1]):
                args += ["--dir", f"{BOX}{parent}"]
            args += ["--ro-bind", f"/etc/{name}", f"{BOX}/etc/{name}"]
    return tuple(args)


def etc() -> dict[str, bytes]:
    """Return the content of the files to write under /etc, by their path there."""
    files = {name: content.encode() for name, content in ETC_WRITTEN.items()}
    for name in ETC_FILES:
        with contextlib.suppress(FileNotFoundError):
            files[name] = Path("/etc", name).read_bytes()
    return files


def private_path(index: int) -> str:
    """Return where the outer bubblewrap mounts the spec's private mount number `index`."""
    return f"/private/{index}"


def holder_command(spec: SandboxSpec, *, rootless: bool) -> list[str]:
    """Return the command that holds a sandbox open. It prints "ready", and ends when its stdin is closed.

    `unshare` makes the pid namespace, with bubblewrap as its first process, so that the kernel kills everything
    inside when bubblewrap dies. In a namespace that bubblewrap makes itself, a child may wait forever for a
    bubblewrap that was killed.
    """
    argv = ["unshare", "--pid", "--kill-child=SIGKILL", "--mount-proc"]
    argv += ["--user", "--map-root-user", "--"] if rootless else ["--"]
    # No --proc here: the kernel lets the inner bubblewrap mount a /proc only while a complete one is visible.
    argv += ["bwrap", "--unshare-net", "--cap-add", "ALL", "--dev-bind", "/dev", "/dev"]
    argv += ["--dev-bind", "/proc", "/proc", "--dir", "/tmp"]
    argv += ["--size", str(spec.limits.disk_bytes), "--tmpfs", "/state", "--dir", BOX, *_system()]
    argv += ["--dir", "/state/upper", "--dir", "/state/work", "--dir", "/private"]
    argv += ["--ro-bind", str(spec.tree.absolute()), "/lower"]
    for area in AREAS:
        argv += ["--perms", "1777" if area in ("/tmp", "/dev/shm") else "0755", "--dir", f"{BOX}{area}"]
    argv += ["--dir", f"{BOX}/run", "--dir", f"{BOX}/proc", "--dir", f"{BOX}{spec.workdir}"]
    argv += ["--perms", "1777", "--dir", f"{BOX}/var/tmp"]
    late: list[str] = []
    for index, mount in enumerate(spec.mounts):
        if mount.private:
            argv += ["--ro-bind", str(mount.source.absolute()), private_path(index)]
        elif below(mount.target, spec.workdir):
            argv += ["--ro-bind", str(mount.source.absolute()), f"/late/{index}"]
            late += [f"/late/{index}", f"{BOX}{mount.target}"]
        else:
            # Created explicitly, because the sandbox's user could not read parents that bubblewrap creates on its
            # own.
            for parent in reversed(PurePosixPath(mount.target).parents[:-1]):
                argv += ["--dir", f"{BOX}{parent}"]
            argv += ["--ro-bind", str(mount.source.absolute()), f"{BOX}{mount.target}"]
    options = "lowerdir=/lower,upperdir=/state/upper,workdir=/state/work" + (",userxattr" if rootless else "")
    most_files = max(_MIN_FILES, spec.limits.disk_bytes // _BYTES_PER_FILE)
    return [
        *argv,
        "--",
        "/bin/sh",
        "-c",
        SETUP,
        "sandbox",
        str(most_files),
        options,
        f"{BOX}{spec.workdir}",
        *late,
    ]


def environment(spec: SandboxSpec, extra: Mapping[str, str] | None) -> dict[str, str]:
    """Return the complete environment of a command (bubblewrap adds PWD)."""
    return {
        "PATH": ":".join([*spec.path_prefixes, SYSTEM_PATH]),
        "HOME": HOME,
        "LANG": "C.UTF-8",
        "USER": "agent",
        **spec.env,
        **(extra or {}),
    }


def command_arguments(
    spec: SandboxSpec, env: Mapping[str, str], sealed: Sequence[str] = (), *, cwd: str, reveal: bool
) -> list[str]:
    """Return bubblewrap's options for one run inside the outer one. `sealed` files are read-only in it."""
    args = ["--unshare-user", "--disable-userns", "--unshare-pid"]
    args += ["--unshare-ipc", "--unshare-uts"]  # not the network: that is the outer one's
    args += ["--unshare-cgroup-try", "--uid", str(USER_ID), "--gid", str(USER_ID), "--hostname", "sandbox"]
    args += ["--die-with-parent", "--new-session", "--cap-drop", "ALL", "--ro-bind", BOX, "/"]
    # The first process in the run's /proc is bubblewrap, run by the same user as the command. It is hidden,
    # because a command that can write to its memory could forge the reported exit code, and because its command
    # line and environment belong to this machine.
    args += ["--proc", "/proc", "--tmpfs", "/proc/1", "--remount-ro", "/proc/1", "--dev", "/dev"]
    for name in _MACHINE_COUNTERS:
        if Path("/proc", name).exists():
            args += ["--ro-bind", "/state/empty", f"/proc/{name}"]
    for area in (*AREAS, spec.workdir):
        args += ["--bind", f"{BOX}{area}", area]
    # Every directory above a sealed file becomes a mount point, because a mount point cannot be renamed.
    above = {
        parent for path in sealed for parent in PurePosixPath(path).parents if below(str(parent), spec.workdir)
    }
    for directory in sorted(map(str, above - {PurePosixPath(spec.workdir)})):
        args += ["--bind", f"{BOX}{directory}", directory]
    for path in sealed:
        args += ["--ro-bind", f"{BOX}{path}", path]
    if reveal:
        for index, mount in enumerate(spec.mounts):
            if mount.private:
                args += ["--ro-bind", private_path(index), mount.target]
    args += ["--remount-ro", "/dev", "--chdir", cwd, "--clearenv"]
    for name, value in env.items():
        args += ["--setenv", name, value]
    return args


def limits(bounds: SandboxLimits, *, data_bytes: int | None) -> list[str]:
    """Return the command that sets a run's limits from inside, where processes are counted for each sandbox."""
    settings = {
        "nproc": (resource.RLIMIT_NPROC, bounds.processes),
        "nofile": (resource.RLIMIT_NOFILE, NOFILE),
        "core": (resource.RLIMIT_CORE, 0),
    }
    if data_bytes is not None:
        settings["data"] = (resource.RLIMIT_DATA, data_bytes)
    argv = ["/usr/bin/prlimit"]
    for name, (kind, value) in settings.items():
        hard_limit = resource.getrlimit(kind)[1]
        argv.append(f"--{name}={value if hard_limit == resource.RLIM_INFINITY else min(value, hard_limit)}")
    return [*argv, "--"]
