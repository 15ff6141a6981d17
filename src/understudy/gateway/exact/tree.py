"""The sampled tokens of a branch: those of every answered conversation, found by the digest of its messages.

Conversations that continue one another share one array of tokens (a line), so that a branch of n turns stores each
token once. Digests tell which answer continues which conversation (see ConversationPath), so calls may be added in
any order.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any
from weakref import WeakKeyDictionary

import msgspec
from msgspec import Struct

from understudy.wire.model import ConversationHandle, ToolCall

_encode = msgspec.json.Encoder(order="deterministic").encode


class ConversationPath(Struct, frozen=True):
    """Digests of a conversation: of its setting (tools, system prompt), and `marks[n]` of the setting and the
    first n messages.
    """

    setting: bytes
    marks: list[bytes]

    def then(self, answer: Mapping[str, Any]) -> bytes:
        """Return the digest of the whole conversation with one more message."""
        return _digest(self.marks[-1], _mark(answer))


def conversation_path(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    template_args: Mapping[str, Any] | None = None,
) -> ConversationPath:
    """Return the digests of a conversation with its tools and the further variables of its template."""
    system = messages[0] if messages and messages[0].get("role") == "system" else None
    setting = _digest(b"", _encode([tools, template_args or {}, system]))
    marks = [setting]
    for message in messages:
        marks.append(_digest(marks[-1], _mark(message)))
    return ConversationPath(setting, marks)


def normal_text(message: Mapping[str, Any]) -> str:
    """Return the text of a message with runs of white space replaced by one blank, and none at the ends."""
    return " ".join(_text(message.get("content")).split())


def call_ids(message: Mapping[str, Any]) -> list[str]:
    """Return the ids of a message's tool calls in order; empty if one of them has no id."""
    ids = [str(call.get("id") or "") for call in message.get("tool_calls") or ()]
    return ids if all(ids) else []


def _mark(message: Mapping[str, Any]) -> bytes:
    """Return what identifies a message. An assistant's is known by the ids of its tool calls, or else by its text,
    because agents rewrite the rest.
    """
    if message.get("role") != "assistant":
        return _encode(message)
    return _encode(call_ids(message) or normal_text(message))


def _text(content: str | Iterable[Mapping[str, Any]] | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(str(part.get("text", "")) for part in content)


def _digest(before: bytes, mark: bytes) -> bytes:
    return blake2b(before + mark, digest_size=16).digest()


TREE_LIMIT = 4 << 20
FOREST_LIMIT = 64 << 20
"""How many tokens are stored for a branch, and for all branches, at four bytes each."""

_NODE_COST = 256
"""The memory of a node besides its tokens, counted in tokens."""


@dataclass(slots=True, eq=False)
class TokenLine:
    """Tokens that one conversation after another continued."""

    ids: array[int]
    nodes: list[TokenNode] = field(default_factory=list["TokenNode"])

    @property
    def cost(self) -> int:
        """The memory that it takes, counted in tokens."""
        return len(self.ids) + _NODE_COST * len(self.nodes)


@dataclass(slots=True, eq=False)
class TokenNode:
    """An answered conversation."""

    mark: bytes
    """The digest of the conversation with its answer."""
    line: TokenLine
    start: int
    """How many of the node's tokens were the prompt."""
    length: int
    """How many tokens of the line are the node's: they begin with the line."""
    turns: int
    """How many turns continued it since a prompt was rendered as a whole."""
    serial: int
    """Counts the nodes of a tree in the order in which they were added."""
    tool_calls: tuple[ToolCall, ...] = ()
    """The tool calls of the answer."""
    reasoned: bool = False
    """The answer has thinking."""
    thought: bool = False
    """There is thinking anywhere among the tokens."""
    canonical: bool = True
    """As far as is known, the template would make the same tokens."""

    @property
    def ids(self) -> list[int]:
        """All tokens: the prompt, and what was sampled."""
        return self.line.ids[: self.length].tolist()

    @property
    def sampled(self) -> list[int]:
        """The tokens of the answer."""
        return self.line.ids[self.start : self.length].tolist()


class TokenTree:
    """The answered conversations of one branch. If several have the same digest, the latest counts."""

    def __init__(self) -> None:
        self.setting: bytes | None = None
        """The setting of the conversation that was added last."""
        self.last_use = 0
        self._nodes: dict[bytes, list[TokenNode]] = {}
        self._lines: dict[TokenLine, None] = {}
        self._serials = itertools.count(1)
        self._cost = 0

    @property
    def cost(self) -> int:
        """The memory that it takes, counted in tokens."""
        return self._cost

    @property
    def nodes(self) -> list[TokenNode]:
        """Return all nodes in the order in which they were added."""
        return sorted(itertools.chain.from_iterable(self._nodes.values()), key=lambda node: node.serial)

    def find(self, path: ConversationPath) -> tuple[TokenNode, int] | None:
        """Return the longest stored conversation that `path` continues, and its number of messages."""
        for depth in range(len(path.marks) - 2, 0, -1):
            if siblings := self._nodes.get(path.marks[depth]):
                return siblings[-1], depth
        return None

    def add(
        self,
        path: ConversationPath,
        answer: bytes,
        prompt: Sequence[int],
        completion: Sequence[int],
        *,
        parent: TokenNode | None,
    ) -> TokenNode:
        """Store an answered conversation; `answer` is its digest including the answer.

        The tokens are shared with `parent` if they continue its tokens. Further answers to the same request become
        siblings, whether they are requested samples or retries: nothing here tells which of them the agent
        continues from, so all stay until their lines are the least recently used.
        """
        ids = array("i", prompt)
        ids.extend(completion)
        shares = parent is not None and ids[: parent.length] == parent.line.ids[: parent.length]
        line = self._line(ids, parent if shares else None)
        node = TokenNode(
            mark=answer,
            line=line,
            start=len(prompt),
            length=len(ids),
            turns=parent.turns + 1 if parent is not None and shares else 0,
            serial=next(self._serials),
        )
        self._cost += _NODE_COST
        line.nodes.append(node)
        self._nodes.setdefault(node.mark, []).append(node)
        self.setting = path.setting
        self._shrink()
        return node

    def clear(self) -> None:
        """Remove everything."""
        self._nodes.clear()
        self._lines.clear()
        self._cost = 0

    def _line(self, ids: array[int], parent: TokenNode | None) -> TokenLine:
        """Return a line that holds `ids`: the parent's, extended, unless another conversation already extended
        it.
        """
        if parent is not None and parent.line in self._lines and len(parent.line.ids) == parent.length:
            line = parent.line
            del self._lines[line]  # moved to the end, as the most recently used
            self._cost += len(ids) - parent.length
            line.ids.extend(ids[parent.length :])
        else:
            line = TokenLine(ids)
            self._cost += len(ids)
        self._lines[line] = None
        return line

    def _shrink(self) -> None:
        """Drop the least recently used lines."""
        while self._cost > TREE_LIMIT and len(self._lines) > 1:
            line = next(iter(self._lines))
            del self._lines[line]
            self._cost -= line.cost
            for node in line.nodes:
                siblings = self._nodes[node.mark]
                siblings.remove(node)
                if not siblings:
                    del self._nodes[node.mark]


class TokenForest:
    """The trees of all branches. If they hold too many tokens, the least recently used trees are dropped."""

    def __init__(self) -> None:
        self._trees: WeakKeyDictionary[ConversationHandle, TokenTree] = WeakKeyDictionary()
        self._uses = itertools.count(1)

    def tree(self, conversation: ConversationHandle | None) -> TokenTree:
        """Return the tree of a branch, or a new one for a request that belongs to no branch."""
        tree = TokenTree() if conversation is None else self._trees.setdefault(conversation, TokenTree())
        tree.last_use = next(self._uses)
        return tree

    def shrink(self) -> None:
        """Drop the least recently used branches until the rest is within the limit."""
        trees = list(self._trees.values())
        excess = sum(tree.cost for tree in trees) - FOREST_LIMIT
        while excess > 0:
            oldest = min(trees, key=lambda tree: (tree.cost == 0, tree.last_use))
            excess -= oldest.cost
            oldest.clear()
