"""The viewer in a real browser: every page on real stores, keys, links, votes, live changes, hostile text."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from msgspec.structs import replace
from playwright.sync_api import Browser, Route, expect

from understudy.store import Store
from understudy.store.address import StoreUrl
from understudy.store.copying import copy_store

from support import calc_task, understudy, viewer
from support.export import converse, put_attempt, put_rollouts, wait
from support.hostile import MARK, PAYLOADS, PLACED, put_hostile_places, put_hostile_run, put_long_line
from support.postgresql import PASSWORD
from support.report import put_loop, put_many, solved
from support.viewer import TIMEOUT_MS, Watched, axe_source, read, serving, store_ids

pytestmark = [pytest.mark.services, pytest.mark.timeout(600)]

url, ids, browser, watched = viewer.url, viewer.ids, viewer.browser, viewer.watched

ARCHIVES = Path(__file__).parents[1] / "data/v0_1"


@pytest.fixture(scope="module")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("stores")
    for name in ("run", "loop", "sessions", "gateway"):
        with tarfile.open(ARCHIVES / f"{name}.tar.xz") as archive:
            archive.extractall(root, filter="data")
    put_rollouts(root / "graded", tasks=3, samples=3)
    put_hostile_run(root / "hostile")
    put_hostile_places(root)
    put_long_line(root / "long")
    return root


@pytest.fixture
def saved(browser: Browser) -> Iterator[Watched]:
    """A page of a file, which may send no request at all."""
    watched = Watched(browser, "file://")
    yield watched
    watched.page.close()
    assert not watched.faults


@pytest.fixture
def phone(browser: Browser, url: str) -> Iterator[Watched]:
    watched = Watched(browser, url, width=390)
    yield watched
    watched.page.close()
    assert not watched.faults


def rollout_of(url: str, store: str, index: int = 0) -> str:
    return read(url, f"/api/stores/{store}/rollouts")["rollouts"][index]["id"]


PAGES = {
    "runs": ("/", "4 clients"),
    "rollouts": ("/s/{run}", "calc-1"),
    "tasks": ("/s/{run}/grid", "calc-2"),
    "cost": ("/s/{run}/scatter", "6 graded rollouts"),
    "health": ("/s/{run}/health", "Phases of attempts"),
    "compare": ("/s/{run}/compare?with={graded}", "Difference of solve rates"),
    "task": ("/s/{run}/task/calc-0", "Solved and unsolved rollouts part in turn 2."),
    "transcript": ("/s/{run}/r/{rollout}", "I change these lines."),
    "tokens": ("/s/{run}/r/{rollout}?view=tokens", "Segment 1"),
    "patch": ("/s/{run}/r/{rollout}?view=patch", "test_calc.py::test_shift"),
    "timing": ("/s/{run}/r/{rollout}?view=timing", "Time in calls"),
    "calls": ("/s/{run}/r/{rollout}?view=calls", '"messages"'),
    "integrity": ("/s/{run}/r/{rollout}?view=integrity", "The grader has no evidence against the patch."),
    "loop": ("/s/{loop}", "Step 2"),
    "report": ("/s/{loop}/report", "What to know of these figures"),
    "report of two": ("/report?stores={run},{graded}", "What to know of these figures"),
    "conversations": ("/s/{sessions}", "18 conversations"),
    "states": ("/s/{sessions}/states", "63 states"),
    "redaction": ("/s/{sessions}/redaction", "What redaction would replace"),
    "pairs": ("/s/{graded}/pairs", "Chosen"),
    "gateway": ("/s/{gateway}", "Clients"),
}


def path_of(name: str, url: str, ids: dict[str, str]) -> str:
    return PAGES[name][0].format(rollout=rollout_of(url, ids["run"]), **ids)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_its_content_and_is_accessible(name: str, watched: Watched, ids: dict[str, str]):
    page = watched.open(path_of(name, watched.url, ids))
    expect(page.get_by_text(PAGES[name][1]).first).to_be_visible(timeout=TIMEOUT_MS)
    assert watched.overflow() <= 0
    page.evaluate(axe_source())
    for theme in ("light", "dark"):
        page.evaluate(f"document.documentElement.dataset.theme = '{theme}'")
        violations = page.evaluate("axe.run({resultTypes: ['violations']}).then((result) => result.violations)")
        serious = [each for each in violations if each["impact"] in ("serious", "critical")]
        assert not serious, [(each["id"], [node["html"][:200] for node in each["nodes"][:3]]) for each in serious]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_fits_a_phone(name: str, phone: Watched, ids: dict[str, str]):
    page = phone.open(path_of(name, phone.url, ids))
    expect(page.get_by_text(PAGES[name][1]).first).to_be_attached(timeout=TIMEOUT_MS)
    assert phone.overflow() <= 0


def test_a_link_shows_the_same_turn_filter_and_token(watched: Watched, ids: dict[str, str]):
    rollout = rollout_of(watched.url, ids["run"])
    page = watched.open(f"/s/{ids['run']}/r/{rollout}?turn=4&without=system")
    expect(page.get_by_role("article", name="Turn 4")).to_be_in_viewport(timeout=TIMEOUT_MS)
    expect(page.get_by_role("button", name="System")).to_have_attribute("aria-pressed", "false")
    page = watched.open(f"/s/{ids['run']}?outcome=solved&sort=-turns")
    expect(page.get_by_text("2 rollouts")).to_be_visible()
    expect(page.get_by_role("columnheader", name="Turns")).to_have_attribute("aria-sort", "descending")
    page = watched.open(f"/s/{ids['graded']}/r/{rollout_of(watched.url, ids['graded'])}?view=tokens&position=21")
    expect(page.get_by_label("The chosen token").get_by_text("0.7788", exact=False).or_(
        page.get_by_label("The chosen token").get_by_text("-0.2500")
    ).first).to_be_visible()  # fmt: skip


def test_improbable_tokens_are_found_in_the_other_calls_too(browser: Browser, tmp_path: Path):
    first, second, failed = converse("a", "Mend it.").calls
    calls = [replace(first, logprobs=(-0.1, -0.1, -4.0)), replace(second, logprobs=(-5.0, -0.1)), failed]
    with Store.open(tmp_path / "run") as store:
        put_attempt(store, calls)
    with serving(tmp_path / "run") as address:
        watched = Watched(browser, address)
        store_id = read(address, "/api/stores")["stores"][0]["id"]
        page = watched.open(f"/s/{store_id}/r/r0?view=tokens")
        expect(page.get_by_text("1 of 2", exact=True)).to_be_visible()
        for key, token, call in (("n", 22, 1), ("n", 26, 2), ("p", 22, 1), ("n", 26, 2)):
            page.keyboard.press(key)
            page.wait_for_url(f"**position={token}*")
            expect(page.get_by_text(f"{call} of 2", exact=True)).to_be_visible()
        page.keyboard.press("n")
        expect(page.get_by_text("No token less probable than 5% after this one.")).to_be_visible()
        page = watched.open(f"/s/{store_id}/r/r0?view=tokens")
        page.keyboard.press("p")  # of the first call nothing is improbable but its last token
        page.wait_for_url("**position=22*")
        page = watched.open(
            f"/s/{store_id}/r/r0?view=tokens&token=12345"
        )  # always the key, also if it is a number
        page.wait_for_url("**?view=tokens")
        watched.page.close()
        assert not watched.faults


def test_keys_lead_from_the_runs_to_a_token(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['run']}?sort=-turns")
    expect(page.get_by_role("row", name="calc-1").first).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    expect(page.locator("tr[aria-selected=true]")).to_have_count(1)
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="Turn 1")).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_url("**/*turn=2*")
    page.keyboard.press("o")
    expect(page.get_by_role("article", name="Turn 2").get_by_role("button").first).to_have_attribute(
        "aria-expanded", "false"
    )
    page.keyboard.press("2")
    expect(page.get_by_label("Segments")).to_be_visible()
    page.keyboard.press("u")
    page.wait_for_url("**/s/*sort=-turns*")  # the list as it was left
    page.keyboard.press("/")
    expect(page.get_by_role("searchbox")).to_be_focused()
    page.keyboard.type("?j")
    expect(page.get_by_role("searchbox")).to_have_value("?j")
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    before = page.evaluate("document.documentElement.dataset.theme")
    page.keyboard.press("t")
    assert page.evaluate("document.documentElement.dataset.theme") != before


def test_keys_lead_from_the_tasks_to_a_turn_of_a_rollout(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['graded']}/grid")
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.wait_for_url("**/grid?task=calc-1")
    page.keyboard.press("Enter")
    expect(page.get_by_role("region", name="Rollouts of the task")).to_be_visible()
    page.keyboard.press("j")
    page.keyboard.press("j")
    page.keyboard.press("ArrowRight")
    page.wait_for_url("**/task/calc-1?column=1&turn=2")
    page.keyboard.press("Enter")
    page.wait_for_url("**/r/calc-1-1?turn=2")
    expect(page.get_by_role("article", name="Turn 2")).to_be_in_viewport()


def test_conversations_are_chosen_by_project_and_agent(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['sessions']}")
    page.get_by_role("button", name="/home/dev/proj").first.click()
    expect(page.get_by_text("5 conversations")).to_be_visible()
    page.get_by_role("button", name="Of any project").click()
    expect(page.get_by_text("18 conversations")).to_be_visible()
    page.get_by_role("button", name="codex").first.click()
    page.wait_for_url("**=codex*")


def test_the_search_shows_what_it_matched(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['graded']}")
    page.get_by_role("searchbox").fill('"give up 2"')
    expect(page.get_by_text("3 rollouts", exact=True)).to_be_visible(timeout=TIMEOUT_MS)
    page.wait_for_url("**/*q=*")


def test_a_vote_and_a_decision_are_stored_by_key_and_by_form(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['graded']}/pairs")
    expect(page.get_by_role("button", name="left is better")).to_be_enabled()
    page.keyboard.press("ArrowLeft")
    expect(page.get_by_text(re.compile(r"^1 vote\b"))).to_be_visible(timeout=TIMEOUT_MS)
    votes = read(watched.url, f"/api/stores/{ids['graded']}/votes?subject=pair")["votes"]
    assert [(vote["label"], vote["voter"]) for vote in votes] == [("chosen", "me")]

    rollout = rollout_of(watched.url, ids["graded"])
    page = watched.open(f"/s/{ids['graded']}/r/{rollout}?view=integrity")
    expect(page.get_by_role("button", name="It is suspicious")).to_be_disabled()
    page.get_by_label("Why").fill("it writes the expected output")
    page.get_by_role("button", name="It is suspicious").click()
    expect(page.get_by_text("Stored.")).to_be_visible()
    row = read(watched.url, f"/api/stores/{ids['graded']}/rollouts/{rollout}")["row"]
    assert (row["integrity"], row["reviewed"]) == ("suspicious", True)


def test_a_list_whose_cursor_is_refused_begins_again_and_can_be_read_to_its_end(watched: Watched, stores: Path):
    put_many(stores / "many", tasks=250, samples=1, turns=1)
    store = next(each["id"] for each in read(watched.url, "/api/stores")["stores"] if each["name"] == "many")
    refused: list[str] = []

    def spoil_once(route: Route) -> None:
        """Give the first cursor that is used the form of another list's."""
        url = route.request.url
        if "cursor=" in url and not refused:
            refused.append(url)
            url = url.replace("cursor=", "cursor=0")
        route.continue_(url=url)

    watched.page.route("**/api/stores/*/rollouts?*", spoil_once)
    page = watched.open(f"/s/{store}")
    expect(page.get_by_text("250 rollouts")).to_be_visible()
    box = page.get_by_role("region", name="Rollouts")
    with page.expect_response(lambda answer: answer.status == 400):
        box.evaluate("(box) => box.scrollTo(0, box.scrollHeight)")
    last = page.get_by_role("link", name="task-0000#0")
    for _ in range(40):
        box.evaluate("(box) => box.scrollTo(0, box.scrollHeight)")
        page.wait_for_timeout(250)
        if last.is_visible():
            break
    expect(last).to_be_visible()
    expect(page.get_by_role("alert")).to_have_count(0)
    assert len(refused) == 1
    watched.faults[:] = [fault for fault in watched.faults if "400" not in fault]  # Chromium logs the refusal


def test_a_label_reaches_an_export(watched: Watched, ids: dict[str, str], stores: Path, tmp_path: Path):
    def exported_lines() -> int:
        output = tmp_path / "export"
        done = understudy("export", "openai", stores / "graded", "--output", output, "--unsolved-too")
        assert done.returncode == 0, done.stderr
        return sum(len(file.read_text().splitlines()) for file in output.rglob("*.jsonl"))

    before = exported_lines()
    page = watched.open(f"/s/{ids['graded']}/r/calc-2-0?view=integrity")
    page.get_by_role("button", name="Exclude").click()
    expect(page.get_by_role("button", name="Exclude")).to_have_attribute("aria-pressed", "true")
    assert exported_lines() < before


def test_the_token_of_an_address_is_not_in_copied_links(browser: Browser, stores: Path):
    with serving(stores / "graded", "--host", "0.0.0.0") as address:
        page = browser.new_page()
        page.goto(address)
        expect(page.get_by_role("link", name="graded")).to_be_visible(timeout=TIMEOUT_MS)
        assert "?token=" in address and "token" not in page.url
        page.reload()
        expect(page.get_by_role("link", name="graded")).to_be_visible(timeout=TIMEOUT_MS)
        page.close()


def test_nothing_can_be_written_with_read_only(browser: Browser, stores: Path):
    with serving(stores / "graded", "--read-only") as address:
        watched = Watched(browser, address)
        store = read(address, "/api/stores")["stores"][0]["id"]
        page = watched.open(f"/s/{store}/pairs")
        expect(page.get_by_role("heading", name="Chosen")).to_be_visible()
        expect(page.get_by_role("button", name="left is better")).to_have_count(0)
        watched.page.close()
        assert not watched.faults


def test_a_run_grows_on_the_screen_without_a_reload(watched: Watched, ids: dict[str, str], stores: Path):
    page = watched.open(f"/s/{ids['graded']}")
    expect(page.get_by_text("9 rollouts", exact=True)).to_be_visible()
    with Store.open(stores / "graded") as store:
        wait(store.runs.add_tasks("run1", [calc_task(7)]))
        wait(store.runs.create_rollouts("run1", [("calc-7-0", "calc-7", 0)]))
        expect(page.get_by_text("10 rollouts", exact=True)).to_be_visible(timeout=TIMEOUT_MS)
        expect(page.get_by_text("calc-7")).to_be_visible()


def test_a_database_is_shown_as_it_grows(
    browser: Browser, stores: Path, postgresql_url: StoreUrl, monkeypatch: pytest.MonkeyPatch
):
    with Store.open(stores / "run", create=False) as source, Store.open(postgresql_url) as store:
        copy_store(source, store)
        monkeypatch.setenv("PGPASSWORD", PASSWORD)
        with serving(postgresql_url) as address:
            watched = Watched(browser, address)
            ids = store_ids(address)
            (run,) = ids.values()
            for name in ("rollouts", "tasks", "health", "transcript", "tokens", "patch", "calls"):
                path, content = PAGES[name]
                page = watched.open(path.format(run=run, rollout=rollout_of(address, run)))
                expect(page.get_by_text(content).first).to_be_visible()
            watched.open(f"/s/{run}")
            wait(store.runs.add_tasks(store.runs.all()[0].id, [calc_task(7)]))
            wait(store.runs.create_rollouts(store.runs.all()[0].id, [("calc-7-0", "calc-7", 0)]))
            expect(watched.page.get_by_text("calc-7")).to_be_visible(timeout=TIMEOUT_MS)
            watched.page.close()
            assert not watched.faults


URL_STATE = (
    "q",
    "sort",
    "kind",
    "row",
    "task",
    "turn",
    "call",
    "token",
    "from",
    "without",
    "fold",
    "attempt",
    "colour",
)
HOSTILE_VIEWS = ("transcript", "patch", "integrity", "calls", "timing", "tokens")


def test_hostile_text_is_text_in_every_view(watched: Watched, ids: dict[str, str]):
    assert len(PAYLOADS) >= 60
    store = ids["hostile"]
    views = (
        "",
        "/grid",
        "/health",
        "/pairs",
        "/scatter",
        "/redaction",
        "/report",
        f"/compare?with={ids['graded']}",
    )
    for path in views:
        page = watched.open(f"/s/{store}{path}")
        assert watched.overflow() <= 0, path
    rows = read(watched.url, f"/api/stores/{store}/rollouts?limit=1000")["rollouts"]
    assert len(rows) == len(PAYLOADS)
    for row in rows:
        # Each payload is in all fields of its rollout; each rollout is opened in one of the views, by turns.
        number = int(row["id"].rpartition("-")[2])
        for view in {"transcript", HOSTILE_VIEWS[number % len(HOSTILE_VIEWS)]}:
            page = watched.open(f"/s/{store}/r/{quote(row['id'])}?view={view}")
            assert watched.overflow() <= 0, (number, view)
            assert MARK not in page.title() or MARK in row["task_id"]
            assert (
                page.locator(
                    "main script, main iframe, main object, main embed, main style, main form[action]"
                ).count()
                == 0
            )
            assert not watched.faults, (number, view)


def test_hostile_text_is_text_in_names_labels_and_logs(watched: Watched, ids: dict[str, str]):
    run = next(key for name, key in ids.items() if name.startswith("\u202e"))
    sessions, gateway, loop = (ids[f"placed-{name}"] for name in ("sessions", "gateway", "loop"))
    state = read(watched.url, f"/api/stores/{sessions}/states")["states"][0]["state_id"]
    log, url_state = quote(PLACED, safe=""), "&".join(f"{name}={quote(PLACED, safe='')}" for name in URL_STATE)
    paths = [
        f"/?{url_state}",
        *(
            f"/s/{run}{view}"
            for view in ("", "/health", "/grid", "/pairs", "/report", "/task/calc-0", "/redaction")
        ),
        *(f"/s/{run}/r/placed?view={view}" for view in HOSTILE_VIEWS),
        f"/s/{run}/r/placed?view=patch&log={log}",
        f"/s/{run}/r/{quote(PLACED, safe='')}?view=timing",
        f"/s/{run}/r/placed?{url_state}",
        f"/s/{run}/compare?with={ids['graded']}",
        *(
            f"/s/{sessions}{view}"
            for view in ("", "/states", "/redaction", f"/states?row={quote(state, safe='')}")
        ),
        f"/s/{gateway}",
        f"/s/{loop}",
        f"/s/{loop}/report",
    ]
    for path in paths:
        page = watched.open(path)
        assert watched.overflow() <= 0, path
        inserted = "main script, main iframe, main object, main style, main img, main form[action]"
        assert page.locator(inserted).count() == 0, path
        assert "\u202e" not in page.title() and not page.title().startswith(MARK), path
        # A view whose answer is an error in words logs the status; nothing else may be logged, asked or opened.
        watched.faults = [
            fault for fault in watched.faults if "the server responded with a status of 4" not in fault
        ]
        assert not watched.faults, path


def test_a_line_of_ten_megabytes_is_cut_on_the_screen_with_its_size(watched: Watched, ids: dict[str, str]):
    page = watched.open(f"/s/{ids['long']}/r/long")
    expect(page.get_by_text("10 MB").first).to_be_visible()
    assert page.evaluate("document.querySelector('main').textContent.length") < 100_000
    assert page.evaluate("document.querySelectorAll('*').length") < 3_000
    assert watched.overflow() <= 0


def exported(file: Path, *arguments: object) -> str:
    done = understudy("view", "--export", file, *arguments, "--unredacted")
    assert done.returncode == 0, done.stderr
    return str(file)


def test_an_exported_file_shows_the_same_pages(saved: Watched, stores: Path, tmp_path: Path):
    page = saved.open(exported(tmp_path / "run.html", stores / "graded"))
    expect(page.get_by_text("a saved copy")).to_be_visible()
    expect(page.get_by_role("link", name="Tasks", exact=True)).to_be_visible()
    expect(page.get_by_role("link", name="Redaction")).to_have_count(0)
    page.get_by_role("searchbox").fill("x")
    page.locator("tbody a").first.click()
    expect(page.get_by_role("article", name="Turn 1")).to_be_visible()
    page.keyboard.press("2")
    expect(page.get_by_label("Segments")).to_be_visible()
    page.keyboard.press("3")
    expect(page.get_by_text("t.py::test").first).to_be_visible()
    page.keyboard.press("4")
    expect(page.get_by_text("Time in calls")).to_be_visible()
    expect(page.get_by_role("link", name="Raw calls")).to_have_count(0)
    address = page.url
    assert "view=timing" in address
    again = saved.open(address.removeprefix("file://"))
    expect(again.get_by_text("Time in calls")).to_be_visible()


def test_an_exported_loop_opens_at_its_curves(saved: Watched, stores: Path, tmp_path: Path):
    page = saved.open(exported(tmp_path / "loop.html", stores / "loop"))
    expect(page.get_by_text("Step 2").first).to_be_visible()


def test_a_report_opens_with_its_judgement_and_leads_to_rollouts(saved: Watched, tmp_path: Path):
    evaluations = [solved({f"task-{n}": (n < right, 1) for n in range(20)}) for right in (2, 17)]
    metrics = [{"step": n, "loss": 1 / n} for n in (1, 2)]
    loop = put_loop(tmp_path / "loop", evaluations, [solved({PAYLOADS[0]: (2, 4)})], metrics=metrics)
    done = understudy("report", loop, "--output", tmp_path / "report.html")
    assert done.returncode == 0, done.stderr
    page = saved.open(str(tmp_path / "report.html"))
    expect(page.get_by_text("Better, beyond chance")).to_be_visible()
    expect(page.get_by_text("Solve rate", exact=True).first).to_be_visible()
    assert saved.overflow() <= 0
    page.evaluate(axe_source())
    violations = page.evaluate("axe.run({resultTypes: ['violations']}).then((result) => result.violations)")
    assert not [each["id"] for each in violations if each["impact"] in ("serious", "critical")]
    page.get_by_role("link", name="step 0").click()
    expect(page.get_by_text("20 rollouts", exact=True)).to_be_visible()
    page.go_back()
    page.get_by_role("link", name="Loop", exact=True).last.click()
    expect(page.get_by_role("button", name="1", exact=True)).to_be_visible()


def test_hostile_text_is_text_in_an_exported_file(saved: Watched, stores: Path, tmp_path: Path):
    file = exported(tmp_path / "hostile.html", stores / "hostile")
    page = saved.open(file)
    store = page.url.partition("#")[2]
    for number in range(len(PAYLOADS)):
        view = HOSTILE_VIEWS[number % len(HOSTILE_VIEWS)]
        page.goto(f"file://{file}#{store}/r/hostile-{number:02d}?view={'transcript' if view == 'calls' else view}")
        expect(page.get_by_label("Views of the rollout")).to_be_visible()
        expect(page.get_by_text("Loading…")).to_have_count(0)
        assert page.locator("main script, main iframe, main object, main style, main form[action]").count() == 0
        assert saved.overflow() <= 0 and not saved.faults, (number, view)


def test_what_an_address_names_and_the_store_lacks_is_said(watched: Watched, ids: dict[str, str]):
    rollout = f"/s/{ids['run']}/r/{rollout_of(watched.url, ids['run'])}"
    for path, message in (
        (f"{rollout}?view=calls&call=nope", "There is no call “nope” here: the first call"),
        (f"{rollout}?view=calls&turn=9999", "There is no turn 9999 here: the first call"),
        (f"{rollout}?turn=9999", "There is no turn 9999 here: turn 4 of 4 is shown"),
        (f"/s/{ids['graded']}/pairs?pair=nope", "There is no pair “nope” here: the first pair is shown"),
        ("/report", "The address names no run."),
    ):
        page = watched.open(path)
        expect(page.get_by_text(message)).to_be_visible(timeout=TIMEOUT_MS)
    page = watched.open(f"/s/{ids['run']}/compare")
    options = page.get_by_label("Compare with").locator("option").all_inner_texts()
    assert "graded" in options and "loop" not in options
