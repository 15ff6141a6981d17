"""The prompts of a conversation are read as if each were read alone."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from understudy.errors import BackendError
from understudy.gateway.backends.chat_response import PromptIdCache, read_ids
from understudy.wire.model import ConversationHandle

_ID = st.integers(0, 2**31 - 1) | st.integers(0, 130)
_SPACED = st.sampled_from([(",", ":"), (", ", ": "), (" ,\n", ":")])


@st.composite
def _prompts(draw: st.DrawFn) -> list[list[int]]:
    """Prompts that begin as the one before did, for a while."""
    prompts = [draw(st.lists(_ID, max_size=20))]
    for _ in range(draw(st.integers(1, 5))):
        shared = draw(st.integers(0, len(prompts[-1])))
        prompts.append(prompts[-1][:shared] + draw(st.lists(_ID, max_size=8)))
    return prompts


@given(_prompts(), st.lists(_SPACED, min_size=6, max_size=6), st.sampled_from([1, 30, 1000]))
def test_cached_prompt_ids_equal_freshly_parsed_ones(
    sent_ids: list[list[int]], spaced: list[tuple[str, str]], capacity: int
) -> None:
    prompts, conversations = PromptIdCache(capacity), [ConversationHandle("a"), ConversationHandle("b")]
    for ids, separators in zip(sent_ids, spaced, strict=False):
        text = json.dumps(ids, separators=separators).encode()
        for conversation in (*conversations, None):
            assert prompts.read(text, conversation) == tuple(ids)


@pytest.mark.parametrize(
    "bad",
    [b"[1,2,-3]", b"[1,2,4294967296]", b"[1,2,1.5]", b'[1,2,"3"]', b"[1,2,[3]]", b"[1,2,null]", b'{"a":1}', b"7"],
)
def test_an_invalid_list_of_token_ids_is_refused_whatever_is_cached(bad: bytes) -> None:
    prompts, conversation = PromptIdCache(), ConversationHandle("a")
    for before in (b"[1,2,3]", b"[1,2,34,5]", b"[9]"):
        prompts.read(before, conversation)
        with pytest.raises(BackendError, match="invalid response"):
            prompts.read(bad, conversation)
    assert prompts.read(b"[1,2,3]", conversation) == read_ids(b"[1,2,3]") == (1, 2, 3)
