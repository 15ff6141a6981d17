"""The tiny model's tokenizer and chat template: the same tokens to the gateway, to transformers and to TRL."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.gateway.exact.codec import ChatTemplate, LocalCodec
from understudy.model.directory import TINY, directory_of
from understudy.model.hermes import SPECIAL_TOKENS
from understudy.tasks.generate.functions import modules
from understudy.train.tiny import corpus, tokenizer

from support import optional
from support.tiny import encode

optional("transformers")


Message = corpus.Message


@pytest.fixture(scope="module")
def reader(tiny_tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(tiny_tokenizer)


def ids(reader: Any, text: str) -> list[int]:
    return reader.encode(text, add_special_tokens=False)


def test_the_tokenizer_is_small_and_has_the_special_tokens_first(reader: Any) -> None:
    assert len(reader) <= tokenizer.VOCABULARY_SIZE
    assert [reader.convert_tokens_to_ids(token) for token in SPECIAL_TOKENS] == list(range(len(SPECIAL_TOKENS)))
    assert (reader.eos_token, reader.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert reader.model_max_length == tokenizer.CONTEXT_TOKENS


def test_the_shipped_model_has_the_generated_template_and_special_tokens(tiny_tokenizer: Path) -> None:
    shipped = directory_of(TINY)
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        assert (shipped / name).read_bytes() == (tiny_tokenizer / name).read_bytes(), name
    ours, written = (
        json.loads((directory / "tokenizer.json").read_text()) for directory in (shipped, tiny_tokenizer)
    )
    assert ours["added_tokens"] == written["added_tokens"]


AROUND = [
    ("def ", "("),
    ("(", ","),
    (", ", ")"),
    ("`", "`"),
    ("/workspace/lib/", ".py"),
    ("\n    return ", " + 2"),
]
AROUND += [('"return len(', ')"'), ("        ", "[0]\n"), ("2\tdef ", "():"), ("Return the sum of ", " and it.")]


def test_a_name_has_the_same_tokens_in_every_context(reader: Any) -> None:
    """Names that the tokenizer never saw: copying one is copying its tokens."""
    for module in itertools.islice(modules(7, "held-out"), 20):
        for name in (function.name for function in module.functions):
            for before, after in AROUND:
                whole = ids(reader, before + name + after)
                assert whole == [*ids(reader, before), *ids(reader, name), *ids(reader, after)], (before, name)


@given(st.text())
def test_decoding_inverts_encoding(reader: Any, text: str) -> None:
    assert reader.decode(ids(reader, text)) == text


PLAIN = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
CALLS = [
    {"type": "function", "id": str(number), "function": {"name": "Read", "arguments": f'{{ "a":{number}}}'}}
    for number in (1, 2)
]
CONVERSATIONS: dict[str, list[Message]] = {
    "a question": PLAIN,
    "no system": PLAIN[1:],
    "two calls, two results": [
        *PLAIN,
        {"role": "assistant", "content": "é", "tool_calls": CALLS},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "tool", "content": "", "tool_call_id": "2"},
    ],
    "a call, then words": [
        *PLAIN,
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "content": "one", "tool_call_id": "1"},
        {"role": "assistant", "content": "So.\n"},
        {"role": "user", "content": "Go on."},
    ],
    **{
        f"of the corpus, {behaviour}": next(corpus.conversations(3, "held-out", {behaviour: 1.0}))
        for behaviour in corpus.BEHAVIOURS
    },
}


@pytest.mark.parametrize("generation_prompt", [False, True])
@pytest.mark.parametrize("tools", [[], corpus.tool_definitions()], ids=["no tools", "tools"])
@pytest.mark.parametrize("name", CONVERSATIONS)
async def test_the_gateway_and_transformers_render_and_encode_the_same(
    name: str, tools: list[dict[str, Any]], generation_prompt: bool, tiny_tokenizer: Path, reader: Any
) -> None:
    messages = CONVERSATIONS[name]
    transformers_text = reader.apply_chat_template(
        messages, tools=tools or None, add_generation_prompt=generation_prompt, tokenize=False
    )
    ours = ChatTemplate({"default": tokenizer.chat_template()}, {}, str).render(
        messages, tools, {"add_generation_prompt": generation_prompt}
    )
    assert ours == transformers_text
    codec = LocalCodec.load(str(tiny_tokenizer))
    rendered = await codec.render(messages, tools, generation_prompt=generation_prompt)
    assert rendered == ids(reader, transformers_text)
    assert await codec.decode(rendered) == transformers_text
    assert await codec.context_length() == tokenizer.CONTEXT_TOKENS


def test_object_arguments_encode_like_the_corpus_s_strings(reader: Any) -> None:
    """Exports have them so."""
    (written,) = itertools.islice(corpus.conversations(3, "train", {"solves": 1.0}), 1)
    parsed: list[Message] = []
    for message in written:
        calls = [
            {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
            for call in message.get("tool_calls", ())
        ]
        parsed.append({**message, "tool_calls": calls} if calls else message)
    assert encode(reader, parsed) == encode(reader, written)


@pytest.mark.parametrize(
    "name", [name for name in CONVERSATIONS if "a question" not in name and "no sys" not in name]
)
def test_the_assistant_mask_covers_each_turn_to_its_end_token(name: str, reader: Any) -> None:
    messages = CONVERSATIONS[name]
    tokens, assistant_mask = encode(reader, messages)
    turns = [
        reader.decode([token for token, _ in pairs])
        for is_assistant, pairs in itertools.groupby(
            zip(tokens, assistant_mask, strict=True), key=lambda pair: pair[1]
        )
        if is_assistant
    ]
    functions = [[call["function"] for call in message.get("tool_calls", ())] for message in messages]
    calls = [
        "".join(
            f'<tool_call>{{"name": "{one["name"]}", "arguments": {one["arguments"]}}}</tool_call>' for one in some
        )
        for some in functions
    ]
    written = [
        f"{message['content']}{called}<|im_end|>"
        for message, called in zip(messages, calls, strict=True)
        if message["role"] == "assistant"
    ]
    assert turns == written


def test_trl_accepts_the_chat_template_unchanged(reader: Any) -> None:
    """It would put another in its place where new messages changed old ones, or no end was learned."""
    utils: Any = pytest.importorskip("trl.chat_template_utils")
    assert utils.has_generation_markers(reader.chat_template)
    assert utils.is_chat_template_prefix_preserving(reader)
    assert utils.is_chat_template_stop_token_trained(reader)
    assert utils.supports_tool_calling(reader)
