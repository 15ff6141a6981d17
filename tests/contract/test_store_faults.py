"""The store when its process is killed and when the disk is full: nothing answered is lost, nothing is doubled."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from understudy.errors import StoreError
from understudy.store import Store

HERE = Path(__file__).parent
TREE = HERE.parents[1] / "src"

COMMON = """
import json, resource, signal, sys, threading
from pathlib import Path
from understudy.errors import StoreError
from understudy.store import Store
from understudy.types import Call, Files, PytestChecks, Task

def call(attempt, n):
    messages = [{"role": "user", "content": f"{attempt} says {k} " + "and so on " * 40} for k in range(n + 1)]
    return Call(id=f"{attempt}-{n}", attempt_id=attempt, sequence=n, dialect="anthropic", requested_model="m",
                backend="b", backend_model="m", request=json.dumps({"messages": messages}).encode(),
                response=f"answer {n}".encode(), status="ok", started_at=1.0, ended_at=2.0,
                parent_id=f"{attempt}-{n - 1}" if n else None, prompt_token_ids=tuple(range(n * 7 + 3)),
                completion_token_ids=(n, n + 1), logprobs=(-0.5, -n / 3))

def prepare(store, names):
    task = Task(instance_id="t", repo="r", instruction="i", source=Files({}), gold_patch="",
                checks=PytestChecks({}, ("x",)))
    store.runs.create("run", {}).result()
    store.runs.add_tasks("run", [task]).result()
    store.runs.create_rollouts("run", [(name, "t", n) for n, name in enumerate(names)]).result()
    for name in names:
        store.runs.mark_running(store.runs.start_attempt(name).result().id).result()
"""

# Appends from four threads and says each call's id on stdout once its future is resolved.
WRITER = (
    COMMON
    + """
start = int(sys.argv[2])
store = Store.open(Path(sys.argv[1]))
lock = threading.Lock()
def work(attempt):
    for n in range(start, 100_000):
        store.calls.append(call(attempt, n)).result()
        with lock:
            sys.stdout.write(f"{attempt} {n}\\n"); sys.stdout.flush()
for name in "abcd":
    threading.Thread(target=work, args=(f"{name}.1",)).start()
"""
)

# Appends until the disk is full, then says how far it came and what it was told.
FILLER = (
    COMMON
    + """
if len(sys.argv) > 2:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), int(sys.argv[2])))
store = Store.open(Path(sys.argv[1]))
prepare(store, ["a"])
done, said = 0, None
while said is None:
    try:
        store.calls.append(call("a.1", done)).result()
        done += 1
    except StoreError as error:
        said = str(error)
read = [one == call("a.1", n) for n, one in enumerate(store.calls.of_attempt("a.1"))]
print(json.dumps({"done": done, "said": said, "read": len(read), "exact": all(read)}))
"""
)


def load_common() -> dict[str, object]:
    names: dict[str, object] = {}
    exec(COMMON, names)
    return names


common = load_common()


def run(code: str, *arguments: str, prefix: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*prefix, sys.executable, "-c", code, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(TREE)},
    )


def check(directory: Path, answered: dict[str, int]) -> dict[str, int]:
    """Every answered call is there exactly, once; at most one more a thread. The calls by attempt."""
    stored: dict[str, int] = {}
    make = common["call"]
    with Store.open(directory, create=False) as store:
        for name in "abcd":
            attempt = f"{name}.1"
            calls = list(store.calls.of_attempt(attempt))
            assert calls == [make(attempt, n) for n in range(len(calls))]  # type: ignore[operator]
            assert answered.get(attempt, 0) <= len(calls) <= answered.get(attempt, 0) + 1
            stored[attempt] = len(calls)
        assert store.outcomes.counts("run").calls == sum(stored.values())
        check_file(directory)
    return stored


def check_file(directory: Path) -> None:
    with Store.open(directory) as store, store._database.reading() as connection:
        assert connection.exec_driver_sql("PRAGMA integrity_check").scalar() == "ok"
        assert connection.exec_driver_sql("PRAGMA foreign_key_check").all() == []


@pytest.mark.parametrize("seed", range(6))
def test_killed_at_any_moment_nothing_answered_is_lost(tmp_path: Path, seed: int) -> None:
    directory = tmp_path / "store"
    with Store.open(directory) as store:
        common["prepare"](store, list("abcd"))  # type: ignore[operator]
    with run(WRITER, str(directory), "0") as writer:
        assert writer.stdout is not None
        first = writer.stdout.readline()  # it works: from here any moment will do
        time.sleep(random.Random(seed).uniform(0, 0.4))
        writer.send_signal(signal.SIGKILL)
        rest = writer.stdout.read()  # not communicate, which leaves out what the line above has read ahead
    answered: dict[str, int] = {}
    for line in (first + rest).splitlines(keepends=True):
        if line.endswith("\n"):
            attempt, n = line.split()
            answered[attempt] = int(n) + 1
    assert answered
    stored = check(directory, answered)

    with Store.open(directory) as store:
        assert store.runs.recover("run").result() == 4
        # Asked again for what was stored last, as a client does that got no answer: it stays one call.
        for attempt, count in stored.items():
            if count:
                store.calls.append(common["call"](attempt, count - 1)).result()  # type: ignore[operator]
        assert store.outcomes.counts("run").calls == sum(stored.values())


def read_result(process: subprocess.Popen[str]) -> dict[str, object]:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return json.loads(out)


def expect_told_and_intact(result: dict[str, object]) -> None:
    assert isinstance(result["done"], int) and result["done"] > 0
    assert result["read"] == result["done"] and result["exact"]
    assert "store is intact" in str(result["said"]) and "run the same command again" in str(result["said"])


def test_a_file_that_may_not_grow_is_a_clear_error_and_the_store_goes_on_later(tmp_path: Path) -> None:
    result = read_result(run(FILLER, str(tmp_path), str(400_000)))
    expect_told_and_intact(result)
    check_file(tmp_path)
    done = result["done"]
    with Store.open(tmp_path) as store:
        assert store.outcomes.counts("run").calls == done
        store.calls.append(common["call"]("a.1", done)).result()  # type: ignore[operator]


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="mounting needs root")
def test_a_full_disk_is_a_clear_error_and_the_store_is_intact(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    mount = f'mount -t tmpfs -o size=1m none {tmp_path}/disk && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", mount, "sh")
    expect_told_and_intact(read_result(run(FILLER, f"{tmp_path}/disk", prefix=prefix)))


def test_a_disk_full_from_the_start_is_a_clear_error(tmp_path: Path) -> None:
    code = (
        COMMON
        + """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
try:
    Store.open(Path(sys.argv[1]))
except StoreError as error:
    print(json.dumps(str(error)))
"""
    )
    assert "intact" in str(read_result(run(code, str(tmp_path))))
    with Store.open(tmp_path) as store:  # what was begun is begun again
        assert store.runs.rollouts() == []


def test_two_processes_open_a_new_store_at_once(tmp_path: Path) -> None:
    code = COMMON + "Store.open(Path(sys.argv[1])).close(); print(1)"
    processes = [run(code, str(tmp_path / "store")) for _ in range(3)]
    assert [read_result(process) for process in processes] == [1, 1, 1]


def test_a_locked_store_is_a_clear_error(tmp_path: Path) -> None:
    with Store.open(tmp_path) as store, store._database.engine.connect() as other:
        # The writer's own connection would wait for half a minute.
        store._database.writer.submit(
            lambda context: context.connection.exec_driver_sql("PRAGMA busy_timeout = 50").close()
        ).result()
        other.exec_driver_sql("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="held the store's lock"):
            store.runs.create("run", {}).result()
        other.exec_driver_sql("COMMIT")
        store.runs.create("run", {}).result()
