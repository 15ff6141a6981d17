"""The outline of a file, by which its format is detected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.ingest.log_reader import LogOutline

from support import example_count

# Texts of what JSON is made of, so that nothing in a string counts as structure.
TEXTS = st.text('{}[]":,\\ \nab\u00e9', max_size=6)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=12,
)


def as_outlined(value: Any) -> str:
    if isinstance(value, dict | list):
        return "{" if isinstance(value, dict) else "["
    # A string's text is as it is written, without the quotes around it.
    return json.dumps(value, ensure_ascii=False).strip('"')


@settings(max_examples=example_count(150))
@given(st.dictionaries(st.text("abcdef_", min_size=1, max_size=4), VALUES, max_size=5), st.booleans(), st.data())
def test_the_outline_has_the_keys_of_the_first_object_at_its_own_level(
    record: dict[str, Any], listed: bool, data: st.DataObject
) -> None:
    indent = data.draw(st.sampled_from([None, 1]))
    text = json.dumps([record, {"other": 1}] if listed else record, ensure_ascii=False, indent=indent).encode()
    expected = {key: as_outlined(value) for key, value in record.items()}
    assert LogOutline(text).keys == (expected or ({"other": "1"} if listed else {}))
    # Cut off anywhere, it has the keys up to there.
    cut = LogOutline(text[: data.draw(st.integers(1, len(text)))]).keys
    whole = list(expected) or (["other"] if listed else [])
    assert list(cut)[:-1] == whole[: max(len(cut) - 1, 0)]


@pytest.mark.parametrize(
    "start", [b"", b"text", b"{", b"[", b'{"', b'{"a\\', b"]}", b"[[[{", b'{"a":"b\\', b'{"a":}:[']
)
def test_the_outline_of_anything_is_made(start: bytes) -> None:
    assert set(LogOutline(start).keys) <= {"a"}
