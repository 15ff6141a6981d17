"""The Python that drives Claude Code through its SDK inside any sandbox: made once in the cache, then mounted.

It is this machine's own Python with all that it needs beside it, the C library and its loader too, so that it
runs in container images with another Python, or with none.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError, TaskError
from understudy.tasks.environment import python_environment
from understudy.tasks.materialise import materialise
from understudy.types import Sdist
from understudy.util.locks import locked, make_readable

# Its wheels hold a Claude Code of 360 MiB, which is not used here; the source has only the SDK.
SDK = Sdist("claude-agent-sdk", "0.2.186", "16cb01af8309d371aae7c214b69d1a85f283a5aed06fc16054c1bc356c92f7a3")
_PINS = Path(__file__).with_name("claude_sdk.txt")
_DRIVER = Path(__file__).with_name("claude_sdk_driver.py")
_TIMEOUT_S = 600
_NOT_NEEDED = (
    "__pycache__",
    "config-*",
    "dist-packages",
    "ensurepip",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
    "_test*.so",
    "_tkinter*.so",
    "_xx*.so",
    "xx*.so",
)
"""What of the standard library is left behind."""
_LIBRARY = re.compile(r"^\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
"""A line of ldd; the loader's has no arrow."""


def problems() -> list[str]:
    """Why this machine's Python cannot be taken into sandboxes; empty when it can."""
    if platform.libc_ver()[0] != "glibc":
        return ["--run-method python needs a Linux with glibc; use --run-method cli"]
    if shutil.which("ldd") is None:
        return ["--run-method python needs ldd to find the libraries of Python (Debian: apt-get install libc-bin)"]
    return []


def command(root: str) -> list[str]:
    """The command that runs the driver, when the runtime is seen at `root`."""
    return [
        f"{root}/lib/loader",
        "--inhibit-cache",
        "--library-path",
        f"{root}/lib",
        f"{root}/python/bin/python",
        *("-I", "-S", "-B", "-X", "utf8"),
        f"{root}/driver.py",
    ]


def runtime(cache: Path) -> Path:
    """The directory to mount; made under `cache` on the first call (half a minute, network).

    Raises ConfigError when it cannot be made.
    """
    home = _home(cache)
    if home.exists():
        return home
    with locked(home.with_suffix(".lock")):
        if not home.exists():
            if issues := problems():
                raise ConfigError(issues[0])
            with tempfile.TemporaryDirectory(prefix=".make-", dir=home.parent) as temporary:
                staging = Path(temporary, "runtime")
                try:
                    _build_runtime(staging, cache)
                except (OSError, subprocess.SubprocessError, shutil.Error, TaskError) as error:
                    raise ConfigError(
                        f"{home}: the Python for --run-method python could not be made ({error}); it needs 300 "
                        f"MiB of room and the package index; run the same command again, or use --run-method cli"
                    ) from error
                staging.rename(home)
    return home


def _home(cache: Path) -> Path:
    parts = (sys.version, sys.base_prefix, *platform.libc_ver(), repr(SDK), _PINS.read_text(), _DRIVER.read_text())
    return cache.absolute() / "claude-sdk" / hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build_runtime(root: Path, cache: Path) -> None:
    (root / "lib").mkdir(parents=True)
    _copy_python(root / "python")
    _install(root / "site", cache)
    unpacked = root / "sdk"
    materialise(SDK, unpacked, cache)
    (unpacked / "src" / "claude_agent_sdk").rename(root / "site" / "claude_agent_sdk")
    (unpacked / "LICENSE").rename(root / "site" / "claude_agent_sdk" / "LICENSE")
    shutil.rmtree(unpacked)
    shutil.copyfile(_DRIVER, root / "driver.py")
    _copy_libraries(root)
    _run(*command(str(root))[:-1], "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", root)
    make_readable(root)


def _copy_python(python: Path) -> None:
    """The interpreter and its library in the same places below a prefix of their own, from which it finds them."""
    base = Path(sys.base_prefix)
    bases: dict[str, Any] = dict.fromkeys(("installed_base", "base", "installed_platbase", "platbase"), str(base))
    (python / "bin").mkdir(parents=True)
    # In a virtual environment this is a link to the interpreter itself.
    shutil.copy2(Path(sys.executable).resolve(), python / "bin" / "python")
    for name in ("stdlib", "platstdlib"):
        source = Path(sysconfig.get_path(name, vars=bases))
        shutil.copytree(
            source,
            python / source.relative_to(base),
            ignore=shutil.ignore_patterns(*_NOT_NEEDED),
            ignore_dangling_symlinks=True,
            dirs_exist_ok=True,
        )


def _install(site: Path, cache: Path) -> None:
    pip = [Path(python_environment(cache).path_prefixes[0], "python"), "-m", "pip", "install", "--quiet"]
    pip += ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-compile"]
    _run(*pip, "--target", site, "-r", _PINS)


def _copy_libraries(root: Path) -> None:
    """Every shared library that the interpreter and its modules are linked with, and the loader as `loader`."""
    modules = [*root.rglob("*.so")]
    listed = _run("ldd", root / "python" / "bin" / "python", *modules, check=False)
    loader = ""
    for match in _LIBRARY.finditer(listed):
        path = Path(match["path"])
        if match["name"] is None:
            loader = match["path"]
        elif not path.is_relative_to(root):
            shutil.copyfile(path, root / "lib" / Path(match["name"]).name)
    if not loader:
        raise OSError("ldd names no loader: this Python is linked statically")
    shutil.copyfile(loader, root / "lib" / "loader")
    (root / "lib" / "loader").chmod(0o755)


def _run(*argv: str | Path, check: bool = True) -> str:
    """What a command printed. Raises OSError with its last words when it failed."""
    done = subprocess.run(
        list(map(str, argv)),
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if check and done.returncode:
        tail = "\n".join((done.stderr or done.stdout).strip().splitlines()[-5:])
        raise OSError(f"{Path(argv[0]).name} ended with exit code {done.returncode}: {tail}")
    return done.stdout
