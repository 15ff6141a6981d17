"""Pages of answers: what fits, what is cut, and answers whose lists come in parts."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator

import pytest
from msgspec import Struct

from understudy.view.faults import ViewRefused, encode
from understudy.view.paging import (
    MAX_ROW_BYTES,
    PagedResponses,
    decode_cursor,
    encode_cursor,
    rows_that_fit,
    shortened,
    size_of,
)
from understudy.view.routes import ROUTES
from understudy.view.schema import PAGE_BYTES
from understudy.view.schema.rollouts import TaskSample

HOSTILE = "\x1b\u202e\u6f22\U0001f600\ud83d\x00"


class Inner(Struct, frozen=True):
    rows: tuple[str, ...]
    text: str = ""


class Answer(Struct, frozen=True):
    total: int
    names: tuple[str, ...]
    counts: dict[str, int]
    inner: Inner | None
    next: str | None = None


LISTS = ("names", "counts", "inner.rows")


def pages(answer: Answer, parts: PagedResponses) -> Iterator[Answer]:
    cursor = None
    while True:
        page = parts.page(cursor, LISTS, lambda: answer)
        assert isinstance(page, Answer) and len(encode(page)) <= PAGE_BYTES
        yield page
        cursor = page.next
        if cursor is None:
            return


def test_lists_of_an_answer_come_in_parts_with_its_plain_values_in_each():
    names = tuple(f"{n} {HOSTILE * 20}" for n in range(3_000))
    answer = Answer(7, names, {f"c{n}": n for n in range(30_000)}, Inner(names, "said"))
    found = list(pages(answer, PagedResponses()))
    assert len(found) > 5
    assert {(page.total, page.inner and page.inner.text) for page in found} == {(7, "said")}
    assert tuple(name for page in found for name in page.names) == names
    assert [entry for page in found for entry in page.counts.items()] == list(answer.counts.items())
    assert tuple(row for page in found if page.inner for row in page.inner.rows) == names


def test_pages_are_of_one_answer_and_go_on_after_it_was_forgotten():
    many = tuple(f"{n:0100}" for n in range(10_000))
    parts = PagedResponses()
    first = parts.page(None, LISTS, lambda: Answer(1, many, {}, None))
    second = parts.page(first.next, LISTS, lambda: Answer(2, (), {}, None))  # type: ignore[attr-defined]
    assert second.total == 1 and second.names[0] == many[len(first.names)]  # type: ignore[attr-defined]
    again = PagedResponses().page(first.next, LISTS, lambda: Answer(3, many, {}, None))  # type: ignore[attr-defined]
    assert again.total == 3 and again.names == second.names  # type: ignore[attr-defined]


@pytest.mark.parametrize("number", [2**63, -(2**63) - 1, 10**400])
def test_a_cursor_with_a_number_that_no_row_has_is_refused(number: int):
    with pytest.raises(ViewRefused, match="cursor"):
        decode_cursor(_cursor_of(number))
    assert decode_cursor(encode_cursor(2**63 - 1, "x")) == (2**63 - 1, "x")


def _cursor_of(number: int) -> str:
    return base64.urlsafe_b64encode(f'[{number}, "x"]'.encode()).decode().rstrip("=")


def test_a_small_answer_is_one_page_and_foreign_cursors_are_refused():
    answer = Answer(1, ("a",), {"b": 1}, None)
    assert list(pages(answer, PagedResponses())) == [answer]
    for cursor in ("", "x", encode_cursor(1, "0:0"), encode_cursor("x", "0"), encode_cursor("x", "9:0")):
        with pytest.raises(ViewRefused, match="cursor"):
            PagedResponses().page(cursor, LISTS, lambda: answer)


def test_a_row_that_is_too_long_alone_is_cut_and_others_are_not():
    long = Inner(("x" * 1_000,) * 1_000, HOSTILE * 100_000)
    (cut,) = rows_that_fit([long])
    assert size_of(cut) <= MAX_ROW_BYTES and cut.text.endswith("…") and cut.rows[0].startswith("x" * 100)
    short = Inner(("a",), "b")
    assert rows_that_fit([short, long, short]) == (short,)
    assert shortened(short, MAX_ROW_BYTES) is short
    big = Answer(1, (), {}, long)
    assert len(list(pages(big, PagedResponses()))) >= 1


def test_sizes_count_what_json_takes():
    sample = TaskSample(
        rollout_id=HOSTILE, sample_index=0, agent="a", status="succeeded", reward=float("nan"), integrity=None
    )
    assert size_of(sample) == len(encode(sample))
    assert json.loads(encode(sample)) == {
        "rollout_id": HOSTILE, "sample_index": 0, "agent": "a", "status": "succeeded", "reward": None,
        "integrity": None,
    }  # fmt: skip


def test_an_answer_in_parts_has_no_list_that_is_sent_with_each_of_them():
    for route in ROUTES:
        if route.lists:
            assert set(_lists(route.response)) <= set(route.lists), route.name


def _lists(kind: type[Struct], prefix: str = "") -> Iterator[str]:
    """The paths of the lists in a struct and in the structs in it."""
    import msgspec

    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        types = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else [field.type]
        for each in types:
            if isinstance(each, msgspec.inspect.VarTupleType | msgspec.inspect.ListType):
                yield prefix + field.name
            elif isinstance(each, msgspec.inspect.StructType):
                yield from _lists(each.cls, f"{prefix}{field.name}.")
