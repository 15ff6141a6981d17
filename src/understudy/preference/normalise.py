"""Tool calls in a canonical form: two calls that do the same have the same form.

Names are those of `TOOLS` (see `ALIASES`). Arguments are compared by value, without defaults and those that change
nothing. Paths are relative to the directory that the agent worked in. Shell commands are compared by their words.
Tool calls are hostile input: nothing in them raises, and what is too large or too deep is compared unchanged.
"""

from __future__ import annotations

import ntpath
import posixpath
import re
import shlex
from collections.abc import Collection, Mapping
from typing import Any, Literal, cast

import msgspec
from msgspec import Struct

from understudy.ingest.trace import TurnAction
from understudy.util.shell import ShellSyntaxError, command_text, shell_tokens
from understudy.wire.arguments import UNPARSED_INPUT, unwrapped
from understudy.wire.decoding import canonical, decoded

Kind = Literal["path", "command", "text"]
"""How an argument is compared, if not as a plain value: as a path, a shell command, or text written to a file."""


class ToolTraits(Struct, frozen=True):
    """What is known of a tool.

    `keys` maps other names of its arguments to ours, `kinds` says how some of them are compared. `defaults` are
    values that mean the same as leaving the argument out. `ignored` are arguments that are not compared:
    explanations for people, time limits, how the result is displayed. `only_reads`: it changes nothing, so calling
    it twice equals calling it once. `only_notes`: it only writes notes of the agent, which are not compared if the
    action calls other tools.
    """

    keys: dict[str, str] = {}
    kinds: dict[str, Kind] = {}
    defaults: dict[str, tuple[Any, ...]] = {}
    ignored: frozenset[str] = frozenset()
    only_reads: bool = False
    only_notes: bool = False


ALIASES: dict[str, str] = {
    **dict.fromkeys(("bash", "execute_bash", "terminal", "run_shell_command", "shell", "local_shell"), "Bash"),
    **dict.fromkeys(("file_editor", "str_replace_based_edit_tool"), "str_replace_editor"),
    "Task": "Agent",
    "KillBash": "KillShell",
}
"""Other names of a tool, in other agents or in other versions of one. Only names that certainly mean the same."""

_FALSE = (False,)

TOOLS: dict[str, ToolTraits] = {
    # Claude Code's. `timeout` says how long to wait for it, not what is done.
    "Bash": ToolTraits(
        keys={"cmd": "command"},
        kinds={"command": "command"},
        defaults={"run_in_background": _FALSE, "dangerouslyDisableSandbox": _FALSE, "is_input": ("false",)},
        ignored=frozenset({"description", "timeout", "timeout_ms", "type", "security_risk"}),
    ),
    "Read": ToolTraits(
        kinds={"file_path": "path"},
        defaults={"offset": (0, 1), "limit": (0, 2000), "pages": ("",)},
        only_reads=True,
    ),
    "Edit": ToolTraits(
        kinds={"file_path": "path", "old_string": "text", "new_string": "text"}, defaults={"replace_all": _FALSE}
    ),
    "MultiEdit": ToolTraits(kinds={"file_path": "path"}),
    "Write": ToolTraits(kinds={"file_path": "path", "content": "text"}),
    "NotebookEdit": ToolTraits(
        kinds={"notebook_path": "path", "new_source": "text"}, defaults={"edit_mode": ("replace",)}
    ),
    "NotebookRead": ToolTraits(kinds={"notebook_path": "path"}, only_reads=True),
    "Glob": ToolTraits(kinds={"path": "path"}, defaults={"path": (".", "")}, only_reads=True),
    "Grep": ToolTraits(
        keys={"context": "-C"},
        kinds={"path": "path"},
        defaults={
            "path": (".", ""),
            "output_mode": ("files_with_matches",),
            "-i": _FALSE,
            "multiline": _FALSE,
            "offset": (0,),
        },
        ignored=frozenset({"-n"}),
        only_reads=True,
    ),
    "LS": ToolTraits(kinds={"path": "path"}, defaults={"path": (".", "")}, only_reads=True),
    "Agent": ToolTraits(
        defaults={"run_in_background": _FALSE, "subagent_type": ("general-purpose",)},
        ignored=frozenset({"description"}),
    ),
    "TodoWrite": ToolTraits(ignored=frozenset({"activeForm", "id", "priority"}), only_notes=True),
    "update_plan": ToolTraits(ignored=frozenset({"explanation"}), only_notes=True),
    "TaskCreate": ToolTraits(ignored=frozenset({"activeForm"})),
    "TaskUpdate": ToolTraits(ignored=frozenset({"activeForm"})),
    "TaskOutput": ToolTraits(defaults={"block": (True,)}, ignored=frozenset({"timeout"}), only_reads=True),
    "BashOutput": ToolTraits(only_reads=True),
    "SendMessage": ToolTraits(ignored=frozenset({"summary"})),
    "ScheduleWakeup": ToolTraits(ignored=frozenset({"reason"})),
    "ToolSearch": ToolTraits(defaults={"max_results": (5,)}, only_reads=True),
    "WebFetch": ToolTraits(only_reads=True),
    "WebSearch": ToolTraits(only_reads=True),
    # OpenHands' and SWE-agent's.
    "str_replace_editor": ToolTraits(
        kinds={"path": "path", "old_str": "text", "new_str": "text", "file_text": "text"},
        ignored=frozenset({"security_risk"}),
    ),
    # Gemini's and Cline's.
    "read_file": ToolTraits(kinds={"absolute_path": "path", "path": "path", "file_path": "path"}, only_reads=True),
    "write_file": ToolTraits(kinds={"file_path": "path", "content": "text"}),
    "write_to_file": ToolTraits(kinds={"path": "path", "content": "text"}),
    "replace": ToolTraits(kinds={"file_path": "path", "old_string": "text", "new_string": "text"}),
}


MAX_COMMAND_CHARACTERS = 200_000
"""The longest command, in characters, that is parsed; longer ones are compared unchanged."""

_LITERAL = re.compile(r"[^\s*?\[\]{}~!$`'\"\\;&|()<>#]*")
_COMMAND_STARTS = frozenset({";", "&", "&&", "||", "|", "|&", "(", ";;", "\n"}) | {
    *("do", "then", "else", "elif", "{", "!")
}
"""Tokens after which a new command begins, so a line break after them separates nothing."""
_SPACE = " \t\n"


def canonical_command(command: str, cwd: str | None = None) -> str:
    """Return the command in a canonical spelling.

    A leading `cd` to `cwd` is dropped, and words that are paths inside `cwd` become relative, unless the command
    changes the directory. Comments, line breaks between commands and unnecessary quotes do not matter.
    """
    if len(command) > MAX_COMMAND_CHARACTERS:
        return command
    text = command.replace("\r", "")
    try:
        tokens, here_document = _plain_tokens(text)
    except ShellSyntaxError:
        return text.strip(_SPACE)
    if cwd:
        tokens = _relative_to(tokens, cwd.rstrip("/") or "/")
    return " ".join(tokens) + here_document


def _plain_tokens(text: str) -> tuple[list[str], str]:
    """Return a command's words and operators. All lines after the first one with a `<<` are returned unchanged.

    Raises ShellSyntaxError.
    """
    tokens: list[str] = []
    here_document = ""
    after_here_document = has_here_document = False
    for token in shell_tokens(text, strict=True):
        if token.kind == "word":
            # Quoting the delimiter of a here-document changes its meaning, so quotes are kept.
            tokens.append(shlex.quote(token.value) if token.literal and not after_here_document else token.raw)
            after_here_document = False
            continue
        after_here_document = token.kind == "redirect" and token.raw.endswith(("<<", "<<-"))
        has_here_document = has_here_document or (
            token.kind == "redirect" and "<<" in token.raw and "<<<" not in token.raw
        )
        if token.raw == "\n":
            if has_here_document:
                here_document = ("\n" + text[token.end :]).rstrip(_SPACE)
                break
            if tokens and tokens[-1] not in _COMMAND_STARTS:
                tokens.append(";")
        elif token.raw in ("<(", ">("):
            tokens += token.raw  # two tokens, as when there is a space between `<` and `(`
        else:
            tokens.append(token.raw)
    while not here_document and tokens and tokens[-1] == ";":
        tokens.pop()
    return tokens, here_document


def _relative_to(tokens: list[str], cwd: str) -> list[str]:
    while len(tokens) >= 3 and tokens[0] == "cd" and tokens[2] in ("&&", ";") and _literal_path(tokens[1]) == cwd:
        tokens = tokens[3:]
    if "cd" in tokens or "pushd" in tokens:
        return tokens
    starts_command = True
    relative_tokens: list[str] = []
    for word in tokens:
        path = _literal_path(word)
        inside = path is not None and cwd != "/" and (path == cwd or path.startswith(cwd + "/"))
        if inside and path is not None:
            relative = path[len(cwd) :].strip("/") or "."
            # A program needs its directory, and a name must not look like an option.
            word = shlex.quote(f"./{relative}" if starts_command or relative[0] == "-" else relative)
        relative_tokens.append(word)
        starts_command = word in _COMMAND_STARTS
    return relative_tokens


def _literal_path(word: str) -> str | None:
    """Return the word as a path without a slash at its end; None if it is not literal."""
    literal = word[1:-1] if len(word) > 1 and word[0] == word[-1] == "'" else word
    if word[:1] != "'" and not _LITERAL.fullmatch(word):
        return None
    return literal if "'" in literal else literal.rstrip("/") or literal[:1]


MAX_ARGUMENT_CHARACTERS = 1_000_000
"""The longest arguments, in characters, that are parsed; longer ones are compared as text."""
_MAX_NESTING = 40
_MAX_EXACT_INTEGER = 1 << 53  # integers up to this one are exact as floats
_UNPAIRED_SURROGATE = re.compile("[\ud800-\udfff]")
_WINDOWS_PATH = re.compile(r"[A-Za-z]:[\\/]")

_decode_json = msgspec.json.Decoder().decode


class WorkingDirectory(Struct, frozen=True):
    """The directory in which an agent worked, to which relative paths refer; None if unknown."""

    cwd: str | None = None


class NormalisedCall(Struct, frozen=True):
    """A tool call in its canonical form.

    `arguments` are a JSON value: an object, or the text if they are not an object. `key` is equal for two calls
    exactly if they do the same. `readable` says whether the arguments were a JSON object.
    """

    name: str
    arguments: Any
    key: bytes
    readable: bool = True


UNKNOWN_DIRECTORY = WorkingDirectory()
_UNKNOWN_TOOL = ToolTraits()


def normalise_call(call: Mapping[str, Any], location: WorkingDirectory = UNKNOWN_DIRECTORY) -> NormalisedCall:
    """Return the canonical form of a tool call, which is given in OpenAI's form."""
    function: Any = call.get("function")
    function_call: Mapping[str, Any] = cast(Mapping[str, Any], function) if isinstance(function, dict) else {}
    return normalise_named_call(function_call.get("name"), function_call.get("arguments"), location)


def normalise_named_call(
    name: Any, arguments: Any, location: WorkingDirectory = UNKNOWN_DIRECTORY
) -> NormalisedCall:
    """Return the canonical form of a call, given its name and its arguments: JSON text, or an object."""
    canonical_name = name if isinstance(name, str) else ""
    canonical_name = ALIASES.get(canonical_name, canonical_name)
    fields = _argument_object(arguments)
    if fields is None:
        text = unwrapped(arguments) if isinstance(arguments, str) else repr(arguments)
        return _normalised_call(canonical_name, text, readable=False)
    tool = TOOLS.get(canonical_name)
    try:
        if canonical_name == "MultiEdit" and (single := _single_edit(fields)) is not None:
            canonical_name, fields, tool = "Edit", single, TOOLS["Edit"]
        return _normalised_call(
            canonical_name,
            _normalised_value(fields) if tool is None else _normalised_arguments(fields, tool, location),
        )
    except _TooDeepError:
        return _normalised_call(canonical_name, str(arguments))


def normalise_calls(
    action: TurnAction, location: WorkingDirectory = UNKNOWN_DIRECTORY
) -> tuple[NormalisedCall, ...]:
    """Return an action's calls in a canonical order.

    A call that is made twice counts twice, unless its tool only reads. The agent's notes for itself only count if
    it calls no other tool.
    """
    ordered = sorted((normalise_call(call, location) for call in action.tool_calls), key=lambda call: call.key)
    if not all(_traits_of(call).only_notes for call in ordered):
        ordered = [call for call in ordered if not _traits_of(call).only_notes]
    distinct: list[NormalisedCall] = []
    for normalised in ordered:
        if not (distinct and distinct[-1].key == normalised.key and _traits_of(normalised).only_reads):
            distinct.append(normalised)
    return tuple(distinct)


def _traits_of(call: NormalisedCall) -> ToolTraits:
    return TOOLS.get(call.name, _UNKNOWN_TOOL)


def has_unreadable_call(action: TurnAction) -> bool:
    """Return whether an action has a call whose arguments are not a JSON object."""
    return any(not normalise_call(call).readable for call in action.tool_calls)


def without_trailing_spaces(text: str) -> str:
    """Return the text without trailing white space of lines, and without line breaks at its end.

    Unpaired surrogates, which cannot be encoded, are replaced.
    """
    if not text.isascii():
        text = _UNPAIRED_SURROGATE.sub("\ufffd", text)
    return "\n".join(line.rstrip() for line in text.replace("\r\n", "\n").split("\n")).rstrip("\n")


# --- arguments -----------------------------------------------------------------------------------------


class _TooDeepError(Exception):
    """A value is nested too deeply to be examined; caught within this module."""


def _argument_object(arguments: Any) -> dict[str, Any] | None:
    """Return the arguments as an object; None if they are not one. An empty text is an empty object.

    Claude Code wraps invalid arguments into an object with a special key, for which None is returned, too.
    """
    if isinstance(arguments, dict):
        fields = cast(dict[str, Any], arguments)
        return None if UNPARSED_INPUT in fields else fields
    if arguments is None:
        return {}
    if not isinstance(arguments, str) or len(arguments) > MAX_ARGUMENT_CHARACTERS:
        return None
    if not arguments.strip():
        return {}
    try:
        value = decoded(_decode_json, arguments.encode(errors="replace"))
    except (msgspec.MsgspecError, RecursionError, ValueError):
        return None
    return _argument_object(cast(dict[str, Any], value)) if isinstance(value, dict) else None


def _normalised_call(name: str, arguments: Any, *, readable: bool = True) -> NormalisedCall:
    try:
        key = canonical((name, arguments))
    except (ValueError, TypeError, OverflowError, RecursionError):
        # JSON has no unpaired surrogates, NaN or infinities.
        key = repr((name, arguments)).encode(errors="backslashreplace")
    return NormalisedCall(name, arguments, key, readable)


def _normalised_arguments(
    arguments: dict[str, Any], tool: ToolTraits, location: WorkingDirectory
) -> dict[str, Any]:
    normalised: dict[str, Any] = {}
    for name, value in sorted(arguments.items()):
        key = tool.keys.get(name, name)
        if key in tool.ignored or value is None:
            continue
        clean = _normalised_by_kind(tool.kinds.get(key), _normalised_value(value, without=tool.ignored), location)
        if not any(clean == default and type(clean) is type(default) for default in tool.defaults.get(key, ())):
            normalised[key] = clean
    return normalised


def _normalised_by_kind(kind: Kind | None, value: Any, location: WorkingDirectory) -> Any:
    if kind == "command" and isinstance(value, list):
        entries = cast(list[Any], value)
        value = (
            command_text([str(word) for word in entries])
            if all(isinstance(word, str) for word in entries)
            else entries
        )
    if not isinstance(value, str) or kind is None:
        return cast(Any, value)
    if kind == "path":
        return canonical_path(value, location.cwd)
    return canonical_command(value, location.cwd) if kind == "command" else value


def _normalised_value(value: Any, depth: int = 0, without: Collection[str] = ()) -> Any:
    """Return a JSON value in canonical form: integers instead of whole floats, keys with null removed, and no
    white space at the ends of lines.
    """
    if depth > _MAX_NESTING:
        raise _TooDeepError
    if isinstance(value, str):
        return without_trailing_spaces(value)
    if isinstance(value, float):
        return int(value) if value.is_integer() and abs(value) <= _MAX_EXACT_INTEGER else value
    if isinstance(value, list):
        return [_normalised_value(item, depth + 1, without) for item in cast(list[Any], value)]
    if isinstance(value, dict):
        return {
            key: _normalised_value(item, depth + 1, without)
            for key, item in cast(dict[str, Any], value).items()
            if item is not None and key not in without
        }
    return value


def _single_edit(arguments: dict[str, Any]) -> dict[str, Any] | None:
    """Return the only edit of a list of edits as a single edit; None if the list has another length."""
    edits: Any = arguments.get("edits")
    if not isinstance(edits, list) or len(cast(list[Any], edits)) != 1 or not isinstance(edits[0], dict):
        return None
    return {"file_path": arguments.get("file_path"), **cast(dict[str, Any], edits[0])}


def canonical_path(name: str, cwd: str | None) -> str:
    """Return a path in canonical form: relative if it is inside `cwd`, without a slash at its end."""
    if _WINDOWS_PATH.match(name) or (cwd and _WINDOWS_PATH.match(cwd)):
        name = ntpath.normpath(name).replace("\\", "/")
        cwd = ntpath.normpath(cwd).replace("\\", "/") if cwd else None
    if not name:
        return name
    directory = posixpath.normpath(cwd) if cwd else None
    if directory and not name.startswith("/") and not _WINDOWS_PATH.match(name):
        name = f"{directory}/{name}"
    clean = posixpath.normpath(name)
    if clean.startswith("//"):
        clean = clean[1:]
    if not directory:
        return clean
    if clean == directory:
        return "."
    prefix = directory.rstrip("/") + "/"
    return clean[len(prefix) :] if clean.startswith(prefix) else clean
