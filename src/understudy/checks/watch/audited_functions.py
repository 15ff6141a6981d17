"""Functions that stand in a watched process for those of Python that raise no audit event (see `process_watch`).

The hook does what their events ask for, so that no reference leads from here to the hook.
"""

from __future__ import annotations

import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CREATE_BUILTIN = "understudy.create_builtin"
EXIT = "understudy.exit"
"""The events."""


def create_audited(spec: Any) -> Any:
    """Replaces `_imp.create_builtin` in a watched process, because that raises no audit event: the hook creates
    the module.
    """
    made: list[Any] = []
    sys.audit(CREATE_BUILTIN, spec.name, made)
    return made[0]


def exit_audited(status: int, audit: Any = sys.audit, event: str = EXIT) -> Any:
    """Replaces `os._exit`, which raises no audit event; works even while modules are torn down."""
    audit(event, status)


def find_sha256() -> Any:
    """Return Python's own sha256 function, which loads no library; its module's name depends on the version."""
    try:
        import _sha2 as sha  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    except ImportError:
        import _sha256 as sha  # pyright: ignore[reportMissingImports, reportUnknownVariableType]
    return getattr(sha, "sha256")  # noqa: B009 - which of the two it is, no type says
