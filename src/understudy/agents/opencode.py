"""OpenCode, headless (`opencode run`), speaking Chat Completions to the gateway."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, cast

import msgspec

from understudy.agents.base import AgentJob
from understudy.agents.packaged import GATEWAY, AgentEnd, Launch, PackagedAgent, json_events, text_at
from understudy.agents.packages import AGENT_PACKAGES
from understudy.agents.turn_log import LoggedTurn
from understudy.sandbox.base import Completed, Sandbox

_PROVIDER = "understudy"
_CONTEXT_TOKENS, _OUTPUT_TOKENS = 1_000_000, 32_000
"""The limits of the model that OpenCode is told: it compacts by the first and requests the second as maximum."""


_TOOLS = (
    "apply_patch", "bash", "edit", "glob", "grep", "lsp", "question", "read", "skill", "task", "todowrite",
    "write",
)  # fmt: skip


class OpenCode(PackagedAgent):
    """Runs OpenCode once per attempt and collects its events, its session and how it ended."""

    name: ClassVar[str] = "opencode"
    version: ClassVar[str | None] = AGENT_PACKAGES["opencode"].version
    tool_names: ClassVar[tuple[str, ...]] = _TOOLS
    # It asks the model to stop after its `steps`, and goes on where the model does.
    limits_turns: ClassVar[bool] = False
    log_directories: ClassVar[tuple[str, ...]] = (".local/share/opencode",)

    def launch(self, sandbox: Sandbox, job: AgentJob) -> Launch:
        """See PackagedAgent."""
        settings = f"{sandbox.home}/.config/opencode/opencode.json"
        return Launch(
            arguments=(
                "run",
                "--format",
                "json",
                "--model",
                f"{_PROVIDER}/{job.model}",
                *(("--continue",) if job.resume else ()),
            ),
            env={
                "OPENCODE_CONFIG": settings,
                "OPENCODE_DISABLE_AUTOUPDATE": "1",
                "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
                "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
                "OPENCODE_DISABLE_MODELS_FETCH": "1",
                "OPENCODE_DISABLE_SHARE": "1",
                "UNDERSTUDY_KEY": job.key,
            },
            files={
                settings: msgspec.json.encode(self._settings(job)).decode(),
                # Otherwise it requests a package for plugins of this directory from the registry.
                f"{sandbox.home}/.config/opencode/.npmrc": "offline=true\n",
            },
            stdin=job.instruction,
        )

    def _settings(self, job: AgentJob) -> dict[str, Any]:
        agent: dict[str, Any] = {"steps": job.max_turns}
        if self._system_prompt:
            agent["prompt"] = self._system_prompt
        if self._tools:
            agent["tools"] = {"*": False, **dict.fromkeys(self._tools, True)}
        models = {
            name: {
                "name": name,
                "tool_call": True,
                "limit": {"context": _CONTEXT_TOKENS, "output": _OUTPUT_TOKENS},
            }
            for name in (job.model, job.small_model)
        }
        return {
            "autoupdate": False,
            "share": "disabled",
            "snapshot": False,
            "formatter": False,
            "lsp": False,
            "model": f"{_PROVIDER}/{job.model}",
            "small_model": f"{_PROVIDER}/{job.small_model}",
            "permission": {"*": "allow", "webfetch": "deny", "websearch": "deny"},
            "agent": {"build": agent},
            "provider": {
                _PROVIDER: {
                    "npm": "@ai-sdk/openai-compatible",
                    "name": "Understudy",
                    "options": {"baseURL": f"{GATEWAY}/v1", "apiKey": "{env:UNDERSTUDY_KEY}"},
                    "models": models,
                }
            },
        }

    def logged_turns(self, logs: Mapping[str, bytes]) -> list[LoggedTurn]:
        """See PackagedAgent: of its events, since its session is a database.

        It prints parallel calls as they end; their ids are in the order of the model's response. A summary that
        replaces the conversation is left out, as are the words with which OpenCode itself continues after it.
        """
        turns: list[LoggedTurn] = []
        texts: list[str] = []
        calls: list[tuple[str, str, str]] = []
        for event in json_events(logs.get("stdout.txt", b"")):
            part = event.get("part")
            match event:
                case {"type": "text", "part": {"synthetic": True, "metadata": {"compaction_continue": True}}}:
                    del turns[-1:]
                case {"type": "text", "part": {"synthetic": True}}:
                    pass
                case {"type": "text"}:
                    texts.append(text_at(part, "text"))
                case {"type": "tool_use"}:
                    state = cast(dict[str, Any], part).get("state") if isinstance(part, dict) else None
                    inputs = cast(dict[str, Any], state).get("input") if isinstance(state, dict) else None
                    calls.append(
                        (text_at(part, "id"), text_at(part, "tool"), msgspec.json.encode(inputs).decode())
                    )
                case {"type": "step_finish"}:
                    calls.sort(key=lambda call: call[0])
                    turns.append(LoggedTurn("\n".join(texts), tuple((name, inputs) for _, name, inputs in calls)))
                    texts, calls = [], []
                case _:
                    pass
        return turns

    def end_of(self, completed: Completed, logs: Mapping[str, bytes]) -> AgentEnd:
        """See PackagedAgent. The last step decides, unless an error came after it.

        It also exits with 1 if it recovered from an error, such as a context that is full.
        """
        error, ended, recovered = "", False, False
        for event in json_events(completed.stdout):
            match event.get("type"):
                case "step_start":
                    recovered = recovered or bool(error)
                    error, ended = "", False
                case "step_finish":
                    ended = True
                case "error":
                    error = text_at(event, "error", "data", "message") or text_at(event, "error", "name")
                    error = error or "no message"
                case _:
                    pass
        ended = ended and not error and completed.exit_code in ((0, 1) if recovered else (0,))
        return AgentEnd("completed") if ended else self.crash(completed, error)
