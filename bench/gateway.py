"""What the gateway costs a call, and how long it makes an agent wait, beside nginx and other gateways.

    python bench/gateway.py [--peers] [--soak] [--json FILE]

The same work for all of them in one run: an Anthropic request of 59 KB with 24 tools, an answer of 200 chunks of
363 bytes, 1, 16 and 64 at once. The model is a process that answers at once, or within a second where it says
"paced"; every piece of an answer carries the time of its sending. Ours is `understudy gateway serve` with one
worker, which translates the request and the answer, keeps both with 15,400 token ids in its store and commits them
before it answers. nginx passes Anthropic's own stream on without buffering and does nothing else: the floor.

`--peers` measures LiteLLM's proxy too, in a virtual environment of its own, which is made in the cache.
`--soak` holds 1,000 agents for 60 s in one process, and counts the calls.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import resource
import statistics
import tempfile
import time
from collections import Counter
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from gateway_parts import stacks
from gateway_parts.load import Seen, Spec
from gateway_parts.stacks import Stack

from understudy.store import Store

CALLS = {1: 150, 16: 480, 64: 640}
PEER_CALLS = {1: 10, 16: 32, 64: 64}
PACED_S, PACED_CALLS, PACED_AT_ONCE = 1.0, 96, 16
SYNCS = 200
CPU_TARGET_MS, PEER_TARGET = 1.5, 50.0
P50_TARGET_MS, P99_TARGET_MS = 3.0, 15.0
SOAK_AGENTS, SOAK_S, SOAK_ANSWER_S, SOAK_TARGET_MB = 1000, 60.0, 8.0, 1000.0


def measured(stack: Stack, spec: Spec) -> tuple[Seen, float]:
    """What the load client saw, and the milliseconds of CPU that each call cost the stack."""
    before = stack.cpu_s()
    figures = stacks.load(spec)
    if figures.failed:
        raise SystemExit(f"bench: {figures.failed} calls to {stack.url} failed; the last: {figures.failure}")
    return figures, (stack.cpu_s() - before) / figures.calls * 1000


def bench(name: str, context: AbstractContextManager[Stack], model: str, calls: dict[int, int]) -> dict[str, Any]:
    """The figures of one stack: at full speed by how many ask at once, then paced."""
    figures: dict[str, Any] = {}
    with context as stack:
        stacks.pace(model, 0.0)
        measured(stack, Spec(stack.url, stack.keys, connections=max(calls), calls=max(calls)))  # warm
        for at_once, number in calls.items():
            timings, cpu = measured(stack, Spec(stack.url, stack.keys, connections=at_once, calls=number))
            figures[f"c{at_once}"] = {
                "calls_per_s": round(number / timings.wall_s, 1),
                "cpu_ms_per_call": round(cpu, 3),
                "first_ms": timings.first_ms,
                "whole_ms": timings.whole_ms,
            }
        stacks.pace(model, PACED_S)
        paced = Spec(stack.url, stack.keys, connections=PACED_AT_ONCE, calls=PACED_CALLS, pause_s=PACED_S)
        timings, cpu = measured(stack, paced)
        figures["paced"] = {
            "cpu_ms_per_call": round(cpu, 3),
            "request_ms": timings.request_ms,
            "end_ms": timings.end_ms,
            "added_ms": timings.added_ms,
            "chunk_ms": timings.chunk_ms,
        }
        figures["peak_mb"] = round(stack.peak_mb())
    show(name, figures)
    return figures


def disk_ms(directory: Path) -> float:
    """The median time of a small write that is durable: each answer of ours waits for one, whatever we do."""
    times: list[float] = []
    with (directory / "disk").open("wb", buffering=0) as file:
        for _ in range(SYNCS):
            file.write(bytes(4096))
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append((time.perf_counter() - began) * 1000)
    return round(statistics.median(times), 2)


def show(name: str, figures: dict[str, Any]) -> None:
    """Print the figures of one stack."""
    for key in (key for key in figures if key.startswith("c")):
        row = figures[key]
        print(
            f"{name:22} {key:5} {row['cpu_ms_per_call']:9.3f} ms CPU/call  {row['calls_per_s']:8.1f} calls/s   "
            f"first byte p50 {row['first_ms']['p50']:8.2f} p99 {row['first_ms']['p99']:8.2f}   "
            f"whole p50 {row['whole_ms']['p50']:8.2f} p99 {row['whole_ms']['p99']:8.2f} ms"
        )
    row = figures["paced"]
    print(
        f"{name:22} paced {row['cpu_ms_per_call']:9.3f} ms CPU/call   "
        + "   ".join(
            f"{what} p50 {row[key]['p50']:.2f} p99 {row[key]['p99']:.2f}"
            for what, key in (("request", "request_ms"), ("chunk", "chunk_ms"), ("end", "end_ms"))
        )
        + " ms",
        flush=True,
    )


def added(row: dict[str, Any], straight: dict[str, Any]) -> dict[str, dict[str, float]]:
    """What a stack adds to an answer that lasts a second, by what it adds it to, in milliseconds.

    It is laid beside the median without a stack: a slow moment of the machine counts against the stack.
    """
    return {
        key: {part: round(row["paced"][key][part] - straight["paced"][key]["p50"], 2) for part in ("p50", "p99")}
        for key in ("request_ms", "chunk_ms", "end_ms", "added_ms")
    }


def soak(model: str, directory: Path, *, streaming: bool) -> dict[str, Any]:
    """A thousand agents whose conversations grow: every answer that one of them got is in the store, once."""
    stacks.pace(model, SOAK_ANSWER_S)
    with stacks.ours(model, directory, streaming=streaming, agents=SOAK_AGENTS) as stack:
        spec = Spec(
            stack.url,
            stack.keys,
            connections=SOAK_AGENTS,
            seconds=SOAK_S,
            grow=True,
            pause_s=SOAK_ANSWER_S,
        )
        figures, cpu = measured(stack, spec)
        peak = stack.peak_mb()
    with Store.open(directory, create=False) as store:
        stored = Counter(
            call.id for attempt in store.keys.clients() for call in store.calls.of_attempt(attempt.id)
        )
    answered = ["call_" + message.removeprefix("msg_") for message in figures.ids]
    return {
        "agents": SOAK_AGENTS,
        "held_s": round(figures.wall_s, 1),
        "answered": len(answered),
        "lost": sum(stored[call] != 1 for call in answered),
        "answered_twice": len(answered) - len(set(answered)),
        "in_store": stored.total(),
        "peak_mb": round(peak),
        "target_mb": SOAK_TARGET_MB,
        "cpu_ms_per_call": round(cpu, 3),
        "end_ms": figures.end_ms,
    }


def peers(model: str, directory: Path) -> dict[str, dict[str, Any] | str]:
    """The figures of other gateways, or why there are none."""
    environment = stacks.environment("litellm", stacks.LITELLM)
    figures: dict[str, dict[str, Any] | str] = {
        "LiteLLM": environment
        if isinstance(environment, str)
        else bench("LiteLLM", stacks.litellm(model, directory / "litellm", environment), model, PEER_CALLS)
    }
    environment = stacks.environment("agent-lightning", "agentlightning>=1")
    figures["agent-lightning"] = (
        environment if isinstance(environment, str) else "installable, but not measured here yet"
    )
    return figures


def machine() -> dict[str, Any]:
    """What this ran on."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else []
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures to this file")
    parser.add_argument("--peers", action="store_true", help="measure LiteLLM too; it is installed when it is not")
    parser.add_argument("--soak", action="store_true", help="hold 1,000 agents for a minute, in either mode")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

    figures: dict[str, Any] = {"machine": machine(), "stacks": {}}
    print(f"machine                {figures['machine']}")
    with tempfile.TemporaryDirectory(prefix="understudy-bench-") as name:
        directory = Path(name)
        with stacks.upstream(directory) as model:
            measure(model, directory, figures["stacks"])
            figures["added_ms"] = report(figures["stacks"])
            if options.peers:
                figures["peers"] = peers(model, directory)
                report_peers(figures["stacks"], figures["peers"])
            if options.soak:
                figures["soak"] = {
                    "atomic": soak(model, directory / "soak-atomic", streaming=False),
                    "streaming": soak(model, directory / "soak-streaming", streaming=True),
                }
                report_soak(figures["soak"])
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


def measure(model: str, directory: Path, figures: dict[str, Any]) -> None:
    """The figures of what needs nothing installed but nginx."""
    stacks_by_name: dict[str, AbstractContextManager[Stack]] = {
        "direct, chat": stacks.direct(model, "/v1/chat/completions"),
        "nginx": stacks.nginx(model, directory / "nginx"),
        "ours, atomic": stacks.ours(model, directory / "atomic"),
        "ours, streaming": stacks.ours(model, directory / "streaming", streaming=True),
        "ours, relay": stacks.ours(model, directory / "relay", backend="anthropic", streaming=True),
    }
    for name, stack in stacks_by_name.items():
        if name == "nginx" and not stacks.has_nginx():
            print("nginx                  is not installed; the floor is left out")
            continue
        figures[name] = bench(name, stack, model, CALLS)
        figures[name]["disk_ms"] = disk_ms(directory)  # now, as a disk that is shared has its moods


def report(figures: dict[str, Any]) -> dict[str, Any]:
    """Print how ours stand to the targets and to the floor; what they add to a paced answer."""
    result: dict[str, Any] = {}
    floor = figures.get("nginx")
    for name in (name for name in figures if name.startswith("ours")):
        cpu = figures[name]["c64"]["cpu_ms_per_call"]
        above = (
            f"; nginx {floor['c64']['cpu_ms_per_call']}, so {cpu / floor['c64']['cpu_ms_per_call']:.1f} x"
            if floor
            else ""
        )
        result[name] = row = added(figures[name], figures["direct, chat"])
        print(f"{name}: {cpu} ms CPU/call at c=64 (target <= {CPU_TARGET_MS}{above})")
        print(
            f"{name}: added at c=16 paced p50 {row['added_ms']['p50']} ms (target <= {P50_TARGET_MS:.0f}), "
            f"p99 {row['added_ms']['p99']} ms (target <= {P99_TARGET_MS:.0f}); of which before the model "
            f"{row['request_ms']['p50']}, after its end {row['end_ms']['p50']}; a chunk is late by "
            f"p50 {row['chunk_ms']['p50']} p99 {row['chunk_ms']['p99']} ms"
        )
        disk = figures[name]["disk_ms"]
        print(
            f"{name}: of the added p50 the disk's own fdatasync has {disk} ms; "
            f"net of it {row['added_ms']['p50'] - disk:.2f} ms",
            flush=True,
        )
    return result


def report_peers(figures: dict[str, Any], others: dict[str, dict[str, Any] | str]) -> None:
    """Print how ours stand to the other gateways."""
    for name, other in others.items():
        if isinstance(other, str):
            print(f"{name}: {other}")
            continue
        for at_once in CALLS:
            theirs = other[f"c{at_once}"]["cpu_ms_per_call"]
            times = {
                mode: round(theirs / figures[mode][f"c{at_once}"]["cpu_ms_per_call"])
                for mode in ("ours, atomic", "ours, streaming")
            }
            print(f"{name}: {theirs} ms CPU/call at c={at_once}: {times} x ours (target >= {PEER_TARGET:.0f})")


def report_soak(figures: dict[str, dict[str, Any]]) -> None:
    """Print what became of the thousand agents."""
    for mode, row in figures.items():
        print(
            f"soak, {mode}: {row['agents']} agents for {row['held_s']} s in one process: "
            f"{row['answered']} answers, {row['lost']} lost, {row['answered_twice']} twice; "
            f"peak {row['peak_mb']} MB (target < {SOAK_TARGET_MB:.0f}); {row['cpu_ms_per_call']} ms CPU/call; "
            f"end p50 {row['end_ms']['p50']} p99 {row['end_ms']['p99']} ms"
        )


if __name__ == "__main__":
    main()
