"""`understudy du` and `prune`: what takes room, what goes, what stays and why."""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.disk.caches import cache_entries, remove_entries
from understudy.disk.stores import FoundStore, Pruner, Retention
from understudy.errors import ConfigError
from understudy.model.directory import directory_of
from understudy.model.pretrained import RECORD, new_model
from understudy.report.directories import index_file, store_id
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.train.loop.state import GroupRef, LoopConfig, LoopDirectory, LoopState, StepState, write_json

from support import understudy
from support.store import make_call, prepare, running

DAY_S = 86_400.0


def ended_run(location: StoreLocation, run: str = "run") -> None:
    """A run that has ended: one rollout, with a call."""
    with Store.open(location) as store:
        prepare(store, 1, run=run)
        attempt = running(store, f"{run}-0")
        store.calls.append(
            make_call(attempt.id, request=json.dumps({"messages": [run * 5_000]}).encode())
        ).result()
        store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"diff").result()


def name_of(location: StoreLocation) -> str:
    return location.secret_url if isinstance(location, StoreUrl) else str(location)


def pruned(*arguments: object, code: int = 0, **environment: str) -> dict[str, Any]:
    done = understudy("prune", *arguments, "--json", env={**os.environ, **environment})
    assert done.returncode == code, done.stderr
    return json.loads(done.stdout)


def test_runs_go_by_age_and_number_and_a_dry_run_removes_nothing(location: StoreLocation) -> None:
    for run in ("first", "second", "third"):
        ended_run(location, run)
    with Store.open(location) as store:
        prepare(store, 1, run="open")
    name = name_of(location)
    options = ("--drop", "runs", "--keep-runs", "2")
    dry = pruned(name, *options, "--dry-run")
    (change,) = dry["stores"]
    assert change["runs"] == {"runs": ["first", "second"]} and change["bytes"] > 0
    assert change["stays"] == {"among the newest 2": 1, "not ended": 1}
    assert pruned(name, "--drop", "runs", "--older-than", "1h")["stores"][0]["stays"]["changed too recently"] == 3
    assert pruned(name, *options)["stores"][0]["runs"] == change["runs"]
    with Store.open(location, create=False) as store:
        assert [each.id for each in store.runs.all()] == ["third", "open"]
        assert len(list(store.calls.of_attempt("third-0.1"))) == 1
    assert pruned(name, *options)["stores"][0]["runs"] == {}


def test_bodies_go_with_words_for_what_is_lost(location: StoreLocation) -> None:
    ended_run(location)
    name = name_of(location)
    done = understudy("prune", name, "--drop", "bodies", "--keep-runs", "0")
    assert done.returncode == 0 and "lost with bodies: the requests, responses" in done.stdout
    completed = understudy("show", name, "run-0")
    assert completed.returncode == 2 and "removed by `understudy prune` on" in completed.stderr
    assert "run-0" in understudy("show", "--dir", name).stdout
    assert "1 of them without bodies" in understudy("du", name).stdout
    assert "not-a-secret" not in done.stdout + done.stderr


def test_a_store_that_cannot_be_read_makes_du_fail(location: StoreLocation, tmp_path: Path) -> None:
    with Store.open(location) as store:
        prepare(store)
        with store._database.engine.connect() as connection:  # pyright: ignore[reportPrivateUsage]
            connection.exec_driver_sql("UPDATE alembic_version SET version_num = '9999'")
            connection.commit()
    readable = tmp_path / "readable"
    Store.open(readable).close()
    for options in ((), ("--json",)):
        done = understudy("du", name_of(location), readable, *options)
        assert done.returncode == 1, done.stderr
        assert "was written by a newer release (schema 9999" in done.stdout and str(readable) in done.stdout


def test_a_store_that_is_open_is_left_alone(location: StoreLocation) -> None:
    ended_run(location)
    with Store.open(location):
        summary = pruned(name_of(location), "--drop", "runs", "--keep-runs", "0", code=1)
        assert "is in use" in summary["skipped"][0]
    with Store.open(location) as store:
        assert [each.id for each in store.runs.all()] == ["run"]


def test_a_store_whose_runs_could_not_be_listed_loses_none(tmp_path: Path) -> None:
    schema = (Path(__file__).parents[1] / "data" / "store_0003.sql").read_text()
    (tmp_path / "old").mkdir()
    with closing(sqlite3.connect(tmp_path / "old" / "store.db")) as raw:
        raw.executescript(schema)
        runs = raw.execute("SELECT id FROM runs").fetchall()
    options = ("--drop", "runs", "--keep-runs", "100")
    (dry,) = pruned(tmp_path, *options, "--dry-run", code=1)["stores"]
    (done,) = pruned(tmp_path, *options, code=1)["stores"]
    assert done == dry and "is at schema 0003" in done["skipped"] and not done["runs"]
    with closing(sqlite3.connect(tmp_path / "old" / "store.db")) as raw:
        assert runs and raw.execute("SELECT id FROM runs").fetchall() == runs


def test_a_run_that_came_after_the_runs_were_listed_stays(tmp_path: Path) -> None:
    ended_run(tmp_path, "first")
    ended_run(tmp_path, "second")
    retention = Retention(drop=frozenset({"runs"}), keep_runs=1)
    pruner = Pruner([FoundStore(tmp_path)], retention, lambda line: None)
    ended_run(tmp_path, "third")
    (done,) = pruner.remove()
    assert done.runs == {"runs": ["first"]} and done.stays == {"among the newest 1": 2}


def test_an_interruption_leaves_no_index_of_what_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    ended_run(tmp_path / "s", "first")
    ended_run(tmp_path / "s", "second")
    index = index_file(store_id(tmp_path / "s"))
    index.parent.mkdir(parents=True)
    index.touch()

    def interrupt(line: str) -> None:
        if line == "run second":
            raise KeyboardInterrupt

    pruner = Pruner([FoundStore(tmp_path / "s")], Retention(drop=frozenset({"runs"})), interrupt)
    with pytest.raises(KeyboardInterrupt):
        list(pruner.remove())
    assert not index.exists()
    with Store.open(tmp_path / "s", create=False) as store:
        assert [each.id for each in store.runs.all()] == ["second"]


def test_a_store_that_is_named_twice_counts_once(tmp_path: Path) -> None:
    for run in ("first", "second", "third"):
        ended_run(tmp_path / "s", run)
    (tmp_path / "link").symlink_to("s")
    summary = pruned(tmp_path / "link", tmp_path, "--drop", "runs", "--keep-runs", "2")
    assert [each["runs"] for each in summary["stores"]] == [{"runs": ["first"]}]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--drop", "runs"), "--drop needs --older-than or --keep-runs"),
        (("--keep-runs", "1"), "--keep-runs only applies with --drop"),
        (("--drop", "runs", "--older-than", "soon"), "--older-than: invalid duration 'soon'"),
        (("--drop", "tokens"), "--drop: invalid value 'tokens'; give some of: runs, bodies, token-values"),
        (("nowhere",), "nowhere is not a directory"),
    ],
)
def test_what_is_asked_wrongly_is_refused(arguments: tuple[str, ...], message: str, tmp_path: Path) -> None:
    done = understudy("prune", *arguments, cwd=tmp_path)
    assert done.returncode == 2 and message in done.stderr


def test_nothing_can_go_is_said(tmp_path: Path) -> None:
    done = understudy("prune", cwd=tmp_path)
    assert done.returncode == 0 and "nothing to remove without --drop, --caches or --images" in done.stdout


def test_the_cache_loses_what_nobody_used_unless_sandboxes_are_open(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    old, new = cache / "trees" / "old", cache / "trees" / "new"
    for entry in (old, new):
        (entry / "tree" / "sealed").mkdir(parents=True)
        (entry / "tree" / "sealed" / "file").write_bytes(b"x" * 50_000)
        (entry / "tree" / "sealed").chmod(0o500)
    model = cache / "models" / "old--model"
    model.mkdir(parents=True)
    other = cache / "not-ours" / "data"
    other.mkdir(parents=True)
    for path in (old, model, other):
        os.utime(path, (time.time() - 40 * DAY_S,) * 2)
    arguments = (tmp_path, "--caches")
    environment = {"UNDERSTUDY_CACHE": str(cache)}
    assert set(pruned(*arguments, "--dry-run", **environment)["caches"]) == {str(old), str(model)}
    with (cache / ".in-use").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        assert "has sandboxes open" in pruned(*arguments, code=1, **environment)["skipped"][0]
    assert old.is_dir()
    (cache / ".removing-left-by-a-kill").mkdir()
    summary = pruned(*arguments, **environment)
    assert summary["bytes"] >= 50_000 and set(summary["caches"]) == {str(old), str(model)}
    assert not old.exists() and not model.exists() and new.is_dir() and other.is_dir()
    assert not list(cache.glob(".removing-*"))
    uses = json.loads(understudy("du", tmp_path, "--json", env={**os.environ, **environment}).stdout)["uses"]
    # Where Docker runs, another test may have prepared images meanwhile.
    of_cache = {each["what"]: each["unused"] for each in uses if each["what"].startswith("cache: ")}
    assert of_cache == {"cache: trees of tasks": 0}


def test_what_of_the_cache_is_made_or_used_meanwhile_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(cache))
    names = ("owner--made-0.5B", "owner--used-0.5B", "owner--left-0.5B")
    made, used, unused = (cache / "models" / name for name in names)
    for path in (made, used, unused):
        path.mkdir(parents=True)
        os.utime(path, (time.time() - 40 * DAY_S,) * 2)
    entries = {each.path: each for each in cache_entries(cache)}
    with new_model(made.name, cache), pytest.raises(ConfigError, match="is being made"):
        remove_entries(cache, [entries[made]])
    os.utime(used)
    assert remove_entries(cache, [entries[used], entries[unused]]) == [entries[unused]]
    assert used.is_dir() and not unused.exists()
    (used / RECORD).write_text("{}")
    assert directory_of(used.name) == used
    with pytest.raises(ConfigError, match="uses a model"):
        remove_entries(cache, [*cache_entries(cache)])
    assert used.is_dir()


def loop(root: Path, **changes: Any) -> LoopState:
    """A loop of two steps that are over, with weights, and a third one that is collected."""
    directory = LoopDirectory(root)
    config = LoopConfig(model="m", model_digest="d", tasks={"t": "1"}, steps=3, keep=3)
    write_json(root / "loop.json", config)
    steps: list[StepState] = []
    for number in (1, 2, 3):
        over = number < 3
        refs = (GroupRef(number, "t"),)
        step = StepState(
            step=number,
            phase="published" if over else "collecting",
            run="r",
            sampled_by="step-0000",
            tasks=("t",),
            version=f"step-{number:04d}",
            weights=f"steps/step-{number:04d}/weights" if over else None,
            used=refs if over else (),
        )
        steps.append(step)
        ended_run(directory.run(number))
        if over:
            directory.weights(number).mkdir()
            (directory.weights(number) / "model").write_bytes(b"w" * 10_000)
    state = LoopState(version="step-0002", weights="steps/step-0002/weights", steps=tuple(steps))
    state = msgspec.structs.replace(state, **changes)
    directory.save(state)
    return state


def test_a_loop_keeps_what_it_goes_on_with(tmp_path: Path) -> None:
    root = tmp_path / "loop"
    loop(root)
    directory = LoopDirectory(root)
    index = index_file(store_id(directory.run(1)))
    summary = pruned(tmp_path, "--drop", "bodies", "--keep-runs", "0", "--keep-weights", "1", "--dry-run")
    assert [each["weights"] for each in summary["stores"] if each["weights"]] == [["steps/step-0001/weights"]]
    assert directory.weights(1).is_dir()
    with directory.lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        busy = pruned(tmp_path, "--drop", "bodies", "--keep-runs", "0", "--keep-weights", "1", code=1)
        assert len(busy["skipped"]) == 4 and all("is running" in each for each in busy["skipped"])
    changes = {
        each["location"]: each
        for each in pruned(tmp_path, "--drop", "bodies", "--keep-runs", "0", "--keep-weights", "1")["stores"]
    }
    assert changes[str(directory.run(1))]["runs"] == changes[str(directory.run(2))]["runs"] == {"bodies": ["run"]}
    assert changes[str(directory.run(3))]["stays"] == {"its loop goes on with it": 1}
    assert not directory.weights(1).exists() and directory.weights(2).is_dir()
    assert not index.exists()
    for inner in ("steps", "steps/step-0003/run"):
        (stays,) = (
            each
            for each in pruned(root / inner, "--drop", "runs", "--keep-runs", "0", "--dry-run")["stores"]
            if "step-0003" in each["location"]
        )
        assert stays["stays"] == {"its loop goes on with it": 1}, "also where the loop is not what was named"
    # As one run it is the newest one.
    report = pruned(tmp_path, "--drop", "runs", "--keep-runs", "1")
    assert all(not each["runs"] for each in report["stores"])
