"""Copies of stores: all that one holds is in the other, once, whatever interrupted it, and both go on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from understudy.errors import StoreError
from understudy.store import Store
from understudy.store.address import StoreLocation, StoreUrl
from understudy.store.copying import copy_store
from understudy.types import Verdict

from support import understudy
from support.store import make_call, prepare, running


def fill(store: Store) -> None:
    """A run with calls that share contents, an end with a patch, a vote, a client with a key."""
    prepare(store, 3)
    for n in range(2):
        attempt = running(store, f"run-{n}")
        for turn in range(5):
            messages = [f"turn {k} of run {n} " * 40 for k in range(turn + 1)]
            body = json.dumps({"system": "s" * 500, "messages": messages}).encode()
            parent = f"{attempt.id}-{turn - 1}" if turn else None
            ids = tuple(range(turn * 3 + 4))
            call = make_call(attempt.id, turn, request=body, parent_id=parent, prompt_token_ids=ids)
            store.calls.append(call).result()
    verdict = Verdict(reward=1.0, reason="1 of 1")
    store.runs.finish_attempt("run-0.1", "succeeded", "succeeded", patch=b"diff", verdict=verdict).result()
    store.votes.put("rollout", "run-0", "me", "exclude", "odd \0 note").result()
    store.keys.add(b"digest", store.keys.add_client("x").result().id).result()


@pytest.fixture
def target(location: StoreLocation, tmp_path: Path) -> StoreLocation:
    return tmp_path / "target" if isinstance(location, Path) else location


def test_a_copy_holds_the_same_and_goes_on(tmp_path: Path, target: StoreLocation) -> None:
    back = tmp_path / "back"
    with Store.open(tmp_path / "a") as store, Store.open(target) as copied, Store.open(back) as again:
        fill(store)
        tables = {each.name: each for each in copy_store(store, copied)}
        assert (tables["calls"].rows, tables["calls"].written, tables["votes"].rows) == (10, 10, 1)
        assert all(each.written == 0 for each in copy_store(store, copied)), "nothing is left to copy"
        copy_store(copied, again)
        for attempt in ("run-0.1", "run-1.1"):
            calls = list(store.calls.of_attempt(attempt))
            assert list(copied.calls.of_attempt(attempt)) == list(again.calls.of_attempt(attempt)) == calls
        assert copied.runs.patch("run-0.1") == b"diff"
        assert copied.votes.all() == again.votes.all() == store.votes.all()
        # Both go on: new rows have numbers of their own, and what is new follows.
        if copied.bucket.setting is None:  # with a bucket, rows that are written twice get other numbers
            copied.calls.append(make_call("run-1.1", 5, request=b'{"messages": ["new"]}')).result()
        store.calls.append(make_call("run-1.1", 5, request=b'{"messages": ["new"]}')).result()
        copy_store(store, copied)
        assert len(list(copied.calls.of_attempt("run-1.1"))) == 6


def test_a_target_with_other_things_is_refused(tmp_path: Path, target: StoreLocation) -> None:
    with Store.open(tmp_path / "a") as store, Store.open(target) as other:
        fill(store)
        prepare(other, 1, run="other")
        with pytest.raises(StoreError, match="holds other data than"):
            copy_store(store, other)
        assert [run.id for run in other.runs.all()] == ["other"]


@pytest.mark.services
def test_commands_read_a_database_as_they_read_a_directory(tmp_path: Path, postgresql_store: StoreUrl) -> None:
    with Store.open(tmp_path / "a") as store:
        fill(store)
    url = postgresql_store.secret_url
    done = understudy("store", "copy", tmp_path / "a", url, "--json")
    assert done.returncode == 0, done.stderr
    assert {each["name"]: each["rows"] for each in json.loads(done.stdout)["tables"]}["calls"] == 10
    assert understudy("show", url, "run-0").stdout == understudy("show", tmp_path / "a", "run-0").stdout
    listed = [json.loads(understudy("show", "--dir", at, "--json").stdout) for at in (url, tmp_path / "a")]
    assert listed[0]["rollouts"] == listed[1]["rollouts"]
    refused = understudy("export", "hf", url)
    assert refused.returncode == 2 and "name a directory to write to with --output" in refused.stderr
    for done in (refused, understudy("show", url.replace("not-a-secret", "wrong-secret"))):
        assert done.returncode == 2 and "not-a-secret" not in done.stderr and "wrong-secret" not in done.stderr
