"""vLLM's API, chat completions and token endpoints: the schema and checks of requests, and the form of errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct, field

from understudy.errors import BackendError
from understudy.util.validation import validation_text
from understudy.wire.chat_request import ChatContentPart, ChatStreamOptions


class FunctionCall(Struct):
    """A function call in a message; `arguments` is the JSON text that was sampled, or an object."""

    name: str
    arguments: str | dict[str, Any] = "{}"


class MessageToolCall(Struct):
    """One tool call of an assistant message."""

    function: FunctionCall
    id: str = ""
    type: str = "function"


class ModelMessage(Struct):
    """One message of a conversation. `reasoning_content` is the older name of `reasoning`."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ChatContentPart] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[MessageToolCall] | None = None
    tool_call_id: str | None = None

    @property
    def thinking(self) -> str | None:
        """The model's reasoning, under either name."""
        return self.reasoning_content if self.reasoning is None else self.reasoning

    @property
    def text(self) -> str:
        """The message's text; parts are joined by newlines. Raises BackendError for an image."""
        if self.content is None or isinstance(self.content, str):
            return self.content or ""
        texts: list[str] = []
        for part in self.content:
            if part.type == "image_url":
                raise BackendError(
                    "At most 0 image(s) may be provided in one prompt, because this model reads text only; leave "
                    "the image out.",
                    status=400,
                )
            if part.type != "text":
                raise BackendError(
                    f"content: unsupported part of type {part.type[:100]!r}, expected 'text'; leave the part out",
                    status=400,
                )
            if part.text is None:
                raise BackendError(
                    "content: a part of type 'text' has no text, expected a string in its key 'text'; add it",
                    status=400,
                )
            texts.append(part.text)
        return "\n".join(texts)


class ModelToolFunction(Struct, omit_defaults=True):
    """A tool's name, description and parameters."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ModelTool(Struct, kw_only=True):
    """A tool that the model may call. The template shows the fields in this order."""

    type: Literal["function"] = "function"
    function: ModelToolFunction


class NamedFunction(Struct):
    """The name of the tool that must be called."""

    name: str


class NamedToolChoice(Struct):
    """A choice of one tool by name."""

    function: NamedFunction
    type: Literal["function"] = "function"


class JsonSchema(Struct):
    """A schema that the response must satisfy."""

    schema: dict[str, Any]
    name: str = ""


class ModelResponseFormat(Struct):
    """The format of the response's text."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class SamplingFields(Struct, kw_only=True):
    """Sampling parameters of a request. Scripted policies ignore them, because they are deterministic."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    max_tokens: int | None = None
    n: int | None = 1
    seed: int | None = None
    stop: str | list[str] | None = None
    include_stop_str_in_output: bool = False

    @property
    def stop_strings(self) -> list[str]:
        """The stop strings, as a list."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []


class ModelChatRequest(SamplingFields):
    """The body of `POST /v1/chat/completions`; fields that no model here uses are left out."""

    messages: list[ModelMessage]
    model: str | None = None
    tools: list[ModelTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    response_format: ModelResponseFormat | None = None
    max_completion_tokens: int | None = None
    stream: bool | None = False
    stream_options: ChatStreamOptions | None = None
    logprobs: bool | None = False
    top_logprobs: int | None = 0
    return_token_ids: bool | None = None

    @property
    def output_limit(self) -> tuple[str, int | None]:
        """The field that limits the completion, and its value."""
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens


class StructuredOutputs(Struct):
    """Constraints that the response's text must satisfy."""

    json: dict[str, Any] | None = None


class SamplingParams(SamplingFields):
    """Sampling parameters of a token request; fields that no model here uses are left out."""

    logprobs: int | None = None
    structured_outputs: StructuredOutputs | None = None


class GenerateRequest(Struct):
    """The body of `POST /inference/v1/generate`, which takes and returns token ids."""

    token_ids: list[Annotated[int, Meta(ge=0)]]
    sampling_params: SamplingParams
    model: str | None = None
    stream: bool | None = False
    output_mode: str = "tokens"
    return_weight_versions: bool | None = None

    def chat(self, messages: list[ModelMessage], tools: list[ModelTool] | None) -> ModelChatRequest:
        """Return the equivalent chat completion request, with the conversation that the tokens represent."""
        params = self.sampling_params
        schema = params.structured_outputs.json if params.structured_outputs else None
        return ModelChatRequest(
            messages,
            model=self.model,
            tools=tools,
            response_format=ModelResponseFormat("json_schema", JsonSchema(schema)) if schema is not None else None,
            **{name: getattr(params, name) for name in SamplingFields.__struct_fields__},
        )


class ModelCompletionRequest(SamplingFields):
    """The body of `POST /v1/completions` with a prompt of tokens; fields that no model here uses are left out."""

    prompt: list[Annotated[int, Meta(ge=0)]]
    model: str | None = None
    stream: bool | None = False
    echo: bool | None = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None

    def generate(self) -> GenerateRequest:
        """Return the equivalent request with token ids."""
        params = {name: getattr(self, name) for name in SamplingFields.__struct_fields__}
        return GenerateRequest(self.prompt, SamplingParams(**params), model=self.model)


class TokenizeRequest(Struct):
    """The body of `POST /tokenize`: a prompt, or a conversation."""

    prompt: str | None = None
    messages: list[ModelMessage] | None = None
    tools: list[ModelTool] | None = None
    model: str | None = None
    add_generation_prompt: bool = True


class DetokenizeRequest(Struct):
    """The body of `POST /detokenize`."""

    tokens: list[int] = field(default_factory=list[int])
    model: str | None = None


class InvalidRequestError(BackendError):
    """A refused request. `param` names the invalid field, `kind` is the error type that clients get."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, kind: str = "BadRequestError"
    ) -> None:
        super().__init__(message, status=status)
        self.param = param
        self.kind = kind


_Body = TypeVar("_Body")


def read_body(body: bytes, as_: type[_Body]) -> _Body:
    """Return a request body as a struct. Raises InvalidRequestError that says where it is invalid."""
    try:
        return msgspec.json.decode(body, type=as_)
    except msgspec.ValidationError as error:
        raise InvalidRequestError(
            f"invalid request body: {validation_text(error, as_)}; correct this field"
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        hint = "; a \\ud800 to \\udfff escape must be one of a pair" if b"\\ud" in body.lower() else ""
        raise InvalidRequestError(
            f"the request body is not valid JSON: {error}{hint}; expected a JSON object: correct it"
        ) from None


_BOUNDS: dict[str, tuple[Callable[[float], bool], str]] = {
    # Written in such a form that NaN counts as out of bounds.
    "temperature": (lambda value: 0 <= value < math.inf, "non-negative"),
    "top_p": (lambda value: 0 < value <= 1, "in (0, 1]"),
    "top_k": (lambda value: value >= -1, "0 (disable), or at least 1"),
    "min_p": (lambda value: 0 <= value <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda value: 0 < value < math.inf, "greater than zero"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "in [-2, 2]"),
    "n": (lambda value: value == 1, "1 for this model"),
    "max_tokens": (lambda value: value >= 1, "at least 1"),
    "max_completion_tokens": (lambda value: value >= 1, "at least 1"),
}


def check_chat(request: ModelChatRequest, vocabulary: int) -> None:
    """Raise InvalidRequestError for mistakes that types do not express, with vLLM's messages where it has some."""
    offered = {tool.function.name for tool in request.tools or []}
    choice, count = request.tool_choice, request.top_logprobs or 0
    _refuse(not request.messages, "messages", "`messages` must hold at least one message, got none; add one.")
    _refuse(
        request.tools == [],
        "tools",
        "`tools` must not be an empty array. Either provide at least one tool or omit the field entirely.",
    )
    without_tools = choice not in (None, "none") and request.tools is None
    message = "When using `tool_choice`, `tools` must be set; add them, or leave `tool_choice` out."
    _refuse(without_tools, "tool_choice", message)
    unknown = isinstance(choice, NamedToolChoice) and choice.function.name not in offered
    names = ", ".join(sorted(offered)) or "none"
    message = (
        f"The tool specified in `tool_choice` does not match any of the specified `tools`; name one of: {names}"
    )
    _refuse(unknown, "tool_choice", message)
    without_stream = request.stream_options is not None and not request.stream
    message = "Stream options can only be defined when `stream=True`; set it, or leave `stream_options` out."
    _refuse(without_stream, "stream_options", message)
    message = f"`top_logprobs` must be a positive value, got {count}; correct it, or leave it out."
    _refuse(count < 0, "top_logprobs", message)
    message = "when using `top_logprobs`, `logprobs` must be set to true; set it, or leave `top_logprobs` out."
    _refuse(count > 0 and not request.logprobs, "top_logprobs", message)
    check_sampling(request, vocabulary)


def check_sampling(fields: SamplingFields, vocabulary: int) -> None:
    """Raise InvalidRequestError for parameters out of bounds, or token ids outside the vocabulary."""
    for name, (allowed, expected) in _BOUNDS.items():
        value = getattr(fields, name, None)
        message = f"{name} must be {expected}, got {value}; correct it, or leave it out."
        _refuse(value is not None and not allowed(value), name, message)
    _refuse("" in fields.stop_strings, "stop", "stop cannot contain an empty string; leave that one out.")
    biases = fields.logit_bias or {}
    outside = [bias for bias in biases.values() if not -100 <= bias <= 100]
    _refuse(bool(outside), "logit_bias", f"logit_bias must be in [-100, 100], got {outside[:5]}; correct it.")
    unknown = [id_ for id_ in biases if not 0 <= id_ < vocabulary]
    message = f"logit_bias has token ids that are out of vocabulary: {unknown[:5]}; expected 0 to {vocabulary - 1}"
    _refuse(bool(unknown), "logit_bias", f"{message}: remove them.")


def check_generate(request: GenerateRequest, vocabulary: int) -> None:
    """Raise InvalidRequestError for mistakes that types do not express; `vocabulary` is the number of tokens."""
    highest = max(request.token_ids, default=0)
    _refuse(not request.token_ids, "token_ids", "`token_ids` must hold at least one token, got none; add some.")
    _refuse(highest >= vocabulary, "token_ids", _out_of_vocabulary(highest, vocabulary))
    _refuse(bool(request.stream), "stream", "`stream` is unsupported here; leave it out.")
    message = f"`output_mode` must be `tokens` for this model, got {request.output_mode!r}; send that."
    _refuse(request.output_mode != "tokens", "output_mode", message)
    check_sampling(request.sampling_params, vocabulary)


def check_completion(request: ModelCompletionRequest, vocabulary: int) -> None:
    """Raise InvalidRequestError for mistakes that types do not express; `vocabulary` is the number of tokens."""
    _refuse(not request.prompt, "prompt", "`prompt` must hold at least one token, got none; add some.")
    highest = max(request.prompt, default=0)
    _refuse(highest >= vocabulary, "prompt", _out_of_vocabulary(highest, vocabulary))
    _refuse(bool(request.stream), "stream", "`stream` is unsupported here; leave it out.")
    _refuse(bool(request.echo), "echo", "`echo` is unsupported here; use `prompt_logprobs`.")
    _refuse(
        request.logprobs is not None, "logprobs", "`logprobs` is unsupported here; use /inference/v1/generate."
    )
    message = (
        f"`prompt_logprobs` must be 0 for this model, got {request.prompt_logprobs}; send that, or leave it out."
    )
    _refuse(request.prompt_logprobs not in (None, 0), "prompt_logprobs", message)
    check_sampling(request, vocabulary)


def _out_of_vocabulary(token_id: int, vocabulary: int) -> str:
    return (
        f"Token id {token_id} is out of vocabulary; expected 0 to {vocabulary - 1}: encode with this "
        "model's tokenizer"
    )


def _refuse(wrong: bool, param: str, message: str) -> None:
    if wrong:
        raise InvalidRequestError(message, param=param)


def check_length(limited: tuple[str, int | None], prompt_tokens: int, context: int) -> int:
    """Return how many tokens may be generated; `limited` is the field that limits them, and its value.

    Raises InvalidRequestError when prompt and completion do not fit in the context.
    """
    name, limit = limited
    output = limit or 0
    if output > context:
        raise InvalidRequestError(
            f"{name}={output} cannot be greater than max_model_len={context}. Please request fewer output tokens.",
            param=name,
        )
    if prompt_tokens > context - output or (limit is None and prompt_tokens == context):
        raise InvalidRequestError(
            f"This model's maximum context length is {context} tokens. However, you requested {output} output "
            f"tokens and your prompt contains {prompt_tokens} input tokens, for a total of "
            f"{prompt_tokens + output} tokens. "
            "Please reduce the length of the input prompt or the number of requested output tokens.",
            param="input_tokens",
        )
    return context - prompt_tokens if limit is None else limit


def error_body(error: BackendError) -> dict[str, Any]:
    """Return the JSON body of an error, in OpenAI's format as vLLM fills it."""
    status = error.status or 500
    param, kind = None, "BadRequestError" if status < 500 else "InternalServerError"
    if isinstance(error, InvalidRequestError):
        param, kind = error.param, error.kind
    return {"error": {"message": str(error), "type": kind, "param": param, "code": status}}
