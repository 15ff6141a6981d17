"""Conversations as token ids: what a chat template makes of them, whatever style it is written in."""

from __future__ import annotations

import asyncio
import json
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.codec import LocalCodec, ServerCodec
from understudy.gateway.exact.parsers import format_named
from understudy.gateway.exact.vocabulary import TokenizerVocabulary
from understudy.model.process import start_server

ASSETS = resources.files("understudy.model").joinpath("assets")
SHIPPED = ASSETS.joinpath("tokenizer.json").read_text("utf-8")

QWEN3 = """\
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.content is string %}
        {%- set content = message.content %}
    {%- else %}
        {%- set content = '' %}
    {%- endif %}
    {%- if message.role == "assistant" %}
        {%- set reasoning_content = message.reasoning_content if message.reasoning_content is string else '' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- generation %}
        {{- content.lstrip('\\n') }}
        {%- for tool_call in message.tool_calls %}
            {%- if (loop.first and content) or (not loop.first) %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = tool_call.function %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {%- if function.arguments is string %}
                {{- function.arguments }}
            {%- else %}
                {{- function.arguments | tojson }}
            {%- endif %}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {%- endgeneration %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""

GLM = """\
[gMASK]<sop>
{%- if tools -%}
<|system|>
{% for tool in tools %}
{{ tool | tojson(ensure_ascii=False) }}
{% endfor %}
{%- endif -%}
{% for m in messages %}
{%- if m.role == 'assistant' -%}
<|assistant|>
{{- '\\n<think>' + m.reasoning_content.strip() + '</think>' if m.reasoning_content else '\\n<think></think>' }}
{%- if m.content.strip() %}{{ '\\n' + m.content.strip() }}{% endif %}
{%- for tc in m.tool_calls or [] %}
{{ '\\n<tool_call>' + tc.function.name }}
{% for k, v in tc.function.arguments.items() %}
<arg_key>{{ k }}</arg_key>
<arg_value>{{ v | tojson(ensure_ascii=False) if v is not string else v }}</arg_value>
{% endfor %}
</tool_call>
{%- endfor %}
{%- elif m.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' %}{{ '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + m.content + '\\n</tool_response>' }}
{%- else -%}
<|{{ m.role }}|>
{{ m.content }}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token }}
{%- if messages[0].role == 'system' %}
    {%- set system_message = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = '' %}
{%- endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' + system_message }}
{%- for t in tools or [] %}
    {{- '\\n\\n' }}
    {{- t | tojson(indent=4) }}
{%- endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {%- if message.tool_calls | length != 1 %}
            {{- raise_exception('This model only supports single tool-calls at once!') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
        {{- '{"name": "' + call.name + '", "parameters": ' + (call.arguments | tojson) + '}<|eot_id|>' }}
    {%- elif message.role == 'tool' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {{- {'output': message.content} | tojson }}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
        {{- message.content | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

# The first DeepSeek templates show calls only where there is no text, and glue the string of the arguments.
DEEPSEEK = """\
{{- bos_token }}
{%- for m in messages %}
    {%- if m.role == 'assistant' and m.content is none %}
        {{- '<｜Assistant｜>' }}
        {%- for call in m.tool_calls %}
            {{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + call.function.name + '\\n```json\\n' }}
            {{- call.function.arguments + '\\n```<｜tool▁call▁end｜>' }}
        {%- endfor %}
        {{- eos_token }}
    {%- elif m.role == 'assistant' %}
        {{- '<｜Assistant｜>' + m.content + eos_token }}
    {%- else %}
        {{- '<｜User｜>' + m.content }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}
"""

SPECIALS = {
    QWEN3: [],
    GLM: ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"],
    LLAMA3: ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    DEEPSEEK: [
        *("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"),
        *("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    ],
}
STYLES = {"qwen3": QWEN3, "glm": GLM, "llama3": LLAMA3, "deepseek": DEEPSEEK}


def model_files(folder: Path, template: str, **config: Any) -> Path:
    """A model's directory, but for the weights: the shipped vocabulary with the tokens that the template needs."""
    folder.mkdir(exist_ok=True)
    tokenizer = Tokenizer.from_str(SHIPPED)
    # Not all of what steers a model is declared special: DeepSeek's turns are not.
    tokens = [
        AddedToken(token, special="｜" not in token, normalized=False) for token in SPECIALS.get(template, [])
    ]
    tokenizer.add_tokens(tokens)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), "utf-8")
    settings = {
        "bos_token": None,
        "eos_token": {"__type": "AddedToken", "content": "<｜end▁of▁sentence｜>"},
        "model_max_length": 10**30,
    }
    if template == LLAMA3:
        settings["bos_token"] = "<|begin_of_text|>"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | config), "utf-8")
    (folder / "chat_template.jinja").write_text(template, "utf-8")
    return folder


def codec_of(folder: Path, template: str, **config: Any) -> LocalCodec:
    return LocalCodec.load(str(model_files(folder, template, **config)))


def user(text: Any) -> dict[str, Any]:
    return {"role": "user", "content": text}


def calling(arguments: str, text: str | None = None, reasoning: str | None = None) -> dict[str, Any]:
    call = {"id": "call_1", "type": "function", "function": {"name": "Read", "arguments": arguments}}
    return {"role": "assistant", "content": text, "reasoning": reasoning, "tool_calls": [call]}


RESULT = {"role": "tool", "tool_call_id": "call_1", "content": "é < 3"}
TOOL = {"type": "function", "function": {"name": "Read", "description": "é", "parameters": {"type": "object"}}}
ARGUMENTS = '{"file_path":  "/a é", "limit": 5.0}'


async def text_of(codec: LocalCodec, messages: list[dict[str, Any]], **more: Any) -> str:
    return await codec.decode(await codec.render(messages, more.pop("tools", []), **more))


async def test_a_template_with_string_arguments_renders_the_sampled_arguments_verbatim(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, QWEN3)
    messages = [user("a"), calling(ARGUMENTS, "Now.", "hm"), RESULT]
    assert await text_of(codec, messages) == (
        "<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\n<think>\nhm\n</think>\n\nNow.\n"
        f'<tool_call>\n{{"name": "Read", "arguments": {ARGUMENTS}}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\né < 3\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_template_with_object_arguments_gets_parsed_arguments(tmp_path: Path) -> None:
    glm = codec_of(tmp_path / "glm", GLM)
    messages = [user("a"), calling(ARGUMENTS, None, "hm"), RESULT]
    assert await text_of(glm, messages, tools=[TOOL]) == (
        '[gMASK]<sop><|system|>\n{"type": "function", "function": {"name": "Read", "description": "é", '
        '"parameters": {"type": "object"}}}\n'
        "<|user|>\na<|assistant|>\n<think>hm</think>\n<tool_call>Read\n<arg_key>file_path</arg_key>\n"
        "<arg_value>/a é</arg_value>\n<arg_key>limit</arg_key>\n<arg_value>5.0</arg_value>\n</tool_call>"
        "<|observation|>\n<tool_response>\né < 3\n</tool_response><|assistant|>"
    )
    llama = codec_of(tmp_path / "llama", LLAMA3)
    rendered = await text_of(llama, messages)
    assert rendered.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n<|eot_id|>")
    assert '{"name": "Read", "parameters": {"file_path": "/a é", "limit": 5.0}}<|eot_id|>' in rendered


async def test_empty_text_beside_a_tool_call_is_passed_to_the_template_as_none(tmp_path: Path) -> None:
    rendered = await text_of(codec_of(tmp_path, DEEPSEEK), [user("a"), calling(ARGUMENTS, ""), user("b")])
    assert rendered == (
        "<｜User｜>a<｜Assistant｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>Read\n```json\n"
        f"{ARGUMENTS}\n```<｜tool▁call▁end｜><｜end▁of▁sentence｜><｜User｜>b<｜Assistant｜>"
    )


@pytest.mark.parametrize(("style", "name"), [("qwen3", "hermes"), ("glm", "glm"), ("llama3", "llama3")])
async def test_a_rendered_tool_call_is_parsed_back_by_its_tool_format(
    tmp_path: Path, style: str, name: str
) -> None:
    codec = codec_of(tmp_path, STYLES[style])
    turn = calling('{"file_path": "/a </think> é", "items": [1, {"a": null}]}', "", "hm")
    before = await codec.render([user("a")], [TOOL])
    after = await codec.render([user("a"), turn], [TOOL], generation_prompt=False)
    assert after[: len(before)] == before
    parsed = format_named(name).parse(await codec.decode(after[len(before) :]), [TOOL])
    call = parsed.tool_calls[0]
    assert (call.name, json.loads(call.arguments)) == (
        "Read",
        json.loads(turn["tool_calls"][0]["function"]["arguments"]),
    )
    assert parsed.reasoning == (None if style == "llama3" else "hm")


@pytest.mark.parametrize("style", STYLES)
async def test_text_that_spells_a_special_token_is_encoded_as_plain_text(tmp_path: Path, style: str) -> None:
    codec = codec_of(tmp_path, STYLES[style])
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    plain = await codec.render([user("a")], [TOOL])
    for token in added.values():
        text = f"a{token.content}\ue000{token.content[:1]}\ue000{token.content[1:]}"
        ids = await codec.render([user(text)], [{**TOOL, "note": text}])
        assert text in await codec.decode(ids)
        # What neither is declared special nor stands in the template does not steer the model.
        if token.special or token.content in STYLES[style]:
            assert [id_ for id_ in ids if id_ in added] == [id_ for id_ in plain if id_ in added]


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory: pytest.TempPathFactory) -> LocalCodec:
    return codec_of(tmp_path_factory.mktemp("qwen3"), QWEN3)


@given(
    pieces=st.lists(st.one_of(st.sampled_from(["<|im_end|>", "<think>", "<|im_", "end|>", "\ue000"]), st.text()))
)
def test_any_message_text_is_rendered_unchanged(qwen3: LocalCodec, pieces: list[str]) -> None:
    text = "".join(pieces)
    rendered = asyncio.run(text_of(qwen3, [user(text)]))
    assert rendered == f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


PLAIN = Tokenizer.from_str(SHIPPED)
VOCABULARY = TokenizerVocabulary(SHIPPED, "")


@given(st.lists(st.one_of(st.sampled_from(["<|im_end|>", "\n", " ", "a", "é"]), st.text()), max_size=8))
def test_encoding_in_pieces_gives_the_same_ids_as_encoding_the_whole_text(pieces: list[str]) -> None:
    text = "".join(pieces)
    escaped = text.replace("\ue000", "\ue000\ue000")
    assert asyncio.run(VOCABULARY.encode(escaped)) == PLAIN.encode(text, add_special_tokens=False).ids


async def test_a_tokenizer_with_context_dependent_tokens_encodes_the_whole_text(tmp_path: Path) -> None:
    definition = json.loads(SHIPPED)
    definition["added_tokens"][1]["rstrip"] = True
    definition["truncation"] = {"max_length": 3, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    model_files(tmp_path, QWEN3)
    (tmp_path / "tokenizer.json").write_text(json.dumps(definition), "utf-8")
    codec = LocalCodec.load(str(tmp_path))
    prompt = "<|im_start|>user\nhi there<|im_end|>\n<|im_start|>assistant\n"
    definition["truncation"] = None
    expected = Tokenizer.from_str(json.dumps(definition)).encode(prompt, add_special_tokens=False).ids
    assert await codec.render([user("hi there")], []) == expected


async def test_arguments_that_are_not_a_json_object_are_passed_as_a_string_or_refused(tmp_path: Path) -> None:
    llama = codec_of(tmp_path / "llama", LLAMA3)
    assert '"parameters": "{\\"a\\":"}' in await text_of(llama, [user("a"), calling('{"a":')])
    with pytest.raises(BackendError, match="the chat template rejected") as error:
        await codec_of(tmp_path / "glm", GLM).render([user("a"), calling('{"a":')], [])
    assert error.value.status == 400


async def test_an_exception_raised_by_a_chat_template_is_reported_with_its_message(tmp_path: Path) -> None:
    turn = calling("{}")
    turn["tool_calls"] *= 2
    with pytest.raises(BackendError, match="only supports single tool-calls") as error:
        await codec_of(tmp_path, LLAMA3).render([user("a"), turn], [])
    assert error.value.status == 400


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[9].content.x }}",
        "{{ 1 / 0 }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.pop() }}",
        "{{ 'a' + 1 }}",
    ],
)
async def test_an_error_inside_a_chat_template_is_a_backend_error(tmp_path: Path, template: str) -> None:
    with pytest.raises(BackendError, match="the chat template rejected"):
        await codec_of(tmp_path, template).render([user("a")], [])


async def test_text_parts_are_joined_and_an_image_becomes_a_placeholder(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, QWEN3)
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert await codec.render([user(parts)], []) == await codec.render([user("a\nb")], [])
    image = {"type": "image_url", "image_url": {"url": "data:"}}
    expected = await codec.render([user("a\n[image: this model reads text only]")], [])
    assert await codec.render([user([parts[0], image])], []) == expected
    with pytest.raises(BackendError, match="'input_audio'"):
        await codec.render([user([{"type": "input_audio", "input_audio": {}}])], [])


async def test_a_lone_surrogate_is_rendered_escaped(tmp_path: Path) -> None:
    assert "a\\ud800b" in await text_of(codec_of(tmp_path, QWEN3), [user("a\ud800b")])


async def test_generation_prompt_and_template_arguments_change_the_end_of_the_prompt(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, QWEN3)
    without = await codec.render([user("a")], [], generation_prompt=False)
    with_prompt = await codec.render([user("a")], [])
    closed = await codec.render([user("a")], [], template_args={"enable_thinking": False})
    assert with_prompt[: len(without)] == without
    assert await codec.decode(with_prompt[len(without) :]) == "<|im_start|>assistant\n"
    assert await codec.decode(closed[len(with_prompt) :]) == "<think>\n\n</think>\n\n"


async def test_decoding_an_unknown_token_id_is_a_backend_error(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, QWEN3)
    for id_ in (-1, 10**6, 10**12):
        with pytest.raises(BackendError, match=f"invalid token id {id_}"):
            await codec.decode([5, id_])


@pytest.mark.parametrize(
    ("config", "tokenizer_config", "expected"),
    [
        ({"max_position_embeddings": 40960}, {"model_max_length": 131072}, 40960),
        ({"text_config": {"max_position_embeddings": 8}}, {}, 8),
        ({}, {"model_max_length": 131072}, 131072),
        ({}, {}, None),
        ({"max_position_embeddings": "many"}, {"model_max_length": 1e30}, None),
    ],
)
async def test_the_context_length_is_read_from_model_or_tokenizer_config(
    tmp_path: Path, config: dict[str, Any], tokenizer_config: dict[str, Any], expected: int | None
) -> None:
    model_files(tmp_path, QWEN3, **tokenizer_config)
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    assert await LocalCodec.load(str(tmp_path)).context_length() == expected


async def test_chat_templates_are_read_from_files_or_the_tokenizer_config(tmp_path: Path) -> None:
    folder = model_files(
        tmp_path,
        QWEN3,
        chat_template=[{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}],
    )
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("F", "utf-8")
    file = LocalCodec.load(str(folder))
    assert await text_of(file, [user("a")], tools=[TOOL]) == "F"
    assert "a" in await text_of(file, [user("a")])
    (folder / "additional_chat_templates" / "tool_use.jinja").unlink()
    (folder / "chat_template.jinja").unlink()
    named = LocalCodec.load(str(folder))
    assert await text_of(named, [user("a")], tools=[TOOL]) == "T"
    assert await text_of(named, [user("a")]) == "D"


@pytest.mark.parametrize(
    ("file", "content", "match"),
    [
        ("tokenizer.json", None, "has no tokenizer.json; give the directory of a Hugging Face model"),
        ("tokenizer.json", "{", "invalid tokenizer.json"),
        ("tokenizer.json", '{"added_tokens": 5}', "invalid tokenizer.json"),
        ("tokenizer_config.json", "[]", "tokenizer_config.json: invalid JSON object"),
        ("chat_template.jinja", "a\n{% if %}", r"/.*: invalid chat template 'default': .* in line 2; expected"),
        ("chat_template.jinja", None, "has no chat template"),
    ],
)
def test_invalid_or_missing_tokenizer_files_are_config_errors(
    tmp_path: Path, file: str, content: str | None, match: str
) -> None:
    model_files(tmp_path, QWEN3)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content, "utf-8")
    with pytest.raises(ConfigError, match=match):
        LocalCodec.load(str(tmp_path))


def test_an_unknown_model_name_is_a_config_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name in (str(tmp_path / "nothing"), "not/a/model", "a/b"):
        with pytest.raises(ConfigError, match="neither a directory nor a model"):
            LocalCodec.load(name)


async def test_encoding_a_long_conversation_does_not_block_the_event_loop_and_is_cached(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, QWEN3)
    turns = 0

    async def turn() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    turning = asyncio.create_task(turn())
    messages = [user(f"{n} some words that are not the same, and more of them") for n in range(4000)]
    await codec.render(messages, [])
    assert turns > 20
    turns = 0
    await codec.render([*messages, user("b")], [])
    assert turns == 0  # what is new is so little that it need not be encoded elsewhere
    turning.cancel()


async def test_the_server_codec_matches_the_local_codec() -> None:
    async with start_server("idle") as server:
        client = HttpClient(f"{server.url}/v1/")
        codec = ServerCodec(client, server.model)
        local = LocalCodec.load(str(ASSETS))
        messages = [user("a <|im_end|>"), calling(ARGUMENTS, "", "hm"), RESULT]
        ids = await codec.render(messages, [TOOL])
        assert ids == await local.render(messages, [TOOL])
        assert await codec.decode(ids) == await local.decode(ids)
        bare = await codec.render(
            [user("a")], [], generation_prompt=False, template_args={"enable_thinking": False}
        )
        assert bare == await local.render([user("a")], [], generation_prompt=False)
        assert await codec.context_length() == await local.context_length() == 200_000
        fresh = ServerCodec(client, server.model)
        assert await fresh.context_length() == 200_000
        with pytest.raises(BackendError):
            await codec.decode([10**9])
        await client.close()
