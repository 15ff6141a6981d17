"""Removes values from a test file that nothing reads any more once its assertions have been replaced (see
`twins`).

Values that only served as expectations are replaced by None where they are written: assigned values, columns of
tables for loops or `parametrize`, and arguments of helper functions. Ids of parametrised tests are removed too,
because they may contain the expectation.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator

from understudy.checks.twins.names import is_declaration, parameter_names

_ROUNDS = 4  # repeated, because a removed value may have been the only reader of another one
_PURE_FUNCTIONS = frozenset(
    {
        "Decimal", "Fraction", "OrderedDict", "abs", "bool", "bytes", "chr", "complex", "date", "datetime",
        "decode", "dedent", "dict", "encode", "enumerate", "float", "format", "frozenset", "int", "join",
        "len", "list", "lower", "lstrip", "max", "min", "ord", "param", "range", "replace", "repr",
        "reversed", "round", "rstrip", "set", "sorted", "split", "splitlines", "str", "strip", "sum",
        "timedelta", "tuple", "upper", "zip",
    }
)  # fmt: skip
"""Functions and methods that do nothing but compute, so that a call whose result is unused can be removed."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def unpack_rows(tree: ast.Module) -> None:
    """Rewrite `for row in TABLE` that uses `row[0]`, `row[1]` as `for a, b in TABLE`, so that columns can be
    removed.

    Done only if the table is written in the file and the row is used in no other way.
    """
    tables = {
        node.targets[0].id: node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    }
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for loop in ast.walk(function):
            if isinstance(loop, ast.For) and isinstance(loop.target, ast.Name):
                table = tables.get(loop.iter.id) if isinstance(loop.iter, ast.Name) else loop.iter
                _unpack(function, loop, loop.target.id, table)


def _unpack(function: ast.AST, loop: ast.For, row: str, table: ast.expr | None) -> None:
    rows = table.elts if isinstance(table, ast.Tuple | ast.List) else []
    widths = {len(table_row.elts) if isinstance(table_row, ast.Tuple | ast.List) else 0 for table_row in rows}
    if len(widths) != 1 or any(
        isinstance(node, ast.Starred) for table_row in rows for node in ast.walk(table_row)
    ):
        return
    cells: dict[ast.AST, int] = {}
    for node in (inner for statement in loop.body for inner in ast.walk(statement)):
        match node:
            case ast.Subscript(
                value=ast.Name(id=name), slice=ast.Constant(value=int(position)), ctx=ast.Load()
            ) if name == row and 0 <= position < max(widths):
                cells[node] = position
            case _:
                pass
    uses = sum(isinstance(node, ast.Name) and node.id == row for node in ast.walk(function))
    if not cells or uses != len(cells) + 1:
        return

    class Cells(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            position = cells.get(node)
            return self.generic_visit(node) if position is None else ast.Name(f"{row}_{position}_", ast.Load())

    loop.body = [Cells().visit(statement) for statement in loop.body]
    loop.target = ast.Tuple(
        [ast.Name(f"{row}_{position}_", ast.Store()) for position in range(max(widths))], ast.Store()
    )


def cut_unused(tree: ast.Module) -> dict[int, str]:
    """Replace unused values in a file's tree by None, in place, if evaluating them has no side effects.

    Returns, by the `id()` of the node that replaces a value, the name of the table that the value was copied from,
    because that table may still hold it.
    """
    copies: dict[int, str] = {}
    for _ in range(_ROUNDS):
        cutter = _Cutter(tree, copies)
        cutter.cut()
        if not cutter.cuts:
            break
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in ("parametrize", "param"):
            node.keywords = [keyword for keyword in node.keywords if keyword.arg not in ("id", "ids")]
    return copies


class _Cutter:
    """One pass over a file."""

    def __init__(self, tree: ast.Module, copies: dict[int, str]) -> None:
        self.cuts = 0
        self._copies = copies
        self._copied = ""
        self._tree = tree
        self._reads = _reads(tree)
        self._definitions = Counter(node.name for node in ast.walk(tree) if isinstance(node, _Function))
        self._module_assignments = {
            target.id: node
            for node in tree.body
            if isinstance(node, ast.Assign)
            for target in node.targets
            if isinstance(target, ast.Name)
        }

    def cut(self) -> None:
        """Replace the values that are unused in this pass."""
        functions = list(_outermost(self._tree))
        for function in functions:
            reads = _reads(function)
            self._parameters(function, reads)
            self._statements(ast.walk(function), reads)
        inside = {id(node) for function in functions for node in ast.walk(function)}
        inside |= {
            id(part)
            for class_node in ast.walk(self._tree)
            if isinstance(class_node, ast.ClassDef)
            for part in class_node.body
        }
        self._statements((node for node in ast.walk(self._tree) if id(node) not in inside), self._reads)

    def _statements(self, nodes: Iterator[ast.AST], reads: Counter[str]) -> None:
        for node in nodes:
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if not reads[name]:
                    node.value = self._removed(value)
                case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)) if len(
                    names
                ) == len(values):
                    for position, target in enumerate(names):
                        if isinstance(target, ast.Name) and not reads[target.id]:
                            values[position] = self._removed(values[position])
                case ast.For(target=target, iter=table) | ast.AsyncFor(target=target, iter=table):
                    node.iter = self._loop(target, table, reads)
                case ast.comprehension(target=target, iter=table):
                    node.iter = self._loop(target, table, reads)
                case _:
                    pass

    def _removed(self, value: ast.expr) -> ast.expr:
        if _is_none(value):
            return value
        if _removable(value):
            self.cuts += 1
            removed = ast.Constant(None)
            if self._copied:
                self._copies[id(removed)] = self._copied
            return removed
        return value

    def _parameters(self, function: _Function, reads: Counter[str]) -> None:
        for decorator in function.decorator_list:
            if not isinstance(decorator, ast.Call) or _name(decorator.func) != "parametrize":
                continue
            if len(decorator.args) < 2 or any(keyword.arg == "indirect" for keyword in decorator.keywords):
                continue
            names = parameter_names(decorator.args[0])
            for position, name in enumerate(names):
                if name and not reads[name]:
                    decorator.args[1] = self._column(decorator.args[1], position, len(names))
        if (
            function.name.startswith("test")
            or function.decorator_list
            or self._definitions[function.name] != 1
            or is_declaration(function)
        ):
            return
        parameters = [argument.arg for argument in function.args.args if argument.arg not in ("self", "cls")]
        for position, name in enumerate(parameters):
            if not reads[name]:
                self._arguments(function.name, position, name)

    def _arguments(self, function: str, position: int, name: str) -> None:
        for node in ast.walk(self._tree):
            if not isinstance(node, ast.Call) or _name(node.func) != function:
                continue
            starred = any(isinstance(argument, ast.Starred) for argument in node.args)
            if not starred and position < len(node.args):
                node.args[position] = self._removed(node.args[position])
            for keyword in node.keywords:
                if keyword.arg == name:
                    keyword.value = self._removed(keyword.value)

    def _loop(self, target: ast.expr, table: ast.expr, reads: Counter[str]) -> ast.expr:
        """Return the table of a loop, without the columns that the loop does not read."""
        match target, table:
            case ast.Tuple(elts=[_, inner]), ast.Call(func=ast.Name(id="enumerate"), args=[rows, *_]):
                table.args[0] = self._loop(inner, rows, reads)
            case ast.Tuple(elts=names), ast.Call(func=ast.Name(id="zip"), args=columns) if len(names) == len(
                columns
            ):
                for position, name in enumerate(names):
                    if isinstance(name, ast.Name) and not reads[name.id]:
                        columns[position] = self._column(columns[position], 0, 1)
            case ast.Tuple(elts=names), _:
                for position, name in enumerate(names):
                    if isinstance(name, ast.Name) and not reads[name.id]:
                        table = self._column(table, position, len(names))
            case _:
                pass
        return table

    def _column(self, table: ast.expr, position: int, width: int) -> ast.expr:
        match table:
            case ast.List(elts=rows) | ast.Tuple(elts=rows):
                for number, row in enumerate(rows):
                    rows[number] = self._cell(row, position, width)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                table.left = self._column(left, position, width)
                table.right = self._column(right, position, width)
            case ast.Call(func=ast.Attribute(value=ast.Dict() as rows, attr="items")) if position == 1:
                rows.values = [self._removed(value) for value in rows.values]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=source) as rows, attr="items"), args=[]) if (
                position == 1 and isinstance(value := self._module_value(source), ast.Dict)
            ):
                assert isinstance(table.func, ast.Attribute)
                table.func.value = copy.deepcopy(value)
                return self._copied_column(source, table, position, width)
            case ast.Name(id=source) if isinstance(value := self._module_value(source), ast.List | ast.Tuple):
                return self._copied_column(source, copy.deepcopy(value), position, width)
            case _:
                pass
        return table

    def _copied_column(self, source: str, table: ast.expr, position: int, width: int) -> ast.expr:
        self.cuts += 1
        outer, self._copied = self._copied, source
        try:
            return self._column(table, position, width)
        finally:
            self._copied = outer

    def _module_value(self, name: str) -> ast.expr | None:
        """Return the value of a module's name if it has no side effects and can replace the name;
        otherwise None.
        """
        stored = sum(
            isinstance(node, ast.Name) and node.id == name and not isinstance(node.ctx, ast.Load)
            for node in ast.walk(self._tree)
        )
        assigned = self._module_assignments.get(name)
        return assigned.value if assigned and stored == 1 and _removable(assigned.value) else None

    def _cell(self, row: ast.expr, position: int, width: int) -> ast.expr:
        if isinstance(row, ast.Call) and _name(row.func) == "param":
            if position < len(row.args):
                row.args[position] = self._removed(row.args[position])
            return row
        if width == 1:
            return self._removed(row)
        if isinstance(row, ast.Tuple | ast.List) and len(row.elts) == width:
            row.elts[position] = self._removed(row.elts[position])
        return row


def _reads(tree: ast.AST) -> Counter[str]:
    """Return how often each name is read below a node."""
    reads: Counter[str] = Counter()
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()):
                reads[name] += 1
            case ast.AugAssign(target=ast.Name(id=name)) | ast.Delete(targets=[ast.Name(id=name)]):
                reads[name] += 1
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                reads.update(names)
            case _:
                pass
    return reads


def _outermost(tree: ast.AST) -> Iterator[_Function]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, _Function):
            yield node
        else:
            yield from _outermost(node)


def _removable(value: ast.expr) -> bool:
    """Return whether evaluating a value has no side effects."""
    return all(
        not isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.NamedExpr)
        and (not isinstance(node, ast.Call) or _name(node.func) in _PURE_FUNCTIONS)
        for node in ast.walk(value)
    )


def _is_none(value: ast.expr) -> bool:
    return isinstance(value, ast.Constant) and value.value is None


def _name(function: ast.expr) -> str:
    match function:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""
