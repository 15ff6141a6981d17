"""What the viewer costs: lists of a store of 100,000 rollouts, and a rollout of 10,000 turns with 200 MB of text.

    python bench/view.py [--rollouts N] [--turns N] [--directory DIR]

Prints the CPU seconds of making the index, done once, and for each list the CPU milliseconds of its answer, made
and encoded, the median of five; the target is 300 ms. The long rollout's context is compacted every 50
turns, and its calls have token ids: CPU milliseconds until its first turns are there, seconds until all of it is
read, milliseconds of later answers, the process's memory and, where there is chromium, what it takes there.
`--rollouts 0` and `--turns 0` leave a part out.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from understudy.view.api import ViewApi
from understudy.view.catalog import Catalog
from understudy.view.faults import encode
from understudy.view.routes import (
    AttemptQuery,
    BodyQuery,
    NoParameters,
    RolloutFilter,
    TaskGridQuery,
    TokenQuery,
    TurnQuery,
)

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.report import put_long, put_many
from support.viewer import BROWSERS, Watched, chromium, scroll_through, serving, store_ids

TARGET_MS = 300.0
LISTS: dict[str, RolloutFilter] = {
    "by time": RolloutFilter(),
    "by reward, descending": RolloutFilter(sort="reward", descending=True),
    "by tokens, descending": RolloutFilter(sort="completion_tokens", descending=True),
    "by task": RolloutFilter(sort="task"),
    "unsolved": RolloutFilter(outcome="unsolved"),
    "a part of a task's id": RolloutFilter(task="042", sort="seconds"),
    "a part of the reason": RolloutFilter(reason="nothing has it"),
}


def measured_ms(method: Any, parts: dict[str, str], query: msgspec.Struct) -> float:
    """The median CPU milliseconds of five answers."""
    times: list[float] = []
    for _ in range(5):
        began = time.process_time()
        encode(method(parts, query))
        times.append(1e3 * (time.process_time() - began))
    return statistics.median(times)


def memory_mb(name: str) -> float:
    """The process's memory: `VmRSS` now, `VmHWM` at most so far."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(name)).split()[1]) / 1e3


def measure_long(directory: Path) -> None:
    """Print what a long rollout costs: what the page asks first, the rest of its calls, single answers."""
    api = ViewApi(Catalog([directory]))
    parts = {"store": api.catalog.scan()[0].id, "rollout": "long"}
    idle = memory_mb("VmRSS")
    began = time.process_time()
    encode(api.read_rollout(parts, AttemptQuery()))
    page = api.list_turns(parts, TurnQuery(limit=25))
    encode(page)
    print(f"{page.total} turns, until the first are there: {1e3 * (time.process_time() - began):.0f} ms")
    while api.read_rollout(parts, AttemptQuery()).unread:
        pass
    print(f"until all are read, in several answers: {time.process_time() - began:.2f} s")
    print(f"memory: {idle:.0f} MB before, {memory_mb('VmHWM'):.0f} MB at most, {memory_mb('VmRSS'):.0f} MB after")
    middle = TurnQuery(start=page.total // 2, limit=25)
    turn = api.list_turns(parts, middle).turns[1]
    figures = {
        "a page in the middle": measured_ms(api.list_turns, parts, middle),
        "head": measured_ms(api.read_rollout, parts, AttemptQuery()),
        "a line for each of 1,000 calls": measured_ms(api.list_calls, parts, TurnQuery(limit=1_000)),
        "the rest of a long text": measured_ms(
            api.read_body, parts, BodyQuery(ref=turn.asked[-1].ref, offset=4_000)
        ),
        "tokens of a call": measured_ms(api.list_tokens, parts, TokenQuery(call=turn.call_id)),
    }
    for name, value in figures.items():
        print(f"{name:32} {value:8.1f} ms")
    api.close()


def measure_browser(directory: Path, steps: int = 40) -> None:
    """Print what the same rollout costs in chromium: wall time until its first turn, and a scroll to its end."""
    with serving(directory) as url, chromium() as browser:
        watched = Watched(browser, url)
        store = store_ids(url)[directory.name]
        began = time.monotonic()
        page = watched.open(f"/s/{store}/r/long")
        page.get_by_role("article", name="Turn 1", exact=True).wait_for()
        print(f"in chromium, first turn on the screen: {time.monotonic() - began:.2f} s of wall time")
        seen = scroll_through(page, steps, traced=True)
        print(f"scroll of {steps} steps: at most {seen.elements} elements, {seen.heap_mb:.0f} MB of JS heap,")
        long = [each for each in seen.tasks_ms if each > 50]
        print(f"longest task {max(seen.tasks_ms, default=0):.0f} CPU ms, {len(long)} of over 50 CPU ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--make", type=Path, help="Write the long rollout there and end.")
    options = parser.parse_args()
    if options.make is not None:
        put_long(options.make, options.turns)
        return
    if options.turns:
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            os.environ["UNDERSTUDY_CACHE"] = f"{directory}/cache"
            make = [sys.executable, __file__, "--make", f"{directory}/run", "--turns", str(options.turns)]
            subprocess.run(make, check=True)
            measure_long(Path(directory, "run"))
            if any(map(shutil.which, BROWSERS)):
                measure_browser(Path(directory, "run"))
    if not options.rollouts:
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        os.environ["UNDERSTUDY_CACHE"] = f"{directory}/cache"
        put_many(Path(directory, "runs", "run"), tasks=options.rollouts // 100, samples=100, turns=3)
        api = ViewApi(Catalog([Path(directory, "runs")]))
        parts = {"store": api.catalog.scan()[0].id}
        began = time.process_time()
        page = api.list_rollouts(parts, RolloutFilter())
        print(f"index of {page.total} rollouts: {time.process_time() - began:.1f} s")
        figures = {name: measured_ms(api.list_rollouts, parts, query) for name, query in LISTS.items()}
        figures["tasks"] = measured_ms(api.list_tasks, parts, TaskGridQuery())
        figures["store"] = measured_ms(api.read_store, parts, NoParameters())
        for name, value in figures.items():
            print(f"{name:24} {value:8.1f} ms  {'ok' if value < TARGET_MS else 'too slow'}")
        api.close()


if __name__ == "__main__":
    main()
