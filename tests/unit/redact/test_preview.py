"""What a redaction would replace, before it is done."""

from __future__ import annotations

import json
from pathlib import Path

from understudy.ingest.redaction_preview import file_conversations, preview_redaction
from understudy.redact.redactor import Redactor

from support import understudy

PASSWORD, OTHER = "Vt7!kq2Zp9wL", "Xk4#mn8Rb2vT"
LOG = f"> which files?\n\n● Bash(cat .env)\n  ⎿  DB_PASSWORD={PASSWORD} in /Users/alex/x\n\n● One\n"


def test_a_preview_counts_replacements_and_values_and_samples_hold_no_secret() -> None:
    conversations = [
        ("one", [f"DB_PASSWORD={PASSWORD}\n", {"content": f"it is {PASSWORD}, in /Users/alex/x"}]),
        ("two", [f"DB_PASSWORD={PASSWORD} and\nAPI_PASSWORD={OTHER}\n"]),
        ("three", ["nothing"]),
    ]
    preview = preview_redaction(conversations, Redactor(b"k" * 32, betterleaks=False), samples=1)
    assert preview.conversations == 3
    assert preview.replaced == {"assignment": 4, "home-path": 1}
    assert preview.values == {"assignment": 2, "home-path": 1}
    assert [(sample.rule, sample.where) for sample in preview.samples] == [
        ("assignment", "one"),
        ("home-path", "one"),
    ]
    assert "SECRET_" in preview.samples[0].context
    contexts = " ".join(sample.context for sample in preview.samples)
    assert PASSWORD not in contexts and OTHER not in contexts and "alex" not in contexts


def test_a_session_log_is_read_as_conversations_and_any_other_file_as_text(tmp_path: Path) -> None:
    (tmp_path / "notes.md").write_text(f"DB_PASSWORD={PASSWORD}\n")
    [(name, values)] = file_conversations(tmp_path / "notes.md")
    assert (name, values) == ("notes.md", [f"DB_PASSWORD={PASSWORD}\n"])
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "session.txt").write_text(LOG)
    assert len(list(file_conversations(tmp_path / "logs"))) == 1


def test_the_command_previews_a_store_a_log_and_a_file(tmp_path: Path) -> None:
    env = {"XDG_DATA_HOME": str(tmp_path / "data")}
    log = tmp_path / "session.txt"
    log.write_text(LOG)
    ingested = understudy("ingest", log, "--format", "claude-text", "--dir", tmp_path / "store", env=env)
    assert ingested.returncode == 0, ingested.stderr
    for source in (log, tmp_path / "store"):
        done = understudy("redact", "preview", source, "--json", env=env)
        assert set(json.loads(done.stdout)["replaced"]) == {"assignment", "home-path"}
        assert PASSWORD not in done.stdout
    stdout = understudy("redact", "preview", log, env=env).stdout
    assert "home-path" in stdout and PASSWORD not in stdout
    missing = understudy("redact", "preview", tmp_path / "nothing", env=env)
    assert missing.returncode != 0 and str(tmp_path / "nothing") in missing.stderr
