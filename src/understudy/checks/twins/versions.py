"""Versions of test files that send what they observe instead of asserting it.

Code under test runs in the process of the tests, so it can force an assertion to hold. In a version, each
assertion ("site") sends the observed value through the report and goes on; what was expected is not in the
process:

- `assert f(x) == 3` becomes `_send_(7, f(x))`. The expected value is removed from the source, with whatever else
  only served to hold it: names, columns of tables and of `parametrize`, arguments of helpers, comments, messages,
  docstrings and test ids. `pytest.raises(E, match=M)` becomes a block that sends whatever was raised.
- Where the expectation cannot be removed, because the code under test makes it (`== Point(1, 2)`), the assertion
  is evaluated in the process. The literals in it are then changed in some versions, where it must not hold.

This module writes source only. `twins.judge` compares observations with the gold patch's, `twins.run` runs
versions.
"""

from __future__ import annotations

import ast
import builtins
import random
from collections.abc import Callable
from typing import TypeVar

from msgspec import Struct
from msgspec.structs import replace

from understudy.checks.input_changes import InputChanges, change_inputs
from understudy.checks.twins.assertions import (
    ASSERTION_FUNCTIONS,
    COMPARISONS,
    MOCK_ASSERTIONS,
    SWAPPED_OPERATORS,
    UNITTEST_METHODS,
    WARNS,
    approximation,
    class_names,
    expects_exception,
    has_wildcard,
    is_evaluable,
    is_fixture,
    may_assert,
    only_fails,
    tolerances_of,
)
from understudy.checks.twins.comparisons import number_comparisons, observe_comparisons
from understudy.checks.twins.differences import near_comparison, near_range
from understudy.checks.twins.exposure import Comparisons, Exposure, Subjects, reads_files
from understudy.checks.twins.literals import change_literal, has_literal, is_literal, texts_of
from understudy.checks.twins.names import (
    UNSTABLE,
    independent_names,
    is_declaration,
    name_of,
    outside_functions,
    parameter_sources,
)
from understudy.checks.twins.neutral_names import empty_tests, insert_first, rename_tests, strip_docstring
from understudy.checks.twins.operands import number_operands, observe_operands
from understudy.checks.twins.sites import IMPORT, Operation, TwinSite
from understudy.checks.twins.source_nodes import call_of, imported_module, site_call, statement_list
from understudy.checks.twins.unused_values import cut_unused, unpack_rows
from understudy.util.python_syntax import invalid_python, parse_module, unparse

PAIR = "_pair_"

_ORDER = frozenset({"<", "<=", ">", ">="})

_FunctionNode = TypeVar("_FunctionNode", ast.FunctionDef, ast.AsyncFunctionDef)


class TwinVersion(Struct, frozen=True):
    """A rewritten test file: its source, its rewritten assertions by number, and the original name of each renamed
    test.
    """

    source: str
    sites: dict[int, TwinSite]
    names: dict[str, str] = {}


def write_version(
    text: str,
    *,
    first: int = 0,
    plain: frozenset[int] = frozenset(),
    cut: bool = True,
    neutral: bool = False,
    emptied: frozenset[str] = frozenset(),
    changed: Callable[[int], bool] = lambda _: False,
    seed: int = 0,
    inputs: InputChanges | None = None,
) -> TwinVersion:
    """Return a version of a test file, with sites numbered from `first`, the same in all versions of the file.

    Sites in `plain` are evaluated in the process, because their observations cannot be sent. Without `cut`, unused
    values and the ids of parametrised tests stay. With `neutral`, tests are renamed; those in `emptied` do
    nothing. Sites for which `changed` returns True get another expectation, chosen by `seed`, if their expectation
    is in the process and has a literal. `inputs` changes literals (see `input_changes`). Raises
    ValueError when the file cannot be parsed.
    """
    try:
        tree = parse_module(text)
        if inputs is not None:
            change_inputs(tree, inputs)
        unpack_rows(tree)
        number_comparisons(tree)
        number_operands(tree)
        rewriter = _Rewriter(tree, first, plain, changed, seed)
        tree = rewriter.visit(tree)
        empty_tests(tree, emptied)
        exposure = Exposure(tree, cut_unused(tree) if cut else {})
        names = rename_tests(tree) if neutral else {}
        sites = {
            number: replace(site, withheld=site.withheld and not exposure.holds_value(*rewriter.names_of[number]))
            for number, site in rewriter.sites.items()
        }
        observed = observe_comparisons(tree, first)
        sites |= {
            number: TwinSite("result", operator=operator, withheld=False) for number, operator in observed.items()
        }
        operands = observe_operands(tree, first)
        sites |= {number: TwinSite("own", withheld=False) for number in operands}
        insert_first(tree, IMPORT)
        source = unparse(ast.fix_missing_locations(tree)) + "\n"
    except (SyntaxError, ValueError, RecursionError) as error:
        raise invalid_python(error) from error
    return TwinVersion(source, sites, names)


class _Rewriter(ast.NodeTransformer):
    """Replaces assertions. Sites are numbered in the order of the file, whatever the options are."""

    def __init__(
        self,
        tree: ast.Module,
        first: int,
        plain: frozenset[int],
        changed: Callable[[int], bool],
        seed: int,
    ) -> None:
        self.sites: dict[int, TwinSite] = {}
        self.names_of: dict[int, tuple[frozenset[str], ast.AST | None]] = {}
        self._scope: ast.AST | None = None
        self._texts = texts_of(tree)
        self._comparisons = Comparisons(tree)
        self._subjects = Subjects(tree)
        self._next = first
        self._plain = plain
        self._changed = changed
        self._seed = seed
        self._defined_functions = {
            node.name
            for node in ast.walk(tree)
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_declaration(node)
        }
        self._tables = parameter_sources(tree)
        stable = frozenset(dir(builtins)) - UNSTABLE
        self._independent = independent_names(outside_functions(tree), self._tables, stable)
        self._raises = 0
        self._contexts = 0  # sites that only some parameters of a test reach
        imports = (part for part in ast.walk(tree) if isinstance(part, ast.ImportFrom) and part.module == "pytest")
        imported = (alias for part in imports for alias in part.names if alias.name == "raises")
        self._pytest_raises = {alias.asname or alias.name for alias in imported}  # others may be matchers
        self._functions = 0

    # --- statements

    def visit_Module(self, node: ast.Module) -> ast.Module:
        strip_docstring(node)
        self.generic_visit(node)
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.ClassDef:
        strip_docstring(node)
        self.generic_visit(node)
        node.body = node.body or [ast.Pass()]
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.FunctionDef:
        return self._function(node)

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AsyncFunctionDef:
        return self._function(node)

    def _function(self, node: _FunctionNode) -> _FunctionNode:
        strip_docstring(node)
        raises, self._raises = self._raises, 0
        first, outer, outer_independent = self._next - self._contexts, self._functions == 0, self._independent
        if outer:
            inside = (part for part in ast.walk(node) if part is not node)
            self._independent = independent_names(inside, self._tables, outer_independent)
            self._scope = node
        self._functions += 1
        decorators, node.decorator_list = node.decorator_list, []
        self.generic_visit(node)
        ends_without = self._next - self._contexts == first
        node.decorator_list = [self.visit(decorator) for decorator in decorators]
        self._functions -= 1
        if outer:
            self._scope = None
        self._independent = outer_independent
        self._raises = raises
        if outer and node.name.startswith("test") and ends_without and not is_fixture(node):
            # A test without assertions gets a site that expects it to come to its end.
            number = self._new_site(TwinSite("end", withheld=False))
            node.body.append(ast.Expr(site_call("_send_", number, ast.Constant(0))))
        elif outer and any(isinstance(part, ast.stmt) and only_fails(part) for part in ast.walk(node)):
            # The test compares in the condition of a branch, and fails there. That comparison runs in the tested
            # process, which can falsify it, so the test is protected only in part.
            number = self._new_site(TwinSite("truth", withheld=False))
            node.body.insert(0, ast.Expr(site_call("_holds_", number, ast.Constant(1))))
        return node

    def visit_Assert(self, node: ast.Assert) -> ast.AST | list[ast.stmt]:
        if self._raises:
            return node
        return self._condition(node.test, want=True)

    def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
        if not self._raises and not node.orelse and len(node.body) == 1 and only_fails(node.body[0]):
            return self._condition(node.test, want=False)
        self.generic_visit(node)
        return node

    def visit_With(self, node: ast.With) -> ast.AST:
        return self._with(node)

    def visit_AsyncWith(self, node: ast.AsyncWith) -> ast.AST:
        return self._with(node)

    def _with(self, node: ast.With | ast.AsyncWith) -> ast.AST:
        position = next((n for n, item in enumerate(node.items) if expects_exception(item.context_expr)), None)
        if position is None:
            self.generic_visit(node)
            return node
        if not self._raises:
            item = node.items[position]
            call = item.context_expr
            assert isinstance(call, ast.Call)
            item.context_expr = self._block(call)
        self._raises += 1
        node.body = [part for statement in node.body for part in statement_list(self.visit(statement))]
        self._raises -= 1
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrite `raises(E)` that is entered elsewhere: `with expected:` for a parameter, or `a if b else c`."""
        self.generic_visit(node)
        match node.func:
            case ast.Attribute(value=ast.Name(id="pytest"), attr="raises"):
                is_pytests = True
            case ast.Name(id=name):
                is_pytests = name in self._pytest_raises
            case _:
                is_pytests = False
        if self._raises or not is_pytests or len(node.args) != 1:
            return node
        self._contexts += 1
        return self._block(node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST | list[ast.stmt]:
        call = node.value.value if isinstance(node.value, ast.Await) else node.value
        if self._raises or not isinstance(call, ast.Call):
            return node
        name = name_of(call)
        if expects_exception(call) and len(call.args) >= 2 and isinstance(call.func, ast.Name | ast.Attribute):
            skipped = 2 if name.startswith("assert") and "Regex" in name else 1
            if len(call.args) > skipped:
                return self._called_block(call, skipped)
        if isinstance(call.func, ast.Attribute) and name in MOCK_ASSERTIONS and node.value is call:
            if has_wildcard(call):
                number = self._new_site(TwinSite("truth", withheld=False))
                asserted = site_call("_called_", number, call.func, *call.args)
                asserted.keywords = call.keywords
                return [ast.Expr(asserted)]
            number = self._new_site(TwinSite("calls", operator=MOCK_ASSERTIONS[name]))
            return [ast.Expr(site_call("_calls_", number, call.func.value))]
        assertion = self._method(call, name)
        if assertion:
            return self._assertion(*assertion, call)
        if may_assert(call) and name not in self._defined_functions:
            number = self._new_site(TwinSite("truth", withheld=False))  # the comparison happens in the process
            return [node, ast.Expr(site_call("_holds_", number, ast.Constant(1)))]
        return node

    def _method(self, call: ast.Call, name: str) -> tuple[str, list[ast.expr]] | None:
        """Return which assertion a call is, and its arguments; None if it is no known assertion."""
        if name in self._defined_functions or any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        if isinstance(call.func, ast.Attribute) and name in UNITTEST_METHODS:
            assertion, names = UNITTEST_METHODS[name]
        elif name in ASSERTION_FUNCTIONS:
            assertion = ASSERTION_FUNCTIONS[name]
            names = ("actual",) if assertion in ("true", "false") else ("actual", "desired")
        else:
            return None
        arguments = list(call.args[: len(names)])
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        for parameter in names[len(arguments) :]:
            if parameter not in by_name:
                return None
            arguments.append(by_name[parameter])
        return assertion, arguments

    def _assertion(self, assertion: str, arguments: list[ast.expr], call: ast.Call) -> list[ast.stmt]:
        match assertion:
            case "true" | "false":
                return self._condition(arguments[0], want=assertion == "true")
            case "none" | "not none":
                return self._relation("is", arguments[0], ast.Constant(None), want=assertion == "none")
            case "isinstance" | "not isinstance":
                return self._kind(arguments[0], arguments[1], want=assertion == "isinstance")
            case "search" | "not search":
                return self._search("search", arguments[1], arguments[0], want=assertion == "search")
            case "approx":
                return self._approx(arguments[0], arguments[1], tolerances_of(call))
            case "count":
                return self._equality("count", arguments[0], arguments[1])
            case _:
                return self._relation(assertion, arguments[0], arguments[1], want=True)

    # --- conditions

    def _condition(self, test: ast.expr, *, want: bool) -> list[ast.stmt]:
        """Return statements that send a condition's observation in place of asserting it."""
        match test:
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return self._condition(operand, want=not want)
            case ast.BoolOp(op=op, values=values) if isinstance(op, ast.And) is want:
                return [part for value in values for part in self._condition(value, want=want)]
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                return self._relation(COMPARISONS[type(op)], left, right, want=want)
            case ast.Compare() if want:
                return self._chain(test)
            case ast.Call(func=ast.Name(id="isinstance"), args=[value, kinds]):
                return self._kind(value, kinds, want=want)
            case ast.Call(
                func=ast.Name(id="all"), args=[ast.GeneratorExp() | ast.ListComp() as comprehension]
            ) if want:
                return self._all(test, comprehension)
            case ast.Call(func=ast.Attribute(value=ast.Compare(ops=[ast.Eq()]) as inner, attr="all"), args=[]) if (
                want
            ):
                return self._relation("==", inner.left, inner.comparators[0], want=True)
            case ast.Call(
                func=ast.Attribute(value=value, attr=("startswith" | "endswith") as name), args=[expected]
            ) if is_evaluable(expected):
                return self._compare(name, value, expected, want=want)
            case ast.Call(
                func=ast.Attribute(value=ast.Name(id="re"), attr=("search" | "match" | "fullmatch") as name),
                args=[pattern, value],
            ):
                return self._search(name, pattern, value, want=want)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="math"), attr="isclose"), args=[left, right]):
                return self._approx(left, right, tolerances_of(test)) if want else self._truth(test, want=want)
            case ast.Call(func=ast.Attribute(attr="allclose"), args=[left, right]) if want:
                return self._approx(left, right, tolerances_of(test))
            case _:
                return self._truth(test, want=want)

    def _truth(self, test: ast.expr, *, want: bool) -> list[ast.stmt]:
        number = self._new_site(TwinSite("truth", want=want), actual=test)
        return [ast.Expr(site_call("_holds_", number, test))]

    def _chain(self, test: ast.Compare) -> list[ast.stmt]:
        """Return statements for `1 < f(x) < 5` (sends f(x)), `f(x) == g(x) == 3` (both), others (the result)."""
        operands = [test.left, *test.comparators]
        names = [COMPARISONS[type(op)] for op in test.ops]
        if set(names) == {"=="} and any(self._is_independent(operand) for operand in operands):
            sent = [operand for operand in operands if not self._is_independent(operand)]
            expected = [operand for operand in operands if self._is_independent(operand)]
            number = self._new_site(TwinSite("equal"), *expected, actual=ast.List(sent, ast.Load()))
            if sent and number not in self._plain:
                return [ast.Expr(site_call("_send_", number, ast.List(sent, ast.Load())))]
        elif len(operands) == 3 and is_evaluable(operands[0]) and is_evaluable(operands[2]):
            if "<" in names[0] and "<" in names[1] and (near := near_range(*operands)) is not None:
                return self._approx(near.first, near.second, near.tolerance, test)
            low = TwinSite("compare", unparse(operands[0]), SWAPPED_OPERATORS.get(names[0], ""))
            high = TwinSite("compare", unparse(operands[2]), names[1])
            if low.operator in SWAPPED_OPERATORS and high.operator in SWAPPED_OPERATORS:
                first = self._new_site(low, actual=operands[1])
                second = self._new_site(high, actual=operands[1])
                if first not in self._plain and second not in self._plain:
                    return [ast.Expr(site_call("_send_", first, operands[1], ast.Constant(second)))]
                return [ast.Expr(site_call("_holds_", first, test, ast.Constant(second)))]
        return self._truth(test, want=True)

    def _all(self, test: ast.expr, comprehension: ast.GeneratorExp | ast.ListComp) -> list[ast.stmt]:
        match comprehension.elt:
            case ast.Compare(left=left, ops=[ast.Eq()], comparators=[right]) if self._is_independent(
                right
            ) or self._is_independent(left):
                actual, expected = self._sides(left, right)
                number = self._new_site(TwinSite("equal"), expected, actual=actual)
                if number not in self._plain:
                    return [ast.Expr(site_call("_send_", number, ast.ListComp(actual, comprehension.generators)))]
                return [ast.Expr(site_call("_holds_", number, test))]
            case _:
                return self._truth(test, want=True)

    def _relation(self, operator: str, left: ast.expr, right: ast.expr, *, want: bool) -> list[ast.stmt]:
        if operator in ("==", "is") and want:
            near = approximation(right) or approximation(left)
            if near is not None and operator == "==":
                actual = left if approximation(right) else right
                return self._approx(actual, near.args[0], tolerances_of(near), self._test("==", left, right))
            if operator == "==" and (apart := near_comparison(operator, left, right)) is not None:
                return self._approx(apart.first, apart.second, apart.tolerance, self._test(operator, left, right))
            constant = isinstance(right, ast.Constant) or isinstance(left, ast.Constant)
            return self._equality("same" if operator == "is" and constant else operator, left, right)
        if operator in SWAPPED_OPERATORS:
            if want and (near := near_comparison(operator, left, right)) is not None:
                return self._approx(near.first, near.second, near.tolerance, self._test(operator, left, right))
            if is_evaluable(right):
                return self._compare(operator, left, right, want=want)
            if is_evaluable(left):
                return self._compare(SWAPPED_OPERATORS[operator], right, left, want=want)
            return self._pair(operator, left, right, want=want)
        for actual, expected in ((left, right), (right, left)):
            if isinstance(expected, ast.Constant):  # the operators `is` and `is not`
                negated = operator == "is not"
                return self._compare("is", actual, expected, want=want is not negated)
        return self._truth(self._test(operator, left, right), want=want)

    def _equality(self, operator: str, left: ast.expr, right: ast.expr) -> list[ast.stmt]:
        if operator != "is" and (self._is_independent(left) or self._is_independent(right)):
            actual, expected = self._sides(left, right)
            operation: Operation = "same" if operator == "same" else "count" if operator == "count" else "equal"
            number = self._new_site(TwinSite(operation), expected, actual=actual)
            if number not in self._plain:
                return [ast.Expr(site_call("_send_", number, actual))]
            return self._evaluated(number, "is" if operator == "same" else "==", left, right)
        if operator in ("==", "count"):
            return self._pair(operator, left, right, want=True)
        return self._truth(self._test(operator, left, right), want=True)

    def _compare(self, operator: str, actual: ast.expr, expected: ast.expr, *, want: bool) -> list[ast.stmt]:
        """Return statements for a relation to a literal, which is decided outside of the process."""
        number = self._new_site(TwinSite("compare", unparse(expected), operator, want), expected, actual=actual)
        if number not in self._plain:
            send = "_among_" if operator in ("holds", "lacks") else "_send_"
            return [ast.Expr(site_call(send, number, actual))]
        self.sites[number] = TwinSite("truth", want=want, withheld=False)
        return [ast.Expr(site_call("_holds_", number, self._test(operator, actual, expected)))]

    def _pair(self, operator: str, left: ast.expr, right: ast.expr, *, want: bool) -> list[ast.stmt]:
        """Return statements for a comparison in the process; its literal is changed in some versions."""
        number = self._new_site(TwinSite("pair", operator=operator, want=want, withheld=False))
        return self._evaluated(number, operator, left, right, want=want)

    def _evaluated(
        self, number: int, operator: str, left: ast.expr, right: ast.expr, *, want: bool = True
    ) -> list[ast.stmt]:
        changeable = operator == "==" and want and (has_literal(right) or has_literal(left))
        changed = changeable and self._changed(number)
        literal = ""
        if changeable:
            rng = random.Random(self._seed * 1_000_003 + number)
            source = right if has_literal(right) else left
            changed_operand, literal = change_literal(source, rng, self._texts)
            if changed:
                left, right = (left, changed_operand) if source is right else (changed_operand, right)
        self.sites[number] = TwinSite("pair", literal, operator, want, False, changeable, changed)
        return [ast.Expr(site_call(PAIR, number, ast.Constant(operator), left, right))]

    def _approx(
        self, actual: ast.expr, expected: ast.expr, tolerances: str, test: ast.expr | None = None
    ) -> list[ast.stmt]:
        if not self._is_independent(expected) and self._is_independent(actual):
            actual, expected = expected, actual
        if not self._is_independent(expected):
            test = test or call_of("abs", ast.BinOp(actual, ast.Sub(), expected))
            return self._truth(test, want=True) if isinstance(test, ast.Compare) else self._near(actual, expected)
        number = self._new_site(TwinSite("approx", tolerances), expected, actual=actual)
        if number not in self._plain:
            return [ast.Expr(site_call("_send_", number, actual))]
        if test is not None:
            self.sites[number] = TwinSite("truth", withheld=False)
            return [ast.Expr(site_call("_holds_", number, test))]
        self.sites[number] = TwinSite("pair", tolerances, "approx", withheld=False)
        return [ast.Expr(site_call(PAIR, number, ast.Constant("approx"), actual, expected))]

    def _near(self, actual: ast.expr, expected: ast.expr) -> list[ast.stmt]:
        number = self._new_site(TwinSite("pair", operator="approx", withheld=False))
        return [ast.Expr(site_call(PAIR, number, ast.Constant("approx"), actual, expected))]

    def _kind(self, value: ast.expr, kinds: ast.expr, *, want: bool) -> list[ast.stmt]:
        names = class_names(kinds)
        number = self._new_site(TwinSite("isinstance", repr(names), want=want), actual=value)
        if names and number not in self._plain:
            return [ast.Expr(site_call("_kind_", number, value))]
        self.sites[number] = TwinSite("truth", want=want, withheld=False)
        return [ast.Expr(site_call("_holds_", number, call_of("isinstance", value, kinds)))]

    def _search(self, function: str, pattern: ast.expr, text: ast.expr, *, want: bool) -> list[ast.stmt]:
        if is_evaluable(pattern):
            return self._compare(function, text, pattern, want=want)
        test = ast.Call(ast.Attribute(imported_module("re"), function, ast.Load()), [pattern, text], [])
        return self._truth(test, want=want)

    def _test(self, operator: str, left: ast.expr, right: ast.expr) -> ast.expr:
        if operator in ("holds", "lacks"):
            return self._test("in" if operator == "holds" else "not in", right, left)
        if operator in ("search", "match", "fullmatch"):
            return ast.Call(ast.Attribute(imported_module("re"), operator, ast.Load()), [right, left], [])
        if operator in ("startswith", "endswith"):
            return ast.Call(ast.Attribute(left, operator, ast.Load()), [right], [])
        op = next(kind for kind, name in COMPARISONS.items() if name == operator)
        return ast.Compare(left, [op()], [right])

    # --- expected exceptions

    def _block(self, call: ast.Call) -> ast.expr:
        """Return the context manager that replaces `raises(E, match=…)` in a `with` statement."""
        warns = name_of(call) in WARNS
        by_name = {keyword.arg: keyword.value for keyword in call.keywords}
        method = name_of(call).startswith("assert")
        kinds = call.args[0] if call.args else by_name.get("expected_exception", by_name.get("expected_warning"))
        match = by_name.get("match", by_name.get("expected_regex"))
        if match is None and method and "Regex" in name_of(call) and len(call.args) > 1:
            match = call.args[1]
        names = class_names(kinds)
        pattern = repr(match.value) if isinstance(match, ast.Constant) else ""
        number = self._new_site(TwinSite("warns" if warns else "raises", repr(names), pattern))
        if kinds is None or not names or number in self._plain:
            self.sites[number] = TwinSite("truth", withheld=False)
            return site_call("_block_", number, call, ast.Constant("plain"))
        name = name_of(call).replace("Regexp", "").replace("Regex", "")
        func = call.func
        func = ast.Attribute(func.value, name, ast.Load()) if isinstance(func, ast.Attribute) else func
        anything = ast.Name("Warning" if warns else "BaseException", ast.Load())
        return site_call(
            "_block_", number, ast.Call(func, [anything], []), ast.Constant("warns" if warns else "raises")
        )

    def _called_block(self, call: ast.Call, skipped: int) -> list[ast.stmt]:
        """Return the callable form, `raises(E, f, …)`, as a `with` block."""
        function, arguments = call.args[skipped], call.args[skipped + 1 :]
        if isinstance(function, ast.Constant):  # pytest once accepted code as a text
            return [ast.Expr(call)]
        expects = ast.Call(call.func, call.args[:skipped], [])
        body = ast.Expr(ast.Call(function, arguments, call.keywords))
        return [ast.With([ast.withitem(self._block(expects))], [body])]

    # --- which side is the expected one

    def _sides(self, left: ast.expr, right: ast.expr) -> tuple[ast.expr, ast.expr]:
        """Return the observed and the expected side; one at least does not depend on the code under test."""
        if not self._is_independent(right) or (is_literal(left) and not is_literal(right)):
            return right, left
        return left, right

    def _is_independent(self, value: ast.expr) -> bool:
        """Return whether a value is the same whatever the code under test does."""
        bound = {
            node.id for node in ast.walk(value) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        return all(
            not isinstance(node, ast.Name) or node.id in bound or node.id in self._independent
            for node in ast.walk(value)
        ) and not any(isinstance(node, ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(value))

    def _new_site(self, site: TwinSite, *expected: ast.expr, actual: ast.expr | None = None) -> int:
        """Return a new number for a site that observes `actual` and compares it with `expected`."""
        number, self._next = self._next, self._next + 1
        if actual is not None:
            site = replace(site, subject=self._subjects.find(actual, self._scope))
            is_forced = self._comparisons.contains_result(actual) or (
                (
                    site.operator in _ORDER
                    or any(isinstance(value, ast.Constant) and not value.value for value in expected)
                )
                and self._subjects.cancels(actual, self._scope)
            )
            site = replace(site, withheld=site.withheld and not is_forced)
        if any(map(reads_files, expected)):
            site = replace(site, withheld=False)
        self.sites[number] = site
        names = {node.id for value in expected for node in ast.walk(value) if isinstance(node, ast.Name)}
        self.names_of[number] = (frozenset(names), self._scope)
        return number
