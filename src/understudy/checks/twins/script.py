"""Runs versions of the hidden Python files of a check script (see `twins`) by the script itself.

The script runs once more, over a directory in which versions stand in place of its Python files and of the Python
in its here-documents, which count as files below the file that they stand in. Versions record themselves, as in
suites. What they observe outside of test functions counts as the file's own. The reward that the script writes is
not read, because versions never fail.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from understudy.checks.base import check_not_killed, output_tail, read_result_file
from understudy.checks.here_documents import here_documents, with_texts
from understudy.checks.script import REWARDS
from understudy.checks.shell_tests import is_shell_script, with_one_word_operands
from understudy.checks.twins.judge import load_observations
from understudy.checks.twins.neutral_names import by_original_names
from understudy.checks.twins.run import DRIVER_MOUNT, REPORT_BYTES, VersionRun, WrittenVersion, load_stopped
from understudy.checks.twins.suite import outcomes_of, self_reporting
from understudy.sandbox.base import Sandbox
from understudy.sandbox.process import has_ended, own_stamp
from understudy.types import ScriptChecks
from understudy.util.files import make_readable

_REPORT = "/var/tmp/understudy-observations.jsonl"
_VERSION = "version-"
_FILE_BYTES = 1 << 20
_MAX_FILES = 200


def hidden_contents(hidden: Path) -> dict[str, bytes]:
    """Return the contents of the script's files by their path: small ones, at most 200 of them.

    The texts of here-documents are apart from the files that they stand in.
    """
    paths = [path for path in sorted(hidden.rglob("*")) if path.is_file()]
    small = [path for path in paths if path.stat().st_size <= _FILE_BYTES]
    contents = {path.relative_to(hidden).as_posix(): path.read_bytes() for path in small[:_MAX_FILES]}
    for name in [name for name in contents if not name.endswith(".py")]:
        with suppress(UnicodeDecodeError):
            script = contents[name].decode()
            texts = {number: document.text for number, document in enumerate(here_documents(script))}
            contents[name] = with_texts(script, dict.fromkeys(texts, "")).encode()
            contents |= {f"{name}/{number}.py": text.encode() for number, text in texts.items()}
    return contents


def one_word_scripts(hidden: Path) -> dict[str, str]:
    """Return the script's shell scripts that are rewritten so that an expansion is one operand of a test (see
    `shell_tests`), by their path.
    """
    rewritten: dict[str, str] = {}
    for path in sorted(hidden.rglob("*")):
        if not path.is_file() or path.stat().st_size > _FILE_BYTES:
            continue
        content = path.read_bytes()
        if is_shell_script(path, content):
            with suppress(UnicodeDecodeError):
                script = content.decode()
                if (joined := with_one_word_operands(script)) != script:
                    rewritten[path.relative_to(hidden).as_posix()] = joined
    return rewritten


@contextmanager
def placed_one_word_scripts(hidden: Path) -> Generator[Path]:
    """Yield a copy of a script's directory with `one_word_scripts`, as `PreparedTask.hidden`; removed at the
    end.
    """
    with _copy_of(hidden) as copy:
        for name, text in one_word_scripts(hidden).items():
            _replace_text(copy / name, text)
        make_readable(copy.parent.parent)
        yield copy


@contextmanager
def placed_version(hidden: Path, version: WrittenVersion) -> Generator[Path]:
    """Yield a copy of a script's directory with a version in it, as `PreparedTask.hidden`; removed at the end."""
    with _copy_of(hidden) as copy:
        for name, text in version.files.items():
            path = copy / name
            source = self_reporting(text, name, DRIVER_MOUNT.target, _REPORT)
            if path.parent.is_file():  # a here-document
                number, path = int(path.stem), path.parent
                if source == text:
                    continue
                source = with_texts(path.read_text(encoding="utf-8"), {number: source})
            _replace_text(path, source)
        make_readable(copy.parent.parent)
        yield copy


def _replace_text(path: Path, text: str) -> None:
    mode = path.stat().st_mode
    path.unlink()  # it is a link to the original
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)


@contextmanager
def _copy_of(hidden: Path) -> Generator[Path]:
    """Yield a copy of a script's directory, of links to its files; removed at the end.

    Those of killed graders are removed here, because nothing else uses them.
    """
    versions = hidden.parent.parent
    for leftover in versions.glob(f"{_VERSION}*"):
        if has_ended(leftover.name.removeprefix(_VERSION).rpartition("-")[0]):
            shutil.rmtree(leftover, ignore_errors=True)  # another grader may be removing it
    prefix = f"{_VERSION}{own_stamp()}-"
    with tempfile.TemporaryDirectory(dir=versions, prefix=prefix) as directory:
        home = Path(directory, "version")
        shutil.copytree(hidden.parent, home, symlinks=True, copy_function=os.link)
        yield home / hidden.name


async def run_script_version(sandbox: Sandbox, checks: ScriptChecks, version: WrittenVersion) -> VersionRun:
    """Run the script in a sandbox in which a version (see `placed_version`) is mounted. Raises SandboxError."""
    await sandbox.run(["mkdir", "-p", REWARDS], timeout_s=30)
    completed = await sandbox.run(checks.command, timeout_s=checks.timeout_s, cwd=sandbox.workdir)
    check_not_killed(completed)
    raw = await read_result_file(sandbox, _REPORT, REPORT_BYTES) or b""
    outcomes, observations, stopped = await asyncio.to_thread(
        lambda: (outcomes_of(raw, {}, version.names), load_observations(raw), load_stopped(raw))
    )
    return VersionRun(
        version.sites,
        outcomes,
        by_original_names(observations, version.names),
        completed.exit_code,
        completed.timed_out,
        output_tail(completed),
        emptied=version.emptied,
        stopped=by_original_names(stopped, version.names),
    )
