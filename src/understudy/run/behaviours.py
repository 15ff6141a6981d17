"""The scripts for testing a version of an agent with a scripted model, and the results that they must give."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from msgspec import Struct, structs

from understudy.agents.base import AgentOutcome
from understudy.errors import ConfigError
from understudy.model.scripted.changes import Edit
from understudy.model.scripted.toolsets import ActionCall, Toolset, action_call
from understudy.trajectory.roles import Role

EDITED_FILE = "calc.py"
ORIGINAL_CONTENT, EDITED_CONTENT = "x = 1\n", "x = 2\n"
NEW_FILE = "new.py"
_PATH, _NEW_PATH = f"/workspace/{EDITED_FILE}", f"/workspace/{NEW_FILE}"
_EDIT = Edit(EDITED_FILE, 1, (("-", ORIGINAL_CONTENT), ("+", EDITED_CONTENT)))
_MANY_TURNS = 25
_FULL_CONTEXT_TOKENS = 990_000
"""A reported length of a prompt, in tokens, after which agents compact by themselves."""

Calls = Callable[[Toolset], tuple[ActionCall, ...]]


class ScriptStep(Struct, frozen=True):
    """One answer of the model: a text and tool calls after some reasoning.

    With a `status` it is an error, with `overflow` the error of a prompt that is too long. With `hangs` there is
    no answer: the agent is interrupted, as by Ctrl-C. With `breaks_after` the answer is streamed, and lost after
    so many of its pieces. `finish_reason` "" means the usual one. `prompt_tokens` is the reported length of the
    prompt; 0 stands for a short one.
    """

    text: str = ""
    calls: Calls = lambda tools: ()
    status: int = 0
    reasoning: str = ""
    retry_after_s: float | None = 0.0
    overflow: bool = False
    hangs: bool = False
    breaks_after: int | None = None
    finish_reason: str = ""
    prompt_tokens: int = 0


class Behaviour(Struct, frozen=True, kw_only=True):
    """A script, after which the model ends its work, and the required results.

    `resumed` is the script of a second run in the same sandbox, which continues the session of the first.
    `accepted_outcomes` are those of the last run. `expected_results` are texts that the results of its tool calls
    must contain, in order. `roles` are those that its calls must have. With `logs_differ` the agent's own log may
    differ from the calls, with `may_rewrite_history` a request may have another history than those before it.
    `file` is the required content of `EDITED_FILE` at the end. `timeout_s` is the limit of a run.
    """

    name: str
    steps: tuple[ScriptStep, ...]
    resumed: tuple[ScriptStep, ...] = ()
    accepted_outcomes: tuple[AgentOutcome, ...] = ("completed",)
    expected_results: tuple[str, ...] = ()
    roles: tuple[Role, ...] = ("main",)
    logs_differ: bool = False
    may_rewrite_history: bool = False
    file: str = ORIGINAL_CONTENT
    max_turns: int = 60
    timeout_s: float = 180.0


def _shell(*commands: str) -> Calls:
    return lambda tools: tuple(tools.run(command, "try it") for command in commands)


_long_output = _shell(*("seq -f 'line %g of a long output' 1 1500",) * 4)


def _read(tools: Toolset) -> tuple[ActionCall, ...]:
    return (tools.read(_PATH),)


def _edit(tools: Toolset) -> tuple[ActionCall, ...]:
    return (tools.edit(_PATH, _EDIT, ORIGINAL_CONTENT.strip(), EDITED_CONTENT.strip()),)


def _write(tools: Toolset) -> tuple[ActionCall, ...]:
    if tools.can_write():
        return (tools.write(_NEW_PATH, "y = 'ü'\n"),)
    return (tools.run(f"""echo "y = 'ü'" > {_NEW_PATH}""", "Write the file"),)


_SUBAGENT_TOOLS: dict[str, dict[str, Any]] = {
    # Newer versions start it in the background unless they are told otherwise.
    "Agent": {
        "description": "Look",
        "prompt": "Print it.",
        "subagent_type": "general-purpose",
        "run_in_background": False,
    },
    "task": {"description": "Look", "prompt": "Print it.", "subagent_type": "general"},
    "agent": {
        "description": "Look",
        "prompt": "Print it.",
        "subagent_type": "general-purpose",
        "run_in_background": False,
    },
    "invoke_agent": {"agent_name": "generalist", "prompt": "Print it."},
    "spawn_agent": {"message": "Print it.", "task_name": "look"},
}
"""How agents are told to start a subagent, by the name of the tool."""


def _delegate(tools: Toolset) -> tuple[ActionCall, ...]:
    name = next(iter(_SUBAGENT_TOOLS.keys() & tools.names), "")
    return (action_call(name, **_SUBAGENT_TOOLS[name]),) if name else ()


def _two_edits(tools: Toolset) -> tuple[ActionCall, ...]:
    second = Edit(EDITED_FILE, 1, (("-", EDITED_CONTENT), ("+", ORIGINAL_CONTENT)))
    return *_edit(tools), tools.edit(_PATH, second, EDITED_CONTENT.strip(), ORIGINAL_CONTENT.strip())


def _malformed(tools: Toolset) -> tuple[ActionCall, ...]:
    return (ActionCall(tools.shell, '{"command": "echo lost'),)


_BREAK_PLACES = ("before its first event", "in its reasoning", "in its text", "in a tool call", "before its end")
"""Where a stream breaks off, by the number of pieces before that."""
_BROKEN_STEP = ScriptStep("I look.", _shell("echo lost"), reasoning="Let me see.")
_INTERRUPTED_STEPS = (ScriptStep("I mend.", _read), ScriptStep("", _edit), ScriptStep(hangs=True))

BEHAVIOURS = (
    Behaviour(
        name="edit",
        steps=(ScriptStep("I look.", _read), ScriptStep("I mend.", _edit)),
        expected_results=(ORIGINAL_CONTENT.strip(), ""),
        file=EDITED_CONTENT,
    ),
    Behaviour(
        name="new file",
        steps=(ScriptStep("I write.", _write), ScriptStep("", _shell(f"cat {_NEW_PATH}"))),
        expected_results=("", "y = 'ü'"),
    ),
    Behaviour(
        name="parallel tools",
        steps=(ScriptStep("Three at once.", _shell("echo one-1", "echo two-2", "echo three-3")),),
        expected_results=("one-1", "two-2", "three-3"),
    ),
    Behaviour(
        name="failing command",
        steps=(ScriptStep("", _shell("sh -c 'echo broken >&2; exit 3'")),),
        expected_results=("broken",),
    ),
    Behaviour(name="long output", steps=(ScriptStep("Much.", _shell("seq 1 50000")),), expected_results=("1",)),
    Behaviour(
        name="unknown tool",
        steps=(ScriptStep("", lambda tools: (action_call("no_such_tool", path="x"),)),),
    ),
    Behaviour(
        name="missing arguments",
        steps=(ScriptStep("", lambda tools: (action_call(tools.shell),)), ScriptStep("So.", _shell("echo so"))),
    ),
    Behaviour(
        name="special characters",
        steps=(ScriptStep("„ü“ 🙂 <b>\\n</b>\t{x}", _shell("printf '%s' 'ä \"q\" \\\\ $HOME 🙂'")),),
        expected_results=("$HOME",),
    ),
    Behaviour(
        name="passing faults",
        steps=(
            ScriptStep(status=429),
            ScriptStep(status=500),
            ScriptStep(status=529),
            ScriptStep("", _shell("echo on")),
        ),
        expected_results=("on",),
    ),
    Behaviour(name="refusal", steps=(ScriptStep(status=400),) * 12, accepted_outcomes=("crashed",)),
    Behaviour(
        name="turn limit",
        steps=tuple(ScriptStep("On.", _shell(f"echo turn-{number}")) for number in range(9)),
        accepted_outcomes=("completed", "max_turns"),
        max_turns=3,
    ),
    Behaviour(
        name="many turns",
        steps=tuple(ScriptStep(f"Turn {number}.", _shell(f"echo turn-{number}")) for number in range(_MANY_TURNS)),
        expected_results=tuple(f"turn-{number}" for number in range(_MANY_TURNS)),
    ),
    Behaviour(
        name="malformed arguments", steps=(ScriptStep("", _malformed), ScriptStep("So.", _shell("echo so")))
    ),
    Behaviour(
        name="two edits at once",
        steps=(ScriptStep("", _read), ScriptStep("There and back.", _two_edits)),
        expected_results=(ORIGINAL_CONTENT.strip(), "", ""),
    ),
    Behaviour(
        name="undecodable output",
        steps=(ScriptStep("", _shell("printf 'a\\377\\376\\000b\\033[31mred'")),),
        expected_results=("red",),
    ),
    Behaviour(name="empty answer", steps=(ScriptStep(""),)),
    Behaviour(name="only reasoning", steps=(ScriptStep(reasoning="Hm."),)),
    Behaviour(
        name="answer cut at the token limit",
        steps=(ScriptStep("I was about to", finish_reason="length"), ScriptStep("", _shell("echo on"))),
    ),
    Behaviour(name="wait asked for", steps=(ScriptStep(status=429, retry_after_s=2.0),)),
    *(
        Behaviour(
            name=f"stream broken {where}",
            steps=(
                structs.replace(_BROKEN_STEP, breaks_after=pieces),
                ScriptStep("Again.", _shell("echo on")),
            ),
            expected_results=("on",),
        )
        for pieces, where in enumerate(_BREAK_PLACES)
    ),
    Behaviour(
        name="context overflow",
        steps=(
            ScriptStep("I look.", _read),
            ScriptStep("I list.", _long_output),
            ScriptStep(overflow=True),
            ScriptStep("", _shell("echo on")),
        ),
        roles=("main", "compaction"),
    ),
    Behaviour(
        name="compaction",
        steps=(
            ScriptStep("I look.", _read),
            ScriptStep("", _edit),
            ScriptStep("I list.", _long_output, prompt_tokens=_FULL_CONTEXT_TOKENS),
            ScriptStep("", _shell("echo on")),
        ),
        expected_results=("on",),
        roles=("main", "compaction"),
        file=EDITED_CONTENT,
    ),
    Behaviour(
        name="compaction before a prompt",
        steps=(
            ScriptStep("I look.", _read),
            ScriptStep("", _edit),
            ScriptStep("I list.", _long_output),
            ScriptStep("It is mended.", prompt_tokens=_FULL_CONTEXT_TOKENS),
        ),
        resumed=(ScriptStep("", _shell("echo on")),),
        expected_results=("on",),
        roles=("main", "compaction"),
        file=EDITED_CONTENT,
    ),
    Behaviour(
        name="subagent",
        steps=(
            ScriptStep("Someone else does it.", _delegate),
            ScriptStep("", _shell("echo from-a-subagent")),
            ScriptStep("It is printed."),
        ),
        expected_results=("It is printed.",),
        roles=("main", "subagent"),
    ),
    Behaviour(
        name="interruption",
        steps=_INTERRUPTED_STEPS,
        accepted_outcomes=("crashed",),
        expected_results=(ORIGINAL_CONTENT.strip(), ""),
        file=EDITED_CONTENT,
    ),
    Behaviour(
        name="resume after an interruption",
        steps=_INTERRUPTED_STEPS,
        resumed=(ScriptStep("I go on.", _shell("echo resumed")),),
        expected_results=(ORIGINAL_CONTENT.strip(), "", "resumed"),
        file=EDITED_CONTENT,
    ),
)
"""What agents must do, but for `DIFFERENCES`."""


class AgentDifference(Struct, frozen=True, kw_only=True):
    """How an agent differs from a behaviour; None means that it does not. `missing` is why it cannot have it."""

    missing: str = ""
    steps: tuple[ScriptStep, ...] | None = None
    resumed: tuple[ScriptStep, ...] | None = None
    accepted_outcomes: tuple[AgentOutcome, ...] | None = None
    expected_results: tuple[str, ...] | None = None
    roles: tuple[Role, ...] | None = None
    logs_differ: bool | None = None
    may_rewrite_history: bool | None = None


_STREAMS_NOT_RETRIED = {
    f"stream broken {where}": AgentDifference(accepted_outcomes=("crashed",), expected_results=())
    for where in _BREAK_PLACES[1:]
}
"""Of agents that do not request a broken stream again. One that breaks before its first event is an error
response, which they retry.
"""

_WITHOUT_STREAMS_OR_SESSIONS = {
    **{f"stream broken {where}": AgentDifference(missing="it does not stream") for where in _BREAK_PLACES},
    "resume after an interruption": AgentDifference(missing="it is started anew for each run"),
    "compaction before a prompt": AgentDifference(missing="it is started anew for each run"),
    "subagent": AgentDifference(missing="it has none"),
}

DIFFERENCES: Mapping[str, Mapping[str, AgentDifference]] = {
    "claude-code": {
        name: AgentDifference(missing="without a terminal it compacts when the context overflows only")
        for name in ("compaction", "compaction before a prompt")
    },
    "codex": {
        "answer cut at the token limit": AgentDifference(accepted_outcomes=("crashed",)),
        # It compacts by the sizes that it counts, before a request, and takes the server's refusal as final.
        "context overflow": AgentDifference(accepted_outcomes=("crashed",), roles=("main",)),
        "subagent": AgentDifference(
            missing="it offers them by its tool_search only, which the gateway leaves out"
        ),
    },
    "gemini": {
        "undecodable output": AgentDifference(expected_results=("(empty)",)),
        # It compacts by the sizes that it counts, before a request, and takes the server's refusal as final.
        "context overflow": AgentDifference(accepted_outcomes=("crashed",), roles=("main",)),
        # It replaces whole prompts only, with all that followed them.
        "compaction": AgentDifference(
            steps=(ScriptStep("I look.", _read), ScriptStep("", _edit), ScriptStep("It is mended.")),
            resumed=(
                ScriptStep("I list.", _long_output, prompt_tokens=_FULL_CONTEXT_TOKENS),
                ScriptStep("", _shell("echo on")),
            ),
        ),
        "compaction before a prompt": AgentDifference(missing="it estimates a resumed session by its characters"),
        # It sends each result of the earlier run twice.
        "resume after an interruption": AgentDifference(
            expected_results=(ORIGINAL_CONTENT.strip(), ORIGINAL_CONTENT.strip(), "", "", "resumed")
        ),
        # Its subagents end by a tool of theirs, `complete_task`; their log is read before the session's.
        "subagent": AgentDifference(expected_results=("did not call 'complete_task'",), logs_differ=True),
    },
    "mini-swe-agent": {
        **_WITHOUT_STREAMS_OR_SESSIONS,
        "compaction": AgentDifference(missing="it has none"),
        # Its results are JSON, with escapes.
        "new file": AgentDifference(expected_results=("", "\\u00fc")),
        "context overflow": AgentDifference(accepted_outcomes=("crashed",), roles=("main",)),
    },
    "opencode": {
        # It logs calls that it cannot run as calls of its tool `invalid`.
        "unknown tool": AgentDifference(logs_differ=True),
        "malformed arguments": AgentDifference(logs_differ=True),
        # It asks again without the tool call that broke off, and puts it into the history, as aborted, afterwards.
        # Its log has both answers as one.
        **{
            f"stream broken {where}": AgentDifference(
                expected_results=("abort", "on"), logs_differ=True, may_rewrite_history=True
            )
            for where in _BREAK_PLACES[3:]
        },
        # Its log is what it prints, which is neither what subagents are answered nor what the earlier run was.
        "subagent": AgentDifference(logs_differ=True),
        "resume after an interruption": AgentDifference(logs_differ=True),
        "compaction before a prompt": AgentDifference(logs_differ=True),
    },
    "openhands": {
        **_WITHOUT_STREAMS_OR_SESSIONS,
        "compaction": AgentDifference(missing="it compacts by the number of its events"),
    },
    "pi": {**_STREAMS_NOT_RETRIED, "subagent": AgentDifference(missing="it has none")},
    "qwen-code": {
        **_STREAMS_NOT_RETRIED,
        # It puts its notes on skills and the date into the first message again, or leaves them out.
        "context overflow": AgentDifference(may_rewrite_history=True),
        "resume after an interruption": AgentDifference(may_rewrite_history=True),
        "compaction": AgentDifference(may_rewrite_history=True),
        "compaction before a prompt": AgentDifference(may_rewrite_history=True),
        # A subagent has a log of its own, which is read after the session's.
        "subagent": AgentDifference(logs_differ=True),
    },
}
"""By agent and behaviour, measured with the pinned versions."""


def behaviours_of(agent: str) -> list[Behaviour]:
    """Return the behaviours that an agent must show, with what differs for it."""
    missing, differences = missing_behaviours(agent), DIFFERENCES.get(agent, {})
    return [
        _applied(behaviour, differences.get(behaviour.name))
        for behaviour in BEHAVIOURS
        if behaviour.name not in missing
    ]


def chosen_behaviours(agent: str, names: Sequence[str]) -> list[Behaviour]:
    """Return an agent's behaviours of these names, all if there are none. Raises ConfigError for another name."""
    behaviours = behaviours_of(agent)
    names_of_agent = [behaviour.name for behaviour in behaviours]
    for name in names:
        if name not in names_of_agent:
            raise ConfigError(
                f"--behaviour: unknown behaviour {name!r} of {agent}; give one of: {', '.join(names_of_agent)}"
            )
    return [behaviour for behaviour in behaviours if not names or behaviour.name in names]


def missing_behaviours(agent: str) -> dict[str, str]:
    """Return why an agent cannot have some behaviours, by their names."""
    return {
        name: difference.missing for name, difference in DIFFERENCES.get(agent, {}).items() if difference.missing
    }


def _applied(behaviour: Behaviour, difference: AgentDifference | None) -> Behaviour:
    if difference is None:
        return behaviour
    changed = {
        name: value
        for name in (
            "steps",
            "resumed",
            "accepted_outcomes",
            "expected_results",
            "roles",
            "logs_differ",
            "may_rewrite_history",
        )
        if (value := getattr(difference, name)) is not None
    }
    return structs.replace(behaviour, **changed)
