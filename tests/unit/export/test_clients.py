"""Exports of the calls that a gateway served to its keys."""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

import msgspec
import pytest

from understudy.errors import ConfigError
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats import atif, hf, trl
from understudy.export.verify import LineageReport, verify_rows
from understudy.store import Store
from understudy.trajectory.roles import ROLES

from support import optional, understudy
from support.export import converse, rows, wait

optional("datasets")


def put_clients(directory: Path) -> None:
    """Two keys with two sessions each; the calls of a key's second session begin 1,000 seconds later."""
    with Store.open(directory) as store:
        for name in ("alice", "b/ö"):
            client = wait(store.keys.add_client(name))
            for number, session_id in enumerate(("s1", None)):
                for call in converse(
                    client.id, f"Mend {number} for {name}.", answer_text=f"{name} {number}"
                ).calls:
                    later = 1000.0 * number
                    call = msgspec.structs.replace(
                        call,
                        id=f"{call.id}-{number}",
                        session_id=session_id,
                        sequence=call.sequence + 10 * number,
                        started_at=call.started_at + later,
                        ended_at=call.ended_at + later,
                    )
                    wait(store.calls.append(call))


def corpus(store: Store, *clients: str, since: float = -math.inf, until: float = math.inf) -> Corpus:
    chosen = ExportSelection(origins=(), roles=ROLES, clients=clients, since=since, until=until, test_share=0.0)
    return Corpus(store, chosen, unredacted=True)


def problems(store: Store, exported: list[dict[str, Any]]) -> list[str]:
    report = LineageReport()
    verify_rows(store, ((str(number), row) for number, row in enumerate(exported)), report)
    assert report.rows == len(exported) > 0
    return report.problems


def test_exact_tokens_are_exported_by_key_and_time(tmp_path: Path):
    put_clients(tmp_path / "gateway")
    with Store.open(tmp_path / "gateway", create=False) as store:
        summary = trl.export_tokens(corpus(store, "alice"), tmp_path / "all")
        trl.export_tokens(corpus(store, "alice", since=1100.0), tmp_path / "late")
        trl.export_tokens(corpus(store, "alice", until=1100.0), tmp_path / "early")
        both, late, early = (rows(tmp_path / name / "train.parquet") for name in ("all", "late", "early"))
        assert problems(store, both) == []
        damaged = {**both[0], "input_ids": [*both[0]["input_ids"][:-1], 9]}
        assert problems(store, [damaged]) and problems(store, [{**both[0], "reward": 1.0}])
    assert (summary.rows, summary.unredacted, summary.origins) == (2, True, {"client": 2})
    assert both == early + late
    assert [row["call_ids"] for row in both] == [
        ["client-alice-0-0", "client-alice-1-0"],
        ["client-alice-0-1", "client-alice-1-1"],
    ]
    assert both[0]["input_ids"] == [*range(20), 100, 101, 102, 5, 6, 7, 110, 111]
    assert both[0]["labels"] == [-100] * 20 + [100, 101, 102] + [-100] * 3 + [110, 111]
    assert [row["group"] for row in both] == ["client-alice.s1", "client-alice"]
    for key in ("reward", "integrity", "instance_id", "rollout_id"):
        assert both[0][key] is None
    assert stat.S_IMODE((tmp_path / "all" / "train.parquet").stat().st_mode) == 0o600
    assert "NOT REDACTED" in (tmp_path / "all" / "README.md").read_text()


def test_hf_has_a_dataset_and_a_stream_for_each_key(tmp_path: Path):
    import datasets

    put_clients(tmp_path / "gateway")
    with Store.open(tmp_path / "gateway", create=False) as store:
        summary = hf.export(corpus(store, "alice", "b/ö"), tmp_path / "out")
        names = sorted(path.name for path in (tmp_path / "out").glob("dataset-*"))
        assert len(names) == 2 and names[0] == "dataset-client-alice"
        written = list(datasets.load_from_disk(str(tmp_path / "out" / names[0])))
        assert problems(store, written) == []
    assert (summary.rows, summary.rollouts, summary.unredacted) == (8, 0, True)
    assert [(row["turn"], row["call_ids"], row["reward"]) for row in written[:2]] == [
        (0, ["client-alice-0-0"], None),
        (1, ["client-alice-1-0"], None),
    ]
    assert written[0]["gold_completion_ids"] == [100, 101, 102] and written[0]["instance_id"] is None
    spans = [json.loads(line) for line in (tmp_path / "out" / "stream_client-alice.json").read_text().splitlines()]
    assert len(spans) == 6 and {span["name"] for span in spans} == {"raw_gen_ai_request"}
    assert len({span["span_id"] for span in spans}) == 6 and len({span["trace_id"] for span in spans}) == 2
    modes = {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").rglob("*.arrow")}
    assert modes == {0o600}


def test_atif_has_a_valid_file_for_each_session(tmp_path: Path):
    trajectory: Any = pytest.importorskip("atif").Trajectory
    put_clients(tmp_path / "gateway")
    with Store.open(tmp_path / "gateway", create=False) as store:
        atif.export(corpus(store, "alice"), tmp_path / "out")
        atif.export(corpus(store, "alice"), tmp_path / "bare", tokens=False)
    first, second = rows(tmp_path / "out" / "train.jsonl")
    assert (first["file"], second["file"]) == ("client-alice.s1.json", "client-alice.json")
    document = json.loads((tmp_path / "out" / first["file"]).read_text())
    trajectory.model_validate(document)
    assert (document["session_id"], document["extra"]["client"]) == ("s1", "alice")
    assert document["steps"][-1]["metrics"]["completion_token_ids"] == [110, 111]
    assert not {"reward", "task", "integrity"} & document["extra"].keys()
    assert "token_ids" not in (tmp_path / "bare" / first["file"]).read_text()


def test_excluded_tasks_are_matched_against_the_requests_sent(tmp_path: Path):
    put_clients(tmp_path / "gateway")
    benchmark = tmp_path / "benchmark.jsonl"
    benchmark.write_text(json.dumps({"instance_id": "client-alice.s1", "repo": "r/r", "patch": ""}) + "\n")
    with Store.open(tmp_path / "gateway", create=False) as store:
        chosen = msgspec.structs.replace(corpus(store, "alice").selection, exclude_tasks=benchmark)
        sessions = list(Corpus(store, chosen, unredacted=True).client_sessions())
    assert [session.session_id for session in sessions] == [None]


def test_unknown_keys_empty_selections_and_missing_options_are_config_errors(tmp_path: Path):
    put_clients(tmp_path / "gateway")
    with Store.open(tmp_path / "gateway", create=False) as store:
        with pytest.raises(ConfigError, match=r"no key 'carol'; give one of: 'alice'"):
            trl.export_tokens(corpus(store, "carol"), tmp_path / "out")
        with pytest.raises(ConfigError, match="no calls with these keys in the chosen time"):
            hf.export(corpus(store, "alice", since=1e9), tmp_path / "out")
        with pytest.raises(ConfigError, match="--unredacted"):
            Corpus(store, corpus(store, "alice").selection)
        with pytest.raises(ConfigError, match="--key"):
            hf.export(Corpus(store, ExportSelection(origins=("rollouts",))), tmp_path / "out")


def test_the_command_takes_keys_and_times(tmp_path: Path):
    put_clients(tmp_path / "gateway")

    def export(*options: str) -> tuple[int, str]:
        done = understudy("export", "trl-tokens", tmp_path / "gateway", "-o", tmp_path / "out", *options)
        return done.returncode, done.stdout + done.stderr

    code, output = export("--key", "alice", "--since", "1970-01-01T00:10:00", "--unredacted", "--json")
    assert code == 0 and json.loads(output.splitlines()[0])["rows"] == 1
    assert "not redacted" in output
    for options, reason in (
        (("--key", "alice"), "--unredacted"),
        (("--since", "1970-01-01"), "--since only applies with --key"),
        (("--key", "alice", "--since", "yesterday"), "--since: invalid time 'yesterday'; give one in ISO 8601"),
        (("--key", "alice", "--run", "run1"), "--run applies to sessions and rollouts only"),
    ):
        code, output = export(*options)
        assert code == 2 and reason in output
