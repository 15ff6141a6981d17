"""The tokenizer and the chat template of a model's directory, as `transformers` reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, cast

import msgspec
import transformers

from understudy.errors import BackendError, ConfigError
from understudy.model.protocol import InvalidRequestError, ModelMessage, ModelTool
from understudy.model.vocabulary import byte_level_bytes

_library: Any = transformers  # whose types say nothing


class CausalTokenizer:
    """See Vocabulary. `special_texts` are the tokens that were added to the vocabulary, special ones or not."""

    def __init__(self, directory: Path) -> None:
        """Read `tokenizer.json` and the template beside it. Raises ConfigError."""
        if not (directory / "tokenizer.json").is_file():
            raise ConfigError(f"{directory} has no tokenizer.json; put the model's own tokenizer there")
        try:
            loaded: Any = _library.AutoTokenizer.from_pretrained(
                directory, local_files_only=True, trust_remote_code=False
            )
        except Exception as error:  # the library, and the one below it, raise whatever they met
            raise ConfigError(f"the tokenizer in {directory} cannot be read: {error}") from error
        if not loaded.chat_template:
            raise ConfigError(
                f"{directory} has no chat template; put the one the model was trained with into "
                f"{directory / 'chat_template.jinja'}"
            )
        self._loaded: Any = loaded
        template: Any = loaded.chat_template
        self._takes_text = "arguments is string" in (
            template if isinstance(template, str) else json.dumps(template)
        )
        vocabulary = cast("dict[str, int]", loaded.get_vocab())
        added = {int(id_): str(token) for id_, token in loaded.added_tokens_decoder.items()}
        self.special_texts: dict[int, str] = added
        self.special_ids = {text: id_ for id_, text in added.items()}
        self.token_bytes = _token_bytes(loaded, vocabulary, added)
        end: int | None = loaded.eos_token_id
        self.end_id = -1 if end is None else end

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, special tokens counting as such. Raises BackendError on a lone surrogate."""
        _check_text(text)
        return cast("list[int]", self._loaded.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int]) -> str:
        """See Vocabulary."""
        size = len(self.token_bytes)
        ids = list(ids)
        if any(not 0 <= id_ < size for id_ in ids):
            raise BackendError(f"a token id is not in the vocabulary; expected 0 to {size - 1}", status=400)
        return b"".join(self.token_bytes[id_] for id_ in ids).decode("utf-8", "replace")

    def render(
        self,
        messages: Sequence[ModelMessage],
        tools: Sequence[ModelTool] | None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """The tokens of a conversation. Raises BackendError when the template refuses it."""
        fields = [self._fields(message) for message in messages]
        offered = [msgspec.to_builtins(tool) for tool in tools or ()]
        try:
            text: str = self._loaded.apply_chat_template(
                fields, tools=offered or None, add_generation_prompt=add_generation_prompt, tokenize=False
            )
        except Exception as error:  # a template is a program of its own, and may raise anything
            raise InvalidRequestError(
                f"the chat template refuses the conversation: {error}", param="messages"
            ) from error
        return self.encode(text)

    def _fields(self, message: ModelMessage) -> dict[str, Any]:
        role = "system" if message.role == "developer" else message.role
        fields: dict[str, Any] = {"role": role, "content": message.text}
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning is not None:
            fields |= {"reasoning": reasoning, "reasoning_content": reasoning}
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            fields["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {
                        "name": call.function.name,
                        "arguments": self._arguments(call.function.arguments),
                    },
                }
                for call in message.tool_calls
            ]
        return fields

    def _arguments(self, arguments: str | dict[str, Any]) -> Any:
        """What was sampled, to the letter, where the template can write it; else the object that it spells."""
        if self._takes_text or not isinstance(arguments, str):
            return arguments
        try:
            return json.loads(arguments)
        except ValueError:
            return arguments


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BackendError(
            f"the text has a lone surrogate at character {error.start}; it is not valid Unicode, remove it",
            status=400,
        ) from None


def _token_bytes(loaded: Any, vocabulary: dict[str, int], added: dict[int, str]) -> list[bytes]:
    """The bytes of every token by id, in either way that vocabularies spell them; b"" where an id has none."""
    definition = str(loaded.backend_tokenizer.decoder.__getstate__()) if loaded.backend_tokenizer.decoder else ""
    if "ByteLevel" in definition:
        return byte_level_bytes(vocabulary, added)
    table = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, id_ in vocabulary.items():
        if id_ in added:
            table[id_] = added[id_].encode()
        elif len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            table[id_] = bytes([int(token[3:5], 16)])
        else:
            table[id_] = token.replace("▁", " ").encode()
    return table
