"""The filter of system calls of a container: Docker's own profile, without what sandboxes are denied.

`seccomp_default.json` is seccomp/default.json of https://github.com/moby/profiles at cd3bed8 (Apache License 2.0),
one rule a line. An engine that is given a profile does not apply its own, so ours begins with that.
"""

from __future__ import annotations

import errno
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from msgspec import json

from understudy.sandbox.system_calls import DENIED_CALLS, DENIED_FAMILY

_DEFAULT = Path(__file__).with_name("seccomp_default.json")
_ALLOW, _ERRNO = "SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO"


@cache
def seccomp_profile() -> str:
    """The profile, as JSON for `seccomp=` of an engine's SecurityOpt.

    Memory files are allowed, since an engine counts them in the container's control group.
    """
    profile: dict[str, Any] = json.decode(_DEFAULT.read_bytes())
    rules: list[dict[str, Any]] = []
    for rule in profile["syscalls"]:
        names = [name for name in rule["names"] if name not in DENIED_CALLS]
        if names:
            rules.append({**rule, "names": names})
    rules += [{"names": [name], "action": _ERRNO, "errnoRet": code} for name, code in DENIED_CALLS.items()]
    family = {"index": 0, "value": DENIED_FAMILY, "op": "SCMP_CMP_EQ"}
    rules.append({"names": ["socket"], "action": _ERRNO, "errnoRet": errno.EAFNOSUPPORT, "args": [family]})
    return json.encode({**profile, "syscalls": rules}).decode()


def security_options(info: Mapping[str, Any], version: Mapping[str, Any]) -> list[str]:
    """What an engine is to be given under SecurityOpt, by what it says of itself.

    Podman takes a profile by the path of a file only, and an engine without seccomp takes none: they apply what
    they have.
    """
    options = ["no-new-privileges"]
    components = [str(each.get("Name", "")) for each in version.get("Components") or ()]
    filters = any(str(each).startswith("name=seccomp") for each in info.get("SecurityOptions") or ())
    if filters and "Podman Engine" not in components:
        options.append(f"seccomp={seccomp_profile()}")
    return options
