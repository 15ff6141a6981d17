"""The embedded model's text: tokenizer, chat template, completions, and the laws between them."""

from __future__ import annotations

import json
from importlib import resources

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import BackendError
from understudy.model.hermes import SPECIAL_TOKENS, CompletionSegment, parse_completion
from understudy.model.protocol import (
    FunctionCall,
    MessageToolCall,
    ModelChatRequest,
    ModelMessage,
    ModelTool,
    ModelToolFunction,
)
from understudy.model.scripted.model import complete, encode_action
from understudy.model.scripted.oracle import Action, ActionCall, ChatTurn
from understudy.model.scripted.tokenizer import ScriptedTokenizer, mark, render, scripted_tokenizer, unmark

from support import example_count

TOKENIZER = scripted_tokenizer()

# Text that people write, mixed with what an attacker, or someone editing this very file, would write.
HOSTILE = (
    *SPECIAL_TOKENS,
    "\ue000",
    "<",
    "|im_end|>",
    "<|im_start|>assistant\n",
    "\n\n",
    " \n",
    "\r\n",
    "é",
    "👩‍💻",
    "\0",
)
text = st.lists(
    st.one_of(st.text(st.characters(exclude_categories=("Cs",)), max_size=12), st.sampled_from(HOSTILE)),
    max_size=8,
).map("".join)
names = st.sampled_from(["Read", "Edit", "Bash", 'we"ird\n', "<tool_call>"])
values = st.recursive(
    st.none() | st.booleans() | st.integers() | text, lambda inner: st.dictionaries(text, inner, max_size=3)
)
arguments = st.dictionaries(text, values, max_size=3).map(lambda value: json.dumps(value, ensure_ascii=False))
calls = st.builds(ActionCall, names, arguments)
actions = st.builds(
    Action, content=text, tool_calls=st.lists(calls, max_size=3).map(tuple), reasoning=st.none() | text
)
messages = st.one_of(
    st.builds(ModelMessage, st.sampled_from(["system", "user", "tool"]), text),
    st.builds(
        ModelMessage,
        st.just("assistant"),
        text,
        reasoning=st.none() | text,
        tool_calls=st.lists(st.builds(MessageToolCall, st.builds(FunctionCall, names, arguments)), max_size=2),
    ),
)
TOOLS = [ModelTool(function=ModelToolFunction("Read", "Reads <|im_end|> files", {"type": "object"}))]
conversations = st.tuples(st.lists(messages, max_size=5), st.sampled_from([None, TOOLS]))


def as_message(segments: list[CompletionSegment]) -> ModelMessage:
    """The assistant message a chat client would send back."""
    texts = {segment.kind: segment.text for segment in segments if segment.kind in ("reasoning", "content")}
    tool_calls = [
        MessageToolCall(FunctionCall(segment.name, segment.text))
        for segment in segments
        if segment.kind == "tool_call"
    ]
    return ModelMessage("assistant", texts.get("content"), reasoning=texts.get("reasoning"), tool_calls=tool_calls)


@given(text)
def test_decoding_inverts_encoding(string: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(string)) == string
    assert TOKENIZER.decode(TOKENIZER.encode_marked(mark(string))[0]) == string


@given(text)
def test_marked_text_has_no_special_tokens_and_unmark_restores_it(string: str) -> None:
    marked = mark(string)
    assert unmark(marked) == string
    assert not any(token in marked for token in SPECIAL_TOKENS)
    assert not set(TOKENIZER.encode_marked(marked)[0]) & set(TOKENIZER.special_texts)


def test_special_tokens_have_the_first_ids() -> None:
    assert [TOKENIZER.encode(token) for token in SPECIAL_TOKENS] == [[id_] for id_ in range(len(SPECIAL_TOKENS))]
    assert len(TOKENIZER.token_bytes) == 8192


def test_the_tokenizer_file_gives_the_same_ids_with_the_tokenizers_library() -> None:
    definition = resources.files("understudy.model").joinpath("assets/tokenizer.json").read_text("utf-8")
    other = tokenizers.Tokenizer.from_str(definition)
    for string in ("<|im_start|>user\nhé, def f(x):\n        return 1<|im_end|>\n", "a <think>b</think> \t\n c"):
        assert other.encode(string, add_special_tokens=False).ids == TOKENIZER.encode(string)
        assert other.decode(TOKENIZER.encode(string), skip_special_tokens=False) == string


@pytest.mark.parametrize("string", ["\ud800", "fine until here \udfff no more"])
def test_encoding_a_lone_surrogate_is_a_backend_error(string: str) -> None:
    with pytest.raises(BackendError, match="lone surrogate at character") as caught:
        TOKENIZER.encode(string)
    assert caught.value.status == 400


@pytest.mark.parametrize("ids", [[8192], [-1], [1, 10**9]])
def test_an_id_outside_the_vocabulary_is_refused(ids: list[int]) -> None:
    with pytest.raises(BackendError, match="0 to 8191"):
        TOKENIZER.decode(ids)


def test_only_the_new_part_of_a_growing_prompt_is_encoded() -> None:
    tokenizer = ScriptedTokenizer(
        resources.files("understudy.model").joinpath("assets/tokenizer.json").read_text("utf-8")
    )
    history = [ModelMessage("system", "You help."), ModelMessage("user", "Do it.")]
    first, reused = tokenizer.encode_marked(render(history, TOOLS))
    assert reused == 0
    assert tokenizer.encode_marked(render(history, TOOLS)) == (first, len(first))
    longer, reused = tokenizer.encode_marked(render([*history, ModelMessage("assistant", "Done?")], TOOLS))
    assert longer[: len(first)] == first
    assert reused == len(first)


@given(conversations, text)
def test_message_text_cannot_start_a_turn(
    conversation: tuple[list[ModelMessage], list[ModelTool] | None], string: str
) -> None:
    history, tools = conversation
    plain, _ = TOKENIZER.encode_marked(render([*history, ModelMessage("user", "x")], tools))
    hostile, _ = TOKENIZER.encode_marked(render([*history, ModelMessage("user", string)], tools))
    start = TOKENIZER.special_ids["<|im_start|>"]
    assert hostile.count(start) == plain.count(start)


@settings(max_examples=example_count(200))
@given(
    conversations, actions, st.lists(st.builds(ModelMessage, st.sampled_from(["tool", "user"]), text), max_size=3)
)
def test_a_completion_is_a_prefix_of_the_next_prompt(
    conversation: tuple[list[ModelMessage], list[ModelTool] | None], action: Action, results: list[ModelMessage]
) -> None:
    history, tools = conversation
    prompt, _ = TOKENIZER.encode_marked(render(history, tools))
    completion = encode_action(TOKENIZER, action)
    assistant = as_message(parse_completion(TOKENIZER, completion))
    after, _ = TOKENIZER.encode_marked(render([*history, assistant, *results], tools))
    assert after[: len(prompt) + len(completion)] == prompt + completion


@given(actions)
def test_parsing_a_completion_restores_the_encoded_action(action: Action) -> None:
    ids = encode_action(TOKENIZER, action)
    segments = parse_completion(TOKENIZER, ids)
    message = as_message(segments)
    assert [id_ for segment in segments for id_ in segment.ids] == ids
    assert message.text == action.content
    assert message.reasoning == action.reasoning
    parsed = [ActionCall(call.function.name, str(call.function.arguments)) for call in message.tool_calls or []]
    assert parsed == list(action.tool_calls)


@given(actions, st.integers(0, 200))
def test_parsing_a_truncated_completion_keeps_all_its_tokens(action: Action, limit: int) -> None:
    ids = encode_action(TOKENIZER, action)[:limit]
    for tools in (True, False):
        assert [id_ for segment in parse_completion(TOKENIZER, ids, tools=tools) for id_ in segment.ids] == ids


@given(st.lists(st.integers(0, 8191), max_size=60))
def test_parsing_any_tokens_keeps_all_of_them(ids: list[int]) -> None:
    assert [id_ for segment in parse_completion(TOKENIZER, ids) for id_ in segment.ids] == ids


class Says:
    """A policy for the tests: it says one thing."""

    name = "says"

    def __init__(self, action: Action) -> None:
        self._action = action

    def act(self, request: ChatTurn) -> Action:
        return self._action


@given(text, st.lists(text.filter(bool), max_size=3))
def test_a_stop_string_ends_the_text_before_it(answer: str, stops: list[str]) -> None:
    request = ModelChatRequest([ModelMessage("user", "hi")], stop=stops)
    completion = complete(Says(Action(answer)), TOKENIZER, request, 10_000)
    content = "".join(segment.text for segment in completion.segments)
    whole = encode_action(TOKENIZER, Action(answer))
    assert completion.ids == whole[: len(completion.ids)]
    assert answer.startswith(content)
    if completion.stop_reason is None:
        assert content == answer and not any(stop in answer for stop in stops)
    else:
        assert answer[len(content) :].startswith(completion.stop_reason)
        assert (content + completion.stop_reason) in TOKENIZER.decode(completion.ids)


def test_a_truncated_tool_call_is_content_as_in_vllm() -> None:
    ids = encode_action(TOKENIZER, Action("Well.", (ActionCall("Read", '{"file_path": "/a"}'),)))[:-4]
    (segment,) = parse_completion(TOKENIZER, ids)
    assert segment.kind == "content"
    assert segment.text.startswith('Well.<tool_call>\n{"name": "Read"')


def test_parsed_arguments_keep_the_sampled_bytes() -> None:
    raw = '{"b":1 ,  "a": 5000.0, "u": "\\u00e9</tool_call>"}'
    ids = encode_action(TOKENIZER, Action("", (ActionCall("Edit", raw),)))
    assert as_message(parse_completion(TOKENIZER, ids)).tool_calls == [MessageToolCall(FunctionCall("Edit", raw))]
