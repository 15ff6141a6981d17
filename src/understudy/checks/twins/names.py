"""Names in the source of tests: which have values that do not depend on the code under test, and where these come
from.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping

UNSTABLE = frozenset({"open", "input", "id", "hash", "print", "__import__", "object", "globals", "locals", "vars"})
_STABLE_MODULES = (sys.stdlib_module_names | {"pytest"}) - frozenset(
    {"random", "time", "secrets", "uuid", "tempfile", "unittest", "ctypes"}
)


def independent_names(
    nodes: Iterable[ast.AST], tables: Mapping[int, ast.expr], outer_names: frozenset[str]
) -> frozenset[str]:
    """Return the names, bound in `nodes` or listed in `outer_names`, whose values do not depend on the code under
    test.

    These are names that are bound only to values made of such names, or imported from the standard library.
    `tables` has the values of parameters, by the `id()` of the parameter's node.
    """
    bindings = bindings_of(nodes, tables)
    stable = set(outer_names) | set(bindings)
    while True:
        dropped = {
            name
            for name, values in bindings.items()
            if name in stable and not all(value is not None and _uses_only(value, stable) for value in values)
        }
        if not dropped:
            return frozenset(stable)
        stable -= dropped


def bindings_of(nodes: Iterable[ast.AST], tables: Mapping[int, ast.expr]) -> dict[str, list[ast.expr | None]]:
    """Return the values that each name is bound to in `nodes`, or that are added to it; None for an unknown value.

    A name of the standard library is bound to the constant None. `tables` has the values of parameters, by the
    `id()` of the parameter's node.
    """
    bindings: dict[str, list[ast.expr | None]] = {}

    def bind(target: ast.AST, value: ast.expr | None) -> None:
        match target, value:
            case ast.Tuple(elts=targets) | ast.List(elts=targets), ast.Tuple(elts=values) | ast.List(
                elts=values
            ) if len(targets) == len(values) and not any(
                isinstance(element, ast.Starred) for element in (*targets, *values)
            ):
                for element, part in zip(targets, values, strict=True):
                    bind(element, part)
            case _:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
                        bindings.setdefault(node.id, []).append(value)
                    elif (
                        isinstance(node, ast.Subscript | ast.Attribute)
                        and isinstance(node.ctx, ast.Store)
                        and isinstance(node.value, ast.Name)
                        and node.value.id in bindings
                    ):
                        bindings[node.value.id].append(value)

    def bind_loop(target: ast.expr, table: ast.expr) -> None:
        match target, table:
            case ast.Tuple(elts=[count, inner]), ast.Call(func=ast.Name(id="enumerate"), args=[rows, *_]):
                bind(count, ast.Constant(None))
                bind_loop(inner, rows)
            case ast.Tuple(elts=targets), ast.Call(func=ast.Name(id="zip"), args=columns) if len(targets) == len(
                columns
            ):
                for element, column in zip(targets, columns, strict=True):
                    bind_loop(element, column)
            case ast.Tuple(elts=[key, value]), ast.Call(
                func=ast.Attribute(value=ast.Dict() as rows, attr="items")
            ):
                bind(key, ast.List([row_key for row_key in rows.keys if row_key is not None], ast.Load()))
                bind(value, ast.List(rows.values, ast.Load()))
            case ast.Tuple(elts=targets), _:
                for position, element in enumerate(targets):
                    bind_loop(element, column_of(table, position, len(targets)))
            case _:
                bind(target, table)

    for node in nodes:
        match node:
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    bind(target, value)
            case ast.AnnAssign(target=target, value=value) | ast.AugAssign(target=target, value=value):
                bind(target, value)
            case ast.NamedExpr(target=target, value=value):
                bind(target, value)
            case ast.For(target=target, iter=value) | ast.AsyncFor(target=target, iter=value):
                bind_loop(target, value)
            case ast.comprehension(target=target, iter=value):
                bind_loop(target, value)
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=ast.Name(id=name)), args=arguments)):
                if name in bindings:  # a list that is appended to
                    bindings[name] += arguments
            case ast.With(items=items) | ast.AsyncWith(items=items):
                for item in items:
                    if item.optional_vars is not None:
                        bind(item.optional_vars, None)
            case ast.Import(names=names):
                for alias in names:
                    stable = alias.name.partition(".")[0] in _STABLE_MODULES
                    name = alias.asname or alias.name.partition(".")[0]
                    bindings.setdefault(name, []).append(ast.Constant(None) if stable else None)
            case ast.ImportFrom(names=names, module=module, level=level):
                stable = not level and (module or "").partition(".")[0] in _STABLE_MODULES
                for alias in names:
                    bindings.setdefault(alias.asname or alias.name, []).append(
                        ast.Constant(None) if stable else None
                    )
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                bindings.setdefault(name, []).append(None)
            case ast.ExceptHandler(name=str(name)):
                bindings.setdefault(name, []).append(None)
            case ast.arg(arg=name):
                bindings.setdefault(name, []).append(tables.get(id(node)))
            case _:
                pass
    return bindings


def column_of(table: ast.expr, position: int, width: int) -> ast.expr:
    """Return the values in one column of a table, as a list; the table itself if its rows are not written out."""
    match table:
        case ast.List(elts=rows) | ast.Tuple(elts=rows) | ast.Set(elts=rows):
            cells = [_cell(row, position, width) for row in rows]
            written = [cell for cell in cells if cell is not None]
            return ast.List(written, ast.Load()) if len(written) == len(rows) else table
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return ast.List([column_of(left, position, width), column_of(right, position, width)], ast.Load())
        case _:
            return table


def _cell(row: ast.expr, position: int, width: int) -> ast.expr | None:
    match row:
        case ast.Call(args=arguments) if name_of(row) == "param":
            return arguments[position] if position < len(arguments) else None
        case _ if width == 1:
            return row
        case ast.Tuple(elts=cells) | ast.List(elts=cells) if len(cells) == width:
            return cells[position]
        case _:
            return None


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a file that are not in the body of a function, including the functions themselves."""
    for node in ast.iter_child_nodes(tree):
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            yield from outside_functions(node)


def _uses_only(value: ast.expr, names: set[str]) -> bool:
    bound = {node.id for node in ast.walk(value) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return not any(
        (isinstance(node, ast.Name) and node.id not in names and node.id not in bound)
        or isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.Lambda)
        for node in ast.walk(value)
    )


def parameter_sources(tree: ast.Module) -> dict[int, ast.expr]:
    """Return where the values of parameters come from, for parametrised tests and helpers, by the `id()` of the
    parameter's node.
    """
    sources: dict[int, ast.expr] = {}
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    calls: dict[str, list[ast.Call]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            calls.setdefault(name_of(node), []).append(node)
    for function in functions:
        names = {argument.arg: argument for argument in [*function.args.args, *function.args.kwonlyargs]}
        for decorator in function.decorator_list:
            if isinstance(decorator, ast.Call) and name_of(decorator) == "parametrize" and len(decorator.args) > 1:
                parameters = parameter_names(decorator.args[0])
                for position, name in enumerate(parameters):
                    if name in names:
                        column = column_of(decorator.args[1], position, len(parameters))
                        sources[id(names[name])] = column
        if function.name.startswith("test") or function.decorator_list:
            continue
        positional = [argument for argument in function.args.args if argument.arg not in ("self", "cls")]
        for position, argument in enumerate(positional):
            values = [_argument(call, position, argument.arg) for call in calls.get(function.name, [])]
            value_sources = [value for value in values if value is not None]
            if value_sources and len(value_sources) == len(values):
                sources[id(argument)] = ast.List(value_sources, ast.Load())
    return sources


def _argument(call: ast.Call, position: int, name: str) -> ast.expr | None:
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return None
    if position < len(call.args):
        return call.args[position]
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def parameter_names(value: ast.expr) -> list[str]:
    """Return the names in the first argument of `parametrize`."""
    match value:
        case ast.Constant(value=str(text)):
            return [name.strip() for name in text.split(",") if name.strip()]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return [str(element.value) if isinstance(element, ast.Constant) else "" for element in elements]
        case _:
            return []


def name_of(call: ast.Call) -> str:
    """Return the name of what a call calls, without what precedes the last dot; "" if it has none."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def is_declaration(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Return whether a function has no body but a declaration, as in a protocol."""
    return all(
        isinstance(statement, ast.Pass)
        or (isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant))
        for statement in function.body
    )
