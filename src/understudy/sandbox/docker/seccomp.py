"""The seccomp profile of containers: Docker's default profile, minus the system calls that sandboxes are denied.

`seccomp_default.json` is seccomp/default.json of https://github.com/moby/profiles at cd3bed8 (Apache License 2.0),
one rule per line. An engine that is given a profile does not apply its default, so ours has to include it.
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
    """Return the profile as JSON for `seccomp=` in an engine's SecurityOpt.

    Memory files are allowed, because engines count them in the container's control group.
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
    """Return the SecurityOpt for an engine, chosen by what it reports about itself.

    Podman accepts a profile only as the path of a file, and an engine without seccomp accepts none: both get no
    profile from us, and apply their own defaults.
    """
    options = ["no-new-privileges"]
    components = [str(component.get("Name", "")) for component in version.get("Components") or ()]
    filters = any(str(option).startswith("name=seccomp") for option in info.get("SecurityOptions") or ())
    if filters and "Podman Engine" not in components:
        options.append(f"seccomp={seccomp_profile()}")
    return options
