"""From nothing to a dataset with scripted models, in the commands that a person would type: nothing is trained.

Makes programming tasks out of two real packages, lets the real Claude Code CLI work on them with three scripted
models behind the gateway, grades every patch, exports a dataset and reads it back.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

UNDERSTUDY = Path(sys.executable).with_name("understudy")
RUNS = Path("runs/demo-quick")
TASKS = Path("tasks/demo-quick")
PACKAGES = {"boltons": 10, "toolz": 10}


def understudy(*arguments: str) -> dict[str, Any]:
    """Run a command with `--json`, its progress passed through, and return what it printed."""
    print(f"\n$ understudy {shlex.join(arguments)}", flush=True)
    done = subprocess.run([UNDERSTUDY, *arguments, "--json"], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"demo: the command above ended with exit code {done.returncode}\n{done.stdout}")
    return json.loads(done.stdout)


def check_dataset(directory: Path) -> tuple[int, int]:
    """Load every dataset and look for the text of each row's call in what its token ids decode to.

    Returns how many datasets and rows there are; ends the demo when a text is missing.
    """
    from datasets import load_from_disk

    from understudy.model.scripted.tokenizer import scripted_tokenizer

    tokenizer = scripted_tokenizer()
    rows = 0
    paths = sorted(directory.glob("dataset-*"))
    for path in paths:
        for row in load_from_disk(str(path)):
            *history, answer = row["messages"]
            sides = ((history, row["prompt_ids"]), ([answer], row["gold_completion_ids"]))
            for messages, ids in sides:
                decoded = tokenizer.decode(ids)
                if missing := [text for text in texts(messages) if text not in decoded]:
                    sys.exit(f"demo: {path}: turn {row['turn']}: the token ids do not say {missing[0]!r}")
            rows += 1
    return len(paths), rows


def texts(messages: list[dict[str, Any]]) -> list[str]:
    """Everything said in the messages: their text, and the strings in the arguments of their tool calls."""
    said = [message["content"].strip() for message in messages]
    for message in messages:
        for call in message["tool_calls"] or ():
            arguments = json.loads(call["function"]["arguments"]).values()
            said += [json.dumps(value, ensure_ascii=False)[1:-1] for value in arguments if isinstance(value, str)]
    return [text for text in said if text]


def main() -> None:
    """Run the demo; exits with 1 when a figure is not what it must be."""
    started = time.monotonic()
    specs: list[str] = []
    for package, count in PACKAGES.items():
        path = TASKS / f"{package}.jsonl"
        if not path.exists():
            understudy("tasks", "make", package, "--count", str(count), "--seed", "1", "--output", str(path))
        specs += ["--tasks", str(path)]
    total = sum(PACKAGES.values())
    solved: dict[str, int] = {}
    for policy in ("oracle", "wrong", "idle"):
        summary = understudy("run", "embedded", "--policy", policy, *specs, "--output-dir", str(RUNS / policy))
        solved[policy] = summary["solved"]
        print(
            f"{policy}: {summary['solved']} of {summary['rollouts']} solved, {summary['calls']} calls, "
            f"{summary['prompt_tokens']}+{summary['completion_tokens']} tokens, {summary['wall_s']:.1f} s"
        )
    understudy("export", "hf", str(RUNS / "oracle"))
    datasets, rows = check_dataset(RUNS / "oracle")
    print(f"{datasets} datasets with {rows} rows load; every row's token ids decode to the text of its call")
    print(f"\nDone in {time.monotonic() - started:.0f} s.")
    if solved != {"oracle": total, "wrong": 0, "idle": 0}:
        sys.exit(f"demo: expected oracle {total}, wrong 0, idle 0 solved; got {solved}")
    print(NEXT)


NEXT = f"""
What to try next (source .venv/bin/activate first):
  understudy show --dir {RUNS / "oracle"}          # the rollouts; add an id to read one
  understudy run --policy flaky --policy-arg p=0.5 --samples 4 --tasks {TASKS / "toolz.jsonl"}
  understudy run vllm --base-url http://localhost:8000/v1 --backend-model-high YOUR-MODEL \\
      --tasks {TASKS / "toolz.jsonl"}
  understudy tasks make sqlparse --count 5           # other packages, other bugs
  make demo                                          # a small model learns, and is seen to be better
"""

if __name__ == "__main__":
    main()
