"""Traces in a store: what comes back expands into the same states, whatever they are."""

from __future__ import annotations

import json
import os
import re
import signal
import sqlite3
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError, StoreError
from understudy.ingest import trace_store
from understudy.ingest.signals.annotate import annotate
from understudy.ingest.state_files import extract_states
from understudy.ingest.trace import (
    PlainRenderer,
    RequestShape,
    Trace,
    TraceNode,
    TraceOutcome,
    TraceParent,
    TraceTurn,
    TurnSignals,
    expand,
    state_id,
    tool_call,
)
from understudy.store import Store
from understudy.store.sessions import TraceChanges
from understudy.store.sqlite import filter_connection
from understudy.store.turn_filters import COLUMNS, select_turns

from support.ingest import DATA, LOGS, read

REAL = Path(__file__).parents[4] / "shared" / "sessions-real"


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store.open(tmp_path / "store") as new_store:
        yield new_store


def back(store: Store, trace: Trace) -> Trace:
    """The trace as the store has it."""
    own = [loaded for loaded in trace_store.traces(store) if loaded.trace_id == trace.trace_id]
    assert len(own) == 1
    return own[0]


def put(store: Store, trace: Trace) -> TraceChanges:
    return trace_store.store_trace(store.sessions, trace).result()


# --- the law -------------------------------------------------------------------------------------------

words = st.text(max_size=12)
odd = st.text(st.characters(), max_size=8)  # halves of surrogate pairs too, as names of files have them
names = st.one_of(st.none(), odd)
calls = st.lists(
    st.builds(tool_call, odd, odd, st.dictionaries(odd, st.one_of(st.integers(), odd))), min_size=1, max_size=3
)
contents = st.one_of(
    odd,
    st.none(),
    st.lists(
        st.one_of(
            st.builds(lambda text: {"type": "text", "text": text}, odd),
            st.builds(lambda url: {"type": "image_url", "image_url": {"url": url}}, words),
        ),
        max_size=2,
    ),
)
said = st.builds(
    lambda role, content: {"role": role, "content": content}, st.sampled_from(["user", "system"]), contents
)
results = st.builds(
    lambda call, content, bad: {
        "role": "tool", "tool_call_id": call, "content": content or "", **({"is_error": True} if bad else {}),
    },
    words, contents, st.booleans(),
)  # fmt: skip
answers = st.builds(
    lambda content, made, thought, hidden: {
        "role": "assistant",
        "content": content,
        **({"tool_calls": made} if made else {}),
        **({"reasoning_content": thought} if thought else {}),
        **({"thinking_hidden": True} if hidden else {}),
    },
    st.one_of(odd, st.none()), st.one_of(st.none(), calls), words, st.booleans(),
)  # fmt: skip
bodies = st.lists(st.one_of(said, results, answers), max_size=2)
tools = st.lists(
    st.builds(
        lambda name: {"type": "function", "function": {"name": name, "parameters": {"x": [1, 2.5, None]}}}, odd
    )
)
shapes = st.builds(RequestShape, names, st.one_of(st.none(), tools))
some = st.one_of(st.none(), st.integers(0, 9))
signals = st.builds(
    TurnSignals, tool_calls=st.integers(0, 9), tool_errors=st.integers(0, 9), denied=st.integers(0, 9),
    interrupted=st.booleans(), tests=st.sampled_from(["passed", "failed", None]), edits=st.integers(0, 9),
    edits_survived=some, commits=st.integers(0, 9), feedback=st.sampled_from(["positive", "negative", None]),
)  # fmt: skip
outcomes = st.builds(
    TraceOutcome, resolved=st.sampled_from([True, False, None]), reward=st.one_of(st.none(), st.floats(0, 1)),
    task=names, exit_status=names,
)  # fmt: skip


def test_a_tool_call_may_hold_anything_that_json_may():
    call = tool_call("c1", "Bash", {"command": "ls caf\ud800 ✓"})
    assert json.loads(call["function"]["arguments"]) == {"command": "ls caf? ✓"}
    assert tool_call("c1", "Bash", "as it was \ud800")["function"]["arguments"] == "as it was \ud800"


class Lists(PlainRenderer):
    """A renderer of bodies that are lists of messages, some of them empty."""

    def history(self, body: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [message for one in body for message in super(Lists, self).history(one)]

    def action(self, bodies: Any) -> Any:
        return super().action([message for body in bodies for message in body])


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    nodes: list[TraceNode] = []
    for body in draw(st.lists(bodies, max_size=8)):
        nodes.append(TraceNode(draw(st.integers(-1, len(nodes) - 1)), body))
    any_node = st.integers(-1, len(nodes) - 1)
    turns: list[TraceTurn] = []
    for message_id in draw(st.lists(odd, max_size=5, unique=True)):
        action = draw(st.lists(st.integers(0, len(nodes) - 1), max_size=3)) if nodes else []
        turns.append(
            TraceTurn(
                message_id=message_id, context=draw(any_node), action=tuple(action), model=draw(names),
                timestamp=draw(names), branch=draw(st.sampled_from(["active", "branch"])),
                fidelity=draw(st.sampled_from(["ledger", "exact", "repaired", "lossy"])),
                notes=tuple(draw(st.lists(odd, max_size=2))), shape=draw(st.one_of(st.none(), shapes)),
                signals=draw(signals),
            )
        )  # fmt: skip
    return Trace(
        trace_id=draw(odd), session_id=draw(odd), format="claude-code", source=draw(odd), renderer=Lists(),
        nodes=nodes, turns=turns, project=draw(names), role=draw(st.sampled_from(["main", "subagent"])),
        parent=draw(st.one_of(st.none(), st.builds(TraceParent, odd, names, st.integers(1, 5)))),
        agent=draw(names),
        version=draw(names), shape=draw(shapes), outcome=draw(st.one_of(st.none(), outcomes)),
        losses=Counter(draw(st.dictionaries(odd, st.integers(1, 5), max_size=2))),
    )  # fmt: skip


@cache
def empty() -> bytes:
    """A store without anything, which takes a while to make."""
    with tempfile.TemporaryDirectory() as directory:
        Store.open(Path(directory)).close()
        return Path(directory, "store.db").read_bytes()


def copied(directory: Path) -> Path:
    directory.mkdir()
    (directory / "store.db").write_bytes(empty())
    return directory


def test_an_action_with_gaps_between_its_nodes_is_stored_completely(tmp_path: Path):
    answer = {"role": "assistant", "content": "done"}
    nodes = [TraceNode(-1, [answer]), TraceNode(0, [{"role": "user", "content": str(at)} for at in range(2)])]
    turn = TraceTurn(message_id="m", context=-1, action=(0, 2), model=None, timestamp=None, signals=TurnSignals())
    trace = Trace(
        trace_id="t", session_id="s", format="claude-code", source="log", renderer=Lists(),
        nodes=[*nodes, TraceNode(1, [])], turns=[turn],
    )  # fmt: skip
    with Store.open(copied(tmp_path / "store")) as store:
        put(store, trace)
        (loaded,) = trace_store.traces(store)
        assert list(expand(loaded)) == list(expand(trace))


@settings(max_examples=40, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(originals=st.lists(traces(), max_size=3, unique_by=lambda trace: trace.trace_id))
def test_stored_traces_expand_to_the_states_of_the_traces_read(originals: list[Trace]):
    with tempfile.TemporaryDirectory() as directory, Store.open(copied(Path(directory, "store"))) as store:
        for trace in originals:
            assert put(store, trace) == TraceChanges(new=len(trace.turns))
        stored = {trace.trace_id: trace for trace in trace_store.traces(store)}
        assert stored.keys() == {trace.trace_id for trace in originals if trace.turns}
        for trace in originals:
            if not trace.turns:
                continue
            loaded = stored[trace.trace_id]
            assert list(expand(loaded)) == list(expand(trace))
            for name in (
                "session_id",
                "source",
                "project",
                "parent",
                "role",
                "agent",
                "version",
                "shape",
                "losses",
            ):
                assert getattr(loaded, name) == getattr(trace, name)
            # What came out goes in again.
            assert put(store, loaded).new == 0
        stored = {trace.trace_id: trace for trace in trace_store.traces(store)}
        assert all(list(expand(stored[one.trace_id])) == list(expand(one)) for one in originals if one.turns)


@pytest.mark.parametrize("log", [*LOGS, REAL])
def test_stored_traces_of_real_logs_expand_to_the_states_read(log: str | Path, store: Store):
    path = DATA / log
    if not path.exists():
        pytest.skip(f"{path} is not here")
    own: dict[str, Trace] = {}
    for trace in read_any(path):
        annotate(trace)
        if trace.turns and trace.trace_id not in own:
            own[trace.trace_id] = trace
            put(store, trace)
    stored = list(trace_store.traces(store))
    assert [trace.trace_id for trace in stored] == list(own)
    for trace in stored:
        assert list(expand(trace)) == list(expand(own[trace.trace_id]))
    assert sum(len(trace.turns) for trace in stored) == store.sessions.count()[0] > 0


def read_any(path: Path) -> list[Trace]:
    if path != REAL:
        return read(path)
    return [trace for file in sorted(path.glob("*.jsonl")) for trace in read(file)]


# --- a log that changes --------------------------------------------------------------------------------


def conversation(turns: int, prompt: str = "do it", session: str = "s") -> Trace:
    """A trace in which each turn goes on from the last."""
    trace = Trace(trace_id=session, session_id=session, format="codex", source="a.jsonl", renderer=PlainRenderer())
    trace.nodes.append(TraceNode(-1, {"role": "user", "content": prompt}))
    for number in range(turns):
        trace.nodes.append(TraceNode(len(trace.nodes) - 1, {"role": "assistant", "content": f"answer {number}"}))
        end = len(trace.nodes) - 1
        trace.turns.append(
            TraceTurn(message_id=f"m{number}", context=end - 1, action=(end,), signals=TurnSignals())
        )
        trace.nodes.append(TraceNode(end, {"role": "user", "content": "go on"}))
    return trace


def test_storing_a_grown_log_adds_only_the_new_turns(store: Store):
    put(store, conversation(3))
    assert put(store, conversation(5)) == TraceChanges(new=2, same=3)
    assert store.sessions.count() == (5, 1)


def test_storing_a_trace_again_updates_its_changed_states(store: Store):
    trace = conversation(3)
    put(store, trace)
    trace.turns[1].branch = "branch"
    trace.turns[2].signals = TurnSignals(commits=1)
    trace.project = "/elsewhere"
    assert put(store, trace) == TraceChanges(changed=2, same=1)
    assert list(expand(back(store, trace))) == list(expand(trace))


def test_stored_turns_stay_when_a_later_log_lacks_them(store: Store):
    put(store, conversation(3))
    shorter = conversation(3)
    del shorter.turns[0]
    assert put(store, shorter) == TraceChanges(same=2)
    assert len(back(store, shorter).turns) == 3


def test_messages_shared_by_conversations_are_stored_once(store: Store):
    long = "a long prompt " * 10_000
    sizes: list[int] = []
    for number in range(4):
        put(store, conversation(2, long, f"s{number}"))
        store.close()
        sizes.append((store.directory / "store.db").stat().st_size)
        store = Store.open(store.directory)
    store.close()
    assert sizes[3] - sizes[1] < len(long) // 10


def test_action_nodes_are_those_that_later_turns_see(store: Store):
    trace = conversation(3)
    put(store, trace)
    loaded = back(store, trace)
    for before, after in zip(loaded.turns, loaded.turns[1:], strict=False):
        path: set[int] = set()
        node = after.context
        while node >= 0:
            path.add(node)
            node = loaded.nodes[node].parent
        assert path.issuperset(before.action)


def test_a_store_of_an_earlier_release_keeps_its_rows_and_accepts_sessions(tmp_path: Path):
    with sqlite3.connect(tmp_path / "store.db") as raw:
        raw.executescript((DATA.parent / "store_0003.sql").read_text())
        names = [name for (name,) in raw.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        # Migrations may add columns: those of the release are compared.
        reads = {
            name: f"SELECT {', '.join(row[1] for row in raw.execute(f'PRAGMA table_info({name})'))} FROM {name}"
            for name in names
        }
        before = {name: raw.execute(read).fetchall() for name, read in reads.items()}
    raw.close()
    assert before.pop("alembic_version") == [("0003",)]
    assert before["rollouts"] and before["calls"] and before["rewards"]
    with Store.open(tmp_path) as store:
        put(store, conversation(3))
        assert store.sessions.count() == (3, 1)
    with sqlite3.connect(tmp_path / "store.db") as raw:
        for name, rows in before.items():
            assert raw.execute(reads[name]).fetchall()[: len(rows)] == rows, name
    raw.close()


def test_damage_of_a_stored_session_names_its_log(store: Store):
    trace = conversation(1)
    put(store, trace)
    store.close()
    with sqlite3.connect(store.directory / "store.db") as raw:
        raw.execute("UPDATE blobs SET data = '[{', codec = 0 WHERE id IN (SELECT blob_id FROM nodes)")
    raw.close()
    named = re.escape(f"{trace.source}: what the store holds of this log is damaged: ")
    with pytest.raises(StoreError, match=named):
        list(trace_store.states(store.directory))


# --- choosing ------------------------------------------------------------------------------------------


def test_states_are_chosen_by_sql(store: Store):
    trace = conversation(4)
    trace.turns[2].signals = TurnSignals(tests="passed", commits=2)
    trace.turns[1].model = "claude-opus-4-7"
    trace.outcome = TraceOutcome(resolved=True, reward=0.5, task="t1")
    put(store, trace)
    put(store, conversation(2, session="other"))

    def chosen_by(where: str | None, limit: int | None = None) -> list[tuple[str, str]]:
        return [(s.trace_id, s.message_id) for s in trace_store.states(store, where, limit=limit)]

    assert chosen_by("tests = 'passed' AND commits > 1") == [("s", "m2")]
    assert chosen_by("family = 'claude'") == [("s", "m1")]
    assert chosen_by("resolved AND reward >= 0.5 AND task = 't1' -- solved") == [("s", f"m{n}") for n in range(4)]
    assert chosen_by("resolved IS NULL") == [("other", "m0"), ("other", "m1")]
    assert chosen_by(None, limit=5) == [("s", f"m{n}") for n in range(4)] + [("other", "m0")]
    (one,) = trace_store.traces(store, f"state_id = '{state_id('s', 'm2')}'")
    assert list(expand(one)) == list(expand(trace))[2:3]
    assert store.sessions.count("trace_id = 's'") == (4, 1)
    assert set(COLUMNS) >= set(TurnSignals.__struct_fields__)
    assert store.sessions.table(("state_id", "commits"), "commits") == [(state_id("s", "m2"), 2)]


def test_a_limit_with_a_seed_is_a_random_sample(store: Store):
    put(store, conversation(30))
    put(store, conversation(10, session="other"))

    def sample(limit: int, seed: int, where: str | None = None) -> list[tuple[str, str]]:
        states = trace_store.states(store, where, limit=limit, seed=seed)
        return [(state.trace_id, state.message_id) for state in states]

    ten = sample(10, 0)
    assert len(ten) == 10 and ten == sample(10, 0)
    assert ten != [("s", f"m{n}") for n in range(10)], "the first ones are no sample"
    assert set(ten) != set(sample(10, 1))
    assert set(sample(5, 0)) < set(ten), "a larger sample contains a smaller one"
    assert len(sample(100, 0)) == 40
    of_other = sample(4, 0, "trace_id = 'other' -- a comment")
    assert len(of_other) == 4 and {trace for trace, _ in of_other} == {"other"}
    rows = store.sessions.table(("trace_id", "message_id"), None, limit=10, seed=0)
    assert rows == ten, "a table shows the same sample"
    drawn = Counter(one for seed in range(200) for one in sample(10, seed))
    assert len(drawn) == 40 and 20 < min(drawn.values()) < max(drawn.values()) < 90


def test_ctrl_c_while_sqlite_works_is_ctrl_c(store: Store):
    put(store, conversation(40))
    endless = "(SELECT count(*) FROM turns a, turns b, turns c, turns d, turns e, turns f) > 0"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    try:
        with pytest.raises(KeyboardInterrupt):
            timer.start()
            store.sessions.select(endless)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("", "it is empty"),
        ("modle = 'x'", "no such column: modle"),
        ("model = ", "the expression is not complete"),
        ("model = 'x')", "syntax error"),
        ("model = 'x", "unrecognized token: \"'x. Give"),
        ("1; DROP TABLE turns", "syntax error"),
        ("1) UNION SELECT 1, 2 FROM keys WHERE (1", "cannot select states"),
        ("state_id IN (SELECT data FROM blobs)", "prohibited"),
        ("(SELECT count(*) FROM sqlite_master)", "not authorized"),
        ("load_extension('x')", "not authorized"),
        ("1 IN (WITH RECURSIVE a(x) AS (SELECT 1 UNION ALL SELECT x FROM a) SELECT x FROM a)", "not authorized"),
        ("length(zeroblob(900000000))", "too big"),
        ("count(*) > 1", "misuse of aggregate"),
        ("model = '\ud800'", "surrogates not allowed"),
    ],
)
def test_an_invalid_where_expression_is_refused_with_the_known_columns(where: str, message: str, store: Store):
    put(store, conversation(1))
    with pytest.raises(ConfigError) as error:
        list(trace_store.states(store, where))
    assert message in str(error.value)
    assert repr(where) in str(error.value) and "tool_errors" in str(error.value)
    assert store.sessions.count() == (1, 1)


def test_a_where_expression_that_runs_too_long_is_cancelled(store: Store):
    put(store, conversation(60))
    endless = "(SELECT count(*) FROM turns a, turns b, turns c, turns d, turns e, turns f) > 1"
    with (
        filter_connection(store.directory / "store.db") as raw,
        pytest.raises(ConfigError, match="takes longer than"),
    ):
        select_turns(raw, ("state_id",), endless, None, patience_s=0.05)


def test_states_are_read_from_a_store_directory(store: Store):
    put(store, conversation(2))
    store.close()
    assert [state.message_id for state in trace_store.states(store.directory)] == ["m0", "m1"]
    assert [state.messages[0]["role"] for state in trace_store.states(str(store.directory), system=None)] == [
        "user"
    ] * 2
    with pytest.raises(StoreError, match="has no store"):
        list(trace_store.states(store.directory / "none"))


def test_a_file_of_states_in_a_missing_directory(store: Store, tmp_path: Path) -> None:
    output = tmp_path / "nowhere" / "states.jsonl"
    with pytest.raises(ConfigError, match=f"{output} cannot be written: there is no directory {output.parent}"):
        extract_states(store, output, None, None, None, None)
