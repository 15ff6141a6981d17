"""The output formats: what a model writes is taken apart, and whatever else it writes stays what it is."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.gateway.exact.parsers import FORMATS, CompletionFormat, format_named, opens_thinking
from understudy.wire.model import ToolCall


def tool(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


TEXT, COUNT, FLAG = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TOOLS = [
    tool("Read", file_path=TEXT, limit=COUNT),
    tool("Edit", file_path=TEXT, old_string=TEXT, new_string=TEXT, replace_all=FLAG),
    tool("Todo", items={"type": "array"}, ratio={"type": "number"}, note={"anyOf": [TEXT, {"type": "null"}]}),
]


def hermes(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": {json.dumps(name)}, "arguments": {arguments}}}\n</tool_call>'


def shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def qwen3_coder(name: str, arguments: str) -> str:
    values = "".join(
        f"<parameter={key}>\n{shown(value)}\n</parameter>\n" for key, value in json.loads(arguments).items()
    )
    return f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>"


def glm(name: str, arguments: str) -> str:
    values = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{shown(value)}</arg_value>\n"
        for key, value in json.loads(arguments).items()
    )
    return f"<tool_call>{name}\n{values}</tool_call>"


def deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def llama3(name: str, arguments: str) -> str:
    return f'{{"name": {json.dumps(name)}, "parameters": {arguments}}}'


# How each family writes a call, and what stands before, between and after several.
WRITERS = [
    ("hermes", hermes, "", "\n", "<|im_end|>"),
    ("qwen3-coder", qwen3_coder, "", "\n", "<|im_end|>"),
    ("glm", glm, "\n", "\n", "<|observation|>"),
    ("deepseek", deepseek_v3, "<｜tool▁calls▁begin｜>", "\n", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"),
    ("deepseek", deepseek_v31, "<｜tool▁calls▁begin｜>", "", "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"),
    ("llama3", llama3, "<|python_tag|>", "; ", "<|eom_id|>"),
    ("llama3", llama3, "", "; ", "<|eot_id|>"),
]
BY_FORMAT = pytest.mark.parametrize("format_", FORMATS.values(), ids=FORMATS)
BY_WRITER = pytest.mark.parametrize(("name", "write", "before", "between", "after"), WRITERS)

# Text in which any format's own tags come up, whole and in pieces.
TAGS = (
    ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_call>\n{", '{"name": "Read", "arguments": {'],
    ["<function=Read>", "</function>", "<parameter=limit>", "</parameter>", "<arg_key>", "</arg_key>"],
    ["<arg_value>", "</arg_value>", "<tool_call>Read", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"],
    ["<｜tool▁sep｜>", "<｜tool▁call▁end｜>", "<|python_tag|>", '{"name": "Read", "parameters": {}}', ";", "{}"],
    ['"', "\\", "{", "}", "[", "]", ":", ",", "\n", " ", "1", "null", "<|im_end|>", "<|eot_id|>"],
)
GARBAGE = st.lists(
    st.one_of(st.sampled_from([tag for row in TAGS for tag in row]), st.text(max_size=5)), max_size=25
)

PLAIN = st.text(st.characters(exclude_characters="<>{}\n", exclude_categories=("Cs",)), min_size=1).filter(
    str.strip
)
VALUE = st.text(st.characters(exclude_categories=("Cs",)))
ARGUMENTS = st.fixed_dictionaries(
    {},
    optional={"file_path": VALUE, "old_string": VALUE, "new_string": VALUE, "replace_all": st.booleans()},
)


@BY_WRITER
@given(calls=st.lists(ARGUMENTS, min_size=1, max_size=3), content=PLAIN, reasoning=PLAIN)
def test_tool_calls_written_in_each_format_are_parsed_back(
    name: str, write: Any, before: str, between: str, after: str, calls: list[Any], content: str, reasoning: str
) -> None:
    written = [json.dumps(call, ensure_ascii=False) for call in calls]
    text = before + between.join(write("Edit", arguments) for arguments in written) + after
    if before != "" or name != "llama3":
        text = f"{content}\n{text}"
    else:
        content = ""
    parsed = format_named(name).parse(f"<think>\n{reasoning}\n</think>\n\n{text}", TOOLS)
    assert parsed.reasoning == reasoning
    assert parsed.text == content
    assert [json.loads(call.arguments) for call in parsed.tool_calls] == calls
    assert {call.name for call in parsed.tool_calls} == {"Edit"}
    if name not in ("qwen3-coder", "glm"):
        assert [call.arguments for call in parsed.tool_calls] == written


@BY_FORMAT
@given(text=VALUE.filter(lambda text: "<" not in text and not text.lstrip().startswith("{")))
def test_text_without_tool_calls_is_unchanged_by_parsing(format_: CompletionFormat, text: str) -> None:
    for end in ("", format_.turn_ends[0]):
        parsed = format_.parse(text + end, TOOLS)
        assert (parsed.text, parsed.reasoning, parsed.tool_calls) == (text, None, ())


@BY_FORMAT
@given(pieces=GARBAGE, is_open=st.booleans())
def test_parsing_any_text_never_raises_and_adds_no_text(
    format_: CompletionFormat, pieces: list[str], is_open: bool
) -> None:
    text = "".join(pieces)
    parsed = format_.parse(text, TOOLS, thinking_open=is_open)
    parsed_text = parsed.text + (parsed.reasoning or "")
    if not parsed.tool_calls:
        # All that may go is a closing mark, a thinking tag and a newline.
        for removable in ("<think>", "</think>", "\n", " ", *format_.turn_ends):
            text, parsed_text = text.replace(removable, ""), parsed_text.replace(removable, "")
        assert sorted(parsed_text) == sorted(text)
    for call in parsed.tool_calls:
        assert call.name in text
        json.loads(call.arguments)


@BY_WRITER
def test_a_truncated_tool_call_stays_text(name: str, write: Any, before: str, between: str, after: str) -> None:
    arguments = '{"file_path":"/a","limit":5}'
    whole = write("Read", arguments)
    for end in range(1, len(whole)):
        parsed = format_named(name).parse(before + whole[:end], TOOLS)
        assert (parsed.text, parsed.tool_calls) == (before + whole[:end], ()), end
    first = format_named(name).parse(before + whole + between + whole[:-1], TOOLS)
    assert [json.loads(call.arguments) for call in first.tool_calls] == [json.loads(arguments)]
    assert first.text.endswith(whole[:-1])


@BY_WRITER
@pytest.mark.parametrize(
    "tag", ["</tool_call>", "<tool_call>", "<｜tool▁call▁end｜>", "<|python_tag|>", "</think>"]
)
def test_a_format_tag_inside_an_argument_belongs_to_the_argument(
    name: str, write: Any, before: str, between: str, after: str, tag: str
) -> None:
    arguments = json.dumps({"file_path": f"a {tag} b", "new_string": f'{tag}\n"}}{tag}'}, ensure_ascii=False)
    parsed = format_named(name).parse(before + write("Edit", arguments) + after, TOOLS)
    assert [json.loads(call.arguments) for call in parsed.tool_calls] == [json.loads(arguments)]
    assert parsed.text == ""


@BY_FORMAT
@pytest.mark.parametrize(
    "unit",
    [
        *[tag for row in TAGS for tag in row],
        '<tool_call>{"',
        '<tool_call>{\\"',
        '<tool_call>{"a":{"b":[',
        '<tool_call>{"a":"<tool_call>{","',
        '<tool_call>{"name":"',
        "<tool_call><function=a><parameter=b>",
        "<tool_call><function=a><parameter=b>x</parameter>",
        "<function=Read><parameter=b>x</parameter></function>",
        "<tool_call>a<arg_key>b</arg_key><arg_value>",
        "<tool_call>a<arg_key>b</arg_key><arg_value>c</arg_value>",
        "<tool_call>a</tool_call>",
        "<｜tool▁call▁begin｜>a<｜tool▁sep｜>{",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>",
        "<think></think>",
        "<think>a</think>",
    ],
)
def test_a_megabyte_of_text_is_parsed_within_a_second(format_: CompletionFormat, unit: str) -> None:
    text = unit * ((1 << 20) // len(unit))
    ends = '</tool_call></parameter></function></tool_call></arg_value></tool_call>"}</tool_call>'
    for whole in (text, text + ends):
        started = time.process_time()
        format_.parse(whole, TOOLS)
        assert time.process_time() - started < 1.0, unit


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("a</think>\n\nb", True, "a", "b"),
        ("<think>\na\n</think>b", True, "a", "b"),
        ("\n<think>a</think>\nb", False, "a", "b"),
        ("<think>a</think></think>\n\nb", False, "a", "b"),
        ("<think>a</think>\n<think>b</think>c", False, "a\nb", "c"),
        ("<think></think>\n\nb", False, "", "b"),
        ("</think>\n\nb", False, None, "b"),
        ("a <think>b</think> c", False, None, "a <think>b</think> c"),
        ("a</think>b", False, None, "a</think>b"),
        ("<think>a", False, "a", ""),
        ("a<|im_end|>", True, "a", ""),
        ("", True, "", ""),
        ("<think>a<think>b</think>c</think>d", False, "a<think>b", "c</think>d"),
    ],
)
def test_thinking_is_split_from_the_text(text: str, is_open: bool, reasoning: str | None, content: str) -> None:
    parsed = format_named("hermes").parse(text, thinking_open=is_open)
    assert (parsed.reasoning, parsed.text) == (reasoning, content)


def test_calls_in_closed_thinking_are_ignored_but_calls_that_end_open_thinking_count() -> None:
    call = hermes("Read", "{}")
    parse = format_named("hermes").parse
    draft = parse(f"try {call} or not</think>\n\nNo.<|im_end|>", TOOLS, thinking_open=True)
    assert (draft.reasoning, draft.text, draft.tool_calls) == (f"try {call} or not", "No.", ())
    final = parse(f"try {call} no:\n{call}\n{call}<|im_end|>", TOOLS, thinking_open=True)
    assert (final.reasoning, final.text) == (f"try {call} no:", "")
    assert final.tool_calls == (ToolCall("", "Read", "{}"),) * 2
    cut = parse(f"try {call} or", TOOLS, thinking_open=True)
    assert (cut.reasoning, cut.tool_calls) == (f"try {call} or", ())


def test_opens_thinking_is_true_only_for_a_prompt_with_an_open_think_tag() -> None:
    assert opens_thinking("<|im_start|>assistant\n<think>\n")
    assert not opens_thinking("<|im_start|>assistant\n<think>\n\n</think>\n\n")
    assert not opens_thinking("<|im_start|>assistant\n")


def test_parsing_strips_only_one_end_of_turn_token() -> None:
    parsed = format_named("hermes").parse("It is `<|im_end|><|im_end|>")
    assert parsed.text == "It is `<|im_end|>"


def test_text_around_calls_is_kept() -> None:
    call = hermes("Read", "{}")
    parsed = format_named("hermes").parse(f"  one\n\n{call}\n\ntwo\n{call}\nthree<|im_end|>", TOOLS)
    assert parsed.text == "  one\ntwo\nthree"
    assert len(parsed.tool_calls) == 2


@pytest.mark.parametrize(
    "inside",
    [
        '{"name": "Read"}',
        '{"name": 5, "arguments": {}}',
        '{"name": "", "arguments": {}}',
        '{"name": "Read", "arguments": {"a": "\n"}}',
        '{"name": "Read", "arguments": {,}}',
        '{"name": "Read", "arguments": {}} and more',
        '["Read"]',
        "Read",
        "",
    ],
)
def test_a_malformed_call_stays_text(inside: str) -> None:
    text = f"<tool_call>\n{inside}\n</tool_call>"
    parsed = format_named("hermes").parse(text, TOOLS)
    assert (parsed.text, parsed.tool_calls) == (text, ())


def test_a_valid_call_after_a_malformed_one_is_parsed() -> None:
    call = hermes("Read", '{"limit":  5.0}')
    for broken in ('<tool_call>\n{"name": "Read", "argum', '<tool_call>\n{"name": "x\n', "<tool_call>"):
        parsed = format_named("hermes").parse(broken + call, TOOLS)
        assert parsed.text == broken.rstrip("\n")
        assert parsed.tool_calls == (ToolCall("", "Read", '{"limit":  5.0}'),)


@pytest.mark.parametrize(
    ("name", "key", "written", "expected"),
    [
        ("Read", "limit", "5", "5"),
        ("Read", "limit", "5.0", "5.0"),
        ("Read", "limit", "5.5", '"5.5"'),
        ("Read", "limit", "five", '"five"'),
        ("Read", "file_path", "5", '"5"'),
        ("Read", "file_path", "null", '"null"'),
        ("Read", "file_path", '"q"', '"\\"q\\""'),
        ("Edit", "replace_all", "true", "true"),
        ("Edit", "replace_all", "True", "true"),
        ("Edit", "replace_all", "yes", '"yes"'),
        ("Todo", "items", '[{"a": 1.50}]', '[{"a": 1.50}]'),
        ("Todo", "items", "[1,", '"[1,"'),
        ("Todo", "ratio", "1", "1"),
        ("Todo", "ratio", "1e3", "1e3"),
        ("Todo", "ratio", "NaN", '"NaN"'),
        ("Todo", "note", "None", "null"),
        ("Todo", "note", "5", '"5"'),
        ("Todo", "unheard_of", '{"a":1}', '{"a":1}'),
        ("Todo", "unheard_of", '"a"', '"\\"a\\""'),
        ("Unheard", "a", "b", '"b"'),
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        ("qwen3-coder", "<tool_call>\n<function={}>\n<parameter={}>\n{}\n</parameter>\n</function>\n</tool_call>"),
        ("glm", "<tool_call>{}\n<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
    ],
    ids=lambda form: form[0],
)
def test_argument_values_get_the_type_of_their_schema(
    form: tuple[str, str], name: str, key: str, written: str, expected: str
) -> None:
    parsed = format_named(form[0]).parse(form[1].format(name, key, written), TOOLS)
    assert parsed.tool_calls == (ToolCall("", name, f'{{"{key}":{expected}}}'),)


@pytest.mark.parametrize(
    "schema",
    [
        {"enum": ["5", "a"]},
        {"const": "5"},
        {"type": ["string"]},
        {"oneOf": [{"type": "string"}, {"anyOf": [{"type": "null"}]}]},
    ],
)
def test_a_string_type_is_recognised_in_every_form_of_schema(schema: dict[str, Any]) -> None:
    parsed = format_named("glm").parse(glm("t", '{"a": "5"}'), [tool("t", a=schema)])
    assert parsed.tool_calls[0].arguments == '{"a":"5"}'


@BY_WRITER
@pytest.mark.parametrize(
    "tools",
    [
        [{}],
        [{"function": None}],
        [{"function": {"name": 5, "parameters": 5}}],
        [{"function": {"name": "Read", "parameters": {"properties": [1]}}}],
        [{"function": {"name": "Read", "parameters": {"properties": {"limit": 5}}}}],
        [{"function": {"name": "Read", "parameters": {"properties": {"limit": {"type": [5], "anyOf": 5}}}}}],
    ],
)
def test_malformed_tool_definitions_do_not_break_parsing(
    name: str, write: Any, before: str, between: str, after: str, tools: list[dict[str, Any]]
) -> None:
    text = before + write("Read", '{"limit": 5}') + after
    assert all(call.name == "Read" for call in format_named(name).parse(text, tools).tool_calls)


def test_qwen3_coder_calls_to_known_tools_parse_without_the_opening_tag() -> None:
    parse = format_named("qwen3-coder").parse
    forgotten = qwen3_coder("Read", '{"limit": 5}').removeprefix("<tool_call>\n")
    assert parse(f"So:\n{forgotten}", TOOLS).tool_calls == (ToolCall("", "Read", '{"limit":5}'),)
    other = forgotten.replace("Read", "Unheard")
    assert parse(other, TOOLS).text == other


@BY_WRITER
def test_without_tools_a_tool_call_stays_text(
    name: str, write: Any, before: str, between: str, after: str
) -> None:
    text = before + write("Read", "{}")
    for tools in ([], TOOLS):
        parsed = format_named(name).parse(text, tools)
        assert (parsed.text, len(parsed.tool_calls)) == ("" if tools else text, len(tools[:1]))


def test_llama3_json_that_is_not_a_call_to_a_known_tool_stays_text() -> None:
    parse = format_named("llama3").parse
    for text in (
        '{"name": "Unheard", "parameters": {}}',
        '{"name": "Read"}',
        '{"a": 1}',
        "<|python_tag|>print(1)",
    ):
        assert (parse(text, TOOLS).text, parse(text, TOOLS).tool_calls) == (text, ())
    parsed = parse('{"name": "Read", "arguments": {"limit": 1}} done', TOOLS)
    assert (parsed.text, parsed.tool_calls) == (" done", (ToolCall("", "Read", '{"limit": 1}'),))


def test_an_unknown_tool_format_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="'gpt'; give one of deepseek, glm, hermes, llama3, qwen3-coder"):
        format_named("gpt")
