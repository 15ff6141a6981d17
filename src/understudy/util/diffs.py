"""Unified diffs: the only parser of them in this code base, and functions that make or reverse diffs.

The parser is strict, because the gate accepts a patch by what was parsed: a line that does not fit is an error,
and never skipped. Only text before the first file and a mail's signature are ignored. It works on bytes, because
paths and contents in a patch need not be UTF-8.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

from msgspec import Struct

NO_NEWLINE = "\\ No newline at end of file"

_ESCAPES = dict(zip(b'abtnvfr"\\', b'\a\b\t\n\v\f\r"\\', strict=True))
_ESCAPE = re.compile(rb"\\([0-3][0-7]{2}|.)", re.DOTALL)
_QUOTED = re.compile(rb'"((?:[^"\\]|\\.)*)"', re.DOTALL)
_HUNK = re.compile(rb"@@ -(\d{1,9})(?:,(\d{1,9}))? \+(\d{1,9})(?:,(\d{1,9}))? @@(.*)", re.DOTALL)
_MODE = re.compile(rb"(?:old mode|new mode|deleted file mode|new file mode) ([0-7]{6})\Z")
_INDEX = re.compile(rb"index [0-9a-f]+\.\.[0-9a-f]+(?: ([0-7]{6}))?\Z")
_SIMILARITY = re.compile(rb"(?:dis)?similarity index \d+%\Z")
_GIT_VERSION = re.compile(rb"\d+\.\d+[\w.() -]*\Z")
_BINARY_SIZE = re.compile(rb"(?:literal|delta) \d+\Z")


class DiffError(ValueError):
    """A patch that cannot be read or reversed; the message names the line and what was expected."""


class Hunk(Struct, frozen=True):
    """One stretch of changed lines.

    Each of `lines` begins with its sign (" ", "-", "+", or "\\" for a missing line end) and has no line end of its
    own. Some tools strip the sign of an empty context line; such a line is empty here or begins with a tab.
    """

    old_start: int
    old_count: int
    new_start: int
    new_count: int
    section: bytes
    lines: tuple[bytes, ...]


class FileDiff(Struct, frozen=True):
    """The change of one file.

    `paths` and `modes` are all that are named, `text` the file's own bytes of the patch, and `header` its lines
    before the first hunk. `old_path` and `new_path` are None for a file that is added or removed.
    """

    paths: frozenset[bytes]
    modes: frozenset[bytes]
    text: bytes
    header: tuple[bytes, ...]
    old_path: bytes | None
    new_path: bytes | None
    hunks: tuple[Hunk, ...] = ()
    is_binary: bool = False

    @property
    def is_new(self) -> bool:
        """Whether the change adds a new file."""
        return any(line.startswith((b"new file mode ", b"--- /dev/null")) for line in self.header)


def parse_diff(patch: bytes) -> list[FileDiff]:
    """Return the files that a patch changes, in its order; text before the first one is ignored. Raises
    DiffError.
    """
    return _DiffReader(patch).files()


class _DiffReader:
    """A cursor over the lines of a patch; each method reads what it is named after and moves on."""

    def __init__(self, patch: bytes) -> None:
        self._lines = patch.split(b"\n")
        self._ends_with_newline = self._lines[-1] == b""
        if self._ends_with_newline:
            self._lines.pop()
        self._position = 0

    def files(self) -> list[FileDiff]:
        files: list[FileDiff] = []
        while self._position < len(self._lines):
            line = self._lines[self._position]
            if line.startswith(b"diff --git ") or self._is_plain_header():
                files.append(self._file())
            elif files and line.strip() and line != b"-- " and not self._is_signature():
                raise self._error("expected a line that starts the next file, `diff --git` or `---`")
            else:
                self._position += 1
        return files

    def _file(self) -> FileDiff:
        start = self._position
        paths: set[bytes] = set()
        modes: set[bytes] = set()
        git_names: bytes | None = None
        sides: list[bytes | None] = []
        hunks: list[Hunk] = []
        if (line := self._peek()).startswith(b"diff --git "):
            git_names = line.removeprefix(b"diff --git ")
            self._position += 1
            self._extended_header(paths, modes)
        is_binary = self._peek() == b"GIT binary patch"
        if is_binary:
            header_end = self._position + 1
            self._binary()
        else:
            if self._peek().startswith(b"--- "):
                sides = [self._side(prefix) for prefix in (b"--- ", b"+++ ")]
                paths.update(path for path in sides if path is not None)
            header_end = self._position
            while match := _HUNK.match(self._peek()):
                hunks.append(self._hunk(match))
        same = None if git_names is None else _same_names(git_names)
        if same is not None:
            paths.add(same)
        if not paths:
            raise DiffError(
                f"line {start + 1}: the header that begins here names no file; expected the lines --- a/FILE and "
                "+++ b/FILE in it"
            )
        header = tuple(self._lines[start:header_end])
        old_path, new_path = sides or _sides_of_header(header, same)
        text = b"\n".join(self._lines[start : self._position])
        if self._position < len(self._lines) or self._ends_with_newline:
            text += b"\n"
        return FileDiff(
            frozenset(paths), frozenset(modes), text, header, old_path, new_path, tuple(hunks), is_binary
        )

    def _extended_header(self, paths: set[bytes], modes: set[bytes]) -> None:
        while True:
            line = self._peek()
            if match := _MODE.match(line) or _INDEX.match(line):
                modes.update(mode for mode in match.groups() if mode)
            elif line.startswith((b"rename from ", b"rename to ", b"copy from ", b"copy to ")):
                paths.add(_unquote(line.split(b" ", 2)[2]))
            elif not _SIMILARITY.match(line):
                return
            self._position += 1

    def _side(self, prefix: bytes) -> bytes | None:
        line = self._peek()
        if not line.startswith(prefix):
            raise self._error(f"expected a line that starts with {prefix.decode()!r}")
        self._position += 1
        text = line.removeprefix(prefix)
        name = _unquote(text) if text.startswith(b'"') else text.partition(b"\t")[0]
        return None if name == b"/dev/null" else _strip(name)

    def _hunk(self, match: re.Match[bytes]) -> Hunk:
        self._position += 1
        first = self._position
        old_count, new_count = (1 if count is None else int(count) for count in (match[2], match[4]))
        old, new = old_count, new_count
        while old > 0 or new > 0:
            if self._position >= len(self._lines):
                raise DiffError(
                    f"line {first}: the hunk that begins here is incomplete: its header says {old_count} old and "
                    f"{new_count} new lines, but the patch ends after {old_count - old} and {new_count - new}; "
                    "correct the header, or add the lines"
                )
            sign = self._peek()[:1]
            if sign not in (b" ", b"+", b"-", b"\\", b"", b"\t"):
                raise self._error("expected a line of a hunk, which starts with a space, + or -")
            old -= sign in (b" ", b"-", b"", b"\t")
            new -= sign in (b" ", b"+", b"", b"\t")
            self._position += 1
        if old or new:
            raise DiffError(
                f"line {first}: invalid hunk, longer than its header says: expected {old_count} old and "
                f"{new_count} new lines, got {old_count - old} and {new_count - new}"
            )
        if self._peek().startswith(b"\\"):
            self._position += 1
        lines = tuple(self._lines[first : self._position])
        return Hunk(int(match[1]), old_count, int(match[3]), new_count, match[5], lines)

    def _binary(self) -> None:
        self._position += 1
        while _BINARY_SIZE.match(self._peek()):
            self._position += 1
            while self._peek():
                self._position += 1
            if self._position < len(self._lines):
                self._position += 1

    def _is_signature(self) -> bool:
        """Return whether the lines are the git version below a patch that git formatted as a mail."""
        return (
            self._lines[self._position - 1] == b"-- "
            and _GIT_VERSION.match(self._lines[self._position]) is not None
        )

    def _is_plain_header(self) -> bool:
        ahead = self._lines[self._position : self._position + 3]
        return (
            len(ahead) == 3
            and ahead[0].startswith(b"--- ")
            and ahead[1].startswith(b"+++ ")
            and _HUNK.match(ahead[2]) is not None
        )

    def _peek(self) -> bytes:
        return self._lines[self._position] if self._position < len(self._lines) else b""

    def _error(self, expected: str) -> DiffError:
        at_end = self._position >= len(self._lines)
        actual = "the end of the patch" if at_end else _show(self._peek())
        return DiffError(f"line {self._position + 1}: {expected}, got {actual}")


def _show(line: bytes) -> str:
    """Return the beginning of a line or a path of a diff, quoted."""
    return repr(line[:80].decode(errors="replace"))


def _sides_of_header(header: tuple[bytes, ...], same: bytes | None) -> tuple[bytes | None, bytes | None]:
    """Return the old and the new path of a file without `---` and `+++` lines, such as one that is only
    renamed.
    """
    old = new = same
    for line in header:
        if line.startswith((b"rename from ", b"copy from ")):
            old = _unquote(line.split(b" ", 2)[2])
        elif line.startswith((b"rename to ", b"copy to ")):
            new = _unquote(line.split(b" ", 2)[2])
        elif line.startswith(b"new file mode "):
            old = None
        elif line.startswith(b"deleted file mode "):
            new = None
    return old, new


def _same_names(names: bytes) -> bytes | None:
    """Return the path in `a/path b/path`, the only place of the path when a file changes without text. None if the
    two differ.
    """
    if names.startswith(b'"'):
        match = _QUOTED.match(names)
        if match is None:
            return None
        first, second = match[0], names[match.end() + 1 :]
    elif names.endswith(b'"'):
        first, _, second = names.partition(b' "')
        second = b'"' + second
    else:
        # Paths may contain spaces: only the middle of the text can be the space between two equal paths.
        middle = len(names) // 2
        first, second = names[:middle], names[middle + 1 :]
        if names[middle : middle + 1] != b" ":
            return None
    first_name, second_name = _strip(_unquote(first)), _strip(_unquote(second))
    return first_name if first_name == second_name else None


def _strip(name: bytes) -> bytes:
    """Return a path without its first component, `a/` or `b/`, as `git apply -p1` reads it."""
    return name.partition(b"/")[2] if not name.startswith(b"/") else name


def _unquote(text: bytes) -> bytes:
    match = _QUOTED.match(text)
    if match is None:
        return text

    def plain(escape: re.Match[bytes]) -> bytes:
        code = escape[1]
        return bytes([int(code, 8) if len(code) == 3 else _ESCAPES.get(code[0], code[0])])

    return _ESCAPE.sub(plain, match[1])


# --- making diffs ------------------------------------------------------------------------------------------


def unified(old: Mapping[str, str], new: Mapping[str, str]) -> str:
    """Return the diff that changes the files `old` into `new` (path → text), byte for byte, with added and deleted
    files.
    """
    paths = sorted(old.keys() | new.keys())
    return "".join(_unified_file(path, old.get(path), new.get(path)) for path in paths)


def _unified_file(path: str, old: str | None, new: str | None) -> str:
    if old == new:
        return ""
    lines = [f"diff --git a/{path} b/{path}\n"]
    if old is None or new is None:
        lines.append(f"{'new' if old is None else 'deleted'} file mode 100644\n")
    names = "/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}"
    for line in difflib.unified_diff(_lines(old or ""), _lines(new or ""), *names):
        lines.append(line if line.endswith("\n") else f"{line}\n{NO_NEWLINE}\n")
    return "".join(lines)


def _lines(text: str) -> list[str]:
    # git splits lines at \n only; str.splitlines splits at ten kinds of characters.
    lines = [line + "\n" for line in text.split("\n")]
    last_line = lines.pop()[:-1]
    return [*lines, last_line] if last_line else lines


# --- reversing diffs ---------------------------------------------------------------------------------------

# Header lines that change places, in git's order: the first of a pair is written before the second.
_SWAPPED_HEADERS = (
    (b"old mode ", b"new mode "),
    (b"new file mode ", b"deleted file mode "),
    (b"similarity index ", b"similarity index "),
    (b"dissimilarity index ", b"dissimilarity index "),
    (b"rename from ", b"rename to "),
)
_HEADER_KEYS = (b"diff --git ", b"index ", *(key for pair in _SWAPPED_HEADERS for key in pair), b"--- ", b"+++ ")


def reverse(patch: str) -> str:
    """Return the unified diff that reverts another one of text files: changed, new, deleted, renamed or with a new
    mode.

    Raises DiffError, naming the line, for an invalid diff, and for binary files and copies.
    """
    files = parse_diff(patch.encode(errors="surrogateescape"))
    if not files:
        raise DiffError("the patch changes no file; expected a unified diff of at least one")
    lines = [line for file in reversed(files) for line in _reversed_file(file)]
    return b"".join(line + b"\n" for line in lines).decode(errors="surrogateescape")


def _reversed_file(file: FileDiff) -> list[bytes]:
    header: dict[bytes, bytes] = {}
    for line in file.header:
        key = next((key for key in _HEADER_KEYS if line.startswith(key)), None)
        if key is None:
            raise DiffError(
                f"the change of {_show(min(file.paths))} has the line {_show(line)}, which cannot be reversed; "
                "expected a change of text"
            )
        header[key] = line[len(key) :]
    if bool(file.hunks) != (b"--- " in header):
        raise DiffError(
            f"invalid diff of {_show(min(file.paths))}: expected hunks after --- and +++, and only there"
        )
    return [*_reversed_header(header), *(line for hunk in file.hunks for line in _reversed_hunk(hunk))]


def _reversed_header(header: dict[bytes, bytes]) -> list[bytes]:
    lines: list[bytes] = []
    if names := header.get(b"diff --git "):
        if b"rename from " in header:
            names = b"a/" + header[b"rename to "] + b" b/" + header[b"rename from "]
        lines.append(b"diff --git " + names)
    for first, second in _SWAPPED_HEADERS:
        pairs = dict.fromkeys(((first, second), (second, first)))
        lines += [key + header[source] for key, source in pairs if source in header]
    if blobs := header.get(b"index "):
        ids, space, mode = blobs.partition(b" ")
        old, dots, new = ids.partition(b"..")
        lines.append(b"index " + new + dots + old + space + mode)
    if b"--- " in header:
        lines.append(b"--- " + _renamed(header[b"+++ "], b"b/", b"a/"))
        lines.append(b"+++ " + _renamed(header[b"--- "], b"a/", b"b/"))
    return lines


def _renamed(name: bytes, old: bytes, new: bytes) -> bytes:
    for quote in (b"", b'"'):
        if name.startswith(quote + old):
            return quote + new + name[len(quote + old) :]
    return name


def _reversed_hunk(hunk: Hunk) -> list[bytes]:
    spans = ((hunk.new_start, hunk.new_count), (hunk.old_start, hunk.old_count))
    old, new = (str(start) if count == 1 else f"{start},{count}" for start, count in spans)
    lines = [f"@@ -{old} +{new} @@".encode() + hunk.section]
    removed: list[bytes] = []  # of the reversed hunk: what the hunk added
    added: list[bytes] = []
    last_list = lines
    for line in hunk.lines:
        sign = line[:1]
        if sign == b"\\":
            last_list.append(line)  # belongs to the line before it, on whichever side that is
        elif sign == b"-":
            added.append(b"+" + line[1:])
            last_list = added
        elif sign == b"+":
            removed.append(b"-" + line[1:])
            last_list = removed
        elif sign == b"\t":
            raise DiffError(f"expected a line of a hunk, which starts with a space, + or -, got {_show(line)}")
        else:
            lines += [*removed, *added, line or b" "]
            removed, added, last_list = [], [], lines
    return [*lines, *removed, *added]
