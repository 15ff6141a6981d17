"""Python source as the audit reads it: decoded as Python does, with aliases resolved and constants folded.

Every statement becomes one line of canonical text: `from sys import _getframe as g; g(1)` and
`getattr(__import__("s" "ys"), "_get" + "frame")(1)` both become `sys._getframe(1)`. Nothing is executed.
"""

from __future__ import annotations

import ast
import base64
import binascii
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import cast

from msgspec import Struct, field

from understudy.grade.constant_values import MAX_CONSTANT, Constant, are_bounds, bounded, fits, join, recode
from understudy.util.python_syntax import decode_source, parse_module, unparse

MAX_SOURCE_BYTES = 4 << 20
"""Larger sources are not parsed."""

_MAX_INLINED = 1 << 20  # the most characters of constants that are written in place of names
_ALIAS_ROUNDS = 3
_FAR_COLUMN = 150  # columns beyond which a statement counts as hidden
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
_DYNAMIC = "?"


class SourceStatement(Struct, frozen=True):
    """A statement, or the head of a compound one: its line, its canonical text and its node.

    `at_import` is true where it runs when the module is imported, though not if the module is the main program.
    """

    line: int
    text: str
    node: ast.stmt
    at_import: bool


class PythonSource(Struct):
    """A parsed source.

    `unparsed` has the lines that could not be parsed, as (line number, text), and `problems` the ways in which the
    source hides code from a reader, as (line number, problem). `names` is what its imports and assignments name.
    """

    statements: list[SourceStatement] = field(default_factory=list[SourceStatement])
    unparsed: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    problems: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    names: Names = field(default_factory=lambda: Names())


class ParsedSource:
    """A source as modules of statements: one, or the pieces of it that can be parsed."""

    def __init__(self, content: bytes) -> None:
        text, self._odd_encoding = decode_source(content)
        text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", " ")
        self._lines = text.split("\n")
        self._unparsed: list[tuple[int, str]] = []
        self._indented_lines: set[int] = set()
        self._bodies = list(_parse(text, self._unparsed, self._indented_lines))

    def segments(self) -> frozenset[str]:
        """Return the texts of the top-level statements, and of the statements of their classes."""
        return frozenset(self._segment(node) for body in self._bodies for node in _outer_statements(body))

    def _segment(self, node: ast.stmt) -> str:
        start = min((decorator.lineno for decorator in getattr(node, "decorator_list", [])), default=node.lineno)
        return "\n".join(self._lines[start - 1 : node.end_lineno])

    def read(self, unchanged: frozenset[str] = frozenset()) -> PythonSource:
        """Return the parsed source. Top-level statements whose text is in `unchanged` are left out, but their
        names are recorded.

        Raises RecursionError for expressions that are nested too deeply.
        """
        source = PythonSource(unparsed=self._unparsed)
        if self._odd_encoding:
            source.problems.append((1, f"its encoding is {self._odd_encoding}"))
        changed = [node for body in self._bodies for node in body.body if self._segment(node) not in unchanged]
        if changed:
            source.names.record_bindings(self._bodies)
            unchanged_ids = {
                id(node)
                for body in self._bodies
                for node in _outer_statements(body)
                if self._segment(node) in unchanged
            }
            for node in changed:
                at_import = node.lineno not in self._indented_lines
                source.statements += _statements(node, source.names, unchanged_ids, at_import=at_import)
            source.problems += _disguises(changed, self._lines)
            if source.names.inline_budget < MAX_CONSTANT:
                source.problems.append(
                    (1, f"its constants have more than {_MAX_INLINED >> 20} MiB in its statements")
                )
        return source


def _outer_statements(node: ast.Module | ast.ClassDef) -> Iterator[ast.stmt]:
    for child in node.body:
        yield child
        if isinstance(child, ast.ClassDef):
            yield from _outer_statements(child)


def _parse(text: str, unparsed: list[tuple[int, str]], indented_lines: set[int]) -> Iterator[ast.Module]:
    """Yield the text as one module, or otherwise as many pieces of it as can be parsed: blocks, then single lines.

    The numbers of single lines that are indented, so that they belong to a block, are added to `indented_lines`.
    """
    if (module := _try_parse(text)) is not None:
        yield module
        return
    lines = text.split("\n")
    starts = [n for n, line in enumerate(lines) if line[:1].strip() and line[:1] not in "#)]}"] or [0]
    for start, end in zip([0, *starts], [*starts, len(lines)], strict=True):
        block = lines[start:end]
        if not any(line.strip() for line in block):
            continue
        text = "\n".join(block)
        if (body := _try_parse(text, start) or _try_parse(f"if 1:\n{text}", start - 1)) is not None:
            yield body
            continue
        for number, line in enumerate(block, start):
            stripped = line.strip()
            candidates = (
                stripped,
                f"{stripped}\n    pass",
                f"try:\n    pass\n{stripped}\n    pass",
                stripped.rstrip(",:"),
            )
            parsed = next(
                (body for candidate in candidates if (body := _try_parse(candidate, number)) is not None), None
            )
            if parsed is not None:
                if line[:1].isspace():
                    indented_lines.add(number + 1)
                yield parsed
            elif stripped and not stripped.startswith("#"):
                unparsed.append((number + 1, unicodedata.normalize("NFKC", stripped)))


def _try_parse(text: str, offset: int = 0) -> ast.Module | None:
    try:
        module = parse_module(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    if offset:
        ast.increment_lineno(module, offset)
    return module


def _disguises(nodes: list[ast.stmt], lines: list[str]) -> Iterator[tuple[int, str]]:
    """Yield names with letters that Python reads as others, and statements far to the right of the screen."""
    for node in nodes:
        for inner in ast.walk(node) if not "\n".join(lines[node.lineno - 1 : node.end_lineno]).isascii() else ():
            if isinstance(inner, ast.Name | ast.Attribute) and inner.end_col_offset:
                name = inner.id if isinstance(inner, ast.Name) else inner.attr
                line = lines[(inner.end_lineno or 1) - 1].encode()[: inner.end_col_offset]
                if name.isascii() and not line.endswith(name.encode()):
                    yield inner.lineno, "a name is written in letters that look like others"
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1):
            line = lines[number - 1]
            if len(line) > _FAR_COLUMN and re.search(r"\S[ \t]{150,}\S", line) and ";" in line:
                yield number, "a statement stands far to the right"


def _statements(
    node: ast.stmt, names: Names, unchanged_ids: set[int], *, at_import: bool
) -> Iterator[SourceStatement]:
    if id(node) in unchanged_ids:
        return
    inner = at_import and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    if isinstance(node, ast.If) and "__name__" in unparse(node.test):
        inner = False
    is_text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    if not is_text:
        try:
            text = canonical(node, names)
        except RecursionError:
            text = "?"
        yield SourceStatement(node.lineno, text, node, at_import)
    for name in ("body", "orelse", "finalbody"):
        for child in getattr(node, name, ()):
            if isinstance(child, ast.stmt):
                yield from _statements(child, names, unchanged_ids, at_import=inner)
    for handler in (*getattr(node, "handlers", ()), *getattr(node, "cases", ())):
        for child in handler.body:
            yield from _statements(child, names, unchanged_ids, at_import=inner)


def canonical(node: ast.stmt, names: Names) -> str:
    """Return a statement's text with aliases resolved and constants folded; for a compound statement only its
    head.
    """
    match node:
        case ast.Try() | ast.TryStar():
            return "try:"
        case ast.ImportFrom(module=module, level=level):
            source = "." * level + (module or "")
            return "import " + ", ".join(f"{source}.{alias.name}".replace("..", ".") for alias in node.names)
        case ast.Match(subject=subject):
            return unparse(_canonical(subject, names))
        case _:
            head = _canonical(node, names, is_head=True)
            return unparse(head).removesuffix("\n    pass")


class Names:
    """Resolves the names of a module, wherever in it they are bound, to dotted names and constants."""

    def __init__(self) -> None:
        self.dotted: dict[str, str] = {}
        self.constants: dict[str, Constant] = {}
        self.functions: dict[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda] = {}
        self.classes: set[str] = set()
        self.inline_budget = _MAX_INLINED
        self._assigned: dict[str, int] = {}
        self._parameters: set[str] = set()
        self._imported: set[str] = set()

    def record_bindings(self, bodies: list[ast.Module]) -> None:
        """Record all imports, functions and classes, and names that are assigned from others."""
        bindings: list[tuple[str, ast.expr]] = []
        loops: list[ast.For | ast.AsyncFor | ast.comprehension] = []
        for node in (descendant for body in bodies for descendant in ast.walk(body)):
            match node:
                case ast.Name():
                    if isinstance(node.ctx, ast.Store):
                        self._assigned[node.id] = self._assigned.get(node.id, 0) + 1
                case ast.Import():
                    for alias in node.names:
                        root = alias.name.partition(".")[0]
                        self.dotted[alias.asname or root] = alias.name if alias.asname else root
                        self._imported.add(alias.asname or root)
                case ast.ImportFrom():
                    module = "." * node.level + (node.module or "")
                    for alias in node.names:
                        joined = module + alias.name if module.endswith(".") else f"{module}.{alias.name}"
                        self.dotted[alias.asname or alias.name] = joined
                        self._imported.add(alias.asname or alias.name)
                case ast.FunctionDef() | ast.AsyncFunctionDef():
                    self.functions.setdefault(node.name, node)
                case ast.ClassDef():
                    self.classes.add(node.name)
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=value)
                    | ast.NamedExpr(target=ast.Name(id=name), value=value)
                ):
                    bindings.append((name, value))
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                    bindings.append((name, value))
                case ast.For() | ast.AsyncFor() | ast.comprehension():
                    loops.append(node)
                case ast.arg(arg=name):
                    self._parameters.add(name)
                case _:
                    pass
        for _ in range(_ALIAS_ROUNDS):
            size = len(self.dotted) + len(self.constants)
            for name, value in bindings:
                self._bind(name, value)
            if len(self.dotted) + len(self.constants) == size:
                break
        for loop in loops:
            if _mentions_modules(loop.iter, self):
                for target in ast.walk(loop.target):
                    if isinstance(target, ast.Name) and target.id not in self._parameters:
                        self.dotted.setdefault(target.id, "sys.modules.each")

    def is_variable(self, name: str) -> bool:
        """Return whether a name is bound by the code itself, and never to what an import gives."""
        return (name in self._assigned or name in self._parameters) and name not in self._imported

    def _bind(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Lambda):
            self.functions.setdefault(name, value)
        if self._assigned.get(name, 0) == 1 and (constant := self.fold(value)) is not None:
            self.constants.setdefault(name, constant)
        elif (dotted := self.resolve(value)) is not None and dotted.partition(".")[0] != name:
            is_shared = name in self._parameters or self._assigned.get(name, 0) > 1
            if dotted.startswith("sys.modules.") and name in self._parameters:
                return
            if f".{_DYNAMIC}" in dotted and is_shared:
                return  # functions share names: the lookup is evidence, another function's variable is not
            self.dotted.setdefault(name, dotted)

    def resolve(self, node: ast.AST) -> str | None:
        """Return the dotted name that an expression stands for; None if it stands for none."""
        match node:
            case ast.Name(id=name):
                return self.dotted.get(name, name)
            case ast.Attribute(value=ast.Name(id="builtins" | "__builtins__"), attr=attr):
                return attr
            case ast.Attribute(value=value, attr=attr) if (base := self.resolve(value)) is not None:
                return f"{base}.{attr}"
            case ast.Subscript(value=value, slice=index) if (base := self.resolve(value)) is not None:
                is_own_module = isinstance(index, ast.Name) and self.resolve(index) == "__name__"
                is_own_module = is_own_module or (isinstance(index, ast.Attribute) and index.attr == "__module__")
                return None if is_own_module else self._item(base, self.fold(index))
            case ast.Call():
                return self._call_result(node)
            case ast.NamedExpr(value=value):
                return self.resolve(value)
            case ast.IfExp(body=first, orelse=second):
                return self._first(first, second)
            case ast.BoolOp(values=values):
                return self._first(*values)
            case _:
                return None

    def _first(self, *nodes: ast.expr) -> str | None:
        """Return what the first of several expressions stands for that is not just a name of its own."""
        resolved = [dotted for node in nodes if (dotted := self.resolve(node)) is not None and "." in dotted]
        return resolved[0] if resolved else None

    def _item(self, base: str, key: Constant) -> str | None:
        """Return what `base[key]` stands for, if the base is a dictionary that holds a namespace."""
        if base == "sys.modules":
            return key if isinstance(key, str) else f"sys.modules.{_DYNAMIC}"
        for suffix in (".__dict__", ".f_globals", ".f_builtins", ".__globals__"):
            if base.endswith(suffix) and isinstance(key, str):
                return f"{base.removesuffix('.__dict__')}.{key}"
        if base in ("globals()", "__builtins__", "builtins.__dict__", "__builtins__.__dict__"):
            return self.dotted.get(key, key) if isinstance(key, str) else None
        return None

    def _call_result(self, node: ast.Call) -> str | None:
        """Return what a call returns, if it only looks something up."""
        function = self.resolve(node.func)
        arguments = node.args
        first = self.fold(arguments[0]) if arguments else None
        match function:
            case "__import__" | "importlib.import_module" | "importlib.__import__" if isinstance(first, str):
                return first
            case "getattr" | "inspect.getattr_static" | "object.__getattribute__" | "type.__getattribute__" if (
                len(arguments) > 1 and (base := self.resolve(arguments[0])) is not None
            ):
                name = self.fold(arguments[1])
                if not isinstance(name, str):
                    return f"{base}.{_DYNAMIC}"
                return name if base == "builtins" else f"{base}.{name}"
            case "vars" if arguments and (base := self.resolve(arguments[0])) is not None:
                return f"{base}.__dict__"
            case "globals" | "locals" | "vars":
                return "globals()"
            case "importlib.reload" if arguments:
                return self.resolve(arguments[0])
            case str() if (
                function.endswith((".__dict__.get", "sys.modules.get", ".f_globals.get", ".pop")) and first
            ):
                return self._item(function.rpartition(".")[0], first)
            case str() if function.endswith(".__getattribute__") and isinstance(first, str):
                return f"{function.rpartition('.')[0]}.{first}"
            case None if isinstance(node.func, ast.Call) and arguments:
                getter = self.resolve(node.func.func)
                name = self.fold(node.func.args[0]) if node.func.args else None
                base = self.resolve(arguments[0])
                if getter == "operator.attrgetter" and isinstance(name, str) and base is not None:
                    return f"{base}.{name}"
            case _:
                pass
        return None

    def fold(self, node: ast.AST, depth: int = 0) -> Constant:
        """Return the constant that an expression always is; None if that cannot be determined without
        running it.
        """
        if depth > 40:
            return None
        match node:
            case ast.Constant(value=str() | bytes() | int() | float() as value):
                return value
            case ast.Name(id=name):
                return self.constants.get(name)
            case ast.BinOp(left=left, op=operator, right=right):
                return self._binary(operator, left, right, depth)
            case ast.JoinedStr(values=values):
                parts = [
                    self.fold(part.value if isinstance(part, ast.FormattedValue) else part, depth + 1)
                    for part in values
                ]
                return join("", [str(part) for part in parts]) if None not in parts else None
            case ast.Subscript(value=value, slice=ast.Slice(lower, upper, step)):
                bounds = [None if bound is None else self.fold(bound, depth + 1) for bound in (lower, upper, step)]
                if isinstance(text := self.fold(value, depth + 1), str | bytes) and are_bounds(bounds):
                    return text[slice(*cast("list[int | None]", bounds))]
            case ast.UnaryOp(op=ast.USub(), operand=operand) if isinstance(
                number := self.fold(operand, depth + 1), int
            ):
                return -number
            case ast.Call():
                return self._folded_call(node, depth + 1)
            case _:
                pass
        return None

    def _binary(self, operator: ast.operator, left: ast.expr, right: ast.expr, depth: int) -> Constant:
        first = self.fold(left, depth + 1)
        if first is None:
            return None
        if isinstance(operator, ast.Mod) and isinstance(first, str):
            values = right.elts if isinstance(right, ast.Tuple) else [right]
            folded = tuple(self.fold(value, depth + 1) for value in values)
            if None in folded or re.search(r"%[^A-Za-z%]*(?:\*|\d{4})", first) or not fits(first, *folded):
                return None
            try:
                return bounded(first % folded)
            except (TypeError, ValueError):
                return None
        second = self.fold(right, depth + 1)
        if isinstance(operator, ast.Add) and isinstance(first, str) and isinstance(second, str):
            return bounded(first + second)
        if isinstance(operator, ast.Add) and isinstance(first, bytes) and isinstance(second, bytes):
            return bounded(first + second)
        if isinstance(operator, ast.BitXor | ast.Add | ast.Sub) and type(first) is int and type(second) is int:
            if isinstance(operator, ast.BitXor):
                return first ^ second
            return first + second if isinstance(operator, ast.Add) else first - second
        return None

    def _elements(self, node: ast.expr, depth: int) -> list[Constant] | None:
        """Return the constants of a display, of a reversed or mapped one, or the characters of a string."""
        match node:
            case ast.List(elts=elements) | ast.Tuple(elts=elements):
                return [self.fold(element, depth) for element in elements]
            case ast.Call(func=ast.Name(id="map"), args=[ast.Name(id=("chr" | "str") as name), inner]):
                numbers = self._elements(inner, depth + 1)
                if numbers is None or not all(
                    type(number) is int and 0 <= number < 0x110000 for number in numbers
                ):
                    return None
                return [(chr if name == "chr" else str)(cast("int", number)) for number in numbers]
            case ast.Call(func=ast.Name(id="reversed" | "list" | "tuple" as name), args=[inner]):
                elements = self._elements(inner, depth + 1)
                return elements[::-1] if elements and name == "reversed" else elements
            case (
                ast.ListComp(elt=element, generators=[generator])
                | ast.GeneratorExp(elt=element, generators=[generator])
            ) if isinstance(element, ast.Call) and isinstance(element.func, ast.Name) and element.func.id == "chr":
                numbers = self._elements(generator.iter, depth + 1)
                plain = element.args and isinstance(element.args[0], ast.Name)
                return (
                    [chr(number) for number in numbers if type(number) is int and 0 <= number < 0x110000]
                    if numbers and plain
                    else None
                )
            case _:
                text = self.fold(node, depth)
                return list(text) if isinstance(text, str | bytes) else None

    def _folded_call(self, node: ast.Call, depth: int) -> Constant:
        function = self.resolve(node.func) or ""
        arguments = [self.fold(argument, depth) for argument in node.args]
        first = arguments[0] if arguments else None
        try:
            match function.rpartition(".")[2]:
                case "chr" if type(first) is int:
                    return chr(first)
                case "str" | "intern" if len(arguments) == 1 and isinstance(first, str | int):
                    return str(first)
                case "bytes" | "bytearray" if len(arguments) == 1:
                    if isinstance(first, bytes):
                        return first
                    numbers = self._elements(node.args[0], depth)
                    return (
                        bytes(cast("list[int]", numbers))
                        if numbers and all(type(n) is int for n in numbers)
                        else None
                    )
                case "fromhex" | "unhexlify" | "a2b_hex" if isinstance(first, str | bytes):
                    return bytes.fromhex(first if isinstance(first, str) else first.decode())
                case "b64decode" | "standard_b64decode" | "urlsafe_b64decode" if isinstance(first, str | bytes):
                    return bounded(base64.b64decode(first))
                case "b32decode" | "b16decode" | "b85decode" | "a85decode" as name if isinstance(
                    first, str | bytes
                ):
                    return bounded(getattr(base64, name)(first))
                case "decode" | "encode" if function.startswith("codecs.") and isinstance(first, str | bytes):
                    return recode(first, arguments[1:])
                case _:
                    pass
            if isinstance(node.func, ast.Attribute):
                return self._string_method(node, node.func, arguments, depth)
        except (ValueError, TypeError, LookupError, binascii.Error):
            return None
        return None

    def _string_method(
        self, node: ast.Call, function: ast.Attribute, arguments: list[Constant], depth: int
    ) -> Constant:
        """Return the result of a method of a constant string that returns another string."""
        owner = self.fold(function.value, depth)
        if isinstance(owner, str) and function.attr == "join" and node.args:
            parts = self._elements(node.args[0], depth)
            are_strings = parts is not None and all(isinstance(part, str) for part in parts)
            return join(owner, cast("list[str]", parts)) if are_strings else None
        if isinstance(owner, str | bytes) and function.attr in ("decode", "encode"):
            return recode(owner, arguments)
        if not isinstance(owner, str) or None in arguments:
            return None
        if function.attr in (
            "lower",
            "upper",
            "title",
            "swapcase",
            "strip",
            "casefold",
            "capitalize",
            "replace",
            "format",
        ):
            if function.attr == "format" and re.search(r"\{[^}]*[.\[:!]", owner):
                return None
            replaced = "{" if function.attr == "format" else str((*arguments, " ")[0])
            if not fits(owner, *arguments, times=owner.count(replaced)):
                return None
            return bounded(cast("str", getattr(owner, function.attr)(*arguments)))
        if function.attr in ("removeprefix", "removesuffix"):
            return cast("str", getattr(owner, function.attr)(*arguments))
        return None


def _mentions_modules(node: ast.AST, names: Names) -> bool:
    return any(
        isinstance(inner, ast.Attribute | ast.Name) and names.resolve(inner) == "sys.modules"
        for inner in ast.walk(node)
    )


def _canonical(node: ast.AST, names: Names, *, is_head: bool = False) -> ast.AST:
    """Return a copy of a node with dotted names for aliases and constants for what can be folded, without
    annotations.
    """
    if not isinstance(getattr(node, "ctx", None), ast.Store | ast.Del):
        if isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Call):
            dotted = names.resolve(node)
            if dotted is not None and not (isinstance(node, ast.Name) and node.id in names.constants):
                return ast.Name(dotted, ast.Load())
        if isinstance(node, ast.BinOp | ast.JoinedStr | ast.Call | ast.Subscript | ast.Name):
            constant = names.fold(node)
            if isinstance(constant, str | bytes) and len(constant) <= names.inline_budget:
                names.inline_budget -= len(constant)
                return ast.Constant(constant)
    elif isinstance(node, ast.Attribute | ast.Subscript) and (base := names.resolve(node.value)) is not None:
        whole_fields = {**dict(ast.iter_fields(node)), "value": ast.Name(base, ast.Load())}
        node = cast("Callable[..., ast.AST]", type(node))(**whole_fields)
    fields: dict[str, object] = {}
    for name, value in ast.iter_fields(node):
        if is_head and name in ("body", "orelse", "finalbody") and isinstance(value, list):
            fields[name] = [ast.Pass()] if name == "body" else []
        elif isinstance(value, list):
            items = cast("list[object]", value)
            fields[name] = [_canonical(item, names) if isinstance(item, ast.AST) else item for item in items]
        elif name in ("returns", "annotation") and not isinstance(node, ast.AnnAssign):
            fields[name] = None
        else:
            fields[name] = _canonical(value, names) if isinstance(value, ast.AST) else value
    return ast.copy_location(cast("Callable[..., ast.AST]", type(node))(**fields), node)
