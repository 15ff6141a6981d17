"""By which value of `--sandbox` a worker opens the sandboxes of a run."""

from __future__ import annotations

import pytest

from understudy.sandbox.base import open_kind, sandbox_option
from understudy.sandbox.unsafe import UnsafeSandboxes


@pytest.mark.parametrize("name", ["local", "ssh:me@machine?command=python3%20-m%20understudy", "docker?image=x"])
def test_machine_and_options_stay(name: str) -> None:
    assert sandbox_option(open_kind(name)) == name


def test_what_was_made_without_a_name_is_its_kind() -> None:
    assert sandbox_option(UnsafeSandboxes()) == "unsafe-local"
