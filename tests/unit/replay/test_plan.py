"""What a replay is estimated to cost."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.gateway.prices import Price
from understudy.ingest.trace_store import store_trace
from understudy.replay.plan import SelectionCounts, SessionSource, ask_id, plan, request_for, select
from understudy.replay.replay import Replay, ReplaySettings
from understudy.replay.requests import worst_cost
from understudy.replay.teachers import Teacher, TeacherConfig, Teachers
from understudy.store import Store
from understudy.store.asks import StoredAsk

from support.ingest import DATA, LOGS, read
from support.replay import fill, session

PRICE = Price(input=1.0, output=0.0)
TEACHERS = Teachers(
    tuple(
        Teacher(
            name=backend,
            config=TeacherConfig(backend=backend, model="m", api_key_env="TEACHER_KEY", price=PRICE),
            family="other",
        )
        for backend in ("openai", "anthropic")
    )
)
SETTINGS = ReplaySettings(redacted=False, allow_unknown_family=True, all_roles=True)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TEACHER_KEY", "secret")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with Store.open(tmp_path / "store") as store:
        for path in LOGS:
            for trace in read(DATA / path):
                store_trace(store.sessions, trace).result()
    return tmp_path / "store"


def change(store: Path, *statements: str) -> None:
    connection = sqlite3.connect(store / "store.db")
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()


def test_costs_are_estimated_of_what_would_be_sent(store: Path) -> None:
    with Store.open(store) as opened_store:
        counts, shares = Replay(opened_store, TEACHERS, SETTINGS).estimate()
        expected = SelectionCounts()
        states = list(select(SessionSource(opened_store), TEACHERS, SETTINGS, expected))
    assert counts == expected
    assert counts.states == len(states) > 50
    for teacher in TEACHERS.teachers:
        sizes = [request_for(state, teacher).size for state in states]
        share = shares[teacher.name]
        assert share.prompt_tokens == pytest.approx(sum(size.likely_tokens for size in sizes), rel=0.05)
        worst = sum(worst_cost(PRICE, size.most_tokens, 4096) for size in sizes)
        assert worst <= (share.worst_usd or 0.0) <= 1.2 * worst


def test_no_conversation_is_read_for_an_estimate(store: Path) -> None:
    with Store.open(store) as opened_store:
        before = Replay(opened_store, TEACHERS, SETTINGS).estimate()
    change(store, "UPDATE blobs SET data = x'00'")
    with Store.open(store) as opened_store:
        assert Replay(opened_store, TEACHERS, SETTINGS).estimate() == before


def test_a_store_without_sizes_has_the_same_estimate(store: Path) -> None:
    with Store.open(store) as opened_store:
        before = Replay(opened_store, TEACHERS, SETTINGS).estimate()
    change(
        store,
        "UPDATE turns SET prompt_bytes = NULL, prompt_escaped = NULL, prompt_messages = NULL",
        "UPDATE turns SET prompt_images = NULL, answer_chars = NULL",
        "UPDATE traces SET tools_source = NULL, tools_bytes = NULL, tools_escaped = NULL",
    )
    with Store.open(store) as opened_store:
        assert Replay(opened_store, TEACHERS, SETTINGS).estimate() == before


def test_a_missing_key_is_named_before_a_conversation_is_read(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TEACHER_KEY")
    change(store, "UPDATE turns SET prompt_bytes = NULL", "UPDATE blobs SET data = x'00'")
    with Store.open(store) as opened_store, pytest.raises(ConfigError, match="TEACHER_KEY is not set"):
        Replay(opened_store, TEACHERS, SETTINGS).estimate()


def test_asks_that_are_answered_cost_nothing(tmp_path: Path) -> None:
    fill(tmp_path, session("a", turns=3))
    options = ReplaySettings(redacted=False, samples=2)
    with Store.open(tmp_path) as store:
        source = SessionSource(store)
        _, whole, planned = plan(source, TEACHERS, options, set())
        first, teacher = planned[0].stored, TEACHERS.teachers[0]
        every = Replay(store, TEACHERS, options).estimate()[1][teacher.name]
        store.asks.put_replay("replay", {}).result()
        store.asks.add(
            StoredAsk(
                id=ask_id(options, first.state_id, teacher, 1),
                replay_id="replay",
                state_id=first.state_id,
                kind="teacher",
                teacher=teacher.name,
                model="m",
                family=None,
                number=1,
                status="answered",
                asked_at=0.0,
            )
        ).result()
        shares = Replay(store, TEACHERS, options).estimate()[1]
    assert {name: (share.asks, share.done) for name, share in whole.items()} == {
        "openai": (6, 0),
        "anthropic": (6, 0),
    }
    assert {name: (share.asks, share.done) for name, share in shares.items()} == {
        "openai": (6, 1),
        "anthropic": (6, 0),
    }
    assert shares["openai"].prompt_tokens < every.prompt_tokens
