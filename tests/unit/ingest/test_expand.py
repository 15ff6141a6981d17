"""A trace's states, made from each other, are those that each turn's whole context gives."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.ingest.trace import PlainRenderer, Trace, TraceNode, TraceTurn, expand, normalise_messages, path_to

from support import example_count

IDS = st.sampled_from(["a", "b", "c"])
CALLS = st.lists(
    IDS.map(lambda name: {"id": name, "type": "function", "function": {"name": "Bash", "arguments": "{}"}}),
    max_size=2,
)
MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": st.sampled_from(["", "go"])}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": st.sampled_from([None, "", "text"]), "tool_calls": CALLS}
    ),
    st.fixed_dictionaries({"role": st.just("tool"), "tool_call_id": IDS, "content": st.just("result")}),
)


WRITTEN = st.lists(st.tuples(MESSAGE, st.integers(0, 80)), min_size=1, max_size=90)
"""Messages, and how far before its place in the list each hangs: mostly it follows the last one."""


@settings(max_examples=example_count(500))
@given(WRITTEN, st.lists(st.integers(-1, 89), max_size=20))
def test_states_expanded_incrementally_equal_those_of_the_whole_context(
    written: list[tuple[dict[str, Any], int]], more: list[int]
) -> None:
    nodes = [
        TraceNode(at - 1 if back > 8 else max(at - 1 - back, -1), message)
        for at, (message, back) in enumerate(written)
    ]
    contexts = [*range(len(nodes)), *(context for context in more if context < len(nodes))]
    trace = Trace(
        trace_id="t",
        session_id="t",
        format="plain",
        source="-",
        renderer=PlainRenderer(),
        nodes=nodes,
        turns=[TraceTurn(message_id=str(at), context=context, action=()) for at, context in enumerate(contexts)],
    )
    for state, context in zip(expand(trace, system=None), contexts, strict=True):
        assert state.messages == normalise_messages([nodes[at].body for at in path_to(nodes, context, [])])
