"""Errors of msgspec: the allowed values of an enumeration are in them."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
import pytest
from msgspec import Meta, Struct, field

from understudy.util.validation import validation_text

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
