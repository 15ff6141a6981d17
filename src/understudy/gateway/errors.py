"""Errors of the gateway itself, and the conversion of any error to a fault, which each dialect reports in its
own format.
"""

from __future__ import annotations

from understudy.errors import BackendError, ConfigError, GatewayError, StoreError, UnderstudyError
from understudy.gateway.control import GenerationPaused
from understudy.wire.errors import ContextOverflow, Fault, FaultKind, InvalidRequest, ProviderRefusal

RETRY_AFTER_LIMIT_S = 30.0
"""The longest retry-after, in seconds, that agents get.

Claude Code waits that long, but gives up at once at minutes.
"""

_TRY_AGAIN = frozenset({408, 409, 425})


class BudgetExceeded(GatewayError):
    """The attempt has used up its budget. The agent gets an ordinary final message, and ends by itself."""

    retryable = False


class Abandoned(GatewayError):
    """The client disconnected, or the gateway stopped, before there was a response."""


def streaming_excludes_exact(key: str = "") -> ConfigError:
    """Return the error for a streaming gateway with exact tokens; `key` precedes `tokens`, as in models.high."""
    return ConfigError(
        f'streaming = true and {key}tokens = "exact" exclude each other, because exact responses are parsed once '
        'they are complete; remove streaming, or set tokens = "observe"'
    )


def fault_of(error: UnderstudyError, retry_after_limit_s: float = RETRY_AFTER_LIMIT_S) -> Fault:
    """Return the fault for an error. Its kind makes agents retry if that can help, and only then.

    `retry_after_limit_s` bounds the pause that a server asks for, but for refusals that are relayed as they came.
    """
    message = str(error)
    match error:
        case ContextOverflow():
            return Fault(kind="too_long", message=message, overflow=(error.prompt_tokens, error.limit))
        case ProviderRefusal(error=provider_error):
            kind = _backend_kind(provider_error.status)
            return Fault(
                kind=kind,
                message=provider_error.message,
                retry_after_s=error.retry_after_s,
                provider_error=provider_error,
            )
        case BackendError(status=401 | 403 as status):
            return Fault(kind="invalid_request", message=refused_credentials(status))
        case BackendError():
            return Fault(
                kind=_backend_kind(error.status),
                message=message,
                retry_after_s=_bounded(error, retry_after_limit_s),
            )
        case InvalidRequest():
            return Fault(kind="invalid_request", message=message)
        case Abandoned() | GenerationPaused():
            return Fault(kind="overloaded", message=message)
        case StoreError():
            # Final, because every retry would be sampled again and could not be stored either. The error's text is
            # not passed on, since it names paths of this machine.
            return Fault(
                kind="internal",
                message="the call could not be stored, so its response is withheld; check the gateway's log",
                final=True,
            )
        case _:
            return Fault(kind="internal", message=message)


def refused_credentials(status: int) -> str:
    """Return the fault for an agent when a model server rejected the gateway's key, without the server's own
    words.

    Agents react to words in errors: Claude Code answers "x-api-key" by asking its user to log in, although the
    user's login is not involved. The server's words are in the stored call.
    """
    return (
        f"the model server refused the credentials of the gateway (status {status}); whoever runs the gateway "
        "has to correct the key in the environment variable that `api_key_env` names; this client's own is right"
    )


def _backend_kind(status: int | None) -> FaultKind:
    if status is None or status >= 500 or status in _TRY_AGAIN:
        return "overloaded"
    if status == 429:
        return "rate_limit"
    return "invalid_request" if status >= 400 else "internal"


def _bounded(error: BackendError, limit_s: float) -> float | None:
    """Return the server's retry-after, bounded, or None if it sent none.

    None is not replaced by a made-up value: without it, Claude Code doubles its pauses, which is enough to outlast
    a restart.
    """
    return None if error.retry_after_s is None else min(max(error.retry_after_s, 0.0), limit_s)
