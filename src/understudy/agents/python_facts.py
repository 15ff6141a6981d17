"""Prints the facts of the Python that runs it, as JSON. A script of its own: any Python 3 runs it.

`version` is `sys.version`, `version_info` its first two numbers, `executable` the real interpreter (in a virtual
environment `sys.executable` is a link to it), `prefix` where it is installed, and `libraries` the directories of
its standard library.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig

_PREFIX_VARIABLES = ("installed_base", "base", "installed_platbase", "platbase")


def facts() -> dict[str, object]:
    """Return the facts of this Python."""
    base: dict[str, str] = dict.fromkeys(_PREFIX_VARIABLES, sys.base_prefix)
    return {
        "version": sys.version,
        "version_info": sys.version_info[:2],
        "executable": os.path.realpath(sys.executable),
        "prefix": sys.base_prefix,
        "libraries": [sysconfig.get_path(name, vars=base) for name in ("stdlib", "platstdlib")],
    }


if __name__ == "__main__":
    sys.stdout.write(json.dumps(facts()))
