"""What commands print with `--json`."""

from __future__ import annotations

import json

import pytest

from understudy.cli.output import print_json


@pytest.mark.parametrize(
    ("value", "printed"),
    [
        ({"a": [1]}, {"schema": 1, "a": [1]}),
        ({"a": "\udcff"}, {"schema": 1, "a": "?"}),
        ({"schema": 7}, {"schema": 7}),
        ({}, {"schema": 1}),
        ([{"a": 1}], [{"a": 1}]),
        (None, None),
    ],
)
def test_printed_json_objects_have_a_schema_version(
    value: object, printed: object, capsys: pytest.CaptureFixture[str]
) -> None:
    print_json(value)
    assert json.loads(capsys.readouterr().out) == printed
