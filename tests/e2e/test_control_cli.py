"""Claude Code before a gateway that is paused, and with a budget that it uses up."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from understudy.gateway.budget import Budget
from understudy.gateway.control import GenerationControl
from understudy.gateway.server.http import RequestLimits

from fakes.turns import bash, say
from support import until
from support.cli import Rig

pytestmark = pytest.mark.e2e


async def update(control: GenerationControl, hold: asyncio.Event, *, refused: bool) -> None:
    """What a trainer does: pause, drain, change the weights for a while, resume with the new version.

    A call comes meanwhile; with `refused` the pause outlasts the time that it is held.
    """
    await until(lambda: control.snapshot().in_flight > 0)
    control.pause()
    hold.set()
    assert await control.drain(10) == 0
    await until(lambda: control.snapshot().waiting > 0)
    if refused:
        await until(lambda: control.snapshot().waiting == 0)
    else:
        await asyncio.sleep(0.5)
    control.resume("v2")


@pytest.mark.parametrize(
    ("hold_limit_s", "ping_after_s"),
    [(60, 20), (60, 0.1), (0.4, 20), (0.4, 0.1)],
    ids=["held", "held with pings", "refused", "refused after pings"],
)
async def test_a_session_goes_on_over_a_change_of_weights(
    tmp_path: Path, claude: Path, hold_limit_s: float, ping_after_s: float
) -> None:
    control = GenerationControl("v1", hold_limit_s=hold_limit_s)
    limits = RequestLimits(headers_after_s=ping_after_s, ping_every_s=0.2)
    hold = asyncio.Event()
    async with Rig(tmp_path, claude, control=control, limits=limits) as rig:
        rig.script(say("", bash("true"), hold=hold), say("Done."))
        _, run = await asyncio.gather(update(control, hold, refused=hold_limit_s < 1), rig.claude())
    assert (run.result["subtype"], run.result["result"]) == ("success", "Done.")
    answered = [call for call in run.calls if call.status == "ok"]
    assert [call.policy_version for call in answered] == ["v1", "v2"]
    refused = {call.error.type for call in run.calls if call.error}
    assert refused == ({"GenerationPaused"} if hold_limit_s < 1 else set())
    assert control.snapshot().waiting == 0


@pytest.mark.parametrize(
    ("budget", "statuses"),
    [
        (Budget(calls=1), ["ok", "error"]),
        (Budget(tokens=10), ["error"]),  # its first prompt may have more
        (Budget(wall_s=0.05), ["ok", "error"]),
    ],
)
async def test_a_budget_that_is_used_up_ends_the_session_cleanly(
    tmp_path: Path, claude: Path, budget: Budget, statuses: list[str]
) -> None:
    async with Rig(tmp_path, claude, budget=budget) as rig:
        rig.script(say("", bash("sleep 0.1")), say("", bash("true")))
        run = await rig.claude()
    assert (run.result["subtype"], run.result["is_error"]) == ("success", False)
    assert "The budget of this attempt is used up" in run.result["result"]
    assert run.statuses == statuses
    assert run.calls[-1].error is not None
    assert run.calls[-1].error.type == "BudgetExceeded"
