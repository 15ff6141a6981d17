"""`understudy view --export`: one file with the page and its data, redacted, whole and bounded."""

from __future__ import annotations

import json
import re
import stat
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.view.api import ViewApi
from understudy.view.catalog import Catalog
from understudy.view.export import REDACTED_TOKEN, redact_responses
from understudy.view.routes import RedactionQuery, TurnQuery
from understudy.view.schema.rollouts import SegmentView, TokenPage

from support import understudy
from support.export import put_attempt, put_rollouts, put_sessions, session
from support.hostile import PAYLOADS, put_hostile_run
from support.report import put_loop, solved
from support.trajectory import Session, as_chat, assistant, text, tool_result, tool_use, user

SECRET = "ghp_" + "A1b2C3d4E5f6G7h8I9j0K1l2M3n4O5p6Q7r8"[:36]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UNDERSTUDY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


class Document(HTMLParser):
    """The elements of a document, and what stands in its scripts."""

    def __init__(self, content: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.feed(content)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] == "script":
            self.scripts[-1] += data

    @property
    def data(self) -> dict[str, Any]:
        return json.loads(self.scripts[0])

    @property
    def answers(self) -> dict[str, Any]:
        return self.data["answers"]


def exported(file: Path, *arguments: object) -> tuple[Document, dict[str, Any]]:
    done = understudy("view", "--export", file, *arguments, "--json")
    assert done.returncode == 0, done.stderr
    return Document(file.read_text(encoding="utf-8")), json.loads(done.stdout)


def put_one(directory: Path, session: Session) -> Path:
    """A run of one rollout with the calls of a session."""
    with Store.open(directory) as store:
        put_attempt(store, session.calls)
    return directory


def put_secret_run(directory: Path) -> Path:
    """A run of a rollout in which what is read and written has a token and a home directory in it."""
    talk = Session("ignored")
    use = tool_use("t1", name="Bash", command=f"curl -H 'authorization: {SECRET}' x")
    ask = user(text("read /home/ada/notes"))
    talk.ask([ask], [text("I do."), use], prompt=[1, 2], completion=[3, 4], logprobs=[-0.1, -0.2])
    talk.ask([ask, assistant(text("I do."), use), user(tool_result("t1", f"ok {SECRET}"))], [text("done")])
    return put_one(directory, talk)


def put_graded(directory: Path) -> Path:
    put_rollouts(directory, tasks=2, samples=2)
    return directory


def test_a_file_has_every_answer_that_its_page_asks_for(tmp_path: Path):
    run = put_graded(tmp_path / "run")
    document, summary = exported(tmp_path / "run.html", run, "--unredacted")
    answers = document.answers
    store = next(key for key in answers if key.endswith("/health")).removesuffix("/health")
    rows = answers[f"{store}/rollouts"]["rollouts"]
    assert (len(rows), summary["rollouts"], summary["redacted"]) == (4, 4, False)
    assert document.data["start"] == "/s/" + store.rpartition("/")[2]
    for row in rows:
        base = f"{store}/rollouts/{row['id']}"
        head = answers[base]
        assert (
            len(answers[f"{base}/turns"]["turns"]) == head["turns"] == len(answers[f"{base}/calls"]["calls"]) > 0
        )
        assert answers[f"{base}/patch"]["patch"]["text"]
        for call in head["segment_calls"]:
            assert len(answers[f"{base}/tokens?call={call}"]["ids"]) > 0
        assert f"{store}/group?task={row['task_id']}" in answers
    listed = answers["/api/stores"]
    assert listed["may_write"] is False and listed["directories"] == [] and listed["stores"][0]["path"] == "run"
    assert str(tmp_path) not in json.dumps(answers)


def test_a_file_loads_and_runs_nothing_but_its_own_script(tmp_path: Path):
    run = put_hostile_run(tmp_path / "hostile")
    file = tmp_path / "hostile.html"
    document, summary = exported(file, run, "--unredacted")
    assert summary["rollouts"] == len(PAYLOADS)
    tags = [tag for tag, _ in document.tags]
    assert tags.count("script") == 2 and tags.count("style") == 1
    assert not {"img", "link", "iframe", "object", "embed", "base", "form", "svg"} & set(tags)
    assert not any(name.startswith("on") or name in ("src", "href") for _, each in document.tags for name in each)
    policy = next(each["content"] for tag, each in document.tags if tag == "meta" and "http-equiv" in each)
    assert policy is not None and policy.startswith("default-src 'none'; img-src data:; script-src 'sha256-")
    # Every payload is in the data as it was stored, and none of them is markup.
    data = document.scripts[0]
    assert "<" not in data
    texts = {block["text"] for key, answer in document.answers.items() if key.endswith("/turns")
             for turn in answer["turns"] for block in turn["asked"]}  # fmt: skip
    assert {payload for payload in PAYLOADS if payload.strip()} <= texts


def test_a_file_is_redacted_unless_told_otherwise(tmp_path: Path):
    run = put_secret_run(tmp_path / "run")
    file = tmp_path / "run.html"
    document, summary = exported(file, run)
    content = file.read_text(encoding="utf-8")
    assert SECRET not in content and "/home/ada" not in content
    assert summary["replaced"]["github-token"] >= 1 and summary["redacted"]
    assert any("tokens are left out" in note for note in summary["notes"])
    assert not any("/tokens?" in key for key in document.answers)
    plain = tmp_path / "plain.html"
    exported(plain, run, "--unredacted")
    assert SECRET in plain.read_text(encoding="utf-8")
    assert stat.S_IMODE(plain.stat().st_mode) == 0o600


def test_what_a_client_writes_beside_an_image_is_not_read(tmp_path: Path):
    talk = Session("ignored")
    parts = [
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA", "size": "x", "media_type": 3}},
        {"type": "image_url", "image_url": {"url": "https://example.invalid/a.png", "size": ["y"]}},
    ]
    call = talk.ask([user(text("ignored"))], [text("ignored")])
    run = put_one(tmp_path / "run", Session("ignored"))
    with Store.open(run) as store:
        attempt = next(iter(store.runs.attempts("r0"))).id
        sent = as_chat(call, [{"role": "user", "content": parts}], "I see.")
        store.calls.append(replace(sent, attempt_id=attempt)).result()
    document, _ = exported(tmp_path / "run.html", run)
    (page,) = (answer for key, answer in document.answers.items() if key.endswith("/turns"))
    images = [image for block in page["turns"][0]["asked"] for image in block["images"]]
    assert images == [{"media_type": "image/png", "size": 3}, {"media_type": "", "size": 0}]
    api = ViewApi(Catalog([run]))
    parts_of_route = {"store": api.catalog.scan()[0].id}
    assert api.preview_redaction(parts_of_route, RedactionQuery(rollout="r0"))
    assert api.list_turns({**parts_of_route, "rollout": "r0"}, TurnQuery()).turns[0].asked[0].images
    api.close()


def test_the_ranges_of_a_text_that_redaction_replaces():
    scope = Redactor(b"k" * 32).scoped_to([SECRET])
    text = f"a {SECRET} b {SECRET}"
    spans = scope.spans(text)
    assert [text[start:end] for start, end in spans] == [SECRET, SECRET]
    assert scope.spans("nothing of the kind") == []


def test_chosen_rollouts_alone_and_a_loop_with_its_waves(tmp_path: Path):
    run = put_graded(tmp_path / "run")
    with Store.open(run, create=False, read_only=True) as store:
        chosen = next(iter(store.runs.rollouts("run1"))).id
    document, summary = exported(tmp_path / "one.html", run, chosen)
    assert summary["rollouts"] == 1 and document.data["start"].endswith(f"/r/{chosen}")
    rows = next(each for key, each in document.answers.items() if key.endswith("/rollouts"))
    assert [row["id"] for row in rows["rollouts"]] == [chosen] and rows["total"] == 1
    loop = put_loop(tmp_path / "loop", [solved({"a": (1, 2)})], [solved({"b": (1, 2)})])
    document, summary = exported(tmp_path / "loop.html", loop)
    stores = document.answers["/api/stores"]["stores"]
    assert [each["kind"] for each in stores] == ["loop", "run", "run"] and summary["rollouts"] == 0
    assert any(re.fullmatch(r"/api/stores/\w+/loop", key) for key in document.answers)


def test_what_cannot_be_exported_is_refused_in_words(tmp_path: Path):
    talk = Session("ignored")
    talk.ask([user(text("x" * 1_200_000))], [text("y")])
    run = put_one(tmp_path / "run", talk)
    put_sessions(logs := tmp_path / "logs", [session("s0")])
    file = tmp_path / "file.html"
    for arguments, message in (
        ((), "expected a run or a loop to write into this file, got none"),
        ((tmp_path / "none",), "does not exist; give a directory"),
        ((tmp_path,), "has no store, expected a run or a loop; give the directory of one"),
        ((logs,), "a store of kind `sessions`"),
        ((run, "nothing"), "has no rollout 'nothing'"),
        ((run, "--max-mb", 1), "larger than 1 MB"),
    ):
        failed = understudy("view", "--export", file, *arguments)
        assert failed.returncode == 2 and message in failed.stderr, (arguments, failed.stderr)
        assert "Traceback" not in failed.stderr and not file.exists()
    failed = understudy("view", "--export", tmp_path, run)
    assert failed.returncode == 2 and "is a directory" in failed.stderr
    failed = understudy("view", "--unredacted", run)
    assert failed.returncode == 2 and "nothing is redacted in the browser" in failed.stderr


def test_tokens_of_a_secret_are_hidden_one_by_one():
    texts = ("my key: ", SECRET[:7], SECRET[7:20], SECRET[20:], " is it", "")
    count = len(texts)
    segment = SegmentView(
        index=0, reason="first call", branch="main", role="main", calls=1, tokens=count, sampled=1,
        superseded=False,
    )  # fmt: skip
    page = TokenPage(
        call_id="c1", segment=segment, start=0, total=count, next=None, call_start=0, call_end=count,
        ids=tuple(range(count)), texts=texts, logprobs=(None,) * count, mask=(0,) * count, versions=(-1,) * count,
        policy_versions=(), tokenizer="t",
    )  # fmt: skip
    notes: list[str] = []
    _, tokens, _ = redact_responses(
        {}, {"/t": page, "/u": replace(page, texts=())}, "", Redactor(b"k" * 32), notes
    )
    assert tokens["/t"].texts == ("my key: ", "█", "█", "█", " is it", "")
    assert tokens["/t"].ids == (0, REDACTED_TOKEN, REDACTED_TOKEN, REDACTED_TOKEN, 4, 5)
