"""How many of the sampled tokens of each agent's sessions are trained on, and in how many sequences.

    python bench/agent_tokens.py [--agent NAME]… [--sessions N] [--seed N] [--json FILE] [--keep DIRECTORY]

`understudy run` gives each agent its tasks in local sandboxes, with `tokens = "exact"`. The model answers from the
random scripts of `agent_logs.py`: edits, new files, parallel tools, failing commands, long outputs, Unicode,
reasoning, unknown tools, wrong arguments, errors of the server in between. The run is exported as `trl-tokens`. A
token that was sampled is trained on if the mask of an exported row is 1 there; for all others there is a reason.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import re
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import uvicorn
from agent_logs import Script

from understudy.agents.packages import AGENT_PACKAGES
from understudy.errors import BackendError
from understudy.model.scripted.model import ScriptedModel
from understudy.model.scripted.oracle import Action, ChatTurn
from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.model.server import ModelServer
from understudy.run.behaviours import ScriptStep
from understudy.store import Store
from understudy.tasks.records import dump
from understudy.trajectory.samples import merge
from understudy.trajectory.tree import Node, build
from understudy.types import WORK_ROLES, Files, PytestChecks, Task

UNDERSTUDY = Path(sys.executable).with_name("understudy")
TURNS, TARGET = 24, 95.0
CONFIG = '[models.high]\nbackend = "embedded"\nbase_url = "{url}"\ntokens = "exact"\ntool_format = "hermes"\n'
_SESSION = re.compile(r"Session (\S+ \d+) of calc\.py")
_TITLE = Action("A title")


class RandomPolicy:
    """Answers the requests of each session with its script, one step after the other."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._left: dict[str, list[ScriptStep]] = {}

    def act(self, request: ChatTurn) -> Action:
        """See Policy; but the next step is given to each request, as sampling would."""
        session = next((found[1] for each in request.messages if (found := _SESSION.search(each.text))), None)
        if session is None or not request.tools:
            return _TITLE
        if session not in self._left:
            self._left[session] = list(Script(f"{self._seed} {session}").steps(TURNS))
        steps = self._left[session]
        step = steps.pop(0) if steps else ScriptStep("Done.", lambda tools: tools.finish())
        if step.status:
            raise BackendError("simulated by the script", status=step.status, retry_after_s=0)
        return Action(step.text, step.calls(request.toolset), reasoning=step.reasoning or None)


@contextlib.asynccontextmanager
async def model_server(seed: int) -> AsyncGenerator[str]:
    """Serve the policy at a free port of this machine; its URL."""
    app = ModelServer(ScriptedModel(RandomPolicy(seed), scripted_tokenizer()))
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", ws="none", log_level="warning", access_log=False))  # type: ignore[arg-type]
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


def tasks(agent: str, sessions: int) -> list[Task]:
    """A task for each session. What the agent makes of it is not graded as solved."""
    return [
        Task(
            instance_id=f"{agent}-{number}",
            repo="example/calc",
            instruction=f"Session {agent} {number} of calc.py: change x to 2.",
            source=Files({"calc.py": "x = 1\n", "test_calc.py": "def test_same():\n    pass\n"}),
            checks=PytestChecks(
                files={"test_calc.py": "from calc import x\n\n\ndef test_x():\n    assert x == 2\n"},
                fail_to_pass=("test_calc.py::test_x",),
                pass_to_pass=(),
            ),
            gold_patch="--- a/calc.py\n+++ b/calc.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n",
        )
        for number in range(sessions)
    ]


async def command(*arguments: object) -> Any:
    """Run a command of Understudy; returns the object that it prints."""
    process = await asyncio.create_subprocess_exec(
        UNDERSTUDY, *map(str, arguments), "--json", stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    out, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"bench: {arguments[0]} ended with exit code {process.returncode}: {out.decode()}")
    return json.loads(out)


async def measure(agent: str, seed: int, sessions: int, root: Path) -> dict[str, Any]:
    """Run an agent through its sessions, export them, and count."""
    root.mkdir(parents=True)  # noqa: ASYNC240 - nothing else runs yet
    dump(tasks(agent, sessions), root / "tasks.jsonl")
    async with model_server(seed) as url:
        (root / "run.toml").write_text(CONFIG.format(url=url))
        summary = await command(
            *("run", "--config", root / "run.toml", "--tasks", root / "tasks.jsonl", "--agent", agent),
            *("--output-dir", root / "run", "--max-turns", 200, "--concurrency", 2),
        )
    await command("export", "trl-tokens", root / "run", "--output", root / "rows", "--test-share", 0)
    return count(agent, root) | {"failures": summary["infrastructure_failures"]}


def count(agent: str, root: Path) -> dict[str, Any]:
    """The tokens of a run and of its export, by what became of them."""
    import pyarrow.parquet as parquet

    files = sorted((root / "rows").rglob("*.parquet"))
    rows = [row for path in files for row in parquet.read_table(path).to_pylist()]
    turns, sampled, branches, begins, lost = 0, 0, 0, Counter[str](), Counter[str]()
    with Store.open(root / "run", create=False) as store:
        attempts = [each for rollout in store.runs.rollouts() for each in store.runs.attempts(rollout.id)]
        for attempt in attempts:
            trajectory = build(store.calls.of_attempt(attempt.id))
            nodes = [node for node in trajectory.nodes if node.call.completion_token_ids]
            if attempt.status != "succeeded":
                sampled += sum(map(_tokens, nodes))
                lost["attempt failed"] += sum(map(_tokens, nodes))
                continue
            turns += sum(node.role in WORK_ROLES for node in nodes)
            sampled += sum(_tokens(node) for node in nodes)
            for node in nodes:
                lost[_why_left_out(node)] += _tokens(node)
            branches += len({node.branch for node in nodes if node.role in WORK_ROLES})
            begins.update(segment.reason for segment in merge(trajectory, WORK_ROLES).segments)
    del lost[""]
    trained = sum(sum(row["assistant_masks"]) for row in rows)
    return {
        "agent": agent,
        "version": AGENT_PACKAGES[agent].version,
        "answers": turns,
        "branches": branches,
        "sequences": dict(begins),
        "rows": len(rows),
        "sampled": sampled,
        "trained": trained,
        "percent": round(100 * trained / max(1, sampled), 2),
        "left out": dict(lost),
        "unexplained": sampled - trained - sum(lost.values()),
    }


def _tokens(node: Node) -> int:
    return len(node.call.completion_token_ids or ())


def _why_left_out(node: Node) -> str:
    """Return why the tokens of a call are not trained on; "" if they are."""
    if node.role not in WORK_ROLES:
        return node.role
    if node.superseded:
        return "superseded call"
    return "malformed tool call" if any(block.is_malformed for block in node.answer or ()) else ""


async def measure_all(agents: list[str], seed: int, sessions: int, root: Path) -> list[dict[str, Any]]:
    """The figures of each agent, printed as they come."""
    rows: list[dict[str, Any]] = []
    print(f"{'agent':<16}{'answers':>9}{'branches':>9}{'sampled':>9}{'trained':>9}{'%':>9}  sequences; left out")
    for agent in agents:
        row = await measure(agent, seed, sessions, root / agent)
        rows.append(row)
        names = ("answers", "branches", "sampled", "trained", "percent")
        figures = "".join(f"{row[name]:>9}" for name in names)
        print(f"{agent:<16}{figures}  {row['sequences']}; {row['left out']}", flush=True)
    return rows


def main() -> int:
    """Returns the exit code: 1 if an agent's share is below the target, or a token is lost without a reason."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--agent", action="append", choices=list(AGENT_PACKAGES), help="repeatable; default: all")
    parser.add_argument("--sessions", type=int, default=2, help=f"sessions of {TURNS} turns (default: 2)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument("--keep", type=Path, help="keep runs and exports in this directory, which must be empty")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = options.keep or Path(temporary)
        agents = options.agent or list(AGENT_PACKAGES)
        rows = asyncio.run(measure_all(agents, options.seed, options.sessions, root))
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return int(any(row["percent"] < TARGET or row["unexplained"] or row["failures"] for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
