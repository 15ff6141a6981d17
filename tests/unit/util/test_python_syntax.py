"""Parsing Python source from several threads, and writing it."""

import ast
import gc
import sys
import threading
from collections.abc import Iterator

import pytest

from understudy.util.python_syntax import parse_literal, parse_module, unparse

SOURCE = "".join(f"def f{n}(a, b):\n    return [a + (b * {n}), {{a: (b, [{n}])}}]\n" for n in range(60))


@pytest.fixture
def eager_switches() -> Iterator[None]:
    """Threads take turns at every chance, and the collector runs Python code in the midst of parsing."""
    interval, thresholds = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-6)
    gc.set_threshold(50)

    def on_collection(_phase: str, _info: dict[str, int]) -> None:
        for _ in range(50):
            pass

    gc.callbacks.append(on_collection)
    yield
    gc.callbacks.remove(on_collection)
    gc.set_threshold(*thresholds)
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("eager_switches")
def test_threads_parse_at_once() -> None:
    errors: list[Exception] = []

    def work() -> None:
        try:
            for _ in range(15):
                assert len(parse_module(SOURCE).body) == 60
        except Exception as error:  # noqa: BLE001 - whatever a thread meets fails the test
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_literal() -> None:
    assert parse_literal("{'a': [1, (2.5, None)]}") == {"a": [1, (2.5, None)]}
    with pytest.raises(ValueError, match="malformed"):
        parse_literal("print(1)")


@pytest.mark.parametrize(
    "source",
    [
        "f'{a}{SEP}' + f'{{{SEP.join(b)!r:>{n}}}}'",
        "f'{f(SEP, f\"{SEP}{n:{spec}}\")}'",
        f"[0x{'f' * 4000}, 0x{'1' * 4000} + 1, 'x']",
    ],
)
def test_what_ast_unparse_cannot_write_is_written(source: str) -> None:
    class Folded(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            return ast.Constant("\n\\") if node.id == "SEP" else node

    names = {"SEP": "\n\\", "a": 1, "b": ["x", "y"], "n": 12, "spec": ">5", "f": lambda a, b: a + b}
    tree = Folded().visit(parse_module(source))
    if sys.version_info < (3, 12) or "0x" in source:
        with pytest.raises(ValueError, match=r"backslash|digits"):
            ast.unparse(tree)
    assert eval(unparse(tree), names) == eval(source, names)
