"""What goes wrong on the way to an answer, in kinds that every dialect says in its own words."""

from __future__ import annotations

from understudy.errors import BackendError, GatewayError, StoreError, UnderstudyError
from understudy.gateway.control import GenerationPaused
from understudy.wire.errors import ContextOverflow, Fault, FaultKind, InvalidRequest, ProviderRefusal

RETRY_AFTER_LIMIT_S = 30.0
"""Claude Code gives up at once when it is told to wait for minutes; this long it waits."""

_TRY_AGAIN = frozenset({408, 409, 425})


class BudgetExceeded(GatewayError):
    """The attempt has used up what it was allowed. The agent is told by an ordinary end of its turn."""

    retryable = False


class Abandoned(GatewayError):
    """The agent went away, or the gateway stopped, before there was an answer."""


def fault_of(error: UnderstudyError) -> Fault:
    """How an error is told to the agent, so that waiting is tried where it helps and nowhere else."""
    message = str(error)
    match error:
        case ContextOverflow():
            return Fault(kind="too_long", message=message, overflow=(error.prompt_tokens, error.limit))
        case ProviderRefusal(error=told):
            kind = _backend_kind(told.status)
            return Fault(kind=kind, message=told.message, retry_after_s=error.retry_after_s, provider_error=told)
        case BackendError():
            return Fault(kind=_backend_kind(error.status), message=message, retry_after_s=_bounded(error))
        case InvalidRequest():
            return Fault(kind="invalid_request", message=message)
        case Abandoned() | GenerationPaused():
            return Fault(kind="overloaded", message=message)
        case StoreError():
            # Every further try would sample again and could not be kept either. Where the store lies is not the
            # agent's business.
            return Fault(kind="internal", message="the call could not be kept, so it is not answered", final=True)
        case _:
            return Fault(kind="internal", message=message)


def _backend_kind(status: int | None) -> FaultKind:
    if status is None or status >= 500 or status in _TRY_AGAIN:
        return "overloaded"
    if status == 429:
        return "rate_limit"
    return "invalid_request" if status >= 400 else "internal"


def _bounded(error: BackendError) -> float | None:
    """Only what the server asked for: left alone, Claude Code doubles its waits, which outlasts a restart."""
    return None if error.retry_after_s is None else min(max(error.retry_after_s, 0.0), RETRY_AFTER_LIMIT_S)
