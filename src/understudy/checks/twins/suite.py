"""Runs versions of a suite's hidden test files (see `twins`) by the suite's own command.

The suite's runner is neither changed nor involved: each test function of a version reports itself that it runs,
and the version's files write their observations to a file in the sandbox (`twin_driver.record`).
"""

from __future__ import annotations

import ast
import asyncio
import json
import posixpath
import secrets
from collections.abc import Callable, Mapping
from types import MappingProxyType

from understudy.checks.base import log_tail, read_result_file, report_lines
from understudy.checks.seal import HiddenFiles, changed_files, list_tree, read_hidden, rewrite_hidden
from understudy.checks.suite import install_suite, run_command
from understudy.checks.twins.judge import load_observations
from understudy.checks.twins.neutral_names import by_original_names, original_node
from understudy.checks.twins.run import DRIVER_MOUNT, REPORT_BYTES, VersionRun, WrittenVersion, load_stopped
from understudy.checks.twins.sites import IMPORT
from understudy.checks.twins.test_ids import DecidingTests, functions_of_tests
from understudy.sandbox.base import Sandbox
from understudy.types import SuiteChecks, Task, TestOutcome
from understudy.util.python_syntax import parse_module, unparse

_LOAD = """\
def _load_():
    import importlib.util
    import sys
    if "understudy_sites" not in sys.modules:
        spec = importlib.util.spec_from_file_location("understudy_sites", {driver!r})
        module = sys.modules["understudy_sites"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        module.record({report!r})
_load_()
{imports}, program as _program_, running as _running_
_program_({file!r})
"""


def self_reporting(source: str, file: str, driver: str, report: str) -> str:
    """Return a version's source in which tests report their start and end, and observations are written to
    `report`.

    `driver` is the path of `twin_driver.py`, and `file` the version's path in the tree, with which the names of
    its tests begin. A source that is not a version is returned unchanged.
    """
    if IMPORT not in source:
        return source
    tree = parse_module(source)
    for owner, function in functions_of_tests(tree):
        parameters = [*function.args.posonlyargs, *function.args.args]
        names: list[ast.expr] = [ast.Constant(file), ast.Constant(function.name)]
        if owner and parameters:  # the running class may be a subclass that inherits the test
            names.append(ast.Name(parameters[0].arg, ast.Load()))
        elif owner:
            names[1] = ast.Constant("::".join((*owner, function.name)))
        context = ast.Call(ast.Name("_running_", ast.Load()), names, [])
        function.body = [ast.With([ast.withitem(context)], function.body)]
    loader = _LOAD.format(driver=driver, report=report, imports=IMPORT, file=file)
    return unparse(ast.fix_missing_locations(tree)).replace(IMPORT, loader, 1) + "\n"


async def run_suite_version(
    sandbox: Sandbox,
    task: Task,
    checks: SuiteChecks,
    patch: bytes,
    version: WrittenVersion,
    tests: DecidingTests,
    is_intruder: Callable[[str], bool],
    *,
    sealed: bool,
) -> VersionRun:
    """Place a version over the hidden files, install if the patch requires it, and run the suite.

    With `sealed`, the files are read-only during the run and compared afterwards. The gated `patch` and the test
    patch must have been applied in this sandbox, and no code of the patch may have run. Raises GraderError,
    SandboxError.
    """
    report = posixpath.join(sandbox.home, f".report-{secrets.token_hex(16)}.jsonl")
    driver = sandbox.locate(DRIVER_MOUNT.target)
    files = dict(await read_hidden(sandbox, task))
    for name, text in version.files.items():
        files[name] = (await asyncio.to_thread(self_reporting, text, name, driver, report)).encode()
    await rewrite_hidden(sandbox, files, await list_tree(sandbox), is_intruder)
    run = await install_suite(sandbox, checks, patch, files, is_intruder)
    compared: HiddenFiles = files if sealed else {}
    if run is None:
        await sandbox.seal([name for name, content in compared.items() if content is not None])
        run = await run_command(sandbox, checks, checks.command)
    changed = tuple(await changed_files(sandbox, compared))
    raw = await read_result_file(sandbox, report, REPORT_BYTES) or b""
    outcomes, observations, stopped = await asyncio.to_thread(
        lambda: (outcomes_of(raw, tests.calls, version.names), load_observations(raw), load_stopped(raw))
    )
    return VersionRun(
        version.sites,
        outcomes,
        by_original_names(observations, version.names),
        run.exit_code,
        run.timed_out,
        log_tail(run.log),
        changed,
        version.emptied,
        by_original_names(stopped, version.names),
    )


def outcomes_of(
    raw: bytes, calls: Mapping[str, int], names: Mapping[str, Mapping[str, str]] = MappingProxyType({})
) -> dict[str, TestOutcome]:
    """Return for each test, by its own name (see `original_node`), whether as many calls as expected came to their
    end.
    """
    passed_calls: dict[str, list[bool]] = {}
    for line in report_lines(raw, json.loads):
        match line:
            case {"test": str(node), "passed": bool(passed)}:
                passed_calls.setdefault(original_node(node, names), []).append(passed)
            case _:
                pass
    return {
        node: "passed" if all(results) and calls.get(node, len(results)) == len(results) else "failed"
        for node, results in passed_calls.items()
    }
