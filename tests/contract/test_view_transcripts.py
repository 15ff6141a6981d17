"""Transcripts are read in parts: what is shown is what the calls as a whole say."""

from __future__ import annotations

import gc
import sqlite3
import tarfile
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.errors import StoreError
from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.calls import RequestTree
from understudy.store.tokens import StoredIds, begins_with, pack_ids
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import Trajectory, build
from understudy.types import Call
from understudy.view import transcripts
from understudy.view.api import ViewApi
from understudy.view.catalog import Catalog
from understudy.view.faults import ViewRefused
from understudy.view.routes import AttemptQuery, BodyQuery, TurnQuery
from understudy.wire.decoding import UNREADABLE
from understudy.wire.model import Conversation
from understudy.wire.stored import RequestReader, read_request

from support.export import converse, put_attempt, put_rollouts
from support.hostile import PAYLOADS, put_hostile_run
from support.trajectory import Session, as_chat, assistant, branching, text, tool_result, tool_use, user

ARCHIVES = Path(__file__).parents[1] / "data/v0_1"


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with stores of many kinds, which tests only read."""
    directory = tmp_path_factory.mktemp("stores")
    for name in ("run", "gateway"):
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
            archive.extractall(directory / "old", filter="data")
    put_rollouts(directory / "graded", tasks=1, samples=2)
    put_hostile_run(directory / "hostile")
    with Store.open(directory / "branching") as store:
        put_attempt(store, branching().calls)
    return directory


@pytest.fixture
def stores(place: Path) -> list[Path]:
    return [path.parent for path in place.rglob("store.db")]


def attempts(store: Store) -> Iterator[str]:
    yield from (client.id for client in store.keys.clients())
    for run in store.runs.all():
        for rollout in store.runs.rollouts(run.id):
            yield from (attempt.id for attempt in store.runs.attempts(rollout.id))


def read_in_parts(store: Store, attempt: str, limit: int) -> Iterator[tuple[Call, Conversation | None]]:
    """The calls of an attempt, so many at a time, with their conversations where these can be read in parts."""
    tree = RequestTree()
    reader = RequestReader(tree.steps)
    last = -1
    while piece := store.calls.in_parts(attempt, tree, last, limit):
        for call, position in piece:
            conversation = None
            with suppress(*UNREADABLE):
                conversation = reader.read(
                    call.dialect, position.node, position.outer, tree.outers[position.outer], tree.contents
                )
            yield call, conversation
            last = call.sequence


@pytest.mark.parametrize("limit", [1, 3, 1_000])
def test_calls_in_parts_are_the_calls(stores: list[Path], limit: int):
    compared: Counter[str] = Counter()
    for directory in stores:
        with Store.open(directory, create=False, read_only=True) as store:
            for attempt in attempts(store):
                whole = list(store.calls.of_attempt(attempt))
                tokens = store.calls.with_tokens([call.id for call in whole])
                parts = read_in_parts(store, attempt, limit)
                for one, (other, conversation), third in zip(whole, parts, tokens, strict=True):
                    assert other == msgspec.structs.replace(one, request=b"", logprobs=None)
                    assert third == msgspec.structs.replace(one, request=b"", response=b"")
                    if conversation is not None:
                        assert conversation == read_request(one)
                        compared[one.dialect] += 1
                    else:
                        assert one.dialect != "anthropic"
    assert compared["anthropic"] > 80 and compared["openai-chat"] and compared["openai-responses"]


def test_what_the_store_knows_of_tokens_is_what_they_are(stores: list[Path]):
    compared: list[tuple[bool, bool]] = []
    for directory in stores:
        with Store.open(directory, create=False, read_only=True) as store:
            for attempt in attempts(store):
                calls = [call for call, _ in read_in_parts(store, attempt, 10)]
                whole = [call for call in store.calls.of_attempt(attempt) if call.prompt_token_ids is not None]
                lean = {call.id: call for call in calls}
                for before, now in pairwise(whole):
                    one, two = lean[before.id], lean[now.id]
                    pair = (two.prompt_token_ids, one.prompt_token_ids, one.completion_token_ids)
                    plain = (now.prompt_token_ids, before.prompt_token_ids, before.completion_token_ids)
                    assert None not in pair and None not in plain
                    in_parts = (begins_with(*pair[:2]), begins_with(*pair))
                    assert in_parts == (begins_with(*plain[:2]), begins_with(*plain))
                    compared.append(in_parts)
    assert set(compared) == {(True, True), (True, False), (False, False)}


def check(transcript: transcripts.Transcript, trajectory: Trajectory) -> None:
    """Compare what is shown with the tree of whole calls."""
    merged = merge(trajectory)
    assert transcript.outlined.reasons == merged.reasons
    assert [each.call_ids for each in transcript.outlined.segments] == [each.call_ids for each in merged.segments]
    assert [branch.name for branch in transcript.branches] == list(trajectory.branches)
    for index, node in enumerate(trajectory.nodes):
        turn = transcript.turn(index)
        assert (turn.call_id, turn.branch, turn.role) == (node.call.id, node.branch, node.role)
        assert turn.parent == (node.parent and node.parent.call.id)
        assert (turn.superseded, turn.alternative) == (node.superseded, node.alternative)
        assert turn.continues == (node.continues and node.continues.call.id)
        assert turn.spawned_by == (node.spawned_by and node.spawned_by.call.id)
        fresh = [] if node.superseded else node.conversation.blocks[node.inherited_blocks :]
        expected = [block for block in fresh if block.role != "assistant"]
        blocks = [block for block in turn.asked if block.role != "system" or not block.ref.count("/system/")]
        assert [block.text for block in blocks] == [block.text[:4_000] for block in expected]
        assert [block.text_size for block in blocks] == [len(block.text) for block in expected]


def test_turns_and_segments_are_those_of_the_whole_calls(stores: list[Path]):
    kinds: set[str] = set()
    for directory in stores:
        with Store.open(directory, create=False, read_only=True) as store:
            for attempt in attempts(store):
                trajectory = build(store.calls.of_attempt(attempt))
                transcript = transcripts.TranscriptReader(attempt).read(store, None)
                check(transcript, trajectory)
                segments = [transcripts.segment_of(store, each)[0] for each in transcript.outlined.segments]
                assert tuple(segments) == merge(trajectory).segments
                for node in trajectory.nodes:
                    kinds |= {node.role, "continues" * bool(node.continues), "spawned" * bool(node.spawned_by)}
                kinds |= transcript.outlined.reasons.keys()
    assert {"main", "subagent", "compaction", "continues", "spawned", "prompt rendered anew"} <= kinds


def test_what_is_read_first_is_the_tree_of_the_first_calls(stores: list[Path]):
    for directory in stores:
        with Store.open(directory, create=False, read_only=True) as store:
            for attempt in list(attempts(store))[:3]:
                calls = list(store.calls.of_attempt(attempt))
                reader = transcripts.TranscriptReader(attempt)
                for count in range(1, len(calls) + 1):
                    transcript = reader.read(store, count)
                    assert (len(transcript.nodes), transcript.unread) == (count, len(calls) - count)
                    check(transcript, build(calls[:count]))


def test_a_call_that_is_stored_after_a_later_one_has_its_place(tmp_path: Path):
    talk = branching()
    late, rest = talk.calls[1], [talk.calls[0], *talk.calls[2:]]
    with Store.open(tmp_path / "late") as store:
        put_attempt(store, rest)
        attempt = next(attempts(store))
        reader = transcripts.TranscriptReader(attempt)
        assert reader.read(store, None).total == len(rest)
        store.calls.append(msgspec.structs.replace(late, attempt_id=attempt)).result()
        check(reader.read(store, None), build(store.calls.of_attempt(attempt)))


@pytest.mark.services
def test_calls_are_read_in_parts_from_a_database_too(postgresql_store: StoreUrl):
    with Store.open(postgresql_store) as store:
        put_attempt(store, branching().calls)
        attempt = next(attempts(store))
        transcript = transcripts.TranscriptReader(attempt).read(store, None)
        check(transcript, build(store.calls.of_attempt(attempt)))


def test_a_conversation_that_leads_in_a_circle_is_said_to_be_damaged(tmp_path: Path):
    with Store.open(tmp_path / "circle") as store:
        put_attempt(store, branching().calls)
        attempt = next(attempts(store))
    with closing(sqlite3.connect(tmp_path / "circle/store.db")) as connection, connection:
        connection.execute("UPDATE nodes SET parent_id = id WHERE parent_id = 0")
    with (
        Store.open(tmp_path / "circle", create=False, read_only=True) as store,
        pytest.raises(StoreError, match="damaged"),
    ):
        transcripts.TranscriptReader(attempt).read(store, None)


def test_results_that_are_cut_alike_are_told_apart(tmp_path: Path):
    talk = Session("ignored")
    ask, call = user(text("Mend it.")), [text("I look."), tool_use("t1", name="Bash", command="cat a")]
    talk.ask([ask], call)
    for end in "ab":
        went = [ask, assistant(*call), user(tool_result("t1", "x" * 9_000 + end))]
        talk.ask(went, [text("I see.")])
        talk.ask([*went, assistant(text("I see.")), user(text("And?"))], [text("That is all.")])
    with Store.open(tmp_path / "alike") as store:
        put_attempt(store, talk.calls)
        attempt = next(attempts(store))
        transcript = transcripts.TranscriptReader(attempt).read(store, None)
        check(transcript, build(store.calls.of_attempt(attempt)))
        assert [turn.parent for turn in map(transcript.turn, range(5))][2::2] == [
            talk.calls[1].id,
            talk.calls[3].id,
        ]


PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="


def image(kind: str, data: str) -> dict[str, Any]:
    return {"type": "image", "source": {"type": "base64", "media_type": kind, "data": data}}


def test_images_are_told_with_their_type_and_read_in_ranges(tmp_path: Path):
    talk = Session("ignored")
    shots = [image("image/png", PNG), image("image/svg+xml", "PHN2Zz4="), {"type": "text", "text": "two shots"}]
    ask, call = user(text("Look."), image("image/png", PNG)), [tool_use("t1", name="Read", path="a.png")]
    talk.ask([ask], call)
    talk.ask([ask, assistant(*call), user(tool_result("t1", shots))], [text("I see.")])
    with Store.open(tmp_path / "images") as store:
        put_attempt(store, talk.calls)
        attempt = next(attempts(store))
        whole = transcripts.complete_turns(store, attempt)
    api = ViewApi(Catalog([tmp_path]))
    parts = {"store": api.catalog.scan()[0].id, "rollout": "r0"}
    turns = api.list_turns(parts, TurnQuery()).turns
    assert [turn.asked for turn in whole] == [turn.asked for turn in turns]
    result = turns[1].asked[0]
    assert [(each.media_type, each.size) for each in result.images] == [("image/png", 72), ("image/svg+xml", 6)]
    assert [each.media_type for each in turns[0].asked[-1].images] == ["image/png"]
    query = BodyQuery(ref=result.ref, field="image", image=0, length=50)
    first = api.read_body(parts, query)
    assert first.next == 50
    rest = api.read_body(parts, msgspec.structs.replace(query, offset=50, length=200_000))
    assert first.text + rest.text == f"data:image/png;base64,{PNG}"
    with pytest.raises(ViewRefused):
        api.read_body(parts, msgspec.structs.replace(query, image=2))
    api.close()


def test_of_a_long_rollout_the_first_turns_are_there_at_once(tmp_path: Path):
    talk = Session("ignored")
    for number in range(2_100):
        talk.ask([user(text(f"Question {number}."))], [text(f"Answer {number}.")])
    with Store.open(tmp_path / "long") as store:
        put_attempt(store, talk.calls)
    api = ViewApi(Catalog([tmp_path]))
    parts = {"store": api.catalog.scan()[0].id, "rollout": "r0"}
    page = api.list_turns(parts, TurnQuery(limit=25))
    assert (len(page.turns), page.total, page.next) == (25, 2_100, 25)
    heads = [api.read_rollout(parts, AttemptQuery())]
    while heads[-1].unread:
        heads.append(api.read_rollout(parts, AttemptQuery()))
    unread = [head.unread for head in heads]
    assert unread == sorted(set(unread), reverse=True) and unread[0] <= 2_100 - 25 - 100
    assert {head.turns for head in heads} == {2_100} and len(heads[-1].branches) == 2_100
    last = api.list_turns(parts, TurnQuery(call=talk.calls[-1].id))
    assert [block.text for block in last.turns[0].answered] == ["Answer 2099."]
    store, cache = api.catalog.scan()[0].reading(), transcripts.TranscriptCache()
    for read in (100, 200):
        with cache.reading(store, "", next(attempts(store)), within_s=0.0) as transcript:
            assert (len(transcript.nodes), transcript.unread) == (read, 2_100 - read)
    api.close()


def held(directory: Path, turns: int, dialect: str, sessions: int) -> tuple[int, int]:
    """The bytes that a reader of one conversation holds, and the characters that it says it does."""
    talk = Session("ignored")
    chat: list[dict[str, Any]] = [{"role": "system", "content": "S" * 1_000}]
    messages: list[dict[str, Any]] = []
    for number in range(turns):
        question, answer = f"Question {number}.", f"Answer {number}."
        messages.append(user(text(question)))
        chat.append({"role": "user", "content": question})
        call = talk.ask(messages, [text(answer)], session=f"s{number % sessions}")
        if dialect == "openai-chat":
            talk.calls[-1] = as_chat(call, chat, answer)
        messages.append(assistant(text(answer)))
        chat.append({"role": "assistant", "content": answer})
    with Store.open(directory) as store:
        put_attempt(store, talk.calls)
        attempt = next(attempts(store))
        transcripts.TranscriptReader(attempt).read(store, None)  # what is remembered for all is read before
        gc.collect()
        tracemalloc.start()
        try:
            reader = transcripts.TranscriptReader(attempt)
            transcript = reader.read(store, None)
            gc.collect()
            size = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        last = transcript.turn(turns - 1)
        assert [block.text for block in last.asked] == [f"Question {turns - 1}."] and last.parent is not None
        assert last.branch == "main"
    return size, reader.size


@pytest.mark.parametrize(
    ("dialect", "sessions", "turns"), [("anthropic", 1, 120), ("openai-chat", 1, 120), ("openai-chat", 1_000, 80)]
)
def test_what_is_held_grows_with_the_conversation(tmp_path: Path, dialect: str, sessions: int, turns: int):
    short, _ = held(tmp_path / "short", turns, dialect, sessions)
    long, counted = held(tmp_path / "long", 2 * turns, dialect, sessions)
    assert long < 2.4 * short
    assert sessions > 1 or 0.5 * long < counted < 3 * long


def test_the_rest_of_a_text_is_read_from_its_call(place: Path):
    api = ViewApi(Catalog([place]))
    store = next(each for each in api.catalog.scan() if each.name == "branching")
    parts = {"store": store.id, "rollout": "r0"}
    last = api.list_turns(parts, TurnQuery()).turns[-1]
    block = last.answered[0]
    assert (len(block.text), block.text_size) == (4_000, 9_009)
    rest = api.read_body(parts, BodyQuery(ref=block.ref, offset=4_000))
    assert block.text + rest.text == "I go on. " + "x" * 9_000 and rest.next is None
    body = api.read_body(parts, BodyQuery(ref=last.asked[-1].ref))
    assert body.text.startswith("This session is being continued")
    assert [turn.answered[0].text_size for turn in api.complete_turns(parts, None)[-1:]] == [9_009]
    api.close()


def test_requests_that_are_no_parts_are_read_whole(tmp_path: Path):
    talk = converse("ignored", PAYLOADS[0])
    odd = [
        b"no json",
        b'{"messages": 3}',
        b'{"messages": [{"role": "user", "content": "a"}], "messages": []}',
        b"[]",
    ]
    calls = [
        *talk.calls,
        *(
            msgspec.structs.replace(talk.calls[0], id=f"odd-{n}", sequence=100 + n, request=body)
            for n, body in enumerate(odd)
        ),
        msgspec.structs.replace(talk.calls[0], id="other", sequence=200, dialect="chat"),
    ]
    with Store.open(tmp_path / "odd") as store:
        put_attempt(store, calls)
        attempt = next(attempts(store))
        whole = build(store.calls.of_attempt(attempt))
        turns = transcripts.complete_turns(store, attempt)
        assert [turn.branch for turn in turns] == [node.branch for node in whole.nodes]
        assert read_request(whole.nodes[-1].call) == whole.nodes[-1].conversation


def test_stored_tokens_are_read_once_to_be_iterated():
    reads: list[int] = []

    def load() -> bytes:
        reads.append(1)
        return pack_ids((1, 2, 300_000))

    assert tuple(StoredIds(load, 3)) == (1, 2, 300_000) and len(reads) == 1
    assert StoredIds(load, 3)[1:] == (2, 300_000) and len(reads) == 2
