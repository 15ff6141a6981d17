"""Stores with an S3 bucket: large contents are in it before anything refers to them, and nothing is lost."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import BucketUnavailable, ConfigError, StoreError
from understudy.store import Store, bucket, bucket_contents, database
from understudy.store.address import StoreLocation
from understudy.store.copying import copy_store
from understudy.store.runs import Lease

from support import understudy
from support.s3_server import S3Server, running_server
from support.store import make_call, prepare, running

pytestmark = pytest.mark.services

MIN_BYTES = 1000
SECRET = "not-a-secret-81f0"


def large(seed: int) -> bytes:
    """A response that does not compress below the limit."""
    noise = "".join(hashlib.sha256(f"{seed} {n}".encode()).hexdigest() for n in range(60))
    return json.dumps({"text": noise}).encode()


@pytest.fixture(params=["directory", "postgresql"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> StoreLocation:
    return tmp_path / "s" if request.param == "directory" else request.getfixturevalue("postgresql_store")


@pytest.fixture
def name(place: StoreLocation, s3_server: S3Server) -> str:
    """The bucket of the store."""
    return s3_server.give_bucket(place, MIN_BYTES)


@pytest.fixture
def store(place: StoreLocation, name: str) -> Iterator[Store]:
    with Store.open(place) as opened:
        prepare(opened, 3)
        yield opened


@pytest.fixture
def own_server(tmp_path: Path, s3_server: S3Server) -> Iterator[S3Server]:
    """A server that may be stopped; `s3_server` gives the credentials."""
    (tmp_path / "own").mkdir()
    with running_server(tmp_path / "own") as server:
        yield server


def responses(store: Store, attempt: str) -> list[bytes]:
    return [call.response for call in store.calls.of_attempt(attempt)]


def test_large_contents_are_in_the_bucket_and_small_ones_in_the_database(
    store: Store, s3_server: S3Server, name: str
) -> None:
    attempt = running(store)
    for n, response in enumerate((large(1), large(2), large(1), b"small")):
        store.calls.append(make_call(attempt.id, n, response=response)).result()
    assert responses(store, attempt.id) == [large(1), large(2), large(1), b"small"]
    setting = store.bucket.setting
    assert setting is not None
    hashes = [hashlib.sha256(large(n)).digest()[:20].hex() for n in (1, 2)]
    assert set(s3_server.objects(name)) == {f"some/prefix/{setting.store_id}/{each}" for each in hashes}
    use = store.bucket.compare()
    assert (use.contents, use.missing, use.unneeded) == (2, 0, 0)
    assert use.bytes == sum(map(len, s3_server.objects(name).values()))


def test_calls_that_are_committed_together_are_in_the_bucket(store: Store, name: str, s3_server: S3Server) -> None:
    attempts = [running(store, f"run-{n}") for n in range(3)]
    done = [store.calls.append(make_call(each.id, 0, response=large(n))) for n, each in enumerate(attempts)]
    done += [store.calls.append(make_call(each.id, 1, response=large(7))) for each in attempts]
    for each in done:
        each.result()
    assert len(s3_server.objects(name)) == 4
    assert [responses(store, each.id) for each in attempts] == [[large(n), large(7)] for n in range(3)]


def test_two_writers_of_one_content_share_the_object(place: StoreLocation, store: Store, name: str) -> None:
    attempts = [running(store, f"run-{n}") for n in range(2)]
    with Store.open(place) as other:
        start = threading.Barrier(2)

        def write(own: Store, attempt: str) -> None:
            start.wait()
            for n in range(5):
                own.calls.append(make_call(attempt, n, response=large(n))).result()

        threads = [
            threading.Thread(target=write, args=(own, each.id))
            for own, each in zip((store, other), attempts, strict=True)
        ]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    assert responses(store, attempts[0].id) == responses(store, attempts[1].id) == [large(n) for n in range(5)]
    use = store.bucket.compare()
    assert (use.contents, use.missing, use.unneeded) == (5, 0, 0)


def test_a_server_that_is_away_is_waited_for_and_leases_are_renewed(
    place: StoreLocation, own_server: S3Server
) -> None:
    name = own_server.give_bucket(place, MIN_BYTES)
    with Store.open(place) as store:
        prepare(store)
        attempt = running(store)
        own_server.stop()
        waiting = store.calls.append(make_call(attempt.id, 0, response=large(1)))
        behind = store.calls.append(make_call(attempt.id, 1, response=b"small"))
        store.leases.renew(Lease("a", 60.0), [attempt.id]).result(20)
        with pytest.raises(NotYet):
            behind.result(0.5)
        own_server.start(name)  # it has forgotten its buckets
        waiting.result(60)
        behind.result(60)
        assert responses(store, attempt.id) == [large(1), b"small"]
        # A reader waits as well.
        own_server.stop()
        threading.Timer(1.0, own_server.start).start()
        with pytest.raises(StoreError, match=r"is missing|no such bucket"):  # what it had is gone with it
            responses(store, attempt.id)


def test_a_server_that_stays_away_fails_only_what_needs_it(
    place: StoreLocation, own_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    own_server.give_bucket(place, MIN_BYTES)
    own_server.stop()
    monkeypatch.setattr(database, "OUTAGE_S", 2.0)
    with Store.open(place) as store:
        prepare(store)
        attempt = running(store)
        calls = [make_call(attempt.id, n, response=large(n) if n % 2 else b"small") for n in range(4)]
        done = [store.calls.append(call) for call in calls]
        for n, each in enumerate(done):
            if n % 2:
                with pytest.raises(BucketUnavailable, match=r"cannot be reached; check its address"):
                    each.result()
            else:
                each.result()
        assert [call.sequence for call in store.calls.of_attempt(attempt.id)] == [0, 2]
        assert store.bucket.use().contents == 0


def test_refused_credentials_are_an_error_and_nothing_is_stored(
    place: StoreLocation, own_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    users = own_server.client("iam")
    users.create_user(UserName="u")
    rights = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
    users.put_user_policy(UserName="u", PolicyName="all", PolicyDocument=json.dumps(rights))
    key = users.create_access_key(UserName="u")["AccessKey"]
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", key["AccessKeyId"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", key["SecretAccessKey"])
    own_server.give_bucket(place, MIN_BYTES)
    own_server.ask("POST", "/moto-api/reset-auth", b"0")  # from now on, the server checks who asks
    with Store.open(place) as store:
        prepare(store)
        attempt = running(store)
        store.bucket.check()
        store.calls.append(make_call(attempt.id, 0, response=large(0))).result()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    with Store.open(place) as store:
        with pytest.raises(StoreError, match="refused the credentials; set AWS_ACCESS_KEY_ID") as refused:
            store.bucket.check()
        with pytest.raises(StoreError, match="refused the credentials"):
            store.calls.append(make_call(attempt.id, 1, response=large(1))).result()
        with pytest.raises(StoreError, match="refused the credentials"):
            responses(store, attempt.id)
        assert SECRET not in str(refused.value)
        assert store.bucket.use().contents == 1
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with (
        Store.open(place) as store,
        pytest.raises(StoreError, match="no usable credentials; set AWS_ACCESS_KEY_ID"),
    ):
        store.bucket.check()


def test_a_missing_bucket_is_an_error(place: StoreLocation, s3_server: S3Server) -> None:
    with (
        Store.open(place, exclusive=True) as store,
        pytest.raises(StoreError, match=r"no-such-bucket.*there is no such bucket; create it"),
    ):
        store.bucket.set("s3://no-such-bucket", endpoint_url=s3_server.url)
    name = s3_server.give_bucket(place, MIN_BYTES)
    s3_server.client().delete_bucket(Bucket=name)
    with Store.open(place) as store:
        prepare(store)
        with pytest.raises(StoreError, match="there is no such bucket; create it"):
            store.bucket.check()
        with pytest.raises(StoreError, match="there is no such bucket; create it"):
            store.calls.append(make_call(running(store).id, 0, response=large(0))).result()


@pytest.mark.parametrize("damage", [b"", b"\x00other", b"\x01not zstd", None])
def test_a_damaged_or_missing_object_is_named_with_the_remedy(
    store: Store, s3_server: S3Server, name: str, damage: bytes | None
) -> None:
    attempt = running(store)
    store.calls.append(make_call(attempt.id, 0, response=large(1))).result()
    (key,) = s3_server.objects(name)
    if damage is None:
        s3_server.client().delete_object(Bucket=name, Key=key)
        assert store.bucket.compare().missing == 1
    else:
        s3_server.client().put_object(Bucket=name, Key=key, Body=damage)
    with pytest.raises(StoreError) as error:
        responses(store, attempt.id)
    assert f"{key} of the bucket {name}" in str(error.value)
    assert ("is missing" if damage is None else "is damaged") in str(error.value)
    assert "restore the object from a version or a copy" in str(error.value)


def test_copies_go_from_and_to_buckets(tmp_path: Path, place: StoreLocation, s3_server: S3Server) -> None:
    other = s3_server.give_bucket(place, MIN_BYTES)
    with Store.open(tmp_path / "plain") as plain:
        prepare(plain)
        attempt = running(plain)
        for n in range(4):
            plain.calls.append(make_call(attempt.id, n, response=large(n))).result()
        with Store.open(place) as copied, Store.open(tmp_path / "back") as back:
            copy_store(plain, copied)
            assert copied.bucket.compare().contents == len(s3_server.objects(other)) == 4
            assert all(each.written == 0 for each in copy_store(plain, copied)), "nothing is left to copy"
            copy_store(copied, back)
            assert back.bucket.setting is None and back.bucket.use().contents == 0
            for each in (copied, back):
                assert list(each.calls.of_attempt(attempt.id)) == list(plain.calls.of_attempt(attempt.id))
            (key, *_) = s3_server.objects(other)
            s3_server.client().put_object(Bucket=other, Key=key, Body=b"\x00damage")
            with pytest.raises(StoreError, match="is damaged"):
                copy_store(plain, copied)


KILLED = """
import os, signal, sys
from understudy.store import Store
from understudy.store.address import parse_location
from understudy.store.bucket import Bucket
from support.store import make_call
from contract.test_store_bucket import large

write = Bucket.write
def die(self, contents):
    write(self, contents)
    os.kill(os.getpid(), signal.SIGKILL)
Bucket.write = die
with Store.open(parse_location(sys.argv[1])) as store:
    store.calls.append(make_call(sys.argv[2], 0, response=large(1))).result()
"""


def test_a_kill_between_upload_and_commit_leaves_only_garbage(
    place: StoreLocation, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = s3_server.give_bucket(place, MIN_BYTES)
    with Store.open(place) as store:
        prepare(store)
        attempt = running(store)
        store.calls.append(make_call(attempt.id, 5, response=large(5))).result()
    text = str(place) if isinstance(place, Path) else place.secret_url
    variables = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, text, attempt.id],
        env=variables,
        check=False,
        timeout=60,
        capture_output=True,
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert len(s3_server.objects(name)) == 2
    with Store.open(place) as store:
        assert responses(store, attempt.id) == [large(5)], "no half-written call"
        use = store.bucket.compare()
        assert (use.contents, use.missing, use.unneeded) == (1, 0, 1)
    pruned = understudy("prune", text, "--json")
    assert pruned.returncode == 0, pruned.stderr
    assert "less than 60 minutes old" in json.loads(pruned.stdout)["stores"][0]["note"]
    assert len(s3_server.objects(name)) == 2
    with Store.open(place) as store:  # the next attempt writes it again, over the other
        store.calls.append(make_call(attempt.id, 0, response=large(1))).result()
        assert store.bucket.compare().unneeded == 0
        assert responses(store, attempt.id) == [large(1), large(5)]


def test_prune_removes_what_nothing_refers_to(
    place: StoreLocation, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = s3_server.give_bucket(place, MIN_BYTES)
    with Store.open(place) as store:
        for run in ("first", "second"):
            prepare(store, run=run)
            attempt = running(store, f"{run}-0")
            own = 1 if run == "first" else 2
            for n, response in enumerate((large(own), large(3))):
                store.calls.append(make_call(attempt.id, n, response=response)).result()
    assert len(s3_server.objects(name)) == 3
    other = f"some/prefix/{'0' * 32}/{'0' * 40}"
    s3_server.client().put_object(Bucket=name, Key=other, Body=b"of another store")
    monkeypatch.setattr(bucket_contents, "GRACE_S", 0.0)
    with Store.open(place, exclusive=True) as store:
        store.space.remove(["first"])
        assert store.bucket.unneeded().count == 1
        assert len(s3_server.objects(name)) == 4, "it was only counted"
        assert store.bucket.unneeded(remove=True).count == 1
    objects = s3_server.objects(name)
    assert len(objects) == 3 and other in objects
    with Store.open(place) as store:
        assert responses(store, "second-0.1") == [large(2), large(3)]
        assert store.bucket.compare().missing == 0


def test_more_objects_than_a_page_lists(
    store: Store, s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = running(store)
    for n in range(5):
        store.calls.append(make_call(attempt.id, n, response=large(n))).result()
    client = store._database.bucket._client()  # pyright: ignore[reportPrivateUsage, reportOptionalMemberAccess]
    whole = client.list_objects_v2
    monkeypatch.setattr(client, "list_objects_v2", lambda **where: whole(**where, MaxKeys=2))
    (setting, other) = (store.bucket.setting, hashlib.sha256(b"other").hexdigest()[:40])
    assert setting is not None
    s3_server.client().put_object(Bucket=setting.bucket, Key=setting.keys_prefix + other, Body=b"x")
    hashed = hashlib.sha256(large(2)).hexdigest()[:40]
    s3_server.client().delete_object(Bucket=setting.bucket, Key=setting.keys_prefix + hashed)
    use = store.bucket.compare()
    assert (use.contents, use.missing, use.unneeded, use.unneeded_bytes) == (5, 1, 1, 1)


def test_another_bucket_must_have_all_contents(place: StoreLocation, store: Store, s3_server: S3Server) -> None:
    attempt = running(store)
    store.calls.append(make_call(attempt.id, 0, response=large(1))).result()
    before = store.bucket.setting
    assert before is not None
    store.close()
    name = s3_server.new_bucket()
    with Store.open(place, exclusive=True) as alone:
        with pytest.raises(ConfigError, match=r"1 contents of the store are in s3://.* and not in s3://"):
            alone.bucket.set(f"s3://{name}", endpoint_url=s3_server.url)
        for key, data in s3_server.objects(before.bucket).items():
            moved = key.replace(before.prefix, "")
            s3_server.client().put_object(Bucket=name, Key=moved, Body=data)
        alone.bucket.set(f"s3://{name}", endpoint_url=s3_server.url)
    s3_server.client().delete_object(Bucket=before.bucket, Key=next(iter(s3_server.objects(before.bucket))))
    with Store.open(place) as again:
        assert responses(again, attempt.id) == [large(1)]


def test_setting_a_bucket_needs_the_store_alone(place: StoreLocation, store: Store, s3_server: S3Server) -> None:
    text = str(place) if isinstance(place, Path) else place.secret_url
    refused = understudy("store", "bucket", text, "--min-bytes", "5")
    assert refused.returncode != 0
    assert "in use" in refused.stderr or "open" in refused.stderr


def test_commands_read_and_show_what_is_in_a_bucket(
    place: StoreLocation, tmp_path: Path, s3_server: S3Server
) -> None:
    text = str(place) if isinstance(place, Path) else place.secret_url
    name = s3_server.new_bucket()
    done = understudy(
        "store", "bucket", text, f"s3://{name}/p", "--endpoint-url", s3_server.url, "--min-bytes", "100", "--json"
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["bucket"]["bucket"] == name
    with Store.open(place) as store:
        prepare(store)
        attempt = running(store)
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": large(9).decode()}]}
        store.calls.append(make_call(attempt.id, 0, request=json.dumps(body).encode(), response=large(1))).result()
        store.runs.finish_attempt(attempt.id, "succeeded", "succeeded", patch=b"+" + large(2)).result()
    shown = understudy("show", text, "run-0")
    assert shown.returncode == 0 and "run-0" in shown.stdout, shown.stderr
    used = understudy("du", text)
    assert "bucket of a store" in used.stdout, used.stderr
    plain = tmp_path / "plain"
    copied = understudy("store", "copy", text, plain)
    assert copied.returncode == 0, copied.stderr
    assert understudy("show", plain, "run-0").stdout == shown.stdout
    refused = understudy("store", "bucket", plain)
    assert refused.returncode != 0 and "has no bucket" in refused.stderr
    key = next(iter(s3_server.objects(name)))
    s3_server.client().delete_object(Bucket=name, Key=key)
    incomplete = understudy("store", "bucket", text)
    assert incomplete.returncode != 0 and "1 objects are missing" in incomplete.stderr
    if isinstance(place, Path):
        assert SECRET.encode() not in b"".join(each.read_bytes() for each in place.iterdir() if each.is_file())


def test_without_boto3_the_extra_is_named(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    attempt = running(store)
    with pytest.raises(ConfigError, match=r"pip install 'understudy\[s3\]'"):
        store.bucket.check()
    with pytest.raises(StoreError, match=r"pip install 'understudy\[s3\]'"):
        store.calls.append(make_call(attempt.id, 0, response=large(0))).result()


def test_no_transaction_is_open_while_a_bucket_is_written(
    place: StoreLocation, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others write meanwhile, also to a file, which has one writer at a time."""
    attempts = [running(store, f"run-{n}") for n in range(2)]
    arrived, go_on = threading.Event(), threading.Event()
    write = bucket.Bucket.write

    def slow(self: bucket.Bucket, contents: Any) -> None:
        arrived.set()
        assert go_on.wait(30)
        write(self, contents)

    monkeypatch.setattr(bucket.Bucket, "write", slow)
    waiting = store.calls.append(make_call(attempts[0].id, 0, response=large(0)))
    assert arrived.wait(30)
    with Store.open(place, wait_s=5) as other:
        began = time.monotonic()
        other.calls.append(make_call(attempts[1].id, 0, response=b"small")).result(10)
        assert time.monotonic() - began < 5
    go_on.set()
    waiting.result(30)
