"""What many machines on one PostgreSQL cost, as far as one machine can tell, beside the physical limits.

    python bench/cluster.py [--short] [--json FILE]

It starts Debian's PostgreSQL in a directory of its own, with fsync on. The agents are small programs that sleep:
what is measured is Understudy and the database. That is: commits of calls by 16 clients, what a gateway with this
store adds to a call, what a rollout costs through a worker, rollouts a second by workers, and agents that only
wait. On a machine that does other work only the figures of CPU time say anything.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from msgspec import structs
from rollout import UNDERSTUDY, attempt_in, attempts, completion, post_s
from store import conversation, in_parallel, machine, open_store

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.tokens import TokenIds, pack_ids
from understudy.tasks.records import dump
from understudy.types import Call

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # its server, and tasks whose checks cost nothing

from fakes.loop_program import quick_task
from support.postgresql import PostgresqlServer, running_server

CLIENTS, TURNS, PREAMBLE = 16, 12, 50_000
COMMITS_TARGET, LATENCY_TARGET_MS, OWN_COST_TARGET_MS = 1500, 15.0, 250.0
SLEEP_S, CAPACITY = 2.0, 4
ANSWER_S = 0.25


def long_calls(name: str, seed: int) -> list[Call]:
    """Calls of about 59 KB, as those of bench/gateway.py."""
    return conversation(name, seed, turns=TURNS, preamble=PREAMBLE, result=600, answer_length=400)


def as_stored(call: Call) -> Call:
    """A call as a gateway passes it to its store: it packs token ids as it reads a model server's response."""

    def packed(ids: Sequence[int] | None) -> Any:
        return TokenIds(pack_ids(ids or ()), len(ids or ()))

    prompt, completion = packed(call.prompt_token_ids), packed(call.completion_token_ids)
    return structs.replace(call, prompt_token_ids=prompt, completion_token_ids=completion)


def syncs_per_s(directory: Path, seconds: float = 2.0) -> float:
    """How often a second this disk makes 16 KB durable: no store commits groups faster."""
    number, end = 0, time.perf_counter() + seconds
    with (directory / "sync").open("wb") as file:
        while time.perf_counter() < end:
            file.write(bytes(16 << 10))
            file.flush()
            os.fdatasync(file.fileno())
            number += 1
    return number / seconds


def cpu_of(pid: int) -> float:
    """The CPU seconds so far of a process, of those that it started, and of those of them that have ended."""
    seconds = 0.0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            fields = stat.read_text().rpartition(")")[2].split()
            if int(stat.parent.name) == pid or int(fields[1]) == pid:
                ended = int(fields[13]) + int(fields[14]) if int(stat.parent.name) == pid else 0
                seconds += (int(fields[11]) + int(fields[12]) + ended) / os.sysconf("SC_CLK_TCK")
    return seconds


def bench_commits(server: PostgresqlServer, conversations: int) -> dict[str, Any]:
    """Calls a second that 16 clients commit, each waiting for its own."""
    names = [[f"w{client}c{number}" for number in range(conversations)] for client in range(CLIENTS)]
    jobs = [
        [as_stored(call) for number, name in enumerate(row) for call in long_calls(name, 100 * client + number)]
        for client, row in enumerate(names)
    ]
    postgres = server.pid
    with open_store(server.new_store(), [name for row in names for name in row]) as store:
        cpu, theirs = time.process_time(), cpu_of(postgres)
        wall, took = in_parallel(lambda call: store.calls.append(call).result(), jobs)
        cpu, theirs = time.process_time() - cpu, cpu_of(postgres) - theirs
    number = len(took)
    return {
        "calls": number,
        "request_bytes": round(statistics.median(len(call.request) for job in jobs for call in job)),
        "commits_per_s": round(number / wall),
        "target_commits_per_s": COMMITS_TARGET,
        "p99_ms": round(1e3 * took[number * 99 // 100], 2),
        "cpu_us_per_call": round(1e6 * cpu / number),
        "postgres_cpu_us_per_call": round(1e6 * theirs / number),
    }


async def bench_latency(server: PostgresqlServer, calls: list[Call], rounds: int) -> dict[str, Any]:
    """What a gateway with this store adds to a call of 16 clients, whose model takes a while to answer."""
    answers = {len(call.request): completion(call) for call in calls}
    app = web.Application(client_max_size=1 << 26)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        await asyncio.sleep(ANSWER_S)
        return web.Response(body=next(iter(answers.values())), content_type="application/json")

    app.router.add_post("/v1/chat/completions", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    model = f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
    backend, keys = VLLMBackend(model, "m"), Keys()
    through: list[float] = []
    straight: list[float] = []
    with Store.open(server.new_store()) as store:
        gateway = Gateway(ModelRouter(backend), store.calls, keys)
        url = await gateway.start_tcp("127.0.0.1", 0)
        async with aiohttp.ClientSession() as session:

            async def client(number: int) -> None:
                headers = {
                    "authorization": f"Bearer {keys.issue(await asyncio.to_thread(attempt_in, store, number))}"
                }
                await asyncio.sleep(ANSWER_S * number / CLIENTS)  # without a pause they would measure each other
                for call in calls * rounds:
                    straight.append(await post_s(session, f"{model}/chat/completions", call.request, {}))
                    through.append(await post_s(session, f"{url}/v1/messages", call.request, headers))

            await asyncio.gather(*(client(number) for number in range(CLIENTS)))
        await gateway.stop()
    await backend.close()
    await runner.cleanup()
    through.sort()
    base = statistics.median(straight)
    return {
        "calls": len(through),
        "added_p50_ms": round(1e3 * (statistics.median(through) - base), 2),
        "added_p99_ms": round(1e3 * (through[len(through) * 99 // 100] - base), 2),
        "target_p99_ms": LATENCY_TARGET_MS,
    }


@contextlib.contextmanager
def workers(url: StoreUrl, number: int, *options: str) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Workers on a store, killed at the end."""
    command = [str(UNDERSTUDY), "worker", "--store", url.secret_url, *options]
    started = [
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
        for _ in range(number)
    ]
    try:
        yield started
    finally:
        for each in started:
            if each.poll() is None:
                os.killpg(each.pid, signal.SIGKILL)
            each.wait()


def enqueue(directory: Path, url: StoreUrl, command: str, samples: int, tasks: int) -> None:
    """Queue rollouts of tasks whose checks are a shell's."""
    directory.mkdir()
    dump([quick_task(number) for number in range(tasks)], directory / "tasks.jsonl")
    arguments = ["run", "embedded", "--policy", "idle", "-t", directory / "tasks.jsonl", "-n", str(samples)]
    arguments += ["--agent", "shell", "--agent-command", command, "--sandbox", "unsafe-local"]
    arguments += ["--store", url.secret_url, "--engine", "detached", "-o", directory / "out"]
    subprocess.run([UNDERSTUDY, *map(str, arguments)], check=True, capture_output=True)


def bench_workers(server: PostgresqlServer, directory: Path, number: int, samples: int) -> dict[str, Any]:
    """Rollouts a second by so many workers, with an agent that sleeps, and what one costs."""
    url = server.new_store()
    enqueue(directory, url, f"sleep {SLEEP_S:g}", samples, tasks=4)
    before, theirs = resource.getrusage(resource.RUSAGE_CHILDREN), cpu_of(server.pid)
    with workers(url, number, "-j", str(CAPACITY), "--stop-when-idle") as started:
        for each in started:
            each.wait()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    graded, _, wall = attempts(url)
    own = [(each.ended_at or 0.0) - each.started_at - each.timings["agent_s"] for each in graded]
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    rollouts = 4 * samples
    return {
        "workers": number,
        "agents": number * CAPACITY,
        "rollouts": rollouts,
        "rollouts_per_s": round(rollouts / wall, 2),
        "limit_per_s": round(number * CAPACITY / SLEEP_S, 2),
        "own_ms_per_rollout": round(1e3 * statistics.median(own), 1),
        "cpu_ms_per_rollout_and_start": round(1e3 * cpu / rollouts, 1),
        "cpu_s": round(cpu, 2),
        "postgres_cpu_ms_per_rollout": round(1e3 * (cpu_of(server.pid) - theirs) / rollouts, 1),
    }


def bench_idle(server: PostgresqlServer, directory: Path, agents: int, seconds: float) -> dict[str, Any]:
    """So many agents at once that only wait, by two workers: what they cost a second once all are there."""
    url, gate = server.new_store(), directory / "gate"
    enqueue(directory, url, f"read line < {gate}", samples=agents // 4, tasks=4)
    os.mkfifo(gate)
    start = time.perf_counter()
    with workers(url, 2, "-j", str(agents // 2)) as started, Store.open(url) as store:
        while (running := sum(queue.rollouts.get("running", 0) for queue in store.leases.queues())) < agents:
            if time.perf_counter() - start > 1200:
                raise SystemExit(f"bench: only {running} of {agents} agents run after 20 minutes")
            time.sleep(0.5)
        ready = time.perf_counter() - start
        cpu, theirs = sum(cpu_own(each.pid) for each in started), cpu_of(server.pid)
        time.sleep(seconds)
        cpu, theirs = sum(cpu_own(each.pid) for each in started) - cpu, cpu_of(server.pid) - theirs
        lost = agents - sum(queue.rollouts.get("running", 0) for queue in store.leases.queues())
        memory = sum(rss_mb(each.pid) for each in started)
        connections = len(list(Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()))
    with contextlib.suppress(OSError):  # no agent may be there by now
        os.close(os.open(gate, os.O_WRONLY | os.O_NONBLOCK))  # ends agents, which outlive killed workers
    return {
        "agents": agents,
        "lost": lost,
        "all_running_after_s": round(ready, 1),
        "workers_cpu_share": round(cpu / seconds, 3),
        "postgres_cpu_share": round(theirs / seconds, 3),
        "workers_memory_mb": round(memory),
        "postgres_processes": connections,
    }


def cpu_own(pid: int) -> float:
    """The CPU seconds of one process without those below it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def rss_mb(pid: int) -> float:
    """The memory of a process in MB."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help="less of everything, in about a minute")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    short = options.short
    figures: dict[str, Any] = {"machine": machine()}
    with tempfile.TemporaryDirectory() as name, running_server(is_durable=True) as server:
        directory = Path(name)
        figures["syncs_per_s"] = round(syncs_per_s(server.directory))
        figures["commits"] = bench_commits(server, 1 if short else 6)
        calls = long_calls("c", 1)[:4]
        figures["latency"] = asyncio.run(bench_latency(server, calls, 2 if short else 20))
        few = bench_workers(server, directory / "few", 1, 1)
        figures["workers"] = by_number = [
            bench_workers(server, directory / f"w{number}", number, (4 if short else 12) * number)
            for number in ((1, 2) if short else (1, 2, 4))
        ]
        # Without what a worker takes to start, by the difference of two runs of one.
        more = by_number[0]["rollouts"] - few["rollouts"]
        figures["rollout"] = {
            "cpu_ms": round(1e3 * (by_number[0]["cpu_s"] - few["cpu_s"]) / more, 1),
            "own_ms": by_number[0]["own_ms_per_rollout"],
            "target_ms": OWN_COST_TARGET_MS,
        }
        figures["idle"] = bench_idle(server, directory / "idle", 40 if short else 1000, 5 if short else 30)
    print(json.dumps(figures, indent=2))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
