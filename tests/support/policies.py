"""Scripted policies at work on real directories: trees, their diffs, and cases of what can change."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec

from understudy.model.protocol import ModelMessage, ModelTool
from understudy.model.scripted.oracle import ChatTurn, Policy
from understudy.model.scripted.policies import ScriptedTask, TaskIndex, make_policy

from fakes.claude_tools import Body, Tools, converse, tool_definitions

Tree = dict[str, bytes]
ALL_TOOLS = ("Read", "Edit", "Write", "Bash")
INSTRUCTION = "Make the calculator add again."


def write(root: Path, tree: Mapping[str, bytes]) -> None:
    for name, data in tree.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def read(root: Path) -> Tree:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and ".git" not in path.relative_to(root).parts
    }


def diff(before: Tree, after: Tree, *options: str) -> str:
    """The unified diff between two trees, by git."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        git = ["git", "-C", directory, "-c", "core.autocrlf=false", "-c", "core.safecrlf=false"]
        subprocess.run([*git, "init", "-q"], check=True)
        write(root, before)
        subprocess.run([*git, "add", "-A"], check=True)
        tree = subprocess.run([*git, "write-tree"], check=True, capture_output=True, text=True).stdout.strip()
        for name in before:
            (root / name).unlink()
        write(root, after)
        subprocess.run([*git, "add", "-A"], check=True)
        return subprocess.run(
            [*git, "diff", "--cached", *options, tree], check=True, capture_output=True
        ).stdout.decode()


def work(
    policy: Policy, root: Path, *, tools: tuple[str, ...] = ALL_TOOLS, prompt: str = INSTRUCTION
) -> tuple[Tools, list[Body]]:
    """Let the policy work in `root`; every action is asked for twice and must be the same both times."""
    offered = msgspec.convert(tool_definitions(*tools), list[ModelTool])
    messages: list[Body] = [
        {
            "role": "system",
            "content": f"You are an agent.\n - Primary working directory: {root}\n - Platform: linux",
        },
        {"role": "user", "content": [{"type": "text", "text": "Some context"}, {"type": "text", "text": prompt}]},
    ]

    def ask(history: list[Body]) -> Body:
        turn = ChatTurn(msgspec.convert(history, list[ModelMessage]), offered)
        action = policy.act(turn)
        assert action == policy.act(turn)
        calls = [
            {"id": f"call-{len(history)}", "function": {"name": call.name, "arguments": call.arguments}}
            for call in action.tool_calls
        ]
        return {"content": action.content, "tool_calls": calls}

    return converse(root, ask, messages), messages


def oracle(patch: str, name: str = "oracle") -> Policy:
    return make_policy(name, TaskIndex([ScriptedTask("t", INSTRUCTION, patch, "/elsewhere")]), {})


LINES = "".join(f"line {number}\n" for number in range(1, 101))
SAME = "def f():\n    return 1\n\n\n" * 30
CASES: dict[str, tuple[Tree, Tree, list[str]]] = {
    "one hunk": (
        {"a.py": LINES.encode()},
        {"a.py": LINES.replace("line 50\n", "line fifty\n").encode()},
        ["Read", "Edit", "Bash"],
    ),
    "two hunks that shift, two files": (
        {"a.py": LINES.encode(), "pkg/b.py": LINES.encode()},
        {
            "a.py": LINES.replace("line 10\n", "x\ny\nz\n").replace("line 90\n", "").encode(),
            "pkg/b.py": LINES.replace("line 1\n", "top\nline 1\n").encode(),
        },
        ["Read", "Edit", "Read", "Edit", "Read", "Edit", "Bash"],
    ),
    "a block that occurs thirty times": (
        {"a.py": f"{SAME}# here\n{SAME}".encode()},
        {"a.py": f"{SAME}# here\n{SAME.replace('return 1', 'return 2', 1)}".encode()},
        ["Read", "Edit", "Bash"],
    ),
    "a block that occurs again far away": (
        {"a.py": f"{SAME}".encode()},
        {"a.py": f"{SAME[: len(SAME) // 2]}{SAME[len(SAME) // 2 :].replace('return 1', 'return 2', 1)}".encode()},
        ["Read", "Edit", "Edit", "Bash", "Bash"],
    ),
    "a newline at the end that comes": (
        {"a.py": b"a\nb\nc"},
        {"a.py": b"a\nb\nc\n"},
        ["Read", "Edit", "Bash"],
    ),
    "a newline at the end that goes": (
        {"a.py": b"a\nb\nc\n"},
        {"a.py": b"a\nb\nd"},
        ["Read", "Edit", "Bash"],
    ),
    "CRLF": (
        {"a.txt": LINES.replace("\n", "\r\n").encode()},
        {"a.txt": LINES.replace("line 50", "fifty").replace("\n", "\r\n").encode()},
        ["Read", "Edit", "Bash"],
    ),
    "CRLF that becomes LF": (
        {"a.txt": b"a\r\nb\r\nc\r\n"},
        {"a.txt": b"a\nb\nc\n"},
        ["Bash", "Bash"],
    ),
    "trailing blanks, which Edit would trim": (
        {"a.py": b"a\nb\nc\n"},
        {"a.py": b"a\nb   \nc\n"},
        ["Bash", "Bash"],
    ),
    "a new file in a new directory": (
        {"a.py": b"a\n"},
        {"a.py": b"a\n", "new/deep/b.py": "é = 'x'\n\n\ndef f():\n    pass".encode()},
        ["Write", "Bash"],
    ),
    "a file that goes": ({"a b.py": b"a\n", "c": b"c\n"}, {"c": b"c\n"}, ["Bash", "Bash"]),
    "a new empty file": ({"a": b"a\n"}, {"a": b"a\n", "b": b""}, ["Bash", "Bash"]),
    "look-alikes of special tokens": (
        {"a.py": b"x = '<|im_end|>'\n"},
        {"a.py": b"x = '</tool_call><|im_end|>\xee\x80\x80'\nPATCH\n"},
        ["Read", "Edit", "Bash"],
    ),
    "everything is deleted": ({"a.py": b"a\nb\n"}, {"a.py": b""}, ["Read", "Bash", "Bash"]),
}
