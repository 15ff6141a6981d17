"""What a rollout costs besides the CLI, the model and the tests, and how many a machine carries out a second.

    python bench/rollout.py [--json FILE]

Real tasks, the real Claude Code CLI, the embedded server with the oracle policy. The overhead is measured one
rollout at a time, each in a run of its own: everything from the start of an attempt to its end but the programs of
the agent and of the tests, in all versions, plus what the gateway adds to the agent's calls (translation, capture
and commit, against the same bytes sent straight to a server that answers at once). The peer is the rest of the
same rollouts: the CLI, the model and the tests.

All that is wall clock, so it says little on a machine that does other work. What holds there is the CPU time of
the `understudy run` process itself, by the difference of a run of all tasks and one of one: without its children,
and without what a run begins with, but with the gateway, which runs in it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web

from understudy.cli.main import main as understudy
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.sandbox.base import Completed, sandbox_labels
from understudy.sandbox.local.sandboxes import LocalSandbox
from understudy.store import Store
from understudy.store.address import StoreLocation
from understudy.types import Attempt, Call, Files, PytestChecks, Task

UNDERSTUDY = Path(sys.executable).with_name("understudy")
TASKS, SAMPLES = 4, 6
OVERHEAD_TARGET_MS, RATE_TARGET = 60.0, 0.8


AGENT, TESTS = "agent", "tests"
_PROGRAMS = {"claude": AGENT, "report_plugin.py": TESTS, "twin_driver.py": TESTS}


def watched_run(record: Path, arguments: list[str]) -> None:
    """Do what `understudy` does with these arguments, and write how many seconds the programs of the agent and of
    the tests took, by attempt.
    """
    seconds: dict[str, dict[str, float]] = {}
    run_in_sandbox = LocalSandbox.run

    async def run(self: LocalSandbox, argv: list[str], **options: Any) -> Completed:
        done = await run_in_sandbox(self, argv, **options)
        names = {Path(word).name for word in argv[:5]} & _PROGRAMS.keys()
        if names and (attempt := sandbox_labels().get("attempt")):
            of_attempt = seconds.setdefault(attempt, {AGENT: 0.0, TESTS: 0.0})
            of_attempt[_PROGRAMS[names.pop()]] += done.duration_s
        return done

    LocalSandbox.run = run  # type: ignore[method-assign]
    sys.argv = ["understudy", *arguments]
    try:
        understudy()
    finally:
        record.write_text(json.dumps(seconds))


def run(tasks: Path, output: Path, *options: str, record: Path | None = None) -> tuple[dict[str, Any], float]:
    """One `understudy run`; its summary, and the CPU seconds of its process without its children."""
    program = [UNDERSTUDY] if record is None else [sys.executable, __file__, "--watched-run", record]
    command = [*program, "run", "embedded", "--tasks", tasks, "-o", output, "--json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdout is not None
        summary = json.loads(process.stdout.read())
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and its figures are still there
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    if summary["solved"] != summary["rollouts"]:
        raise SystemExit(f"bench: the oracle solved {summary['solved']} of {summary['rollouts']}")
    return summary, (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def attempts(output: StoreLocation) -> tuple[list[Attempt], list[list[Call]], float]:
    """The attempts that were graded themselves, their calls, and the wall clock from first to last."""
    graded: list[Attempt] = []
    calls: list[list[Call]] = []
    with Store.open(output, create=False) as store:
        every = [store.runs.attempts(rollout.id)[-1] for rollout in store.runs.rollouts()]
        for attempt in every:
            verdict = store.runs.verdict(attempt.id)
            assert verdict is not None
            if verdict.reused_from:  # of an equal patch, which the oracle mostly makes
                continue
            graded.append(attempt)
            calls.append(list(store.calls.of_attempt(attempt.id)))
        wall = max(attempt.ended_at or 0.0 for attempt in every) - min(attempt.started_at for attempt in every)
    return graded, calls, wall


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
    parser.add_argument("--watched-run", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.watched_run:
        return watched_run(Path(options.watched_run[0]), options.watched_run[1:])
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        tasks = directory / "tasks.jsonl"
        make = [UNDERSTUDY, "tasks", "make", "toolz", "--count", str(TASKS), "--seed", "5", "-o", tasks]
        subprocess.run(make, check=True, capture_output=True)
        own: list[float] = []
        rest: list[float] = []
        parts: list[dict[str, float]] = []
        calls: list[list[Call]] = []
        for number, line in enumerate(tasks.read_text().splitlines()):
            single = directory / f"task{number}.jsonl"
            single.write_text(line + "\n")
            record, output = directory / f"record{number}", directory / f"one{number}"
            run(single, output, record=record)  # the first time validates the task
            shutil.rmtree(output)
            run(single, output, record=record)
            (attempt,), of_attempt, _ = attempts(output)
            took = sum(json.loads(record.read_bytes())[attempt.id].values())
            rest.append(took)
            own.append((attempt.ended_at or 0.0) - attempt.started_at - took)
            parts.append(attempt.timings)
            calls += of_attempt
        fewer, fewer_cpu_s = run(directory / "task0.jsonl", directory / "fewer")
        more, more_cpu_s = run(tasks, directory / "more")
        per_call = asyncio.run(gateway_ms(calls[0], directory))
        run(tasks, directory / "many", "-n", str(SAMPLES))
        _, _, wall = attempts(directory / "many")
    cpu_ms = 1000 * (more_cpu_s - fewer_cpu_s) / (more["rollouts"] - fewer["rollouts"])
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
        "rollouts_per_s": round(TASKS * SAMPLES / wall, 2),
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
