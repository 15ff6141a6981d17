"""The API as an OpenAPI 3.1 document, generated from the table of routes and the structs that it names."""

from __future__ import annotations

import re
from typing import Any

import msgspec
from msgspec import Struct

from understudy import __version__
from understudy.view.routes import ROUTES, Route
from understudy.view.schema.stores import ErrorAnswer

_COMPONENTS = "#/components/schemas/{name}"


def document() -> dict[str, Any]:
    """Return the OpenAPI document as JSON types: a schema for every struct, a path for every route."""
    responses = [route.response for route in ROUTES if _is_struct(route.response)]
    bodies = [route.body for route in ROUTES if route.body is not None]
    queries = {route.query.__name__ for route in ROUTES}
    structs = list(dict.fromkeys([ErrorAnswer, *responses, *bodies, *(route.query for route in ROUTES)]))
    references, components = msgspec.json.schema_components(structs, ref_template=_COMPONENTS)
    schemas = dict(zip(structs, references, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(route, schemas, components)
    for name, kind in _structs([ErrorAnswer, *responses]).items():
        # Responses contain every field, even those with default values, except structs that omit defaults.
        if not kind.__struct_config__.omit_defaults:
            components[name]["required"] = list(components[name]["properties"])
    return {
        "openapi": "3.1.0",
        "info": {"title": "Understudy viewer", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": {name: component for name, component in components.items() if name not in queries}
        },
    }


def _is_struct(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Struct)


def _structs(kinds: list[type[Any]]) -> dict[str, type[Struct]]:
    """Return the structs that occur at any depth inside some structs, including these, by name."""
    structs: dict[str, type[Struct]] = {}
    waiting: list[Any] = list(msgspec.inspect.multi_type_info(kinds))
    while waiting:
        match waiting.pop():
            case msgspec.inspect.StructType(cls=kind, fields=fields) if kind.__name__ not in structs:
                structs[kind.__name__] = kind
                waiting += [field.type for field in fields]
            case msgspec.inspect.UnionType(types=types):
                waiting += types
            case msgspec.inspect.VarTupleType(item_type=item) | msgspec.inspect.ListType(item_type=item):
                waiting.append(item)
            case msgspec.inspect.DictType(value_type=value):
                waiting.append(value)
            case _:
                pass
    return structs


def _operation(route: Route, schemas: dict[type[Any], Any], components: dict[str, Any]) -> dict[str, Any]:
    parameters: list[dict[str, Any]] = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
        for name in re.findall(r"{(\w+)}", route.path)
    ]
    query = components[route.query.__name__]
    parameters += [
        {"name": name, "in": "query", "required": name in query.get("required", ()), "schema": schema}
        for name, schema in query["properties"].items()
    ]
    content = {
        "json": {"application/json": {"schema": schemas.get(route.response, {})}},
        "events": {"text/event-stream": {"schema": schemas.get(route.response, {})}},
        "raw": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }[route.media]
    failure = {"application/json": {"schema": schemas[ErrorAnswer]}}
    operation: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.summary,
        "parameters": parameters,
        "responses": {
            "200": {"description": "The answer.", "content": content},
            "default": {"description": "What went wrong.", "content": failure},
        },
    }
    if route.body is not None:
        body = {"application/json": {"schema": schemas[route.body]}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation
