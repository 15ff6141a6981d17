"""Credentials are kept out of what servers send back."""

from __future__ import annotations

import base64
import html
import json
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.util.http import HttpConnection

KEY = "sk-ant-api03-a/b+c=d_0123456789"
CONNECTION = HttpConnection("http://x", KEY)


@pytest.mark.parametrize(
    "sent",
    [
        KEY,
        quote(KEY, safe=""),
        quote(quote(KEY, safe=""), safe=""),
        "".join(f"%{byte:02x}" for byte in KEY.encode()),
        "".join(f"\\u{ord(char):04x}" for char in KEY),
        json.dumps("".join(f"\\u{ord(char):04x}" for char in KEY)),
        KEY.replace("/", "\\/"),
        "".join(f"&#{ord(char)};" for char in KEY),
        html.escape(KEY),
        KEY.encode().hex(),
        KEY.encode().hex().upper(),
        "".join(f"\\x{byte:02x}" for byte in KEY.encode()),
    ],
)
def test_a_key_is_cleaned_however_it_is_written(sent: str) -> None:
    cleaned = CONNECTION.redact_bytes(f"before {sent} after".encode())
    assert b"***" in cleaned
    assert cleaned.startswith(b"before ")
    assert cleaned.endswith(b" after")
    assert b"0123456789" not in cleaned
    assert KEY.encode().hex().encode() not in cleaned.lower()


@given(
    st.binary(max_size=20), st.binary(max_size=20), st.sampled_from([base64.b64encode, base64.urlsafe_b64encode])
)
def test_a_key_is_cleaned_inside_any_base64_text(before: bytes, after: bytes, encode: object) -> None:
    assert callable(encode)
    cleaned = CONNECTION.redact_bytes(encode(before + KEY.encode() + after))
    assert b"***" in cleaned


def test_what_holds_no_key_stays_as_it_is() -> None:
    data = bytes(range(256)) + b"sk-ant-api03-other"
    assert CONNECTION.redact_bytes(data) == data
    assert HttpConnection("http://x").redact("text") == "text"
    assert CONNECTION.redact(f"ä {KEY} \ud800") == "ä *** \ud800"
