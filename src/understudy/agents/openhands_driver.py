"""Runs OpenHands' software agent SDK once, in a sandbox. A script of its own: it is passed to the agent's Python.

Takes the directory of the SDK and the gateway's address as arguments, and reads one JSON object from stdin:
`prompt`, `workspace`, `log` (the directory for the conversation's events), `max_turns`, `llm` (the fields of the
SDK's LLM), `system_prompt` ("" for its own) and `tools` (names; empty for all). Its last line on stdout is a JSON
object: `status` (the SDK's name of the conversation's state at the end), and `code` and `detail` of an error.
"""

from __future__ import annotations

import gc
import importlib
import json
import re
import sys
from typing import Any

TOOLS = {
    "terminal": ("openhands.tools.terminal", "TerminalTool"),
    "file_editor": ("openhands.tools.file_editor", "FileEditorTool"),
    "task_tracker": ("openhands.tools.task_tracker", "TaskTrackerTool"),
}
BUILT_IN_TOOLS = {"finish": "FinishTool", "think": "ThinkTool"}

_TERMINAL_MODULE = "openhands.tools.terminal.terminal.subprocess_terminal"
_END_OF_PROMPT = re.compile("\n###PS1END###\n(?:\x1b\\[[?0-9]*[hl])?\\Z")


def reliable_terminal(terminal: Any) -> Any:
    """Return a subclass of the SDK's SubprocessTerminal that never takes an earlier prompt for a command's end.

    In the SDK, the prompt's markers end with a line feed but a terminal writes a carriage return before it. The
    marker of a prompt's beginning is therefore never found, and after each command an empty line is entered to get
    another prompt. When that prompt comes after the next command was sent, the command's output is lost.
    """

    def initialize(self: Any) -> None:
        terminal.initialize(self)
        # On a busy machine bash has not written all of its first prompts yet. The echo has no such line.
        self._write_pty(b"printf '%s\\n' rea''dy\n")
        self._wait_for_output("\nready\n", timeout=60.0)
        self.clear_screen()

    def clear_screen(self: Any) -> None:
        # The prompt's last line feed may come after its marker, and would be taken for new output.
        self._wait_for_output(_END_OF_PROMPT, timeout=1.0)
        terminal.clear_screen(self)

    def add_text(self: Any, text: str) -> None:
        terminal._add_text_to_buffer(self, text.replace("\r", ""))

    methods = {"initialize": initialize, "clear_screen": clear_screen, "_add_text_to_buffer": add_text}
    return type("ReliableTerminal", (terminal,), methods)


def drive(job: dict[str, Any], address: str) -> dict[str, str]:
    """Work on the job to its end; return the content of the last line of output."""
    # Importing the SDK takes seconds of CPU time, a fifth less without the collector.
    gc.disable()
    sdk: Any = importlib.import_module("openhands.sdk")
    condensers: Any = importlib.import_module("openhands.sdk.context.condenser")
    names = job["tools"] or [*TOOLS, *BUILT_IN_TOOLS]
    tools: list[Any] = []
    for name, (module, kind) in TOOLS.items():
        if name in names:
            tool: Any = getattr(importlib.import_module(module), kind)
            # Otherwise tmux is used where the sandbox has it, and shells behave differently.
            params = {"terminal_type": "subprocess"} if name == "terminal" else {}
            if name == "terminal":
                library: Any = importlib.import_module(_TERMINAL_MODULE)
                library.SubprocessTerminal = reliable_terminal(library.SubprocessTerminal)
            tools.append(sdk.Tool(name=tool.name, params=params))
    gc.freeze()
    gc.enable()
    llm = sdk.LLM(base_url=address, usage_id="agent", **job["llm"])
    agent = sdk.Agent(
        llm=llm,
        tools=tools,
        include_default_tools=[kind for name, kind in BUILT_IN_TOOLS.items() if name in names],
        condenser=condensers.default_condenser(llm.model_copy(update={"usage_id": "condenser"})),
        system_prompt=job["system_prompt"] or None,
        system_prompt_kwargs={"cli_mode": True},
    )
    conversation = sdk.Conversation(
        agent=agent,
        workspace=job["workspace"],
        persistence_dir=job["log"],
        max_iteration_per_run=job["max_turns"],
        visualizer=None,
        delete_on_close=False,
    )
    end = {"code": "", "detail": ""}
    try:
        conversation.send_message(job["prompt"])
        conversation.run()
    except Exception as error:  # noqa: BLE001 - whatever the SDK raises is how the run ended
        cause = getattr(error, "original_exception", error)
        end = {"code": type(cause).__name__, "detail": str(cause)}
    for event in conversation.state.events:
        if type(event).__name__ == "ConversationErrorEvent" and not end["code"]:
            end = {"code": event.code, "detail": event.detail or ""}
    status = conversation.state.execution_status.value
    conversation.close()
    return {"status": status, **end}


def main() -> int:
    """Return the exit code."""
    sys.path.insert(0, sys.argv[1])
    end = drive(json.load(sys.stdin), sys.argv[2])
    sys.stdout.write(json.dumps(end) + "\n")
    sys.stdout.flush()
    return 0 if end["status"] == "finished" else 1


if __name__ == "__main__":
    sys.exit(main())
