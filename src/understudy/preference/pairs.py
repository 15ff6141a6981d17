"""Pairs from replays: what teachers agree on (chosen) and what the student did (rejected), if they differ."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.ingest import trace_store
from understudy.ingest.redaction import redact_trace
from understudy.ingest.tool_lists import ToolList, completed, names_of
from understudy.ingest.trace import (
    Message,
    OfferedTools,
    Trace,
    TraceState,
    TurnAction,
    expand,
    rendered_node,
    state_id,
)
from understudy.preference import checks
from understudy.preference.checks import Checks, Pair, PairCounts
from understudy.preference.consensus import MINIMUM, Consensus, Judge, Proposal, consensus
from understudy.preference.equivalence import (
    Difference,
    difference_between,
    difference_json,
    digest,
    effect_of,
    same_effect,
)
from understudy.preference.normalise import WorkingDirectory, has_unreadable_call
from understudy.preference.proposals import judge_of, names_in, proposals
from understudy.redact.heuristics import PSEUDONYM
from understudy.store import Store
from understudy.store.asks import StoredReplay

if TYPE_CHECKING:
    from understudy.redact.redactor import Redactor

NO_PROPOSALS = "no teacher gave an answer that can be used"
UNKNOWN_FAMILY = "the model that wrote the turn is of no known family"
SAME_FAMILY = "of the family that wrote the turn"
NO_FAMILY = "of no known family"
UNKNOWN_PSEUDONYM = "with pseudonyms that the conversation does not have"
"""The answer has no vote, because its request was redacted differently from these pairs. Like the two reasons
above, it follows the words "teachers' answers".
"""

_STATES_PER_QUERY = 2_000


class _FamilyRules(Struct, frozen=True):
    """Which teachers a replay was allowed to ask: those of the family that wrote a turn, and those of unknown
    families.
    """

    same: bool
    unknown: bool


def replay_pairs(
    store: Store,
    *,
    minimum: int = MINIMUM,
    where: str | None = None,
    redactor: Redactor | None = None,
    include_lossy: bool = False,
    checked: Checks | None = None,
    tally: PairCounts | None = None,
) -> Iterator[Pair]:
    """Yield a pair for each state in which teachers agree on an action that differs from the student's.

    `where` selects states, as in `trace_store.traces`. With a `redactor`, pairs hold no secrets. A teacher of the
    family that wrote the turn, or of an unknown family, has no vote, and a turn by a model of an unknown family
    gives no pair, unless the last invocation of the replay allowed it. If teachers do not agree, the choice of the
    replay's judge decides. Lossy states give pairs only with `include_lossy`. Comparisons are counted in `tally`.

    Raises ConfigError for an invalid `where`, StoreError if something cannot be read.
    """
    if minimum < 1:
        raise ConfigError(f"--minimum is {minimum}; give at least 1 vote for an agreement")
    tally = tally if tally is not None else PairCounts()
    checked = checked or Checks()
    checked.doubted = store.votes.doubted_pairs()
    if where is not None:
        # raises ConfigError for a mistake in `where` itself, before our conditions are added to it
        store.sessions.select(where, limit=1)
    answered = store.asks.answered_states()
    allowed = {replay.id: _family_rules(replay) for replay in store.asks.replays()}
    for start in range(0, len(answered), _STATES_PER_QUERY):
        for trace in trace_store.traces(
            store.sessions, where=_state_condition(answered[start : start + _STATES_PER_QUERY], where)
        ):
            ids = [state_id(trace.trace_id, turn.message_id) for turn in trace.turns]
            names = _tool_names(trace)
            proposals_by_state = {
                state: proposals(store, state, names=names, left_out=tally.answers) for state in ids
            }
            exported = trace
            if redactor is not None:
                exported = redact_trace(trace, redactor)
                proposals_by_state = _redacted(trace, proposals_by_state, redactor)
            # Ids are those of the stored trace, because asks are stored with them.
            for stored_id, state in zip(ids, expand(exported), strict=True):
                state.state_id = stored_id
                tally.compared += 1
                votes, reason = _votes(state, proposals_by_state[stored_id], allowed, tally)
                reason = checks.LOSSY if state.fidelity == "lossy" and not include_lossy else reason
                outcome = reason or _pair(state, trace.format, votes, minimum, judge_of(store, stored_id), checked)
                if isinstance(outcome, str):
                    tally.left_out[outcome] += 1
                else:
                    tally.pairs += 1
                    yield outcome


def _votes(
    state: TraceState, candidates: list[Proposal], allowed: Mapping[str, _FamilyRules], tally: PairCounts
) -> tuple[list[Proposal], str | None]:
    """Return the proposals that have a vote, or the reason why the state gives no pair in any case."""
    family, votes = state.source_family, list[Proposal]()
    if family is None and not (
        candidates := [candidate for candidate in candidates if allowed[candidate.replay_id].unknown]
    ):
        return [], UNKNOWN_FAMILY
    for candidate in candidates:
        rules = allowed[candidate.replay_id]
        if candidate.family is None and not rules.unknown:
            tally.answers[NO_FAMILY] += 1
        elif candidate.family is not None and candidate.family == family and not rules.same:
            tally.answers[SAME_FAMILY] += 1
        elif _has_unknown_pseudonym(state, candidate):
            tally.answers[UNKNOWN_PSEUDONYM] += 1
        else:
            votes.append(candidate)
    return votes, None if votes else NO_PROPOSALS


def _tool_names(trace: Trace) -> set[str]:
    """Return the names of the tools of a trace, as far as they are known."""
    shapes = (trace.shape, *(turn.shape for turn in trace.turns if turn.shape is not None))
    rendered: dict[int, list[Message]] = {}
    unlogged = any(shape.tools is None for shape in shapes) and OfferedTools(trace, rendered).inferred_tools.tools
    messages = chain.from_iterable(rendered_node(trace, index, rendered) for index in range(len(trace.nodes)))
    return names_in(messages, chain(unlogged or (), *(shape.tools or () for shape in shapes)))


def _family_rules(replay: StoredReplay) -> _FamilyRules:
    invocations: list[dict[str, Any]] = replay.config.get("invocations") or [{}]
    options: dict[str, Any] = invocations[-1].get("options") or {}
    return _FamilyRules(bool(options.get("allow_same_family")), bool(options.get("allow_unknown_family")))


def _has_unknown_pseudonym(state: TraceState, proposal: Proposal) -> bool:
    """Return whether a proposal contains a pseudonym that does not occur in the conversation."""
    names = {match[0] for match in PSEUDONYM.finditer(_text(proposal.action))}
    if not names:
        return False
    state_text = repr((state.messages, state.tools)) + _text(state.student_action)
    return any(name not in state_text for name in names)


def _pair(
    state: TraceState, source: str, candidates: Sequence[Proposal], minimum: int, judge: Judge, checked: Checks
) -> Pair | str:
    """Return the pair of a state, or the reason why there is none."""
    location = WorkingDirectory(state.project)
    if not (state.student_action.tool_calls or (state.student_action.content or "").strip()):
        return checks.EMPTY
    if has_unreadable_call(state.student_action):
        return checks.UNREADABLE
    agreed = consensus(candidates, minimum=minimum, judge=judge, location=location)
    if agreed is None:
        return checks.NO_CONSENSUS
    difference = difference_between(effect_of(agreed.action, location), effect_of(state.student_action, location))
    if difference is None:
        return checks.SAME
    if not _tools_are_offered(state, agreed.action):
        return checks.UNKNOWN_TOOL
    # A teacher may have been told tools that are not in the log, which were inferred from turns that are not
    # chosen here.
    offered = completed(ToolList.of(state), [{"tool_calls": agreed.action.tool_calls}])
    pair = Pair(
        pair_id=digest(["replay", state.state_id, _text(agreed.action), _text(state.student_action)]).hex(),
        origin="replay",
        group=_group(state),
        messages=state.messages,
        tools=offered.tools,
        tools_source=offered.source,
        chosen=agreed.action,
        rejected=state.student_action,
        state_id=state.state_id,
        model=state.source_model,
        family=state.source_family,
        evidence=_evidence(state, source, candidates, agreed, difference, minimum, location),
    )
    return checked.passed(pair, location)


def _evidence(
    state: TraceState,
    source: str,
    candidates: Sequence[Proposal],
    agreed: Consensus,
    difference: Difference,
    minimum: int,
    location: WorkingDirectory,
) -> dict[str, Any]:
    student, chosen = effect_of(state.student_action, location), effect_of(agreed.action, location)
    costs = [candidate.cost_usd for candidate in candidates]
    return {
        "by": agreed.by,
        "agreement": agreed.agreement,
        "minimum": minimum,
        "asked": list(agreed.asked),
        "supporters": list(agreed.supporters),
        "chosen_from": agreed.teacher,
        "answers": [
            {
                "ask_id": candidate.ask_id,
                "teacher": candidate.teacher,
                "model": candidate.model,
                "family": candidate.family,
                "cost_usd": candidate.cost_usd,
                "as_chosen": same_effect(effect, chosen),
                "as_rejected": same_effect(effect, student),
            }
            for candidate in candidates
            for effect in (effect_of(candidate.action, location),)
        ],
        "cost_usd": None if any(cost is None for cost in costs) else sum(cost or 0.0 for cost in costs),
        "differs": difference_json(difference),
        "thinking_hidden": state.student_action.thinking_hidden,
        "signals": msgspec.to_builtins(state.signals),
        "outcome": msgspec.to_builtins(state.outcome),
        "fidelity": state.fidelity,
        "notes": list(state.notes),
        "source": source,
        "session_id": state.session_id,
        "message_id": state.message_id,
    }


def _state_condition(state_ids: Sequence[str], where: str | None) -> str:
    quoted = ", ".join("'" + state_id.replace("'", "''") + "'" for state_id in state_ids)
    in_states = f"state_id IN ({quoted})"
    return in_states if where is None else f"(\n{where}\n) AND {in_states}"


def _tools_are_offered(state: TraceState, action: TurnAction) -> bool:
    """Return whether the state offers the tools that an action calls, as far as its log tells."""
    return state.tools_source != "logged" or names_of(action.tool_calls) <= names_of(state.tools or ())


def _group(state: TraceState) -> str:
    """Return the project, or the task; otherwise the session, with its subagents."""
    task = state.outcome.task if state.outcome else None
    return state.project or task or (state.parent.session_id if state.parent else state.session_id)


def _redacted(
    trace: Trace, proposals_by_state: dict[str, list[Proposal]], redactor: Redactor
) -> dict[str, list[Proposal]]:
    """Return the proposals, redacted by the secrets in them and in their trace, which the teacher may have been
    shown.
    """
    actions = {
        proposal.ask_id: msgspec.to_builtins(proposal.action)
        for proposals in proposals_by_state.values()
        for proposal in proposals
    }
    histories = (trace.renderer.history(node.body) for node in trace.nodes)
    scoped_redactor = redactor.scoped_to(chain(histories, actions.values()))
    redacted_actions = {
        ask: msgspec.convert(scoped_redactor.value(action, f"answer {ask}"), TurnAction)
        for ask, action in actions.items()
    }
    return {
        stored_id: [
            msgspec.structs.replace(proposal, action=redacted_actions[proposal.ask_id]) for proposal in proposals
        ]
        for stored_id, proposals in proposals_by_state.items()
    }


def _text(action: TurnAction) -> str:
    return repr(msgspec.to_builtins(action))
