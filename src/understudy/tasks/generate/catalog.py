"""The packages that mutated tasks are made of: pinned, permissively licensed, tested by pytest alone."""

from __future__ import annotations

from msgspec import Struct

from understudy.errors import TaskError
from understudy.types import Sdist


class Package(Struct, frozen=True):
    """One pinned package.

    `code` is the directory of its modules in the sdist and `tests` are the places of its test files; `skip` are
    modules or test files that are left alone (they need the network, other packages, or much time).
    """

    sdist: Sdist
    license: str
    code: str
    tests: tuple[str, ...]
    skip: tuple[str, ...] = ()


CATALOG: dict[str, Package] = {
    package.sdist.name: package
    for package in (
        Package(
            sdist=Sdist("boltons", "26.2.0", "d39cfd15c1a1c3bd4d705c82252fa9edb8e4f5e8cc039f8e39afac7b1b47e92c"),
            license="BSD-3-Clause",
            code="boltons",
            tests=("tests",),
            skip=("boltons/ecoutils.py", "tests/test_ecoutils.py"),
        ),
        Package(
            sdist=Sdist("toolz", "1.2.0", "9667a038e9d6ecba37995e26cb2f59ec6420b6ad8dd9677de59db9b956b08490"),
            license="BSD-3-Clause",
            code="toolz",
            tests=("toolz/tests",),
            skip=("toolz/sandbox",),
        ),
        Package(
            sdist=Sdist("sqlparse", "0.6.1", "ca722573f848ff2d30e40ea30f53a104b7dea7635ea9285891263eb2c58fb6e7"),
            license="BSD-3-Clause",
            code="sqlparse",
            tests=("tests",),
            skip=("tests/test_dos_prevention.py", "tests/test_cli.py"),
        ),
        Package(
            sdist=Sdist("inflection", "0.5.1", "1a29730d366e996aaacffb2f1f1cb9593dc38e2ddd30c91250c6dde09ea9b417"),
            license="MIT",
            code="inflection",
            tests=("test_inflection.py",),
        ),
    )
}


def package(name: str) -> Package:
    """The package of that name. Raises TaskError when it is not in the catalog, naming those that are."""
    if entry := CATALOG.get(name):
        return entry
    there = ", ".join(sorted(CATALOG))
    raise TaskError(f"unknown package {name!r}; expected one of {there}, or functions")
