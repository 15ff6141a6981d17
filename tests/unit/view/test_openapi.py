"""The OpenAPI document of the viewer: every reference leads somewhere, every route and struct is in it."""

from __future__ import annotations

import json
import re

import msgspec

from understudy.types import Usage
from understudy.view.openapi import document
from understudy.view.routes import ROUTES
from understudy.view.schema.rollouts import RolloutRow, TurnView


def test_every_reference_leads_to_a_schema():
    text = json.dumps(document())
    names = set(re.findall(r"#/components/schemas/(\w+)", text))
    assert names == set(document()["components"]["schemas"])


def test_every_route_is_an_operation_with_its_own_name():
    paths = document()["paths"]
    operations = [operation["operationId"] for methods in paths.values() for operation in methods.values()]
    assert sorted(operations) == sorted(route.name for route in ROUTES)
    assert len(set(operations)) == len(operations)


def test_parameters_of_a_path_and_a_query_are_described():
    operation = document()["paths"]["/api/stores/{store}/rollouts/{rollout}/tokens"]["get"]
    places = {parameter["name"]: (parameter["in"], parameter["required"]) for parameter in operation["parameters"]}
    assert places == {
        "store": ("path", True),
        "rollout": ("path", True),
        "call": ("query", True),
        "attempt": ("query", False),
        "scope": ("query", False),
        "start": ("query", False),
        "limit": ("query", False),
    }


def test_fields_of_answers_are_required_as_they_are_always_sent():
    schemas = document()["components"]["schemas"]
    row = RolloutRow(
        id="r", run_id="run", task_id="t", sample_index=0, agent="a", status="queuing", attempts=0, updated_at=0.0
    )
    assert set(msgspec.to_builtins(row)) == set(schemas["RolloutRow"]["required"])
    assert set(schemas["TurnView"]["required"]) == set(TurnView.__struct_fields__)
    # Token counts that are 0 are left out, so none of them is.
    assert not schemas["Usage"].get("required") and msgspec.to_builtins(Usage()) == {}
