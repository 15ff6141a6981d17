"""Agents that send no ids of their sessions: what each of their calls was for, by its words and its place."""

from __future__ import annotations

import json
from typing import Any

from understudy.trajectory.tree import Trajectory, build
from understudy.types import Call

TOOLS = [{"functionDeclarations": [{"name": "run"}]}]
WORK = "You are Gemini CLI, an autonomous CLI agent."
SUMMING_UP = "\nYou are a specialized system component responsible for distilling chat history into a snapshot."
CHECKING = "Analyze *only* the content and structure of your immediately preceding response (your last turn)."
SNAPSHOT = "<state_snapshot>The sum is mended, its tests are not.</state_snapshot>"
SCHEMA = {"responseMimeType": "application/json", "responseJsonSchema": {"type": "object"}}

Item = dict[str, Any]


def user(*texts: str) -> Item:
    return {"role": "user", "parts": [{"text": text} for text in texts]}


def model(*parts: Item | str) -> Item:
    return {"role": "model", "parts": [{"text": part} if isinstance(part, str) else part for part in parts]}


def called(number: int) -> Item:
    return {"functionCall": {"id": f"t{number}", "name": "run", "args": {"n": number}}}


def result(number: int) -> Item:
    response = {"id": f"t{number}", "name": "run", "response": {"output": str(number)}}
    return {"role": "user", "parts": [{"functionResponse": response}]}


class Headerless:
    """The calls of an agent that sends no headers."""

    def __init__(self, dialect: str = "gemini") -> None:
        self.calls: list[Call] = []
        self._dialect = dialect

    def ask(self, *contents: Item, answer: Item, system: str = WORK, tools: Any = TOOLS, **fields: Any) -> None:
        request = {
            "contents": contents,
            "systemInstruction": {"parts": [{"text": system}]},
            "tools": tools,
        } | fields
        self.store(
            {name: value for name, value in request.items() if value}, {"candidates": [{"content": answer}]}
        )

    def store(self, request: Item, response: Item) -> None:
        number = len(self.calls)
        self.calls.append(
            Call(
                id=f"call_{number}",
                attempt_id="a1",
                sequence=number,
                dialect=self._dialect,
                requested_model="m",
                backend="vllm",
                backend_model="m",
                request=json.dumps(request).encode(),
                response=json.dumps(response).encode(),
                status="ok",
                started_at=float(number),
                ended_at=number + 0.5,
            )
        )

    @property
    def tree(self) -> Trajectory:
        return build(self.calls)

    @property
    def roles(self) -> list[str]:
        return [node.role for node in self.tree.nodes]


def worked() -> tuple[Headerless, list[Item]]:
    """Two turns of work, and the history that they leave."""
    agent = Headerless()
    history = [user("<session_context>", "Mend it.")]
    for number in range(2):
        agent.ask(*history, answer=model(called(number)))
        history += [model(called(number)), result(number)]
    return agent, history


def test_a_summary_that_replaces_the_history_is_a_compaction() -> None:
    agent, history = worked()
    ask = "Generate a new <state_snapshot> based on the provided history.\n\nFirst, reason in your scratchpad."
    agent.ask(*history, user(ask), answer=model(f"hm {SNAPSHOT}"), system=SUMMING_UP, tools=None)
    verify = [*history, model(f"hm {SNAPSHOT}"), user("Critically evaluate the <state_snapshot>.")]
    agent.ask(*verify, answer=model(SNAPSHOT), system=SUMMING_UP, tools=None)
    continued = [user(SNAPSHOT), model("Got it. Thanks for the additional context!"), *history[-2:]]
    agent.ask(*continued, answer=model("Done."))
    assert agent.roles == ["main", "main", "compaction", "compaction", "main"]
    nodes = agent.tree.nodes
    assert nodes[4].origin == "compaction"
    assert nodes[4].continues is nodes[3]
    assert [node.branch for node in nodes] == ["main", "main", "compaction", "compaction.1", "main.1"]


def test_an_edited_history_is_a_branch_and_no_compaction() -> None:
    agent, history = worked()
    edited = [*history[:2], {"role": "user", "parts": [{"text": "[output removed]"}]}, *history[3:]]
    agent.ask(*edited, answer=model("Done."))
    last = agent.tree.nodes[-1]
    assert (last.role, last.continues, last.branch) == ("main", None, "main.1")


def test_a_history_cut_off_at_its_end_is_a_branch() -> None:
    agent, history = worked()
    agent.ask(*history, answer=model("One."))
    agent.ask(*history[:3], user("Another way, please."), answer=model("Two."))
    assert agent.roles == ["main"] * 4
    assert len({node.branch for node in agent.tree.nodes}) == 2


def test_checks_and_summaries_for_the_user_are_beside_the_work() -> None:
    agent, history = worked()
    agent.ask(*history, answer=model("Done."))
    conversation = [*history, model("Done.")]
    agent.ask(*conversation, user(CHECKING), answer=model("{}"), tools=None, generationConfig=SCHEMA)
    loop = "You are a diagnostic agent that determines whether a conversational AI assistant is stuck."
    agent.ask(*history[-3:], user("Analyze it."), answer=model("{}"), system=loop, tools=None)
    title = "Summarize the user's primary intent or goal in this conversation in ONE sentence (max 80 characters)."
    agent.ask(user(title), answer=model("Mend a sum."), system="", tools=None)
    assert agent.roles == ["main"] * 3 + ["auxiliary"] * 3
    agent.ask(*conversation, user("Thanks. And now?"), answer=model("Nothing."))
    assert agent.roles[-1] == "main"


def test_a_conversation_with_tools_that_is_asked_for_a_form_without_them_is_checked() -> None:
    agent, history = worked()
    agent.ask(*history, answer=model("Done."))
    conversation = [*history, model("Done."), user("Who speaks next?")]
    agent.ask(*conversation, answer=model("{}"), tools=None, generationConfig=SCHEMA)
    agent.ask(*conversation, answer=model("I do."))
    assert agent.roles == ["main"] * 3 + ["auxiliary", "main"]


def chat(*messages: tuple[str, str], tools: bool = False) -> Item:
    body: Item = {"model": "m", "messages": [{"role": role, "content": text} for role, text in messages]}
    return body | ({"tools": [{"type": "function", "function": {"name": "run"}}]} if tools else {})


def said(text: str) -> Item:
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": "stop"}]}


def test_memory_helpers_with_tools_of_their_own_are_beside_the_work() -> None:
    agent = Headerless("openai-chat")
    agent.store(chat(("system", "You are Qwen Code."), ("user", "Mend it."), tools=True), said("Done."))
    helper = "You are now acting as the managed memory extraction subagent for an AI coding assistant."
    agent.store(chat(("system", "You are Qwen Code."), ("user", helper), tools=True), said("Nothing to keep."))
    assert agent.roles == ["main", "auxiliary"]


def test_a_summary_by_an_assistant_of_its_own_is_a_compaction_that_the_conversation_goes_on_from() -> None:
    agent = Headerless("openai-chat")
    agent.store(chat(("system", "You are pi."), ("user", "Mend it."), tools=True), said("I begin."))
    prompt = "<conversation>…</conversation>\n\nThe messages above are a conversation to summarize."
    agent.store(
        chat(("system", "You are a context summarization assistant."), ("user", prompt)), said("## Goal: mend")
    )
    go_on = "The conversation history before this point was compacted into the following summary:\n\n## Goal: mend"
    agent.store(chat(("system", "You are pi."), ("user", go_on), ("user", "Go on."), tools=True), said("Done."))
    nodes = agent.tree.nodes
    assert agent.roles == ["main", "compaction", "main"]
    assert nodes[2].continues is nodes[1]


def test_a_summary_that_is_asked_for_with_all_tools_is_a_compaction() -> None:
    agent = Headerless("openai-chat")
    task = (("system", "You are Qwen Code."), ("user", "Mend it."))
    agent.store(chat(*task, tools=True), said("I look."))
    prompt = "\nYou are the component that summarizes a conversation when its context window is about to overflow."
    agent.store(chat(*task, ("assistant", "I look."), ("user", prompt), tools=True), said(SNAPSHOT))
    agent.store(chat(task[0], ("user", SNAPSHOT), ("user", "Go on."), tools=True), said("Done."))
    assert agent.roles == ["main", "compaction", "main"]


def test_a_summary_behind_turns_that_are_kept_is_a_compaction_and_the_work_goes_on_as_a_branch() -> None:
    agent = Headerless("openai-chat")
    task = (("system", "You are OpenHands agent."), ("user", "Mend it."))
    recent = (("assistant", "I look."), ("user", "Go on."))
    agent.store(chat(*task, tools=True), said("I look."))
    agent.store(chat(*task, *recent, tools=True), said("I begin."))
    prompt = "<EVENT>\nMessageEvent (agent)\n</EVENT>\n\nNow summarize the events using the rules above."
    system = "You are maintaining a context-aware state summary for an interactive agent."
    agent.store(chat(("system", system), ("user", prompt)), said("COMPLETED: The typo is mended."))
    agent.store(chat(*task, *recent, ("user", "COMPLETED: The typo is mended."), tools=True), said("Done."))
    assert agent.roles == ["main", "main", "compaction", "main"]
    nodes = agent.tree.nodes
    assert nodes[3].parent is nodes[0] and nodes[3].branch != nodes[1].branch


def test_what_a_user_says_alone_is_no_fork() -> None:
    agent = Headerless()
    agent.ask(user(CHECKING), answer=model("Of what?"))
    assert agent.roles == ["main"]
