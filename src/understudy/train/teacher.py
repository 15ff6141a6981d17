"""The teacher of on-policy distillation: a model server that returns the logprobs of given tokens."""

from __future__ import annotations

import asyncio
import math
import os
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeVar

import aiohttp
import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from understudy.errors import BackendError, ConfigError
from understudy.model.fetch import model_path
from understudy.model.process import start_server
from understudy.train.groups import RolloutGroup, TokenSequence
from understudy.train.options import DistillOptions, GRPOOptions
from understudy.train.render import load_tokenizer
from understudy.util.http import HttpConnection, ResponseTooLarge, read_body
from understudy.util.settings import option

TeacherBackend = Literal["vllm", "sglang"]

_BODY_LIMIT = 256 << 20
_TIMEOUTS = aiohttp.ClientTimeout(total=None, connect=15.0, sock_read=600.0)
_RETRY_PAUSES_S = (1.0, 4.0, 15.0)
_MAX_CONCURRENT_REQUESTS = 8
_MAX_NAMES = 20
_DECODED_IDS_PER_REQUEST = 2_048
"""How many token ids one request decodes when vocabularies are compared."""
_COMPARED_TEXTS = (
    "def mean(values):\n    return sum(values) / len(values)  # 0.5\n",
    '<tool_call>{"name": "Read", "arguments": {"file_path": "/workspace/a_1.py"}}</tool_call>',
    "Grüße, 世界 \U0001f642\t\r\n  x==12345",
)
LONGER_THAN_CONTEXT = "sequences that are longer than the teacher's context"

_T = TypeVar("_T")


class TeacherSettings(Struct, frozen=True, kw_only=True):
    """The choice of a teacher, and the weights of its signal and of the reward."""

    teacher: Annotated[
        str | None,
        option(
            "The teacher: the URL of its server, or a model (as for MODEL), which is then served on this machine."
        ),
    ] = None
    teacher_backend: Annotated[TeacherBackend, option("The kind of the teacher's server: vllm or sglang.")] = (
        "vllm"
    )
    teacher_model: Annotated[
        str | None, option("The teacher's model name at its server [default: the server's first model].")
    ] = None
    teacher_tokenizer: Annotated[
        Path | None,
        option("The directory of the teacher's tokenizer.json, for servers without /tokenize.", metavar="DIR"),
    ] = None
    teacher_key_env: Annotated[
        str | None, option("The environment variable that holds the API key of the teacher's server.")
    ] = None
    teacher_coefficient: Annotated[
        float, option("The weight of the reverse KL to the teacher in every token's advantage.", gt=0)
    ] = 1.0
    reward_coefficient: Annotated[
        float, option("The weight of the reward's advantage; 0: learn from the teacher only.", ge=0)
    ] = 0.0

    def options(self, trainer: GRPOOptions) -> DistillOptions:
        """Return the options of updates towards this teacher. Raises ConfigError for an address that contains a
        password.
        """
        assert self.teacher is not None
        if "@" in self.teacher.partition("://")[2].partition("/")[0]:
            raise ConfigError(
                "--teacher: the address contains a user name or password, which would be stored; leave "
                "it out, and give --teacher-key-env"
            )
        return DistillOptions(
            **msgspec.structs.asdict(trainer),
            teacher=self.teacher,
            teacher_coefficient=self.teacher_coefficient,
            reward_coefficient=self.reward_coefficient,
        )


class _ModelName(Struct):
    id: str
    max_model_len: int | None = None


class _ModelNames(Struct):
    data: list[_ModelName]


class _EncodedText(Struct):
    tokens: list[int]


class _DecodedText(Struct):
    prompt: str | None = None
    text: str | None = None


class _PromptLogprob(Struct):
    logprob: float


class _ScoredChoice(Struct):
    prompt_logprobs: list[dict[str, _PromptLogprob] | None] | None = None


class _ScoredCompletion(Struct):
    choices: list[_ScoredChoice]


class _ScoredMeta(Struct):
    input_token_logprobs: list[tuple[float | None, int, Any]] | None = None


class _ScoredPrompt(Struct):
    meta_info: _ScoredMeta = field(default_factory=_ScoredMeta)


class TeacherServer:
    """A teacher on a server with vLLM's API at `url` (with or without /v1); the embedded server has this API too.

    vLLM returns the logprobs of a prompt as `prompt_logprobs` of /v1/completions, at temperature 1.
    """

    remedy: ClassVar[str] = "serve it with vLLM, SGLang (--teacher-backend sglang) or the embedded server"

    def __init__(self, url: str, *, model: str | None = None, key: str | None = None) -> None:
        self._connection = HttpConnection(url.rstrip("/").removesuffix("/v1"), key)
        self._base = self._connection.base
        self._model = model
        self._context: int | None = None
        self._slots = asyncio.Semaphore(_MAX_CONCURRENT_REQUESTS)

    async def open(self) -> None:
        """Ask the server for the model's name and context length.

        Raises BackendError, and ConfigError when the server does not have the requested model.
        """
        models = (await self._call("GET", "/v1/models", None, _ModelNames)).data
        names = [model.id for model in models]
        if not names or (self._model is not None and self._model not in names):
            wanted = "at least one model: load one there" if self._model is None else repr(self._model)
            raise ConfigError(
                f"the teacher at {self._base} serves {', '.join(names[:_MAX_NAMES]) or 'no model'}; expected "
                f"{wanted}; correct {'--teacher' if self._model is None else '--teacher-model'}"
            )
        chosen = models[0 if self._model is None else names.index(self._model)]
        self._model, self._context = chosen.id, chosen.max_model_len

    async def close(self) -> None:
        """Close the connections."""
        await self._connection.close()

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """Return the teacher's logprob of each token given all tokens before it, as long as `tokens`; 0.0 for the
        first.

        Raises BackendError, also for a response that is not about exactly these tokens.
        """
        body = {"model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        response = await self._call("POST", "/v1/completions", body, _ScoredCompletion)
        entries = response.choices[0].prompt_logprobs if response.choices else None
        if entries is None:
            raise self._no_logprobs("prompt_logprobs")
        by_token = [
            None if entry is None else entry.get(str(id_)) for entry, id_ in zip(entries, tokens, strict=False)
        ]
        values = [None if entry is None else entry.logprob for entry in by_token]
        return self._checked_logprobs(tokens, len(entries), values)

    async def with_logprobs(self, groups: Sequence[RolloutGroup], left_out: Counter[str]) -> list[RolloutGroup]:
        """Return the groups with the teacher's logprobs in every sequence that fits the teacher's context.

        Sequences that do not fit are returned without, and counted in `left_out`. Raises BackendError.
        """

        async def scored(sequence: TokenSequence) -> TokenSequence:
            if self._context is not None and len(sequence.token_ids) >= self._context:
                left_out[LONGER_THAN_CONTEXT] += 1
                return sequence
            async with self._slots:
                values = await self.logprobs(sequence.token_ids)
            masked = (
                value if is_learned else 0.0 for value, is_learned in zip(values, sequence.loss_mask, strict=True)
            )
            return replace(sequence, teacher_logprobs=tuple(masked))

        groups_with_logprobs: list[RolloutGroup] = []
        for group in groups:
            parts = [sequence for rollout in group.rollouts for sequence in rollout.sequences]
            values = iter(await asyncio.gather(*map(scored, parts)))
            rollouts = [
                replace(rollout, sequences=tuple(next(values) for _ in rollout.sequences))
                for rollout in group.rollouts
            ]
            groups_with_logprobs.append(replace(group, rollouts=tuple(rollouts)))
        return groups_with_logprobs

    async def check_vocabulary(self, student: Path, directory: Path | None = None) -> None:
        """Raise ConfigError unless the teacher has the same vocabulary as the model in `student`.

        With the teacher's `directory`, the two tokenizer.json files are compared. Otherwise the server is asked to
        tokenize some texts and to decode every token of the student's vocabulary. Raises BackendError.
        """
        tokenizer = load_tokenizer(student)
        if directory is not None:
            teacher_tokenizer = load_tokenizer(directory)
            if teacher_tokenizer.get_vocab() != tokenizer.get_vocab():
                raise self._other_vocabulary(
                    student,
                    f"{directory / 'tokenizer.json'} does not match the student's tokenizer.json (if "
                    "--teacher-tokenizer named it, check that it is the teacher's)",
                )
            return
        for text in _COMPARED_TEXTS:
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            student_ids = tokenizer.encode(text, add_special_tokens=False).ids
            if (ids := (await self._tokenizer_request("/tokenize", body, _EncodedText)).tokens) != student_ids:
                raise self._other_vocabulary(
                    student, f"it tokenizes {text[:30]!r} as {ids[:8]}…, the student as {student_ids[:8]}…"
                )
        texts = {id_: tokenizer.decode([id_], skip_special_tokens=False) for id_ in tokenizer.get_vocab().values()}
        # Skips tokens that are a part of a UTF-8 character, because they have no text of their own.
        comparable = [id_ for id_, text in sorted(texts.items()) if text and "\ufffd" not in text]
        for start in range(0, len(comparable), _DECODED_IDS_PER_REQUEST):
            part = comparable[start : start + _DECODED_IDS_PER_REQUEST]
            response = await self._tokenizer_request(
                "/detokenize", {"model": self._model, "tokens": part}, _DecodedText
            )
            expected = tokenizer.decode(part, skip_special_tokens=False)
            if (response.prompt if response.text is None else response.text) != expected:
                raise self._other_vocabulary(
                    student, f"tokens {part[0]} to {part[-1]} decode to another text there"
                )

    # --- implementation --------------------------------------------------------------------------------

    async def _tokenizer_request(self, path: str, body: dict[str, Any], kind: type[_T]) -> _T:
        try:
            return await self._call("POST", path, body, kind)
        except BackendError as error:
            if error.status not in (400, 404):
                raise
            raise ConfigError(
                f"the teacher at {self._base} has no endpoint to compare its vocabulary with the "
                f"student's ({error}); give its tokenizer: --teacher-tokenizer DIR"
            ) from error

    def _other_vocabulary(self, student: Path, why: str) -> ConfigError:
        return ConfigError(
            f"the teacher at {self._base} has another vocabulary than {student}: {why}; its logprobs "
            "would be about "
            "other texts. Use a teacher of the same family, or collect rollouts of this teacher and imitate them: "
            "understudy train sft"
        )

    def _no_logprobs(self, name: str) -> BackendError:
        return BackendError(
            f"the teacher at {self._base} returned no logprobs of a prompt (expected {name}); {self.remedy}",
            status=200,
        )

    def _checked_logprobs(self, tokens: Sequence[int], count: int, values: Sequence[float | None]) -> list[float]:
        finite = [0.0, *(-math.inf if value is None else value for value in values[1:])]
        if count != len(tokens) or not all(map(math.isfinite, finite)):
            raise BackendError(
                f"the teacher at {self._base}: invalid response: expected finite logprobs for the "
                "second and later of "
                f"{len(tokens)} tokens, got {count} entries, or logprobs of other tokens; check --teacher-backend",
                status=200,
            )
        return finite

    async def _call(self, method: str, path: str, body: dict[str, Any] | None, kind: type[_T]) -> _T:
        url = f"{self._base}{path}"
        data = None if body is None else msgspec.json.encode(body)
        try:
            stream = await self._connection.open(
                method, url, data, timeouts=_TIMEOUTS, retry_pauses_s=_RETRY_PAUSES_S
            )
            async with stream as response:
                content = await read_body(response, _BODY_LIMIT)
        except ResponseTooLarge as error:
            raise BackendError(
                f"the teacher at {self._base}: {error}; check that --teacher is the address of a model server"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            text = self._connection.redact(f"{type(error).__name__}: {error}")
            raise BackendError(
                f"no response from the teacher at {self._base}: {text}; check --teacher, and that the "
                "server is running"
            ) from error
        if response.status != 200:
            text = self._connection.redact(content[:300].decode("utf-8", "replace"))
            raise BackendError(
                f"the teacher's {method} {url}: status {response.status}, expected 200: {text}; see the log of "
                "that "
                "server, then run the same command again",
                status=response.status,
            )
        try:
            return msgspec.json.decode(content, type=kind)
        except msgspec.MsgspecError as error:
            raise BackendError(
                f"the teacher's {method} {url}: invalid response: {error}; check that --teacher-backend is the "
                "kind "
                "of this server",
                status=200,
            ) from error


class SGLangTeacherServer(TeacherServer):
    """A teacher on an SGLang server, which returns a prompt's logprobs as `input_token_logprobs` of /generate."""

    remedy = "if it is not SGLang, correct --teacher-backend"

    async def logprobs(self, tokens: Sequence[int]) -> list[float]:
        """See TeacherServer."""
        sampling = {"max_new_tokens": 1, "temperature": 0.0}
        body = {"input_ids": tokens, "sampling_params": sampling, "return_logprob": True, "logprob_start_len": 0}
        response = await self._call("POST", "/generate", body, _ScoredPrompt)
        entries = response.meta_info.input_token_logprobs
        if entries is None:
            raise self._no_logprobs("meta_info.input_token_logprobs")
        values = [entry[0] if entry[1] == id_ else None for entry, id_ in zip(entries, tokens, strict=False)]
        return self._checked_logprobs(tokens, len(entries), values)


_TEACHERS: dict[TeacherBackend, type[TeacherServer]] = {"vllm": TeacherServer, "sglang": SGLangTeacherServer}


@asynccontextmanager
async def open_teacher(settings: TeacherSettings, student: Path) -> AsyncGenerator[TeacherServer]:
    """Connect to the teacher while the context lasts. A model that is not an address is served by the embedded
    server.

    Raises ConfigError when the teacher's vocabulary is not that of the model in `student`, BackendError when the
    server fails.
    """
    assert settings.teacher is not None
    key = os.environ.get(settings.teacher_key_env) if settings.teacher_key_env else None
    if settings.teacher_key_env and not key:
        raise ConfigError(
            f"--teacher-key-env: the environment variable {settings.teacher_key_env} is not set; set it to the "
            "API key of the teacher's server, or leave the option out"
        )
    if settings.teacher.startswith(("http://", "https://")):
        teacher = _TEACHERS[settings.teacher_backend](settings.teacher, model=settings.teacher_model, key=key)
        async with _open_connection(teacher):
            await teacher.check_vocabulary(student, settings.teacher_tokenizer)
            # Two tokens of any vocabulary: a server without such logprobs is refused before rollouts are made.
            await teacher.logprobs([0, 1])
            yield teacher
        return
    directory = model_path(settings.teacher)
    async with start_server(weights=directory) as server, _open_connection(TeacherServer(server.url)) as teacher:
        await teacher.check_vocabulary(student, directory)
        yield teacher


@asynccontextmanager
async def _open_connection(teacher: TeacherServer) -> AsyncGenerator[TeacherServer]:
    try:
        await teacher.open()
        yield teacher
    finally:
        await teacher.close()
