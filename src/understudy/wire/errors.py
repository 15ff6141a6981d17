"""The errors of requests; every dialect has an error response for each kind."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from understudy.errors import BackendError, GatewayError

FaultKind = Literal[
    "invalid_request",
    "too_long",
    "permission",
    "not_found",
    "timeout",
    "too_large",
    "unsupported_media",
    "rate_limit",
    "overloaded",
    "internal",
]


class InvalidRequest(GatewayError):
    """A request that is malformed or asks for something that the gateway does not support."""

    retryable = False


def too_deep() -> InvalidRequest:
    """Return the error for a RecursionError: JSON that was just shallow enough to be read may be too deep to be
    written.
    """
    return InvalidRequest(
        "the request is nested too deeply: its JSON has hundreds of levels; send values of fewer levels"
    )


class ContextOverflow(BackendError):
    """A prompt of `prompt_tokens` tokens leaves no room for a completion in a context of `limit` tokens."""

    retryable = False

    def __init__(self, prompt_tokens: int, limit: int) -> None:
        super().__init__(
            f"the prompt has {prompt_tokens} tokens, the model's context holds {limit}: shorten the prompt "
            "or serve the model with a longer context",
            status=400,
        )
        self.prompt_tokens = prompt_tokens
        self.limit = limit


class ProviderError(Struct, frozen=True):
    """A provider's error in the provider's own words, passed on to an agent that speaks the same dialect."""

    status: int
    type: str
    message: str
    should_retry: bool | None = None


class ProviderRefusal(BackendError):
    """An error response of a provider, or its error within a stream, in the agent's own dialect."""

    def __init__(self, message: str, error: ProviderError, retry_after_s: float | None = None) -> None:
        super().__init__(
            message, status=error.status, retry_after_s=retry_after_s, should_retry=error.should_retry
        )
        self.error = error


class Fault(Struct, frozen=True, kw_only=True):
    """A failure to be reported to the agent. `final` tells it not to retry; `overflow` is (prompt tokens, limit).

    `provider_error` is the provider's own error, if it speaks the agent's dialect.
    """

    kind: FaultKind
    message: str
    retry_after_s: float | None = None
    final: bool = False
    overflow: tuple[int, int] | None = None
    provider_error: ProviderError | None = None
