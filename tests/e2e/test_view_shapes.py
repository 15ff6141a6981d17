"""The viewer in a real browser on rollouts and loops of all shapes: branching, very long, forged, running."""

from __future__ import annotations

from base64 import b64encode
from pathlib import Path

import pytest
from playwright.sync_api import expect

from understudy.store import Store
from understudy.types import ErrorInfo, Evidence, Finding, Integrity, Verdict

from support import viewer
from support.export import converse, put_attempt, put_rollouts, wait
from support.report import put_long, put_loop, solved
from support.trajectory import Session, branching, text, user
from support.viewer import TIMEOUT_MS, Watched, read, scroll_through

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

url, ids, browser, watched = viewer.url, viewer.ids, viewer.browser, viewer.watched

TURNS = 10_000
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
SVG = b64encode(b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>1</script></svg>').decode()


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    with Store.open(root / "branching") as store:
        put_attempt(store, branching().calls)
    with Store.open(root / "images") as store:
        talk = Session("ignored")
        sources = [
            {"type": "base64", "media_type": "image/png", "data": PNG},
            {"type": "base64", "media_type": "image/svg+xml", "data": SVG},
            {"type": "base64", "media_type": "text/html", "data": SVG},
            {"type": "url", "url": "https://example.org/seen.png"},
        ]
        talk.ask([user(text("Look."), *({"type": "image", "source": each} for each in sources))], [text("I see.")])
        put_attempt(store, talk.calls)
    put_rollouts(root / "judged", tasks=1, samples=3)
    with Store.open(root / "judged") as store:
        canary = Evidence("canary", text="2 of 3 canary tests did not end as they must")
        evidence = (Evidence("exit", "a.py", 3, "os._exit(0)"), canary)
        forged = Integrity("forged", "it ends before the tests", evidence)
        wait(store.runs.replace_verdict("calc-0-1.1", Verdict(reward=0.0, reason="forged", integrity=forged)))
        wait(store.runs.create_rollouts("run1", [("ungraded", "calc-0", 7)]))
        attempt = wait(store.runs.start_attempt("ungraded"))
        lost = ErrorInfo("grading", "GradingError", "the container of the tests was lost")
        spent = Finding(kind="budget", message="it used up its 5 calls")
        timings = {"prepare_s": 0.5, "agent_s": 2.0}
        wait(
            store.runs.finish_attempt(
                attempt.id, "failed", "failed", patch=b"+x\n", error=lost, timings=timings, findings=(spent,)
            )
        )
        reused = Verdict(reward=0.0, reason="it fails", tests={"t.py::test": "failed"}, reused_from="calc-0-1.1")
        wait(store.runs.replace_verdict("calc-0-2.1", reused))
    evaluations = [solved({f"task-{n}": (n < right, 1) for n in range(9)}) for right in (2, 5, 7)]
    steps = [solved({"a": (2, 4)}), solved({"b": (1, 4)})]
    put_loop(root / "asynchronous", evaluations, steps, asynchronous=True)
    put_long(root / "long", TURNS, characters=1_000, tokens=10)
    return root


def test_branches_are_lanes_and_a_lane_leads_to_its_turns(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['branching']}/r/r0")
    lanes = page.get_by_label("Branches over").get_by_role("listitem")
    branches = read(watched.url, f"/api/stores/{ids['branching']}/rollouts/r0")["branches"]
    assert {each["role"] for each in branches} == {"main", "subagent", "compaction"}
    # What goes on after the compaction is on the session's own lane.
    expect(lanes).to_have_count(len(branches) - 1)
    lanes.filter(has_text="compaction").get_by_role("button").click()
    page.wait_for_url("**/*turn=*")
    expect(page.get_by_text("<summary>All of it.</summary>")).to_be_visible()
    expect(page.get_by_role("article").filter(has_text="subagent").first).to_be_attached()


def test_pictures_are_drawn_and_documents_are_not(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['images']}/r/r0")
    figures = page.get_by_role("figure")
    expect(figures).to_have_count(4)
    drawn = page.get_by_role("img", name="Image 1")
    expect(drawn).to_have_count(1)
    assert drawn.evaluate("(image) => image.decode().then(() => image.naturalWidth)") == 1
    expect(figures.filter(has_text="not shown: only PNG")).to_have_count(2)
    expect(figures.filter(has_text="not shown: it is at another address")).to_have_count(1)


def test_failed_canary_tests_stand_beside_the_tests_that_decide(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['judged']}/r/calc-0-1?view=patch")
    line = page.locator("p", has=page.get_by_text("canary tests", exact=True))
    expect(line).to_contain_text("2 of 3 canary tests did not end as they must")
    page = watched.open(f"/s/{ids['judged']}/r/calc-0-0?view=patch")
    expect(page.get_by_text("Tests that decide")).to_be_visible()
    expect(page.get_by_text("canary tests")).to_have_count(0)


def test_a_forged_verdict_and_a_failed_grader_are_told_apart(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['judged']}/r/calc-0-1?view=integrity")
    expect(page.get_by_text("it ends before the tests").first).to_be_visible()
    expect(page.get_by_text("os._exit(0)")).to_be_visible()
    page = watched.open(f"/s/{ids['judged']}/r/ungraded")
    expect(page.get_by_text("the container of the tests was lost").first).to_be_visible()
    page = watched.open(f"/s/{ids['judged']}/health")
    expect(page.get_by_text("grading").first).to_be_visible()


def test_a_reused_verdict_leads_to_the_rollout_that_was_graded(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['judged']}/r/calc-0-2?view=patch")
    page.get_by_role("link", name="sample 1").click()
    page.wait_for_url("**/r/calc-0-1?*view=patch*")
    expect(page.get_by_text("#1")).to_be_visible()


def test_an_attempt_shows_its_phases_and_what_was_noticed(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['judged']}/r/ungraded?view=timing")
    expect(page.get_by_label("Phases of the attempt").get_by_role("listitem")).to_have_text(
        ["prepare the task's files500 ms", "agent2.0 s"]
    )
    expect(page.get_by_text("it used up its 5 calls")).to_be_visible()


def test_an_evaluation_leads_to_its_rollouts(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['asynchronous']}?step=0")
    page.get_by_role("link", name="2 of 9 held-out rollouts solved").click()
    expect(page.get_by_text("9 rollouts", exact=True)).to_be_visible()


def test_an_asynchronous_loop_says_how_stale_its_steps_are(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['asynchronous']}")
    expect(page.get_by_text("Step 2").first).to_be_visible()
    steps = read(watched.url, f"/api/stores/{ids['asynchronous']}/loop")["steps"]
    assert [step["staleness"] for step in steps] == [0, 1]


def test_ten_thousand_turns_are_scrolled_through_with_few_elements(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['long']}/r/long")
    expect(page.get_by_role("article", name="Turn 1", exact=True)).to_be_visible(timeout=TIMEOUT_MS)
    scroll = scroll_through(page, 200)
    assert scroll.elements <= 3_000
    assert scroll.heap_mb < 150
    expect(page.get_by_role("article", name=f"Turn {TURNS}", exact=True)).to_be_visible(timeout=TIMEOUT_MS)
    expect(page.get_by_label("Branches over").get_by_role("listitem")).to_have_count(1, timeout=TIMEOUT_MS)


def test_a_turn_of_a_running_rollout_comes_without_a_reload(watched: Watched, ids: dict[str, str], stores: Path):
    with Store.open(stores / "judged") as store:
        wait(store.runs.create_rollouts("run1", [("running", "calc-0", 8)]))
        attempt = wait(store.runs.start_attempt("running"))
        wait(store.runs.mark_running(attempt.id))
        first, *others = converse(attempt.id, "Mend it.").calls
        wait(store.calls.append(first))
        page = watched.open(f"/s/{ids['judged']}/r/running")
        expect(page.get_by_role("article", name="Turn 1", exact=True)).to_be_visible()
        for number, call in enumerate(others, 2):
            wait(store.calls.append(call))
            expect(page.get_by_role("article", name=f"Turn {number}", exact=True)).to_be_attached(
                timeout=TIMEOUT_MS
            )
