"""Settings: msgspec structs whose fields are options of a command and keys of a TOML table at the same time.

A field is an option when its type carries `option(...)`:

    class RunSettings(Struct, frozen=True, kw_only=True):
        table: ClassVar[str] = "run"
        samples: Annotated[int, option("Rollouts a task.", "--samples", "-n", ge=1)] = 1

`understudy.cli.options` makes the options of a command from such a struct, and `build` makes the struct of what
was given: an option of the command line counts before a key of the file, which counts before the default. Bounds
are checked by msgspec, wherever the value came from.

A field whose type is another settings struct is a group: its fields are options of the same command, and keys of
the same table unless the group has a `table` of its own. A group that may be None (`T | None`) has a switch: its
name is a boolean option, and its fields carry its name as a prefix (`--lora`, `--lora-rank`).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, Union, cast, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from understudy.errors import ConfigError
from understudy.util.text import closest
from understudy.util.validation import describe_invalid, invalid_key, shown

T = TypeVar("T", bound=Struct)


def option(
    help: str,
    *flags: str,
    argument: bool = False,
    metavar: str | None = None,
    commas: bool = False,
    off: bool = False,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
) -> Meta:
    """Make a field of settings an option of commands, with its help and its `flags` (by default derived from its
    name).

    An `argument` is given by its position. With `commas`, a tuple is given as one text, otherwise by repeating the
    option. `off` makes a boolean that is true unless the option, which takes no value, is given. The bounds are
    those of a number.
    """
    extra = {"flags": flags, "argument": argument, "metavar": metavar, "commas": commas, "off": off}
    bounds: dict[str, Any] = {
        name: bound for name, bound in (("ge", ge), ("gt", gt), ("le", le)) if bound is not None
    }
    return Meta(description=help, extra=extra, **bounds)


class Option(NamedTuple):
    """One option of a settings struct.

    `name` is what the command's function calls it, `path` the fields that lead to its value, `table` and `key`
    where a file has it. `type` is the type of its value without None. `switch`: of a group that may be None.
    """

    name: str
    path: tuple[str, ...]
    table: str
    key: str
    type: Any
    default: Any
    meta: Meta
    switch: bool = False

    @property
    def extra(self) -> dict[str, Any]:
        """The arguments of `option` other than the help and the bounds."""
        return self.meta.extra or {}

    @property
    def flag(self) -> str:
        """How the command line names it."""
        if self.extra.get("argument"):
            return self.name
        flags: tuple[str, ...] = self.extra.get("flags", ())
        long = next(
            (flag for flag in flags if flag.startswith("--")), f"--{self.name.strip('_').replace('_', '-')}"
        )
        return long.partition("/")[0]

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values; empty if any value is allowed."""
        return get_args(self.type) if get_origin(self.type) is Literal else ()


def options_of(kind: type[Struct], table: str = "") -> Iterator[Option]:
    """Yield the options of a settings struct, in the order of its fields, including those of nested groups."""
    yield from _options(kind, getattr(kind, "table", table), (), "")


def _options(kind: type[Struct], table: str, path: tuple[str, ...], prefix: str) -> Iterator[Option]:
    for field in msgspec.structs.fields(kind):
        plain, meta = _unwrap(field.type)
        option_path = (*path, field.name)
        if isinstance(plain, type) and issubclass(plain, Struct):
            optional = field.default is None
            inner = table if optional else getattr(plain, "table", table)
            if optional and meta is not None:
                yield Option(field.name, option_path, table, field.name, bool, False, meta, switch=True)
            yield from _options(plain, inner, option_path, f"{field.name}_" if optional else prefix)
        elif meta is not None and meta.extra is not None:
            flags: tuple[str, ...] = meta.extra["flags"]
            long = next((flag for flag in flags if flag.startswith("--")), "--" + field.name)
            key = field.name if meta.extra["off"] else long.removeprefix("--").partition("/")[0].replace("-", "_")
            default = (
                field.default if field.default is not msgspec.NODEFAULT else _default_of(field.default_factory)
            )
            yield Option(prefix + field.name, option_path, table, key, plain, default, meta)


def _default_of(factory: Any) -> Any:
    return msgspec.NODEFAULT if factory is msgspec.NODEFAULT else factory()


def _unwrap(kind: Any) -> tuple[Any, Meta | None]:
    """Return a field's type without None and annotations, and its `option`, wherever in the type it is."""
    meta = None
    while True:
        if get_origin(kind) is Annotated:
            kind, *extras = get_args(kind)
            meta = next((extra for extra in extras if isinstance(extra, Meta)), meta)
        elif get_origin(kind) in (Union, UnionType) and NoneType in get_args(kind):
            kind = next(argument for argument in get_args(kind) if argument is not NoneType)
        else:
            return kind, meta


def build(kind: type[T], arguments: Mapping[str, Any], file: Mapping[str, Any], source: str = "options") -> T:
    """Return the settings: the `arguments` of the command line (None: not given), then the values in the tables of
    `file`, then the defaults.

    `source` names the file in errors. Raises ConfigError for an unknown key or an invalid value.
    """
    options = list(options_of(kind))
    tables = _tables(options, file, source)
    values: dict[str, Any] = {}
    groups: dict[tuple[str, ...], Option] = {option.path: option for option in options if option.switch}
    for option in options:
        if option.switch:
            continue
        group = groups.get(option.path[:-1])
        table = tables.get(option.table, {})
        if group is not None:
            table = _table(table.get(group.key))
        value = arguments.get(option.name)
        if value is None:
            value = table.get(option.key)
        if value is None:
            continue
        if group is not None and arguments.get(group.name) is False:
            if arguments.get(option.name) is not None:
                raise ConfigError(
                    f"--no-{group.key} and --{option.name.replace('_', '-')} contradict each other; "
                    "leave one of them out"
                )
            continue
        _put(values, option.path, _prepared(option, value))
    for path, group in groups.items():
        given_value = arguments.get(group.name)
        present = isinstance(tables.get(group.table, {}).get(group.key), dict)
        if given_value is not False and (given_value or present):
            _put(values, (*path, ""), None)  # creates the group itself, with its defaults
    return _converted(kind, values, options, arguments, source)


def _prepared(option: Option, value: Any) -> Any:
    if option.extra.get("commas") and isinstance(value, str):
        return [part.strip() for part in value.split(",") if part.strip()]
    if get_origin(option.type) is tuple and isinstance(value, str):
        return [value]
    return value


def _put(values: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Put a value at a path of nested dicts; the last name may be "", which only makes sure of the dict."""
    for name in path[:-1]:
        values = values.setdefault(name, {})
    if path[-1]:
        values[path[-1]] = value


def _tables(options: list[Option], file: Mapping[str, Any], source: str) -> dict[str, dict[str, Any]]:
    """Return the tables of a file that the options use. Raises ConfigError for a table with an unknown key."""
    tables: dict[str, dict[str, Any]] = {}
    for name in dict.fromkeys(option.table for option in options):
        if name not in file:
            continue
        if not isinstance(file[name], dict):
            raise ConfigError(
                f"{source}: {name}: expected a table, got {shown(file[name])}; write [{name}], with its keys below"
            )
        table = _table(file[name])
        switches = {option.path: option.key for option in options if option.switch and option.table == name}
        grouped: dict[str, list[str]] = {key: [] for key in switches.values()}
        keys: list[str] = [option.key for option in options if option.switch and option.table == name]
        for option in options:
            if option.table == name and not option.switch:
                group = switches.get(option.path[:-1])
                (keys if group is None else grouped[group]).append(option.key)
        _refuse_unknown(f"{source}: [{name}]", table, keys)
        for group, inner in grouped.items():
            _refuse_unknown(f"{source}: [{name}.{group}]", _table(table.get(group)), inner)
        tables[name] = table
    return tables


def _table(value: Any) -> dict[str, Any]:
    """Return a value as a table; an empty one if it is not a table."""
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


def _refuse_unknown(where: str, table: Mapping[str, Any], keys: list[str]) -> None:
    for key in table:
        if key not in keys:
            similar = closest(key, keys)
            hint = (
                f"did you mean {similar!r}? Correct it"
                if similar
                else f"remove it, or give some of: {', '.join(keys)}"
            )
            raise ConfigError(f"{where} has an unknown key {key[:100]!r}; {hint}")


def _converted(
    kind: type[T], values: dict[str, Any], options: list[Option], arguments: Mapping[str, Any], source: str
) -> T:
    try:
        return msgspec.convert(values, kind, dec_hook=_decode)
    except msgspec.ValidationError as error:
        key, text = invalid_key(error, values)
        path = tuple(re.sub(r"\[.*", "", key).split("."))
        faulty = next((option for option in options if option.path == path), None)
        if faulty is None:
            raise ConfigError(f"{source}: {describe_invalid(error, values)}; correct this key") from error
        group = next((option.key for option in options if option.switch and option.path == path[:-1]), "")
        table = f"{faulty.table}.{group}" if group else faulty.table
        in_file = arguments.get(faulty.name) is None
        where = f"{source}: [{table}] {faulty.key}" if in_file else faulty.flag
        choices = f"; expected one of {', '.join(faulty.choices)}" if faulty.choices else ""
        raise ConfigError(f"{where}: {text}{choices}; correct this {'key' if in_file else 'option'}") from error


def _decode(kind: type[Any], value: Any) -> Any:
    if kind is Path and isinstance(value, str | Path):
        return Path(value)
    raise TypeError(f"expected {'a path in quotes' if kind is Path else kind.__name__}, got {shown(value)}")


def read_toml(path: Path) -> dict[str, Any]:
    """Return the content of a TOML file. Raises ConfigError if it cannot be read."""
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            f"{path}: cannot be read: {error.strerror}; give the path of a TOML file that you can read"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{path}: invalid TOML: {error}; correct it at this place") from error


def require_table(file: Mapping[str, Any], kind: type[Struct], source: str) -> None:
    """Raise ConfigError when a file has none of the tables that the settings are read from."""
    tables = list(dict.fromkeys(option.table for option in options_of(kind)))
    if not any(table in file for table in tables):
        table_names = " or ".join(f"[{table}]" for table in tables)
        raise ConfigError(
            f"{source}: has no table {table_names}, expected at least one, got "
            f"{', '.join(file)[:200] or 'nothing'}; add one, with its settings below"
        )
