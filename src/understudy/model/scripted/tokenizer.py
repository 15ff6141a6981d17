"""The tokenizer of scripted policies: byte-level BPE, lossless in both directions, incremental for a growing
prompt.

There are two forms of text. *Plain* text is what people and tools write. *Marked* text is what the chat template
renders: in it a special token is a special token, and any text that merely looks like one carries a mark (see
`mark`), so that no message can forge a turn.
"""

from __future__ import annotations

import json
import re
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from functools import cache
from importlib import resources
from typing import Any

import jinja2
import msgspec
import tokenizers
from jinja2.sandbox import ImmutableSandboxedEnvironment
from msgspec import Struct

from understudy.model.hermes import (
    SPECIAL_TOKENS,
    CompletionSegment,
    byte_level_bytes,
    check_unicode,
    decode_tokens,
    parse_completion,
)
from understudy.model.protocol import (
    FunctionCall,
    InvalidRequestError,
    MessageToolCall,
    ModelMessage,
    ModelTool,
    ModelToolFunction,
)

_MARK = "\ue000"
_SPECIAL = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
# A turn's header is a separate piece, because completions are encoded without it: no merge may cross its end.
_PIECES = re.compile(rf"(<\|im_start\|>(?:system|user|assistant)\n|{_SPECIAL.pattern})")
_MARKS = re.compile(f"{_MARK}({_MARK}?)")

_CACHE_CHARACTERS = 48 << 20


def mark(text: str) -> str:
    """Return plain text as marked text that encodes to ordinary tokens: text like a special token gets a mark
    after its `<`.
    """
    if _MARK in text:
        text = text.replace(_MARK, _MARK + _MARK)
    return _SPECIAL.sub(lambda match: match[0][0] + _MARK + match[0][1:], text)


def unmark(text: str) -> str:
    """Return marked text as plain text: the inverse of `mark`."""
    return _MARKS.sub(r"\1", text) if _MARK in text else text


class ScriptedTokenizer:
    """Encodes and decodes; `decode(encode(s)) == s` for every string without lone surrogates."""

    def __init__(self, definition: str) -> None:
        self._bpe = tokenizers.Tokenizer.from_str(definition)
        # special tokens are split off before encoding, so all others are ordinary text
        self._bpe.encode_special_tokens = True
        vocabulary = self._bpe.get_vocab(with_added_tokens=True)
        self.special_ids = {token: vocabulary[token] for token in SPECIAL_TOKENS}
        self.special_texts = {id_: token for token, id_ in self.special_ids.items()}
        self.end_id = self.special_ids["<|im_end|>"]
        self.token_bytes = byte_level_bytes(vocabulary, self.special_texts)
        self._pieces: OrderedDict[str, array[int]] = OrderedDict()
        self._cached_characters = 0

    def encode(self, text: str) -> list[int]:
        """Return the token ids of plain text, in which special tokens are recognised. Raises BackendError for a
        lone surrogate.
        """
        return self.encode_marked(text.replace(_MARK, _MARK + _MARK))[0]

    def encode_marked(self, text: str) -> tuple[list[int], int]:
        """Return the token ids of marked text, and how many of the first ones were cached from earlier texts."""
        ids: list[int] = []
        cached = 0
        all_cached = True
        for piece in _PIECES.split(text):
            if not piece:
                continue
            special = self.special_ids.get(piece)
            if special is not None:
                ids.append(special)
            else:
                piece_ids = self._pieces.get(piece)
                if piece_ids is None:
                    all_cached = False
                    piece_ids = self._encode_piece(piece)
                else:
                    self._pieces.move_to_end(piece)
                ids.extend(piece_ids)
            if all_cached:
                cached = len(ids)
        return ids, cached

    def decode(self, ids: Iterable[int]) -> str:
        """Return the text of token ids, with special tokens; bytes that are not valid UTF-8 become U+FFFD.

        Raises BackendError for an id outside the vocabulary.
        """
        return decode_tokens(self.token_bytes, ids)

    def _encode_piece(self, piece: str) -> array[int]:
        if piece.startswith("<|im_start|>"):
            ids = array(
                "i", [self.special_ids["<|im_start|>"], *self._bpe_ids(piece.removeprefix("<|im_start|>"))]
            )
        else:
            ids = array("i", self._bpe_ids(unmark(piece)))
        self._pieces[piece] = ids
        self._cached_characters += len(piece)
        while self._cached_characters > _CACHE_CHARACTERS:
            old, _ = self._pieces.popitem(last=False)
            self._cached_characters -= len(old)
        return ids

    def _bpe_ids(self, text: str) -> list[int]:
        check_unicode(text)
        return self._bpe.encode(text, add_special_tokens=False).ids


@cache
def scripted_tokenizer() -> ScriptedTokenizer:
    """Return the tokenizer that comes with the package, loaded once."""
    return ScriptedTokenizer(
        resources.files("understudy.model").joinpath("assets/tokenizer.json").read_text("utf-8")
    )


TURN_END = "<|im_end|>"


def render(
    messages: Sequence[ModelMessage], tools: Sequence[ModelTool] | None, *, add_generation_prompt: bool = True
) -> str:
    """Return the marked text of a conversation. Raises BackendError when a message contains what the model cannot
    read.
    """
    return _template().render(
        messages=[_fields(message) for message in messages],
        tools=[msgspec.to_builtins(tool) for tool in tools or ()],
        add_generation_prompt=add_generation_prompt,
    )


def render_call(name: str, arguments: str) -> str:
    """Return the marked text of one tool call, as the template writes it."""
    return f'<tool_call>\n{{"name": {_to_json(name)}, "arguments": {mark(arguments)}}}\n</tool_call>'


def _fields(message: ModelMessage) -> dict[str, Any]:
    """Return a message for the template, with all texts marked, so that none of them can become a special
    token.
    """
    fields: dict[str, Any] = {
        "role": "system" if message.role == "developer" else message.role,
        "content": mark(message.text),
    }
    reasoning = message.thinking
    if reasoning is not None:
        fields["reasoning"] = mark(reasoning)
    if message.tool_calls:
        fields["tool_calls"] = [
            {"name": call.function.name, "arguments": _marked(call.function.arguments)}
            for call in message.tool_calls
        ]
    return fields


def _marked(arguments: str | dict[str, Any]) -> str | dict[str, Any]:
    return mark(arguments) if isinstance(arguments, str) else arguments


def _to_json(value: Any) -> str:
    return mark(json.dumps(value, ensure_ascii=False))


@cache
def _template() -> jinja2.Template:
    # The same Jinja environment in which transformers renders chat templates.
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters["tojson"] = _to_json
    source = resources.files("understudy.model").joinpath("assets/chat_template.jinja").read_text("utf-8")
    return environment.from_string(source)


_TURN = "<|im_start|>"
_RESULT, _RESULT_END = "<tool_response>", "</tool_response>"
_SYSTEM_END = "\n\n"
_HEADERS = {"system": "system\n", "user": "user\n", "assistant": "assistant\n"}


class ParsedPrompt(Struct, frozen=True):
    """The conversation and tools in a prompt, without the ids of tool calls."""

    messages: list[ModelMessage]
    tools: list[ModelTool] | None


def parse_prompt(tokenizer: ScriptedTokenizer, ids: Sequence[int]) -> ParsedPrompt:
    """Return the conversation that the template rendered to `ids`, which end with the start of the assistant's
    turn.

    Raises BackendError for tokens that the template does not produce.
    """
    *turns, open_turn = _turns(tokenizer, ids)
    if tokenizer.decode(open_turn) != _HEADERS["assistant"]:
        raise _invalid_prompt("expected it to end with the beginning of an assistant's turn")
    messages: list[ModelMessage] = []
    tools: list[ModelTool] | None = None
    for number, turn in enumerate(turns):
        if number == 0 and tokenizer.special_ids["<tool_call>"] in turn and _role(tokenizer, turn) == "system":
            system, tools = _tools(tokenizer.decode(turn))
            messages.extend(system)
        else:
            messages.extend(_messages(tokenizer, turn))
    return ParsedPrompt(messages, tools)


def _turns(tokenizer: ScriptedTokenizer, ids: Sequence[int]) -> list[list[int]]:
    """Return the tokens of each turn, without those that begin and end it; the last turn is open."""
    start, end = tokenizer.special_ids[_TURN], tokenizer.special_ids[TURN_END]
    starts = [index for index, id_ in enumerate(ids) if id_ == start]
    if not starts or starts[0] != 0:
        raise _invalid_prompt(f"expected it to begin with {_TURN}")
    turns: list[list[int]] = []
    for turn_start, next_turn_start in zip(starts, [*starts[1:], None], strict=True):
        turn = list(ids[turn_start + 1 : next_turn_start])
        if next_turn_start is not None:
            ends = [index for index, id_ in enumerate(turn) if id_ == end]
            if len(ends) != 1 or tokenizer.decode(turn[ends[0] + 1 :]) != "\n":
                raise _invalid_prompt(f"turn {len(turns) + 1}: expected it to end with {TURN_END} and a newline")
            turn = turn[: ends[0]]
        turns.append(turn)
    return turns


def _role(tokenizer: ScriptedTokenizer, turn: Sequence[int]) -> str:
    return tokenizer.decode(turn[:8]).partition("\n")[0]


def _body(tokenizer: ScriptedTokenizer, turn: Sequence[int], header: str) -> list[int]:
    """Return the tokens after the header; a token that extends across its end is split."""
    size = count = 0
    while size < len(header) and count < len(turn):
        size += len(tokenizer.token_bytes[turn[count]])
        count += 1
    after_header = b"".join(tokenizer.token_bytes[id_] for id_ in turn[:count])[len(header) :]
    return tokenizer.encode_marked(mark(after_header.decode("utf-8", "replace")))[0] + list(turn[count:])


def _messages(tokenizer: ScriptedTokenizer, turn: Sequence[int]) -> list[ModelMessage]:
    """Return the messages of one turn: several if it has the results of several tool calls."""
    role = _role(tokenizer, turn)
    if role not in _HEADERS:
        raise _invalid_prompt(f"{role[:40]!r} is not the role of a turn; expected system, user or assistant")
    body = _body(tokenizer, turn, _HEADERS[role])
    if role == "assistant":
        return [_assistant(parse_completion(tokenizer, body))]
    if body and body[0] == tokenizer.special_ids[_RESULT]:
        return [ModelMessage("tool", text) for text in _results(tokenizer, body)]
    return [ModelMessage("system" if role == "system" else "user", tokenizer.decode(body))]


def _assistant(segments: Sequence[CompletionSegment]) -> ModelMessage:
    texts = {segment.kind: segment.text for segment in segments}
    calls = [
        MessageToolCall(FunctionCall(segment.name, segment.text))
        for segment in segments
        if segment.kind == "tool_call"
    ]
    return ModelMessage(
        "assistant", texts.get("content", ""), reasoning=texts.get("reasoning"), tool_calls=calls or None
    )


def _results(tokenizer: ScriptedTokenizer, body: Sequence[int]) -> list[str]:
    """Return the texts between `<tool_response>` and `</tool_response>`, each on lines of its own."""
    begin, end = (tokenizer.special_ids[token] for token in (_RESULT, _RESULT_END))
    results: list[str] = []
    position = 0
    while position < len(body):
        if body[position] != begin or end not in body[position:]:
            raise _invalid_prompt("expected nothing but newlines between the results of tool calls")
        close = body.index(end, position)
        text = tokenizer.decode(body[position + 1 : close])
        if len(text) < 2 or text[0] != "\n" or text[-1] != "\n":
            raise _invalid_prompt("expected each tool call's result on lines of its own")
        results.append(text[1:-1])
        position = close + 1
        if position < len(body):
            newline = next((i for i in range(position, len(body)) if body[i] == begin), len(body))
            if tokenizer.decode(body[position:newline]) != "\n":
                raise _invalid_prompt("expected one newline between the results of tool calls")
            position = newline
    return results


def _tools(turn: str) -> tuple[list[ModelMessage], list[ModelTool]]:
    """Return the system message, if any, and the tools of the first turn."""
    before, after = _around_tools()
    text = turn.removeprefix(_HEADERS["system"])
    # No tool can contain this text, because newlines are escaped in JSON. A system prompt can, but it comes
    # before.
    start = text.rfind(before)
    if start < 0 or not text.endswith(after):
        raise _invalid_prompt("expected the first turn to list the tools as the template does")
    system = text[:start]
    lines = text[start + len(before) : len(text) - len(after)].split("\n")
    try:
        tools = [msgspec.json.decode(line, type=ModelTool) for line in lines]
    except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
        raise _invalid_prompt(f"invalid JSON of a tool: {error}") from None
    if not system:
        return [], tools
    if not system.endswith(_SYSTEM_END):
        raise _invalid_prompt(f"expected {_SYSTEM_END!r} between the system prompt and the list of tools")
    return [ModelMessage("system", system.removesuffix(_SYSTEM_END))], tools


@cache
def _around_tools() -> tuple[str, str]:
    """Return what the template writes before and after the tools, within the turn."""
    tool = ModelTool(function=ModelToolFunction("0"))
    turn = unmark(render([], [tool], add_generation_prompt=False))
    line = next(line for line in turn.split("\n") if line.startswith("{") and '"0"' in line)
    before, after = turn.split(line)
    return before.removeprefix(_TURN + _HEADERS["system"]), after.partition(TURN_END)[0]


def _invalid_prompt(what: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"token_ids: the prompt does not follow this model's chat template: {what}; render the conversation with "
        "POST /tokenize, and send these tokens",
        param="token_ids",
    )
