"""Converts conversations to token ids and back, with a model's own chat template and vocabulary.

Templates are rendered as `transformers` renders them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NoReturn, Protocol, TypeVar, cast

import jinja2
import msgspec
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from understudy.errors import BackendError, ConfigError
from understudy.gateway.backends.fields import TokenId
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.parsers import json_object
from understudy.gateway.exact.vocabulary import TokenizerVocabulary
from understudy.util.text import reason_of

Messages = Sequence[dict[str, Any]]
"""Messages (or tools) in the form of OpenAI chat completions."""

_FAULTS = (
    *(jinja2.TemplateError, TypeError, ValueError, ArithmeticError),
    *(LookupError, AttributeError, RecursionError),
)
"""Errors that a template can raise. It is a program of its own, and may not be prepared for this conversation."""


class _CallShape(Struct, frozen=True):
    """The form in which a template wants a turn with tool calls."""

    arguments: Literal["string", "object"]
    content: str | None
    """The content that stands for an empty text."""


# Tried in this order. A call's arguments as a string keep the sampled characters; as an object, which most
# templates expect, they may be formatted differently. Some templates need None for an empty content.
_SHAPES = (
    _CallShape("string", ""),
    _CallShape("string", None),
    _CallShape("object", ""),
    _CallShape("object", None),
)
_PROBE_ARGUMENT = "probe_4c1f"
_PROBE_ARGUMENTS = f'{{ "{_PROBE_ARGUMENT}":  "{_PROBE_ARGUMENT}"}}'


class ChatTemplate:
    """A model's chat template, or its named templates.

    `variables` are set in every rendering (such as `bos_token`).

    `mark` is applied to every text of a conversation but not to the template's own texts. `where` precedes the
    error of an invalid template. Raises ConfigError for one.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        variables: Mapping[str, Any],
        mark: Callable[[str], str],
        *,
        where: str = "",
    ) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        functions = {"raise_exception": _raise, "strftime_now": _strftime_now}
        self._templates: dict[str, jinja2.Template] = {}
        for name, text in sources.items():
            try:
                self._templates[name] = environment.from_string(text, functions)
            except jinja2.TemplateError as error:
                line = f" in line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
                raise ConfigError(
                    f"{where}invalid chat template {name!r}: {error}{line}; expected a Jinja template as "
                    "transformers reads it: download the model's files again, or correct it"
                ) from error
        self._variables = dict(variables)
        self._mark = mark
        self._shapes: dict[bool, _CallShape] = {}

    def render(self, messages: Messages, tools: Messages, variables: Mapping[str, Any]) -> str:
        """Render a conversation as text (see Codec.render). Raises BackendError."""
        shape = self._shapes.get(bool(tools)) or self._shapes.setdefault(bool(tools), self._shape(bool(tools)))
        prepared = [_prepared(message, shape) for message in messages]
        try:
            return self._render(prepared, tools, variables)
        except _FAULTS as error:
            raise BackendError(
                f"the chat template rejected the conversation: {reason_of(error)}; change the messages as it "
                'says, or set tokens = "observe" if this model cannot take them',
                status=400,
            ) from error

    def _render(self, messages: Messages, tools: Messages, variables: Mapping[str, Any]) -> str:
        named = "tool_use" if tools and "tool_use" in self._templates else "default"
        context = {
            "messages": _marked(messages, self._mark),
            "tools": _marked(tools, self._mark) if tools else None,
        }
        return self._templates[named].render({**self._variables, **context, "documents": None, **variables})

    def _shape(self, with_tools: bool) -> _CallShape:
        """Return the first form in which the template shows a call's arguments; if it shows none, the form with
        an object.
        """
        tool = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
        call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": _PROBE_ARGUMENTS}}
        probe = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        for shape in _SHAPES:
            arguments = _PROBE_ARGUMENTS if shape.arguments == "string" else _PROBE_ARGUMENT
            try:
                text = self._render([_prepared(message, shape) for message in probe], [tool] * with_tools, {})
            except _FAULTS:
                continue
            if arguments in text:
                return shape
        return _CallShape("object", "")


class _GenerationTag(Extension):
    """`{% generation %}`, which marks what trainers learn from. Here only its contents are rendered."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _prepared(message: dict[str, Any], shape: _CallShape) -> dict[str, Any]:
    """Return a message in the form that templates expect: its text in one string, calls in their form,
    reasoning under all its names.
    """
    prepared = {key: value for key, value in message.items() if value is not None and value != []}
    prepared["content"] = _text(message.get("content"))
    if "tool_calls" in prepared:
        prepared["content"] = prepared["content"] or shape.content
        prepared["tool_calls"] = [_shaped(call, shape) for call in message["tool_calls"]]
    reasoning = next((prepared[key] for key in ("reasoning_content", "reasoning") if key in prepared), None)
    if reasoning is not None:
        prepared |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), reasoning)
    return prepared


IMAGE_PLACEHOLDER = "[image: this model reads text only]"
"""Stands for an image, which exact mode cannot show. Stored tokens contain it, so it must never change."""


def _text(content: str | list[dict[str, Any]] | None) -> str:
    """Return the text of a message, with each part on lines of its own, and IMAGE_PLACEHOLDER for an image.

    An agent repeats an image in every later request, so rejecting it would end the conversation. Raises
    BackendError for any other kind of part.
    """
    if content is None or isinstance(content, str):
        return content or ""
    unsupported_types = [part.get("type") for part in content if part.get("type") not in ("text", "image_url")]
    if unsupported_types:
        raise BackendError(
            f'unsupported content of type {unsupported_types[0]!r}: with tokens = "exact" a model gets text only; '
            'set tokens = "observe" for this model',
            status=400,
        )
    return "\n".join(part["text"] if part.get("type") == "text" else IMAGE_PLACEHOLDER for part in content)


def _shaped(call: dict[str, Any], shape: _CallShape) -> dict[str, Any]:
    function = call["function"]
    arguments = function.get("arguments") or "{}"
    if shape.arguments == "object":
        try:
            parsed = json.loads(arguments)
        except (ValueError, RecursionError):
            parsed = None
        # Arguments that are not a JSON object are kept as a string, which the template may still accept.
        arguments = cast("dict[str, Any]", parsed) if isinstance(parsed, dict) else arguments
    return {**call, "function": {**function, "arguments": arguments}}


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(key): _marked(item, mark) for key, item in cast("Mapping[str, Any]", value).items()}
    if isinstance(value, Sequence):
        return [_marked(item, mark) for item in cast("Sequence[Any]", value)]
    return value


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().astimezone().strftime(form)


_T = TypeVar("_T")

Args = Mapping[str, Any]
NO_ARGS: Args = MappingProxyType({})

_HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "*.jinja", "additional_chat_templates/*")
_NO_LIMIT = 1 << 40
"""A `model_max_length` above this means that the length is unknown."""


class Codec(Protocol):
    """Converts conversations to token ids, and token ids to text."""

    async def render(
        self, messages: Messages, tools: Messages, *, generation_prompt: bool = True, template_args: Args = NO_ARGS
    ) -> list[int]:
        """Return the token ids of a conversation; with `generation_prompt`, ready for the next turn.

        Messages and tools are in the form of OpenAI chat completions; the `arguments` of a tool call are a string,
        and assistant turns may have `reasoning`. `template_args` are further variables of the template (such as
        `enable_thinking`). Raises BackendError if the template rejects the conversation.
        """
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens. Raises BackendError for an unknown id."""
        ...

    async def context_length(self) -> int | None:
        """Return the model's context length in tokens, or None if it is unknown. Raises BackendError."""
        ...


class LocalCodec:
    """Uses a model's own files: its tokenizer and its chat template (see Codec)."""

    def __init__(self, vocabulary: TokenizerVocabulary, template: ChatTemplate, context: int | None) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._context = context

    @classmethod
    def load(cls, source: str) -> LocalCodec:
        """Load the codec from a directory with a model's files, or for a model on the Hub, which is downloaded if
        needed.

        Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `additional_chat_templates/` and
        `config.json`. The first is required, and a template in one of the next three. Raises ConfigError.
        """
        folder = Path(source).expanduser()
        if not folder.is_dir():
            folder = _from_hub(source)
        config = _read_json(folder / "tokenizer_config.json")
        templates = _templates(folder, config)
        file = folder / "tokenizer.json"
        vocabulary = TokenizerVocabulary(_read(file), "\0".join(templates.values()), where=f"{file}: ")
        template = ChatTemplate(templates, _special_tokens(config), vocabulary.mark, where=f"{folder}: ")
        return cls(vocabulary, template, _context(_read_json(folder / "config.json"), config))

    async def render(
        self, messages: Messages, tools: Messages, *, generation_prompt: bool = True, template_args: Args = NO_ARGS
    ) -> list[int]:
        """See Codec."""
        variables = {"add_generation_prompt": generation_prompt, **template_args}
        return await self._vocabulary.encode(self._template.render(messages, tools, variables))

    async def decode(self, ids: Sequence[int]) -> str:
        """See Codec."""
        return self._vocabulary.decode(ids)

    async def context_length(self) -> int | None:
        """See Codec."""
        return self._context


class _TokenizedPrompt(Struct):
    tokens: list[TokenId]
    max_model_len: int | None = None


class _DetokenizedText(Struct):
    prompt: str


class ServerCodec:
    """Uses the tokenizer of a vLLM or embedded server, through `client` (see Codec)."""

    def __init__(self, client: HttpClient, model: str) -> None:
        self._client = client
        self._model = model
        self._context: int | None = None

    async def render(
        self, messages: Messages, tools: Messages, *, generation_prompt: bool = True, template_args: Args = NO_ARGS
    ) -> list[int]:
        """See Codec."""
        body: dict[str, Any] = {"messages": list(messages), "add_generation_prompt": generation_prompt}
        if tools:
            body["tools"] = list(tools)
        if template_args:
            body["chat_template_kwargs"] = dict(template_args)
        return (await self._tokenize(body)).tokens

    async def decode(self, ids: Sequence[int]) -> str:
        """See Codec."""
        return (await self._post("detokenize", {"tokens": list(ids)}, _DetokenizedText)).prompt

    async def context_length(self) -> int | None:
        """See Codec."""
        if self._context is None:
            await self._tokenize({"prompt": "0"})
        return self._context

    async def _tokenize(self, body: dict[str, Any]) -> _TokenizedPrompt:
        answer = await self._post("tokenize", body, _TokenizedPrompt)
        self._context = answer.max_model_len
        return answer

    async def _post(self, path: str, body: dict[str, Any], expected: type[_T]) -> _T:
        url = f"{self._client.base.removesuffix('/v1')}/{path}"  # servers have this path beside /v1, not below it
        return await self._client.call("POST", url, {"model": self._model, **body}, expected)


def _from_hub(name: str) -> Path:
    # Imported here because it takes 0.2 s, and is not needed if the files are local.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"tokenizer: {name!r} is neither a directory nor a model that can be downloaded from the Hub: "
            f"{reason_of(error)}; give the directory with the model's tokenizer.json"
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"{path.parent}: has no {path.name}; give the directory of a Hugging Face model with a fast "
            "tokenizer, or its name on the Hub"
        ) from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}; check its permissions") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: is not UTF-8: {error.reason} at byte {error.start}; download it from the model again"
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; empty if there is no file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid JSON object: {error}; download it from the model again") from error


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return the chat templates by name; the default one is `default`. Files take precedence over the setting."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    templates = {path.stem: _read(path) for path in files}
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _read(folder / "chat_template.jinja")
    if not templates:
        try:
            named = msgspec.convert(config.get("chat_template"), str | list[_NamedTemplate] | None)
        except msgspec.ValidationError as error:
            raise ConfigError(
                f"{folder / 'tokenizer_config.json'}: chat_template: {error}; download the file from the model "
                "again"
            ) from error
        templates = (
            {"default": named} if isinstance(named, str) else {entry.name: entry.template for entry in named or ()}
        )
    if "default" not in templates:
        raise ConfigError(
            f"{folder} has no chat template; put the model's into {folder / 'chat_template.jinja'}, "
            "or leave `tokenizer` out, so that the model's server renders it"
        )
    return templates


class _NamedTemplate(Struct):
    name: str
    template: str


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the special tokens in `tokenizer_config.json` (`bos_token`, `eos_token` etc.), which templates
    use.
    """
    texts = {
        key: json_object(value).get("content", value) for key, value in config.items() if key.endswith("_token")
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _context(config: dict[str, Any], tokenizer_config: dict[str, Any]) -> int | None:
    """Return the context length in the model's configuration. Multimodal models have it in their text part."""
    for settings, key in (
        (config, "max_position_embeddings"),
        (json_object(config.get("text_config")), "max_position_embeddings"),
        (tokenizer_config, "model_max_length"),
    ):
        value = settings.get(key)
        if isinstance(value, int) and 0 < value < _NO_LIMIT:
            return value
    return None
