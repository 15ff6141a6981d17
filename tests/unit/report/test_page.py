"""The page, the picture and the plot: whole, safe whatever the names in them are, and quick for many rollouts."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from understudy.report.figures import ReportFigures
from understudy.report.html import page
from understudy.report.read import read_figures
from understudy.report.terminal import spark, terminal, whisker

from support import understudy
from support.report import End, put_loop, put_many, put_run, solved

VOID = {"meta", "br", "hr", "img", "input", "link"}
SELF_CLOSED = {"line", "circle", "rect", "polyline", "polygon"}
HOSTILE = (
    "<script>document.title='owned'</script>",
    "\"><img src=x onerror=\"document.title='owned'\">",
    "'/><svg onload=document.title='owned'>",
    "</title></style></code><h1>OWNED</h1>",
    "\x1b[31mred\x1b]0;t\x07\x00\u202egnp.exe",
    "&lt;b&gt; &amp;copy; ${7*7} {title} {{x}} [bold]rich[/bold] $\\frac{1}{0}$",
    "<!-- ", "]]>", "漢字 🙂 \ufffd",
)  # fmt: skip


class Reader(HTMLParser):
    """Checks that elements are closed in order, and keeps tags, attributes and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.text: list[str] = []
        self.title = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in SELF_CLOSED, tag
        self.tags.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> closes {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["style"]:
            return
        if self.open[-1:] == ["title"] and "body" not in self.open:
            self.title += data
        self.text.append(data)


def parsed(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == []
    return reader


def printed(figures: ReportFigures) -> str:
    out = StringIO()
    Console(file=out, width=140, markup=False, highlight=False, emoji=False).print(terminal(figures))
    return out.getvalue()


def looped(root: Path) -> Path:
    evaluations = [solved({f"task-{n}": (n < right, 1) for n in range(20)}) for right in (2, 9, 17)]
    metrics = [{"step": n, "loss": 1 / n, "mismatch_max": 0.001 * n, "skipped": {"too long": n}} for n in (1, 2)]
    return put_loop(root, evaluations, [solved({"x": (2, 4)}), solved({"x": (3, 4)})], metrics=metrics)


def hostile(root: Path) -> Path:
    """A loop in which whatever can be named is named in a hostile way."""
    ends = {
        name: [End(float(n % 2), version=name, reason=name), End(None, boundary="agent", reason=name)]
        for n, name in enumerate(HOSTILE)
    }
    metrics = [{"step": n, HOSTILE[0]: n, "version": HOSTILE[1], "skipped": {HOSTILE[2]: n}} for n in (1, 2)]
    loop = put_loop(root / "<b>&'\"", [ends, ends], [ends], metrics=metrics)
    config = json.loads((loop / "loop.json").read_text())
    config["model"] = HOSTILE[3]
    (loop / "loop.json").write_text(json.dumps(config))
    return loop


def test_a_page_is_whole_and_says_the_judgement_first(tmp_path: Path):
    reader = parsed(page(read_figures([looped(tmp_path / "loop")])))
    assert reader.title == "loop: Better, beyond chance"
    text = " ".join(reader.text)
    for said in (
        "+75",
        "17 of 20, step 2",
        "by task: p < 0.001 over 20 tasks",
        "Solve rate",
        "Mean reward",
        "Turns",
    ):
        assert said in text
    for said in ("Sampled tokens", "Mismatch, greatest", "Failures by boundary", "Policy versions", "task-19"):
        assert said in text
    assert re.search(r"too long\s+3", text)
    assert reader.tags.count("svg") > 20


def test_a_page_needs_nothing_else_and_runs_nothing(tmp_path: Path):
    html = page(read_figures([looped(tmp_path)]))
    reader = parsed(html)
    assert not {"script", "link", "img", "iframe", "object", "form", "a", "base", "foreignObject"} & set(
        reader.tags
    )
    assert not any(name.startswith("on") or name in ("src", "href", "action") for _, name, _ in reader.attributes)
    assert "http://" not in html and "https://" not in html and "url(" not in html and "@import" not in html
    policies = [value for tag, name, value in reader.attributes if tag == "meta" and name == "content"]
    assert "default-src 'none'; style-src 'unsafe-inline'" in policies


def test_hostile_names_are_shown_and_do_nothing(tmp_path: Path):
    figures = read_figures([hostile(tmp_path)])
    html = page(figures)
    reader = parsed(html)
    assert not {"script", "img", "b>", "h1>"} & set(reader.tags)
    assert reader.tags.count("h1") == 1
    assert not any(name.startswith("on") for _, name, _ in reader.attributes)
    text = "".join(reader.text)
    for name in (*HOSTILE[:4], HOSTILE[5]):
        assert name in text
    assert "␛[31mred␛]0;t␇␀\\u202egnp.exe" in text
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", html)
    shown = printed(figures)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", shown)


def test_a_picture_of_anything(tmp_path: Path):
    pytest.importorskip("matplotlib")
    from understudy.report.picture import draw

    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    compared = [put_run(tmp_path / name, {"a": [End(1.0)]}) for name in ("漢字 $x^2$", "<b>")]
    empty = put_run(tmp_path / "pending", {"a": [End(None)]})
    for number, directories in enumerate(([hostile(tmp_path)], [tmp_path / "one"], compared, [empty])):
        target = tmp_path / f"{number}.png"
        draw(read_figures(directories), target)
        assert target.read_bytes().startswith(b"\x89PNG\r\n")
    assert not list(tmp_path.glob(".*.new"))


def test_of_a_single_rollout_no_interval_is_drawn_and_that_is_said(tmp_path: Path):
    note = "only one rollout is graded in step 0: its turns, tokens and time have no confidence interval"
    root = put_loop(tmp_path / "loop", [{"a": [End(0.4)]}, solved({"a": (3, 4)})])
    figures = read_figures([root])
    single, several = figures.points
    assert single.turns is not None and (single.turns.low, single.turns.high) == (None, None)
    assert single.reward is not None and (single.reward.low, single.reward.high) == (None, None)
    assert several.turns is not None and several.turns.low is not None
    charts = dict(re.findall(r"<figcaption><b>([^<]*)</b>.*?(<svg.*?</svg>)", page(figures), re.DOTALL))
    # One whisker each: that of the point with four rollouts. Of the rate Wilson's interval is known for one too.
    assert [charts[name].count('class="whisker') for name in ("Solve rate", "Mean reward", "Turns")] == [2, 1, 1]
    assert "of one rollout, so without an interval" in charts["Turns"]
    assert note in page(figures) and note in printed(figures).replace("\n", " ")
    told = understudy("report", root, "--json")
    reported = json.loads(told.stdout)
    assert reported["points"][0]["turns"]["low"] is None and note in reported["notes"]


def test_unfinished_and_empty_ones_have_a_page_too(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    for directory in (empty, put_run(tmp_path / "pending", {"a": [End(None)]}), put_loop(tmp_path / "loop", [])):
        figures = read_figures([directory])
        assert "Nothing is graded yet" in "".join(parsed(page(figures)).text)
        assert "Nothing is graded yet" in printed(figures)


def test_the_plot_has_the_interval_in_its_place():
    assert whisker(0.25, 0.5, 0.75, 21, "blue").plain == "│    ├────●────┤    │"
    assert whisker(0.0, 0.0, 0.1, 21, "blue").plain == "●─┤       ·         │"
    assert whisker(1.0, 1.0, 1.0, 3, "blue").plain == "│·●"
    assert spark([0.0, 1.0, 2.0]) == "▁▅█" and spark([3.0, 3.0]) == "▄▄"


def test_ten_thousand_rollouts_take_seconds(tmp_path: Path):
    """Bounded by what would be an accident: a query for each rollout, or a cell for each of them."""
    directories = [put_many(tmp_path / name, tasks=1000, samples=5, turns=10) for name in ("a", "b")]
    began = time.process_time()
    figures = read_figures(directories)
    html = page(figures)
    assert time.process_time() - began < 20
    assert sum(point.graded for point in figures.points) == 10_000 and len(figures.tasks) == 1000
    assert len(html) < 2_000_000 and "--json has all" in html
    parsed(html)


def test_the_command(tmp_path: Path):
    loop = looped(tmp_path / "loop")
    done = understudy("report", loop)
    assert done.returncode == 0, done.stderr
    assert "Better, beyond chance" in done.stdout and "17/20" in done.stdout and "├" in done.stdout
    assert (loop / "report.html").read_text().startswith("<!doctype html>")
    target = tmp_path / "deep" / "other.html"
    done = understudy("report", loop, "--json", "--output", target)
    told = json.loads(done.stdout)
    assert told["headline"]["difference"]["judgement"] == "better" and target.exists()
    for arguments, said in (
        ((tmp_path / "none",), "neither a run"),
        ((loop, "--output", tmp_path), "is a directory"),
        ((loop, "--output", "/proc/nowhere/x.html"), "cannot be written"),
        ((loop, "--output", target / "x.html"), "cannot be written"),
        ((loop, "--label", "a", "--label", "b"), "2 labels for 1 runs"),
        ((loop, "--png", "--output", tmp_path / "x.png"), "give " + str(tmp_path / "x.html")),
    ):
        failed = understudy("report", *arguments)
        assert failed.returncode == 2 and said in failed.stderr and "Traceback" not in failed.stderr


def test_the_page_of_a_training_is_no_part_of_the_model(tmp_path: Path):
    place = tmp_path / "model" / "training"
    place.mkdir(parents=True)
    (place / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n')
    done = understudy("report", tmp_path / "model", "--png")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["training"]
    assert {path.name for path in place.iterdir()} == {"metrics.jsonl", "report.html", "report.png"}


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(tmp_path: Path):
    run = put_run(tmp_path / "run", {"a": [End(1.0)]})
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"sys.argv = ['understudy', 'report', {str(run)!r}, '--png']\n"
        "from understudy.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "understudy[train]" in done.stderr


@pytest.mark.services
def test_in_a_real_browser_nothing_of_it_runs(tmp_path: Path):
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no chromium here; the page is read by a parser above")
    file = tmp_path / "page.html"
    file.write_text(page(read_figures([hostile(tmp_path)])), encoding="utf-8")
    quiet = ["--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", *quiet, f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [browser, *options, "--dump-dom", file.as_uri()], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    seen = parsed(done.stdout)
    assert seen.title.endswith("No difference beyond chance") and seen.tags.count("h1") == 1
    assert "owned" not in seen.title and not {"script", "img"} & set(seen.tags)
    assert any(HOSTILE[0] in text for text in seen.text)
