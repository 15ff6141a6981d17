"""What the store costs: bytes of a long conversation, and calls a second with a commit before every answer.

    python bench/store.py [--json FILE] [--directory DIR]

The peer is the naive way, measured in the same run: one SQLite row a call with the whole request, response, token
ids and logprobs, committed one by one. All contents are real Python source from the standard library.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import re
import shutil
import sqlite3
import struct
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from understudy.store import Store
from understudy.store.address import StoreLocation, parse_location
from understudy.types import Call, Files, PytestChecks, Task, Usage

TURNS, TOKENS = 100, 60_000
WRITERS, CONVERSATIONS, SHORT_TURNS = 16, 12, 20
SIZE_TARGET, RATE_TARGET = 3.0, 2000.0
_PIECE = re.compile(r" ?[A-Za-z]{1,6}|\d{1,3}|\s+|[^\w\s]{1,2}|.", re.DOTALL)


def tokenize(text: str) -> list[int]:
    """Ids of a vocabulary of 50,000 with the statistics of a BPE: about four characters of code a token."""
    return [zlib.crc32(piece.encode()) % 50_000 for piece in _PIECE.findall(text)]


def as_float32(values: Sequence[float]) -> tuple[float, ...]:
    """Logprobs as model servers give them: float32, widened on the way."""
    return struct.unpack(f"<{len(values)}f", struct.pack(f"<{len(values)}f", *values))


def source_text(seed: int) -> Iterator[str]:
    """Endless pieces of real source, about 1,000 characters each, none twice in a conversation."""
    files = sorted(Path(os.__file__).parent.glob("*.py"))
    random.Random(seed).shuffle(files)
    while True:
        for file in files:
            text = file.read_text(encoding="utf-8", errors="replace")
            for start in range(0, len(text) - 1000, 1000):
                yield text[start : start + 1000]


def conversation(
    name: str, seed: int, *, turns: int, preamble: int, result: int, answer_length: int
) -> list[Call]:
    """The calls of one attempt as Claude Code makes them; `cache_control` moves with the last message.

    `preamble`, `result` and `answer_length` are the characters of the system prompt and tools, of a tool's result,
    and of an answer.
    """
    rng, texts = random.Random(seed), source_text(seed)

    def take(size: int) -> str:
        text = ""
        while len(text) < size:
            text += next(texts)
        return text[:size]

    fixed = source_text(0)  # the same in every conversation
    system = [{"type": "text", "text": "".join(next(fixed) for _ in range(max(1, preamble // 4000)))}]
    tools = [
        {"name": f"Tool{n}", "description": next(fixed), "input_schema": {"type": "object"}}
        for n in range(max(1, preamble * 3 // 4000))
    ]
    task = take(result)
    messages: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": task}]}]
    ids = tokenize(json.dumps(system) + json.dumps(tools)) + tokenize(task)
    calls: list[Call] = []
    for turn in range(turns):
        sent = [*messages[:-1], json.loads(json.dumps(messages[-1]))]
        sent[-1]["content"][-1]["cache_control"] = {"type": "ephemeral"}
        body = {
            "model": "qwen3-coder",
            "messages": sent,
            "system": system,
            "tools": tools,
            "metadata": {"user_id": name},
            "max_tokens": 32000,
            "stream": True,
        }
        answer = take(answer_length)
        call_id = f"toolu_{name}_{turn}"
        content = [
            {"type": "text", "text": answer[: answer_length // 3]},
            {
                "type": "tool_use",
                "id": call_id,
                "name": "Edit",
                "input": {"new_string": answer[answer_length // 3 :]},
            },
        ]
        completion = tokenize(answer)
        usage = {"input_tokens": len(ids), "output_tokens": len(completion)}
        response = {"id": f"msg_{name}_{turn}", "role": "assistant", "content": content, "usage": usage}
        calls.append(
            Call(
                id=f"{name}-{turn}",
                attempt_id=f"{name}.1",
                sequence=turn,
                dialect="anthropic",
                requested_model="qwen3-coder",
                backend="vllm",
                backend_model="Qwen/Qwen3-Coder-30B-A3B-Instruct",
                request=json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode(),
                response=json.dumps(response, separators=(",", ":"), ensure_ascii=False).encode(),
                status="ok",
                started_at=time.time(),
                ended_at=time.time(),
                parent_id=f"{name}-{turn - 1}" if turn else None,
                session_id=f"6f1b8c1e-5a53-4f0c-9d0e-{seed:012d}",
                policy_version="step-000120",
                prompt_token_ids=tuple(ids),
                completion_token_ids=tuple(completion),
                logprobs=as_float32([-rng.expovariate(4.0) for _ in completion]),
                finish_reason="tool_calls",
                usage=Usage(len(ids), len(completion)),
                sampling={"temperature": 1.0, "top_p": 1.0},
            )
        )
        output = take(result)
        result_block = {"type": "tool_result", "tool_use_id": call_id, "content": output}
        messages += [{"role": "assistant", "content": content}, {"role": "user", "content": [result_block]}]
        ids = [*ids, *completion, 50_001, *tokenize(output), 50_002]
    return calls


def open_store(location: StoreLocation, names: Sequence[str]) -> Store:
    """A new store with a running attempt for every name."""
    store = Store.open(location)
    source, checks = Files({"a.py": ""}), PytestChecks({}, ("test",))
    task = Task(instance_id="t", repo="r", instruction="i", source=source, checks=checks, gold_patch="")
    store.runs.create("bench", {}).result()
    store.runs.add_tasks("bench", [task]).result()
    store.runs.create_rollouts("bench", [(name, "t", n) for n, name in enumerate(names)]).result()
    for attempt in [store.runs.start_attempt(name) for name in names]:
        store.runs.mark_running(attempt.result().id).result()
    return store


class Naive:
    """The peer: one row a call, everything whole, one commit each."""

    def __init__(self, directory: Path) -> None:
        self.file = directory / "naive.db"
        self._local = threading.local()
        self._connect().execute("CREATE TABLE calls (id TEXT PRIMARY KEY, request, response, tokens, logprobs)")

    def append(self, call: Call) -> None:
        """Store a call and wait until it is durable."""
        ids = (*(call.prompt_token_ids or ()), *(call.completion_token_ids or ()))
        logprobs = call.logprobs or ()
        values = (struct.pack(f"<{len(ids)}I", *ids), struct.pack(f"<{len(logprobs)}d", *logprobs))
        row = (call.id, call.request, call.response, *values)
        self._connect().execute("INSERT INTO calls VALUES (?, ?, ?, ?, ?)", row)

    def close(self) -> None:
        """Leave one file."""
        self._connect().execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def _connect(self) -> sqlite3.Connection:
        if not hasattr(self._local, "connection"):
            connection = sqlite3.connect(self.file, isolation_level=None, timeout=60)
            for pragma in ("journal_mode = WAL", "synchronous = FULL"):
                connection.execute(f"PRAGMA {pragma}")
            self._local.connection = connection
        return self._local.connection


def in_parallel(work: Callable[[Call], object], jobs: Sequence[Sequence[Call]]) -> tuple[float, list[float]]:
    """Run each job in a thread of its own; seconds in all, and of each call."""
    latencies: list[list[float]] = [[] for _ in jobs]
    start = threading.Barrier(len(jobs) + 1)

    def run(job: Sequence[Call], took: list[float]) -> None:
        start.wait()
        for call in job:
            call_start = time.perf_counter()
            work(call)
            took.append(time.perf_counter() - call_start)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(jobs, latencies, strict=True)]
    for thread in threads:
        thread.start()
    start.wait()
    started = time.perf_counter()
    for thread in threads:
        thread.join()
    return time.perf_counter() - started, sorted(took for one in latencies for took in one)


def bench_size(directory: Path) -> dict[str, Any]:
    """Bytes on disk of one long conversation, over the bytes of its last request and response."""
    calls = conversation("long", 1, turns=TURNS, preamble=24_000, result=1_380, answer_length=480)
    prompt = len(calls[-1].prompt_token_ids or ())
    if prompt < TOKENS:
        raise SystemExit(f"bench: the conversation grew to {prompt} tokens, not to {TOKENS}")
    store, naive = open_store(directory / "long", ["long"]), Naive(directory)
    for call in calls:
        store.calls.append(call).result()
        naive.append(call)
    store.close()
    naive.close()
    last = len(calls[-1].request) + len(calls[-1].response)
    size = sum(file.stat().st_size for file in (directory / "long").iterdir())
    started = time.perf_counter()
    with Store.open(directory / "long", create=False) as store:
        assert list(store.calls.of_attempt("long.1")) == calls
    return {
        "turns": len(calls),
        "last_prompt_tokens": prompt,
        "last_request_response_bytes": last,
        "store_bytes": size,
        "ratio": round(size / last, 2),
        "target_ratio": SIZE_TARGET,
        "naive_ratio": round(naive.file.stat().st_size / last, 1),
        "naive_ratio_bodies_only": round(sum(len(c.request) + len(c.response) for c in calls) / last, 1),
        "read_back_s": round(time.perf_counter() - started, 3),
        "byte_exact": True,
    }


def bench_rate(directory: Path, location: StoreLocation) -> dict[str, Any]:
    """Calls a second at 16 writers, each waiting for its commit."""
    names = [[f"w{writer}c{n}" for n in range(CONVERSATIONS)] for writer in range(WRITERS)]
    jobs = [
        [
            call
            for n, name in enumerate(row)
            for call in conversation(
                name, 100 * writer + n, turns=SHORT_TURNS, preamble=12_000, result=1_000, answer_length=400
            )
        ]
        for writer, row in enumerate(names)
    ]
    number = sum(map(len, jobs))
    flat = [name for row in names for name in row]
    store = open_store(location, flat)
    cpu = time.process_time()
    wall, latencies = in_parallel(lambda call: store.calls.append(call).result(), jobs)
    cpu = time.process_time() - cpu
    store.close()
    (directory / "many").mkdir(parents=True, exist_ok=True)
    naive = Naive(directory / "many")
    naive_wall, naive_latencies = in_parallel(naive.append, jobs)
    with Store.open(location, create=False) as store:
        for call in (call for job in jobs for call in job if call.sequence == 0):
            start = [other for job in jobs for other in job if other.attempt_id == call.attempt_id]
            assert list(store.calls.of_attempt(call.attempt_id)) == start
    return {
        "writers": WRITERS,
        "calls": number,
        "request_bytes_median": sorted(len(call.request) for job in jobs for call in job)[number // 2],
        "calls_per_s": round(number / wall),
        "target_calls_per_s": RATE_TARGET,
        "cpu_us_per_call": round(cpu / number * 1e6),
        "p50_ms": round(latencies[number // 2] * 1e3, 2),
        "p99_ms": round(latencies[number * 99 // 100] * 1e3, 2),
        "naive_calls_per_s": round(number / naive_wall),
        "naive_p99_ms": round(naive_latencies[number * 99 // 100] * 1e3, 2),
        "byte_exact": True,
    }


def machine() -> dict[str, Any]:
    """What this ran on."""
    info = Path("/proc/cpuinfo")
    models = re.findall(r"model name\s*: (.+)", info.read_text()) if info.exists() else [platform.processor()]
    return {
        "cpu": models[0] if models else platform.machine(),
        "cores": os.cpu_count(),
        "load_1min": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "sqlite": sqlite3.sqlite_version,
    }


def main() -> None:
    """Measure, print, and write JSON if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--directory", type=Path, help="measure on this file system")
    parser.add_argument("--store", help="measure the rate in this empty PostgreSQL database too: postgresql://…")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="understudy-bench-", dir=options.directory))
    try:
        figures = {
            "machine": machine(),
            "size": bench_size(directory),
            "rate": bench_rate(directory, directory / "many"),
        }
        if options.store is not None:
            figures["store"] = bench_rate(directory / "postgresql", parse_location(options.store))
    finally:
        shutil.rmtree(directory)
    size, rate = figures["size"], figures["rate"]
    print(f"machine        {figures['machine']}")
    print(
        f"size           {size['ratio']} x the last request + response (target < {SIZE_TARGET}; "
        f"naive {size['naive_ratio']}, {size['naive_ratio_bodies_only']} without its tokens)"
    )
    print(
        f"               {size['store_bytes']:,} B for {size['turns']} turns to {size['last_prompt_tokens']:,} "
        f"tokens, read back byte-exact in {size['read_back_s']} s"
    )
    print(
        f"rate           {rate['calls_per_s']:,} calls/s at {WRITERS} writers (target >= {RATE_TARGET:,.0f}; "
        f"naive {rate['naive_calls_per_s']:,}, so {rate['calls_per_s'] / rate['naive_calls_per_s']:.1f} x)"
    )
    print(
        f"commit         p50 {rate['p50_ms']} ms, p99 {rate['p99_ms']} ms (naive p99 {rate['naive_p99_ms']} ms); "
        f"CPU {rate['cpu_us_per_call']} µs a call of {rate['request_bytes_median']:,} B (median)"
    )
    if "store" in figures:
        other = figures["store"]
        print(
            f"postgresql     {other['calls_per_s']:,} calls/s at {WRITERS} writers, p50 {other['p50_ms']} ms, "
            f"p99 {other['p99_ms']} ms; CPU of the client {other['cpu_us_per_call']} µs a call"
        )
    if options.json:
        options.json.write_text(json.dumps(figures, indent=2) + "\n")


if __name__ == "__main__":
    main()
