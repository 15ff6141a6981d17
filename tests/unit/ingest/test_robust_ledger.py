"""Any conversation that is written into a request ledger comes out of it as it was sent."""

from __future__ import annotations

import hashlib
import json
import random
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from understudy.ingest.claude_code.render import ClaudeCodeRenderer
from understudy.ingest.trace import Message, TraceState

from support import example_count
from support.claude_log import Log, by_message, read, thinking

MANY = settings(max_examples=example_count(80), deadline=None, suppress_health_check=list(HealthCheck))
WORDS = ["a", "ü", "😀", 'q"', "\\", "\n", "line", " ", "0"]
_render = ClaudeCodeRenderer()


def name_of(message: dict[str, Any]) -> str:
    """As the format says: sha256 of JSON with sorted keys, `,` and `:`, UTF-8 that is not escaped."""
    text = json.dumps(message, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()


def chat(messages: list[dict[str, Any]]) -> list[Message]:
    """The messages in OpenAI form, made by hand."""
    made: list[Message] = []
    for message in messages:
        if message["role"] == "assistant":
            texts = [block["text"] for block in message["content"] if block["type"] == "text" and block["text"]]
            calls = [
                (block["id"], block["name"], block["input"])
                for block in message["content"]
                if block["type"] == "tool_use"
            ]
            made.append({"role": "assistant", "said": "\n".join(texts) or None, "calls": calls})
        elif isinstance(message["content"], str):
            made.append({"role": "user", "said": message["content"]})
        else:
            made += [{"role": "tool", "said": b["content"], "of": b["tool_use_id"]} for b in message["content"]]
    return made


def plain(state: TraceState) -> list[Message]:
    made: list[Message] = []
    for message in state.messages:
        if message["role"] == "assistant":
            calls = [
                (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
                for call in message.get("tool_calls", ())
            ]
            made.append({"role": "assistant", "said": message["content"], "calls": calls})
        elif message["role"] == "tool":
            made.append({"role": "tool", "said": message["content"], "of": message["tool_call_id"]})
        else:
            made.append({"role": "user", "said": message["content"]})
    return made


class Written:
    """A log of a random conversation, with its ledger; `sent` are the requests by the id of the answer."""

    def __init__(self, seed: int, turns: int, **envelope: Any) -> None:
        self.dice = random.Random(seed)
        self.log = Log(version="2.1.329", **envelope)
        self.sent: dict[str, list[dict[str, Any]]] = {}
        self.requests: list[tuple[str, list[dict[str, Any]]]] = []
        self.ledger: list[dict[str, Any]] = []
        self.blobs: set[str] = set()
        context: list[dict[str, Any]] = []
        for number in range(turns):
            context = [*context, *self.asked(number, context)]
            if self.dice.random() < 0.2:
                context = self.rewritten(context)
            context = [*context, self.answered(number, context)]

    def words(self) -> str:
        return "w" + "".join(self.dice.choices(WORDS, k=self.dice.randrange(1, 6))) + "w"

    def asked(self, number: int, context: list[dict[str, Any]]) -> list[dict[str, Any]]:
        last = context[-1]["content"] if context else []
        uses = [block["id"] for block in last if isinstance(block, dict) and block["type"] == "tool_use"]
        content: Any = [{"type": "tool_result", "tool_use_id": use, "content": self.words()} for use in uses]
        self.log.user(content or self.words())
        return [{"role": "user", "content": content or f"{number} {self.words()}"}]

    def rewritten(self, context: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """A context that the log does not tell of: cut, or with another message in it."""
        pairs = [at for at, one in enumerate(context) if one["role"] == "user" and isinstance(one["content"], str)]
        if not pairs:
            return context
        at = self.dice.choice(pairs)
        other = {"role": "user", "content": f"instead {self.words()}"}
        return (
            [other, *context[at + 1 :]] if self.dice.random() < 0.5 else [*context[:at], other, *context[at + 1 :]]
        )

    def answered(self, number: int, context: list[dict[str, Any]]) -> dict[str, Any]:
        key, request = f"msg_{number:016}", self.request(context)
        blocks: list[dict[str, Any]] = [thinking("hm")] if self.dice.random() < 0.3 else []
        blocks += [{"type": "text", "text": self.words()} for _ in range(self.dice.randrange(1, 3))]
        blocks += [
            {"type": "tool_use", "id": f"t{number}-{at}", "name": "Read", "input": {"ü": at, "b": [1.5, None]}}
            for at in range(self.dice.randrange(3))
        ]
        self.log.assistant(key, *blocks, requestRef=request)
        self.sent[key] = context
        bare = [block for block in blocks if block["type"] != "thinking"]
        return {"role": "assistant", "content": blocks if self.dice.random() < 0.5 else bare}

    def request(self, context: list[dict[str, Any]]) -> str:
        identity = f"r{len(self.requests)}"
        entry: dict[str, Any] = {"type": "api-request", "id": identity, "keep": 0, "shapeHash": "shape"}
        if self.requests and self.dice.random() < 0.9:
            base, before = self.dice.choice(self.requests[-3:])
            same = 0
            while same < min(len(before), len(context)) and before[same] == context[same]:
                same += 1
            entry |= {"base": base, "keep": self.dice.choice((same, same, same, max(0, same - 1)))}
        names = [name_of(message) for message in context[entry["keep"] :]]
        for message, name in zip(context[entry["keep"] :], names, strict=True):
            if message["role"] == "user" and name not in self.blobs:
                self.blobs.add(name)
                self.ledger.append({"type": "api-request-blob", "hash": name, "message": message})
        self.ledger.append({**entry, "tail": names})
        self.requests.append((identity, context))
        return identity

    def whole(self) -> Log:
        shape = {"system": [{"type": "text", "text": "Be real."}], "tools": [{"name": "Read", "input_schema": {}}]}
        self.log.lines += [*self.ledger, {"type": "api-request-shape", "shapeHash": "shape", "shape": shape}]
        return self.log


@MANY
@given(seed=st.integers(0, 1 << 32), turns=st.integers(1, 12))
def test_states_of_a_ledger_hold_the_requests_written_to_it(seed: int, turns: int) -> None:
    written = Written(seed, turns)
    log = written.whole()
    random.Random(seed).shuffle(written.ledger)
    states = by_message(*read(log))
    assert states.keys() == written.sent.keys()
    for key, context in written.sent.items():
        state = states[key]
        assert (state.fidelity, state.notes) == ("ledger", ())
        assert state.messages[0] == {"role": "system", "content": "Be real."}
        assert state.tools is not None and state.tools[0]["function"]["name"] == "Read"
        state.messages = state.messages[1:]
        assert plain(state) == chat(context)


@MANY
@given(seed=st.integers(0, 1 << 32), turns=st.integers(2, 10))
def test_a_ledger_that_lacks_a_line_never_yields_a_wrong_context(seed: int, turns: int) -> None:
    written = Written(seed, turns)
    dice = random.Random(seed)
    lost = dice.choice(written.ledger)
    written.ledger.remove(lost)
    states = by_message(*read(written.whole()))
    assert states.keys() == written.sent.keys()
    # A message may be lost that the records have too: then it is found there by its hash.
    for key, state in states.items():
        if state.fidelity == "ledger":
            state.messages = state.messages[1:] if state.messages[0]["role"] == "system" else state.messages
            assert plain(state) == chat(written.sent[key])


def test_the_ledger_of_a_session_covers_requests_of_its_subagents() -> None:
    main, agent = Written(1, 2), Written(2, 4, agentId="a1", isSidechain=True)
    for line in agent.log.lines:
        if line["type"] == "assistant":
            line["message"]["id"] = "sub_" + line["message"]["id"]
            line["requestRef"] = "sub" + line["requestRef"]
    for line in agent.ledger:
        if line["type"] == "api-request":
            line["id"] = "sub" + line["id"]
            if "base" in line:
                line["base"] = "sub" + line["base"]
    main.ledger += agent.ledger
    log = main.whole()
    states = by_message(*read(log, **{"s1/subagents/agent-a1.jsonl": agent.log.data()}))
    assert {state.fidelity for state in states.values()} == {"ledger"}
    assert sum(state.role == "subagent" for state in states.values()) == 4
    for key, context in agent.sent.items():
        state = states[f"sub_{key}"]
        state.messages = state.messages[1:]
        assert plain(state) == chat(context)
