"""Writes outlines of a solution: its names and signatures, with the behaviour that the code had without it.

Tests of a solution often fail without it only because a name or a parameter is missing. Code that adds these and
computes nothing new satisfies whatever the old code did already, so such assertions protect nothing (see
`twins.learning`). Outlines are run at validation to find them. Nothing here runs code.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from msgspec import Struct

from understudy.util.python_syntax import invalid_python, parse_module, unparse

_Function = ast.FunctionDef | ast.AsyncFunctionDef
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_DefinitionKey = tuple[str, str, int]
_SIMPLE = (ast.Name, ast.Attribute, ast.Constant)

Returns = Literal["nothing", "first", "last"]
"""What new functions return: None, their first argument (mostly `self`), or the last one, called if possible.
Where they make a decorator, it changes nothing.
"""
RETURNS: tuple[Returns, ...] = ("nothing", "first", "last")


class Outline(Struct, frozen=True):
    """The outline of one file's change. `docstrings` are those of the file, and of the functions and classes that
    the change touches, as they were before.
    """

    source: str
    docstrings: tuple[str, ...] = ()


def outline(before: str, after: str, returns: Returns = "nothing") -> Outline:
    """Return the outline of a Python file's change; `before` is "" for a new file.

    - Functions of both get the new parameters, and keep their old body, decorators and default values.
    - New functions do nothing but return what `returns` says.
    - New classes keep their attributes, and the plain assignments of `__init__`. Where functions return something,
      new classes with bases have no methods, and so do what their bases do.
    - Values of old names stay as they were; new names get an empty value if theirs is a literal.

    Raises ValueError when one of the texts is not valid Python.
    """
    try:
        old, new = parse_module(before), parse_module(after)
        docstrings, unchanged = [ast.get_docstring(old)], ast.dump(old)
        new.body = _Outliner(docstrings, returns).merged(old.body, new.body, in_class=False)
        same = ast.dump(new) == unchanged
        source = before if same else unparse(ast.fix_missing_locations(new)) + "\n"
    except (SyntaxError, ValueError, RecursionError) as error:
        raise invalid_python(error) from error
    return Outline(source, tuple(text for text in docstrings if text))


class _Outliner:
    def __init__(self, docstrings: list[str | None], returns: Returns) -> None:
        """`docstrings` gets those of what is changed."""
        self._docstrings = docstrings
        self._returns = returns

    def merged(self, old: Sequence[ast.stmt], new: Sequence[ast.stmt], *, in_class: bool) -> list[ast.stmt]:
        """Return the new statements in their order, with the old ones in place of those that they replace, and
        between them the old ones that have gone.
        """
        before, after = _by_definition(old), _by_definition(new)
        remaining = [
            (key, statement) for key, statement in before.items() if not _is_constant_statement(statement)
        ]
        merged: list[ast.stmt] = []
        for key, statement in after.items():
            if key not in before:
                merged += self._added(statement, in_class=in_class)
                continue
            while remaining and remaining[0][0] not in after:
                merged.append(remaining.pop(0)[1])
            remaining = [pair for pair in remaining if pair[0] != key]
            merged.append(self._replaced(before[key], statement))
        return [*merged, *(statement for key, statement in remaining if key not in after)]

    def _replaced(self, before: ast.stmt, after: ast.stmt) -> ast.stmt:
        if ast.dump(before) == ast.dump(after):
            return after
        match before, after:
            case ((ast.FunctionDef() | ast.AsyncFunctionDef()), (ast.FunctionDef() | ast.AsyncFunctionDef())):
                self._docstrings.append(ast.get_docstring(before))
                after.body, after.decorator_list = before.body, before.decorator_list
                _keep_defaults(before.args, after.args)
                return after
            case ast.ClassDef(), ast.ClassDef():
                self._docstrings.append(ast.get_docstring(before))
                after.bases, after.keywords = before.bases, before.keywords
                after.decorator_list = before.decorator_list
                after.body = self.merged(before.body, after.body, in_class=True) or [ast.Pass()]
                return after
            case ((ast.Assign() | ast.AnnAssign()), _):
                return before
            case _:  # a function became a class, or the reverse
                return self._added(after, in_class=False)[0]

    def _added(self, statement: ast.stmt, *, in_class: bool) -> list[ast.stmt]:
        """Return what remains of a statement that only the solution has."""
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                statement.body = self._stub_body(statement)
            case ast.ClassDef(bases=bases):
                inherits = bool(bases) and self._returns != "nothing"
                kept_statements = [
                    inner for inner in statement.body if not (inherits and isinstance(inner, _FUNCTIONS))
                ]
                statement.body = [
                    outlined for inner in kept_statements for outlined in self._added(inner, in_class=True)
                ]
                statement.body = statement.body or [ast.Pass()]
            case ast.Assign(value=value) | ast.AnnAssign(value=value) if value is not None and not in_class:
                statement.value = _empty_value(value)
            case ast.Import() | ast.ImportFrom() | ast.Assign() | ast.AnnAssign() | ast.Pass():
                pass
            case ast.Expr(value=ast.Constant()):
                pass
            case _ if any(isinstance(node, ast.Import | ast.ImportFrom) for node in ast.walk(statement)):
                pass
            case _:
                return []
        return [statement]

    def _stub_body(self, function: _Function) -> list[ast.stmt]:
        """Return the body of a function that computes nothing: what only stores or returns its arguments stays."""
        if function.name in ("__init__", "__post_init__", "__new__"):
            storing = [statement for statement in function.body if _only_stores(statement)]
            return storing or [ast.Pass()]
        match [statement for statement in function.body if not _is_constant_statement(statement)]:
            case [ast.Return(value=ast.Name() | ast.Attribute())] | [ast.Raise()] | [ast.Pass()]:
                return function.body
            case _:
                pass
        value = self._returned(function)
        if not any(isinstance(node, ast.Yield | ast.YieldFrom) for node in ast.walk(function)):
            return [ast.Return(value)]
        if self._returns == "first" and not function.decorator_list:
            return [ast.Return(value)]
        yields: list[ast.stmt] = [ast.Expr(ast.Yield(value))]
        return yields if function.decorator_list else [ast.Return(None), *yields]

    def _returned(self, function: _Function) -> ast.expr:
        arguments = function.args
        if self._returns == "first" and _makes_decorator(function):
            unchanged = ast.arguments([], [ast.arg("function")], None, [], [], None, [])
            return ast.Lambda(unchanged, ast.Name("function", ast.Load()))
        names = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
        names += [arguments.vararg.arg] if arguments.vararg else []
        if not names or self._returns == "nothing":
            return ast.Constant(None)
        name = ast.Name(names[0 if self._returns == "first" else -1], ast.Load())
        if self._returns == "first" or _has_function(function):  # with one within it, it may wrap its argument
            return name
        is_callable = ast.Call(ast.Name("callable", ast.Load()), [name], [])
        return ast.IfExp(is_callable, ast.Call(name, [], []), name)


def _by_definition(statements: Iterable[ast.stmt]) -> dict[_DefinitionKey, ast.stmt]:
    """Return statements by what they define, or else by their text, and by how often that came before."""
    seen: Counter[tuple[str, str]] = Counter()
    statements_by_key: dict[_DefinitionKey, ast.stmt] = {}
    for statement in statements:
        match statement:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                key = "definition", name
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
                key = "value", name
            case _:
                key = "text", ast.dump(statement)
        statements_by_key[key[0], key[1], seen[key]] = statement
        seen[key] += 1
    return statements_by_key


def _is_constant_statement(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


def _has_function(function: _Function) -> bool:
    return any(isinstance(node, _FUNCTIONS) for statement in function.body for node in ast.walk(statement))


def _makes_decorator(function: _Function) -> bool:
    """Return whether a function has a function within one within it, as what is called to get a decorator has."""
    inner = [node for statement in function.body for node in ast.walk(statement) if isinstance(node, _FUNCTIONS)]
    return any(map(_has_function, inner))


def _keep_defaults(before: ast.arguments, after: ast.arguments) -> None:
    """Give the parameters of both their old default values, if they had some."""
    old = dict(_defaults(before))
    positional = [parameter.arg for parameter in (*after.posonlyargs, *after.args)]
    with_default = positional[len(positional) - len(after.defaults) :]
    after.defaults = [old.get(name, value) for name, value in zip(with_default, after.defaults, strict=True)]
    after.kw_defaults = [
        old.get(parameter.arg, value) if value is not None else None
        for parameter, value in zip(after.kwonlyargs, after.kw_defaults, strict=True)
    ]


def _defaults(arguments: ast.arguments) -> Iterator[tuple[str, ast.expr]]:
    positional = [parameter.arg for parameter in (*arguments.posonlyargs, *arguments.args)]
    yield from zip(reversed(positional), reversed(arguments.defaults), strict=False)
    for parameter, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        if value is not None:
            yield parameter.arg, value


def _empty_value(value: ast.expr) -> ast.expr:
    """Return an empty value of the same type in place of a literal; other expressions stay, without the bodies of
    lambdas.
    """
    match value:
        case ast.Constant(value=str()):
            return ast.Constant("")
        case ast.Constant(value=bytes()):
            return ast.Constant(b"")
        case ast.Constant(value=int() | float() | complex()):
            return ast.Constant(0)
        case ast.List() | ast.Tuple():
            return type(value)([], ast.Load())
        case ast.Dict():
            return ast.Dict([], [])
        case ast.Set():
            return ast.Call(ast.Name("set", ast.Load()), [], [])
        case _:
            value = copy.deepcopy(value)
            for node in ast.walk(value):
                if isinstance(node, ast.Lambda):
                    node.body = ast.Constant(None)
            return value


def _only_stores(statement: ast.stmt) -> bool:
    match statement:
        case ast.Assign(value=value) | ast.AnnAssign(value=value) | ast.Return(value=value):
            empty = isinstance(value, ast.List | ast.Dict | ast.Set | ast.Tuple) and not any(
                isinstance(child, ast.expr) for child in ast.iter_child_nodes(value)
            )
            return isinstance(value, _SIMPLE) or empty
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Call(func=ast.Name(id="super"))))):
            return True
        case _:
            return False
