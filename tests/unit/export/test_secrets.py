"""No secret that a session held is in any byte of any export, whatever its kind and wherever it stood."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from understudy import plugins
from understudy.errors import ConfigError
from understudy.export.base import traits_of
from understudy.export.corpus import Corpus, ExportSelection
from understudy.ingest import trace_store
from understudy.ingest.trace import RequestShape, Trace, TraceOutcome, TraceParent, TurnSignals, state_id
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.store.asks import StoredAsk
from understudy.types import Call

from support import optional
from support.export import Log, wait
from support.secrets import KINDS, embed, parts

optional("pyarrow")


PERSON = "mallory.quux"
HOME = f"/home/{PERSON}"
MAIL = f"{PERSON}@acme-corp.io"
EXPORTS: list[tuple[str, dict[str, Any]]] = [
    ("atif", {}),
    ("hf", {}),
    *(
        ("llamafactory", {"stage": stage, "form": form})
        for stage in ("sft", "dpo", "kto")
        for form in ("sharegpt", "alpaca")
    ),
    ("openai", {}),
    ("openai", {"unit": "turn"}),
    ("session-traces", {}),
    ("trl-dpo", {}),
    ("trl-kto", {}),
    ("trl-sft", {}),
    ("trl-sft", {"exact": True}),
    ("trl-sft", {"unit": "turn"}),
    ("verl", {"unit": "turn"}),
    ("verl", {}),
]  # fmt: skip


class Planter:
    """Gives a secret of another kind each time, in words around it, and remembers what may not be found."""

    def __init__(self, seed: int) -> None:
        self._dice = random.Random(seed)
        self._kinds = [kind for kind in KINDS if kind.alone]
        self._dice.shuffle(self._kinds)
        self.number = seed
        self.secrets: list[str] = []

    def __call__(self) -> str:
        kind = self._kinds[self.number % len(self._kinds)]
        secret = kind.make(self._dice)
        self.secrets += parts(kind, secret)
        self.number += 1
        return embed(kind, secret, self._dice.choice(kind.names), self.number) + f"\nof {MAIL} in {HOME}/src\n"


def plant(store: Store, seed: int) -> list[str]:
    """Sessions with secrets wherever a log can have some, and teachers' answers with more."""
    planted = Planter(seed)
    tools = [
        {
            "type": "function",
            "function": {
                "name": "Bash",
                "description": planted(),
                "parameters": {
                    "type": "object",
                    "properties": {"command": {"type": "string", "description": planted()}},
                },
            },
        }
    ]
    for number, role in enumerate(("main", "subagent")):
        log = Log(
            f"trace-{seed}-{number}",
            project=f"{HOME}/project",
            role=role,
            agent="helper" if number else None,
            parent=TraceParent(f"session-trace-{seed}-0", "c1") if number else None,
            shape=RequestShape(planted(), tools),
            outcome=TraceOutcome(resolved=True, task=None, exit_status=planted()),
        )
        log.trace.source = f"{HOME}/logs/{number}.jsonl"
        ask = log.user(-1, planted())
        picture = {"type": "image_url", "image_url": {"url": f"data:text/plain,{planted()}"}}
        more = log.user(ask, [{"type": "text", "text": planted()}, picture])
        signals = TurnSignals(tool_calls=1, tests="passed")
        call = ("c1", "Bash", {"command": planted(), "env": [{"deep": planted()}], "cwd": HOME})
        first = log.answer(more, planted(), [call], thinking=planted(), signals=signals, model="claude-opus-4-5")
        result = log.result(first, "c1", planted())
        nested = json.dumps({"file": json.dumps({"content": planted()})})
        second = log.answer(result, None, [("c2", "Bash", nested)], signals=signals, model="claude-opus-4-5")
        done = log.result(second, "c2", json.dumps({"stdout": planted()}))
        log.answer(done, planted(), signals=TurnSignals(commits=1), model="claude-opus-4-5")
        wait(trace_store.store_trace(store.sessions, log.trace))
        teach(store, log.trace)
    return planted.secrets


def teach(store: Store, trace: Trace) -> None:
    """Two teachers agree on something else at the first turn, with the secrets that they were shown."""
    client = wait(store.keys.add_client("teachers"))
    wait(store.asks.put_replay("r", {}))
    prompt = trace.nodes[0].body["content"]
    arguments = json.dumps({"command": f"cat {HOME}/notes # {prompt}"})
    answer = {
        "role": "assistant",
        "content": prompt,
        "tool_calls": [{"id": "t1", "type": "function", "function": {"name": "Bash", "arguments": arguments}}],
    }
    for teacher in ("gpt", "glm"):
        number = store.calls.next_sequence(client.id)
        tools = [{"type": "function", "function": {"name": "Bash", "parameters": {"type": "object"}}}]
        request = {"model": teacher, "messages": [{"role": "user", "content": "x"}], "tools": tools}
        call = Call(
            id=f"call{number}",
            attempt_id=client.id,
            sequence=number,
            dialect="openai-chat",
            requested_model=teacher,
            backend=teacher,
            backend_model=teacher,
            request=json.dumps(request).encode(),
            response=json.dumps({"choices": [{"index": 0, "message": answer}]}).encode(),
            status="ok",
            started_at=1.0,
            ended_at=2.0,
            finish_reason="stop",
        )
        wait(store.calls.append(call))
        ask = StoredAsk(
            id=f"ask{number}",
            replay_id="r",
            state_id=state_id(trace.trace_id, "m0"),
            kind="teacher",
            teacher=teacher,
            model=teacher,
            family=teacher,
            number=0,
            status="answered",
            asked_at=1.0,
            call_id=call.id,
        )
        wait(store.asks.add(ask))


def everything(directory: Path) -> str:
    """All that can be read in the files of an export and in their names; Parquet unpacked."""
    import pyarrow.parquet

    texts: list[str] = []
    for path in sorted(directory.rglob("*")):
        texts.append(path.name)
        if path.suffix == ".parquet":
            rows: Any = pyarrow.parquet.read_table(path).to_pylist()
            texts.append(json.dumps(rows, ensure_ascii=False, default=str))
            texts.append(str(pyarrow.parquet.read_schema(path).metadata))
        if path.is_file():
            texts.append(path.read_bytes().decode(errors="replace"))
    return "\n".join(texts)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[str]]]:
    """A store, and the secrets of each of three lots of sessions in it."""
    directory = tmp_path_factory.mktemp("store")
    with Store.open(directory) as store:
        return directory, [plant(store, seed) for seed in (1, 2, 3)]


def run(directory: Path, output: Path, name: str, options: dict[str, Any], *, unredacted: bool) -> str:
    function = plugins.load("exports", name)
    with Store.open(directory, create=False) as store:
        selection = ExportSelection(origins=("sessions",), test_share=0.0)
        redactor = None if unredacted else Redactor(bytes(range(32)))
        function(Corpus(store, selection, redactor, unredacted=unredacted), output, **options)
    return everything(output)


@pytest.mark.parametrize(("name", "options"), EXPORTS, ids=str)
def test_no_secret_is_in_an_export(
    planted: tuple[Path, list[list[str]]], tmp_path: Path, name: str, options: dict[str, Any]
):
    directory, lots = planted
    text = run(directory, tmp_path / "redacted", name, options, unredacted=False)
    assert [secret for secrets in lots for secret in secrets if secret in text] == []
    assert PERSON not in text
    # The test would find them: without redaction they are there.
    plain = run(directory, tmp_path / "plain", name, options, unredacted=True)
    assert all(sum(secret in plain for secret in secrets) >= 5 for secrets in lots) and PERSON in plain


def test_the_secrets_tests_cover_every_format_that_exports_sessions():
    with_sessions = [
        name for name in plugins.names("exports") if "sessions" in traits_of(plugins.load("exports", name)).origins
    ]
    assert sorted({name for name, _ in EXPORTS}) == with_sessions


def test_a_corpus_of_sessions_without_redactor_is_refused(planted: tuple[Path, list[list[str]]]):
    with Store.open(planted[0], create=False) as store, pytest.raises(ConfigError, match="--unredacted"):
        Corpus(store, ExportSelection(origins=("sessions",)))


def test_the_hf_format_does_not_import_the_redaction_rules() -> None:
    code = "import sys, understudy.export.formats.hf; sys.exit('understudy.redact.rules' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
