"""How often honest patches are called forged or suspicious.

    python bench/honest.py audit REPOSITORY... [--commits N] [--half develop|final] [--json FILE]
    python bench/honest.py functions SDIST... [--half develop|final] [--json FILE]
    python bench/honest.py grade TASKS... [--half develop|final] [--jobs N] [--json FILE]

`audit` takes git repositories of Python packages (clones or bare ones). Every commit that changes tests and other
Python code is a right solution of its own tests: its code is audited over its parent's tree as it is, with scratch
files beside it, and rewritten in equivalent ways, and no gold patch excuses anything. Nothing of it is run.

`functions` takes source distributions of Python packages. Each function outside of their tests is audited as a
patch that writes its body, again without a gold patch that excuses anything.

`grade` takes task files (as `understudy tasks make` writes them). Each task is validated, then its gold patch,
the same with scratch files, and its rewritings are graded in full, with twins. A rewriting that does not pass the
tests as they are is no honest patch and is counted apart.

Whether a repository, package or task belongs to the half for development or to the final one depends on its name
alone.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import hashlib
import io
import json
import random
import re
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.protection import protection_of
from understudy.checks.twins.test_ids import deciding_tests
from understudy.config import cache_dir
from understudy.errors import UnderstudyError
from understudy.grade.audit import audit
from understudy.grade.gate import gate
from understudy.grade.verdict import grade, validate
from understudy.sandbox.base import load_sandboxes
from understudy.tasks.environment import environment_for
from understudy.tasks.load import load_tasks
from understudy.tasks.prepare import PreparedTask, prepare
from understudy.types import Files, Integrity, PytestChecks, SuiteChecks, Task, Verdict

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.grading import diff
from support.honest import REWRITINGS, SCRATCH, rewrite

TEST_PARTS = ("test", "tests", "testing", "conftest.py")


class Outcome(Struct, frozen=True):
    """What became of one honest patch."""

    name: str
    kind: str
    status: str
    reward: float
    protection: str
    reason: str


def is_in_half(name: str, half: str) -> bool:
    """Whether a name belongs to a half; every name to the half ''."""
    final = hashlib.sha256(name.encode()).digest()[0] % 2 == 1
    return not half or final == (half == "final")


# --- patches


def variants(before: Mapping[str, str], after: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    """Honest patches that do what the one from `before` to `after` does: the kind of each, and its text."""
    yield "as it is", diff(after, before)
    yield "with scratch files", diff({**after, **SCRATCH}, before)
    together, applied = dict(after), 0
    for how in REWRITINGS:
        if written := _rewritten_files(after, before, how):
            yield how, diff(written, before)
        if more := _rewritten_files(together, before, how):
            together, applied = more, applied + 1
    if applied > 1:
        yield "all rewritings", diff(together, before)
        yield "all rewritings, with scratch files", diff({**together, **SCRATCH}, before)


def _rewritten_files(
    after: Mapping[str, str | None], before: Mapping[str, str], how: str
) -> dict[str, str | None] | None:
    """The files with those functions rewritten that the patch changes; None if that changes none of them."""
    written = {path: text and _rewritten(path, text, before.get(path, ""), how) for path, text in after.items()}
    return {path: written[path] or text for path, text in after.items()} if any(written.values()) else None


def _rewritten(path: str, text: str, before: str, how: str) -> str | None:
    """A file with those functions rewritten that the patch changes."""
    old = set(before.split("\n"))
    new = [number for number, line in enumerate(text.split("\n"), 1) if line not in old]

    def is_changed(function: ast.stmt) -> bool:
        return any(function.lineno <= number <= (function.end_lineno or 0) for number in new)

    try:
        return rewrite(text, how, is_changed) if path.endswith(".py") else None
    except SyntaxError:
        return None


# --- the audit


def git(repository: Path, *arguments: str) -> bytes:
    """What git prints. Raises CalledProcessError."""
    command = ["git", "-c", "core.fsmonitor=", "-C", str(repository), *arguments]
    return subprocess.run(command, capture_output=True, check=True).stdout


def commits(repository: Path, count: int) -> list[str]:
    """Up to `count` commits, drawn at random, that change both tests and other Python code."""
    log = git(repository, "log", "--no-merges", "--format=%x00%H", "--name-only", "--", "*.py").decode(
        errors="replace"
    )
    chosen: list[str] = []
    for entry in log.split("\0")[1:]:
        commit, *paths = entry.split()
        kinds = {is_of_tests(path) for path in paths}
        if kinds == {True, False} and len(paths) <= 12:
            chosen.append(commit)
    random.Random(len(chosen)).shuffle(chosen)
    return chosen[:count]


def is_of_tests(path: str) -> bool:
    """Whether a path is one of tests, by the names of its parts."""
    name = path.rpartition("/")[2]
    return any(part in TEST_PARTS for part in path.split("/")) or name.startswith("test_") or "_test.py" in name


def audit_commit(repository: Path, commit: str) -> Iterator[Outcome]:
    """The audit's word on the code of a commit in each of its variants."""
    paths = git(repository, "diff", "--name-only", "-z", f"{commit}~", commit).decode(errors="replace").split("\0")
    code = [path for path in paths if path and not is_of_tests(path)]
    tests = [path for path in paths if path and is_of_tests(path)]
    with tempfile.TemporaryDirectory(prefix="understudy-honest-") as directory:
        tree = Path(directory)
        with tarfile.open(fileobj=io.BytesIO(git(repository, "archive", f"{commit}~"))) as archive:
            archive.extractall(tree, filter="data")
        before = {path: text for path in code if (text := _text(tree / path)) is not None}
        after = {path: _at(repository, commit, path) for path in code}
        names = tuple(
            dict.fromkeys(
                _test_names(
                    git(repository, "diff", "--binary", f"{commit}~", commit, "--", *tests).decode(
                        errors="replace"
                    )
                )
            )
        )
        task = Task(
            instance_id=commit[:12],
            repo=repository.name,
            instruction="mend it",
            source=Files({}),
            checks=SuiteChecks(
                files=tuple(tests),
                test_patch=git(repository, "diff", "--binary", f"{commit}~", commit, "--", *tests).decode(
                    errors="replace"
                ),
                parser="parse_log_pytest",
                command="pytest -rA " + " ".join(tests),
                fail_to_pass=names,
            ),
            gold_patch="",
            workdir="/testbed",
        )
        for kind, patch in variants(before, after):
            content = patch.encode(errors="surrogateescape")
            gated = gate(content, replace(task, gold_patch=diff(after, before)), tree)
            integrity = audit(content, task, gated, Verdict(reward=1.0, reason=""), tree)
            evidence = "; ".join(
                f"{each.path}:{each.line} {each.rule}: {each.text}" for each in integrity.evidence
            )
            if integrity.status != "clean":
                print(f"{integrity.status}: {commit[:12]} ({kind}): {evidence[:300]}", file=sys.stderr)
            yield Outcome(f"{repository.parent.name}@{commit[:12]}", kind, integrity.status, 1.0, "", evidence)


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8") if path.is_file() and not path.is_symlink() else None
    except UnicodeDecodeError:
        return None


def _at(repository: Path, commit: str, path: str) -> str | None:
    try:
        return git(repository, "show", f"{commit}:{path}").decode()
    except (subprocess.CalledProcessError, UnicodeDecodeError):
        return None


def _test_names(patch: str) -> Iterator[str]:
    for line in patch.split("\n"):
        if line.startswith("+") and (tokens := line[1:].split()) and tokens[0] == "def" and len(tokens) > 1:
            name = tokens[1].partition("(")[0]
            if name.startswith("test_"):
                yield f"tests.py::{name}"


def run_audit(repositories: list[Path], count: int, half: str) -> list[Outcome]:
    """The audit's word on honest patches of repositories."""
    outcomes: list[Outcome] = []
    for repository in repositories:
        if not is_in_half(repository.parent.name, half):
            continue
        for commit in commits(repository, count):
            try:
                outcomes += audit_commit(repository, commit)
            except (subprocess.CalledProcessError, tarfile.TarError, OSError, UnderstudyError) as error:
                print(f"{repository}: {commit[:12]} is left out: {error}", file=sys.stderr)
        print(f"{repository}: {len(outcomes)} patches so far", file=sys.stderr)
    return outcomes


# --- the audit of functions


def run_functions(archives: list[Path], half: str) -> list[Outcome]:
    """The audit's word on each function of packages."""
    outcomes: list[Outcome] = []
    for archive in archives:
        name = re.sub(r"[-_.]+", "-", archive.name.rpartition("-")[0]).lower()
        if is_in_half(name, half):
            with tempfile.TemporaryDirectory(prefix="understudy-honest-") as directory:
                with tarfile.open(archive) as tar:
                    tar.extractall(directory, filter="data")
                outcomes += audit_functions(name, next(Path(directory).iterdir()))
            print(f"{name}: {len(outcomes)} functions so far", file=sys.stderr)
    return outcomes


def audit_functions(package: str, tree: Path) -> Iterator[Outcome]:
    """The audit's word on each function of a package as a patch that writes its body."""
    paths = [path.relative_to(tree) for path in sorted(tree.rglob("*.py"))]
    texts = {path.as_posix(): text for path in paths if (text := _text(tree / path)) is not None}
    tests = [
        f"{path}::{name}"
        for path, text in texts.items()
        if is_of_tests(path)
        for name in re.findall(r"^\s*(?:async )?def (test\w*)", text, re.MULTILINE)
    ]
    task = Task(
        instance_id=package,
        repo=package,
        instruction="write it",
        source=Files({}),
        checks=PytestChecks(files={}, fail_to_pass=tuple(tests) or ("tests/test_it.py::test_it",)),
        gold_patch="",
    )
    for path, text in texts.items():
        if "/" in path and not is_of_tests(path) and not path.startswith(("docs/", "examples/")):
            yield from _audit_module(task, tree, path, text)


def _audit_module(task: Task, tree: Path, path: str, text: str) -> Iterator[Outcome]:
    def integrity_without(lines: set[int]) -> Integrity:
        before = _without_bodies(text, lines)
        (tree / path).write_text(before, encoding="utf-8")
        patch = diff({path: text}, {path: before})
        gated = gate(patch.encode(), replace(task, gold_patch=patch), tree)
        integrity = audit(patch.encode(), task, gated, Verdict(reward=1.0, reason=""), tree)
        (tree / path).write_text(text, encoding="utf-8")
        return integrity

    try:
        functions = {function.lineno for function in _functions(text)}
    except (SyntaxError, ValueError):
        return  # of Python 2, or a template
    all_clean = integrity_without(functions).status == "clean"
    for line in sorted(functions):
        integrity = Integrity("clean") if all_clean else integrity_without({line})
        evidence = "; ".join(f"{each.line} {each.rule}: {each.text}" for each in integrity.evidence)
        yield Outcome(f"{task.repo}: {path}:{line}", "function", integrity.status, 1.0, "", evidence)


def _functions(text: str) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Return the functions that are in no other one and whose body begins on a line of its own."""
    found: list[ast.FunctionDef | ast.AsyncFunctionDef] = []
    open_nodes: list[ast.AST] = [ast.parse(text)]
    while open_nodes:
        for child in ast.iter_child_nodes(open_nodes.pop()):
            if not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                open_nodes.append(child)
            elif child.body[0].lineno > child.lineno:
                found.append(child)
    return found


def _without_bodies(text: str, lines: set[int]) -> str:
    """Return a module whose functions that begin in these lines only raise NotImplementedError."""
    rows = text.split("\n")
    for function in sorted(_functions(text), key=lambda function: -function.lineno):
        if function.lineno in lines:
            first = function.body[0]
            start = min([first.lineno, *(each.lineno for each in getattr(first, "decorator_list", ()))])
            indent = " " * first.col_offset
            rows[start - 1 : function.end_lineno] = [f"{indent}raise NotImplementedError"]
    return "\n".join(rows)


# --- grading


async def run_grading(specs: list[str], half: str, jobs: int) -> list[Outcome]:
    """Verdicts on the honest patches of tasks."""
    sandboxes = load_sandboxes("local")
    cache = cache_dir()
    loaded = await load_tasks(specs, sandboxes=sandboxes, cache=cache)
    slots = asyncio.Semaphore(jobs)
    outcomes: list[Outcome] = []

    async def one(prepared: PreparedTask, environment: Any, kind: str, patch: str) -> None:
        async with slots:
            verdict = await grade(prepared, patch.encode(), sandboxes=sandboxes, environment=environment)
        solved = bool(verdict.tests) and all(each in ("passed", "skipped") for each in verdict.tests.values())
        status = verdict.integrity.status if solved or verdict.reward else "does not solve"
        reason = verdict.reason + "; " + "; ".join(each.text for each in verdict.integrity.evidence)
        outcome = Outcome(prepared.task.instance_id, kind, status, verdict.reward, verdict.protection, reason)
        outcomes.append(outcome)
        print(outcome.status, outcome.name, f"({kind}): {reason[:500]}", file=sys.stderr)

    for task in loaded.tasks:
        if not is_in_half(task.instance_id, half):
            continue
        environment = environment_for(sandboxes, cache)
        prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
        try:
            prepared = await validate(prepared, sandboxes=sandboxes, environment=environment, cache=cache)
        except UnderstudyError as error:
            print(f"{task.instance_id} is left out: {error}", file=sys.stderr)
            continue
        coverage(prepared)
        before, after = await asyncio.to_thread(_sides, prepared)
        await asyncio.gather(*(one(prepared, environment, *each) for each in variants(before, after)))
    return outcomes


def coverage(prepared: PreparedTask) -> None:
    """Print how many of a task's deciding tests have twins."""
    checks, options = prepared.task.checks, prepared.options
    if not isinstance(checks, PytestChecks | SuiteChecks):
        return
    deciding = [*checks.fail_to_pass, *checks.pass_to_pass]
    nodes = deciding_tests(prepared.task, options).nodes
    with_twins = sum(nodes.get(test) in options.twins for test in deciding)
    partial = sum(nodes.get(test) in options.partial_twins for test in deciding)
    level, reason = protection_of(prepared.task, options)
    print(
        f"twins {prepared.task.instance_id}: {len(deciding)} deciding tests, {with_twins} with twins, "
        f"{partial} of these can be read or forced in part; {len(options.twin_inputs)} other inputs; "
        f"{level} {reason}",
        flush=True,
    )


def _sides(prepared: PreparedTask) -> tuple[dict[str, str], dict[str, str | None]]:
    """The files that the gold patch changes, before and after it."""
    from understudy.grade.changed_files import changed_files

    files = changed_files(prepared.task.gold_patch.encode(), prepared.tree).files
    before = {each.path: each.before.decode() for each in files if each.before is not None}
    return before, {each.path: None if each.after is None else each.after.decode() for each in files}


# --- the report


def report(outcomes: list[Outcome]) -> None:
    """Print counts by kind, and each patch that is called something else than clean."""
    table = Counter((each.kind, each.status) for each in outcomes)
    for (kind, status), count in sorted(table.items()):
        print(f"{count:5}  {kind:20}  {status}")
    for each in outcomes:
        if each.status not in ("clean", "does not solve"):
            print(f"{each.status}: {each.name} ({each.kind}): {each.reason}"[:600])
    honest = [each for each in outcomes if each.status != "does not solve"]
    wrong = Counter(each.status for each in honest)
    print(f"{len(honest)} honest patches: {wrong['forged']} forged, {wrong['suspicious']} suspicious")


def main() -> None:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("audit", "functions", "grade"))
    parser.add_argument("sources", nargs="+")
    parser.add_argument("--commits", type=int, default=20, help="of each repository")
    parser.add_argument("--half", choices=("develop", "final"), default="")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.what == "audit":
        outcomes = run_audit([Path(source) for source in options.sources], options.commits, options.half)
    elif options.what == "functions":
        outcomes = run_functions([Path(source) for source in options.sources], options.half)
    else:
        outcomes = asyncio.run(run_grading(options.sources, options.half, options.jobs))
    report(outcomes)
    if options.json:
        rows = [{name: getattr(each, name) for name in each.__struct_fields__} for each in outcomes]
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
