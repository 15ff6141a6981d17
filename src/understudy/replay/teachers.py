"""Reads the teachers and the judge of a replay from a TOML file, which never contains a key."""

from __future__ import annotations

import hashlib
import re
import tomllib
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args

import msgspec
from msgspec import Meta, Struct, field, structs

from understudy.errors import ConfigError
from understudy.gateway.config import TIMEOUT_S, GatewayConfig, ModelConfig, ModelsConfig, check_config
from understudy.gateway.prices import Price
from understudy.ingest.model_families import model_family

Kind = Literal["openai", "anthropic", "vllm", "sglang"]
KINDS: tuple[str, ...] = get_args(Kind)
JUDGE = "judge"
"""The name of the judge that has a table of its own."""

_MAX_USD_PER_MILLION = 1e6
_PositiveInt = Annotated[int, Meta(ge=1)]
_NAME = re.compile(r"[\w.+-]{1,80}")
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`")
_GATEWAY_KEY_PREFIX = "models.high."
_MODEL_FIELDS = ("backend", "model", "base_url", "api_key_env", "template_args", "price", "timeout_s")
"""The fields of a teacher that the gateway's configuration of a model has too."""


class TeacherConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A teacher's table in the file. `price` is in US dollars per million tokens, `timeout_s` in seconds.

    `concurrency` is the maximum number of parallel requests, `tries` how often one is sent at most. `family` is
    the model family, if the model's name does not tell it. `max_tokens` limits an answer with its thinking.
    """

    backend: Kind
    model: str
    base_url: str | None = None
    api_key_env: str | None = None
    template_args: dict[str, Any] = field(default_factory=dict[str, Any])
    price: Price | None = None
    concurrency: _PositiveInt = 8
    timeout_s: Annotated[float, Meta(gt=0)] = TIMEOUT_S
    tries: Annotated[int, Meta(ge=1, le=20)] = 5
    family: str | None = None
    max_tokens: _PositiveInt = 4096
    temperature: Annotated[float, Meta(ge=0)] | None = None


class Teacher(Struct, frozen=True, kw_only=True, dict=True):
    """A teacher with its name, ready to be asked. `family` is None if unknown."""

    name: str
    config: TeacherConfig
    family: str | None

    @property
    def table(self) -> str:
        """The name of its table in the file, with which errors begin."""
        return JUDGE if self.name == JUDGE else f"teachers.{self.name}"

    @cached_property
    def model(self) -> ModelConfig:
        """The configuration for the gateway, which sends each request only once, because every try may be
        billed.
        """
        fields = structs.asdict(self.config)
        return ModelConfig(**{name: fields[name] for name in _MODEL_FIELDS}, resend=False)

    @cached_property
    def price(self) -> Price | None:
        """The price of its tokens: the configured one, otherwise the list price of a provider's model; None if
        unknown.
        """
        return self.model.effective_price

    @cached_property
    def identity(self) -> str:
        """The settings on which its answers depend: if they change, it is asked again."""
        config = self.config
        parts = (self.name, config.backend, config.model, config.max_tokens, config.temperature)
        args = msgspec.json.encode([*parts, config.template_args], order="sorted")
        return hashlib.blake2b(args, digest_size=16).hexdigest()

    def described(self) -> dict[str, Any]:
        """Return what is stored about it."""
        price = self.price
        description: dict[str, Any] = msgspec.to_builtins(self.config)
        return description | {
            "family": self.family,
            "price": None if price is None else msgspec.to_builtins(price),
        }


class Teachers(Struct, frozen=True):
    """The teachers of a file in its order, and its judge."""

    teachers: tuple[Teacher, ...]
    judge: Teacher | None = None

    def named(self, name: str) -> Teacher | None:
        """Return the teacher or judge with that name."""
        everyone = (*self.teachers, *(() if self.judge is None else (self.judge,)))
        return next((teacher for teacher in everyone if teacher.name == name), None)


def read_teachers(path: Path) -> Teachers:
    """Read the teachers from a TOML file. Raises ConfigError with file, key and what was expected."""
    try:
        data = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            f"--teachers {path}: cannot be read: {error.strerror or error}; give a TOML file with a table "
            "[teachers.NAME] for each model to ask"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(
            f"--teachers: {path} is not valid TOML: {error}; correct it there: expected UTF-8 text with a table "
            "[teachers.NAME] for each model to ask"
        ) from error
    if unknown := sorted(data.keys() - {"teachers", JUDGE}):
        raise ConfigError(
            f"{path}: {unknown[0]}: unknown key; expected tables [teachers.NAME] and [{JUDGE}] only: move what "
            "belongs to a teacher into its table, and remove the rest"
        )
    tables = data.get("teachers")
    if not isinstance(tables, dict) or not tables:
        raise ConfigError(
            f"{path}: teachers: there are none; add at least one table [teachers.NAME] with backend and model"
        )
    teachers = [
        _teacher(path, f"teachers.{name}", name, table) for name, table in cast("dict[str, Any]", tables).items()
    ]
    judge = _teacher(path, JUDGE, JUDGE, data[JUDGE]) if JUDGE in data else None
    if judge is not None and any(teacher.name == JUDGE for teacher in teachers):
        raise ConfigError(
            f"{path}: teachers.{JUDGE}: this name is reserved for the table [{JUDGE}]; give the "
            "teacher another name"
        )
    return Teachers(tuple(teachers), judge)


def _teacher(path: Path, key: str, name: str, table: Any) -> Teacher:
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"{path}: {key}: expected a name of at most 80 letters, digits, dots and hyphens; rename this table"
        )
    try:
        config = msgspec.convert(table, TeacherConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {_located_message(key, str(error), table)}; correct this key") from error
    if not config.model.strip():
        raise ConfigError(f"{path}: {key}.model is empty; give the model's name at its server")
    family = config.family.strip().lower() if config.family is not None else model_family(config.model)
    teacher = Teacher(name=name, config=config, family=family or None)
    try:
        check_config(GatewayConfig(models=ModelsConfig(high=teacher.model)))
    except ConfigError as error:
        raise ConfigError(f"{path}: {key}.{str(error).removeprefix(_GATEWAY_KEY_PREFIX)}") from error
    for field_, price in msgspec.to_builtins(teacher.price or {}).items():
        if price is not None and not 0 <= price < _MAX_USD_PER_MILLION:
            raise ConfigError(
                f"{path}: {key}.price.{field_}: invalid price {price}; expected US dollars per million tokens, at "
                f"least 0 and below {_MAX_USD_PER_MILLION:,.0f}: correct it"
            )
    return teacher


def _located_message(key: str, message: str, table: Any) -> str:
    """Return a validation error of a table as "key: what was expected, and what it is"."""
    text, _, key_path = message.partition(" - at `$")
    value = table
    for part in key_path.strip(".`").split(".") if key_path else ():
        value = cast("dict[str, Any]", value).get(part) if isinstance(value, dict) else None
    key_path = key + key_path.rstrip("`")
    if unknown := _UNKNOWN_FIELD.fullmatch(text):
        struct = Price if key_path.endswith("price") else TeacherConfig
        return f"{key_path}.{unknown[1]}: unknown key; expected one of {', '.join(struct.__struct_fields__)}"
    if key_path.endswith(".backend"):
        text += f"; expected one of {', '.join(KINDS)}"
    elif value is not None and not isinstance(value, dict):
        text += f" (it is {repr(value)[:100]})"
    return f"{key_path}: {text}"
