"""What a verdict costs: from patch to verdict, and what Docker adds, beside SWE-bench's own harness.

    python bench/grading.py [--quick] [--json FILE]

Local: the gold patch of a shipped instance of a pure-Python package is graded again and again, its tree prepared
before, as it is in a run. Docker: one instance in an image made of this machine's files is graded by us and, in
the same engine, by the official harness (swebench, in a virtual environment of its own, which is made in the
cache). What counts there is the overhead: all the wall clock of an instance, from before its container is created
until it is gone, but for what installs and tests; the harness's is read from its own log. `--quick` takes few
rounds, and the harness only where it is installed. The figures go to bench/results/grading.json unless `--json`
says where.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import datetime
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from understudy.checks.twins.templates import draw_versions, make_templates
from understudy.checks.twins.test_ids import deciding_tests
from understudy.config import cache_dir
from understudy.grade.official import MODULE, problems
from understudy.grade.verdict import grade, validate
from understudy.sandbox.base import Sandboxes, load_sandboxes
from understudy.tasks.environment import environment_for
from understudy.tasks.load import load_tasks
from understudy.tasks.prepare import PreparedTask, hidden_mounts, prepare, sandbox_spec
from understudy.types import Task

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

INSTANCE = "understudy__inflection-1"
SWEBENCH = "swebench==5.0.2"
VERDICT_TARGET_S, OVERHEAD_TARGET_S = 1.5, 0.8
ROUNDS, QUICK_ROUNDS = 15, 3
HARNESS_ROUNDS, QUICK_HARNESS_ROUNDS = 3, 1
_STAMP = re.compile(r"^(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}) - INFO - (.*)", re.MULTILINE)


def machine() -> str:
    """The machine in words."""
    return f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, Linux {platform.release()}"


def spread(seconds: list[float]) -> dict[str, float]:
    """Median and extremes, in seconds."""
    return {
        "median": round(statistics.median(seconds), 3),
        "min": round(min(seconds), 3),
        "max": round(max(seconds), 3),
    }


def cpu_s() -> float:
    """Seconds of CPU time of this process and of the processes that it has waited for, as local sandboxes are."""
    return sum(os.times()[:4])


async def ready(task: Task, sandboxes: Sandboxes) -> PreparedTask:
    """The task as a run has it: prepared and validated."""
    cache = cache_dir()
    prepared = await asyncio.to_thread(prepare, task, cache, sandboxes)
    environment = environment_for(sandboxes, cache)
    return await validate(prepared, sandboxes=sandboxes, environment=environment, cache=cache)


async def graded(prepared: PreparedTask, sandboxes: Sandboxes, rounds: int, *, warm: bool) -> dict[str, Any]:
    """Seconds from patch to verdict and gone, of which the tests and the rest; `warm` makes sandboxes ahead."""
    environment = environment_for(sandboxes, cache_dir())
    patch = prepared.task.gold_patch.encode()
    whole: list[float] = []
    tests: list[float] = []
    spent: list[float] = []
    for _ in range(rounds):
        if warm:
            sandboxes.expect(sandbox_spec(prepared, environment, mounts=hidden_mounts(prepared)))
            await asyncio.sleep(1.0)  # as long as others run, in a run
        began, spent_before = time.perf_counter(), cpu_s()
        verdict = await grade(prepared, patch, sandboxes=sandboxes, environment=environment)
        whole.append(time.perf_counter() - began)
        spent.append(cpu_s() - spent_before)
        tests.append(verdict.checks_s)
        if verdict.reward != 1.0:
            raise SystemExit(f"bench: the gold patch of {prepared.task.instance_id} scores 0: {verdict.reason}")
    rest = [all_ - own for all_, own in zip(whole, tests, strict=True)]
    figures = {"verdict_s": whole, "tests_s": tests, "overhead_s": rest, "cpu_s": spent}
    return {**{name: spread(each) for name, each in figures.items()}, "rounds": rounds}


async def opened(prepared: PreparedTask, sandboxes: Sandboxes, rounds: int, *, warm: bool) -> dict[str, float]:
    """Seconds to open a sandbox, run a command that does nothing, and close it."""
    spec = sandbox_spec(prepared, environment_for(sandboxes, cache_dir()))
    times: list[float] = []
    for _ in range(rounds):
        if warm:
            sandboxes.expect(spec)
            await asyncio.sleep(1.0)
        began = time.perf_counter()
        sandbox = await sandboxes.open(spec)
        await sandbox.run(["true"], timeout_s=60)
        await sandbox.close()
        times.append(time.perf_counter() - began)
    return spread(times)


async def local(rounds: int) -> dict[str, Any]:
    """The figures of the shipped instance in local sandboxes."""
    sandboxes = load_sandboxes("local")
    loaded = await load_tasks(["smoke"], sandboxes=sandboxes, cache=cache_dir(), instance_ids=[INSTANCE])
    prepared = await ready(loaded.tasks[0], sandboxes)
    without = replace(prepared, options=replace(prepared.options, twins={}))
    alone = await graded(without, sandboxes, rounds, warm=False)
    tests = deciding_tests(prepared.task, prepared.options)
    versions = len(draw_versions(tests, prepared.options, make_templates(tests, prepared.options)))
    figures = await graded(prepared, sandboxes, rounds, warm=False)
    times = figures["cpu_s"]["median"] / alone["cpu_s"]["median"]
    return {**figures, "without_twins": alone, "versions": versions, "times_without_twins": round(times, 2)}


async def docker(task: Task, rounds: int) -> dict[str, Any]:
    """The figures of an instance in containers, each made when it is needed, and made ahead."""
    sandboxes = load_sandboxes("docker")
    try:
        prepared = await ready(task, sandboxes)
        figures = {
            way: {
                **await graded(prepared, sandboxes, rounds, warm=way == "warm"),
                "container_s": await opened(prepared, sandboxes, rounds, warm=way == "warm"),
            }
            for way in ("cold", "warm")
        }
    finally:
        await sandboxes.aclose()
    return figures


def harness_python(*, install: bool) -> str | None:
    """A Python that has the harness, installed when it is not there and `install`; None without one."""
    directory = cache_dir() / f"bench-{SWEBENCH}"
    python = os.environ.get("UNDERSTUDY_SWEBENCH_PYTHON") or str(directory / "bin" / "python")
    if not problems(python):
        return python
    if not install or "UNDERSTUDY_SWEBENCH_PYTHON" in os.environ:
        return None
    print(f"installing {SWEBENCH} into {directory}", flush=True)
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    subprocess.run([python, "-m", "pip", "install", "-q", SWEBENCH], check=True, stdout=subprocess.DEVNULL)
    return python


def harness(python: str, row: dict[str, Any], engine: str, rounds: int) -> dict[str, Any]:
    """The official harness's seconds for the same instance, from its own log."""
    overheads: list[float] = []
    tests: list[float] = []
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
        directory = Path(name)
        (directory / "rows.jsonl").write_text(json.dumps(row) + "\n")
        for number in range(rounds):
            options = ["-d", "rows.jsonl", "-p", "gold", "-id", f"bench{number}", "--max_workers", "1"]
            command = [python, "-m", MODULE, *options]
            env = {**os.environ, "DOCKER_HOST": engine}
            done = subprocess.run(command, cwd=directory, env=env, capture_output=True, text=True, check=False)
            logs = list(directory.glob(f"logs/run_evaluation/bench{number}/gold/*/run_instance.log"))
            if not logs:
                raise SystemExit(f"bench: the harness left no log: {done.stderr[-2000:]}")
            events = _STAMP.findall(logs[0].read_text())
            times = [datetime.strptime(when, "%Y-%m-%d %H:%M:%S,%f") for when, _ in events]  # noqa: DTZ007
            (run_s,) = (
                float(message.split()[2].replace("_", "")) for _, message in events if "Test runtime" in message
            )
            if not any("resolved: True" in line for line in logs[0].read_text().splitlines()):
                raise SystemExit("bench: the harness does not resolve the gold patch")
            overheads.append((times[-1] - times[0]).total_seconds() - run_s)
            tests.append(run_s)
    return {"overhead_s": spread(overheads), "tests_s": spread(tests), "rounds": rounds}


def containers(options: argparse.Namespace, figures: dict[str, Any]) -> None:
    """Measure ours and the harness on one image, and print how they stand."""
    from understudy.grade.official import as_harness_row
    from understudy.tasks.recipes import ImageChoice
    from understudy.tasks.row_formats import task_of

    from support import docker_engine
    from support.suite import FILES, ID, classic

    try:
        engine = docker_engine.engine()
    except docker_engine.NoEngine as reason:
        figures["docker"] = figures["harness"] = str(reason)
        print(f"Docker                  left out: {reason}")
        return
    os.environ["DOCKER_HOST"] = engine.url
    try:
        image = docker_engine.instance_image(engine, ID, FILES)
        task = task_of(classic(image.base_commit), ImageChoice())
        figures["docker"] = ours = asyncio.run(docker(task, QUICK_ROUNDS if options.quick else ROUNDS))
        for way, seconds in ours.items():
            row, bare = seconds["overhead_s"], seconds["container_s"]
            print(
                f"Docker overhead, {way}   {row['median']:.3f} s median ({row['min']:.3f} to {row['max']:.3f}; "
                f"target < {OVERHEAD_TARGET_S}), the tests {seconds['tests_s']['median']:.3f} s; a container from "
                f"create to gone {bare['median']:.3f} s",
                flush=True,
            )
        python = harness_python(install=not options.quick)
        if python is None:
            figures["harness"] = "swebench is not installed"
            print("the official harness    left out: swebench is not installed")
            return
        rounds = QUICK_HARNESS_ROUNDS if options.quick else HARNESS_ROUNDS
        figures["harness"] = theirs = harness(python, as_harness_row(task), engine.url, rounds)
        ratio = theirs["overhead_s"]["median"] / ours["cold"]["overhead_s"]["median"]
        figures["overhead_ratio"] = round(ratio, 1)
        print(
            f"the official harness    {theirs['overhead_s']['median']:.3f} s overhead, the tests "
            f"{theirs['tests_s']['median']:.3f} s: {ratio:.1f} times ours"
        )
    finally:
        docker_engine.stop_engine()


def main() -> None:
    """Print the figures, and write them to a file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--quick", action="store_true", help="few rounds; install nothing")
    options = parser.parse_args()
    figures: dict[str, Any] = {
        "machine": machine(),
        "load": round(os.getloadavg()[0], 1),
        "unit": "s",
        "verdict_target_s": VERDICT_TARGET_S,
        "overhead_target_s": OVERHEAD_TARGET_S,
    }
    print(f"machine                 {figures['machine']}, load {figures['load']}", flush=True)
    figures["local"] = measured = asyncio.run(local(QUICK_ROUNDS if options.quick else ROUNDS))
    row = measured["verdict_s"]
    print(
        f"patch to verdict, local {row['median']:.3f} s median ({row['min']:.3f} to {row['max']:.3f}; target "
        f"< {VERDICT_TARGET_S}), of which the tests {measured['tests_s']['median']:.3f} s: {INSTANCE}",
        flush=True,
    )
    alone, versions = measured["without_twins"], measured["versions"]
    print(
        f"  without twins         {alone['verdict_s']['median']:.3f} s median, of CPU time "
        f"{alone['cpu_s']['median']:.3f} s; with {versions} versions {measured['times_without_twins']:.1f} times "
        f"that CPU time (target < {2 * versions + 1})",
        flush=True,
    )
    containers(options, figures)
    path = options.json or Path(__file__).with_name("results") / "grading.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
