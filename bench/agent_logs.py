"""How exactly each agent's own log has the answers that it got: at least 200 turns an agent, misses by class.

    python bench/agent_logs.py [--agent NAME]… [--sessions N] [--seed N] [--json FILE]

The real agents work in local sandboxes, with a model that answers from random scripts: edits, new files, parallel
tools, failing commands, long outputs, Unicode, texts of many lines, reasoning, unknown tools, wrong arguments,
errors of the server in between. The last session of each agent reaches its turn limit. Each answer that the agent
got is a turn. It is exact if the log has it in its place, with the same text, tools and values of their arguments;
reasoning is not compared.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from understudy.agents.install import agent_package
from understudy.agents.packaged import PackagedAgent
from understudy.agents.packages import AGENT_PACKAGES
from understudy.agents.registry import make_agent
from understudy.agents.turn_log import answered_turn
from understudy.model.scripted.changes import Edit
from understudy.model.scripted.toolsets import ActionCall, Toolset, action_call
from understudy.run.behaviours import Behaviour, Calls, ScriptStep
from understudy.run.trial import ScriptedRun, scripted_runs
from understudy.trajectory.tree import Node, build
from understudy.types import WORK_ROLES

TARGET, TURNS = 97.0, 30
_WORDS = (
    "parser", "größer", "naïve", "値", "🙂", "данные", "return", "x = {1: 'a'}", "<tag>", "&amp;", "C:\\path",
    "\\n", "\t", "“quoted”", "it's", '"double"', "$HOME", "`code`", "# title", "- item", "100 %", "a\u0301", "…",
)  # fmt: skip
_CLASSES = {
    " is not in the log": "not in the log",
    "the log has the answer": "in the log otherwise",
    "the log has other": "in the log otherwise",
    "the log has a response": "in the log alone",
}
"""Classes of findings by their words."""


class Script:
    """A random session of the model."""

    def __init__(self, seed: str) -> None:
        self._dice = random.Random(seed)
        self._files: dict[str, list[str]] = {}

    def steps(self, turns: int) -> Iterator[ScriptStep]:
        """The answers, with errors in between that the agent outlasts."""
        for _ in range(turns):
            while self._dice.random() < 0.08:
                yield ScriptStep(status=self._dice.choice((429, 500, 529)))
            reasoning = self._text() if self._dice.random() < 0.3 else ""
            yield ScriptStep(self._text(), self._action(), reasoning=reasoning)

    def _text(self) -> str:
        dice = self._dice
        match dice.choice(("none", "line", "line", "lines", "long", "space")):
            case "none":
                return ""
            case "line":
                return self._line()
            case "lines":
                return "\n".join(self._line() for _ in range(dice.randrange(2, 9)))
            case "long":
                return "\n\n".join(self._line(60) for _ in range(dice.randrange(5, 20)))
            case _:
                return f"  {self._line()}\n\n```py\n{self._line()}  \n```\n"

    def _line(self, limit: int = 12) -> str:
        return " ".join(self._dice.choice(_WORDS) for _ in range(self._dice.randrange(1, limit)))

    def _action(self) -> Calls:
        kind = self._dice.choices(
            ("shell", "parallel", "write", "read", "edit", "unknown", "missing", "wrong type"),
            (42, 15, 15, 10, 16, 0.7, 0.7, 0.6),
        )[0]
        match kind:
            case "parallel":
                several = [self._shell() for _ in range(self._dice.randrange(2, 5))]
                return lambda tools: tuple(call for calls in several for call in calls(tools))
            case "write":
                return self._write()
            case "read" if self._files:
                path = self._dice.choice(list(self._files))
                return lambda tools: (tools.read(f"/workspace/{path}"),)
            case "edit" if self._files:
                return self._edit()
            case "unknown":
                return lambda tools: (action_call("no_such_tool", text="ü", number=1.5, flag=True, nothing=None),)
            case "missing":
                return lambda tools: (action_call(tools.shell),)
            case "wrong type":
                return lambda tools: (action_call(tools.shell, command=["ls"], cmd=7),)
            case _:
                return self._shell()

    def _shell(self) -> Calls:
        dice = self._dice
        number = dice.randrange(10**6)
        quoted = "'" + self._line().replace("'", "'\\''") + "'"
        command = dice.choice((
            f"echo {number}",
            f"printf '%s\\n' {quoted}",
            f"seq {number % 20000}",
            f"sh -c 'echo {number} >&2; exit {1 + number % 9}'",
            f"cat no-such-file-{number}",
            f"cat <<'END'\n{self._line()}\n{number}\nEND",
            f"for i in 1 2 3; do\n  echo \"$i-{number}\"\ndone",
            f"ls -la; echo {number}; true",
            f"printf 'a\\tb\\033[31mred\\033[0m {number}'",
        ))  # fmt: skip
        about = self._line(4)
        spaced = dice.random() < 0.3

        def calls(tools: Toolset) -> tuple[ActionCall, ...]:
            call = tools.run(command, about)
            return (ActionCall(call.name, json.dumps(json.loads(call.arguments), indent=1)) if spaced else call,)

        return calls

    def _write(self) -> Calls:
        path = f"file_{len(self._files)}.txt"
        lines = [f"{number} {self._line()}".rstrip() for number in range(self._dice.randrange(1, 30))]
        self._files[path] = lines
        content = "\n".join(lines) + "\n"

        def calls(tools: Toolset) -> tuple[ActionCall, ...]:
            if tools.can_write():
                return (tools.write(f"/workspace/{path}", content),)
            return (tools.run(f"cat > /workspace/{path} <<'END'\n{content}END", "Write it"),)

        return calls

    def _edit(self) -> Calls:
        path = self._dice.choice(list(self._files))
        lines = self._files[path]
        at = self._dice.randrange(len(lines))
        old, new = lines[at], f"{at} {self._line()}".rstrip()
        lines[at] = new
        edit = Edit(path, at + 1, (("-", f"{old}\n"), ("+", f"{new}\n")))
        return lambda tools: (tools.edit(f"/workspace/{path}", edit, old, new),)


def behaviours(agent: str, seed: int, sessions: int) -> list[Behaviour]:
    """The random sessions of an agent; the last one has more steps than turns."""
    made = [
        Behaviour(
            name=f"session {number}",
            steps=tuple(Script(f"{seed} {agent} {number}").steps(TURNS)),
            accepted_outcomes=("completed",),
            max_turns=200,
            timeout_s=900.0,
        )
        for number in range(sessions)
    ]
    steps = tuple(Script(f"{seed} {agent} limit").steps(20))
    return [*made, Behaviour(name="turn limit", steps=steps, max_turns=12, timeout_s=900.0)]


def misses(run: ScriptedRun, agent: Any) -> tuple[int, list[dict[str, str]]]:
    """How many turns a run has, and those that are not exact, each with its class."""
    findings = {finding.call_id: finding.message for finding in run.findings if finding.call_id}
    problems = [
        {"class": _class_of(finding.message), "what": finding.message}
        for finding in run.findings
        if not finding.call_id
    ]
    nodes = [node for node in build(run.calls).nodes if node.role in WORK_ROLES and node.call.status == "ok"]
    for node in nodes:
        if message := findings.get(node.call.id):
            problems.append({"class": _class_of(message), "what": message})
        elif reason := _not_compared(node, agent):
            problems.append({"class": reason, "what": repr(answered_turn(node))[:300]})
    return len(nodes), problems


def _not_compared(node: Node, agent: Any) -> str:
    turn = answered_turn(node)
    if node.superseded or node.alternative:
        return "not compared: the agent asked again"
    if not (turn.text.strip() or turn.calls):
        return "not compared: an empty answer"
    if isinstance(agent, PackagedAgent) and not agent.must_log(turn):
        return "not compared: the agent does not log what it cannot run"
    return ""


def _class_of(message: str) -> str:
    return next((name for part, name in _CLASSES.items() if part in message), "other")


async def measure(name: str, seed: int, sessions: int) -> dict[str, Any]:
    """Run an agent through its sessions."""
    package, agent = agent_package(name), make_agent(name, {})
    turns, ends, problems, start = 0, Counter[str](), list[dict[str, str]](), time.monotonic()
    async for run in scripted_runs(package, behaviours(name, seed, sessions)):
        more, wrong = misses(run, agent)
        turns += more
        ends[run.result.outcome] += 1
        problems += [{"session": run.behaviour.name, **each} for each in wrong]
        print(
            f"{name}: {run.behaviour.name}: {run.result.outcome}, {more} turns, {len(wrong)} not exact", flush=True
        )
    return {
        "agent": name,
        "version": package.version,
        "seed": seed,
        "sessions": dict(ends),
        "turns": turns,
        "exact": turns - len(problems),
        "percent": round(100 * (turns - len(problems)) / max(1, turns), 2),
        "classes": dict(Counter(each["class"] for each in problems)),
        "misses": problems,
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    """Returns the exit code: 1 if an agent's log is less exact than the target."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agent", action="append", choices=list(AGENT_PACKAGES), help="repeatable; default: all")
    parser.add_argument("--sessions", type=int, default=7, help=f"sessions of {TURNS} turns (default: 7)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    options = parser.parse_args()
    rows = [asyncio.run(measure(name, options.seed, options.sessions)) for name in options.agent or AGENT_PACKAGES]
    print(f"\n{'agent':<16}{'version':<12}{'turns':>6}{'exact':>7}{'%':>8}  misses by class")
    for row in rows:
        classes = "; ".join(f"{count} {name}" for name, count in row["classes"].items())
        figures = f"{row['turns']:>6}{row['exact']:>7}{row['percent']:>8}"
        print(f"{row['agent']:<16}{row['version']:<12}{figures}  {classes}")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return int(any(row["percent"] < TARGET for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
