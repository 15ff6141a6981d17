"""What the viewer costs: lists of a store of 100,000 rollouts, and a rollout of 10,000 turns with 200 MB of text.

    python bench/view.py [--rollouts N] [--turns N] [--live-seconds N] [--directory DIR]

Prints the CPU seconds of making the index, done once, and for each list the CPU milliseconds of its answer, made
and encoded, the median of five; the target is 300 ms. The long rollout's context is compacted every 50
turns, and its calls have token ids: CPU milliseconds until its first turns are there, seconds until all of it is
read, milliseconds of later answers, the process's memory and, where there is chromium, what it takes there.

Of a run in progress, which stores 50 calls a second: the time from a call's commit until chromium has drawn it.
And what a call costs its writer, in CPU milliseconds, in milliseconds until it is durable, and in calls a second
where it need not wait, without and with a viewer that is looked at, in turns. `--rollouts 0`, `--turns 0` and
`--live-seconds 0` leave a part out.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from understudy.store import Store
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

from support.report import begin_rollouts, long_calls, put_long, put_many
from support.viewer import BROWSERS, Watched, chromium, scroll_through, serving, store_ids

TARGET_MS = 300.0
LIVE_RATE = 50.0
LIVE_ROLLOUTS = 8
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
        scrolled = scroll_through(page, steps, traced=True)
        print(
            f"scroll of {steps} steps: at most {scrolled.elements} elements, {scrolled.heap_mb:.0f} MB of JS heap,"
        )
        long = [each for each in scrolled.tasks_ms if each > 50]
        print(f"longest task {max(scrolled.tasks_ms, default=0):.0f} CPU ms, {len(long)} of over 50 CPU ms")


def write_calls(directory: Path, rate: float, seconds: float) -> None:
    """Store calls of several rollouts in turns, so many a second [0: as fast as it goes]; print what they cost."""
    with Store.open(directory) as store:
        attempts = begin_rollouts(store, [f"live{n}" for n in range(LIVE_ROLLOUTS)])
        calls = [long_calls(attempt, 1_000, 100) for attempt in attempts]
        print("ready", flush=True)
        sys.stdin.readline()
        committed: list[float] = []
        durable_ms: list[float] = []
        before, began = resource.getrusage(resource.RUSAGE_SELF), time.monotonic()
        number = 0
        while time.monotonic() - began < seconds:
            if rate:
                time.sleep(max(0.0, began + number / rate - time.monotonic()))
            call = next(calls[number % LIVE_ROLLOUTS])
            at = time.perf_counter()
            store.calls.append(call).result()
            durable_ms.append(1e3 * (time.perf_counter() - at))
            if number % LIVE_ROLLOUTS == 0:
                committed.append(time.time())
            number += 1
        wall, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_SELF)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        figures = {
            "cpu_ms": 1e3 * cpu / number,
            "durable_ms": statistics.median(durable_ms),
            "per_second": number / wall,
            "committed": committed,
        }
        print(json.dumps(figures), flush=True)
        sys.stdin.readline()


DRAWN = """() => {
  window.drawn = [];
  let last = 0;
  const look = () => {
    const label = [...document.querySelectorAll('main label')].find((each) => each.textContent.startsWith('Turn'));
    const turns = Number(/of (\\d+)$/.exec(label?.textContent ?? '')?.[1] ?? 0);
    if (turns <= last) return;
    last = turns;
    requestAnimationFrame(() => setTimeout(() => window.drawn.push([turns, Date.now() / 1000])));
  };
  new MutationObserver(look).observe(document.body, { subtree: true, childList: true, characterData: true });
}"""


def live_run(directory: Path, rate: float, seconds: float, *, watched: bool) -> tuple[dict[str, Any], list[float]]:
    """What a writer's calls cost, and the seconds until each one of the rollout that is looked at was drawn."""
    command = [
        sys.executable,
        __file__,
        "--write",
        str(directory),
        "--rate",
        str(rate),
        "--live-seconds",
        str(seconds),
    ]
    with ExitStack() as stack:
        writer = stack.enter_context(
            subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        )
        stack.callback(writer.kill)
        assert writer.stdin is not None and writer.stdout is not None
        writer.stdout.readline()
        # A processor that sleeps between commits takes longer for each; the page's work would hide what it costs.
        awake = stack.enter_context(
            subprocess.Popen(["nice", "-n", "19", sys.executable, "-c", "while True: pass"])
        )
        stack.callback(awake.kill)
        page = None
        if watched:
            url = stack.enter_context(serving(directory))
            watcher = Watched(stack.enter_context(chromium()), url)
            page = watcher.open(f"/s/{store_ids(url)[directory.name]}/r/live0")
            page.evaluate(DRAWN)
        writer.stdin.write("go\n")
        writer.stdin.flush()
        figures = json.loads(writer.stdout.readline())
        drawn: list[tuple[int, float]] = []
        if page is not None:
            page.wait_for_timeout(2_000)
            drawn = page.evaluate("window.drawn")
        writer.stdin.write("end\n")
        writer.stdin.flush()
        writer.wait(60)
    delays = [
        next((at for turns, at in drawn if turns > number), float("inf")) - committed
        for number, committed in enumerate(figures["committed"])
    ]
    return figures, delays if watched else []


def measure_live(directory: Path, seconds: float) -> None:
    """Print how soon a change is drawn, and what being looked at costs who writes."""
    for rate in (LIVE_RATE, 0.0):
        figures: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
        for turn in range(6):
            watched = turn % 2 == 1
            figure, delays = live_run(directory / f"{rate:.0f}-{turn}", rate, seconds, watched=watched)
            figures[watched].append(figure)
            if watched and rate:
                ordered = sorted(delays)
                print(
                    f"{rate:.0f} calls/s, from commit to screen: median {statistics.median(ordered):.2f} s, "
                    f"95 % within {ordered[int(0.95 * len(ordered))]:.2f} s, at most {ordered[-1]:.2f} s"
                )
        for name in ("cpu_ms", "durable_ms", "per_second"):
            alone, beside = ([each[name] for each in figures[watched]] for watched in (False, True))
            print(
                f"{'paced' if rate else 'unpaced'} writer, {name}: {statistics.median(alone):.2f} alone "
                f"({min(alone):.2f} to {max(alone):.2f}), {statistics.median(beside):.2f} looked at "
                f"({min(beside):.2f} to {max(beside):.2f})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rollouts", type=int, default=100_000)
    parser.add_argument("--turns", type=int, default=10_000)
    parser.add_argument(
        "--directory", type=Path, help="Where the stores are written and removed; made if missing."
    )
    parser.add_argument("--live-seconds", type=float, default=10.0)
    parser.add_argument("--write", type=Path, help="Write a run in progress there, and end.")
    parser.add_argument("--rate", type=float, default=LIVE_RATE)
    parser.add_argument("--make", type=Path, help="Write the long rollout there and end.")
    options = parser.parse_args()
    if options.directory is not None:
        try:
            options.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            parser.error(f"--directory: {options.directory} cannot be made: {error.strerror}; give another one")
    if options.make is not None:
        put_long(options.make, options.turns)
        return
    if options.write is not None:
        write_calls(options.write, options.rate, options.live_seconds)
        return
    if options.live_seconds and any(map(shutil.which, BROWSERS)):
        with tempfile.TemporaryDirectory(dir=options.directory) as directory:
            os.environ["UNDERSTUDY_CACHE"] = f"{directory}/cache"
            measure_live(Path(directory), options.live_seconds)
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
