"""`understudy demo --quick`: makes a dataset with scripted models; nothing is trained.

Makes programming tasks from two real packages, lets a real agent work on them with three scripted models behind
the gateway, grades every patch, exports a dataset and reads it back.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

import typer

from understudy.cli.demo.steps import DemoSteps
from understudy.errors import StoreError
from understudy.model.directory import require_packages

_PACKAGES = ("boltons", "toolz")
_POLICIES = ("oracle", "wrong", "idle")


def run_quick(directory: Path, *, seed: int, tasks: int, agent: str = "claude-code") -> bool:
    """Run the demo with `tasks` tasks of each package and an agent. Returns whether the figures are as required.

    Raises ConfigError if a command fails, StoreError if the dataset does not match its calls.
    """
    require_packages("datasets", extra="hf")
    steps = DemoSteps(directory, agent)
    files = [directory / "tasks" / f"{package}.jsonl" for package in _PACKAGES]
    for package, path in zip(_PACKAGES, files, strict=True):
        if not path.exists():
            steps.command(
                *("tasks", "make", package, "--count", str(tasks), "--seed", str(seed), "--output", path)
            )
    task_files = [word for path in files for word in ("--tasks", path)]
    solved: dict[str, int] = {}
    for policy in _POLICIES:
        summary = steps.command(
            *("run", "embedded", "--policy", policy, "--agent", agent),
            *(*task_files, "--output-dir", directory / policy),
        )
        solved[policy] = summary["solved"]
        steps.say(
            f"{policy}: {summary['solved']} of {summary['rollouts']} solved, {summary['calls']} calls, "
            f"{summary['prompt_tokens']}+{summary['completion_tokens']} tokens, {summary['wall_s']:.1f} s"
        )
    steps.command("export", "hf", directory / "oracle")
    datasets, rows = check_dataset(directory / "oracle")
    steps.say(f"{datasets} datasets with {rows} rows load; every row's token ids decode to the text of its call")
    expected = {"oracle": len(_PACKAGES) * tasks, "wrong": 0, "idle": 0}
    if solved != expected:
        typer.echo(f"demo: expected {expected} solved; got {solved}", err=True)
        return False
    typer.echo(_NEXT.format(directory=directory))
    return True


def check_dataset(directory: Path) -> tuple[int, int]:
    """Load every dataset, and check that each row's token ids decode to the text of its call.

    Returns how many datasets and how many rows there are. Raises StoreError if a text is missing.
    """
    import datasets

    from understudy.model.scripted.tokenizer import scripted_tokenizer

    tokenizer = scripted_tokenizer()
    rows = 0
    paths = sorted(directory.glob("dataset-*"))
    for path in paths:
        dataset: Iterable[dict[str, Any]] = cast(Any, datasets).load_from_disk(str(path))
        for row in dataset:
            *history, answer = row["messages"]
            sides = ((history, row["prompt_ids"]), ([answer], row["gold_completion_ids"]))
            for messages, ids in sides:
                decoded = tokenizer.decode(ids)
                if missing := [text for text in _texts(messages) if text not in decoded]:
                    raise StoreError(
                        f"{path}: turn {row['turn']}: internal error: its token ids do not decode to "
                        f"{missing[0][:200]!r}, expected the text of its call; please report it"
                    )
            rows += 1
    return len(paths), rows


def _texts(messages: list[dict[str, Any]]) -> list[str]:
    """Yield the texts of messages, and the strings in the arguments of their tool calls."""
    texts = [message["content"].strip() for message in messages]
    for message in messages:
        for call in message["tool_calls"] or ():
            arguments = json.loads(call["function"]["arguments"]).values()
            texts += [json.dumps(value, ensure_ascii=False)[1:-1] for value in arguments if isinstance(value, str)]
    return [text for text in texts if text]


_NEXT = """
What to try next:
  understudy view {directory}          # in the browser
  understudy show --dir {directory}/oracle          # the rollouts; add an id to read one
  understudy run --policy flaky --policy-arg p=0.5 --samples 4 --tasks {directory}/tasks/toolz.jsonl
  understudy run vllm --base-url http://localhost:8000/v1 --backend-model-high YOUR-MODEL \\
      --tasks {directory}/tasks/toolz.jsonl
  understudy tasks make sqlparse --count 5          # other packages, other bugs
  understudy demo          # a small model learns, and is seen to be better
"""
