"""What an error of a library says, as a part of a message of ours."""

from __future__ import annotations

import pytest

from understudy.util.text import reason_of


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (FileNotFoundError(2, "No such file or directory", "/a/config.json"), "No such file or directory"),
        (OSError("no file named model.safetensors\n  in /a."), "no file named model.safetensors in /a"),
        (KeyError("hidden_size"), "the key 'hidden_size' is missing"),
        (MemoryError(), "MemoryError"),
        (ValueError("\x1b[31m" + "a" * 1000), "␛[31m" + "a" * 294 + "…"),
    ],
)
def test_the_reason_of_a_librarys_error_is_one_short_line(error: Exception, expected: str) -> None:
    assert reason_of(error) == expected
