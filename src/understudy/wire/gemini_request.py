"""Gemini generateContent requests: their schema, and how they are read into a conversation.

Clients may leave out the ids of tool calls. A call without an id gets one derived from its name and arguments, so
that it is the same in the response and in later requests; a result without an id answers the first open call with
its name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any, Literal, cast

import msgspec
from msgspec import Raw, Struct, field

from understudy.wire.arguments import comparable_arguments, unwrapped, wrapped
from understudy.wire.decoding import RequestTools, ToolCache, decode, decoded, function_tool
from understudy.wire.layout import IMAGE
from understudy.wire.model import TEXT_SEPARATOR, Block, BlockKind, Conversation, Part, ReadingState, as_stored
from understudy.wire.openai import sent_name

EXPECTED = "a Gemini generateContent request"
_CONTENTS = "contents"


# --- the schema -----------------------------------------------------------------------------------------


class GeminiBlob(Struct, rename="camel", gc=False):
    mime_type: str = ""
    data: str = ""


class GeminiFunctionCall(Struct, rename="camel", gc=False):
    id: str | None = None
    name: str = ""
    args: Raw = Raw()


class GeminiFunctionResponse(Struct, rename="camel", gc=False):
    """The result of a function; `parts` are images and files that belong to it."""

    id: str | None = None
    name: str = ""
    response: Raw = Raw()
    parts: list[GeminiPart] | None = None


class GeminiPart(Struct, rename="camel", omit_defaults=True, gc=False):
    """A content part, in which exactly one field is set. Only the provider that made a signature can read it."""

    text: str | None = None
    thought: bool | None = None
    inline_data: GeminiBlob | None = None
    function_call: GeminiFunctionCall | None = None
    function_response: GeminiFunctionResponse | None = None
    file_data: Any = None
    executable_code: Any = None
    code_execution_result: Any = None


class GeminiContent(Struct, rename="camel", gc=False):
    """A content of a request or of a candidate."""

    role: Literal["user", "model", "function"] | None = None
    parts: list[GeminiPart] | None = None


class GeminiFunction(Struct, rename="camel"):
    """A function declaration; its parameters are given in one of two kinds of schema."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    parameters_json_schema: dict[str, Any] | None = None


class GeminiTool(Struct, rename="camel"):
    """A tool: functions that the client runs, or something that the provider runs."""

    function_declarations: list[GeminiFunction] | None = None
    google_search: Any = None
    google_search_retrieval: Any = None
    google_maps: Any = None
    url_context: Any = None
    code_execution: Any = None
    file_search: Any = None
    computer_use: Any = None


class FunctionCallingConfig(Struct, rename="camel"):
    mode: Literal["MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED"] = "AUTO"
    allowed_function_names: list[str] | None = None


class ToolConfig(Struct, rename="camel"):
    function_calling_config: FunctionCallingConfig | None = None


class ThinkingConfig(Struct, rename="camel"):
    thinking_budget: int | None = None
    thinking_level: str | None = None


class GenerationConfig(Struct, rename="camel"):
    """The fields that influence the request to a model, and those that ask for something unsupported."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: float | None = None
    max_output_tokens: int | None = None
    stop_sequences: list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    response_mime_type: str | None = None
    response_schema: dict[str, Any] | None = None
    response_json_schema: dict[str, Any] | None = None
    thinking_config: ThinkingConfig | None = None
    # Refused, except for values without an effect.
    candidate_count: Any = None
    response_modalities: Any = None
    response_logprobs: Any = None
    speech_config: Any = None


class GeminiBody(Struct, rename="camel"):
    """The fields of a request that contain the conversation."""

    contents: list[GeminiContent]
    system_instruction: GeminiContent | None = None
    tools: Raw = Raw()
    tool_config: ToolConfig | None = None
    generation_config: GenerationConfig = field(default_factory=GenerationConfig)


class GenerateContentRequest(GeminiBody, rename="camel", kw_only=True):
    """A request. All other fields (`safetySettings`, `labels`, `model`, …) are ignored, whatever they contain.

    Google's servers also accept names in snake case. Those are refused, since ignoring one would lose a field.
    """

    cached_content: Any = None
    snake_system: Any = field(default=None, name="system_instruction")
    snake_tool_config: Any = field(default=None, name="tool_config")
    snake_config: Any = field(default=None, name="generation_config")
    snake_cached: Any = field(default=None, name="cached_content")


class CountTokensRequest(Struct, rename="camel"):
    """A request for a token count: either contents, or the whole request in which they would be sent."""

    contents: list[GeminiContent] = field(default_factory=list[GeminiContent])
    generate_content_request: GenerateContentRequest | None = None

    def counted_request(self) -> GenerateContentRequest:
        """Return the request whose prompt is to be counted."""
        return self.generate_content_request or GenerateContentRequest(self.contents)


_REQUEST = msgspec.json.Decoder(GenerateContentRequest)
_COUNT_REQUEST = msgspec.json.Decoder(CountTokensRequest)
_BODY = msgspec.json.Decoder(GeminiBody)
_CONTENT = msgspec.json.Decoder(GeminiContent)


# --- conversations --------------------------------------------------------------------------------------


def decode_request(body: bytes, *, count: bool = False) -> GenerateContentRequest:
    """Decode a request; with `count`, one for a token count, of which the counted request is returned.

    Raises InvalidRequest, which says what is wrong and where.
    """
    if count:
        return decode(body, _COUNT_REQUEST, "a Gemini countTokens request").counted_request()
    return decode(body, _REQUEST, EXPECTED)


def read_request(body: bytes) -> Conversation:
    """Return the conversation of a stored request. Raises the exceptions in UNREADABLE."""
    return _read_stored(decoded(_BODY.decode, body))


def read_outer(body: bytes, instructions: tuple[str, ...]) -> Conversation:
    """See Dialect. No content adds instructions."""
    request = decoded(_BODY.decode, body)
    if request.contents or instructions:
        raise ValueError("the outer part of this request has contents, expected none; read the request as a whole")
    return _read_stored(request)


def read_next(state: ReadingState, body: bytes) -> tuple[list[Block], ReadingState]:
    """See Dialect. A model's content that follows another one continues the last text of that."""
    content = decoded(_CONTENT.decode, body)
    is_model = content.role == "model"
    if is_model and state.stage:
        raise ValueError("a content continues the turn before it; read the request as a whole")
    reader = _GeminiReader(state=state)
    reader.read(state.messages, content)
    return reader.blocks, ReadingState(
        messages=state.messages + 1,
        turn=state.turn + 1,
        stage=int(is_model),
        open_calls=tuple(reader.open_calls),
        unsupported=(*state.unsupported, *reader.unsupported),
    )


def _read_stored(request: GeminiBody) -> Conversation:
    conversation, choice = read_conversation(request)
    config = request.generation_config
    return as_stored(
        conversation,
        bytes(request.tools),
        agent_tools=bool(conversation.tools),
        tool_is_forced=isinstance(choice, dict),
        has_output_schema=config.response_schema is not None or config.response_json_schema is not None,
    )


def read_conversation(request: GeminiBody) -> tuple[Conversation, str | dict[str, Any] | None]:
    """Return a request's conversation, what in it no chat model can do, and the tool choice."""
    tools = _tools.read(bytes(request.tools))
    functions, choice = _choose(tools, request.tool_config)
    reader = _GeminiReader(tools.unsupported)
    if request.system_instruction is not None:
        reader.instruct(request.system_instruction)
    for index, content in enumerate(request.contents):
        reader.read(index, content)
    conversation = Conversation(
        instructions=tuple(reader.instructions),
        blocks=tuple(reader.blocks),
        tools=functions,
        tools_json=tools.json if functions is tools.functions else None,
        unsupported=tuple(reader.unsupported),
    )
    return conversation, choice


# --- tools ----------------------------------------------------------------------------------------------

_PROVIDER_TOOL_FIELDS = tuple(name for name in GeminiTool.__struct_fields__ if name != "function_declarations")


def _read_tools(tools: Sequence[GeminiTool]) -> RequestTools:
    """Return the functions. Tools of the provider are left out, and refused if nothing else is offered."""
    functions: list[dict[str, Any]] = []
    for tool in tools:
        for function in tool.function_declarations or ():
            parameters = function.parameters_json_schema
            if parameters is None and function.parameters is not None:
                parameters = json_schema(function.parameters)
            functions.append(function_tool(function.name, function.description, parameters))
    unsupported: list[str] = []
    for index, tool in enumerate(tools):
        if tool.function_declarations is None and not functions:
            names = [sent_name(tool, name) for name in _PROVIDER_TOOL_FIELDS if getattr(tool, name) is not None]
            what = ", ".join(names) or "a tool of an unknown kind"
            unsupported.append(
                f"tools[{index}]: unsupported: {what}, expected functionDeclarations; leave the tool out"
            )
    return RequestTools(functions, Raw(msgspec.json.encode(functions)), tuple(unsupported))


_tools = ToolCache(GeminiTool, EXPECTED, _read_tools)


def _choose(
    tools: RequestTools, config: ToolConfig | None
) -> tuple[list[dict[str, Any]], str | dict[str, Any] | None]:
    """Return the functions to offer, and the choice between them; None if there are none."""
    chosen = config.function_calling_config if config else None
    functions = tools.functions
    if chosen is None or not functions:
        return functions, None
    if (names := chosen.allowed_function_names) and chosen.mode in ("ANY", "VALIDATED"):
        functions = [function for function in functions if function["function"]["name"] in names]
        if chosen.mode == "ANY" and len(functions) == 1:
            return functions, {"type": "function", "function": {"name": functions[0]["function"]["name"]}}
    if not functions:
        return functions, None
    return functions, {"ANY": "required", "NONE": "none"}.get(chosen.mode, "auto")


_COUNT_KEYWORDS = ("minItems", "maxItems", "minLength", "maxLength", "minProperties", "maxProperties")
_SUBSCHEMAS = ("items", "additionalProperties")


def json_schema(schema: dict[str, Any]) -> dict[str, Any]:
    """Return one of Gemini's schemas as JSON Schema, the format that models are trained on.

    Type names become lower case, `nullable` becomes a second type, counts given as strings become numbers, and
    `propertyOrdering` is left out.
    """
    converted: dict[str, Any] = {}
    for name, value in schema.items():
        if name == "type" and isinstance(value, str):
            if value != "TYPE_UNSPECIFIED":
                converted["type"] = value.lower()
        elif name in _COUNT_KEYWORDS and isinstance(value, str) and value.isdigit():
            converted[name] = int(value)
        elif name == "properties" and isinstance(value, dict):
            properties = cast("dict[str, Any]", value)
            converted[name] = {key: _subschema(subschema) for key, subschema in properties.items()}
        elif name == "anyOf" and isinstance(value, list):
            converted[name] = [_subschema(subschema) for subschema in cast("list[Any]", value)]
        elif name in _SUBSCHEMAS:
            converted[name] = _subschema(value)
        elif name not in ("nullable", "propertyOrdering"):
            converted[name] = value
    if schema.get("nullable") is True and isinstance(converted.get("type"), str):
        converted["type"] = [converted["type"], "null"]
    return converted


def _subschema(value: Any) -> Any:
    return json_schema(cast("dict[str, Any]", value)) if isinstance(value, dict) else value


# --- contents -------------------------------------------------------------------------------------------


_INITIAL_STATE = ReadingState()


class _GeminiReader:
    """Reads contents into blocks. Several contents of the model in a row are one turn.

    Clients keep a streamed response as one part for each piece of it, so texts in a row in a model's turn are one
    text.
    """

    def __init__(
        self, unsupported: Sequence[str] = (), *, response: bool = False, state: ReadingState = _INITIAL_STATE
    ) -> None:
        self.instructions: list[str] = []
        self.blocks: list[Block] = []
        self.unsupported = list(unsupported)
        self.open_calls = list(state.open_calls)
        self._response = response
        self._field = _CONTENTS
        self._role = ""
        self._turn = state.turn
        self._equal_calls: Counter[str] = Counter()  # calls of this turn without an id

    def instruct(self, content: GeminiContent) -> None:
        """Read the system instruction."""
        for part in content.parts or ():
            if part.text is None:
                self.unsupported.append("systemInstruction: unsupported part, expected text; leave the part out")
            elif part.text:
                self.instructions.append(part.text)

    def read(self, index: int, content: GeminiContent) -> None:
        """Read the next content."""
        role = "assistant" if content.role == "model" else "user"
        if role == "user" or self._role != role:
            self._turn += 1
            self._equal_calls.clear()
        self._role, before = role, len(self.blocks)
        for number, part in enumerate(content.parts or ()):
            self._field = f"{_CONTENTS}[{index}].parts[{number}]"
            self._part(part)
        if len(self.blocks) == before and (not before or self.blocks[-1].turn != self._turn):
            self._add("text")

    def _part(self, part: GeminiPart) -> None:
        if part.function_call is not None:
            self._call(part.function_call)
        elif part.function_response is not None:
            self._result(part.function_response)
        elif part.inline_data is not None:
            image = self._image(part.inline_data)
            if image is None:
                self._add("other", "[inlineData]", name="inlineData", source=part)
            else:
                self._add("other", IMAGE, name="image", images=(image,))
        elif part.text is not None:
            self._text("thinking" if part.thought else "text", part.text)
        elif part != _EMPTY_PART:  # a part with only a signature has no content
            (name,) = list(msgspec.to_builtins(part))[:1] or ["part"]
            self._refuse(
                f"{name}: unsupported part, expected text, inlineData, functionCall or functionResponse; "
                "leave it out"
            )
            self._add("other", f"[{name}]", name=name, source=part)

    def _text(self, kind: BlockKind, text: str) -> None:
        if self._role == "user":
            self._add("text", text)
            return
        last_block = self.blocks[-1] if self.blocks else None
        if last_block is not None and last_block.turn == self._turn and last_block.kind == kind:
            self.blocks[-1] = msgspec.structs.replace(last_block, text=last_block.text + text)
        elif text:
            self._add(kind, text)

    def _call(self, call: GeminiFunctionCall) -> None:
        if not call.name:
            self._refuse("functionCall.name: missing, expected the name of the called function; add it")
        sent = bytes(call.args).decode()
        sent = "" if sent == "null" else sent
        arguments = unwrapped(sent) if self._response else wrapped(sent)
        id_ = call.id or self._id_of(call.name, arguments)
        self.open_calls.append((id_, call.name))
        self._add("tool_use", id=id_, name=call.name, arguments=arguments)

    def _id_of(self, name: str, arguments: str) -> str:
        """Return an id for a call that has none: always the same for the same call at the same place of a turn."""
        digest = blake2b(f"{name}\0{comparable_arguments(arguments)}".encode(errors="replace"), digest_size=9)
        call = digest.hexdigest()
        self._equal_calls[call] += 1
        return f"call_{call}_{self._equal_calls[call]}"

    def _result(self, result: GeminiFunctionResponse) -> None:
        matching = (
            id_ for id_, name in self.open_calls if (id_ == result.id if result.id else name == result.name)
        )
        id_ = next(matching, result.id or result.name)
        self.open_calls = [call for call in self.open_calls if call[0] != id_]
        images: list[Part] = []
        texts: list[str] = []
        text, is_error = _result_text(bytes(result.response))
        for part in result.parts or ():
            image = self._image(part.inline_data) if part.inline_data is not None else None
            if image is not None:
                images.append(image)
                texts.append(IMAGE)
            elif part.inline_data is None:
                self._refuse(
                    "functionResponse.parts: unsupported part, expected inlineData with an image; leave it out"
                )
        result_text = TEXT_SEPARATOR.join([text, *texts] if text or not texts else texts)
        self._add("tool_result", result_text, id=id_, is_error=is_error, images=tuple(images))

    def _image(self, blob: GeminiBlob) -> Part | None:
        if not blob.mime_type.startswith("image/"):
            self._refuse(
                f"inlineData of type {blob.mime_type[:100]!r} is unsupported, expected an image; leave the "
                "part out"
            )
            return None
        return {"type": "image_url", "image_url": {"url": f"data:{blob.mime_type};base64,{blob.data}"}}

    def _add(self, kind: BlockKind, text: str = "", **fields: Any) -> None:
        self.blocks.append(Block(self._turn, self._role, kind, text, **fields))

    def _refuse(self, problem: str) -> None:
        self.unsupported.append(f"{self._field}: {problem}")


_EMPTY_PART = GeminiPart()


def _result_text(response: bytes) -> tuple[str, bool]:
    """Return what a model is shown of a function's response, and whether it is an error.

    An object with the single key `output` or `error` contains the result there; any other object is itself the
    result.
    """
    sent = response.decode()
    value: Any = msgspec.json.decode(sent) if sent else None
    if not isinstance(value, dict):
        return "" if value is None else sent, False
    fields = cast("dict[str, Any]", value)
    if len(fields) == 1 and (key := next(iter(fields))) in ("output", "error"):
        inner = fields[key]
        return inner if isinstance(inner, str) else msgspec.json.encode(inner).decode(), key == "error"
    return msgspec.json.encode(fields).decode(), False


def read_candidate(content: GeminiContent) -> list[Block]:
    """Return the blocks of a candidate's content as one turn, with tool calls as the model wrote them."""
    reader = _GeminiReader(response=True)
    reader.read(0, GeminiContent("model", content.parts))
    return reader.blocks
