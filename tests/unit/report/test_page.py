"""The page, the picture and the plot: safe whatever the names in them are, and quick for many rollouts."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from contextlib import closing
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from understudy.report.figures import ReportFigures
from understudy.report.read import read_figures
from understudy.report.terminal import spark, terminal, whisker
from understudy.view.export import export_report

from support import understudy
from support.report import End, put_loop, put_many, put_run, solved

HOSTILE = (
    "<script>document.title='owned'</script>",
    "\"><img src=x onerror=\"document.title='owned'\">",
    "'/><svg onload=document.title='owned'>",
    "</title></style></code><h1>OWNED</h1>",
    "\x1b[31mred\x1b]0;t\x07\x00\u202egnp.exe",
    "&lt;b&gt; &amp;copy; ${7*7} {title} {{x}} [bold]rich[/bold] $\\frac{1}{0}$",
    "<!-- ", "]]>", "漢字 🙂 \ufffd",
)  # fmt: skip


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


def page(directories: list[Path]) -> tuple[dict[str, Any], str]:
    """What the page of a report has to show, and the whole document."""
    figures = read_figures(directories)
    answers, start = export_report(figures, directories)
    with closing(answers.api):
        document = answers.page(start, figures.title, None).content.decode()
    data = re.findall(r'<script type="application/json" id="understudy-data">(.*?)</script>', document, re.DOTALL)
    assert len(data) == 1 and "<" not in data[0]
    return json.loads(data[0]), document


def report_of(directory: Path) -> dict[str, Any]:
    return page([directory])[0]["answers"]["/api/report"]


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


def test_a_page_says_the_judgement_and_opens_at_the_loop(tmp_path: Path):
    data, document = page([looped(tmp_path / "loop")])
    report = data["answers"]["/api/report"]
    assert report["verdict"] == "Better, beyond chance" and report["mood"] == "better"
    assert "17 of 20, step 2" in report["sentence"]
    assert {"holds": True, "text": "by task: p < 0.001 over 20 tasks in both"} in report["reasons"]
    titles = [chart["title"] for chart in (*report["charts"], *report["training"])]
    assert titles == ["Solve rate", "Mean reward", "Sampled tokens", "Turns", "Mismatch, greatest", "Loss"]
    assert [curve["main"] for curve in report["charts"][0]["curves"]] == [False, True]
    assert re.fullmatch(r"/s/\w+/report", data["start"])
    store = data["start"].split("/")[2]
    assert len(data["answers"][f"/api/stores/{store}/loop"]["steps"]) == 2
    # Each evaluation leads to its rollouts, which the file lists.
    for each in report["point_stores"]:
        assert data["answers"][f"/api/stores/{each}/rollouts"]["total"] == 20
    assert str(tmp_path) not in document


def test_hostile_names_are_data_and_no_markup(tmp_path: Path):
    directory = hostile(tmp_path)
    data, document = page([directory])
    report = data["answers"]["/api/report"]
    assert set(report["figures"]["unsolved"]) == {name for n, name in enumerate(HOSTILE) if not n % 2}
    for name in HOSTILE[:3]:
        assert name not in document
    assert document.count("</script>") == 2 and document.count("<title>") == 1
    output = printed(read_figures([directory]))
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f\u202e]", output)


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
    report = report_of(root)
    charts = {chart["title"]: chart["curves"][-1] for chart in report["charts"]}
    # Bounds of the point with four rollouts alone. Of the rate Wilson's interval is known for one too.
    drawn = [
        sum(low is not None for low in charts[name]["low"]) for name in ("Solve rate", "Mean reward", "Turns")
    ]
    assert drawn == [2, 1, 1]
    assert note in report["figures"]["notes"] and note in printed(figures).replace("\n", " ")
    completed = understudy("report", root, "--json")
    reported = json.loads(completed.stdout)
    assert reported["points"][0]["turns"]["low"] is None and note in reported["notes"]


def test_unfinished_and_empty_ones_have_a_page_too(tmp_path: Path):
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    for directory in (empty, put_run(tmp_path / "pending", {"a": [End(None)]}), put_loop(tmp_path / "loop", [])):
        figures = read_figures([directory])
        assert report_of(directory)["verdict"] == "Nothing is graded yet"
        assert "Nothing is graded yet" in printed(figures)


def test_the_plot_has_the_interval_in_its_place():
    assert whisker(0.25, 0.5, 0.75, 21, "blue").plain == "│    ├────●────┤    │"
    assert whisker(0.0, 0.0, 0.1, 21, "blue").plain == "●─┤       ·         │"
    assert whisker(1.0, 1.0, 1.0, 3, "blue").plain == "│·●"
    assert spark([0.0, 1.0, 2.0]) == "▁▅█" and spark([3.0, 3.0]) == "▄▄"


@pytest.mark.services
def test_ten_thousand_rollouts_take_seconds(tmp_path: Path):
    """Bounded by what would be an accident: a query for each rollout, or a cell for each of them."""
    directories = [put_many(tmp_path / name, tasks=1000, samples=5, turns=10) for name in ("a", "b")]
    began = time.process_time()
    figures = read_figures(directories)
    data, document = page(directories)
    assert time.process_time() - began < 30
    assert sum(point.graded for point in figures.points) == 10_000 and len(figures.tasks) == 1000
    assert len(data["answers"]["/api/report"]["figures"]["tasks"]) == 1000 and len(document) < 3_000_000
    assert data["start"] == "/report" and not any(key.endswith("/rollouts") for key in data["answers"])


def test_the_command(tmp_path: Path):
    loop = looped(tmp_path / "loop")
    done = understudy("report", loop)
    assert done.returncode == 0, done.stderr
    assert "Better, beyond chance" in done.stdout and "17/20" in done.stdout and "├" in done.stdout
    assert (loop / "report.html").read_text().startswith("<!doctype html>")
    target = tmp_path / "deep" / "other.html"
    done = understudy("report", loop, "--json", "--output", target)
    summary = json.loads(done.stdout)
    assert summary["headline"]["difference"]["judgement"] == "better" and target.exists()
    for arguments, expected in (
        ((tmp_path / "none",), "there is no directory"),
        ((loop, "--output", tmp_path), "is a directory"),
        ((loop, "--output", "/proc/nowhere/x.html"), "cannot be written"),
        ((loop, "--output", target / "x.html"), "cannot be written"),
        ((loop, "--label", "a", "--label", "b"), "2 labels for 1 runs"),
        ((loop, "--png", "--output", tmp_path / "x.png"), "such as " + str(tmp_path / "x.html")),
    ):
        failed = understudy("report", *arguments)
        assert failed.returncode == 2 and expected in failed.stderr and "Traceback" not in failed.stderr


def test_the_page_of_a_training_is_no_part_of_the_model(tmp_path: Path):
    directory = tmp_path / "model" / "training"
    directory.mkdir(parents=True)
    (directory / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0, "grad_norm": 1.0}\n')
    done = understudy("report", tmp_path / "model", "--png")
    assert done.returncode == 0, done.stderr
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["training"]
    assert {path.name for path in directory.iterdir()} == {"metrics.jsonl", "report.html", "report.png"}


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(tmp_path: Path):
    run = put_run(tmp_path / "run", {"a": [End(1.0)]})
    script = (
        "import sys; sys.modules['matplotlib'] = None\n"
        f"sys.argv = ['understudy', 'report', {str(run)!r}, '--png']\n"
        "from understudy.cli.main import main; main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "understudy[train]" in done.stderr
