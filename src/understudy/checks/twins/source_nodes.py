"""Nodes of the source that versions of tests are written with (see `twins.versions`)."""

from __future__ import annotations

import ast


def site_call(name: str, number: int, *arguments: ast.expr) -> ast.Call:
    """Return a call of a function of `twins.sites.IMPORT` for the site `number`."""
    return call_of(name, ast.Constant(number), *arguments)


def call_of(name: str, *arguments: ast.expr) -> ast.Call:
    """Return a call of a function by its name."""
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), [])


def imported_module(name: str) -> ast.expr:
    """Return an expression that imports a module and is it."""
    return call_of("__import__", ast.Constant(name))


def statement_list(statements: ast.AST | list[ast.stmt] | None) -> list[ast.stmt]:
    """Return what a visitor returned as a list of statements."""
    if isinstance(statements, list):
        return statements
    return [statements] if isinstance(statements, ast.stmt) else []
