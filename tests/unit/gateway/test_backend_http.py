"""What the backends' HTTP client reads of a response."""

from __future__ import annotations

import pytest

from understudy.errors import BackendError
from understudy.gateway.backends import http
from understudy.gateway.backends.http import retry_after_s

NOW = 1_700_000_000.0  # Tue, 14 Nov 2023 22:13:20 GMT


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ("", None),
        ("soon", None),
        ("nan", None),
        ("7", 7.0),
        (" 0.5 ", 0.5),
        ("-3", 0.0),
        ("99999999999999999999", http.RETRY_AFTER_MOST_S),
        ("9" * 400, http.RETRY_AFTER_MOST_S),
        ("Tue, 14 Nov 2023 22:14:00 GMT", 40.0),
        ("Tuesday, 14-Nov-23 22:14:00 GMT", 40.0),
        ("Tue, 14 Nov 2023 22:13:00 GMT", 0.0),
        ("Tue, 14 Nov 9999 22:13:00 GMT", http.RETRY_AFTER_MOST_S),
        ("Tue, 99 Nov 2023 22:13:00 GMT", None),
    ],
)
def test_a_retry_after_is_a_number_or_a_date(value: str | None, expected: float | None) -> None:
    assert retry_after_s(value, NOW) == expected


def test_responses_share_a_bound_and_small_ones_are_always_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "RESPONSES_LIMIT", 1000)
    memory = http._ResponseMemory()  # pyright: ignore[reportPrivateUsage]
    with memory.response() as large, memory.response() as small:
        large(990)
        small(100)  # above the limit together, and this one is below its half
        with pytest.raises(BackendError, match="more than 1000 bytes together"):
            large(1)
    with memory.response() as next_one:
        next_one(1000)
