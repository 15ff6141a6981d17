"""The requirements of a repository's tests: finds declared dependencies, and pins them with hashes."""

from __future__ import annotations

import configparser
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.tasks.environment import PINNED, TaskEnvironment, python_environment

_GROUPS = ("test", "tests", "testing")
_TIMEOUT_S = 600
# URLs, paths and options are refused: they would make pip fetch and run code that is not from the index.
_BY_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]* *(\[[\w ,.-]*\])? *\(?([<>=!~][^@;#]*)?\)? *(;[^@#]*)?")


class _Archive(Struct):
    hashes: dict[str, str] = field(default_factory=dict[str, str])


class _Download(Struct):
    archive_info: _Archive = field(default_factory=_Archive)


class _PackageMetadata(Struct):
    name: str
    version: str


class _Installed(Struct):
    metadata: _PackageMetadata
    download_info: _Download


class _Report(Struct):
    install: list[_Installed]


def declared_requirements(pyproject: str) -> list[str]:
    """Return the dependencies that a `pyproject.toml` declares, including its extras and groups for tests.

    For a file that cannot be parsed the list is empty.
    """
    try:
        data = tomllib.loads(pyproject)
    except tomllib.TOMLDecodeError:
        return []
    project = _table(data, "project")
    groups = {**_table(project, "optional-dependencies"), **_table(data, "dependency-groups")}
    lists = [project.get("dependencies"), *(groups.get(name) for name in _GROUPS)]
    return [line for requirements in lists for line in _strings(requirements)]


def pin(requirements: Iterable[str], *, cache: Path) -> tuple[str, ...]:
    """Return requirements as pip resolves them to wheels now, each `name==version --hash=sha256:…`, sorted.

    Packages that all tasks have (pytest and its dependencies) are kept at their versions and left out of the
    result. Nothing is built, so no code of a package runs. Raises ConfigError when pip cannot resolve them.
    """
    lines = [line.strip() for line in requirements if line.strip() and not line.lstrip().startswith("#")]
    for line in lines:
        # A line break would start another line in the file that pip reads.
        if not line.isprintable() or not _BY_NAME.fullmatch(line):
            raise ConfigError(
                f"requirement {line[:120]!r}: expected a package by its name, as `name>=1.0`, without options, "
                "URLs or a comment behind it; correct the line in the file of --requirements, or give such a file "
                "if the line is the repository's own"
            )
    lines = [line for line in lines if _normalised(re.split(r"[^A-Za-z0-9._-]", line)[0]) not in PINNED]
    if not lines:
        return ()
    python = Path(python_environment(cache).path_prefixes[0], "python")
    with tempfile.TemporaryDirectory(prefix="understudy-") as directory:
        requirements_file, constraints, report = (
            Path(directory, name) for name in ("wanted", "constraints", "report")
        )
        requirements_file.write_text("\n".join(lines) + "\n", encoding="utf-8")
        constraints.write_text("\n".join(f"{name}=={PINNED[name]}" for name in PINNED) + "\n", encoding="utf-8")
        command = [python, "-I", "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--dry-run"]
        command += [
            "--ignore-installed",
            "--only-binary=:all:",
            "--report",
            report,
            "-c",
            constraints,
            "-r",
            requirements_file,
        ]
        try:
            completed = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired as error:
            raise ConfigError(
                f"pip did not resolve the requirements {', '.join(lines)[:200]} within {_TIMEOUT_S} s; check the "
                "network and pip's settings (index, proxy), then run the same command again"
            ) from error
        except OSError as error:
            raise ConfigError(
                f"{python}: pip cannot be run there: {error.strerror}; delete {python.parents[1]}, which is made "
                "again by the next command"
            ) from error
        if completed.returncode:
            raise ConfigError(
                f"pip could not resolve the requirements {', '.join(lines)[:200]} from wheels; give those that "
                "the tests need with --requirements FILE (with only comments in it: none). pip "
                f"said:\n{completed.stderr.strip()[-2000:]}"
            )
        resolved = msgspec.json.decode(report.read_bytes(), type=_Report)
    pins: list[str] = []
    for package in resolved.install:
        name = _normalised(package.metadata.name)
        if name not in PINNED:
            digest = package.download_info.archive_info.hashes["sha256"]
            pins.append(f"{name}=={package.metadata.version} --hash=sha256:{digest}")
    return tuple(sorted(pins))


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pytest_options(environment: TaskEnvironment) -> str:
    """Return the options for PYTEST_ADDOPTS that load an environment's pytest plugins by name; "" if there are
    none.

    Checks run without automatic loading of plugins, but a repository's configuration may need its plugins.
    """
    names: list[str] = []
    for file in sorted(Path(environment.path_prefixes[0]).parent.glob("lib/*/site-packages/*/entry_points.txt")):
        entries = configparser.ConfigParser(delimiters=("=",), interpolation=None, strict=False)
        entries.optionxform = str  # type: ignore[assignment,method-assign]
        entries.read_string(file.read_text(encoding="utf-8"))
        if entries.has_section("pytest11"):
            names += entries.options("pytest11")
    return " ".join(f"-p {name}" for name in names)


def _table(data: dict[str, Any], key: str) -> dict[str, Any]:
    value: Any = data.get(key)
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _strings(value: object) -> list[str]:
    items = cast("list[object]", value) if isinstance(value, list) else []
    return [item for item in items if isinstance(item, str)]
