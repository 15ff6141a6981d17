"""What the viewer's lists cost: a store of 100,000 rollouts, filtered and sorted.

    python bench/view.py [--rollouts N] [--directory DIR]

Prints the CPU seconds of making the index, done once, and for each list the CPU milliseconds of its answer,
made and encoded, the median of five. The target is 300 ms.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec

from understudy.view.api import ViewApi
from understudy.view.catalog import Catalog
from understudy.view.faults import encode
from understudy.view.routes import NoParameters, RolloutFilter, TaskGridQuery

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from support.report import put_many

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--directory", type=Path)
    options = parser.parse_args()
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
