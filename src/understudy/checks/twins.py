"""Twins: versions of the deciding tests with changed expectations, which a right solution fails.

Code under test runs in the process of the tests, so it can force a test to pass that it does not solve. It
is not told which expectations are the true ones. A version of a test file asks every assertion ("site") softly:
it reports whether the assertion held and goes on. In half of the versions, chosen at random for each site, what
the site expects is changed. Code that computes its answers holds where the expectation is true, and only there;
code that forces passes also holds where it is false, which is a contradiction.

What is changed, and how it looks, must not tell a true expectation from a changed one:

- a literal is changed in place and written in one form in all versions, so that a reader of the test's source sees
  two candidates, each in half of the versions;
- a value that is not a literal goes through a function in all versions, with a key that decides (`twin_driver`);
- a name that serves only as an expectation is changed where it gets its value, so that a reader of the test's
  variables sees the changed one.

This module reads and writes source only; `twin_run` runs the versions and judges the reports.
"""

from __future__ import annotations

import ast
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator

import libcst as cst
from msgspec import Struct

from understudy.checks.twin_driver import another_constant, key_for

IMPORT = "from understudy_twin_driver import Unexpected as _Unexpected_, change as _change_, report as _report_\n"

_NEGATED = {
    "assertTrue": "assertFalse",
    "assert_": "assertFalse",
    "assertFalse": "assertTrue",
    "assertIs": "assertIsNot",
    "assertIsNot": "assertIs",
    "assertIsNone": "assertIsNotNone",
    "assertIsNotNone": "assertIsNone",
    "assertIsInstance": "assertNotIsInstance",
    "assertNotIsInstance": "assertIsInstance",
    "assertNotEqual": "assertEqual",
    "assertNotEquals": "assertEqual",
    "assertNotIn": "assertIn",
    "assertGreater": "assertLessEqual",
    "assertLessEqual": "assertGreater",
    "assertLess": "assertGreaterEqual",
    "assertGreaterEqual": "assertLess",
    "assertNotRegex": "assertRegex",
    "assertNotAlmostEqual": "assertAlmostEqual",
}
"""Methods of unittest's test cases, and those that hold exactly where they do not."""

_EQUALITY = re.compile(
    r"assert(?:Equals?|AlmostEquals?|(?:List|Dict|Set|Tuple|Sequence|MultiLine|Count|JSON|XML|HTML)Equal|"
    r"Query[Ss]etEqual|_equals?|_(?:array_)?(?:almost_)?equal|_allclose|_(?:frame|series|index)_equal|_identical)"
)
"""Functions and methods that compare two values, their first two arguments."""

_CONTAINS = {"assertIn": 0, "assertRegex": 1, "assertRegexpMatches": 1}
"""Methods that look for one argument in the other, and which one is looked for."""

_RAISES = frozenset({"raises", "warns", "assertRaises", "assertRaisesRegex", "assertRaisesRegexp", "assertWarns"})
_CONSTRUCTORS = frozenset({"list", "tuple", "dict", "set", "frozenset", "date", "datetime", "timedelta", "approx"})


class TwinVersion(Struct, frozen=True):
    """One version of a test file. `changed` says of each of its sites whether its expectation is changed.

    `weak` are the sites whose condition is negated, for want of a value to change: an object that makes every
    comparison true fails the negation as a right answer does.
    """

    source: str
    changed: tuple[bool, ...]
    weak: frozenset[int]


def write_version(source: str, changed: Callable[[int], bool], seed: int) -> TwinVersion:
    """A version of a test file in which the sites for which `changed` is true expect something else.

    `seed` decides what the changed literals are, and must be the same for all versions that run together: a site
    then has two candidates in all of them. Sites that share an expectation are changed together, as the first of
    them. Raises ValueError when the file cannot be parsed.
    """
    try:
        module = cst.parse_module(source)
        writer = _TwinWriter(module, changed, seed)
        text = module.visit(writer).code
    except (cst.ParserSyntaxError, cst.CSTValidationError, RecursionError) as error:
        raise ValueError(f"invalid Python: {error}") from error
    decisions = tuple(changed(writer.decided_by.get(site, site)) for site in range(writer.sites))
    return TwinVersion(text, decisions, frozenset(writer.weak))


class _TwinWriter(cst.CSTTransformer):
    """Rewrites a test file. Sites are numbered in the order in which they are left, whatever is changed.

    A name that serves only as an expectation takes a number too, which decides for its sites (`decided_by`).
    """

    def __init__(self, module: cst.Module, changed: Callable[[int], bool], seed: int) -> None:
        super().__init__()
        self.sites = 0
        self.decided_by: dict[int, int] = {}
        self.weak: set[int] = set()
        self._module = module
        self._config = module.config_for_parsing
        self._changed = changed
        self._seed = seed
        self._names: list[
            dict[str, str]
        ] = []  # of each function around: its names of expectations, and their kinds
        self._decider: list[dict[str, int]] = []  # of each function around: the number that each such name has
        self._first: list[int] = []  # of each function around: the number of its first site
        self._raises = 0

    def leave_Module(self, original_node: cst.Module, updated_node: cst.Module) -> cst.Module:
        body = list(updated_node.body)
        first = 1 if body and _is_docstring(body[0]) else 0
        while first < len(body) and _is_future_import(body[first]):
            first += 1
        return updated_node.with_changes(body=[*body[:first], self._statement(IMPORT), *body[first:]])

    # --- functions: where names get their values

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._names.append(_expectation_names(self._code(node)))
        self._decider.append({})
        self._first.append(self.sites)

    def leave_FunctionDef(self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef) -> cst.FunctionDef:
        names, deciders, first = self._names.pop(), self._decider.pop(), self._first.pop()
        body = updated_node.body
        if not isinstance(body, cst.IndentedBlock):
            return updated_node
        changes = [self._rebind(name, site) for name, site in deciders.items() if names[name] == "parameter"]
        start = 1 if body.body and _is_docstring(body.body[0]) else 0
        lines = [*body.body[:start], *changes, *body.body[start:]]
        if not self._names and original_node.name.value.startswith("test") and self.sites == first:
            # A test without assertions expects only to come to its end.
            site = self._next()
            self.weak.add(site)
            lines.append(self._soft(f"assert {self._code(self._pass_through(cst.Name('True'), site))}", site))
        return updated_node.with_changes(body=body.with_changes(body=lines))

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:
        if not self._names or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        stored = (node.id for node in ast.walk(self._tree(original_node.target)) if isinstance(node, ast.Name))
        names = [name for name in stored if self._names[-1].get(name) == "loop"]
        changes = [self._rebind(name, self._decider[-1][name]) for name in names if name in self._decider[-1]]
        body = updated_node.body
        return updated_node.with_changes(body=body.with_changes(body=[*changes, *body.body]))

    def _rebind(self, name: str, site: int) -> cst.BaseStatement:
        return self._statement(f"{name} = {self._code(self._pass_through(cst.Name(name), site))}")

    # --- sites

    def visit_With(self, node: cst.With) -> None:
        self._raises += _raises_item(node) is not None

    def leave_With(
        self, original_node: cst.With, updated_node: cst.With
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        position = _raises_item(original_node)
        if position is None:
            return updated_node
        self._raises -= 1
        if self._raises or not self._names or not isinstance(updated_node.body, cst.IndentedBlock):
            return updated_node
        site = self._next()
        item = updated_node.items[position]
        call = cst.ensure_type(item.item, cst.Call)
        if item.asname is None:
            call = _with_argument(call, 0, self._pass_through(call.args[0].value, site))
            items = list(updated_node.items)
            items[position] = item.with_changes(item=call)
            return self._soft(self._code(updated_node.with_changes(items=items)), site, error="BaseException")
        # What was caught is used later, so the true expectation stays, around one that is changed or the same.
        after = self._statement(f"_report_({site}, {0 if self._changed(site) else 1})")
        if not self._changed(site):
            return cst.FlattenSentinel([updated_node, after])
        call = _with_argument(call, 0, cst.Name("_Unexpected_"))
        inner = updated_node.with_changes(items=[cst.WithItem(item=call)], leading_lines=[])
        block = updated_node.body.with_changes(body=[inner, self._statement(f"_report_({site}, 1)")])
        return cst.FlattenSentinel([updated_node.with_changes(body=block), after])

    def leave_SimpleStatementLine(
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.BaseStatement | cst.FlattenSentinel[cst.BaseStatement]:
        if not self._names or len(updated_node.body) != 1:
            return updated_node
        statement = updated_node.body[0]
        if isinstance(statement, cst.Assign):
            name = _single_target(statement)
            if self._names[-1].get(name) != "assigned":
                return updated_node
            value = self._literal(statement.value, self._decide(name))
            return updated_node.with_changes(body=[statement.with_changes(value=value)])
        if self._raises:
            return updated_node
        if isinstance(statement, cst.Assert):
            site = self._next()
            return self._soft(f"assert {self._code(self._condition(statement.test, site))}", site)
        if (call := _asserting_call(statement)) is not None:
            site = self._next()
            error = "BaseException" if _called(call) in _RAISES else "Exception"
            return self._soft(self._code(self._call(call, site)), site, error=error)
        return updated_node

    def _condition(self, test: cst.BaseExpression, site: int) -> cst.BaseExpression:
        """The condition of an assertion. Changed, it is false wherever the true one is true."""
        if isinstance(test, cst.Comparison) and len(test.comparisons) == 1:
            target = test.comparisons[0]
            if isinstance(target.operator, cst.Equal):
                left, right = self._equality(test.left, target.comparator, site)
            elif isinstance(target.operator, cst.In):
                left, right = self._membership(test.left, target.comparator, site)
            else:
                return self._negation(test, site)
            return test.with_changes(left=left, comparisons=[target.with_changes(comparator=right)])
        if isinstance(test, cst.BooleanOperation) and isinstance(test.operator, cst.And):
            # Where a true `and` becomes false by one operand, the others are still asked as they are.
            for side in ("right", "left"):
                operand = getattr(test, side)
                if isinstance(operand, cst.Comparison):
                    return test.with_changes(**{side: self._condition(operand, site)})
        if (inner := _compared_elements(test)) is not None:
            return cst.ensure_type(test.deep_replace(inner, self._condition(inner, site)), cst.Call)
        return self._negation(test, site)

    def _call(self, call: cst.Call, site: int) -> cst.Call:
        """A statement that asserts by calling. Changed, it fails where the true one holds."""
        name = _called(call)
        first = call.args[0].value
        if name in _RAISES:
            return _with_argument(call, 0, self._pass_through(first, site))
        if name == "assertTrue" and isinstance(first, cst.Comparison):
            return _with_argument(call, 0, self._condition(first, site))
        if name in _NEGATED:
            self.weak.add(site)
            other = _NEGATED[name] if self._changed(site) else name
            return call.with_changes(
                func=cst.ensure_type(call.func, cst.Attribute).with_changes(attr=cst.Name(other))
            )
        second = call.args[1].value
        if name not in _CONTAINS:
            first, second = self._equality(first, second, site)
        elif _CONTAINS[name] == 0:
            first, second = self._membership(first, second, site)
        else:
            second, first = self._membership(second, first, site)
        return _with_argument(_with_argument(call, 0, first), 1, second)

    def _equality(
        self, left: cst.BaseExpression, right: cst.BaseExpression, site: int
    ) -> tuple[cst.BaseExpression, cst.BaseExpression]:
        expected = right if expects_right(self._tree(left), self._tree(right), self._names[-1]) else left
        if isinstance(expected, cst.Name) and expected.value in self._names[-1]:
            self.decided_by[site] = self._decide(expected.value)
            return left, right
        literal = is_literal(self._tree(expected))
        changed = self._literal(expected, site) if literal else self._pass_through(expected, site)
        return (changed, right) if expected is left else (left, changed)

    def _membership(
        self, member: cst.BaseExpression, container: cst.BaseExpression, site: int
    ) -> tuple[cst.BaseExpression, cst.BaseExpression]:
        if is_literal(self._tree(member)):
            return self._literal(member, site), container
        return member, self._pass_through(container, site)

    def _negation(self, test: cst.BaseExpression, site: int) -> cst.BaseExpression:
        self.weak.add(site)
        expected = self._code(self._pass_through(cst.Name("True"), site))
        return self._expression(f"bool({self._code(test)}) is {expected}")

    # --- writing

    def _next(self) -> int:
        self.sites += 1
        return self.sites - 1

    def _decide(self, name: str) -> int:
        """The number that decides for all sites of a name."""
        if name not in self._decider[-1]:
            self._decider[-1][name] = self._next()
        return self._decider[-1][name]

    def _pass_through(self, value: cst.BaseExpression, site: int) -> cst.BaseExpression:
        return self._expression(
            f"_change_({self._code(value)}, {key_for(self._changed(site), self._seed + site)})"
        )

    def _literal(self, value: cst.BaseExpression, site: int) -> cst.BaseExpression:
        """A literal in the form that both candidates have."""
        choice = random.Random(self._seed * 1_000_003 + site)
        tree = self._tree(value)
        return self._expression(ast.unparse(change_literal(tree, choice) if self._changed(site) else tree))

    def _soft(self, statement: str, site: int, *, error: str = "Exception") -> cst.BaseStatement:
        indented = self._statement(statement)
        reports = f"except {error}:\n    _report_({site}, 0)\nelse:\n    _report_({site}, 1)\n"
        attempt = cst.ensure_type(self._statement(f"try:\n    pass\n{reports}"), cst.Try)
        return attempt.with_changes(body=cst.IndentedBlock(body=[indented]))

    def _code(self, node: cst.CSTNode) -> str:
        return self._module.code_for_node(node)

    def _tree(self, node: cst.BaseExpression) -> ast.expr:
        return ast.parse(f"({self._code(node)}\n)", mode="eval").body

    def _expression(self, text: str) -> cst.BaseExpression:
        return cst.parse_expression(f"({text})" if "\n" in text else text, self._config)

    def _statement(self, text: str) -> cst.BaseStatement:
        return cst.ensure_type(cst.parse_statement(text, self._config), cst.BaseStatement)


# --- what a statement asserts (as libcst has it)


def _called(call: cst.Call) -> str:
    """The name of what is called, without what stands before the last dot."""
    match call.func:
        case cst.Name(value=name) | cst.Attribute(attr=cst.Name(value=name)):
            return name
        case _:
            return ""


def _asserting_call(statement: cst.BaseSmallStatement) -> cst.Call | None:
    """The call of a statement that asserts by calling a function or method that we know."""
    if not isinstance(statement, cst.Expr) or not isinstance(statement.value, cst.Call):
        return None
    call = statement.value
    name = _called(call)
    if any(argument.star or argument.keyword for argument in call.args[:2]):
        return None
    if name in _NEGATED:
        return call if isinstance(call.func, cst.Attribute) and call.args else None
    known = name in _RAISES or name in _CONTAINS or _EQUALITY.fullmatch(name)
    return call if known and len(call.args) >= 2 else None


def _raises_item(node: cst.With) -> int | None:
    """Which item of a `with` expects an exception or a warning; None when none does."""
    for position, item in enumerate(node.items):
        call = item.item
        if isinstance(call, cst.Call) and _called(call) in _RAISES and call.args and not call.args[0].keyword:
            return position
    return None


def _compared_elements(test: cst.BaseExpression) -> cst.Comparison | None:
    """The comparison in `all(a == b)` and `(a == b).all()`."""
    if not isinstance(test, cst.Call) or _called(test) not in ("all", "bool") or len(test.args) > 1:
        return None
    inner = test.args[0].value if test.args else cst.ensure_type(test.func, cst.Attribute).value
    if isinstance(inner, cst.Comparison) and isinstance(inner.comparisons[-1].operator, cst.Equal):
        return inner if len(inner.comparisons) == 1 else None
    return None


def _with_argument(call: cst.Call, position: int, value: cst.BaseExpression) -> cst.Call:
    arguments = list(call.args)
    arguments[position] = arguments[position].with_changes(value=value)
    return call.with_changes(args=arguments)


def _single_target(statement: cst.Assign) -> str:
    target = statement.targets[0].target
    return target.value if len(statement.targets) == 1 and isinstance(target, cst.Name) else ""


def _is_future_import(line: cst.BaseStatement) -> bool:
    if not isinstance(line, cst.SimpleStatementLine) or not isinstance(line.body[0], cst.ImportFrom):
        return False
    module = line.body[0].module
    return isinstance(module, cst.Name) and module.value == "__future__"


def _is_docstring(line: cst.BaseStatement) -> bool:
    return (
        isinstance(line, cst.SimpleStatementLine)
        and isinstance(line.body[0], cst.Expr)
        and isinstance(line.body[0].value, cst.SimpleString | cst.ConcatenatedString)
    )


# --- names that serve only as expectations (as ast has it)


def expects_right(left: ast.expr, right: ast.expr, names: dict[str, str]) -> bool:
    """Which side of an equality is what the test expects: a literal, else one of `names`, else the right one."""
    if is_literal(right) or is_literal(left):
        return is_literal(right)
    for side in (right, left):
        if isinstance(side, ast.Name) and side.id in names:
            return side is right
    return True


def _expectation_names(code: str) -> dict[str, str]:
    """The names in a function that are used for nothing but as what an equality expects, and where they come from.

    That is `parameter`, `loop` (the target of a `for`) or `assigned` (once, a literal).
    """
    (function,) = ast.parse(_without_lead(code)).body
    assert isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
    nodes = list(ast.walk(function))
    stored = Counter(
        node.id for node in nodes if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    )
    loaded = Counter(node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load))
    arguments = function.args
    names = {
        argument.arg: "parameter"
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)
        if not stored[argument.arg]
    }
    for node in nodes:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value) if stored[name] == 1 and is_literal(value):
                names.setdefault(name, "assigned")
            case ast.For(target=target) | ast.AsyncFor(target=target):
                for part in ast.walk(target):
                    if isinstance(part, ast.Name) and stored[part.id] == 1:
                        names.setdefault(part.id, "loop")
            case _:
                pass
    equalities = list(_equalities(function))
    while True:  # a name that turns out to have another use may change which side another equality expects
        sides = ((right if expects_right(left, right, names) else left) for left, right in equalities)
        expected = Counter(side.id for side in sides if isinstance(side, ast.Name))
        only = {name: kind for name, kind in names.items() if expected[name] and expected[name] == loaded[name]}
        if len(only) == len(names):
            return names
        names = only


def _equalities(node: ast.AST) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Both sides of the equalities that a function's own statements assert, outside of what must raise."""
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.Lambda() | ast.ClassDef():
                continue
            case ast.With(items=items) if any(_expects_exception(item.context_expr) for item in items):
                continue
            case ast.Assert(test=test):
                yield from _equality_of(test)
            case ast.Expr(value=ast.Call(args=[left, right, *_]) as call) if _EQUALITY.fullmatch(_name_of(call)):
                yield left, right
            case _:
                yield from _equalities(child)


def _equality_of(test: ast.expr) -> Iterator[tuple[ast.expr, ast.expr]]:
    match test:
        case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]):
            yield left, right
        case ast.BoolOp(op=ast.And(), values=values):
            last = next((value for value in reversed(values) if isinstance(value, ast.Compare)), None)
            if last is not None:
                yield from _equality_of(last)
        case ast.Call(args=[ast.Compare() as inner]) if _name_of(test) in ("all", "bool"):
            yield from _equality_of(inner)
        case ast.Call(func=ast.Attribute(value=ast.Compare() as inner, attr="all"), args=[]):
            yield from _equality_of(inner)
        case _:
            pass


def _expects_exception(expression: ast.expr) -> bool:
    return isinstance(expression, ast.Call) and _name_of(expression) in _RAISES


def _name_of(call: ast.Call) -> str:
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case _:
            return ""


def _without_lead(code: str) -> str:
    """A function's code without the comments and blank lines before it."""
    lines = code.splitlines(keepends=True)
    start = next(n for n, line in enumerate(lines) if re.match(r"(?:@|def\b|async\b)", line))
    return "".join(lines[start:])


# --- literals (as ast has it)


def is_literal(value: ast.expr) -> bool:
    """Whether a value is written out, at least in a part that can be changed in place."""
    match value:
        case ast.Constant():
            return True
        case ast.UnaryOp(op=ast.USub() | ast.UAdd(), operand=operand):
            return is_literal(operand)
        case ast.BinOp(left=left, right=right):
            return is_literal(left) and is_literal(right)
        case ast.List(elts=elements) | ast.Tuple(elts=elements) | ast.Set(elts=elements):
            return not elements or any(is_literal(element) for element in elements)
        case ast.Dict(values=values):
            return not values or any(is_literal(value) for value in values)
        case ast.Call(args=[*_, _] as arguments) if _constructs(value):
            return any(is_literal(argument) for argument in arguments)
        case _:
            return False


def _constructs(call: ast.Call) -> bool:
    name = _name_of(call)
    return name in _CONSTRUCTORS or name[:1].isupper()


def change_literal(value: ast.expr, choice: random.Random) -> ast.expr:
    """A literal of the same form with another value. Expects that `is_literal(value)`."""
    match value:
        case ast.Constant(value=constant):
            return ast.Constant(another_constant(constant, choice))
        case ast.UnaryOp(op=op, operand=operand):
            return ast.UnaryOp(op, change_literal(operand, choice))
        case ast.BinOp(left=left, op=op, right=right):
            return ast.BinOp(left, op, change_literal(right, choice))
        case ast.List(elts=elements):
            return ast.List(_change_one(elements, choice), ast.Load())
        case ast.Tuple(elts=elements):
            return ast.Tuple(_change_one(elements, choice), ast.Load())
        case ast.Set(elts=elements):
            return ast.Set(_change_one(elements, choice))
        case ast.Dict(keys=keys, values=values):
            return ast.Dict(keys or [ast.Constant(0)], _change_one(values, choice))
        case ast.Call(func=func, args=arguments, keywords=keywords):
            first = next(n for n, argument in enumerate(arguments) if is_literal(argument))
            changed = [*arguments[:first], change_literal(arguments[first], choice), *arguments[first + 1 :]]
            return ast.Call(func, changed, keywords)
        case _:
            raise AssertionError(f"not a literal: {ast.dump(value)}")


def _change_one(elements: list[ast.expr], choice: random.Random) -> list[ast.expr]:
    if not elements:
        return [ast.Constant(0)]
    at = choice.choice([n for n, element in enumerate(elements) if is_literal(element)])
    return [*elements[:at], change_literal(elements[at], choice), *elements[at + 1 :]]
