"""What one call, one rollout and one session cost in things that can be counted, so that no clock is asked.

    python bench/counts.py [--json FILE]

Each is done once and then several times more, in a process of its own; what is told is the difference for each one
more. `tests/e2e/test_counts.py` holds these counts. They are of the process of Understudy alone: not of the agent,
the model's server or the sandbox, nor of SQLite's own work.

- `functions`: Python functions called, in all threads. It differs between versions of Python.
- `statements`: SQL statements, those of triggers too.
- `written_bytes`: bytes given to the kernel to write, to files and sockets alike.
- `opened_files`, `processes`: files opened by Python, and programs started.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sqlite3
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from gateway_parts import stacks
from gateway_parts.load import Spec
from gateway_parts.traffic import MODEL
from ingest import made_up
from sqlalchemy.event import listen
from sqlalchemy.pool import Pool

from understudy.cli.app import app
from understudy.gateway.backends.chat import VLLMBackend
from understudy.gateway.keys import Keys
from understudy.gateway.router import ModelRouter
from understudy.gateway.server.app import Gateway
from understudy.run import executors, scheduler
from understudy.store import Store
from understudy.tasks.records import dump
from understudy.types import Files, SuiteChecks, Task

MORE = 5
_PROCESSES = {"subprocess.Popen", "os.posix_spawn", "os.fork", "os.forkpty"}

# An agent that asks the model once and then does the work itself, so that what is counted is not the agent's way.
# Its patch is another each time: equal ones are graded once.
_AGENT = """
import http.client, json, os, pathlib, socket
gateway = http.client.HTTPConnection("localhost")
gateway.sock = socket.socket(socket.AF_UNIX)
gateway.sock.connect(os.environ["UNDERSTUDY_GATEWAY_SOCKET"])
body = {"model": "m", "max_tokens": 20, "messages": [{"role": "user", "content": "Shift."}]}
headers = {"authorization": "Bearer " + os.environ["UNDERSTUDY_API_KEY"], "anthropic-version": "2023-06-01"}
gateway.request("POST", "/v1/messages", json.dumps(body), headers)
assert gateway.getresponse().status == 200
pathlib.Path("calc.py").write_text("right\\n" + os.urandom(8).hex() + "\\n")
"""
_GOLD = "--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-wrong\n+right\n"


class Counts:
    """Counts what this process does, from the moment it is made on."""

    def __init__(self) -> None:
        self._counted: Counter[str] = Counter()
        threading.setprofile(self._profile)
        sys.setprofile(self._profile)
        sys.addaudithook(self._audit)
        listen(Pool, "connect", self._connected)

    def _profile(self, frame: Any, event: str, argument: Any) -> None:
        if event == "call":
            self._counted["functions"] += 1

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            self._counted["opened_files"] += 1
        elif event in _PROCESSES:
            self._counted["processes"] += 1

    def _connected(self, connection: sqlite3.Connection, _: Any) -> None:
        connection.set_trace_callback(self._statement)

    def _statement(self, statement: str) -> None:
        self._counted["statements"] += 1

    def now(self) -> Counter[str]:
        """What was counted until now."""
        fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        return Counter({**self._counted, "written_bytes": int(fields["wchar"])})


def command(*arguments: str | Path) -> None:
    """A command of `understudy`, in this process."""
    click = typer.main.get_command(app)
    if code := click.main([str(word) for word in arguments], standalone_mode=False):
        raise SystemExit(f"bench: understudy {arguments[0]} ended with {code}")


def call(directory: Path, measure: Callable[[Callable[[int], None]], None]) -> None:
    """A call of 59 KB through the gateway in its atomic mode, with 15,400 token ids kept and committed."""

    async def run() -> None:
        with stacks.upstream(directory) as url, Store.open(directory / "store") as store:
            stacks.pace(url, 0.0)
            backend, keys = VLLMBackend(f"{url}/v1", MODEL), Keys()
            gateway = Gateway(ModelRouter(backend), store.calls, keys)
            address = await gateway.start_tcp("127.0.0.1", 0)
            loop = asyncio.get_running_loop()

            def send(number: int) -> None:
                key = asyncio.run_coroutine_threadsafe(issued(store, keys, number), loop).result()
                load = stacks.load(Spec(f"{address}/v1/messages", [key], connections=1, calls=number))
                if load.failed:
                    raise SystemExit(f"bench: {load.failed} calls failed; the last: {load.failure}")

            await asyncio.to_thread(measure, send)
            await gateway.stop()
            await backend.close()

    asyncio.run(run())


async def issued(store: Store, keys: Keys, number: int) -> str:
    """A key for a new attempt."""
    task = Task(
        "t", "r", "i", Files({}), SuiteChecks(parser="parse_log_django", command="true", fail_to_pass=("t",)), ""
    )
    name = f"bench-{number}"
    store.runs.create(name, {}).result()
    store.runs.add_tasks(name, [task]).result()
    store.runs.create_rollouts(name, [(f"{name}-r", "t", 0)]).result()
    attempt = store.runs.start_attempt(f"{name}-r").result()
    store.runs.mark_running(attempt.id).result()
    return keys.issue(attempt.id)


def rollout(directory: Path, measure: Callable[[Callable[[int], None]], None]) -> None:
    """A rollout of a small script as the agent, in the local sandbox, with one call, graded by a shell command."""
    checks = SuiteChecks(
        parser="parse_log_django", command="grep -q right calc.py && echo 'shift ... ok'", fail_to_pass=("shift",)
    )
    task = Task("calc", "calc", "Shift.", Files({"calc.py": "wrong\n"}), checks, _GOLD)
    dump([task], directory / "tasks.jsonl")

    def run(number: int) -> None:
        agent = shlex.join(["python3", "-c", _AGENT])
        command(
            "run", "embedded", "--tasks", directory / "tasks.jsonl", "-o", directory / f"run-{number}", "-j", "1",
            "-n", str(number), "--agent", "shell", "--agent-command", agent, "--policy", "idle",
        )  # fmt: skip

    # How long a rollout takes is not to be counted.
    executors.HEARTBEAT_S = scheduler.HEARTBEAT_S = 1e6
    measure(run)


def session(directory: Path, measure: Callable[[Callable[[int], None]], None]) -> None:
    """A session of Claude Code, a few hundred kilobytes, read and stored."""

    def read(number: int) -> None:
        logs = directory / f"logs-{number}"
        logs.mkdir()
        for seed in range(number):
            (logs / f"{seed}.jsonl").write_bytes(made_up(seed))
        command("ingest", logs, "-d", directory / f"sessions-{number}", "--jobs", "1")

    measure(read)


SUBJECTS = {"call": call, "rollout": rollout, "session": session}


def measured(name: str) -> dict[str, int]:
    """The counts of one more call, rollout or session."""
    counts = Counts()
    done: list[Counter[str]] = []
    with tempfile.TemporaryDirectory() as directory:

        def measure(run: Callable[[int], None]) -> None:
            # The first time fills caches and imports modules.
            for number in (2, 1, 1 + MORE):
                before = counts.now()
                run(number)
                done.append(Counter({key: number - before[key] for key, number in counts.now().items()}))

        SUBJECTS[name](Path(directory), measure)
    return {key: round((done[-1][key] - done[-2][key]) / MORE) for key in sorted(done[-1])}


def main() -> None:
    """Print the counts, and write them to a file when asked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the counts to this file")
    parser.add_argument("--only", choices=SUBJECTS, help="count in this process, and print JSON")
    options = parser.parse_args()
    if options.only:
        print("\n" + json.dumps(measured(options.only)))
        return
    figures: dict[str, dict[str, int]] = {}
    for name in SUBJECTS:
        output = subprocess.check_output([sys.executable, __file__, "--only", name])
        figures[name] = json.loads(output.splitlines()[-1])
        print(f"one more {name:8}", "   ".join(f"{key} {value:,}" for key, value in figures[name].items()))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
