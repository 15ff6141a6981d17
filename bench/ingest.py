"""How fast session logs are read: CPU, memory and time for 1 GB of Claude Code's, beside other readers of them.

    python bench/ingest.py [DIR] [--megabytes N] [--json FILE] [--no-peers]

DIR, or UNDERSTUDY_SESSIONS, holds real session logs (`*.jsonl`) that are multiplied: each copy with fresh ids, so
that no turn is in two files. Without them sessions are made up. Every reader gets the same files, in processes of
its own, and what is counted is what those processes used.

The peers do less: `claude-code-log` (PyPI) is only asked to load each file into its models, `ccusage` (npm, Rust)
adds up the usage that the lines name, without a network. Neither says what the model was sent.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

RATE_TARGET, MEMORY_TARGET, AGAIN_TARGET = 350.0, 500.0, 2.0
CLAUDE_CODE_LOG, CCUSAGE = "claude-code-log==1.7.0", "ccusage@20.0.24"
PROJECTS = 7
_IDS = re.compile(
    rb"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}|(?:msg|toolu|req)_[A-Za-z0-9]{16,}"
)
_ALPHABET = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJ0123456789"
_LOAD = """
import sys
from pathlib import Path
from claude_code_log.converter import load_transcript
for path in sorted(Path(sys.argv[1]).rglob("*.jsonl")):
    load_transcript(path, silent=True)
"""

_DECODE = """
import sys, time
from pathlib import Path
import msgspec
decode, size, seconds = msgspec.json.Decoder(msgspec.Raw).decode, 0, 0.0
for path in sorted(Path(sys.argv[1]).rglob("*.jsonl")):
    lines = path.read_bytes().splitlines()
    size += sum(map(len, lines))
    start = time.process_time()
    for line in lines:
        try:
            decode(line)
        except msgspec.DecodeError:
            continue
    seconds += time.process_time() - start
print(size / 1e6 / seconds)
"""
"""The most that a reader built on msgspec can reach: its parser checks each line, and makes nothing of it."""


# --- what is read -----------------------------------------------------------------------------------------


def made_up(seed: int) -> bytes:
    """A session of a few hundred kilobytes as Claude Code 2.1 writes it."""
    dice = random.Random(seed)
    vocabulary = (Path(os.__file__).parent / "argparse.py").read_text().split(" ")
    lines: list[dict[str, Any]] = []
    last: str | None = None

    def prose(size: int) -> str:
        at = dice.randrange(max(1, len(vocabulary) - size))
        return " ".join(vocabulary[at : at + size])

    def add(kind: str, message: dict[str, Any], **more: Any) -> None:
        nonlocal last
        own = str(uuid.UUID(int=dice.getrandbits(128)))
        lines.append(
            {
                "parentUuid": last,
                "isSidechain": False,
                "userType": "external",
                "cwd": "/home/dev/proj",
                "sessionId": session,
                "version": "2.1.150",
                "type": kind,
                "message": message,
                "uuid": own,
                "timestamp": f"2026-11-21T10:{len(lines) // 60 % 60:02}:{len(lines) % 60:02}.000Z",
                **more,
            }
        )
        last = own

    session = str(uuid.UUID(int=dice.getrandbits(128)))
    for _ in range(dice.randrange(20, 90)):
        key, call = (f"{kind}_{dice.getrandbits(96):024x}" for kind in ("msg", "toolu"))
        answer = {"id": key, "type": "message", "role": "assistant", "model": "claude-opus-4-5"}
        usage = {"input_tokens": dice.randrange(9), "output_tokens": dice.randrange(900)}
        add("user", {"role": "user", "content": prose(60)})
        add("assistant", {**answer, "content": [{"type": "text", "text": prose(50)}], "usage": usage})
        use = {"type": "tool_use", "id": call, "name": "Read", "input": {"file_path": "/a.py"}}
        add("assistant", {**answer, "content": [use], "stop_reason": "tool_use", "usage": usage})
        result = prose(dice.choice((20, 300, 900)))
        blocks = [{"tool_use_id": call, "type": "tool_result", "content": result}]
        add("user", {"role": "user", "content": blocks}, toolUseResult={"file": {"content": result}})
    return b"".join(json.dumps(line, ensure_ascii=False).encode() + b"\n" for line in lines)


def synthesised(sources: Sequence[bytes], projects: Path, size: int) -> int:
    """Write copies of the sources with fresh ids below `projects`, of `size` bytes at least. Returns how many."""
    dice = random.Random(1)
    total = number = 0
    while total < size:
        directory = projects / f"-home-dev-project-{number % PROJECTS}"
        directory.mkdir(parents=True, exist_ok=True)
        number += 1
        for source in sources:
            fresh: dict[bytes, bytes] = {}

            def other(match: re.Match[bytes], fresh: dict[bytes, bytes] = fresh) -> bytes:
                old = match[0]
                if old not in fresh:
                    kind, _, rest = old.partition(b"_")
                    fresh[old] = (
                        kind + b"_" + bytes(dice.choices(_ALPHABET, k=len(rest)))
                        if rest
                        else str(uuid.UUID(int=dice.getrandbits(128))).encode()
                    )
                return fresh[old]

            data = _IDS.sub(other, source)
            (directory / f"{uuid.UUID(int=dice.getrandbits(128))}.jsonl").write_bytes(data)
            total += len(data)
    return total


# --- measuring --------------------------------------------------------------------------------------------


def descendants(root: int) -> Iterator[int]:
    yield root
    try:
        children = Path(f"/proc/{root}/task/{root}/children").read_text().split()
    except OSError:
        return
    for child in children:
        yield from descendants(int(child))


def resident(pids: Iterator[int]) -> int:
    pages = 0
    for pid in pids:
        try:
            pages += int(Path(f"/proc/{pid}/statm").read_text().split()[1])
        except OSError:
            continue
    return pages * os.sysconf("SC_PAGE_SIZE")


def measured(command: Sequence[str | Path], env: dict[str, str] | None = None) -> dict[str, Any]:
    """Run a command: CPU seconds and wall seconds, and the most memory that it and its children had at once."""
    before = os.times()
    began = time.perf_counter()
    peak = 0
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        process = subprocess.Popen(command, stdout=out, stderr=err, env=env, stdin=subprocess.DEVNULL)
        ended = threading.Event()

        def watch() -> None:
            nonlocal peak
            while not ended.wait(0.02):
                peak = max(peak, resident(descendants(process.pid)))

        watcher = threading.Thread(target=watch)
        watcher.start()
        process.wait()
        ended.set()
        watcher.join()
        wall = time.perf_counter() - began
        after = os.times()
        out.seek(0)
        err.seek(0)
        if process.returncode:
            raise RuntimeError(f"{command[0]}: {err.read()[-2000:].decode(errors='replace')}")
        text = out.read()
    # What the watching itself took is this process's own time, not its children's.
    cpu = after.children_user - before.children_user + after.children_system - before.children_system
    return {"cpu_s": cpu, "wall_s": wall, "peak_mb": peak / 1e6, "out": text}


def rate(figures: dict[str, Any], size: int) -> float:
    return size / 1e6 / figures["cpu_s"]


# --- the readers ------------------------------------------------------------------------------------------


def ours(projects: Path, scratch: Path, nothing: Path) -> dict[str, Any]:
    tool = [Path(sys.executable).parent / "understudy", "ingest"]
    start = measured([*tool, nothing, "--dry-run", "--json", "--jobs", "1"])
    one = measured([*tool, projects, "--dry-run", "--json", "--jobs", "1"])
    every = measured([*tool, projects, "--dry-run", "--json"])
    counts = json.loads(one["out"])
    store = scratch / "store"
    first = measured([*tool, projects, "--dir", store, "--json"])
    again = measured([*tool, projects, "--dir", store, "--json"])
    size = sum(path.stat().st_size for path in store.rglob("*") if path.is_file())
    figures = {"start": start, "dry run, one process": one, "dry run, all cores": every}
    limit = float(measured([sys.executable, "-c", _DECODE, projects])["out"])
    figures |= {"into the store": first, "again, unchanged": again}
    return {
        "figures": figures,
        "limit": limit,
        "states": counts["states"],
        "losses": counts["losses"],
        "store_mb": size / 1e6,
    }


def claude_code_log(cache: Path, projects: Path, scratch: Path) -> dict[str, Any]:
    venv = cache / CLAUDE_CODE_LOG.replace("==", "-")
    python = venv / "bin" / "python"
    if not (venv / "ready").exists():
        subprocess.run([sys.executable, "-m", "venv", "--clear", venv], check=True)
        subprocess.run([python, "-m", "pip", "install", "-q", CLAUDE_CODE_LOG], check=True, capture_output=True)
        (venv / "ready").touch()
    return measured([python, "-c", _LOAD, projects], {"PATH": os.defpath, "HOME": str(scratch)})


def ccusage(cache: Path, projects: Path, scratch: Path) -> dict[str, Any]:
    directory = cache / CCUSAGE.replace("@", "-")
    program = directory / "node_modules" / ".bin" / "ccusage"
    if not program.exists():
        install = ["npm", "install", "--no-audit", "--no-fund", "--silent", "--prefix", directory, CCUSAGE]
        subprocess.run(install, check=True)
    env = {"PATH": os.environ["PATH"], "HOME": str(scratch), "CLAUDE_CONFIG_DIR": str(projects.parent)}
    return measured(
        ["unshare", "--user", "--map-root-user", "--net", program, "daily", "--offline", "--json"], env
    )


PEERS = {
    "claude-code-log": (claude_code_log, "loads the files only"),
    "ccusage": (ccusage, "adds up usage only"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path, default=os.environ.get("UNDERSTUDY_SESSIONS"))
    parser.add_argument("--megabytes", type=int, default=1000, help="how much is read [default: 1000]")
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--no-peers", action="store_true", help="our own reader only")
    parser.add_argument("--scratch", type=Path, help="a directory for what is read [default: a temporary one]")
    options = parser.parse_args()
    logs = sorted(Path(options.directory).glob("*.jsonl")) if options.directory else []
    sources = [path.read_bytes() for path in logs] or [made_up(seed) for seed in range(8)]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "understudy" / "bench"
    cache.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix="bench-ingest-", dir=options.scratch))
    try:
        projects = scratch / "claude" / "projects"
        size = synthesised(sources, projects, options.megabytes * 1_000_000)
        (scratch / "nothing").mkdir()
        (scratch / "nothing" / "one.jsonl").write_bytes(made_up(0)[:2000])
        origin = f"{len(logs)} real sessions" if logs else "sessions made up by this bench"
        files = sum(1 for _ in projects.rglob("*.jsonl"))
        print(f"{size / 1e6:.0f} MB in {files} files, multiplied from {origin}; load {os.getloadavg()[0]:.1f}")
        report: dict[str, Any] = {"bytes": size, "files": files, "origin": origin, "cpus": os.cpu_count()}
        report |= shown(ours(projects, scratch, scratch / "nothing"), size)
        if not options.no_peers:
            report["peers"] = compared(cache, projects, scratch, size, report["mb_per_cpu_s"])
    finally:
        shutil.rmtree(scratch)
    report["load"] = os.getloadavg()
    if options.json:
        options.json.write_text(json.dumps(report, indent=1) + "\n")


def shown(measured: dict[str, Any], size: int) -> dict[str, Any]:
    figures = measured["figures"]
    print(f"{'':<32}{'CPU s':>8}{'MB/CPU-s':>10}{'wall s':>8}{'peak MB':>9}")
    for name, one in figures.items():
        speed = "" if name in ("start", "again, unchanged") else f"{rate(one, size):.0f}"
        cells = f"{one['cpu_s']:>8.2f}{speed:>10}{one['wall_s']:>8.2f}{one['peak_mb']:>9.0f}"
        print(f"{'understudy, ' + name:<32}{cells}")
    alone = figures["dry run, one process"]
    net = {"cpu_s": max(alone["cpu_s"] - figures["start"]["cpu_s"], 1e-9)}
    peak = max(one["peak_mb"] for one in figures.values())
    results = {
        "mb_per_cpu_s": rate(alone, size),
        "parser_mb_per_cpu_s": measured["limit"],
        "mb_per_cpu_s_without_start": rate(net, size),
        "states": measured["states"],
        "states_per_cpu_s": measured["states"] / net["cpu_s"],
        "states_per_s_all_cores": measured["states"] / figures["dry run, all cores"]["wall_s"],
        "peak_mb": peak,
        "again_s": figures["again, unchanged"]["wall_s"],
        "store_mb": measured["store_mb"],
        "losses": measured["losses"],
        "runs": {name: {key: one[key] for key in ("cpu_s", "wall_s", "peak_mb")} for name, one in figures.items()},
    }
    print(
        f"{measured['states']} states: {results['states_per_cpu_s']:.0f} a CPU second, "
        f"{results['states_per_s_all_cores']:.0f} a second on all cores; store {measured['store_mb']:.0f} MB"
    )
    print(f"parse and linearise {results['mb_per_cpu_s_without_start']:.0f} MB per CPU second", end=" ")
    print(f"(with the start {results['mb_per_cpu_s']:.0f}), target {RATE_TARGET:.0f}:", end=" ")
    print("met" if results["mb_per_cpu_s_without_start"] >= RATE_TARGET else "MISSED")
    print(f"msgspec's parser alone, the limit: {measured['limit']:.0f} MB per CPU second")
    print(f"memory {peak:.0f} MB, target {MEMORY_TARGET:.0f}: {'met' if peak < MEMORY_TARGET else 'MISSED'}")
    again = results["again_s"]
    met = "met" if again < AGAIN_TARGET else "MISSED"
    print(f"again over unchanged files {again:.2f} s, target {AGAIN_TARGET:.0f}: {met}")
    return results


def compared(cache: Path, projects: Path, scratch: Path, size: int, own: float) -> dict[str, Any]:
    peers: dict[str, Any] = {}
    for name, (run, what) in PEERS.items():
        try:
            one = run(cache, projects, scratch)
        except (OSError, subprocess.CalledProcessError, RuntimeError) as error:
            print(f"{name}: skipped, {str(error).strip()[-300:]}")
            peers[name] = {"skipped": str(error)[-300:]}
            continue
        speed = rate(one, size)
        print(
            f"{name} ({what}): {one['cpu_s']:.2f} CPU s, {speed:.0f} MB per CPU second, {one['wall_s']:.2f} s, "
            f"{one['peak_mb']:.0f} MB; understudy / {name}: {own / speed:.2f}"
        )
        peers[name] = {"does": what, "mb_per_cpu_s": speed, "ratio": own / speed}
        peers[name] |= {key: one[key] for key in ("cpu_s", "wall_s", "peak_mb")}
    return peers


if __name__ == "__main__":
    main()
