"""Rows of LLaMA-Factory: examples and pairs in its sharegpt format, with tools, and in Alpaca format.

LLaMA-Factory drops a row in which user and model do not alternate, and fails on one that contains a marker of its
chat template. Such rows are not written: the functions raise `RowFlaw`. LLaMA-Factory ignores the `id` of a row.
The effect of its chat templates on a row was taken from LLaMA-Factory 0.9.5. A template that is not in the tables
below is assumed to have the most common markers.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from understudy.export.examples import Example, arguments_of, with_text_content
from understudy.ingest.trace import Message
from understudy.preference.checks import Pair, message_of

_THOUGHT = ("<think>\n", "\n</think>\n\n")
_CALL = ("<tool_call>", "</tool_call>")

_THOUGHTS = {
    "aeva": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "gemma4n": ("<|channel>thought\n", "<channel|>"),
    "glm4_7": ("<think>", "</think>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "hy3": ("<think>", "</think>"),
    "kimi_vl": ("◁think▷", "◁/think▷"),
    "mimo_v2": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
_CALLS = {
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2_vl": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
_TAGGED_RESULT_TEMPLATES = """
bailing_v2 keye_vl lfm2 lfm2_vl llava_next_qwen mimo mimo_v2 mimo_vl qwen qwen2_omni qwen2_vl qwen3 qwen3_5
qwen3_5_nothink qwen3_6 qwen3_nothink qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink youtu
"""
_SINGLE_CALL_TEMPLATES = """
chatglm3 glm4 glm4v glm_ocr glmz1
"""
_IMAGE_TEMPLATES = """
dots_ocr ernie_vl gemma3 gemma3n gemma4 gemma4n glm4_5v glm4v glm_ocr granite3_vision intern_s1 intern_vl keye_vl
kimi_vl lfm2_vl llama4 llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_video
llava_next_video_mistral llava_next_video_yi llava_next_yi mimo_vl minicpm_o minicpm_v minicpm_v_4_6 ministral3
mistral_small mllama paligemma paligemma_chat pixtral qwen2_audio qwen2_omni qwen2_vl qwen3_5 qwen3_5_nothink
qwen3_6 qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink video_llava yi_vl youtu_vl
"""


class TemplateRules(Struct, frozen=True):
    """A chat template of LLaMA-Factory.

    `thought` are the markers around thinking and `call` those around the JSON of tool calls, in the text of an
    answer; `results` joins the results of parallel calls. `placeholders` stand for images and sounds, so text that
    contains them would abort a training. `parallel` is False for a template that allows one call per answer.
    """

    name: str
    thought: tuple[str, str]
    call: tuple[str, str]
    results: str
    placeholders: tuple[str, ...]
    parallel: bool


def template_rules(name: str) -> TemplateRules:
    """Return the rules of the template with this name."""
    return TemplateRules(
        name=name,
        thought=_THOUGHTS.get(name, _THOUGHT),
        call=_CALLS.get(name, _CALL),
        results="\n</tool_response>\n<tool_response>\n" if name in _TAGGED_RESULT_TEMPLATES.split() else "\n\n",
        placeholders=("<image>", "<video>", "<audio>") if name in _IMAGE_TEMPLATES.split() else (),
        parallel=name not in _SINGLE_CALL_TEMPLATES.split(),
    )


Form = Literal["sharegpt", "alpaca"]
Row = dict[str, Any]

NO_TURNS = "conversations that do not begin with the user and end with an answer"
MIXED = "answers in a row of which only some are to be learned"
PARTLY = "conversations of which LLaMA-Factory cannot learn only a part (--unit turn can)"
MARKERS = "answers with a word in them that the template looks for"
PICTURES = "rows with <image>, <video> or <audio> in their text, at which this --template ends a training"
PARALLEL = "answers with parallel calls, which this template does not take"
UNDECIDED = "examples of which nothing tells whether they are good (KTO needs it)"
EMPTY = "answers without text"


class RowFlaw(Exception):
    """Something cannot be a row of LLaMA-Factory. Its text says why."""


class SharegptTurn(Struct, frozen=True):
    """A turn in LLaMA-Factory's format. `tag` is human, observation, gpt or function_call."""

    tag: str
    value: str
    trained: bool = False

    def plain(self) -> dict[str, str]:
        """Return the turn in sharegpt form."""
        return {"from": self.tag, "value": self.value}


def sft(example: Example, template: TemplateRules, form: Form) -> Row:
    """Return a row for supervised learning of an example. Raises RowFlaw.

    In a "conversation" every answer is learned, in a "turn" only the last one (`mask_history`).
    """
    system, turns = read_turns(example.messages, example.trained, template, form)
    answers = turns[1::2]
    if len(turns) % 2 or not answers[-1].trained:
        raise RowFlaw(NO_TURNS)
    if example.unit == "conversation" and not all(answer.trained for answer in answers):
        raise RowFlaw(PARTLY)
    return _row(example.example_id, system, turns, example.tools, template, form)


def kto(example: Example, template: TemplateRules, form: Form) -> Row:
    """Return the same row with `kto_tag`, which says whether the last answer is good. Raises RowFlaw."""
    if example.desirable is None:
        raise RowFlaw(UNDECIDED)
    system, turns = read_turns(example.messages, example.trained, template, form)
    if len(turns) % 2 or not turns[-1].trained:
        raise RowFlaw(NO_TURNS)
    if not turns[-1].value:
        raise RowFlaw(EMPTY)
    row = _row(example.example_id, system, turns, example.tools, template, form)
    return {**row, "kto_tag": example.desirable}


def dpo(pair: Pair, template: TemplateRules, form: Form) -> Row:
    """Return a row with two answers, the better one first. Raises RowFlaw."""
    system, turns = read_turns(pair.messages, (), template, form)
    if len(turns) % 2 == 0:
        raise RowFlaw(NO_TURNS)
    answers = [_answer_turn([message_of(answer)], True, template, form) for answer in (pair.chosen, pair.rejected)]
    if not all(answer.value for answer in answers):
        raise RowFlaw(EMPTY)
    return _row(pair.pair_id, system, turns, pair.tools, template, form, answers)


def read_turns(
    messages: Sequence[Message], trained: Collection[int], template: TemplateRules, form: Form
) -> tuple[str, list[SharegptTurn]]:
    """Return the system prompt of a conversation, and its turns, which alternate and begin with the user's.

    Results of parallel calls are joined, as is user text with the results before it. A system message after the
    first ones becomes user text. Only the answers in `trained` have thinking. Raises RowFlaw.
    """
    numbered = [(index, with_text_content(message)) for index, message in enumerate(messages)]
    system_count = next(
        (index for index, (_, message) in enumerate(numbered) if message["role"] != "system"), len(numbered)
    )
    turns: list[SharegptTurn] = []
    for is_answer, group in groupby(
        numbered[system_count:], key=lambda numbered_message: numbered_message[1]["role"] == "assistant"
    ):
        indexes, members = zip(*group, strict=True)
        if not is_answer:
            turns.append(_user_turn(members, template, form))
            continue
        trained_flags = {index in trained for index in indexes}
        if len(trained_flags) > 1:
            raise RowFlaw(MIXED)
        turns.append(_answer_turn(members, trained_flags.pop(), template, form))
    if not turns or turns[0].tag not in ("human", "observation"):
        raise RowFlaw(NO_TURNS)
    return "\n\n".join(message["content"] for _, message in numbered[:system_count]), turns


def _user_turn(messages: Sequence[Message], template: TemplateRules, form: Form) -> SharegptTurn:
    results = [message["content"] for message in messages if message["role"] == "tool"]
    texts = [message["content"] for message in messages if message["role"] != "tool"]
    if form == "alpaca":
        results = [f"<tool_response>\n{result}\n</tool_response>" for result in results]
        return SharegptTurn("human", "\n".join(results + texts))
    if not results:
        return SharegptTurn("human", "\n\n".join(texts))
    return SharegptTurn("observation", "\n\n".join([template.results.join(results), *texts]))


def _answer_turn(messages: Sequence[Message], trained: bool, template: TemplateRules, form: Form) -> SharegptTurn:
    text = "\n\n".join(filter(None, (message.get("content") for message in messages)))
    thinking = "\n\n".join(filter(None, (message.get("reasoning_content") for message in messages if trained)))
    calls = [call for message in messages for call in message.get("tool_calls") or ()]
    opening, closing = (word.strip() for word in template.thought)
    if closing in thinking or (opening in text and closing in text):
        raise RowFlaw(MARKERS)
    thought = f"{template.thought[0]}{thinking}{template.thought[1]}" if thinking else ""
    structured = [_call(call) for call in calls]
    if not calls or form == "alpaca" or any(call is None for call in structured):
        # A call in the history whose arguments are not a JSON object can only be shown as text.
        return SharegptTurn(
            "gpt", thought + "\n".join([*([text] if text else []), *map(_call_as_text, calls)]), trained
        )
    if len(calls) > 1 and not template.parallel:
        raise RowFlaw(PARALLEL)
    if template.call[0] in text + thinking:
        raise RowFlaw(MARKERS)
    written = msgspec.json.encode(structured).decode()
    for word in (*template.call, opening, closing, *template.placeholders):
        if word in written:  # In JSON it can only occur inside a string, where it can be escaped.
            written = written.replace(word[0], f"\\u{ord(word[0]):04x}")
    if not text and not thought:
        return SharegptTurn("function_call", written, trained)
    prefix = thought + (f"{text}\n" if text else "")
    return SharegptTurn("function_call", f"{prefix}{template.call[0]}{written}{template.call[1]}", trained)


def _call(call: dict[str, Any]) -> dict[str, Any] | None:
    arguments = arguments_of(call)
    return None if arguments is None else {"name": str(call["function"]["name"]), "arguments": arguments}


def _call_as_text(call: dict[str, Any]) -> str:
    function = cast(dict[str, Any], call.get("function") or {})
    arguments = arguments_of(call)
    shown = {
        "name": function.get("name"),
        "arguments": function.get("arguments") if arguments is None else arguments,
    }
    return f"<tool_call>\n{msgspec.json.encode(shown).decode()}\n</tool_call>"


def _row(
    row_id: str,
    system: str,
    turns: list[SharegptTurn],
    tools: list[dict[str, Any]] | None,
    template: TemplateRules,
    form: Form,
    pair: Sequence[SharegptTurn] = (),
) -> Row:
    if any(word in turn.value for word in template.placeholders for turn in (*turns, *pair)):
        raise RowFlaw(PICTURES)
    row: Row = {"id": row_id, "system": system, "tools": _tools(tools)}
    if form == "sharegpt":
        row["conversations"] = [turn.plain() for turn in turns]
        return {**row, "chosen": pair[0].plain(), "rejected": pair[1].plain()} if pair else row
    *earlier, question = (turn.value for turn in (turns if pair else turns[:-1]))
    row["history"] = [list(exchange) for exchange in zip(earlier[::2], earlier[1::2], strict=True)]
    row |= {"instruction": question, "input": ""}
    if pair:
        return {**row, "chosen": pair[0].value, "rejected": pair[1].value}
    return {**row, "output": turns[-1].value}


def _tools(tools: list[dict[str, Any]] | None) -> str:
    """Return the tools as LLaMA-Factory's JSON text.

    Its plainest template requires `properties` in each of them.
    """
    if not tools:
        return ""
    written: list[dict[str, Any]] = []
    for tool in tools:
        function = cast(dict[str, Any], tool.get("function") or tool)
        schema = cast(dict[str, Any], function.get("parameters") or {})
        parameters: dict[str, Any] = {"type": "object", **schema, "properties": schema.get("properties") or {}}
        written.append({"type": "function", "function": {**function, "parameters": parameters}})
    return msgspec.json.encode(written).decode()
