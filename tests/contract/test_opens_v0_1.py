"""What the code of commit c785012 left on disk can be read, and says what it said then.

Each test opens a copy of an archive in tests/data/v0_1 (see the README there) through the command line alone, and
compares what comes out with the files in tests/data/v0_1/expected. tests/support/golden.py says
how to rewrite those.
"""

from __future__ import annotations

import hashlib
import json
import re
import tarfile
from pathlib import Path
from typing import Any, cast
from unittest.mock import ANY

import pytest

from support import understudy
from support.golden import DATA, check
from support.wire import serving

VOLATILE = frozenset({"made_at", "wall_s", "_fingerprint", "directory", "output_dir"})
"""Fields that say when or where a command ran."""

MOST = 6
"""How many of a list's objects, or of a directory's files, are kept as they are; others have a digest."""

RUN = (
    "run", "embedded", "--policy", "flaky", "--policy-arg", "p=0.5", "-t", "tasks.jsonl", "-n", "2", "-j", "2",
    "--tools", "Read,Edit,Bash", "--system-prompt", "You mend code.", "-o", "run", "--debug", "--json",
)  # fmt: skip
"""The command that made the run."""

LOOP = (
    "train", "loop", "model", "-t", "loop-tasks.jsonl", "-e", "loop-eval.jsonl", "--groups", "2", "-n", "3",
    "--keep", "1", "--agent", "shell", "--answer-tokens", "8", "--threads", "1", "--learning-rate", "1e-3",
    "-j", "2", "--track", "none", "-o", "loop", "--json", "--steps",
)  # fmt: skip
"""The command that made the loop, but for its number of steps and the agent's command."""

EXPORTS = {
    "atif": ("atif",),
    "hf": ("hf",),
    "llamafactory": ("llamafactory",),
    "llamafactory-dpo": ("llamafactory", "--stage", "dpo"),
    "openai": ("openai",),
    "trl-dpo": ("trl-dpo",),
    "trl-kto": ("trl-kto",),
    "trl-sft": ("trl-sft",),
    "trl-tokens": ("trl-tokens",),
    "verl-sft": ("verl", "--form", "sft"),
    "verl-rl": ("verl", "--form", "rl"),
    "verl-tokens": ("verl", "--form", "tokens"),
}
OF_SESSIONS = ("atif", "llamafactory", "openai", "trl-dpo", "trl-sft")


def extract_archive(name: str, tmp_path: Path) -> Path:
    """A copy of an archive."""
    with tarfile.open(DATA / f"{name}.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def run_command(tmp_path: Path, *arguments: str) -> str:
    """What a command prints; it has to succeed."""
    environment = {"TZ": "UTC", "XDG_DATA_HOME": str(tmp_path / "data"), "OPENAI_API_KEY": "none"}
    done = understudy(*arguments, cwd=tmp_path, env=environment)
    assert done.returncode == 0, f"understudy {' '.join(arguments)}: {done.stderr}"
    return done.stdout


def run_json(tmp_path: Path, *arguments: str) -> Any:
    """The same as JSON, one value or one a line, without what differs each time."""
    out = run_command(tmp_path, *arguments)
    values = [json.loads(line) for line in out.splitlines() if line]
    for value in values:
        if isinstance(value, dict):
            assert value.pop("schema") == 1  # 0.1 did not write it
    return short(values[0] if len(values) == 1 else values, tmp_path)


def without_schema(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """States or pairs without the version of their schema, which 0.1 did not write."""
    assert rows and {row.pop("schema") for row in rows} == {1}
    return rows


def short(value: Any, tmp_path: Path) -> Any:
    """A value in a form that stands for it exactly, and can be read: what is long is cut off, with its digest."""
    match value:
        case dict():
            items = cast("dict[str, Any]", value).items()
            return {name: short(inner, tmp_path) for name, inner in items if name not in VOLATILE}
        case list():
            values = cast("list[Any]", value)
            if len(values) > 12 and all(isinstance(inner, int | float) for inner in values):
                return f"{values[:4]} and so on: {len(values)} numbers, {_digest(json.dumps(values))}"
            if len(values) > MOST and all(isinstance(inner, dict) for inner in values):
                rest = json.dumps([_settled(inner, tmp_path) for inner in values[MOST:]])
                return [*short(values[:MOST], tmp_path), f"and {len(values) - MOST} more, {_digest(rest)}"]
            return [short(inner, tmp_path) for inner in values]
        case str():
            text = value.replace(str(tmp_path), "TMP")
            if len(text) <= 300:
                return text
            return f"{text[:100]} and so on: {len(text)} characters, {_digest(text)}"
        case _:
            return value


def _settled(value: Any, tmp_path: Path) -> Any:
    """A whole value without what differs each time."""
    text = json.dumps(value).replace(str(tmp_path), "TMP")
    return json.loads(text, object_hook=lambda each: {k: v for k, v in each.items() if k not in VOLATILE})


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def text_of(path: Path) -> str:
    """A file's text without the places, versions and fingerprints in it, and the digests that hang on them."""
    text = path.read_bytes().decode("latin-1" if path.suffix in (".msgpack", ".pt", ".safetensors") else "utf-8")
    text = re.sub(r'"_fingerprint": ?"\w+"', '"_fingerprint": ""', text)
    text = re.sub(r'/[^\s"]*/out(?=[/"])', "OUT", text)
    text = re.sub(r"understudy \d+\.\d+\.\d+\w*", "understudy VERSION", text)
    if path.name == "understudy.json":
        hang = (
            r'("[^"]*(?:README\.md|\.yaml|state\.json|\.arrow|\.parquet)": \{)\s*"bytes": \d+,\s*"sha256": "\w+"'
        )
        text = re.sub(hang, r'\1"sha256": ""', text)
    return text


def rows_of(path: Path) -> Any:
    """The content of a file that an export wrote."""
    if path.suffix == ".parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        return json.loads(json.dumps(parquet.read_table(path).to_pylist(), default=str))
    if path.suffix == ".arrow":
        ipc = pytest.importorskip("pyarrow").ipc
        with ipc.open_stream(path) as reader:
            return json.loads(json.dumps(reader.read_all().to_pylist(), default=str))
    text = text_of(path)
    if path.suffix == ".jsonl" or path.name.startswith("stream_"):
        return [json.loads(line) for line in text.splitlines()]
    if path.suffix == ".json":
        return json.loads(text)
    return text.splitlines()


def files_of(directory: Path) -> dict[str, Any]:
    """The content of all files of a directory, by their paths."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    contents: dict[str, Any] = {}
    for number, path in enumerate(files):
        rows = rows_of(path)
        in_short = short(rows, directory) if number < MOST else _digest(json.dumps(_settled(rows, directory)))
        contents[str(path.relative_to(directory))] = in_short
    return contents


def digests(directory: Path) -> dict[str, str]:
    """What stands in the files of a run, but for the store and what is a log of this process."""
    skipped = ("store.db", ".lock", "debug.log", ".dataset_info.json.lock")
    files = [path for path in directory.rglob("*") if path.is_file() and not path.name.startswith(skipped)]
    digest_of: dict[str, str] = {}
    for path in sorted(files):
        rows = path.suffix in (".arrow", ".parquet")
        text = json.dumps(rows_of(path)) if rows else text_of(path)
        digest_of[str(path.relative_to(directory))] = _digest(text)
    return digest_of


CORRECTED = {
    "run-hf", "run-openai", "run-trl-kto", "run-trl-tokens", "run-verl-sft",
    "sessions-atif", "sessions-llamafactory", "sessions-openai", "sessions-trl-dpo", "sessions-trl-sft",
}  # fmt: skip
"""Exports that 0.1 wrote otherwise; `expected/` has them as they are now.

The arguments of tool calls were not as the model had been shown them: their white space was lost, the agent's
defaults were filled in. Of trl-tokens it is the card alone, which speaks of malformed calls. Sessions had no tools
where their logs have none, and say now where their tools are from.
"""


def same_as_archived(name: str, tmp_path: Path) -> None:
    """The export in `out` has the files that are archived under this name, and rows with the same bytes.

    The card and the manifest tell more than those of 0.1 did, as lengths: `expected/` has them.
    """
    extract_archive("exports", tmp_path)
    now, archived = digests(tmp_path / "out"), digests(tmp_path / "exports" / name)
    assert now.keys() == archived.keys()
    if name not in CORRECTED:
        rows = [file for file in archived if file.rpartition("/")[2] not in ("README.md", "understudy.json")]
        assert rows
        assert {file: now[file] for file in rows} == {file: archived[file] for file in rows}


# --- a run ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", ["run", "run-shell"])
def test_a_run_is_shown(run: str, tmp_path: Path) -> None:
    extract_archive(run, tmp_path)
    listed = run_json(tmp_path, "show", "--dir", run, "--json")
    check(f"show-{run}", "the list", listed)
    chosen = listed["rollouts"][1:] if run == "run-shell" else listed["rollouts"][:1]
    for rollout in chosen:
        name = f"{rollout['task_id']}, sample {rollout['sample_index']}"
        check(f"show-{run}", name, run_json(tmp_path, "show", rollout["id"], "--dir", run, "--json"))
    check(f"show-{run}", "as text", run_command(tmp_path, "show", chosen[0]["id"], "--dir", run).splitlines())


@pytest.mark.parametrize("form", EXPORTS)
def test_a_run_is_exported(form: str, tmp_path: Path) -> None:
    extract_archive("run", tmp_path)
    summary = run_json(tmp_path, "export", *EXPORTS[form], "run", "-o", "out", "--json")
    check(f"export-run-{form}", "summary", summary)
    check(f"export-run-{form}", "files", files_of(tmp_path / "out"))
    same_as_archived(f"run-{form}", tmp_path)


@pytest.mark.parametrize("run", ["run", "run-shell"])
def test_a_run_is_reported(run: str, tmp_path: Path) -> None:
    extract_archive(run, tmp_path)
    check("report", run, run_json(tmp_path, "report", run, "--json", "-o", "report.html"))


def test_pairs_are_made_of_a_run(tmp_path: Path) -> None:
    extract_archive("run", tmp_path)
    check("pairs", "run", run_json(tmp_path, "pairs", "run", "-o", "pairs.jsonl", "--json"))
    check("pairs", "run, rows", short(without_schema(rows_of(tmp_path / "pairs.jsonl")), tmp_path))


@pytest.mark.usefixtures("claude_code", "isolation")
def test_the_same_run_again_repeats_nothing(tmp_path: Path) -> None:
    extract_archive("run", tmp_path)
    before, listed = digests(tmp_path / "run"), run_json(tmp_path, "show", "--dir", "run", "--json")
    # Written anew from the store, the files of the rollouts say the same, but for streams and datasets: what 0.1
    # wrote there as tool arguments is not what the model was shown (see CORRECTED). A verdict has `protection` and
    # names its grader.
    check("again", "run", run_json(tmp_path, *RUN, "--rewrite-reports"))
    assert run_json(tmp_path, "show", "--dir", "run", "--json") == listed
    after = digests(tmp_path / "run")
    assert after.keys() == before.keys()
    changed = {name for name in after if after[name] != before[name]}
    assert all(name.startswith(("stream_", "dataset-")) or name.endswith("/verdict.json") for name in changed)


# --- a loop ---------------------------------------------------------------------------------------------------


def test_a_loop_is_reported_and_its_waves_are_shown(tmp_path: Path) -> None:
    extract_archive("loop", tmp_path)
    check("report", "loop", run_json(tmp_path, "report", "loop", "--json", "-o", "report.html"))
    for part in ("steps/step-0002/run", "evaluations/step-0002"):
        check("show-loop", part, run_json(tmp_path, "show", "--dir", f"loop/{part}", "--json"))


@pytest.mark.services  # two starts of a loop, with torch
@pytest.mark.usefixtures("isolation")
def test_a_loop_goes_on_where_it_ended_and_refuses_other_options(tmp_path: Path) -> None:
    """The path of the model that the loop began with is put right first: the archive lies somewhere else now."""
    pytest.importorskip("torch")
    extract_archive("loop", tmp_path)
    configuration = tmp_path / "loop" / "loop.json"
    configuration.write_text(configuration.read_text().replace("/tmp/v0_1/model", str(tmp_path / "model")))
    agent = ("--agent-command", f"python3 -c '{(tmp_path / 'agent.py').read_text().rstrip()}'")
    digests_before, configured = digests(tmp_path / "loop"), json.loads(configuration.read_text())
    check("again", "loop", run_json(tmp_path, *LOOP, "2", *agent))
    # `loop.json` is written again: the same values, in the order of today's settings.
    assert json.loads(configuration.read_text()) == configured
    # `hours.json`, which counts a loop's hours for `--max-cost`, came later.
    assert digests(tmp_path / "loop") | {"loop.json": ""} == digests_before | {"loop.json": "", "hours.json": ANY}
    other = understudy(*LOOP, "2", *agent, "--kl-coefficient", "0.1", cwd=tmp_path)
    assert other.returncode != 0
    check("again", "loop with another option", short(other.stderr.splitlines()[-1:], tmp_path))


# --- a gateway ------------------------------------------------------------------------------------------------


def test_a_gateways_clients_are_shown(tmp_path: Path) -> None:
    extract_archive("gateway", tmp_path)
    check("show-gateway", "the list", run_json(tmp_path, "show", "--dir", "gateway", "--json"))
    for client in ("me", "bob"):
        check("show-gateway", client, run_json(tmp_path, "show", client, "--dir", "gateway", "--json"))
    check("show-gateway", "keys", run_command(tmp_path, "gateway", "keys", "--dir", "gateway").splitlines())


def test_a_gateway_goes_on_with_its_keys_and_its_sessions(tmp_path: Path) -> None:
    """A stored key still opens its client, and a tool call of then is sent to the model as it was sampled then."""
    extract_archive("gateway", tmp_path)
    keys = json.loads((tmp_path / "gateway-keys.json").read_text())
    answer = json.loads((DATA / "wire" / "answers.json").read_text())["text"]
    servers = {"gateway": ["vllm", "--backend-model-high", "fake", "--base-url", "URL/v1"]}
    called = {"type": "tool_use", "id": "call_0", "name": "Read", "input": {"n": 1, "path": "/a", "more": True}}
    messages = [
        {"role": "user", "content": "read /a"},
        {"role": "assistant", "content": [called]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "call_0", "content": "43"}]},
    ]
    body = {"model": "claude-x", "max_tokens": 9, "messages": messages}
    with serving(tmp_path, servers) as wire:
        assert not wire.gateway("gateway").key, "a gateway that has keys makes no other"
        wire.provider.answer = answer
        for client in ("me", "bob"):
            reply, _ = wire.ask("gateway", "/v1/messages", body, authorization=f"Bearer {keys[client]}")
            check("gateway-again", client, {"got": reply, "upstream": wire.upstream()})
    listed = run_json(tmp_path, "show", "--dir", "gateway", "--json")
    check("gateway-again", "calls", {client["name"]: client["calls"] for client in listed["clients"]})


# --- sessions -------------------------------------------------------------------------------------------------


def test_the_states_of_sessions_are_listed(tmp_path: Path) -> None:
    extract_archive("sessions", tmp_path)
    lines = run_command(tmp_path, "states", "sessions", "--json").splitlines()
    check("states", "all", short(without_schema([json.loads(line) for line in lines]), tmp_path))
    columns = run_command(tmp_path, "states", "sessions", "--columns").splitlines()
    check("states", "columns", columns)
    some = run_command(tmp_path, "states", "sessions", "--where", "tests IS NOT NULL OR tool_errors > 0", "--json")
    check("states", "some", [json.loads(line)["state_id"] for line in some.splitlines()])


def test_a_session_is_read_again_only_where_it_changed(tmp_path: Path) -> None:
    """Calls of subagents are shown by the name that they were sent back with, `Agent`; and one state behind a
    compaction says now that its log lacks the reminders that were sent there."""
    extract_archive("sessions", tmp_path)
    before = rows_of_states(tmp_path)
    check("ingest", "again", run_json(tmp_path, "ingest", "logs", "-d", "sessions", "--all-roles", "--json"))
    after = rows_of_states(tmp_path)
    changed = {state: row for state, row in after.items() if row != before[state]}
    assert before.keys() == after.keys()
    *others, repaired = changed.values()
    assert len(others) == 2
    for row in others:
        messages = json.dumps(before[row["state_id"]]["messages"])
        renamed = json.loads(messages.replace('"name": "Task"', '"name": "Agent"'))
        assert row == {**before[row["state_id"]], "messages": renamed}
    notes = {"fidelity": "repaired", "notes": ["reminders_not_logged"]}
    assert repaired == {**before[repaired["state_id"]], **notes}


def rows_of_states(directory: Path) -> dict[str, dict[str, Any]]:
    """The states that a store lists, by their ids."""
    done = understudy("states", "sessions", "--json", cwd=directory)
    assert done.returncode == 0, done.stderr
    return {row["state_id"]: row for row in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("form", OF_SESSIONS)
def test_sessions_are_exported(form: str, tmp_path: Path) -> None:
    extract_archive("sessions", tmp_path)
    options = ("--unredacted", "--include-lossy", "--json")
    summary = run_json(tmp_path, "export", *EXPORTS[form], "sessions", "-o", "out", *options)
    check(f"export-sessions-{form}", "summary", summary)
    check(f"export-sessions-{form}", "files", files_of(tmp_path / "out"))
    same_as_archived(f"sessions-{form}", tmp_path)


def test_pairs_are_made_of_a_replay(tmp_path: Path) -> None:
    extract_archive("sessions", tmp_path)
    pairs = ("pairs", "sessions", "-o", "pairs.jsonl", "--unredacted", "--include-lossy", "--json")
    check("pairs", "sessions", run_json(tmp_path, *pairs))
    check("pairs", "sessions, rows", short(without_schema(rows_of(tmp_path / "pairs.jsonl")), tmp_path))


def test_a_replay_goes_on_with_what_was_asked_before(tmp_path: Path) -> None:
    """Its teachers are no longer there: the estimate says that all it would ask was answered."""
    extract_archive("sessions", tmp_path)
    estimate = ("replay", "sessions", "-t", "teachers.toml", "--max-cost", "5", "--limit", "12", "--dry-run")
    check("replay", "estimate", run_json(tmp_path, *estimate, "--json"))
