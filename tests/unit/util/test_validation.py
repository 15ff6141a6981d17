"""Errors of msgspec: the allowed values of an enumeration are in them, and the invalid value, but no secret."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import pytest
from msgspec import Meta, Struct, field

from understudy.util.validation import describe_invalid, shown, validation_text

_T = TypeVar("_T")


class _Item(Struct, rename="camel"):
    kind_of: Literal["a", "b"] | None = None
    size: Annotated[int, Meta(ge=1)] = 1


class _Body(Struct):
    mode: Literal["x", "y"] | _Item | None = None
    items: list[_Item] = field(default_factory=list[_Item])
    by_name: dict[str, Literal["high", "low"]] = field(default_factory=dict[str, Literal["high", "low"]])


class _Tools(Struct, Generic[_T]):
    tools: list[_T] = field(default_factory=list[Any])


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"mode": "z"}, "Invalid enum value 'z', expected one of x, y - at `$.mode`"),
        (
            {"items": [{}, {"kindOf": "c"}]},
            "Invalid enum value 'c', expected one of a, b - at `$.items[1].kindOf`",
        ),
        ({"by_name": {"n": "mid"}}, "Invalid enum value 'mid', expected one of high, low - at `$.by_name[...]`"),
        ({"items": [{"size": 0}]}, "Expected `int` >= 1 - at `$.items[0].size`"),
    ],
)
def test_the_values_of_an_enumeration_are_in_the_error(data: dict[str, Any], expected: str) -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert(data, _Body)
    assert validation_text(error.value, _Body) == expected


def test_the_values_of_an_enumeration_in_a_generic_struct_are_in_the_error() -> None:
    with pytest.raises(msgspec.ValidationError) as error:
        msgspec.convert({"tools": [{"kindOf": "c"}]}, _Tools[_Item])
    assert "'c', expected one of a, b - at" in validation_text(error.value, _Tools[_Item])


class _Part(Struct):
    size: int


class _Document(Struct, forbid_unknown_fields=True):
    share: Annotated[float, Meta(gt=0)] = 1.0
    parts: list[_Part] = []
    env: dict[Annotated[str, Meta(min_length=3)], str] = {}


_CASES: list[tuple[Any, str]] = [
    ({"share": "half"}, "share: expected `float`, got 'half'"),
    ({"share": -1}, "share: expected `float` > 0.0, got -1"),
    ({"parts": [{"size": 1}, {"size": "k"}]}, "parts[1].size: expected `int`, got 'k'"),
    ({"parts": [{}]}, "parts[0]: object missing required field `size`"),
    ({"parts": "x" * 200}, f"parts: expected `array`, got '{'x' * 79}…"),
    ({"env": {"KEY": 5}}, "env[...]: expected `str`, got `int`"),
    ({"env": {"K": "v"}}, "a key of env: expected `str` of length >= 3"),
    ([1], "expected `object`, got [1]"),
    ({"other": 1}, "object contains unknown field `other`"),
]


@pytest.mark.parametrize(("document", "text"), _CASES)
def test_an_invalid_document_is_described_by_key_and_value(document: Any, text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, _Document)
    assert describe_invalid(caught.value, document) == text


def test_a_document_that_is_nested_too_deeply_is_described() -> None:
    assert "nested too deeply" in describe_invalid(RecursionError(), {})


def test_a_long_value_is_cut() -> None:
    assert shown("x" * 10) == "'xxxxxxxxxx'" and shown("x" * 1000) == f"'{'x' * 79}…"


class _Cat(Struct, tag="cat", tag_field="kind"):
    pass


class _Dog(Struct, tag="dog", tag_field="kind"):
    mood: Literal["good", "bad"] = "good"


class _Home(Struct):
    pets: list[_Cat | _Dog] = field(default_factory=list["_Cat | _Dog"])


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"pets": [{"kind": "cow"}]}, "pets[0].kind: invalid value 'cow', expected one of cat, dog"),
        (
            {"pets": [{"kind": "dog", "mood": "odd"}]},
            "pets[0].mood: invalid enum value 'odd', expected one of good, bad",
        ),
    ],
)
def test_the_values_that_a_type_allows_are_named(document: dict[str, Any], text: str) -> None:
    with pytest.raises(msgspec.ValidationError) as caught:
        msgspec.convert(document, _Home)
    assert describe_invalid(caught.value, document, _Home) == text
