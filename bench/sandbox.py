"""How long a local sandbox takes to open, reset, run a command and close, beside a plain subprocess.

    python bench/sandbox.py [--json FILE] [--rounds N]

The figures are medians of one run on one machine; the plain subprocess is the floor that no sandbox goes below.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes

TARGETS_MS = {"open + reset": 15.0, "run /bin/true": 8.0}


async def timed(times: dict[str, list[float]], name: str, work: Awaitable[object]) -> object:
    """Await `work` and note how many milliseconds it took."""
    started = time.perf_counter()
    result = await work
    times.setdefault(name, []).append((time.perf_counter() - started) * 1000)
    return result


async def plain() -> None:
    """What every run must do at least: start a process and wait for it."""
    process = await asyncio.create_subprocess_exec(
        "/bin/true", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    await process.communicate()


async def measure(rounds: int, tree: Path) -> dict[str, list[float]]:
    """Milliseconds by what was done."""
    kind = LocalSandboxes()
    if problems := kind.problems():
        raise SystemExit("\n".join(problems))
    kind.prepare_tree(tree)
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        started = time.perf_counter()
        sandbox = await kind.open(SandboxSpec(tree=tree))
        open_end = time.perf_counter()
        await sandbox.reset()
        ended = time.perf_counter()
        times.setdefault("open", []).append((open_end - started) * 1000)
        times.setdefault("reset", []).append((ended - open_end) * 1000)
        times.setdefault("open + reset", []).append((ended - started) * 1000)
        await timed(times, "run /bin/true", sandbox.run(["/bin/true"], timeout_s=60))
        await timed(times, "write 1 KiB", sandbox.write("f", bytes(1024)))
        await timed(times, "read 1 KiB", sandbox.read("f"))
        await timed(times, "close", sandbox.close())
        await timed(times, "floor: plain subprocess /bin/true", plain())
    started = time.perf_counter()
    opened16 = await asyncio.gather(*(kind.open(SandboxSpec(tree=tree)) for _ in range(16)))
    times["16 opens at once"] = [(time.perf_counter() - started) * 1000]
    await asyncio.gather(*(sandbox.close() for sandbox in opened16))
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        tree = Path(directory, "tree")
        tree.mkdir()
        (tree / "README").write_text("a tree\n")
        times = asyncio.run(measure(options.rounds, tree))
    machine = f"{os.cpu_count()} cores, Linux {platform.release()}, uid {os.geteuid()}"
    result = {
        name: {"median_ms": statistics.median(values), "min_ms": min(values), "target_ms": TARGETS_MS.get(name)}
        for name, values in times.items()
    }
    print(f"{machine}, load {os.getloadavg()[0]:.1f}, {options.rounds} rounds, milliseconds")
    for name, row in result.items():
        target = f"   (target {row['target_ms']:g})" if row["target_ms"] else ""
        print(f"{name:36} median {row['median_ms']:7.2f}   min {row['min_ms']:7.2f}{target}")
    if options.json:
        options.json.write_text(json.dumps({"machine": machine, "unit": "ms", "figures": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
