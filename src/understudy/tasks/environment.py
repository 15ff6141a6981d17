"""The Python environment for tasks: a virtual environment with a pinned pytest, created once in the cache."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import venv
from pathlib import Path

from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.sandbox.base import Mount, Sandboxes
from understudy.util.files import locked, make_readable

# All are pure Python wheels, so the same hashes are right on every machine.
_PINS = """\
iniconfig==2.1.0 --hash=sha256:9deba5723312380e77435581c6bf4935c94cbfab9b1ed33ef8d238ea168eb760
packaging==25.0 --hash=sha256:29572ef2b1f17581046b3a2227d5c611fb25ec70ca1ba8554b24b0e69331a484
pip==26.3 --hash=sha256:f3b60b20ffaadd4415ed7957212a38ac63fa4c5fa375bd0f4a797777940fad13
pluggy==1.6.0 --hash=sha256:e920276dd6813095e9377c0bc5566d94c932c33b27a3e3945d8389c374dd4746
pygments==2.19.2 --hash=sha256:86540386c03d588bb81d44bc3928634ff26449851e99741617ecb9037ee5ec0b
pytest==8.4.2 --hash=sha256:872f880de3fc3a5bdc88a11b39c9710c3497a547cfa9320bc3c5e62fbf272e79
"""
PINNED = {name: version for name, _, version in (line.split()[0].partition("==") for line in _PINS.splitlines())}
"""Name → version of what every task's environment has."""

_PIP_TIMEOUT_S = 600


class TaskEnvironment(Struct, frozen=True):
    """What a sandbox needs to run a task's program and tests: mounts, directories for PATH, variables."""

    mounts: tuple[Mount, ...] = ()
    path_prefixes: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict[str, str])


def environment_for(sandboxes: Sandboxes, cache: Path) -> TaskEnvironment:
    """Return what sandboxes of this kind need in addition: a Python of their machine, or nothing if they use
    images.

    Raises ConfigError when it cannot be created, SandboxError when a remote machine does not respond.
    """
    if (host := sandboxes.host_environment()) is not None:
        return TaskEnvironment(host.mounts, host.path_prefixes, host.env)
    return python_environment(cache) if sandboxes.host_programs else TaskEnvironment()


def python_environment(cache: Path, packages: tuple[str, ...] = ()) -> TaskEnvironment:
    """Return the running Python with a pinned pytest. The first call creates it under `cache` (some seconds,
    network).

    `packages` are further requirements with hashes, one each; they are installed from wheels only, so that none of
    their code runs here. Raises ConfigError when it cannot be created.
    """
    prefix = Path(sys.base_prefix).resolve()
    requirements = "\n".join((_PINS.rstrip("\n"), *packages, ""))
    home = _environment_directory(cache, prefix, requirements)
    ready = home / "ready"
    if not ready.exists():
        with locked(home.with_suffix(".lock")):
            if not ready.exists():
                # A virtual environment contains its own path, so it is created in place, and created again if it
                # is incomplete.
                shutil.rmtree(home, ignore_errors=True)
                _create(home, requirements)
                ready.touch()
    mounts = [Mount(home, str(home))]
    if not prefix.is_relative_to("/usr"):  # every sandbox mounts /usr already
        mounts.append(Mount(prefix, str(prefix)))
    env = {"PYTHONDONTWRITEBYTECODE": "1", "PYTHONHASHSEED": "0"}
    return TaskEnvironment(tuple(mounts), (str(home / "bin"),), env)


def is_installed(cache: Path) -> bool:
    """Return whether `python_environment` would find everything installed."""
    return (_environment_directory(cache, Path(sys.base_prefix).resolve(), _PINS) / "ready").exists()


def _environment_directory(cache: Path, prefix: Path, requirements: str) -> Path:
    key = "\n".join((sys.version, str(prefix), requirements))
    return cache.absolute() / "envs" / hashlib.sha256(key.encode()).hexdigest()[:16]


def _interrupted(home: Path, number: int) -> str:
    """Return the text about a program that a signal ended while it made the environment."""
    return (
        f"{home}: making the Python environment for tasks was interrupted by signal {number}; run the same "
        "command again"
    )


def _create(home: Path, requirements: str) -> None:
    file = home / "requirements.txt"
    argv = [home / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    argv += ["--no-deps", "--only-binary=:all:", "--require-hashes", "-r", file]
    try:
        venv.EnvBuilder(with_pip=True, symlinks=True).create(home)
        file.write_text(requirements, encoding="utf-8")
        pip = subprocess.run(argv, capture_output=True, text=True, timeout=_PIP_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise ConfigError(
            f"{home}: pip did not install the pinned packages for tasks within {_PIP_TIMEOUT_S} s; check the "
            "network and pip's settings (index, proxy), then run the same command again"
        ) from error
    except (OSError, subprocess.SubprocessError) as error:
        if isinstance(error, subprocess.CalledProcessError) and error.returncode < 0:
            raise ConfigError(_interrupted(home, -error.returncode)) from error
        raise ConfigError(
            f"{home}: the Python environment for tasks could not be made ({error}); install venv and ensurepip "
            "(Debian: apt-get install python3-venv), or, if this directory is not writable, set UNDERSTUDY_CACHE "
            "to one that is"
        ) from error
    if pip.returncode < 0:
        raise ConfigError(_interrupted(home, -pip.returncode))
    if pip.returncode:
        raise ConfigError(
            f"{home}: pip could not install the pinned packages for tasks; check the network and pip's settings "
            f"(index, proxy), then run the same command again. pip said:\n{pip.stderr.strip()[-2000:]}"
        )
    make_readable(home)
