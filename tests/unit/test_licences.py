"""What the locked packages are licensed under: nothing that would bind those who use or pass on Understudy."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path

REQUIREMENTS = Path(__file__).parents[2] / "requirements"
PERMISSIVE = re.compile(
    r"MIT|BSD|0BSD|Apache|ISC|PSF|Python Software Foundation|CNRI-Python|Zlib|CC0|MPL|Mozilla Public",
    re.IGNORECASE,
)
# Weak copyleft that binds only changes of the package itself, which is an optional one and is not shipped with us.
EXCEPTIONS = {"psycopg": "LGPL-3.0-only", "psycopg-binary": "LGPL-3.0-only"}


def licence(package: metadata.PackageMetadata) -> str:
    """What a package says of its licence: an SPDX expression, its classifiers, or a text."""
    classifiers = [text for text in package.get_all("Classifier") or [] if text.startswith("License ::")]
    named = "; ".join(text.rpartition(" :: ")[2] for text in classifiers)
    return package.get("License-Expression") or named or package.get("License") or ""


def test_every_locked_package_has_a_permissive_licence():
    locked = {
        name for file in REQUIREMENTS.glob("*.txt") for name in re.findall(r"^([\w.-]+)==", file.read_text(), re.M)
    }
    read: dict[str, str] = {}
    for package in metadata.distributions():
        name = re.sub(r"[-_.]+", "-", package.metadata["Name"]).lower()
        if name in locked:
            read[name] = licence(package.metadata)
    assert len(read) > 80
    assert {name: text for name, text in read.items() if not PERMISSIVE.search(text)} == EXCEPTIONS
    assert not {name for name, text in read.items() if name not in EXCEPTIONS and "GPL" in text}
