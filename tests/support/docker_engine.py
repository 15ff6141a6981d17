"""A container engine for tests, and images made of this machine's own files: no image registry is ever asked.

An engine that answers is used; else, as root, a private dockerd is started once for all sessions that run at the
same time, and stopped by the last of them. The data of the private one stays, as a cache does.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import io
import os
import shutil
import signal
import socket
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import docker
import docker.errors
import requests

HOME = Path("/var/tmp") / f"understudy-tests-{os.getuid()}"  # short: a socket's path has 107 characters
START_S = 60.0
_FORMAT = "4b"
_LABEL = "understudy-test"

_PROGRAMS = """
    bash sh sed grep egrep find xargs diff cmp patch tar gzip mawk awk git ps setsid env hostname
    [ arch base64 basename cat chgrp chmod chown chroot cksum comm cp csplit cut date dd df dirname du echo expand
    expr factor false fmt fold groups head id install join kill ln ls md5sum mkdir mkfifo mknod mktemp mv nice nl
    nohup nproc od paste pathchk pr printenv printf pwd readlink realpath rm rmdir seq sha1sum sha256sum shuf sleep
    sort split stat stty sum sync tac tail tee test timeout touch tr true truncate tsort tty uname uniq unlink wc
    who whoami yes
"""
"""What the images have; those that this machine lacks are left out, but for the ones tests cannot do without."""
REQUIRED_PROGRAMS = frozenset({"bash", "sh", "sed", "grep", "find", "tar", "git", "patch", "cat", "env"})
LIBRARIES = ("libc.so.6", "libm.so.6", "libpthread.so.0", "libdl.so.2", "librt.so.1", "libnss_files.so.2")
"""Libraries that are there whether one of the programs needs them or not: those of the Claude Code binary."""


@dataclass(frozen=True)
class Engine:
    """An engine that answers at `url`, in the form of DOCKER_HOST."""

    url: str

    @property
    def client(self) -> docker.DockerClient:
        """A client of one's own, to be closed."""
        return docker.DockerClient(base_url=self.url, timeout=300)


@dataclass(frozen=True)
class InstanceImage:
    """An image as SWE-bench has them: its name, and commits of the repository at /testbed."""

    name: str
    base_commit: str
    future_commit: str


ENDS: dict[str, Callable[[docker.APIClient, str], Any]] = {
    "kill": lambda api, container: api.kill(container),
    "stop": lambda api, container: api.stop(container, timeout=0),
    "remove": lambda api, container: api.remove_container(container, force=True),
    "restart": lambda api, container: api.restart(container, timeout=0),
}
"""How a container can be ended from outside, by name."""


class NoEngine(Exception):
    """There is no engine and none can be started; says why."""


# --- the engine ----------------------------------------------------------------------------------------


def _answers(url: str) -> bool:
    try:
        # The library leaves a socket open that it could not connect.
        with socket.socket(socket.AF_UNIX) as trial:
            trial.connect(url.removeprefix("unix://"))
        with contextlib.closing(docker.DockerClient(base_url=url, timeout=10)) as client:
            return bool(client.ping())
    except (docker.errors.DockerException, requests.RequestException, OSError):
        return False


@cache
def engine() -> Engine:
    """The engine of this test session, started when there is none. Raises NoEngine."""
    if address := os.environ.get("DOCKER_HOST"):
        if _answers(address):
            return Engine(address)
        raise NoEngine(f"no container engine answers at DOCKER_HOST={address}")
    if _answers("unix:///var/run/docker.sock"):
        return Engine("unix:///var/run/docker.sock")
    if os.getuid() != 0 or shutil.which("dockerd") is None:
        raise NoEngine(
            "no container engine here; as root, with `apt-get install docker.io`, tests start their own"
        )
    return Engine(_private())


@contextlib.contextmanager
def _lock(name: str) -> Generator[None]:
    HOME.mkdir(mode=0o755, exist_ok=True)
    with (HOME / name).open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


_using: list[int] = []
"""Our shared lock on the private engine: the kernel drops it when this process ends, in whatever way."""


def _private() -> str:
    url = f"unix://{HOME}/docker.sock"
    with _lock("start.lock"):
        users = os.open(
            HOME / "users.lock", os.O_RDWR | os.O_CREAT
        )  # a bare descriptor: held until this process ends
        fcntl.flock(users, fcntl.LOCK_SH)
        _using.append(users)
        if not _answers(url):
            _start(url)
    return url


def _start(url: str) -> None:
    (HOME / "dockerd.pid").unlink(missing_ok=True)
    argv = ["dockerd", "--data-root", str(HOME / "data"), "--exec-root", str(HOME / "exec")]
    argv += ["--pidfile", str(HOME / "dockerd.pid"), "--host", url]
    argv += ["--iptables=false", "--ip6tables=false", "--bridge=none"]
    log = HOME / "dockerd.log"
    with log.open("wb") as output:
        daemon = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd="/", start_new_session=True
        )
    deadline = time.monotonic() + START_S
    while not _answers(url):
        if daemon.poll() is not None or time.monotonic() > deadline:
            raise NoEngine(f"dockerd did not start; the end of {log}: {log.read_text(errors='replace')[-1500:]}")
        time.sleep(0.1)
    daemon.returncode = 0  # it outlives us on purpose: nobody is to warn of that


def stop_engine() -> None:
    """Stop the private engine if nobody uses it any more. For the end of a session; never raises."""
    for users in _using:
        os.close(users)
    _using.clear()
    if not (HOME / "dockerd.pid").exists():
        return
    with _lock("start.lock"), (HOME / "users.lock").open("w") as users:
        try:
            fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        with contextlib.suppress(OSError, ValueError):
            pid = int((HOME / "dockerd.pid").read_text())
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"dockerd" not in command or os.fsencode(HOME) not in command:
                return
            _forget_prepared()
            handle = os.pidfd_open(pid)
            try:
                signal.pidfd_send_signal(handle, signal.SIGTERM)
                _wait(handle)
            finally:
                os.close(handle)


def _forget_prepared() -> None:
    """Remove the images that sandboxes made of trees of tests; those that they are made of stay."""
    with (
        contextlib.suppress(docker.errors.DockerException, requests.RequestException),
        contextlib.closing(docker.DockerClient(base_url=f"unix://{HOME}/docker.sock", timeout=60)) as client,
    ):
        for image in client.api.images(filters={"label": "understudy.prepared"}):
            client.api.remove_image(image["Id"], force=True)


def _wait(pidfd: int) -> None:
    import select

    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(20_000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


# --- the image that all others are made of -------------------------------------------------------------


class _Root:
    """What goes into an image: files of this machine at the places where they are here, and files of our own."""

    def __init__(self) -> None:
        self.copied: dict[str, Path] = {}
        self.links: dict[str, str] = {}
        self.written: dict[str, tuple[bytes, int]] = {}
        self.directories: dict[str, int] = {}

    def copy(self, source: Path, target: Path | str | None = None) -> None:
        """A file (links followed) at its own place, or another."""
        self.copied[_merged(str(target or source))] = source.resolve()

    def copy_tree(self, source: Path, target: Path, *, without: Iterable[str] = ()) -> None:
        skipped = set(without)
        for folder, names, files in os.walk(source):
            names[:] = [name for name in names if name not in skipped]
            for name in (*names, *files):
                path = Path(folder, name)
                there = _merged(str(target / path.relative_to(source)))
                if path.is_symlink():
                    self.links[there] = str(path.readlink())
                elif path.is_file() and not name.endswith((".opt-1.pyc", ".opt-2.pyc", ".a", ".whl")):
                    self.copied[there] = path

    def digest(self) -> str:
        sha = hashlib.sha256(_FORMAT.encode())
        for path, source in sorted(self.copied.items()):
            status = source.stat()
            sha.update(f"{path}\0{status.st_size}\0{status.st_mtime_ns}\n".encode())
        sha.update(repr((sorted(self.links.items()), sorted(self.written.items()))).encode())
        return sha.hexdigest()[:16]

    def tar(self, output: Any) -> None:
        with tarfile.open(fileobj=output, mode="w", format=tarfile.PAX_FORMAT) as tar:
            for path, mode in sorted({**dict.fromkeys(self._parents(), 0o755), **self.directories}.items()):
                info = tarfile.TarInfo(path.lstrip("/"))
                info.type, info.mode = tarfile.DIRTYPE, mode
                tar.addfile(info)
            for path, target in self.links.items():
                info = tarfile.TarInfo(path.lstrip("/"))
                info.type, info.linkname, info.mode = tarfile.SYMTYPE, target, 0o777
                tar.addfile(info)
            for path, (data, mode) in self.written.items():
                info = tarfile.TarInfo(path.lstrip("/"))
                info.size, info.mode = len(data), mode
                tar.addfile(info, io.BytesIO(data))
            first: dict[Path, str] = {}
            for path, source in self.copied.items():
                info = tarfile.TarInfo(path.lstrip("/"))
                status = source.stat()
                info.mode, info.mtime = 0o755 if status.st_mode & 0o100 else 0o644, int(status.st_mtime)
                if source in first:  # git is there a hundred times
                    info.type, info.linkname = tarfile.LNKTYPE, first[source]
                    tar.addfile(info)
                    continue
                first[source] = info.name
                info.size = status.st_size
                with source.open("rb") as file:
                    tar.addfile(info, file)

    def _parents(self) -> set[str]:
        places = (*self.copied, *self.links, *self.written, *self.directories)
        return {str(parent) for path in places for parent in Path(path).parents if str(parent) != "/"} - set(
            self.links
        )


def _merged(path: str) -> str:
    """/bin, /lib and so on are links to /usr/…, as on Debian."""
    top = path.split("/")[1]
    return f"/usr{path}" if top in ("bin", "sbin", "lib", "lib32", "lib64") else path


def _libraries(files: Iterable[Path]) -> set[str]:
    """The paths of all shared libraries that these programs and libraries load, the loader included."""
    listing = subprocess.run(["ldd", *map(str, files)], capture_output=True, text=True, check=False).stdout
    libraries: set[str] = set()
    for line in listing.splitlines():
        fields = line.split()
        path = fields[2] if "=>" in fields and len(fields) > 2 else (fields[0] if fields else "")
        if path.startswith("/") and not path.endswith(":") and Path(path).is_file():
            libraries.add(path)
    return libraries


def _system_library(name: str) -> Path | None:
    multiarch = sysconfig.get_config_var("MULTIARCH") or "x86_64-linux-gnu"
    paths = (Path(base, name) for base in (f"/lib/{multiarch}", f"/usr/lib/{multiarch}", "/lib64", "/usr/lib64"))
    return next((path for path in paths if path.exists()), None)


BASE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def _root(*, with_python: bool = True) -> _Root:
    root = _Root()
    for name in ("bin", "sbin", "lib", "lib64"):
        root.links[f"/{name}"] = f"usr/{name}"
        root.directories[f"/usr/{name}"] = 0o755
    programs: list[Path] = []
    for name in _PROGRAMS.split():
        program = shutil.which(name, path=BASE_PATH)
        if program is None:
            if name in REQUIRED_PROGRAMS:
                raise NoEngine(f"there is no {name} on this machine to make images with")
            continue
        programs.append(Path(program))
        root.copy(Path(program), f"/usr/bin/{name}")
    git_core = Path(
        subprocess.run(["git", "--exec-path"], capture_output=True, text=True, check=True).stdout.strip()
    )
    root.copy_tree(git_core, git_core, without=("mergetools",))
    binaries = {*programs, *map(Path, git_core.glob("git-remote-http*"))}
    if with_python:
        python, stdlib = _python(root)
        binaries |= {python, *stdlib.glob("lib-dynload/*.so")}
    binaries |= {library for name in LIBRARIES if (library := _system_library(name))}
    for library in (*_libraries(binaries), *(str(library) for library in binaries if ".so" in library.name)):
        root.copy(Path(library))
    root.written |= {
        "/etc/passwd": (b"root:x:0:0:root:/root:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n", 0o644),
        "/etc/group": (b"root:x:0:\nnogroup:x:65534:\n", 0o644),
        "/etc/nsswitch.conf": (b"passwd: files\ngroup: files\nhosts: files\n", 0o644),
        "/etc/hosts": (b"127.0.0.1 localhost\n", 0o644),
    }
    root.directories |= {"/tmp": 0o1777, "/var/tmp": 0o1777, "/root": 0o755, "/home": 0o755, "/proc": 0o755}
    root.directories |= {"/dev": 0o755, "/sys": 0o755, "/run": 0o755, "/workspace": 0o755}
    return root


def _python(root: _Root) -> tuple[Path, Path]:
    """Put this Python with pytest into an image, and the environment `testbed` that SWE-bench activates."""
    from understudy.config import cache_dir
    from understudy.tasks.environment import python_environment

    prefix = Path(sys.base_prefix).resolve()
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    stdlib = prefix / "lib" / version
    unused = ("test", "tests", "idlelib", "turtledemo", "tkinter", "ensurepip", "lib2to3", "pydoc_data")
    without = (*unused, "site-packages", "dist-packages", *(path.name for path in stdlib.glob("config-*")))
    root.copy_tree(stdlib, stdlib, without=without)
    executable = (prefix / "bin" / version).resolve()
    root.copy(executable, prefix / "bin" / version)
    environment = Path(python_environment(cache_dir()).path_prefixes[0]).parent
    site = environment / "lib" / version / "site-packages"
    venv = Path("/opt/miniconda3/envs/testbed")
    root.copy_tree(site, venv / "lib" / version / "site-packages", without=("pip", "__pycache__"))
    root.written[f"{venv}/lib/{version}/site-packages/testbed.pth"] = (b"/testbed\n", 0o644)
    root.written[f"{venv}/pyvenv.cfg"] = (
        f"home = {prefix}/bin\ninclude-system-site-packages = false\n".encode(),
        0o644,
    )
    for name in ("python", "python3", version):
        root.links[f"{venv}/bin/{name}"] = f"{prefix}/bin/{version}"
        root.links[f"/usr/local/bin/{name}"] = f"{venv}/bin/python"
    root.written[f"{venv}/bin/pytest"] = (b'#!/bin/sh\nexec python -m pytest "$@"\n', 0o755)
    root.written["/opt/miniconda3/bin/activate"] = (_ACTIVATE, 0o644)
    return executable, stdlib


_ACTIVATE = b"""# What conda's own script does for the tests' purposes.
export PATH="/opt/miniconda3/bin:$PATH" CONDA_DEFAULT_ENV=base
conda() {
  [ "$1" = activate ] || return 0
  [ -d "/opt/miniconda3/envs/$2" ] || { echo "EnvironmentNameNotFound: $2" >&2; return 1; }
  export CONDA_PREFIX="/opt/miniconda3/envs/$2" CONDA_DEFAULT_ENV="$2" PATH="/opt/miniconda3/envs/$2/bin:$PATH"
}
"""


def _has(client: docker.DockerClient, name: str, digest: str) -> bool:
    try:
        return client.images.get(name).labels.get(_LABEL) == digest
    except docker.errors.ImageNotFound:
        return False


@cache
def test_image(engine: Engine) -> str:
    """The name of an image with a shell, git, patch and this Python with pytest; made once for each engine."""
    return _made(engine, "understudy-test/base", _root())


test_image.__test__ = False  # type: ignore[attr-defined]


@cache
def bare_image(engine: Engine) -> str:
    """The name of such an image without Python."""
    return _made(engine, "understudy-test/bare", _root(with_python=False))


def _made(engine: Engine, repository: str, root: _Root) -> str:
    digest = root.digest()
    name = f"{repository}:{digest}"
    with contextlib.closing(engine.client) as client, _lock("image.lock"):
        if not _has(client, name, digest):
            with tempfile.TemporaryFile(dir=HOME) as archive:
                root.tar(archive)
                archive.seek(0)
                changes = [f"ENV PATH={BASE_PATH}", f"LABEL {_LABEL}={digest}", 'CMD ["/bin/bash"]']
                client.api.import_image_from_data(archive, repository, digest, changes)
    return name


# --- images as SWE-bench has them -----------------------------------------------------------------------


def instance_name(instance_id: str, *, namespace: str = "swebench") -> str:
    """The name that SWE-bench gives to the image of an instance."""
    return f"{namespace}/sweb.eval.x86_64.{instance_id.lower().replace('__', '_1776_')}:latest"


def _git(where: Path, *args: str, when: int = 0) -> str:
    env = {
        "PATH": os.environ["PATH"],
        "HOME": "/nonexistent",
        "GIT_CONFIG_NOSYSTEM": "1",
        **{f"GIT_{who}_{what}": "example" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")},
        **{f"GIT_{who}_DATE": f"{1_500_000_000 + when} +0000" for who in ("AUTHOR", "COMMITTER")},
    }
    done = subprocess.run(["git", *args], cwd=where, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _lay(where: Path, files: Mapping[str, str | bytes]) -> None:
    for name, content in files.items():
        path = where / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        path.chmod(0o755 if name.endswith(".sh") else 0o644)


def leaky_repository(
    where: Path, files: Mapping[str, str | bytes], future: Mapping[str, str | bytes]
) -> tuple[str, str]:
    """Make a repository at `where` as images have them: at a base commit, with all that came later still in it.

    Returns the base commit and the last one of the future, which is seen as a tag, a branch, a remote's branch, a
    stash, ORIG_HEAD, and in the reflog.
    """
    where.mkdir(parents=True)
    _git(where, "init", "--quiet", "--template=", "--initial-branch=main")
    _git(where, "commit", "--quiet", "--allow-empty", "-m", "First")
    _git(where, "tag", "v0.1")
    _lay(where, files)
    _git(where, "add", "--all", "--force")
    _git(where, "commit", "--quiet", "--allow-empty", "-m", "Base", when=1)
    base = _git(where, "rev-parse", "HEAD")
    _git(where, "tag", "-a", "-m", "Release", "v1.0", when=2)
    _lay(where, {"CHANGES": "mended\n", **future})
    _git(where, "add", "--all", "--force")
    _git(where, "commit", "--quiet", "-m", "The fix", when=3)
    later = _git(where, "rev-parse", "HEAD")
    _git(where, "tag", "-a", "-m", "Release", "v2.0", when=4)
    _git(where, "branch", "fixed")
    _git(where, "remote", "add", "origin", "https://github.com/example/example")
    _git(where, "update-ref", "refs/remotes/origin/main", later)
    _git(where, "reset", "--quiet", "--hard", base)
    _lay(where, {"stashed": "of the future\n", **future})
    _git(where, "add", "--all", "--force")
    _git(where, "stash", "--quiet", when=5)
    return base, later


def instance_image(
    engine: Engine,
    instance_id: str,
    files: Mapping[str, str | bytes],
    *,
    future: Mapping[str, str | bytes] | None = None,
    namespace: str = "swebench",
    extra: Mapping[str, str | bytes] | None = None,
    user: str = "",
) -> InstanceImage:
    """An image as SWE-bench has them: `files` in a repository at /testbed, with `future` upon them.

    `extra` are files elsewhere by absolute path (one that ends in `.sh` is executable). What root owns is readable
    for all, as in the real ones. The image has the environment `testbed`, activated by
    `source /opt/miniconda3/bin/activate && conda activate testbed`, in which /testbed is importable.
    """
    base = test_image(engine)
    name = instance_name(instance_id, namespace=namespace)
    inputs = (
        base,
        instance_id,
        sorted(files.items()),
        sorted((future or {}).items()),
        sorted((extra or {}).items()),
    )
    digest = hashlib.sha256(repr((inputs, user, _FORMAT)).encode()).hexdigest()[:16]
    with tempfile.TemporaryDirectory() as room:
        root = Path(room, "root")
        base_commit, later = leaky_repository(root / "testbed", files, future or {})
        _lay(root, {path.lstrip("/"): content for path, content in (extra or {}).items()})
        with contextlib.closing(engine.client) as client, _lock("image.lock"):
            if not _has(client, name, digest):
                _layer(client, base, root, name, digest, user)
    return InstanceImage(name, base_commit, later)


def _layer(client: docker.DockerClient, base: str, root: Path, name: str, digest: str, user: str) -> None:
    """Commit `base` with everything below `root` laid over it as `name`."""

    def rooted(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = "root"
        return info

    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for path in sorted(root.iterdir()):
            tar.add(path, path.name, filter=rooted)
    container = client.api.create_container(base, command=["/bin/true"], network_disabled=True)["Id"]
    try:
        assert client.api.put_archive(container, "/", archive.getvalue())
        repository, _, tag = name.rpartition(":")
        path = f"PATH=/opt/miniconda3/bin:{BASE_PATH}"
        changes = [
            f"ENV {path}",
            "ENV PIP_NO_INDEX=1",
            f"LABEL {_LABEL}={digest}",
            "WORKDIR /testbed/",
            *([f"USER {user}"] if user else []),
        ]
        client.api.commit(container, repository, tag, changes=changes)
    finally:
        client.api.remove_container(container, force=True)
