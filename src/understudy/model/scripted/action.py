"""The seam between the server and what decides: a policy is shown a turn and answers with an action."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from understudy.model.protocol import ModelMessage, ModelTool


class ChatTurn(Struct, frozen=True):
    """What a policy is asked: the conversation so far, and the tools it may call now."""

    messages: Sequence[ModelMessage]
    tools: Sequence[ModelTool] = ()
    seed: int | None = None

    def offers(self, *names: str) -> bool:
        """Whether all these tools may be called."""
        return {tool.function.name for tool in self.tools}.issuperset(names)


class ActionCall(Struct, frozen=True):
    """A tool and the JSON text of its arguments."""

    name: str
    arguments: str


class Action(Struct, frozen=True):
    """What a policy does: says `content`, then calls tools.

    `logprobs` has the natural logarithm of each completion token's probability; None says that the policy was
    certain, which is 0.0 for each.
    """

    content: str = ""
    tool_calls: tuple[ActionCall, ...] = ()
    reasoning: str | None = None
    logprobs: tuple[float, ...] | None = None


class Policy(Protocol):
    """Decides a turn. It keeps no state of its own: the same conversation gives the same action."""

    @property
    def name(self) -> str:
        """The name it is chosen by."""
        ...

    def act(self, request: ChatTurn) -> Action:
        """The action for the last message of the conversation. Raises BackendError."""
        ...
