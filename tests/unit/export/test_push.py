"""`understudy push` against a hub on loopback: what goes there, who may, and what is refused."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats import trl
from understudy.redact.redactor import Redactor
from understudy.store import Store

import support
from fakes.hub import Hub
from support import optional
from support.export import Log, put_rollouts, put_sessions, session

optional("pyarrow")

TOKEN = "hf_good"


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub(TOKEN) as running:
        yield running


def understudy(*arguments: object, home: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": "/usr/bin:/bin", "HOME": str(home), "HF_HUB_DISABLE_XET": "1", **environment}
    return support.understudy(*arguments, env=env, inherit=False)


def exported(tmp_path: Path, *, test_share: float = 0.1, unredacted: bool = False) -> Path:
    log = Log("noise")
    log.answer(log.user(-1, "".join(map(chr, range(0x4E00, 0x5E00)))), "Long.")
    put_sessions(tmp_path / "store", [session(), log.trace])
    put_rollouts(tmp_path / "store")
    out = tmp_path / "out"
    with Store.open(tmp_path / "store", create=False) as store:
        corpus = Corpus(store, ExportSelection(test_share=test_share), Redactor(bytes(32)), unredacted=unredacted)
        trl.export_sft(corpus, out)
    return out


def test_everything_of_an_export_and_nothing_else_arrives_once(tmp_path: Path, hub: Hub):
    out = exported(tmp_path, test_share=0.0)
    (out / "private-notes.txt").write_text("mine")
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    hub.broken = True
    cut = understudy("push", out, "ann/traces", home=tmp_path, **environment)
    assert cut.returncode == 2 and "500" in cut.stderr
    hub.broken = False
    done = understudy("push", out, "ann/traces", home=tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert hub.files["ann/traces"] == {
        name: (out / name).read_bytes() for name in ("README.md", "train.parquet", "understudy.json")
    }
    assert hub.private["ann/traces"] is True
    assert hub.sent, "a file is large enough to go by LFS"
    assert len(hub.sent) == len(set(hub.sent)), "what was there after the cut is not sent again"
    assert hub.commits == ["ann/traces"]
    assert f"{hub.url}/datasets/ann/traces" in done.stdout
    for process in (cut, done):
        assert TOKEN not in process.stdout + process.stderr


def test_a_dry_run_sends_nothing(tmp_path: Path, hub: Hub):
    out = exported(tmp_path)
    done = understudy("push", out, "ann/traces", "--dry-run", "--json", home=tmp_path, HF_ENDPOINT=hub.url)
    report = json.loads(done.stdout)
    assert (report["repo"], report["private"], report["url"]) == ("ann/traces", True, None)
    assert report["files"]["README.md"] == (out / "README.md").stat().st_size
    assert hub.requests == []


def test_push_creates_a_private_repository_unless_public_is_given(tmp_path: Path, hub: Hub):
    out = exported(tmp_path)
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    public = understudy("push", out, "ann/open", "--public", home=tmp_path, **environment)
    assert public.returncode == 0 and "PUBLIC" in public.stdout
    assert hub.private["ann/open"] is False
    before = dict(hub.files["ann/open"])
    (out / "README.md").write_text("---\n---\nmine, and longer than it was\n")
    refused = understudy("push", out, "ann/open", home=tmp_path, **environment)
    assert refused.returncode == 2 and "is public" in refused.stderr
    assert hub.files["ann/open"] == before


def test_push_of_unredacted_sessions_needs_confirmation(tmp_path: Path, hub: Hub):
    out = exported(tmp_path, unredacted=True)
    environment = {"HF_ENDPOINT": hub.url, "HF_TOKEN": TOKEN}
    refused = understudy("push", out, "ann/traces", home=tmp_path, **environment)
    assert refused.returncode == 2 and "--unredacted" in refused.stderr
    assert hub.requests == []
    confirmed = understudy("push", out, "ann/traces", "--unredacted", home=tmp_path, **environment)
    assert confirmed.returncode == 0, confirmed.stderr


def test_a_manifest_without_the_redaction_flag_counts_as_unredacted(tmp_path: Path, hub: Hub):
    out = exported(tmp_path)
    manifest = json.loads((out / "understudy.json").read_text())
    del manifest["unredacted"]
    (out / "understudy.json").write_text(json.dumps(manifest))
    refused = understudy("push", out, "ann/traces", home=tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=TOKEN)
    assert refused.returncode == 2 and "contains unredacted sessions" in refused.stderr and hub.requests == []


def test_push_of_an_incomplete_or_changed_export_is_refused(tmp_path: Path, hub: Hub):
    home = tmp_path
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "is not an export" in understudy("push", empty, "ann/x", home=home, HF_ENDPOINT=hub.url).stderr
    out = exported(tmp_path)
    assert "invalid repository name" in understudy("push", out, "a/b/c", home=home, HF_ENDPOINT=hub.url).stderr
    data = next(out.glob("*.parquet"))
    data.write_bytes(data.read_bytes() + b"x")
    assert (
        "changed since it was exported" in understudy("push", out, "ann/x", home=home, HF_ENDPOINT=hub.url).stderr
    )
    data.unlink()
    assert (
        "missing, or not inside the export"
        in understudy("push", out, "ann/x", home=home, HF_ENDPOINT=hub.url).stderr
    )
    assert hub.requests == []


@pytest.mark.parametrize("token", ["hf_wrong", ""])
def test_a_missing_or_rejected_token_is_reported_with_how_to_log_in(tmp_path: Path, hub: Hub, token: str):
    out = exported(tmp_path)
    done = understudy("push", out, "ann/traces", home=tmp_path, HF_ENDPOINT=hub.url, HF_TOKEN=token)
    assert done.returncode == 2
    assert "hf auth login" in done.stderr and "Traceback" not in done.stderr
    assert not token or token not in done.stdout + done.stderr


def test_an_unreachable_hub_is_reported(tmp_path: Path):
    out = exported(tmp_path)
    endpoint = "http://127.0.0.1:9"
    done = understudy("push", out, "ann/traces", home=tmp_path, HF_ENDPOINT=endpoint, HF_TOKEN=TOKEN)
    assert done.returncode == 2 and "cannot be reached" in done.stderr and "Traceback" not in done.stderr
