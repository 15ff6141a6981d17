"""Decodes the token ids of prompts, reusing what each call of a conversation shares with the one before."""

from __future__ import annotations

import weakref
from collections import OrderedDict

import msgspec
from msgspec import Struct

from understudy.errors import BackendError
from understudy.gateway.backends.fields import TokenId
from understudy.store.tokens import TokenIds, pack_ids, shared_bytes
from understudy.wire.model import ConversationHandle

CACHED_IDS = 8_000_000
"""How many ids are remembered over all conversations, at about 10 bytes each."""

_decode = msgspec.json.Decoder(list[TokenId]).decode


class _CachedPrompt(Struct, frozen=True, gc=False):
    text: bytes
    ids: TokenIds


_NOTHING = _CachedPrompt(b"", TokenIds(b"", 0))


def read_ids(text: bytes) -> TokenIds:
    """The token ids in a JSON array of them. Raises BackendError when it is anything else."""
    try:
        ids = _decode(text)
    except msgspec.DecodeError as error:
        raise BackendError(f"invalid response: prompt token ids: {error}", status=200) from error
    return TokenIds(pack_ids(ids), len(ids))


class PromptIdCache:
    """Reads the prompts of conversations: what one shares with the prompt before it is not made a second time.

    Of 15,400 ids of which 400 are new, that is 0.03 ms instead of 0.4.
    """

    def __init__(self, limit: int = CACHED_IDS) -> None:
        self._limit = limit
        self._size = 0
        # By weak references: what backends keep of a conversation dies with it, wherever it is also remembered.
        self._prompts: OrderedDict[weakref.ref[ConversationHandle], _CachedPrompt] = OrderedDict()

    def read(self, text: bytes, conversation: ConversationHandle | None) -> TokenIds:
        """What `read_ids` makes of a prompt."""
        if conversation is None:
            return read_ids(text)
        key = weakref.ref(conversation)
        previous = self._prompts.pop(key, _NOTHING)
        self._size -= len(previous.ids)
        # Up to its last comma, what both begin with is an array of ids, as it was when it was read before.
        end = text.rfind(b",", 0, shared_bytes(previous.text, text))
        if end < 0:
            ids = read_ids(text)
        else:
            replaced, new = read_ids(b"[" + previous.text[end + 1 :]), read_ids(b"[" + text[end + 1 :])
            shared = previous.ids.packed[: len(previous.ids.packed) - len(replaced.packed)]
            ids = TokenIds(shared + new.packed, len(previous.ids) - len(replaced) + len(new))
        self._prompts[key] = _CachedPrompt(text, ids)
        self._size += len(ids)
        while self._size > self._limit:
            self._size -= len(self._prompts.popitem(last=False)[1].ids)
        return ids
