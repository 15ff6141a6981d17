"""What versions of Claude Code do differently from what they log. Measured on recorded requests."""

from __future__ import annotations

import re

from msgspec import Struct

from understudy.ingest.claude_code.records import ClaudeBlock, ClaudeRecord

CONTINUE_PROMPT = (
    "Output token limit hit. Resume directly — no apology, no recap of what you were doing. Pick up mid-thought "
    "if that is where the cut happened. Break remaining work into smaller pieces."
)
"""What the CLI says after an answer that was cut off by the output limit. It is not in the log."""

_CONTINUE_AFTER_ERROR = (
    "Your response was cut off because it exceeded the output token limit. Please break your work into smaller "
    "pieces. Continue from where you left off."
)
"""The same in versions that log an error of their own first (2.1.9)."""

_TOO_LONG = re.compile(r"exceeded the \d* ?output token maximum")

QUEUED = (
    "<system-reminder>\nThe user sent a new message while you were working:\n",
    "\n\nIMPORTANT: After completing your current task, you MUST address the user's message above. Do not ignore "
    "it.\n</system-reminder>",
)
"""What stands around a message that the user sent while the model worked."""

NO_TOOL = b"No such tool available"
"""In the result of a call of a tool that is not among those that the CLI sent."""

_REWRITTEN = {"ExitPlanMode": ("plan", "planFilePath")}
"""Inputs by tool that the CLI puts into the log itself, and leaves out when it sends the call back."""

_NUMBERS = re.compile(r"(\d+)\.(\d+)\.(\d+)")


class VersionBehaviour(Struct, frozen=True):
    """How a version sends a conversation back.

    `hides_plans`: without the inputs of `rewritten`. `resumes_by_parent`: when it resumes a session it follows
    `parentUuid` only, and so loses the parallel calls whose results hang on other lines of the answer.
    `sends_errors`: what it says itself of an error is sent as an answer of the model. `doubles_first`: in print
    mode the first answer to a prompt and its results are sent twice.
    """

    hides_plans: bool = True
    resumes_by_parent: bool = False
    sends_errors: bool = False
    doubles_first: bool = False


def behaviour_of(version: str | None) -> VersionBehaviour:
    """The habits of a version, those of a recent one where it is not known."""
    match = _NUMBERS.match(version or "")
    if match is None:
        return VersionBehaviour()
    number = tuple(int(part) for part in match.groups())
    # From about 2.1.60 tools were sent only once the model had looked for them, whatever the server; a call of a
    # tool that is not sent is not rewritten. Later versions do so with Anthropic's own server only.
    searches = (2, 1, 60) <= number < (2, 1, 90)
    return VersionBehaviour(
        hides_plans=number >= (2, 0, 51) and not searches,
        resumes_by_parent=(2, 1, 2) <= number < (2, 1, 80),
        sends_errors=number < (2, 0, 36),
        doubles_first=number < (1, 0, 69),
    )


def is_sent_hook_output(content: object) -> bool:
    """Whether text that is only shown, as its record says, is sent all the same: what a hook said to a prompt."""
    return isinstance(content, str) and content.startswith("<user-prompt-submit-hook>")


def log_only_inputs(block: ClaudeBlock) -> tuple[str, ...]:
    """The fields of a call's input that are not sent back."""
    return _REWRITTEN.get(block.name or "", ())


def continuation(cut: ClaudeRecord, error: ClaudeRecord | None) -> str | None:
    """What was said between an answer (its last line) and the next right behind it, None where that is nothing.

    `error` is what the CLI says of an error between them.
    """
    if error is not None and error.message is not None:
        content = error.message.content
        texts = [content] if isinstance(content, str) else content or ()
        error_texts = (
            text if isinstance(text, str) else bytes(text.text).decode(errors="replace") for text in texts
        )
        return _CONTINUE_AFTER_ERROR if any(map(_TOO_LONG.search, error_texts)) else None
    return CONTINUE_PROMPT if cut.message is not None and cut.message.stop_reason == "max_tokens" else None
