"""What a rollout costs besides the CLI, the model and the tests, and how many a machine carries out a second.

    python bench/rollout.py [--json FILE]

Real tasks, the real Claude Code CLI, the embedded server with the oracle policy. The overhead is measured one
rollout at a time: everything but the agent's own wall clock and the checks' own, plus what the gateway adds to the
agent's calls (translation, capture and commit, against the same bytes sent straight to a server that answers at
once). The peer is the rest of the same rollouts: the CLI, the model and the tests.

All that is wall clock, so it says little on a machine that does other work. What holds there is the CPU time of
the `understudy run` process itself, by the difference of two runs: without its children, and without what a run
begins with, but with the gateway, which runs in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.types import Call, Files, PytestChecks, Task

UNDERSTUDY = Path(sys.executable).with_name("understudy")
TASKS, SAMPLES = 4, 6
OVERHEAD_TARGET_MS, RATE_TARGET = 100.0, 0.8


def run(tasks: Path, output: Path, *options: str) -> tuple[dict[str, Any], float]:
    """One `understudy run`; its summary, and the CPU seconds of its process without its children."""
    command = [UNDERSTUDY, "run", "embedded", "--tasks", tasks, "-o", output, "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        summary = json.loads(process.stdout.read())
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its figures are still there
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    if summary["solved"] != summary["rollouts"]:
        raise SystemExit(f"bench: the oracle solved {summary['solved']} of {summary['rollouts']}")
    return summary, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def attempts(output: StoreLocation) -> tuple[list[dict[str, float]], list[list[Call]], float]:
    """Seconds by part of each attempt that was graded itself, its calls, and the wall clock from first to last."""
    parts: list[dict[str, float]] = []
    calls: list[list[Call]] = []
    with Store.open(output, create=False) as store:
        every = [store.runs.attempts(rollout.id)[-1] for rollout in store.runs.rollouts()]
        for attempt in every:
            verdict = store.runs.verdict(attempt.id)
            assert verdict is not None
            if verdict.reused_from:  # of an equal patch, which the oracle mostly makes
                continue
            parts.append({**attempt.timings, "checks_s": verdict.checks_s})
            calls.append(list(store.calls.of_attempt(attempt.id)))
        wall = max(attempt.ended_at or 0.0 for attempt in every) - min(attempt.started_at for attempt in every)
    return parts, calls, wall


def completion(call: Call) -> bytes:
    """A chat completion in vLLM's shape with the token ids and logprobs of a stored call."""
    entries = [
        {"token": "", "logprob": logprob, "bytes": [], "top_logprobs": []} for logprob in call.logprobs or ()
    ]
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "The change is made."},
        "finish_reason": "stop",
        "token_ids": call.completion_token_ids,
        "logprobs": {"content": entries},
    }
    usage = {"prompt_tokens": call.usage.prompt_tokens, "completion_tokens": call.usage.completion_tokens}
    answer = {"id": "c", "object": "chat.completion", "model": "m", "choices": [choice], "usage": usage}
    return json.dumps({**answer, "prompt_token_ids": call.prompt_token_ids}).encode()


async def gateway_ms(calls: list[Call], directory: Path) -> float:
    """Median milliseconds that the gateway adds to a call: translation, capture, commit, answer.

    The model is a server that answers at once with what the store has; the same bytes sent straight to it are
    the floor.
    """
    through: list[float] = []
    straight: list[float] = []
    answers = iter([completion(call) for call in calls for _ in range(2)] * 10)
    app = web.Application(client_max_size=1 << 26)

    async def answer(request: web.Request) -> web.Response:
        await request.read()
        return web.Response(body=next(answers), content_type="application/json")

    app.router.add_post("/v1/chat/completions", answer)
    server = web.AppRunner(app)
    await server.setup()
    await web.TCPSite(server, "127.0.0.1", 0).start()
    port = server.addresses[0][1]
    backend, keys = VLLMBackend(f"http://127.0.0.1:{port}/v1", "m"), Keys()
    with Store.open(directory / "gateway") as store:
        gateway = Gateway(ModelRouter(backend), store.calls, keys)
        url = await gateway.start_tcp("127.0.0.1", 0)
        async with aiohttp.ClientSession() as session:
            for number in range(10):
                headers = {"authorization": f"Bearer {keys.issue(attempt_in(store, number))}"}
                for call in calls:
                    through.append(await post_s(session, f"{url}/v1/messages", call.request, headers))
                    direct = f"http://127.0.0.1:{port}/v1/chat/completions"
                    straight.append(await post_s(session, direct, call.request, {}))
        await gateway.stop()
    await backend.close()
    await server.cleanup()
    return 1000 * (statistics.median(through) - statistics.median(straight))


def attempt_in(store: Store, number: int) -> str:
    """The id of a new running attempt."""
    task = Task("t", "r", "i", Files({}), PytestChecks({}, ("t",)), "")
    store.runs.create("bench", {}).result()
    store.runs.add_tasks("bench", [task]).result()
    store.runs.create_rollouts("bench", [(f"r{number}", "t", number)]).result()
    attempt = store.runs.start_attempt(f"r{number}").result()
    store.runs.mark_running(attempt.id).result()
    return attempt.id


async def post_s(session: aiohttp.ClientSession, url: str, body: bytes, headers: dict[str, str]) -> float:
    """Seconds until the whole answer to a POST is here."""
    started = time.perf_counter()
    async with session.post(url, data=body, headers=headers) as reply:
        await reply.read()
        reply.raise_for_status()
    return time.perf_counter() - started


def main() -> None:
    """Print the figures, and write them to a file when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tasks = directory / "tasks.jsonl"
        make = [UNDERSTUDY, "tasks", "make", "toolz", "--count", str(TASKS), "--seed", "5", "-o", tasks]
        subprocess.run(make, check=True, capture_output=True)
        fewer, fewer_cpu_s = run(tasks, directory / "one", "-j", "1", "-n", "3")
        parts, calls, _ = attempts(directory / "one")
        per_call = asyncio.run(gateway_ms(calls[0], directory))
        summary, cpu_s = run(tasks, directory / "many", "-n", str(SAMPLES))
        _, _, wall = attempts(directory / "many")
    rest = [part["agent_s"] + part["checks_s"] for part in parts]
    # The checks ran within `grade_s`, so they are in the sum of the parts twice.
    own = [sum(part.values()) - others - part["checks_s"] for part, others in zip(parts, rest, strict=True)]
    cpu_ms = 1000 * (cpu_s - fewer_cpu_s) / (summary["rollouts"] - fewer["rollouts"])
    per_rollout = per_call * statistics.median(len(each) for each in calls)
    overhead = 1000 * statistics.median(own) + per_rollout
    figures: dict[str, Any] = {
        "machine": f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores",
        "overhead_ms": round(overhead, 1),
        "overhead_target_ms": OVERHEAD_TARGET_MS,
        "process_cpu_ms": round(cpu_ms, 1),
        "parts_ms": {
            part: round(1000 * statistics.median(each[part] for each in parts), 1) for part in sorted(parts[0])
        },
        "gateway_ms_per_call": round(per_call, 2),
        "cli_model_and_tests_ms": round(1000 * statistics.median(rest), 1),
        "overhead_ratio": round(overhead / (1000 * statistics.median(rest)), 3),
        "rollouts_per_s": round(summary["rollouts"] / wall, 2),
        "rollouts_per_s_target": RATE_TARGET,
    }
    print(f"machine                  {figures['machine']}")
    print(f"overhead a rollout       {overhead:.1f} ms median (target {OVERHEAD_TARGET_MS:.0f})")
    print(f"CPU of our process       {cpu_ms:.1f} ms a rollout, without its children")
    print(f"  of which the gateway   {per_rollout:.1f} ms ({per_call:.2f} ms a call)")
    others = figures["cli_model_and_tests_ms"]
    print(f"CLI, model and tests     {others} ms: the overhead is {figures['overhead_ratio']} of it")
    print(f"rollouts                 {figures['rollouts_per_s']} a second (target {RATE_TARGET})")
    print(f"parts in ms              {figures['parts_ms']}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
