"""Conversations as token ids and back, in a model's own chat template and vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

import msgspec
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.gateway.backends.fields import TokenId
from understudy.gateway.backends.http import HttpClient
from understudy.gateway.exact.parsers import json_object
from understudy.gateway.exact.template import ChatTemplate, Messages
from understudy.gateway.exact.vocabulary import TokenizerVocabulary

_T = TypeVar("_T")

Args = Mapping[str, Any]
NO_ARGS: Args = MappingProxyType({})

_HUB_FILES = ("tokenizer.json", "tokenizer_config.json", "config.json", "*.jinja", "additional_chat_templates/*")
_NO_LIMIT = 1 << 40
"""Above it, `model_max_length` only says that nobody knows."""


class Codec(Protocol):
    """What turns conversations into token ids, and token ids into text."""

    async def render(
        self, messages: Messages, tools: Messages, *, generation_prompt: bool = True, template_args: Args = NO_ARGS
    ) -> list[int]:
        """The token ids of a conversation in the chat template; with `generation_prompt`, ready for the next turn.

        Messages and tools are as OpenAI chat completions has them, `arguments` of a tool call a string, and
        `reasoning` on the assistant's turns. `template_args` are further variables of the template
        (`enable_thinking`). Raises BackendError where the template refuses the conversation.
        """
        ...

    async def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids; special tokens stand as their text. Raises BackendError for an unknown id."""
        ...

    async def context_length(self) -> int | None:
        """How many tokens the model's context holds, None where nothing says so. Raises BackendError."""
        ...


class LocalCodec:
    """A model's own files: its tokenizer and its chat template (see Codec)."""

    def __init__(self, vocabulary: TokenizerVocabulary, template: ChatTemplate, context: int | None) -> None:
        self._vocabulary = vocabulary
        self._template = template
        self._context = context

    @classmethod
    def load(cls, source: str) -> LocalCodec:
        """The codec of a directory with a model's files, or of a model on the Hub, which are fetched if need be.

        Reads `tokenizer.json`, `tokenizer_config.json`, `chat_template.jinja`, `additional_chat_templates/` and
        `config.json`, of which only the first must be there, and a template in one of the next three. Raises
        ConfigError.
        """
        folder = Path(source).expanduser()
        if not folder.is_dir():
            folder = _from_hub(source)
        config = _read_json(folder / "tokenizer_config.json")
        templates = _templates(folder, config)
        vocabulary = TokenizerVocabulary(_read(folder / "tokenizer.json"), "\0".join(templates.values()))
        template = ChatTemplate(templates, _special_tokens(config), vocabulary.mark)
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
    """The tokenizer of the vLLM server, or the embedded one, that `client` calls; see Codec."""

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
        url = f"{self._client.base.removesuffix('/v1')}/{path}"  # servers have it beside /v1, not below it
        return await self._client.call("POST", url, {"model": self._model, **body}, expected)


def _from_hub(name: str) -> Path:
    # A fifth of a second to import, and not needed where the files are at hand.
    from huggingface_hub import snapshot_download  # pyright: ignore[reportUnknownVariableType]
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ConfigError(
            f"{name!r} is neither a directory nor a model that can be fetched from the Hub: {error}; "
            "give the directory that holds the model's tokenizer.json"
        ) from error


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}; download it from the model again") from error


def _read_json(path: Path) -> dict[str, Any]:
    """The object in a file; empty where there is no file."""
    if not path.exists():
        return {}
    try:
        return msgspec.json.decode(_read(path), type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid JSON object: {error}; download it from the model again") from error


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """The chat templates by name; the one that is used by default is `default`. Files count before the setting."""
    files = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    templates = {path.stem: _read(path) for path in files}
    if (folder / "chat_template.jinja").exists():
        templates["default"] = _read(folder / "chat_template.jinja")
    if not templates:
        try:
            named = msgspec.convert(config.get("chat_template"), str | list[_NamedTemplate] | None)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{folder / 'tokenizer_config.json'}: chat_template: {error}") from error
        templates = (
            {"default": named} if isinstance(named, str) else {one.name: one.template for one in named or ()}
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
    """The variables that templates have of `tokenizer_config.json`: `bos_token`, `eos_token` and their like."""
    texts = {
        key: json_object(value).get("content", value) for key, value in config.items() if key.endswith("_token")
    }
    return {key: text for key, text in texts.items() if isinstance(text, str)}


def _context(config: dict[str, Any], tokenizer_config: dict[str, Any]) -> int | None:
    """The context that the model was made for; models that see pictures say it of their text part."""
    for settings, key in (
        (config, "max_position_embeddings"),
        (json_object(config.get("text_config")), "max_position_embeddings"),
        (tokenizer_config, "model_max_length"),
    ):
        value = settings.get(key)
        if isinstance(value, int) and 0 < value < _NO_LIMIT:
            return value
    return None
