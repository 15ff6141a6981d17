"""Shows a session or a state as a page in the terminal, or as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct
from msgspec.structs import asdict

from understudy.cli.output import counted
from understudy.cli.page import PagePrinter
from understudy.ingest.json_values import items, mapping
from understudy.ingest.trace import Message, Trace, TraceState, TraceTurn, expand, state_id, text_of
from understudy.wire.arguments import parse_object

ID_LENGTH = 12
"""Number of characters of a state's id in lists, which `understudy show` accepts."""

_ROLE_STYLES = {"system": "dim", "user": "yellow", "tool": "dim"}
_TEXT_LENGTH = 80


class ShownState(Struct, frozen=True, kw_only=True):
    """A state with its trace and the number of its turn, counted from 1."""

    state: TraceState
    trace: Trace
    number: int


def chosen_state(trace: Trace, position: int) -> ShownState:
    """Return the state of the turn at an index of a trace. Its tools are inferred from the whole trace."""
    for number, state in enumerate(expand(trace)):
        if number == position:
            return ShownState(state=state, trace=trace, number=number + 1)
    raise IndexError(
        f"there is no turn with index {position}; expected an index below {len(trace.turns)}, the number of "
        "turns of the trace: give a smaller one"
    )


def signal_text(signals: Mapping[str, Any]) -> str:
    """Return what became of a turn in a few words, from its signals and the outcome."""
    parts: list[str] = []
    if signals["tests"]:
        parts.append(f"tests {signals['tests']}")
    if signals["edits"]:
        survived = signals["edits_survived"]
        parts.append(
            f"{signals['edits']} edits" if survived is None else f"{survived} of {signals['edits']} edits last"
        )
    for name, label in (("commits", "commits"), ("tool_errors", "errors"), ("denied", "denied")):
        if signals[name]:
            parts.append(f"{signals[name]} {label}")
    if signals["interrupted"]:
        parts.append("interrupted")
    if signals["feedback"]:
        parts.append(f"{signals['feedback']} feedback")
    if signals.get("resolved") is not None:
        parts.append("solved" if signals["resolved"] else "unsolved")
    return ", ".join(parts)


def session_record(session_id: str, traces: Sequence[Trace], states: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return a session as JSON types: its conversations with their turns.

    `states` holds the ids of the turns' states.
    """
    return {
        "session_id": session_id,
        "conversations": [
            {
                **_origin_record(trace),
                "outcome": None if trace.outcome is None else asdict(trace.outcome),
                "losses": dict(trace.losses),
                "turns": [_turn_record(trace, turn, state) for turn, state in zip(trace.turns, ids, strict=True)],
            }
            for trace, ids in zip(traces, states, strict=True)
        ],
    }


_TRACE_FIELDS = ("trace_id", "session_id", "format", "source", "role", "agent", "version", "project")


def _origin_record(trace: Trace) -> dict[str, Any]:
    fields = {name: getattr(trace, name) for name in _TRACE_FIELDS}
    return {**fields, "parent": None if trace.parent is None else asdict(trace.parent)}


def _turn_record(trace: Trace, turn: TraceTurn, state: str) -> dict[str, Any]:
    action = trace.renderer.action([trace.nodes[index].body for index in turn.action])
    return {
        "state_id": state,
        **{name: getattr(turn, name) for name in ("message_id", "timestamp", "model", "branch", "fidelity")},
        "notes": list(turn.notes),
        "tool_calls": [call["function"]["name"] for call in action.tool_calls],
        "text": action.content,
        "signals": None if turn.signals is None else asdict(turn.signals),
    }


def state_ids(trace: Trace) -> list[str]:
    """Return the ids of the states of a trace's turns."""
    return [state_id(trace.trace_id, turn.message_id) for turn in trace.turns]


class SessionPrinter(PagePrinter):
    """Prints sessions and states to a console. With `full`, nothing is shortened."""

    def show_session(self, record: Mapping[str, Any]) -> None:
        """Print a session made by `session_record`: for each conversation its origin and its turns."""
        conversations: list[dict[str, Any]] = record["conversations"]
        states = sum(len(conversation["turns"]) for conversation in conversations)
        self.fact("session", f"{record['session_id']}   {len(conversations)} conversations, {states} states")
        for conversation in conversations:
            self.section(f"{conversation['role']} {conversation['trace_id']}")
            self._origin(conversation)
            outcome: Mapping[str, Any] | None = conversation["outcome"]
            if outcome:
                facts = (f"{name} {value}" for name, value in outcome.items() if value is not None)
                self.fact("outcome", ", ".join(facts) or "unknown")
            self.fact("losses", counted(conversation["losses"]) or "none")
            fidelities: dict[str, int] = {}
            for turn in conversation["turns"]:
                fidelities[turn["fidelity"]] = fidelities.get(turn["fidelity"], 0) + 1
            self.fact("turns", f"{len(conversation['turns'])}   {counted(fidelities)}")
            self.console.print()
            for turn in conversation["turns"]:
                self._turn(turn)

    def show_state(self, view: ShownState) -> None:
        """Print a state: its origin, its tools, the messages that the model saw, and what it did next."""
        state, trace = view.state, view.trace
        self.fact("state", f"{state.state_id}   turn {view.number} of {len(trace.turns)}")
        self.fact("session", f"{state.session_id}   {state.role}   {trace.trace_id}")
        self._origin(_origin_record(trace))
        self.fact("model", "   ".join(filter(None, (state.source_model, state.source_family, state.timestamp))))
        notes = f"   {', '.join(state.notes)}" if state.notes else ""
        self.fact("fidelity", f"{state.fidelity}   {state.branch}{notes}")
        self.fact("losses", counted(trace.losses) or "none")
        self.fact("signals", "" if state.signals is None else signal_text(asdict(state.signals)) or "none")
        self._tools(state)
        for number, message in enumerate(state.messages):
            self.section(f"{number} {message['role']}")
            self._message(message)
        self.section("next action")
        action = state.student_action
        if action.thinking:
            self.text(action.thinking, 1, style="italic dim")
        elif action.thinking_hidden:
            self.line("(it thought, and the log does not hold what)", "dim", 1)
        self._message({"role": "assistant", "content": action.content, "tool_calls": action.tool_calls})

    def _origin(self, trace: Mapping[str, Any]) -> None:
        self.fact("from", f"{trace['format']} {trace['version'] or ''}   {trace['source']}")
        if trace["project"]:
            self.fact("project", trace["project"])
        if trace["agent"]:
            self.fact("agent", trace["agent"])
        if parent := trace["parent"]:
            call = f", call {parent['tool_use_id']}" if parent["tool_use_id"] else ""
            self.fact("parent", f"session {parent['session_id']}{call}")

    def _turn(self, turn: Mapping[str, Any]) -> None:
        rewound = "" if turn["branch"] == "active" else "   rewound"
        notes = f" ({', '.join(turn['notes'])})" if turn["notes"] else ""
        facts = (turn["state_id"][:ID_LENGTH], turn["timestamp"], turn["model"], f"{turn['fidelity']}{notes}")
        self.line("   ".join(filter(None, facts)) + rewound, "bold blue")
        summary = " ".join((turn["text"] or "").split())
        summary = summary if self.full or len(summary) <= _TEXT_LENGTH else f"{summary[: _TEXT_LENGTH - 1]}\u2026"
        calls = [f"\u2192 {name}" for name in turn["tool_calls"]]
        if what := "   ".join(filter(None, (summary, *calls))):
            self.line(what, depth=1)
        if turn["signals"] and (signals := signal_text(turn["signals"])):
            self.line(signals, "dim", 1)

    def _tools(self, state: TraceState) -> None:
        names = [str(tool["function"]["name"]) for tool in state.tools or ()]
        version = f" {state.tools_version}" if state.tools_version else ""
        self.fact("tools", f"{len(names)}   {state.tools_source or 'none'}{version}   {', '.join(names)}".rstrip())
        if state.tools_inferred:
            self.fact("inferred", ", ".join(state.tools_inferred))
        for tool in (state.tools or ()) if self.full else ():
            self.line(f"tool {tool['function']['name']}", "bold", 1)
            self.text(msgspec.json.encode(tool["function"]).decode(), 2, style="dim")

    def _message(self, message: Message) -> None:
        content = message.get("content")
        style = _ROLE_STYLES.get(message["role"], "")
        if text := content if isinstance(content, str) else text_of(content):
            self.text(text, 1, style=style)
        for part in map(mapping, items(content)):
            if part.get("type") != "text":
                self.line(f"[{part.get('type')}]", "dim", 1)
        if "tool_call_id" in message:
            self.line(f"result of {message['tool_call_id']}", "dim", 1)
        for call in message.get("tool_calls") or ():
            self.line(f"\u2192 {call['function']['name']}   {call['id']}", "bold magenta", 1)
            for key, value in _arguments(call["function"]["arguments"]):
                self.text(f"{key}: {value}", 2)


def _arguments(text: str) -> Iterator[tuple[str, str]]:
    """Yield the arguments of a call one by one, or the raw text if it is not a JSON object."""
    for key, value in (parse_object(text) or {"input": text}).items():
        value_text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
        yield key, f"\n{value_text}" if "\n" in value_text else value_text
