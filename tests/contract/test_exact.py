"""Token-in-token-out against servers on real sockets: every prompt begins with the tokens that were sampled."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Callable
from itertools import pairwise, permutations
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from understudy import model as model_package
from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.backend import ExactBackend
from understudy.gateway.exact.codec import LocalCodec, ServerCodec
from understudy.gateway.exact.parsers import format_named
from understudy.gateway.exact.token_servers import SERVERS
from understudy.gateway.exact.tree import TokenForest
from understudy.model.process import start_server
from understudy.types import PolicySpan
from understudy.wire.errors import ContextOverflow
from understudy.wire.model import ChatRequest, ConversationHandle, Generation

from fakes.claude_tools import converse, tool_definitions
from fakes.tokens import FakeTokens, Refusal, Sample, Step

ASSETS = Path(model_package.__file__ or "").parent / "assets"
TOKENIZER = (ASSETS / "tokenizer.json").read_text()
TEMPLATE = (ASSETS / "chat_template.jinja").read_text()
TOOLS = tool_definitions("Read", "Edit", "Bash")

Message = dict[str, Any]

# As Qwen 3 has it: thinking is shown since the last query only, and a last turn always has a block for it.
QWEN3 = """\
{%- set ns = namespace(query=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.query = loop.index0 %}{% endif %}{% endfor %}
{%- if tools %}{{- '<|im_start|>system\\n' }}{% for tool in tools %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if loop.index0 > ns.query and (loop.last or message.reasoning_content) %}
{{- '<think>\\n' + (message.reasoning_content or '') + '\\n</think>\\n\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments | tojson + '}\\n</tool_call>' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
{%- endif %}"""

# As GLM 4 has it: nothing ends a turn but the marker of the next one.
GLM = """\
{%- for message in messages %}
{%- if message.role == 'assistant' %}{{- '<|assistant|>\\n' }}
{%- if message.reasoning_content %}{{- '<think>' + message.reasoning_content + '</think>\\n' }}{% endif %}
{{- message.content or '' }}
{%- for call in message.tool_calls or [] %}
{{- '\\n<tool_call>' + call.function.name + '\\n' }}
{%- for key, value in call.function.arguments.items() %}
{{- '<arg_key>' + key + '</arg_key>\\n<arg_value>' + value + '</arg_value>\\n' }}{% endfor %}
{{- '</tool_call>' }}{% endfor %}
{%- elif message.role == 'tool' %}
{%- if loop.first or loop.previtem.role != 'tool' %}{{- '<|observation|>' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- else %}{{- '<|' + message.role + '|>\\n' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>\\n' }}{% endif %}"""


def model(root: Path, template: str = TEMPLATE, *specials: str, context: int | None = None) -> LocalCodec:
    """The codec of a model with our vocabulary, more special tokens and another template."""
    definition = json.loads(TOKENIZER)
    vocabulary_size = len(definition["model"]["vocab"])
    for number, token in enumerate(specials):
        definition["added_tokens"].append(
            definition["added_tokens"][0] | {"id": vocabulary_size + number, "content": token}
        )
    root.mkdir(exist_ok=True)
    (root / "tokenizer.json").write_text(json.dumps(definition))
    (root / "chat_template.jinja").write_text(template)
    (root / "config.json").write_text(json.dumps({"max_position_embeddings": context} if context else {}))
    return LocalCodec.load(str(root))


class Talk:
    """An agent's side of one branch: it sends the conversation back after `echo` has rewritten each answer."""

    def __init__(self, backend: ExactBackend, *, tools: bool = True) -> None:
        self.backend = backend
        self.conversation = ConversationHandle("attempt")
        self.messages: list[Message] = []
        self.tools = TOOLS if tools else []
        self.made: list[tuple[ChatRequest, Generation]] = []
        self.echo: Callable[[Message], Message] = lambda message: message

    async def say(self, *messages: Message, **more: Any) -> Generation:
        self.messages = [*self.messages, *messages]
        return await self.ask(**more)

    async def ask(self, **more: Any) -> Generation:
        request = ChatRequest(
            model="any",
            messages=self.messages,
            tools=self.tools,
            conversation=self.conversation,
            **({"sampling": {"max_tokens": 1000}} | more),
        )
        generation = await self.backend.generate(request)
        self.made.append((request, generation))
        self.messages = [*self.messages, self.echo(answer(generation))]
        return generation

    def results(self, text: str = "ok") -> list[Message]:
        """The results of the calls of the last answer."""
        calls = self.made[-1][1].tool_calls
        return [{"role": "tool", "tool_call_id": call.id, "content": text} for call in calls]


def answer(generation: Generation) -> Message:
    """As a dialect sends it upstream that knows what was sampled."""
    message: Message = {"role": "assistant", "content": generation.text}
    if generation.reasoning is not None:
        message["reasoning"] = generation.reasoning
    if generation.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in generation.tool_calls
        ]
    return message


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def edit(**arguments: Any) -> str:
    return f'<tool_call>\n{{"name": "Edit", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


def one_line(talk: Talk) -> bool:
    """Whether the calls are one sequence: each prompt begins with the one before it and what was sampled then."""
    generations = [generation for _, generation in talk.made]
    return all(
        (after.prompt_token_ids or ())[: len(whole)] == whole
        for before, after in pairwise(generations)
        for whole in [(before.prompt_token_ids or ()) + (before.completion_token_ids or ())]
    )


def notes(talk: Talk, key: str) -> list[Any]:
    return [generation.audit.get(key) for _, generation in talk.made]


@contextlib.asynccontextmanager
async def serving(
    script: list[Step] | Callable[[str], Step], codec: LocalCodec, kind: str = "vllm", format: str = "hermes"
) -> AsyncGenerator[tuple[FakeTokens, ExactBackend]]:
    definition = codec._vocabulary._whole.to_str()  # pyright: ignore[reportPrivateUsage]
    async with FakeTokens(definition, script) as server:
        backend = ExactBackend(kind, SERVERS[kind](HttpClient(server.url), "m"), codec, format_named(format))
        try:
            yield server, backend
        finally:
            await backend.close()


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> LocalCodec:
    return model(tmp_path_factory.mktemp("codec") / "model")


# --- the line of tokens --------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_prompt_is_what_was_sampled_and_what_is_new(codec: LocalCodec, kind: str) -> None:
    script: list[Step] = [
        Sample(text="Look:" + edit(file_path="a", old_string="x", new_string="y"), versions=[("7", 0, 3)]),
        Sample(text="Done."),
        Sample(text="Bye."),
    ]
    async with serving(script, codec, kind) as (server, backend):
        talk = Talk(backend)
        first = await talk.say({"role": "system", "content": "S"}, user("go"))
        assert (first.text, first.finish_reason) == ("Look:", "tool_calls")
        assert first.tool_calls[0].name == "Edit"
        assert first.tool_calls[0].id.startswith("toolu_")
        assert first.policy_spans == (PolicySpan("7", 0, 3) if kind == "vllm" else PolicySpan("7"),)
        assert first.logprobs == tuple(-id_ / 1000 for id_ in first.completion_token_ids or ())
        assert first.usage.cached_tokens == 1
        last = await talk.say(*talk.results(), user("and?"))
        assert (last.text, last.finish_reason) == ("Done.", "stop")
        await talk.say(user("bye"))
    assert one_line(talk)
    assert notes(talk, "prompt") == ["root", "extended", "extended"]
    assert notes(talk, "reason") == ["first call", None, None]
    assert notes(talk, "mismatch") == [None] * 3
    assert notes(talk, "canonical") == [None, True, True]
    sent = server.requests[-1]
    prompt = sent["token_ids" if kind == "vllm" else "input_ids"]
    assert prompt == list(talk.made[-1][1].prompt_token_ids or ())
    assert prompt == await codec.render(talk.messages[:-1], TOOLS)


@pytest.mark.parametrize("restored", [True, False])
async def test_what_the_agent_makes_of_its_turn_does_not_matter(codec: LocalCodec, restored: bool) -> None:
    """With and without the dialect sending the model its own arguments again."""
    script = [
        Sample(text="\n\nNow. " + edit(timeout=5000.0, old_string=f"é{n}", file_path="a")) for n in range(12)
    ]

    def echo(message: Message) -> Message:
        message = json.loads(json.dumps(message)) | {"content": message["content"].strip()}
        for call in message["tool_calls"] if not restored else ():
            arguments = json.loads(call["function"]["arguments"])
            arguments = {"replace_all": False, **dict(sorted(arguments.items())), "timeout": 5000}
            call["function"]["arguments"] = json.dumps(arguments, ensure_ascii=False)
        return message

    async with serving([*script], codec) as (_, backend):
        talk = Talk(backend)
        talk.echo = echo
        await talk.say(user("go"))
        for _ in script[1:]:
            await talk.say(*talk.results())
    assert one_line(talk)
    assert notes(talk, "prompt") == ["root"] + ["extended"] * 11
    assert set(notes(talk, "mismatch")[1:]) == {"whitespace" if restored else "tool arguments"}
    whole = notes(talk, "canonical")
    assert [index for index, compared in enumerate(whole) if compared is not None] == [1, 2, 4, 8]


async def test_tokens_that_no_encoder_would_choose_are_kept(codec: LocalCodec) -> None:
    script: list[Step] = [Sample(text="shattered", shattered=True), Sample(text="x"), Sample(text="y")]
    async with serving(script, codec) as (_, backend):
        talk = Talk(backend)
        for text in "abc":
            await talk.say(user(text))
    assert one_line(talk)
    assert notes(talk, "mismatch") == [None, "tokenization", None]
    assert notes(talk, "canonical") == [None, False, False]


async def test_a_turn_that_was_cut_off_gets_its_end_from_us(codec: LocalCodec) -> None:
    half = 'So <tool_call>\n{"name": "Edit", "argu'
    script: list[Step] = [Sample(text=half, end=None, finish="length"), Sample(text="x")]
    async with serving(script, codec) as (server, backend):
        talk = Talk(backend)
        cut = await talk.say(user("go"))
        assert (cut.text, cut.finish_reason, cut.tool_calls) == (half, "length", ())
        await talk.say(user("on"))
        text = server.decode(server.requests[1]["token_ids"])
    assert one_line(talk)
    assert text.endswith(f"{half}<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n")
    assert notes(talk, "mismatch") == [None, "truncated turn"]


async def test_a_stop_string_is_cut_from_the_text_and_stays_in_the_tokens(codec: LocalCodec) -> None:
    script: list[Step] = [Sample(text="one END", end=None, stop="END"), Sample(text="x")]
    async with serving(script, codec) as (server, backend):
        talk = Talk(backend)
        first = await talk.say(user("go"), sampling={"max_tokens": 9, "stop": ["END"]})
        assert (first.text, first.stop, first.finish_reason) == ("one ", "END", "stop")
        assert server.requests[0]["sampling_params"]["stop"] == ["END"]
        await talk.say(user("on"))
        assert "one END<|im_end|>" in server.decode(server.requests[1]["token_ids"])
    assert one_line(talk)


async def test_thinking_that_the_agent_leaves_out_stays_in_the_tokens(codec: LocalCodec) -> None:
    script: list[Step] = [Sample(text="<think>hm</think>A" + edit(a=1)), Sample(text="B"), Sample(text="C")]
    async with serving(script, codec) as (_, backend):
        talk = Talk(backend)
        talk.echo = lambda message: {key: value for key, value in message.items() if key != "reasoning"}
        first = await talk.say(user("go"))
        assert (first.reasoning, first.text) == ("hm", "A")
        await talk.say(*talk.results())
        await talk.say(user("on"))
    assert one_line(talk)
    assert notes(talk, "mismatch") == [None, "thinking stripped", None]


# --- templates -----------------------------------------------------------------------------------------


async def test_a_template_that_drops_old_thinking_is_rendered_anew_at_each_query(tmp_path: Path) -> None:
    thought = "<think>\nhm\n</think>\n\n"
    script: list[Step] = [
        Sample(text=thought + "A\n" + edit(a="1")),
        Sample(text=thought + "B\n" + edit(a="1")),
        Sample(text=thought + "C"),
        Sample(text="D"),
    ]
    codec = model(tmp_path / "qwen3", QWEN3)
    async with serving(script, codec) as (_, backend):
        talk = Talk(backend)
        await talk.say(user("go"))
        await talk.say(*talk.results())
        await talk.say(*talk.results())
        assert one_line(talk)
        await talk.say(user("next"))
    assert notes(talk, "prompt") == ["root", "extended", "extended", "rendered anew"]
    assert notes(talk, "reason")[3] == "thinking stripped"
    assert notes(talk, "mismatch")[3] == "thinking stripped"
    assert list(talk.made[3][1].prompt_token_ids or ()) == await codec.render(talk.messages[:-1], TOOLS)


@pytest.mark.parametrize("enable_thinking", [None, False])
async def test_where_nobody_thinks_the_same_template_is_gone_on_from(
    tmp_path: Path, enable_thinking: bool | None
) -> None:
    script: list[Step] = [Sample(text="A\n" + edit(a="1")), Sample(text="B"), Sample(text="C")]
    async with serving(script, model(tmp_path / "qwen3", QWEN3)) as (_, backend):
        talk = Talk(backend)
        await talk.say(user("go"), enable_thinking=enable_thinking)
        await talk.say(*talk.results(), enable_thinking=enable_thinking)
        await talk.say(user("next"), enable_thinking=enable_thinking)
    assert one_line(talk)
    assert notes(talk, "prompt") == ["root", "extended", "extended"]


async def test_a_template_that_never_shows_thinking_is_rendered_anew_at_each_query(tmp_path: Path) -> None:
    template = TEMPLATE.replace("message.reasoning is string", "false")
    script: list[Step] = [Sample(text="<think>h</think>A" + edit(a=1)), Sample(text="B"), Sample(text="C")]
    async with serving(script, model(tmp_path / "m", template)) as (_, backend):
        talk = Talk(backend)
        await talk.say(user("go"))
        await talk.say(*talk.results())
        assert one_line(talk)
        await talk.say(user("next"))
    assert notes(talk, "reason") == ["first call", None, "thinking stripped"]


async def test_a_role_marker_that_ends_a_turn_is_not_said_twice_nor_wrongly(tmp_path: Path) -> None:
    specials = ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>", "<arg_key>", "</arg_key>"]
    codec = model(tmp_path / "glm", GLM, *specials, "<arg_value>", "</arg_value>")
    call = "\n<tool_call>Bash\n<arg_key>command</arg_key>\n<arg_value>ls</arg_value>\n</tool_call>"
    script: list[Step] = [
        Sample(text="Look." + call, end="<|observation|>"),
        Sample(text="Done.", end="<|user|>"),
        Sample(text="Look." + call, end="<|user|>"),
        Sample(text="cut", end=None, finish="length"),
        Sample(text="End."),
    ]
    async with serving(script, codec, format="glm") as (server, backend):
        talk = Talk(backend)
        await talk.say(user("go"))
        assert talk.made[0][1].tool_calls[0].arguments == '{"command":"ls"}'
        await talk.say(*talk.results())
        await talk.say(user("more"))
        assert one_line(talk)
        await talk.say(*talk.results())
        assert not one_line(talk)  # The model said "user" and a tool spoke.
        del talk.made[:3]
        await talk.say(user("on"))
        assert one_line(talk)
        text = server.decode(server.requests[-1]["token_ids"])
    assert text.count("<|observation|>") == 2
    assert text.count("<|user|>") == 3
    assert text.endswith("cut<|user|>\non<|assistant|>\n")


async def test_a_template_that_tells_the_tools_again_at_the_end_is_rendered_anew(tmp_path: Path) -> None:
    template = (
        "{%- for message in messages %}"
        "{%- if loop.last and message.role == 'user' and tools %}{{- tools | tojson }}{% endif %}"
        "{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') + '<|im_end|>' }}{% endfor %}"
        "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}"
    )
    script: list[Step] = [Sample(text="A"), Sample(text="B")]
    async with serving(script, model(tmp_path / "m", template)) as (_, backend):
        talk = Talk(backend)
        await talk.say(user("go"))
        await talk.say(user("on"))
    assert notes(talk, "prompt") == ["root", "rendered anew"]
    assert notes(talk, "mismatch") == [None, "template"]


async def test_a_template_that_refuses_the_conversation_is_told(tmp_path: Path) -> None:
    template = TEMPLATE + "{% if messages[-1].content == 'bad' %}{{ raise_exception('never') }}{% endif %}"
    script: list[Step] = [Sample(text="A"), Sample(text="B")]
    async with serving(script, model(tmp_path / "m", template)) as (_, backend):
        talk = Talk(backend)
        await talk.say(user("go"))
        with pytest.raises(BackendError, match="never"):
            await talk.say(user("bad"))
        talk.messages[-1] = user("good")
        await talk.ask()
    assert notes(talk, "prompt") == ["root", "extended"]


# --- roots, twins, restarts ----------------------------------------------------------------------------


async def test_why_a_conversation_is_new(codec: LocalCodec) -> None:
    async with serving([Sample(text=letter) for letter in "ABCDEF"], codec) as (_, backend):
        talk = Talk(backend)
        await talk.say({"role": "system", "content": "S"}, user("go"))
        talk.messages = [{"role": "system", "content": "S"}, user("summary of it all")]
        await talk.ask()
        talk.messages = [{"role": "system", "content": "S"}, user("go"), {"role": "assistant", "content": "no"}]
        await talk.say(user("on"))
        talk.messages[0] = {"role": "system", "content": "T"}
        await talk.say(user("on"))
        talk.tools = TOOLS[:1]
        await talk.say(user("on"))
        await talk.say(user("on"))
    assert notes(talk, "reason") == [
        "first call",
        "new conversation",
        "history rewritten",
        "tools or system changed",
        "tools or system changed",
        None,
    ]


async def test_twins_and_the_answer_that_the_agent_took(codec: LocalCodec) -> None:
    hold = asyncio.Event()
    script: list[Step] = [Sample(text="A" + edit(n=n), hold=hold) for n in range(2)]
    async with serving([*script, *(Sample(text=letter) for letter in "BC")], codec) as (_, backend):
        talk = Talk(backend)
        talk.messages = [user("go")]
        requests = [asyncio.create_task(talk.say()) for _ in range(2)]
        await asyncio.sleep(0.05)
        hold.set()
        await asyncio.gather(*requests)
        twins = list(talk.made)
        for request, generation in twins:
            talk.made = [(request, generation)]
            talk.messages = [*request.messages, answer(generation)]
            await talk.say(*talk.results())
            assert one_line(talk)
            assert notes(talk, "prompt")[1] == "extended"


async def test_after_a_restart_the_branch_goes_on_from_its_calls(codec: LocalCodec) -> None:
    script: list[Step] = [Sample(text="A" + edit(n=1), shattered=True), Sample(text="B"), Sample(text="C")]
    async with serving(script, codec) as (_, backend):
        talk = Talk(backend)
        await talk.say(user("go"))
        await talk.say(*talk.results())
        await talk.say(user("on"))
    for order in permutations(talk.made):
        async with serving([Sample(text="D")], codec) as (_, backend):
            again = Talk(backend)
            for request, generation in order:
                backend.restore(
                    ChatRequest(
                        model=request.model,
                        messages=request.messages,
                        tools=request.tools,
                        conversation=again.conversation,
                    ),
                    generation,
                )
            again.messages, again.made = list(talk.messages), list(talk.made)
            await again.say(user("more"))
        assert one_line(again)
        assert again.made[-1][1].audit["prompt"] == "extended"


async def test_servers_of_one_model_share_what_they_remember(codec: LocalCodec) -> None:
    memory = TokenForest()
    async with (
        FakeTokens(TOKENIZER, lambda _: Sample(text="A", shattered=True)) as one,
        FakeTokens(TOKENIZER, lambda _: Sample(text="B", shattered=True)) as other,
    ):
        backends = [
            ExactBackend(
                "vllm", SERVERS["vllm"](HttpClient(server.url), "m"), codec, format_named("hermes"), memory=memory
            )
            for server in (one, other)
        ]
        talk = Talk(backends[0])
        for number in range(4):
            talk.backend = backends[number % 2]
            await talk.say(user(str(number)))
        for backend in backends:
            await backend.close()
    assert one_line(talk)


async def test_a_request_without_a_branch_leaves_no_memory(codec: LocalCodec) -> None:
    async with serving([Sample(text="A"), Sample(text="B")], codec) as (_, backend):
        messages = [user("go")]
        for _ in range(2):
            generation = await backend.generate(ChatRequest(model="m", messages=messages))
            assert generation.audit["prompt"] == "root"
            messages = [*messages, answer(generation), user("on")]


# --- what is asked -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("vllm", {"max_tokens": 5, "seed": 3, "top_k": 2, "structured_outputs": {"json": {"type": "object"}}}),
        ("sglang", {"max_new_tokens": 5, "sampling_seed": 3, "top_k": 2, "json_schema": '{"type":"object"}'}),
    ],
)
async def test_sampling_in_each_server_s_own_words(codec: LocalCodec, kind: str, expected: dict[str, Any]) -> None:
    async with serving([Sample(text="{}")], codec, kind) as (server, backend):
        talk = Talk(backend)
        made = await talk.say(
            user("go"),
            sampling={"max_completion_tokens": 5, "seed": 3, "top_k": 2, "best_of": 9},
            tool_choice="required",
            response_format={"type": "json_object"},
        )
    sent = server.requests[0]["sampling_params"]
    assert {key: sent[key] for key in expected} == expected
    assert made.sampling == expected
    assert made.audit["left_out"] == ["best_of", "tool_choice"]
    assert sent["logprobs"] == 0 if kind == "vllm" else server.requests[0]["return_logprob"] is True


async def test_sglang_is_asked_for_an_adapter_by_name(codec: LocalCodec) -> None:
    async with serving([Sample(text="x"), Sample(text="x")], codec, "sglang") as (server, backend):
        await Talk(backend).say(user("go"))
        client = HttpClient(server.url)
        await SERVERS["sglang"](client, "lora:policy").generate([1, 2], {}, None)
        await client.close()
    assert "lora_path" not in server.requests[0] and server.requests[1]["lora_path"] == "policy"


async def test_only_one_call_where_no_more_are_wanted(codec: LocalCodec) -> None:
    script: list[Step] = [Sample(text=edit(a=1) + "\n" + edit(a=2)), Sample(text="x")]
    async with serving(script, codec) as (_, backend):
        talk = Talk(backend)
        made = await talk.say(user("go"), parallel_tool_calls=False)
        assert [call.arguments for call in made.tool_calls] == ['{"a": 1}']
        await talk.say(*talk.results())
    assert one_line(talk)


async def test_without_tools_nothing_is_a_tool_call(codec: LocalCodec) -> None:
    async with serving([Sample(text=edit(a=1))], codec) as (_, backend):
        made = await Talk(backend).say(user("go"), tool_choice="none")
    assert (made.text, made.tool_calls, made.finish_reason) == (edit(a=1), (), "stop")


async def test_what_does_not_fit(tmp_path: Path) -> None:
    async with serving([Sample(text="A"), Sample(text="B")], model(tmp_path / "m", context=60)) as (
        server,
        backend,
    ):
        talk = Talk(backend, tools=False)
        prompt = await backend.count_tokens(ChatRequest(model="m", messages=[user("go")]))
        await talk.say(user("go"))
        assert server.requests[0]["sampling_params"]["max_tokens"] == 60 - prompt
        await talk.say(user("on"), sampling={})
        assert server.requests[1]["sampling_params"]["max_tokens"] == 60 - len(server.requests[1]["token_ids"])
        with pytest.raises(ContextOverflow) as raised:
            await talk.say(user("long " * 60))
    assert raised.value.limit == 60
    assert raised.value.prompt_tokens > 60
    assert len(server.requests) == 2


async def test_a_server_with_a_shorter_context_than_its_model(codec: LocalCodec) -> None:
    message = "This model's maximum context length is 40 tokens. However, you requested too many."
    script: list[Step] = [
        Refusal(status=400, message=message),
        Sample(text="A"),
        Refusal(status=400, message=message),
    ]
    async with serving(script, codec) as (server, backend):
        talk = Talk(backend, tools=False)
        await talk.say(user("go"))
        assert server.requests[1]["sampling_params"]["max_tokens"] == 40 - len(server.requests[1]["token_ids"])
        with pytest.raises(ContextOverflow):
            await talk.say(user("long " * 60))


async def test_streaming_is_refused(codec: LocalCodec) -> None:
    async with serving([], codec) as (_, backend):
        with pytest.raises(ConfigError, match="streaming"):
            await backend.generate(ChatRequest(model="m", messages=[user("go")]), lambda _: None)


async def test_a_request_that_is_given_up_stops_at_the_server(codec: LocalCodec) -> None:
    never = asyncio.Event()
    async with serving([Sample(hold=never), Sample(text="A")], codec) as (server, backend):
        talk = Talk(backend)
        request = asyncio.create_task(talk.say(user("go")))
        await server.request_received.wait()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        assert (await talk.ask()).text == "A"


# --- servers that lie ----------------------------------------------------------------------------------


def choice(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["choices"][0].update(fields)


def meta(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda body: body["meta_info"].update(fields)


LIES: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "no choice": ("vllm", lambda body: body.update(choices=[])),
    "two choices": ("vllm", lambda body: body["choices"].append(body["choices"][0])),
    "no ids": ("vllm", choice(token_ids=None)),
    "a negative id": ("vllm", choice(token_ids=[-1], logprobs=None)),
    "an id above 31 bits": ("vllm", choice(token_ids=[2**31], logprobs=None)),
    "an id that the vocabulary lacks": ("vllm", choice(token_ids=[2**30], logprobs=None)),
    "too few logprobs": ("vllm", lambda body: body["choices"][0]["logprobs"]["content"].pop()),
    "logprobs of other tokens": ("vllm", lambda body: body["choices"][0]["token_ids"].reverse()),
    "a positive logprob": ("vllm", lambda body: body["choices"][0]["logprobs"]["content"][0].update(logprob=1.0)),
    "no object": ("vllm", lambda body: body.clear()),
    "a version that ends before 0": ("vllm", choice(weight_versions=[{"version": "1", "start": 0, "end": -1}])),
    "sglang: no ids": ("sglang", lambda body: body.update(output_ids=None)),
    "sglang: too few logprobs": ("sglang", meta(output_token_logprobs=[[-0.1, 5, None]])),
    "sglang: logprobs of other tokens": ("sglang", lambda body: body["output_ids"].reverse()),
    "sglang: a positive logprob": ("sglang", meta(output_token_logprobs=[[3.0, 5, None]])),
    "sglang: negative id": ("sglang", lambda body: body.update(output_ids=[-4])),
}


@pytest.mark.parametrize("name", LIES)
async def test_an_answer_that_makes_no_sense_is_an_error(codec: LocalCodec, name: str) -> None:
    kind, change = LIES[name]
    script: list[Step] = [Sample(text="two words", change=change), Sample(text="fine")]
    async with serving(script, codec, kind) as (_, backend):
        talk = Talk(backend)
        with pytest.raises(BackendError):
            await talk.say(user("go"))
        assert (await talk.ask()).audit["prompt"] == "root"


async def test_an_aborted_answer_is_not_remembered(codec: LocalCodec) -> None:
    script: list[Step] = [Sample(text="A", finish="abort", end=None), Sample(text="B")]
    async with serving(script, codec) as (_, backend):
        talk = Talk(backend)
        assert (await talk.say(user("go"))).finish_reason == "abort"
        assert (await talk.say(user("on"))).audit["prompt"] == "root"


# --- the embedded server -------------------------------------------------------------------------------

INSTRUCTION = "Make `add` add again; it must work for <|im_end|> too."
BEFORE = 'def add(a, b):\n    """Add."""\n    return a - b\n'
AFTER = BEFORE.replace("a - b", "a + b  # not <tool_call> or é")
PATCH = (
    "--- a/calc.py\n+++ b/calc.py\n@@ -1,3 +1,3 @@\n def add(a, b):\n"
    '     """Add."""\n-    return a - b\n+    return a + b  # not <tool_call> or é\n'
)


async def test_the_embedded_model_solves_its_task_in_tokens(tmp_path: Path) -> None:
    tasks, root = tmp_path / "tasks.jsonl", tmp_path / "work"
    tasks.write_text(
        json.dumps({"instance_id": "calc", "instruction": INSTRUCTION, "gold_patch": PATCH, "repo": "x"})
    )
    root.mkdir()
    (root / "calc.py").write_text(BEFORE)
    async with start_server("oracle", tasks=tasks) as server:
        client = HttpClient(f"{server.url}/v1")
        codec = ServerCodec(client, server.model)
        backend = ExactBackend(
            "embedded", SERVERS["embedded"](client, server.model), codec, format_named("hermes")
        )
        talk = Talk(backend)
        talk.messages = [{"role": "system", "content": f"Primary working directory: {root}"}, user(INSTRUCTION)]
        loop = asyncio.get_running_loop()

        def ask(messages: list[Message]) -> Message:
            talk.messages = messages
            made = asyncio.run_coroutine_threadsafe(talk.ask(), loop).result(60)
            return answer(made)

        used = await asyncio.to_thread(converse, root, ask, list(talk.messages))
        assert await backend.models() == [server.model]
        await backend.close()
    assert (root / "calc.py").read_text() == AFTER
    assert used.names == ["Read", "Edit", "Bash"]
    assert one_line(talk)
    assert notes(talk, "prompt") == ["root", "extended", "extended", "extended"]
    assert notes(talk, "mismatch") == [None] * 4
    assert all(made.audit.get("canonical") in (None, True) for _, made in talk.made)
    assert all(logprob == 0.0 for _, made in talk.made for logprob in made.logprobs or ())


REFUSED: dict[str, tuple[Any, str]] = {
    "no tokens": ({"token_ids": []}, "at least one token"),
    "tokens of no template": ({"token_ids": [500, 501]}, "template"),
    "a negative token": ({"token_ids": [-1]}, "invalid request body"),
    "a token beyond the vocabulary": ({"token_ids": [10**6]}, "out of vocabulary"),
    "text": ({"token_ids": "hi"}, "invalid request body"),
    "a stream": ({"stream": True}, "stream"),
    "no sampling parameters": ({"sampling_params": None}, "invalid request body"),
    "another model": ({"model": "other"}, "does not exist"),
    "more than fits": ({"sampling_params": {"max_tokens": 10**6}}, "max_model_len"),
    "two answers": ({"sampling_params": {"n": 2}}, "n must be 1"),
    "deep JSON": (b'{"token_ids":' + b"[" * 100_000, "invalid request body"),
}


async def test_tokens_in_tokens_out_of_the_embedded_server(codec: LocalCodec) -> None:
    prompt = await codec.render([{"role": "user", "content": "hi"}], TOOLS)
    async with start_server("idle") as server, aiohttp.ClientSession() as session:

        async def post(body: Any) -> tuple[int, Any]:
            data = body if isinstance(body, bytes) else json.dumps(body).encode()
            async with session.post(f"{server.url}/inference/v1/generate", data=data) as response:
                return response.status, await response.json()

        good = {"model": server.model, "token_ids": prompt, "sampling_params": {"logprobs": 0}}
        status, answer = await post(good)
        assert status == 200, answer
        (choice,) = answer["choices"]
        text = await codec.decode(choice["token_ids"])
        assert text == "I looked at this and leave everything as it is.<|im_end|>"
        assert choice["finish_reason"] == "stop"
        assert [entry["token_id"] for entry in choice["logprobs"]["content"]] == choice["token_ids"]
        assert answer["usage"]["prompt_tokens"] == len(prompt)
        cut = (await post(good | {"sampling_params": {"max_tokens": 3}}))[1]["choices"][0]
        assert (cut["token_ids"], cut["finish_reason"], cut["logprobs"]) == (
            choice["token_ids"][:3],
            "length",
            None,
        )
        met = (await post(good | {"sampling_params": {"stop": ["and"]}}))[1]["choices"][0]
        assert (met["stop_reason"], met["finish_reason"]) == ("and", "stop")
        schema = {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]}
        shaped = (await post(good | {"sampling_params": {"structured_outputs": {"json": schema}}}))[1]["choices"][
            0
        ]
        assert set(json.loads((await codec.decode(shaped["token_ids"])).removesuffix("<|im_end|>"))) == {"a"}
        for name, (change, message) in REFUSED.items():
            status, answer = await post(change if isinstance(change, bytes) else good | change)
            assert 400 <= status < 500, (name, answer)
            assert message in answer["error"]["message"], name
