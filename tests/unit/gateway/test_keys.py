"""Keys and what a session remembers."""

from __future__ import annotations

import weakref

import pytest

from understudy.errors import GatewayError
from understudy.gateway.keys import Keys
from understudy.gateway.session import BRANCHES_LIMIT, GatewaySession
from understudy.wire.dialect import ID_CHARACTERS, Branch
from understudy.wire.dialects import DIALECTS


async def test_a_key_finds_its_own_session_until_it_is_revoked() -> None:
    keys = Keys()
    one, two = keys.issue("a", sampling={"seed": 1}), keys.issue("b")
    assert one.startswith("sk-understudy-")
    assert one != two
    first, second = await keys.find_session(one), await keys.find_session(two)
    assert first is not None
    assert second is not None
    assert (first.attempt_id, first.sampling) == ("a", {"seed": 1})
    assert second.attempt_id == "b"
    keys.revoke("a")
    keys.revoke("a")
    assert await keys.find_session(one) is None
    assert await keys.find_session(two) is second


def test_branches_of_a_session_share_a_conversation_key_and_other_sessions_do_not() -> None:
    client = GatewaySession("client-me", {})
    main, sub, other = (client.conversation(Branch(*ids)) for ids in (("s", None), ("s", "a"), ("t", None)))
    assert main is not sub
    assert main.key == sub.key != other.key
    assert main.key != GatewaySession("client-you", {}).conversation(Branch("s", None)).key


@pytest.mark.parametrize("key", ["", "sk-understudy-", "x" * 10_000, "\ud800", "sk-understudy-\x00"])
async def test_an_unknown_key_finds_no_session(key: str) -> None:
    keys = Keys()
    keys.issue("a")
    assert await keys.find_session(key) is None


async def test_the_plain_key_is_not_stored() -> None:
    keys = Keys()
    key = keys.issue("a")
    assert key.removeprefix("sk-understudy-") not in repr(vars(keys)) + repr(vars(await keys.find_session(key)))


def test_a_second_key_for_an_attempt_is_refused() -> None:
    keys = Keys()
    keys.issue("a")
    with pytest.raises(GatewayError, match="attempt a already has an API key"):
        keys.issue("a")


async def test_calls_are_numbered_per_attempt_and_the_last_call_is_tracked_per_branch() -> None:
    keys = Keys()
    session = await keys.find_session(keys.issue("a"))
    assert session is not None
    main, sub = Branch("s", None), Branch("s", "agent")
    assert [session.next_sequence() for _ in range(3)] == [0, 1, 2]
    assert session.last_call_id(main) is None
    session.record_response(main, "call_1", {})
    session.record_response(sub, "call_2", {})
    assert (session.last_call_id(main), session.last_call_id(sub)) == ("call_1", "call_2")


def test_session_ids_are_truncated_and_the_number_of_branches_is_limited() -> None:
    headers = {b"x-claude-code-session-id": b"s" * 60_000, b"session-id": b"s" * 60_000}
    headers[b"x-session-id"] = b"s" * 60_000
    for dialect in DIALECTS.values():
        branch = dialect.branch(headers)
        assert branch.session_id == "s" * ID_CHARACTERS
    session = GatewaySession("a", {})
    main = session.conversation(Branch("s", None))
    for number in range(BRANCHES_LIMIT - 1):
        session.conversation(Branch("s", str(number)))
    assert session.conversation(Branch("s", None)) is main
    session.conversation(Branch("s", "one more"))
    assert session.conversation(Branch("s", None)) is main
    oldest = weakref.ref(session.conversation(Branch("s", "0")))
    assert oldest() is not None
    for number in range(BRANCHES_LIMIT):
        session.conversation(Branch("t", str(number)))
    assert oldest() is None
