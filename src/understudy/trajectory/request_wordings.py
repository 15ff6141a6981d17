"""The wording of agents' requests that are not the work itself, by agent and version, in one table.

For an agent that sends no session ids, only this wording tells its sessions apart, and its side requests from its
work. Each entry was taken from the agent's own program.
"""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

Position = Literal["question", "fork", "instructions"]
"""Where the wording of a request is found.

question: in the user's last text. fork: the same, in a request that continues a conversation; without one, it may
be a user's own text. instructions: in the system prompt.
"""

Purpose = Literal["compaction", "auxiliary", "continued"]
"""What a request is for: a summary of the conversation, an auxiliary task, or to continue from a summary.
"""


class RequestWording(Struct, frozen=True):
    """The beginning of a text, as a regular expression."""

    agent: str
    version: str
    purpose: Purpose
    position: Position
    wording: str


REQUEST_WORDINGS = (
    RequestWording(
        "claude-code", "2.1.197", "compaction", "fork",
        r"CRITICAL: Respond with TEXT ONLY\b|Your task is to create a detailed summary of",
    ),
    RequestWording(
        "claude-code", "2.1.197", "auxiliary", "fork",
        r"\[SUGGESTION MODE:|The user stepped away and is coming back\b|Describe your most recent action\b"
        r"|(?:<system-reminder>)?This is a side question from the user\b|# Dream: Memory Consolidation"
        r"|You are now acting as the memory extraction subagent\b",
    ),
    RequestWording(
        "claude-code", "2.1.197", "continued", "question",
        r"This session is being continued from a previous conversation",
    ),
    RequestWording(
        "codex", "0.169.0", "compaction", "fork", r"You are performing a CONTEXT CHECKPOINT COMPACTION\b",
    ),
    RequestWording(
        "codex", "0.169.0", "continued", "question",
        r"Another language model started to solve this problem and produced a summary",
    ),
    RequestWording(
        "gemini", "0.61.0", "compaction", "instructions",
        r"You are a specialized system component responsible for distilling chat history",
    ),
    RequestWording(
        "gemini", "0.61.0", "auxiliary", "fork",
        r"Analyze \*only\* the content and structure of your immediately preceding response",
    ),
    RequestWording(
        "gemini", "0.61.0", "auxiliary", "instructions",
        r"You are a diagnostic agent that determines whether|You are a specialized Task Routing AI"
        r"|You are an expert code-editing assistant\b|You are a sub-agent in a larger system",
    ),
    RequestWording(
        "gemini", "0.61.0", "auxiliary", "question",
        r"Summarize the user's primary intent or goal in this conversation in ONE sentence",
    ),
    RequestWording(
        "qwen-code", "0.24.4", "compaction", "fork",
        r"First, reason in your <analysis> block\. Then, produce the <state_snapshot> XML"
        r"|You are the component that summarizes a conversation when its context window is about to overflow",
    ),
    RequestWording(
        "qwen-code", "0.24.4", "auxiliary", "question",
        r"You are now acting as the managed memory extraction subagent\b",
    ),
    RequestWording(
        "qwen-code", "0.24.4", "auxiliary", "instructions",
        r"You are now acting as the managed memory extraction subagent\b"
        r"|You are selecting memories that will be useful"
        r"|You are an assistant that rewrites raw coding-agent output"
        r"|You are a security classifier for an AI coding agent operating in auto mode\b",
    ),
    RequestWording("opencode", "1.18.33", "auxiliary", "instructions", r"You are a title generator\b"),
    RequestWording(
        "opencode", "1.18.33", "compaction", "question",
        r".*(?:Create a new|Update the) anchored summary from the conversation history in the <conversation> tags",
    ),
    RequestWording(
        "openhands", "1.58.2", "compaction", "instructions",
        r"You are maintaining a context-aware state summary for an interactive agent\b",
    ),
    RequestWording(
        "pi", "0.87.1", "compaction", "instructions", r"You are a context summarization assistant\b",
    ),
    RequestWording(
        "pi", "0.87.1", "continued", "question",
        r"The conversation history before this point was compacted into the following summary:",
    ),
)  # fmt: skip


def wording_pattern(purpose: Purpose, position: Position) -> re.Pattern[str]:
    """Return a pattern that matches the beginning of a text in the wording of any agent for a purpose."""
    wordings = [
        entry.wording for entry in REQUEST_WORDINGS if (entry.purpose, entry.position) == (purpose, position)
    ]
    return re.compile(rf"\s*(?:{'|'.join(wordings)})", re.DOTALL) if wordings else re.compile(r"(?!)")
