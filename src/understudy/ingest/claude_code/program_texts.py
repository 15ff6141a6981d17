"""Texts of reminders that the log lacks: what versions 2.1.160 to 2.1.330 send, unless a comment says
otherwise.
"""

from __future__ import annotations

from typing import Any

MALWARE = (
    "\n\n<system-reminder>\nWhenever you read a file, you should consider whether it would be considered malware. "
    "You CAN and SHOULD provide analysis of malware, what it is doing. But you MUST refuse to improve or augment "
    "the code. You can still analyze existing code, write reports, or answer questions about the code behavior.\n"
    "</system-reminder>\n"
)
"""What versions up to 2.1.112 send after the lines of a file."""

_PLAN_FILE = (
    "No plan file exists yet. You should create your plan at {path} using the Write tool.",
    "A plan file already exists at {path}. You can read it and make incremental edits using the Edit tool.",
)
_PLAN_FILES_PHRASES = ("identified by agents", "you identified during exploration")
_PLAN_MODE = """\
Plan mode is active. The user indicated that they do not want you to execute yet -- you MUST NOT make any \
edits (with the exception of the plan file mentioned below), run any non-readonly tools (including changing \
configs or making commits), or otherwise make any changes to the system. This supercedes any other \
instructions you have received.

## Plan File Info:
{file}
You should build your plan incrementally by writing to or editing this file. NOTE that this is the only file \
you are allowed to edit - other than this you are only allowed to take READ-ONLY actions.

## Plan Workflow

### Phase 1: Initial Understanding
Goal: Gain a comprehensive understanding of the user's request by reading through code and asking them \
questions. Critical: In this phase you should only use the Explore subagent type.

1. Focus on understanding the user's request and the code associated with their request. Actively search for \
existing functions, utilities, and patterns that can be reused — avoid proposing new code when suitable \
implementations already exist.

2. **Launch up to 3 Explore agents IN PARALLEL** (single message, multiple tool calls) to efficiently explore \
the codebase.
   - Use 1 agent when the task is isolated to known files, the user provided specific file paths, or you're \
making a small targeted change.
   - Use multiple agents when: the scope is uncertain, multiple areas of the codebase are involved, or you \
need to understand existing patterns before planning.
   - Quality over quantity - 3 agents maximum, but you should try to use the minimum number of agents \
necessary (usually just 1)
   - If using multiple agents: Provide each agent with a specific search focus or area to explore. Example: \
One agent searches for existing implementations, another explores related components, a third investigating \
testing patterns

### Phase 2: Design
Goal: Design an implementation approach.

Launch Plan agent(s) to design the implementation based on the user's intent and your exploration results from \
Phase 1.

You can launch up to 1 agent(s) in parallel.

**Guidelines:**
- **Default**: Launch at least 1 Plan agent for most tasks - it helps validate your understanding and consider \
alternatives
- **Skip agents**: Only for truly trivial tasks (typo fixes, single-line changes, simple renames)

In the agent prompt:
- Provide comprehensive background context from Phase 1 exploration including filenames and code path traces
- Describe requirements and constraints
- Request a detailed implementation plan

### Phase 3: Review
Goal: Review the plan(s) from Phase 2 and ensure alignment with the user's intentions.
1. Read the critical files {found} to deepen your understanding
2. Ensure that the plans align with the user's original request
3. Use AskUserQuestion to clarify any remaining questions with the user

### Phase 4: Final Plan
Goal: Write your final plan to the plan file (the only file you can edit).
- Begin with a **Context** section: explain why this change is being made — the problem or need it addresses, \
what prompted it, and the intended outcome
- Include only your recommended approach, not all alternatives
- Ensure that the plan file is concise enough to scan quickly, but detailed enough to execute effectively
- Name the critical files to be modified. For changes that repeat a pattern across many files, describe the \
pattern once and list a few representative paths — do not enumerate every file or line number
- Reference existing functions and utilities you found that should be reused, with their file paths
- Include a verification section describing how to test the changes end-to-end (run the code, use MCP tools, \
run tests)

### Phase 5: Call ExitPlanMode
At the very end of your turn, once you have asked the user questions and are happy with your final plan file - \
you should always call ExitPlanMode to indicate to the user that you are done planning.
This is critical - your turn should only end with either using the AskUserQuestion tool OR calling \
ExitPlanMode. Do not stop unless it's for these 2 reasons

**Important:** Use AskUserQuestion ONLY to clarify requirements or choose between approaches. Use ExitPlanMode \
to request plan approval. Do NOT ask about plan approval in any other way - no text questions, no \
AskUserQuestion. Phrases like "Is this plan okay?", "Should I proceed?", "How does this plan look?", "Any \
changes before we start?", or similar MUST use ExitPlanMode.

NOTE: At any point in time through this workflow you should feel free to ask the user questions or \
clarifications using the AskUserQuestion tool. Don't make large assumptions about user intent. The goal is to \
present a well researched plan to the user, and tie any loose ends before implementation begins."""
_PLAN_MODE_AGAIN = """\
## Re-entering Plan Mode

You are returning to plan mode after having previously exited it. A plan file exists at {path} from your \
previous planning session.

**Before proceeding with any new planning, you should:**
1. Read the existing plan file to understand what was previously planned
2. Evaluate the user's current request against that plan
3. Decide how to proceed:
   - **Different task**: If the user's request is for a different task—even if it's similar or related—start \
fresh by overwriting the existing plan
   - **Same task, continuing**: If this is explicitly a continuation or refinement of the exact same task, \
modify the existing plan while cleaning up outdated or irrelevant sections
4. Continue on with the plan process and most importantly you should always edit the plan file one way or the \
other before calling ExitPlanMode

Treat this as a fresh planning session. Do not assume the existing plan is relevant without evaluating it first."""
_PLAN_MODE_EXIT = """\
## Exited Plan Mode

You have exited plan mode. You can now make edits, run tools, and take actions. The plan file is located at \
{path} if you need to reference it."""
_TASKS = """\
The task tools haven't been used recently. If you're working on tasks that would benefit from tracking progress, \
consider using TaskCreate to add new tasks and TaskUpdate to update task status (set to in_progress when \
starting, completed when done). Also consider cleaning up the task list if it has become stale. Only use these if \
relevant to the current work. This is just a gentle reminder - ignore if not applicable.
"""


def unsupported(reminder: str, got: object, expected: str) -> ValueError:
    """Return the error for a reminder whose text is unknown in this case. Its callers catch it, and add a note to
    the states that follow.
    """
    return ValueError(
        f"unsupported {reminder} reminder: got {got!r:.80}, expected {expected}; the states after it are marked "
        "as incomplete"
    )


def plan_mode(fields: dict[str, Any], *, by_agents: bool) -> str:
    """Return the reminder that is sent when plan mode begins. `by_agents`: this version asks agents to list files
    to read.

    Raises ValueError in cases whose text is unknown: subagents, and the short reminder that is repeated later.
    """
    if fields["reminderType"] != "full" or fields["isSubAgent"]:
        raise unsupported(
            "plan_mode", (fields["reminderType"], fields["isSubAgent"]), "the full reminder of a main agent"
        )
    file_note = _PLAN_FILE[bool(fields["planExists"])].format(path=fields["planFilePath"])
    return _PLAN_MODE.format(file=file_note, found=_PLAN_FILES_PHRASES[not by_agents])


def plan_mode_again(fields: dict[str, Any]) -> str:
    """Return the reminder that is sent when plan mode is entered again."""
    return _PLAN_MODE_AGAIN.format(path=fields["planFilePath"])


def plan_mode_exit(fields: dict[str, Any]) -> str:
    """Return the reminder that is sent when plan mode ends.

    Raises ValueError if no plan exists: that text is unknown.
    """
    if not fields["planExists"]:
        raise unsupported("plan_mode_exit", fields["planExists"], "an existing plan")
    return _PLAN_MODE_EXIT.format(path=fields["planFilePath"])


def task_reminder(fields: dict[str, Any]) -> str:
    """Return the reminder to use the task list. Raises ValueError if a task is blocked or has an owner."""
    for task in fields["content"]:
        if task["blockedBy"] or task.get("owner"):
            raise unsupported("task_reminder", task, "a task that is not blocked and has no owner")
    tasks = "\n".join(f"#{task['id']}. [{task['status']}] {task['subject']}" for task in fields["content"])
    return f"{_TASKS}\n\nHere are the existing tasks:\n\n{tasks}" if tasks else _TASKS
