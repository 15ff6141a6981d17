"""Claude Code's Read, Edit, Write and Bash as the model sees them, on a real directory, and a loop to run them."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

Body = dict[str, Any]


def tool_definitions(*names: str) -> list[Body]:
    """Tools of these names in OpenAI's shape, with the arguments that Claude Code has for them."""
    arguments = {
        "Read": ["file_path"],
        "Edit": ["file_path", "old_string", "new_string"],
        "Write": ["file_path", "content"],
        "Bash": ["command"],
    }
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{name} for the test",
                "parameters": {
                    "type": "object",
                    "properties": {argument: {"type": "string"} for argument in arguments[name]},
                    "required": arguments[name],
                },
            },
        }
        for name in names
    ]


class Tools:
    """Runs tool calls in `root` with the manners of the real ones: what they refuse, trim and keep."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names: list[str] = []
        self._seen: set[Path] = set()

    def run(self, name: str, arguments: str) -> str:
        """The result's text; a failure begins with "Error: "."""
        self.names.append(name)
        parsed = json.loads(arguments)
        try:
            return getattr(self, f"_{name.lower()}")(**parsed)
        except ValueError as error:
            return f"Error: <tool_use_error>{error}</tool_use_error>"

    def _read(self, file_path: str, offset: int = 1, limit: int = 2000) -> str:
        path = self._inside(file_path)
        self._seen.add(path)
        lines = path.read_bytes().decode().replace("\r\n", "\n").split("\n")
        return "\n".join(f"{n}\t{line}" for n, line in enumerate(lines, 1) if offset <= n < offset + limit)

    def _edit(self, file_path: str, old_string: str, new_string: str) -> str:
        path = self._inside(file_path)
        if path not in self._seen:
            raise ValueError("File has not been read yet. Read it first before writing to it.")
        data = path.read_bytes().decode()
        crlf = "\r\n" in data
        text = data.replace("\r\n", "\n")
        matches = text.count(old_string)
        if not matches:
            raise ValueError(f"String to replace not found in file.\nString: {old_string}")
        if matches > 1:
            raise ValueError(f"Found {matches} matches of the string to replace, but replace_all is false.")
        text = text.replace(old_string, _trim(path, new_string))
        path.write_bytes((text.replace("\n", "\r\n") if crlf else text).encode())
        return f"The file {file_path} has been updated successfully."

    def _write(self, file_path: str, content: str) -> str:
        path = self._inside(file_path)
        if path.exists() and path not in self._seen:
            raise ValueError("File has not been read yet. Read it first before writing to it.")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(_trim(path, content).encode())
        return f"File created successfully at: {file_path}"

    def _bash(self, command: str, description: str = "") -> str:
        if re.search(r"[\x00-\x08\x0b-\x1f]", command):
            raise ValueError("command contains control characters that would be hidden in the approval dialog")
        done = subprocess.run(["bash", "-c", command], cwd=self.root, capture_output=True, check=False)
        output = (done.stdout + done.stderr).decode()
        return f"Error: Exit code {done.returncode}\n{output}" if done.returncode else output

    def _inside(self, file_path: str) -> Path:
        path = Path(file_path)
        assert path.is_relative_to(self.root), file_path
        if not path.exists() and self.names[-1] != "Write":
            raise ValueError("File does not exist.")
        return path


def _trim(path: Path, text: str) -> str:
    return text if path.suffix in (".md", ".mdx") else re.sub(r"[ \t]+(?=\r?\n|$)", "", text)


def converse(root: Path, ask: Callable[[list[Body]], Body], messages: list[Body], turns: int = 60) -> Tools:
    """Let a model work in `root` until it answers without a tool call; `messages` grows by what was said."""
    tools = Tools(root)
    for _ in range(turns):
        message = ask(messages)
        calls = message.get("tool_calls") or []
        messages.append({"role": "assistant", "content": message["content"], "tool_calls": calls})
        if not calls:
            return tools
        for call in calls:
            result = tools.run(call["function"]["name"], call["function"]["arguments"])
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": result})
    raise AssertionError(f"no end after {turns} turns: {tools.names}")
