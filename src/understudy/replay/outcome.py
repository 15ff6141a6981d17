"""What became of a request to a teacher: answered or not, whether it may have been billed, what to do next."""

from __future__ import annotations

import re
from typing import Literal

from msgspec import Struct

from understudy.gateway.backends.http import NotConnectedError
from understudy.gateway.errors import Abandoned
from understudy.replay.gateways import AskReply
from understudy.types import Call, ErrorInfo
from understudy.wire.errors import ContextOverflow, InvalidRequest

Next = Literal["none", "again", "never", "doubt", "dismiss"]
"""What comes after a failure: another try; none, for it would fail as well; nor any of other asks of the teacher.

"none": it was answered. "doubt": that may hold for this ask, or for all.
"""

_STATUS = re.compile(r"\S+ \S+: status (\d{3}):")
_BROKE_OFF = re.compile(r"\S+ \S+: (?:no response|the response broke off|the stream broke off)")
_WAITS = frozenset({409, 425, 429, 529})
_MAYBE_BILLED = 408
_DISMISSES = frozenset({401, 402})
_DOUBTS = frozenset({403, 404})
"""Of a wrong key or model, but also of one prompt: a router says 404 where it finds nobody to read its images, and
403 where its filter does not like it."""
_UNREACHED = NotConnectedError.__name__
_UNSENT = frozenset({_UNREACHED, InvalidRequest.__name__, ContextOverflow.__name__})


class AskOutcome(Struct, frozen=True):
    """What came of one try. `billed`: False where certainly nothing was; `call` where it was answered."""

    then: Next
    billed: bool
    error: ErrorInfo | None = None
    call: Call | None = None
    retry_after_s: float | None = None


def outcome_of(reply: AskReply) -> AskOutcome:
    """What a reply of the gateway means."""
    call = reply.call
    if call is None:
        # The gateway refused the request before there was a call: nothing was sent to the teacher.
        error = ErrorInfo("gateway", "GatewayError", f"status {reply.status}: {reply.text}")
        again = reply.status in (408, 429) or reply.status >= 500
        return AskOutcome("again" if again else "never", False, error, retry_after_s=reply.retry_after_s)
    if call.error is None:
        return AskOutcome("none", True, call=call)
    then, billed = _failed(call, call.error)
    return AskOutcome(then, billed, call.error, call, reply.retry_after_s)


def _failed(call: Call, error: ErrorInfo) -> tuple[Next, bool]:
    if call.usage.prompt_tokens or call.usage.completion_tokens:
        return "never", True  # there was an answer, of which nothing could be made
    if error.type in _UNSENT:
        return ("again" if error.type == _UNREACHED else "never"), False
    match = _STATUS.match(error.message)
    status = int(match[1]) if match else None
    if status is None:
        # Lost on its way: the teacher may have made an answer, or be making one.
        again = error.type == Abandoned.__name__ or _BROKE_OFF.match(error.message) is not None
        return ("again" if again else "never"), True
    if status in _DISMISSES:
        return "dismiss", False
    if status in _DOUBTS:
        return "doubt", False
    if status in _WAITS:
        return "again", False
    if status >= 500 or status == _MAYBE_BILLED:
        return "again", True
    return "never", False
