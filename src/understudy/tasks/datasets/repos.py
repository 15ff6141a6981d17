"""How the repositories of SWE-bench's classic rows are installed and tested, by version.

Rows of the fifth version say it themselves; those before it rely on tables of the harness, of which this one is
the part that an evaluation needs (swebench 4.1.0; the tests compare digests of all of it).
"""

from __future__ import annotations

from msgspec import Struct

from understudy.errors import TaskError

_PYTEST = "pytest -rA"
_EDITABLE = "python -m pip install -e ."
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_SETUP = "python setup.py install"
_UTF8 = ("export LANG=en_US.UTF-8", "export LC_ALL=en_US.UTF-8", "export PYTHONIOENCODING=utf8")
_LOCALE = "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen"


class SuiteRecipe(Struct, frozen=True):
    """The command that tests (without what to test), the one that installs, variables, and what comes before."""

    command: str = _PYTEST
    install: str = _EDITABLE
    env: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


class RepositoryRecipes(Struct, frozen=True):
    """A repository: how its output is read, and recipes with the versions (as one text) that they are for."""

    parser: str
    recipes: tuple[tuple[SuiteRecipe, str], ...]


def _simple(parser: str, versions: str, recipe: SuiteRecipe = SuiteRecipe()) -> RepositoryRecipes:  # noqa: B008
    return RepositoryRecipes(parser, ((recipe, versions),))


REPOSITORIES: dict[str, RepositoryRecipes] = {
    "astropy/astropy": RepositoryRecipes(
        "parse_log_astropy",
        (
            (
                SuiteRecipe(install="python -m pip install -e .[test] --verbose"),
                "3.0 3.1 3.2 4.1 4.2 4.3 5.0 5.1 5.2 v5.3",
            ),
            (
                SuiteRecipe(
                    command="pytest -rA -vv -o console_output_style=classic --tb=no",
                    install="python -m pip install -e .[test] --verbose",
                ),
                "0.1 0.2 0.3 0.4 1.1 1.2 1.3",
            ),
        ),
    ),
    "django/django": RepositoryRecipes(
        "parse_log_django",
        (
            (SuiteRecipe(_DJANGO, _SETUP), "1.4 1.5 1.6"),
            (SuiteRecipe(_DJANGO, _SETUP, (*_UTF8, "export LANGUAGE=en_US:en")), "1.7 1.8 1.10 1.11 2.0 2.1 2.2"),
            (
                SuiteRecipe("./tests/runtests.py --verbosity 2", _SETUP, (*_UTF8, "export LANGUAGE=en_US:en")),
                "1.9",
            ),
            (
                SuiteRecipe(
                    _DJANGO,
                    env=("export LANG=en_US.UTF-8", "export LANGUAGE=en_US:en", "export LC_ALL=en_US.UTF-8"),
                    before=(_LOCALE,),
                ),
                "3.0 3.1 3.2",
            ),
            (SuiteRecipe(_DJANGO), "4.0 4.1 4.2 5.0 5.1 5.2"),
        ),
    ),
    "marshmallow-code/marshmallow": _simple(
        "parse_log_marshmallow",
        "2.18 2.19 2.20 3.0 3.1 3.10 3.11 3.12 3.13 3.15 3.16 3.19 3.2 3.4 3.8 3.9",
        SuiteRecipe(install="python -m pip install -e '.[dev]'"),
    ),
    "matplotlib/matplotlib": RepositoryRecipes(
        "parse_log_matplotlib",
        (
            (SuiteRecipe(), "3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7"),
            (SuiteRecipe(install='python -m pip install --no-build-isolation -e ".[dev]"'), "3.8 3.9"),
            (
                SuiteRecipe(install="python setup.py build; python setup.py install"),
                "1.0 1.1 1.2 1.3 1.4 1.5 2.0 2.1 2.2",
            ),
        ),
    ),
    "mwaskom/seaborn": RepositoryRecipes(
        "parse_log_seaborn",
        (
            (SuiteRecipe("pytest --no-header -rA"), "0.11"),
            (SuiteRecipe("pytest --no-header -rA", "python -m pip install -e .[dev]"), "0.12 0.13 0.14"),
        ),
    ),
    "pallets/flask": _simple("parse_log_flask", "2.0 2.1 2.2 2.3 3.0 3.1"),
    "psf/requests": _simple(
        "parse_log_requests",
        "0.7 0.8 0.9 0.11 0.13 0.14 1.1 1.2 2.0 2.2 2.3 2.4 2.5 2.7 2.8 2.9 2.10 2.11 2.12 2.17 2.18 2.19 2.22 "
        "2.25 2.26 2.27 2.31 3.0",
        SuiteRecipe(install="python -m pip install ."),
    ),
    "pvlib/pvlib-python": _simple(
        "parse_log_pvlib",
        "0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9",
        SuiteRecipe(install="python -m pip install -e .[all]"),
    ),
    "pydata/xarray": _simple("parse_log_xarray", "0.12 0.18 0.19 0.20 2022.03 2022.06 2022.09 2023.07 2024.05"),
    "pydicom/pydicom": _simple("parse_log_pydicom", "1.0 1.1 1.2 1.3 1.4 2.0 2.1 2.2 2.3 2.4 3.0"),
    "pylint-dev/astroid": _simple("parse_log_astroid", "2.5 2.6 2.7 2.8 2.9 2.10 2.12 2.13 2.14 2.15 2.16 3.0"),
    "pylint-dev/pylint": _simple(
        "parse_log_pylint", "2.8 2.9 2.10 2.11 2.13 2.14 2.15 2.16 2.17 3.0 3.1 3.2 3.3 4.0"
    ),
    "pytest-dev/pytest": _simple(
        "parse_log_pytest",
        "4.4 4.5 4.6 5.0 5.1 5.2 5.3 5.4 6.0 6.2 6.3 7.0 7.1 7.2 7.4 8.0 8.1 8.2 8.3 8.4",
    ),
    "pyvista/pyvista": _simple(
        "parse_log_pyvista",
        "0.20 0.21 0.22 0.23 0.24 0.25 0.26 0.27 0.28 0.29 0.30 0.31 0.32 0.33 0.34 0.35 0.36 0.37 0.38 0.39 0.40 "
        "0.41 0.42 0.43",
    ),
    "scikit-learn/scikit-learn": _simple(
        "parse_log_scikit",
        "0.20 0.21 0.22 1.3 1.4 1.5 1.6",
        SuiteRecipe(install="python -m pip install -v --no-use-pep517 --no-build-isolation -e ."),
    ),
    "sphinx-doc/sphinx": _simple(
        "parse_log_sphinx",
        "1.5 1.6 1.7 1.8 2.0 2.1 2.2 2.3 2.4 3.0 3.1 3.2 3.3 3.4 3.5 4.0 4.1 4.2 4.3 4.4 4.5 5.0 5.1 5.2 5.3 6.0 "
        "6.2 7.0 7.1 7.2 7.3 7.4 8.0 8.1",
        SuiteRecipe("tox --current-env -epy39 -v --", "python -m pip install -e .[test]"),
    ),
    "sqlfluff/sqlfluff": _simple(
        "parse_log_sqlfluff", "0.4 0.5 0.6 0.8 0.9 0.10 0.11 0.12 0.13 1.0 1.1 1.2 1.3 1.4 2.0 2.1 2.2"
    ),
    "sympy/sympy": _simple(
        "parse_log_sympy",
        "0.7 1.0 1.1 1.2 1.4 1.5 1.6 1.7 1.8 1.9 1.10 1.11 1.12 1.13 1.14",
        SuiteRecipe("PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose"),
    ),
}


def find_recipe(repo: str, version: str) -> tuple[str, SuiteRecipe]:
    """The parser and the recipe of a version. Raises TaskError when the table does not have it."""
    if repo not in REPOSITORIES:
        raise TaskError(
            f"repo: {repo[:80]!r} is not one of SWE-bench's Python repositories, and the row has no test "
            "commands; use a dataset whose rows have eval_script and log_parser"
        )
    repository = REPOSITORIES[repo]
    for candidate, versions in repository.recipes:
        if version in versions.split():
            return repository.parser, candidate
    raise TaskError(f"version: {repo} has no version {version[:40]!r} in the table of test commands")
