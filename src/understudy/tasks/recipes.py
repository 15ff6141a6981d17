"""What SWE-bench's rows leave out: the image of an instance, and how the classic repositories are tested."""

from __future__ import annotations

import re

from msgspec import Struct

from understudy.errors import ConfigError, TaskError
from understudy.tasks.rows import ROW_REMEDY

# --- images --------------------------------------------------------------------------------------------

_NAMESPACE = re.compile(r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?::[0-9]+)?(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_IMAGE = re.compile(
    r"(?=.{1,255}\Z)[A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]+)?(?:/[a-z0-9._-]+)*(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?"
    r"(?:@sha256:[0-9a-f]{64})?"
)


class ImageChoice(Struct, frozen=True):
    """Which instance images to use; None keeps the values of the row or its dataset.

    A `namespace` of "none" or "" means images that were built on this machine, which have no namespace. Creating
    one raises ConfigError when a value cannot be a part of an image's name.
    """

    namespace: str | None = None
    instance_image_tag: str | None = None

    def __post_init__(self) -> None:
        if self.namespace and self.namespace != "none" and not _NAMESPACE.fullmatch(self.namespace):
            raise ConfigError(
                f"--namespace {self.namespace[:80]!r}: cannot be part of an image's name; give lower-case "
                "letters, digits and ._-/ as in swebench or registry.example:5000/swebench"
            )
        if self.instance_image_tag is not None and not _TAG.fullmatch(self.instance_image_tag):
            raise ConfigError(
                f"--instance-image-tag {self.instance_image_tag[:80]!r}: invalid tag; give letters, digits and "
                "._-, at most 128 characters, such as latest"
            )


def instance_image(instance_id: str, choice: ImageChoice, namespace: str = "swebench") -> str:
    """Return SWE-bench's name of the image of an instance; `namespace` is the dataset's default."""
    tag = choice.instance_image_tag or "latest"
    name = f"sweb.eval.x86_64.{instance_id.lower()}:{tag}"
    chosen = namespace if choice.namespace is None else choice.namespace
    return name if chosen in ("", "none") else f"{chosen}/{name.replace('__', '_1776_')}"


def named_image(image: str, choice: ImageChoice, key: str) -> str:
    """Return the image that a row names under `key`, with the namespace and tag replaced by those of `choice`.
    Raises TaskError.
    """
    if not _IMAGE.fullmatch(image):
        raise TaskError(
            f"{key}: invalid name {image[:80]!r}; expected one such as registry/name:tag, with a "
            f"lower-case name, no blanks and at most 255 characters: {ROW_REMEDY}"
        )
    if choice.namespace is None and choice.instance_image_tag is None:
        return image
    registry, slash, name = image.partition("@")[0].rpartition("/")
    name, _, tag = name.partition(":")
    tag = choice.instance_image_tag or tag or "latest"
    if choice.namespace in ("", "none"):
        return f"{name.replace('_1776_', '__')}:{tag}"
    return f"{choice.namespace or registry}{slash or ('/' if choice.namespace else '')}{name}:{tag}"


# --- repositories --------------------------------------------------------------------------------------

_PIP = "python -m pip install"
_DJANGO = "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1"
_SETUP = "python setup.py install"
_UTF8 = ("export LANG=en_US.UTF-8", "export LC_ALL=en_US.UTF-8", "export PYTHONIOENCODING=utf8")
_ENGLISH = "export LANGUAGE=en_US:en"
_LOCALE = "sed -i '/en_US.UTF-8/s/^# //g' /etc/locale.gen && locale-gen"


class SuiteRecipe(Struct, frozen=True):
    """How versions of a repository (`versions`, as one text) are tested and installed.

    `command` is the test command, without the tests' names; `env` are lines that set variables; `before` runs
    before any patch.
    """

    repo: str
    versions: str
    command: str = "pytest -rA"
    install: str = f"{_PIP} -e ."
    env: tuple[str, ...] = ()
    before: tuple[str, ...] = ()


# Rows of SWE-bench's fifth version contain install and test commands; earlier ones rely on tables of the harness.
# This is the part of those tables that an evaluation needs (swebench 4.1.0; the tests compare digests of the
# whole).
_RECIPES = (
    SuiteRecipe(
        "astropy/astropy", "3.0 3.1 3.2 4.1 4.2 4.3 5.0 5.1 5.2 v5.3", install=f"{_PIP} -e .[test] --verbose"
    ),
    SuiteRecipe(
        "astropy/astropy",
        "0.1 0.2 0.3 0.4 1.1 1.2 1.3",
        "pytest -rA -vv -o console_output_style=classic --tb=no",
        f"{_PIP} -e .[test] --verbose",
    ),
    SuiteRecipe("django/django", "1.4 1.5 1.6", _DJANGO, _SETUP),
    SuiteRecipe("django/django", "1.7 1.8 1.10 1.11 2.0 2.1 2.2", _DJANGO, _SETUP, (*_UTF8, _ENGLISH)),
    SuiteRecipe("django/django", "1.9", "./tests/runtests.py --verbosity 2", _SETUP, (*_UTF8, _ENGLISH)),
    SuiteRecipe(
        "django/django", "3.0 3.1 3.2", _DJANGO, f"{_PIP} -e .", (_UTF8[0], _ENGLISH, _UTF8[1]), (_LOCALE,)
    ),
    SuiteRecipe("django/django", "4.0 4.1 4.2 5.0 5.1 5.2", _DJANGO),
    SuiteRecipe(
        "marshmallow-code/marshmallow",
        "2.18 2.19 2.20 3.0 3.1 3.10 3.11 3.12 3.13 3.15 3.16 3.19 3.2 3.4 3.8 3.9",
        install=f"{_PIP} -e '.[dev]'",
    ),
    SuiteRecipe("matplotlib/matplotlib", "3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7"),
    SuiteRecipe("matplotlib/matplotlib", "3.8 3.9", install=f'{_PIP} --no-build-isolation -e ".[dev]"'),
    SuiteRecipe(
        "matplotlib/matplotlib",
        "1.0 1.1 1.2 1.3 1.4 1.5 2.0 2.1 2.2",
        install="python setup.py build; python setup.py install",
    ),
    SuiteRecipe("mwaskom/seaborn", "0.11", "pytest --no-header -rA"),
    SuiteRecipe("mwaskom/seaborn", "0.12 0.13 0.14", "pytest --no-header -rA", f"{_PIP} -e .[dev]"),
    SuiteRecipe("pallets/flask", "2.0 2.1 2.2 2.3 3.0 3.1"),
    SuiteRecipe(
        "psf/requests",
        "0.7 0.8 0.9 0.11 0.13 0.14 1.1 1.2 2.0 2.2 2.3 2.4 2.5 2.7 2.8 2.9 2.10 2.11 2.12 2.17 2.18 2.19 "
        "2.22 2.25 2.26 2.27 2.31 3.0",
        install=f"{_PIP} .",
    ),
    SuiteRecipe("pvlib/pvlib-python", "0.1 0.2 0.3 0.4 0.5 0.6 0.7 0.8 0.9", install=f"{_PIP} -e .[all]"),
    SuiteRecipe("pydata/xarray", "0.12 0.18 0.19 0.20 2022.03 2022.06 2022.09 2023.07 2024.05"),
    SuiteRecipe("pydicom/pydicom", "1.0 1.1 1.2 1.3 1.4 2.0 2.1 2.2 2.3 2.4 3.0"),
    SuiteRecipe("pylint-dev/astroid", "2.5 2.6 2.7 2.8 2.9 2.10 2.12 2.13 2.14 2.15 2.16 3.0"),
    SuiteRecipe("pylint-dev/pylint", "2.8 2.9 2.10 2.11 2.13 2.14 2.15 2.16 2.17 3.0 3.1 3.2 3.3 4.0"),
    SuiteRecipe(
        "pytest-dev/pytest", "4.4 4.5 4.6 5.0 5.1 5.2 5.3 5.4 6.0 6.2 6.3 7.0 7.1 7.2 7.4 8.0 8.1 8.2 8.3 8.4"
    ),
    SuiteRecipe(
        "pyvista/pyvista",
        "0.20 0.21 0.22 0.23 0.24 0.25 0.26 0.27 0.28 0.29 0.30 0.31 0.32 0.33 0.34 0.35 0.36 0.37 0.38 0.39 "
        "0.40 0.41 0.42 0.43",
    ),
    SuiteRecipe(
        "scikit-learn/scikit-learn",
        "0.20 0.21 0.22 1.3 1.4 1.5 1.6",
        install=f"{_PIP} -v --no-use-pep517 --no-build-isolation -e .",
    ),
    SuiteRecipe(
        "sphinx-doc/sphinx",
        "1.5 1.6 1.7 1.8 2.0 2.1 2.2 2.3 2.4 3.0 3.1 3.2 3.3 3.4 3.5 4.0 4.1 4.2 4.3 4.4 4.5 5.0 5.1 5.2 5.3 "
        "6.0 6.2 7.0 7.1 7.2 7.3 7.4 8.0 8.1",
        "tox --current-env -epy39 -v --",
        f"{_PIP} -e .[test]",
    ),
    SuiteRecipe("sqlfluff/sqlfluff", "0.4 0.5 0.6 0.8 0.9 0.10 0.11 0.12 0.13 1.0 1.1 1.2 1.3 1.4 2.0 2.1 2.2"),
    SuiteRecipe(
        "sympy/sympy",
        "0.7 1.0 1.1 1.2 1.4 1.5 1.6 1.7 1.8 1.9 1.10 1.11 1.12 1.13 1.14",
        "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    ),
)


def find_recipe(repo: str, version: str) -> tuple[str, SuiteRecipe]:
    """Return the parser and the recipe of a version. Raises TaskError if the table does not have it."""
    recipes = [recipe for recipe in _RECIPES if recipe.repo == repo]
    if not recipes:
        raise TaskError(
            f"repo: {repo[:80]!r} has no test commands in the row, and in the table only these have: "
            f"{', '.join(dict.fromkeys(recipe.repo for recipe in _RECIPES))}; use a dataset whose rows have "
            "eval_script and log_parser"
        )
    for recipe in recipes:
        if version in recipe.versions.split():
            # The parsers' names come from the repositories: scikit-learn's is parse_log_scikit.
            return f"parse_log_{repo.partition('/')[2].partition('-')[0]}", recipe
    raise TaskError(
        f"version: {repo} has no version {version[:40]!r} in the table of test commands; expected one of "
        f"{', '.join(version for recipe in recipes for version in recipe.versions.split())}: correct it, or use a "
        "dataset whose rows have eval_script and log_parser"
    )
