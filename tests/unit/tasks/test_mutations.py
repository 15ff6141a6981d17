"""Mutations: each keeps the module Python and everything outside its span as it was."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import TaskError
from understudy.tasks.generate import mutations, packages
from understudy.tasks.generate.mutations import ParsedModule, Site, mutate, sites

from support import example_count

# What the operators know, in forms that are easy to get wrong: brackets, comments, wide characters, continuations.
_STATEMENTS = (
    "if a < b:\n    return c",
    "if (a) <= (b):  # a < b\n    pass\nelse:\n    c = 'é' + d",
    "if not x:\n    raise ValueError('not < x')",
    "if (a and\n        b or c):\n    y = 1\nelif d:\n    y = 2\nelse:\n    # why\n    y = 3",
    "x = 'ü' if a == b else [i for i in c if i not in d]",
    "return f(a, (b), *c)",
    "return max(a, b)[1:n - 1], -1, -x, not x",
    "while True:\n    if a is not None: break\n    else: continue",
    "for i in x:\n    y += 1\n    z -= i; del q[0]\n    continue",
    "call(one); self.x = 2",
    "d['k'] = lambda a, b=3: a * b  # , end",
    "text = f'{a + 1} or {b < c}' 'tail' \"it's\"",
    "v: int = 10\nw: 'List[int] < 3'",
    "assert a == 1, 'message 2'",
    "with open('name') as f: f.write(s.lstrip().split(',', 1)[0])",
    "try:\n    return g(1, 0x10, 1_0)\nexcept (KeyError, IndexError):\n    return any(x % 2 for x in y)",
    "try:\n    a()\nfinally:\n    done()",
    "match x:\n    case 1 | 2:\n        return 3\n    case _:\n        return 4",
    "y = a\\\n    <\\\n    b",
    "def inner(q=1, *, r=True):\n    '''Never 1 < 2.'''\n    return q // r",
    "class C:\n    z = 1\n    def m(self):\n        return self.z - 1",
)
_MODULES = st.lists(st.sampled_from(_STATEMENTS), min_size=1, max_size=5).map(
    lambda chosen: (
        "VERSION = 1\n\n\ndef é(a: 'x < 1' = 2, *args: 3) -> 4:\n    '''Doc 1 < 2.'''\n"
        + "".join("    " + line + "\n" for part in chosen for line in part.split("\n"))
    )
)


@settings(max_examples=example_count(150), deadline=None)
@given(_MODULES, st.sampled_from(["\n", "\r\n"]), st.booleans())
def test_every_mutation_parses_differs_and_stays_in_its_span(text: str, newline: str, ends: bool) -> None:
    text = text.replace("\n", newline)
    if not ends:
        text = text.removesuffix(newline)
    module = ParsedModule(text)
    for site in sites(module):
        changed = mutate(text, [site])
        assert ast.dump(ast.parse(changed)) != ast.dump(module.tree), site
        assert changed[: site.start] == text[: site.start]
        assert changed[site.start + len(site.replacement) :] == text[site.end :]
        assert site.line == text.count(newline, 0, site.start) + 1


@given(_MODULES, st.randoms(use_true_random=False))
@settings(max_examples=example_count(100), deadline=None)
def test_disjoint_mutations_combine(text: str, random: object) -> None:
    candidates = sites(ParsedModule(text))
    chosen: list[Site] = []
    for site in candidates:
        if all(site.start >= other.end for other in chosen):
            chosen.append(site)
    changed = mutate(text, chosen)
    assert len(changed) == len(text) + sum(len(site.replacement) - site.end + site.start for site in chosen)


def _changes(body: str) -> set[tuple[str, str]]:
    """What the sites of a function body make of it: operator and the new body."""
    head = "def f():\n"
    text = head + "".join(f"    {line}\n" for line in body.split("\n"))
    return {
        (site.operator, "\n".join(line[4:] for line in mutate(text, [site])[len(head) :].splitlines()))
        for site in sites(ParsedModule(text))
    }


@pytest.mark.parametrize(
    ("body", "operator", "expected"),
    [
        ("x = a < b", "boundary", "x = a <= b"),
        ("x = a < b", "comparison", "x = a > b"),
        ("x = a is not b", "identity", "x = a is b"),
        ("x = a not in b", "membership", "x = a in b"),
        ("x = a + b", "arithmetic", "x = a - b"),
        ("x += 1", "augmented assignment", "x -= 1"),
        ("x = a and b", "boolean", "x = a or b"),
        ("if a: b()", "negation", "if not (a): b()"),
        ("x = 1 if not a else b", "negation", "x = 1 if (a) else b"),
        ("x = 7", "off by one", "x = 8"),
        ("x = 7", "off by one", "x = 6"),
        ("x = True", "truth value", "x = False"),
        ("x = 'Ab'", "string", "x = 'A'"),
        ("return g()", "return value", "return None"),
        ("g(a, b, c)", "swapped arguments", "g(b, a, c)"),
        ("for i in x:\n    break", "loop jump", "for i in x:\n    continue"),
        ("x = a[1:]", "slice bound", "x = a[:]"),
        ("x = -a", "sign", "x = (a)"),
        ("x = min(a)", "sibling", "x = max(a)"),
        ("g()\nx = y", "missing statement", "x = y"),
        ("g()", "missing statement", "pass"),
        ("if a: return\nx = y", "missing statement", "x = y"),
        ("if a:\n    x = y\nelse:\n    x = z\nw = v", "missing else", "if a:\n    x = y\nw = v"),
    ],
)
def test_each_operator_makes_its_mutation(body: str, operator: str, expected: str) -> None:
    assert (operator, expected) in _changes(body)


def test_annotations_docstrings_and_messages_are_not_mutated() -> None:
    text = (
        "__version__ = '1.0'\nLIMIT = 3 < 4\n\n\n@decorated(1, 2)\ndef f(a: 'x < 1', b: Literal[2] = None) -> 5:\n"
        "    '''Doc: 1 < 2.'''\n    x: Annotated[int, 6]\n    raise ValueError('no 7', 8)\n"
    )
    assert {text[site.start : site.end] for site in sites(ParsedModule(text))} <= set[str]()


def test_overlapping_mutations_are_refused() -> None:
    with pytest.raises(TaskError, match="lines 2 and 2 overlap"):
        mutate("def f():\n    g(1)\n", [Site(13, 17, "a", "h()", 2), Site(15, 16, "b", "2", 2)])


def test_invalid_python_is_refused() -> None:
    with pytest.raises(TaskError, match="invalid Python source"):
        ParsedModule("def (:\n")


def test_mutations_of_our_own_sources_parse() -> None:
    for module in (mutations, packages):
        assert module.__file__
        text = Path(module.__file__).read_bytes().decode()
        candidates = sites(ParsedModule(text))
        assert len(candidates) > 50
        for site in candidates[::7]:
            ast.parse(mutate(text, [site]))
