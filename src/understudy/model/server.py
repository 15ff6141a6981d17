"""The server of the embedded model: `python -m understudy.model.server --policy NAME`, or `--weights DIRECTORY`.

It has vLLM's API: chat completions and token endpoints; for weights also vLLM's endpoints to pause it and to
exchange them. When it listens it prints one JSON line, {"url": …, "model": …}.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hmac
import os
import signal
import socket
import sys
import threading
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import msgspec
import orjson
import uvicorn

from understudy.errors import BackendError, ConfigError, UnderstudyError
from understudy.model.directory import fingerprint, require_packages
from understudy.model.protocol import (
    DetokenizeRequest,
    GenerateRequest,
    InvalidRequestError,
    ModelChatRequest,
    ModelCompletionRequest,
    TokenizeRequest,
    check_chat,
    check_completion,
    check_generate,
    check_length,
    error_body,
    read_body,
)
from understudy.model.responses import (
    ChatResult,
    ControlRequest,
    ServedModel,
    chunk_bodies,
    completion_body,
    message_body,
    tokens_body,
)
from understudy.model.scripted.model import ScriptedModel
from understudy.model.scripted.policies import POLICIES, TaskIndex, make_policy, read_tasks
from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.util.addresses import is_loopback
from understudy.util.text import reason_of

_BODY_LIMIT = 64 << 20

Scope = dict[str, Any]
Receive = Callable[[], Awaitable[dict[str, Any]]]
Send = Callable[[dict[str, Any]], Awaitable[None]]
ResponseContent = dict[str, Any] | Iterator[dict[str, Any]] | str | None
"""A JSON body, the chunks of a stream, a text, or an empty answer."""


class ClientDisconnectedError(Exception):
    """The client of a request has disconnected."""


async def run_unless_disconnected(work: Coroutine[Any, Any, ResponseContent], receive: Receive) -> ResponseContent:
    """Return the result of `work`, which is cancelled when the client disconnects.

    Raises ClientDisconnectedError.
    """
    task = asyncio.ensure_future(work)
    disconnected = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, disconnected), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnectedError
    finally:
        task.cancel()
        disconnected.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def send_response(send: Send, status: int, content: ResponseContent) -> None:
    """Send a response."""
    if content is None or isinstance(content, dict):
        await _send_bytes(send, status, b"application/json", b"" if content is None else _encode(content))
    elif isinstance(content, str):
        await _send_bytes(send, status, b"text/plain; charset=utf-8", content.encode())
    else:
        await _send_stream(send, content)


async def read_request_body(receive: Receive) -> bytes:
    """Return the body of a request. Raises InvalidRequestError."""
    parts: list[bytes] = []
    size = 0
    while True:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise InvalidRequestError(
                "the client closed the connection before its request was complete; send it again"
            )
        parts.append(event.get("body", b""))
        size += len(parts[-1])
        if size > _BODY_LIMIT:
            raise InvalidRequestError(
                f"the request body is larger than {_BODY_LIMIT} bytes, the maximum; send a smaller one",
                status=413,
                kind="RequestEntityTooLargeError",
            )
        if not event.get("more_body"):
            return b"".join(parts)


async def _send_bytes(send: Send, status: int, kind: bytes, data: bytes) -> None:
    headers = [(b"content-type", kind), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": data})


async def _send_stream(send: Send, chunks: Iterator[dict[str, Any]]) -> None:
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    for chunk in chunks:
        event = b"data: " + _encode(chunk) + b"\n\n"
        await send({"type": "http.response.body", "body": event, "more_body": True})
    await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


def _encode(body: dict[str, Any]) -> bytes:
    return orjson.dumps(body, default=msgspec.to_builtins)


DEFAULT_MODEL = "understudy-embedded"
DEFAULT_CONTEXT = 200_000
KEY_VARIABLE = "UNDERSTUDY_MODEL_KEY"
"""The key that clients must send when the server listens beyond loopback."""

_DIALECT_VERSION = "0.33.0"
_KEEP_ALIVE_S = 75
"""Longer than clients keep a connection that is idle: else we may close one at the moment when they ask again."""

Handler = Callable[[ControlRequest], Coroutine[Any, Any, ResponseContent]]


class ModelServer:
    """The ASGI application: a model behind vLLM's API."""

    def __init__(
        self,
        served: ServedModel,
        *,
        model: str = DEFAULT_MODEL,
        context: int = DEFAULT_CONTEXT,
        key: str | None = None,
    ) -> None:
        self._served = served
        self._model = model
        self._context = context
        self._key = key
        handlers: dict[str, Mapping[str, Handler]] = {
            "/v1/chat/completions": {"POST": self._chat},
            "/v1/completions": {"POST": self._complete},
            "/inference/v1/generate": {"POST": self._generate},
            "/tokenize": {"POST": self._tokenize},
            "/detokenize": {"POST": self._detokenize},
            "/v1/models": {"GET": self._models},
            "/health": {"GET": _respond_empty},
            "/version": {"GET": _respond_version},
        }
        self._routes: Mapping[str, Mapping[str, Handler]] = {**handlers, **served.controls}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one HTTP request; a completion is cancelled when its client disconnects."""
        try:
            handler = self._handler(scope)
            query = {key: values[-1] for key, values in parse_qs(scope["query_string"].decode("latin-1")).items()}
            work = handler(ControlRequest(query, await read_request_body(receive)))
            # A control command always runs to its end, because after half of one the served weights would be
            # unknown.
            controls = scope["path"] in self._served.controls
            content = await (work if controls else run_unless_disconnected(work, receive))
        except BackendError as error:
            await send_response(send, error.status or 500, error_body(error))
        except ClientDisconnectedError:
            return
        else:
            await send_response(send, 200, content)

    def _handler(self, scope: Scope) -> Handler:
        methods = self._routes.get(scope["path"])
        if methods is None:
            raise InvalidRequestError(
                f"Not Found: {scope['path'][:200]}; expected one of {', '.join(self._routes)}: check the base URL",
                status=404,
                kind="NotFoundError",
            )
        if scope["method"] not in methods:
            raise InvalidRequestError(
                f"Method Not Allowed: {scope['method'][:20]}; expected {' or '.join(methods)} for "
                f"{scope['path']}: send the request with that method",
                status=405,
                kind="MethodNotAllowedError",
            )
        # vLLM requires its key only below /v1; here all endpoints require it, because tokenizing is a service too.
        if self._key is not None and scope["path"] != "/health":
            authorization = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(authorization, f"Bearer {self._key}".encode()):
                raise InvalidRequestError(
                    "Unauthorized: the API key is missing or invalid; send the one in the server's "
                    f"{KEY_VARIABLE} in the header `authorization: Bearer KEY`",
                    status=401,
                    kind="AuthenticationError",
                )
        return methods[scope["method"]]

    async def _chat(self, command: ControlRequest) -> ResponseContent:
        request = read_body(command.body, ModelChatRequest)
        check_chat(request, len(self._served.vocabulary.token_bytes))
        model = self._model_name(request.model)
        prompt_ids, cached = self._served.render(request.messages, request.tools)
        limit = check_length(request.output_limit, len(prompt_ids), self._context)
        completion = await self._served.chat(request, prompt_ids, cached, limit, model)
        result = ChatResult(model, request, prompt_ids, completion)
        make = chunk_bodies if request.stream else message_body
        return make(result, self._served.vocabulary)

    async def _generate(self, command: ControlRequest) -> ResponseContent:
        request = read_body(command.body, GenerateRequest)
        check_generate(request, len(self._served.vocabulary.token_bytes))
        model = self._model_name(request.model)
        limited = ("max_tokens", request.sampling_params.max_tokens)
        limit = check_length(limited, len(request.token_ids), self._context)
        return tokens_body(request, await self._served.generate(request, limit, model))

    async def _complete(self, command: ControlRequest) -> ResponseContent:
        request = read_body(command.body, ModelCompletionRequest)
        vocabulary = self._served.vocabulary
        check_completion(request, len(vocabulary.token_bytes))
        model = self._model_name(request.model)
        limit = check_length(("max_tokens", request.max_tokens), len(request.prompt), self._context)
        scored = None
        if request.prompt_logprobs is not None:
            scored = await self._served.prompt_logprobs(request.prompt, model)
        completion = await self._served.generate(request.generate(), limit, model)
        return completion_body(request, model, completion, request.prompt, scored, vocabulary)

    async def _tokenize(self, command: ControlRequest) -> ResponseContent:
        request = read_body(command.body, TokenizeRequest)
        self._model_name(request.model)
        if (request.prompt is None) == (request.messages is None):
            got = "neither" if request.prompt is None else "both"
            raise InvalidRequestError(
                f"expected either `prompt` or `messages`, got {got}; send one of them", param="prompt"
            )
        if request.messages is None:
            ids = self._served.vocabulary.encode(request.prompt or "")
        else:
            ids, _ = self._served.render(
                request.messages, request.tools, add_generation_prompt=request.add_generation_prompt
            )
        return {"count": len(ids), "max_model_len": self._context, "tokens": ids, "token_strs": None}

    async def _detokenize(self, command: ControlRequest) -> ResponseContent:
        request = read_body(command.body, DetokenizeRequest)
        self._model_name(request.model)
        return {"prompt": self._served.vocabulary.decode(request.tokens)}

    async def _models(self, _: ControlRequest) -> ResponseContent:
        cards = [
            {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "understudy",
                "root": name,
                "parent": None if name == self._model else self._model,
                "max_model_len": self._context,
            }
            for name in (self._model, *self._served.models())
        ]
        return {"object": "list", "data": cards}

    def _model_name(self, model: str | None) -> str:
        """Return the name of the requested model. Raises InvalidRequestError for one that does not exist."""
        if model is None or model == self._model:
            return self._model
        if model not in self._served.models():
            served = ", ".join((self._model, *self._served.models()))
            raise InvalidRequestError(
                f"The model `{model}` does not exist. Name one of: {served}",
                status=404,
                param="model",
                kind="NotFoundError",
            )
        return model


async def _respond_empty(_: ControlRequest) -> ResponseContent:
    return None


async def _respond_version(_: ControlRequest) -> ResponseContent:
    return {"version": _DIALECT_VERSION}


class _UvicornServer(uvicorn.Server):
    """A server that reports when it listens, and exits normally on a termination signal."""

    announcement: bytes = b""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        os.write(sys.stdout.fileno(), self.announcement)

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop)
        yield

    def stop(self) -> None:
        """Stop after the running requests, within two seconds."""
        self.should_exit = True


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(1024)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason_of(error)}; expected an address of this machine and a "
            "free port: give another --port (0 takes a free one) or --host"
        ) from error
    return listener


def _key_for(host: str) -> str | None:
    """Return the key that clients must send. Raises ConfigError when one is needed and the environment
    has none.
    """
    key = os.environ.get(KEY_VARIABLE)
    if not key and not is_loopback(host):
        raise ConfigError(
            f"--host {host} can be reached from other machines; set {KEY_VARIABLE} to the API key that clients "
            "must send"
        )
    return key or None


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="understudy.model.server", description="Serve the embedded model.")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--policy", help=", ".join(sorted(POLICIES)))
    what.add_argument(
        "--weights",
        type=Path,
        metavar="DIRECTORY",
        help="the directory of a causal language model in Hugging Face's layout",
    )
    parser.add_argument("--policy-arg", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument(
        "--tasks", type=Path, metavar="FILE", help="JSONL file of the tasks that the policy solves"
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="the port to listen on; 0 takes a free one")
    parser.add_argument("--model-name", default=DEFAULT_MODEL)
    parser.add_argument(
        "--model-version", help="the version of the weights in responses [default: a hash of their content]"
    )
    parser.add_argument("--max-model-len", type=int, help="context length in tokens [default: the model's own]")
    parser.add_argument("--device", default="cpu", help="the device of the weights: cpu or cuda")
    parser.add_argument(
        "--max-num-seqs",
        type=int,
        default=32,
        help="maximum number of requests decoded in one batch [default: 32]",
    )
    parser.add_argument("--exit-with-parent", action="store_true", help="exit when stdin is closed")
    return parser.parse_args(argv)


def _policy_arguments(pairs: Sequence[str]) -> dict[str, str]:
    for pair in pairs:
        if "=" not in pair:
            raise ConfigError(f"--policy-arg: expected KEY=VALUE, got {pair!r}; give it as in p=0.5")
    return dict(pair.split("=", 1) for pair in pairs)


def _load_policy(options: argparse.Namespace) -> ServedModel:
    tasks = read_tasks(options.tasks) if options.tasks else TaskIndex(())
    return ScriptedModel(
        make_policy(options.policy, tasks, _policy_arguments(options.policy_arg)), scripted_tokenizer()
    )


def _load_weights(options: argparse.Namespace) -> tuple[ServedModel, int]:
    """Return the model of a directory, and the context length to serve it with. Raises ConfigError."""
    version = options.model_version or fingerprint(options.weights)
    require_packages("torch", "transformers")
    # Imported here, because it takes seconds and policies do not need it.
    import torch

    if options.device != "cpu" and not torch.cuda.is_available():
        raise ConfigError(
            f"--device {options.device}: torch finds no GPU on this machine; leave out --device to use the CPU"
        )
    from understudy.model.causal.engine import EngineLimits
    from understudy.model.causal.serving import CausalModel

    limits = EngineLimits(slots=options.max_num_seqs)
    model = CausalModel(
        options.weights, name=options.model_name, version=version, device=options.device, limits=limits
    )
    if options.max_model_len is not None and options.max_model_len > model.context:
        raise ConfigError(
            f"--max-model-len is {options.max_model_len}, but the model in {options.weights} supports "
            f"{model.context} tokens (max_position_embeddings in config.json); give at most that, or leave it out"
        )
    return model, model.context


def _build_server(options: argparse.Namespace) -> tuple[_UvicornServer, socket.socket, ServedModel]:
    key = _key_for(options.host)
    for flag, number in (("max-model-len", options.max_model_len), ("max-num-seqs", options.max_num_seqs)):
        if number is not None and number < 1:
            raise ConfigError(f"--{flag} is {number}; give a number of at least 1")
    served, context = _load_weights(options) if options.weights else (_load_policy(options), DEFAULT_CONTEXT)
    app = ModelServer(served, model=options.model_name, context=options.max_model_len or context, key=key)
    listener = _listen(options.host, options.port)
    config = uvicorn.Config(
        app,  # pyright: ignore[reportArgumentType]
        loop="uvloop",
        http="httptools",
        interface="asgi3",
        lifespan="off",
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        timeout_keep_alive=_KEEP_ALIVE_S,
    )
    server = _UvicornServer(config)
    host = f"[{options.host}]" if ":" in options.host else options.host
    url = f"http://{host}:{listener.getsockname()[1]}"
    server.announcement = orjson.dumps({"url": url, "model": options.model_name}) + b"\n"
    return server, listener, served


def _stop_at_eof(server: _UvicornServer) -> None:
    while os.read(sys.stdin.fileno(), 4096):
        pass
    server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until a signal or the parent's end; 0 then, and 2 when the server cannot start."""
    options = _arguments(argv)
    try:
        server, listener, served = _build_server(options)
    except UnderstudyError as error:
        sys.stderr.write(f"understudy.model.server: {error}\n")
        return 2
    if options.exit_with_parent:
        threading.Thread(target=_stop_at_eof, args=(server,), daemon=True).start()
    try:
        server.run(sockets=[listener])
    finally:
        served.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
