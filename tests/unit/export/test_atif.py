"""ATIF: what we write is valid, says what was learned, and is read back as the same conversations."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from understudy.errors import ConfigError
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats.atif import (
    agent_version,
    export,
    rollout_documents,
    safe_file_name,
    session_documents,
)
from understudy.ingest.trace import Trace, TraceOutcome, TraceParent, expand
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.store.outcomes import GradedRollout
from understudy.trajectory.roles import Role
from understudy.trajectory.tree import build
from understudy.types import AgentIdentity, Attempt, Rollout, Verdict

from support import optional
from support.export import Log, put_rollouts, put_sessions, session
from support.ingest import read
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

atif: Any = optional("atif")


WORK: tuple[Role, ...] = ("main", "subagent")


def valid(document: dict[str, Any]) -> dict[str, Any]:
    """The document as the package keeps it: with nothing it does not know, and all that was there."""
    validated = atif.Trajectory.model_validate(document).to_json_dict()
    assert {key: value for key, value in document.items() if value is not None} == validated
    return document


def back(document: dict[str, Any]) -> list[Trace]:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "t.json").write_text(json.dumps(document))
        return read(Path(directory) / "t.json")


def contents(trace: Trace) -> list[tuple[Any, Any]]:
    """The states of a trace. ATIF does not tell an empty text from none."""
    return [
        ([{**message, "content": message["content"] or ""} for message in state.messages], state.student_action)
        for state in expand(trace, system=None)
    ]


def exported(directory: Path, output: Path, *, tokens: bool = True, **chosen: Any) -> dict[str, dict[str, Any]]:
    with Store.open(directory, create=False) as store:
        export(Corpus(store, ExportSelection(**chosen), Redactor(bytes(32))), output, tokens=tokens)
    index = [json.loads(line) for line in (output / "train.jsonl").read_text().splitlines()]
    return {row["file"]: json.loads((output / row["file"]).read_text()) for row in index}


def told(
    session: Session, roles: tuple[Role, ...] = WORK, reward: float = 1.0, base: str = "r"
) -> dict[str, dict[str, Any]]:
    ids = {"id": "r", "run_id": "run", "task_id": "task-1", "sample_index": 0}
    rollout = Rollout(**ids, agent=AgentIdentity("claude-code"), status="succeeded", created_at=0, updated_at=0)
    attempt = Attempt(id="a1", rollout_id="r", number=1, status="succeeded", started_at=0, heartbeat_at=0)
    graded = GradedRollout(rollout, attempt, Verdict(reward=reward, reason="x"))
    made = rollout_documents(build(session.calls), graded, roles, {"name": "claude-code", "version": "2"}, base)
    return {name: valid(document) for name, document in made.items()}


def test_a_rollout_has_its_tokens_reward_mask_and_policy_version(tmp_path: Path):
    put_rollouts(tmp_path / "store", tasks=1, samples=2)
    documents = exported(tmp_path / "store", tmp_path / "out", origins=("rollouts",), test_share=0.0)
    assert list(documents) == ["calc-0-0.json", "calc-0-1.json"]
    for document in documents.values():
        valid(document)
    good, bad = documents.values()
    assert (good["extra"]["reward"], bad["extra"]["reward"]) == (1.0, 0.0)
    assert good["extra"]["task"] == "calc-0" and good["extra"]["policy_versions"] == ["3"]
    assert [step["source"] for step in good["steps"]] == ["system", "user", "agent", "agent"]
    first, last = good["steps"][2:]
    assert first["metrics"]["prompt_token_ids"] == list(range(20))
    assert first["metrics"]["completion_token_ids"] == [100, 101, 102]
    assert first["metrics"]["logprobs"] == [-0.25] * 3
    assert (first["extra"]["loss_mask"], first["extra"]["policy_version"]) == ([1, 1, 1], "3")
    assert first["reasoning_content"] == "Hm."
    assert first["tool_calls"] == [{"tool_call_id": "t1", "function_name": "Bash", "arguments": {"command": "ls"}}]
    assert first["observation"] == {"results": [{"source_call_id": "t1", "content": "ok"}]}
    assert last["message"] == "Done."
    assert good["final_metrics"]["total_completion_tokens"] == 5
    (trace,) = back(good)
    assert trace.outcome == TraceOutcome(resolved=True, reward=1.0, task="calc-0", exit_status="succeeded")


def test_token_ids_and_loss_mask_can_be_left_out(tmp_path: Path):
    put_rollouts(tmp_path / "store", tasks=1, samples=1)
    (document,) = exported(tmp_path / "store", tmp_path / "out", tokens=False, origins=("rollouts",)).values()
    assert "token_ids" not in json.dumps(valid(document)) and "loss_mask" not in json.dumps(document)
    assert document["steps"][2]["metrics"]["completion_tokens"] == 3


def test_subagents_are_in_the_trajectory_that_started_them():
    log = Session()
    ask = [user(text("Work."))]
    log.ask(ask, [tool_use("t1", "Task", prompt="Look around."), tool_use("t2", "Bash", command="ls")])
    log.ask([user(text("Look around."))], [text("Nothing.")], agent="agent-7", system="Sub")
    results = user(tool_result("t1", "Nothing."), tool_result("t2"))
    log.ask([*ask, assistant(*json.loads(log.calls[0].response)["content"]), results], [text("Done.")])
    (document,) = told(log).values()
    (child,) = document["subagent_trajectories"]
    assert child["trajectory_id"] == "agent-7" and child["steps"][-1]["message"] == "Nothing."
    first, second = document["steps"][2]["observation"]["results"]
    assert first["subagent_trajectory_ref"] == [{"trajectory_id": "agent-7"}]
    assert "subagent_trajectory_ref" not in second
    main, sub = back(document)
    assert sub.parent == TraceParent("s1", "t1", 1) and len(main.turns) == 2
    assert "subagent_trajectories" not in next(iter(told(log, roles=("main",)).values()))


def compacted() -> Session:
    log = Session()
    ask = [user(text("Work."))]
    log.ask(ask, [text("Half.")])
    summary = user(text("Your task is to create a detailed summary of the conversation so far."))
    log.ask([*ask, assistant(text("Half.")), summary], [text("<summary>Half is done.</summary>")])
    goes_on = user(text("This session is being continued from a previous conversation. Half is done."))
    log.ask([goes_on], [text("Whole.")])
    return log


def test_the_part_after_a_compaction_is_a_file_referenced_by_the_first():
    documents = told(compacted())
    assert list(documents) == ["r.json", "r.cont-1.json"]
    assert documents["r.json"]["continued_trajectory_ref"] == "r.cont-1.json"
    assert "continued_trajectory_ref" not in documents["r.cont-1.json"]
    assert documents["r.cont-1.json"]["session_id"] == documents["r.json"]["session_id"]
    assert [step["message"] for step in documents["r.json"]["steps"]] == ["S", "Work.", "Half."]
    assert documents["r.cont-1.json"]["steps"][-1]["message"] == "Whole."


def test_a_selected_compaction_is_a_subagent_trajectory_with_copied_context():
    documents = told(compacted(), roles=("main", "compaction"))
    (summary,) = documents["r.json"]["subagent_trajectories"]
    agents = [step for step in summary["steps"] if step["source"] == "agent"]
    assert [step.get("is_copied_context") for step in agents] == [True, None]
    assert summary["extra"]["role"] == "compaction"


def test_an_abandoned_branch_is_a_file_of_its_own():
    log = Session()
    ask = [user(text("Work."))]
    log.ask(ask, [text("First.")])
    log.ask([*ask, assistant(text("First.")), user(text("On."))], [text("Second.")])
    log.ask([*ask, assistant(text("First.")), user(text("Otherwise."))], [text("Third.")])
    documents = told(log)
    assert list(documents) == ["r.json", "r.branch-1.json"]
    agents = [step for step in documents["r.branch-1.json"]["steps"] if step["source"] == "agent"]
    assert [(step["message"], step.get("is_copied_context")) for step in agents] == [
        ("First.", True),
        ("Third.", None),
    ]


def test_every_turn_of_a_session_is_trained_once_and_redacted(tmp_path: Path):
    log = session("s", project="/home/ann/project", outcome=TraceOutcome(resolved=False, reward=0.0, task="t-1"))
    log.turns[0].timestamp, log.turns[1].timestamp = "2026-10-03T09:00:00Z", "yesterday"
    put_sessions(tmp_path / "store", [log])
    documents = exported(tmp_path / "store", tmp_path / "out", origins=("sessions",))
    assert list(documents) == ["s.json", "s.branch-1.json"]
    learned: list[str] = []
    for document in documents.values():
        valid(document)
        agents = [step for step in document["steps"] if step["source"] == "agent"]
        learned += [step["extra"]["message_id"] for step in agents if not step.get("is_copied_context")]
        assert document["extra"]["reward"] == 0.0 and document["extra"]["task"] == "t-1"
    assert sorted(learned) == ["m0", "m1", "m2", "m3"]
    assert "/home/ann" not in json.dumps(documents)
    steps = documents["s.branch-1.json"]["steps"]
    assert [step["extra"].get("timestamp") for step in steps if step["source"] == "agent"] == [
        None,
        "yesterday",
        None,
    ]
    assert steps[3]["extra"]["signals"]["tests"] == "passed"


def test_a_compacted_session_and_its_branches_end_in_their_own_files(tmp_path: Path):
    log = Log("c", project="/srv/c")
    half = log.answer(log.user(-1, "Work."), "Half.")
    log.answer(log.user(half, "Otherwise."), "Given up.", branch="branch")
    log.answer(log.user(half, "On."), "More.")
    log.answer(log.user(-1, "This session is being continued: more is done."), "Whole.")
    put_sessions(tmp_path / "store", [log.trace])
    documents = exported(tmp_path / "store", tmp_path / "out", origins=("sessions",))
    last = {name: valid(document)["steps"][-1]["message"] for name, document in documents.items()}
    assert last == {"c.json": "Whole.", "c.branch-1.json": "More.", "c.branch-2.json": "Given up."}
    follows = {name: document.get("continued_trajectory_ref") for name, document in documents.items()}
    assert follows == {"c.json": None, "c.branch-1.json": "c.json", "c.branch-2.json": None}


def test_subagents_of_sessions_are_named_by_the_call_that_started_them(tmp_path: Path):
    main = session("m")
    sub = session("sub/agent", parent=TraceParent(main.session_id, "c1"), role="subagent")
    put_sessions(tmp_path / "store", [main, sub])
    documents = exported(tmp_path / "store", tmp_path / "out", origins=("sessions",), test_share=0.0)
    results = documents["m.json"]["steps"][2]["observation"]["results"]
    (reference,) = results[0]["subagent_trajectory_ref"]
    assert documents[reference["trajectory_path"]]["extra"]["parent"]["tool_use_id"] == "c1"


@pytest.mark.parametrize("written", ["not json", '{"__unparsedToolInput":{"raw":"not json","len":8}}'])
def test_images_audio_failed_results_and_invalid_arguments_are_kept(written: str):
    log = Log("x")
    image = {"type": "image_url", "image_url": {"url": "https://x.example/a.jpg"}}
    ask = log.user(-1, [{"type": "text", "text": "See."}, image, {"type": "audio"}])
    first = log.answer(ask, None, [("c1", "Bash", written)])
    failed = log.say(first, {"role": "tool", "tool_call_id": "c1", "content": "no", "is_error": True})
    log.answer(failed, "Oh.")
    (document,) = session_documents(log.trace, {}).values()
    _, prompt, did, _ = valid(document)["steps"]
    assert prompt["message"][1]["source"] == {"media_type": "image/jpeg", "path": "https://x.example/a.jpg"}
    assert prompt["message"][2] == {"type": "text", "text": "[audio]"}
    (again,) = back(document)
    assert [node.body.get("is_error") for node in again.nodes if node.body["role"] == "tool"] == [True]
    assert did["tool_calls"][0] == {
        "tool_call_id": "c1",
        "function_name": "Bash",
        "arguments": {},
        "extra": {"arguments": "not json"},
    }


def test_a_store_without_the_selected_origin_is_a_config_error(tmp_path: Path):
    put_rollouts(tmp_path / "store", tasks=1, samples=1)
    with pytest.raises(ConfigError, match=r"nothing (to export|can be exported)"):
        exported(tmp_path / "store", tmp_path / "out", origins=("sessions",))


def test_the_agents_version_is_read_from_its_own_output():
    stream = b'{"type":"system","subtype":"init","claude_code_version":"2.1.197"}'
    assert agent_version({"stderr.txt": b"\xff", "stream.jsonl": stream}) == "2.1.197"
    assert agent_version({"stream.jsonl": b'{"claude_code_version":"<b>"}'}) == agent_version({}) == "unknown"


def test_file_names_of_session_ids_are_safe_and_distinct():
    assert safe_file_name("claude-code:a/../b") != safe_file_name("claude-code:a-..-b")
    assert "/" not in safe_file_name("../x") and not safe_file_name("..").startswith(".")


TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=20)
WORDS = TEXT.filter(lambda said: bool(said.strip()))
VALUES = st.recursive(st.none() | st.booleans() | st.integers(-99, 99) | TEXT, lambda v: st.lists(v, max_size=2))
ANSWER = st.tuples(
    TEXT, TEXT, st.lists(st.tuples(WORDS, st.dictionaries(TEXT, VALUES, max_size=2)), max_size=3)
).filter(lambda answer: bool(answer[0] or answer[2]))


@settings(max_examples=50)
@given(st.lists(st.tuples(st.lists(WORDS, min_size=1, max_size=2), ANSWER, st.booleans()), min_size=1, max_size=5))
def test_exported_conversations_read_back_unchanged(turns: list[Any]):
    log = Log("x")
    tip = -1
    for number, (prompts, (response, thinking, calls), goes_back) in enumerate(turns):
        for word in prompts:
            tip = log.user(tip, word)
        before = tip
        made = [(f"c{number}-{at}", name, arguments) for at, (name, arguments) in enumerate(calls)]
        tip = log.answer(tip, response or None, made, thinking=thinking or None)
        for call_id, _, _ in made:
            tip = log.result(tip, call_id, f"result of {call_id}")
        tip = before if goes_back and number else tip
    documents = [valid(document) for document in session_documents(log.trace, {}).values()]
    actual = [state for document in documents for trace in back(document) for state in contents(trace)]
    expected = contents(log.trace)
    assert len(actual) == len(expected)
    assert all(state in actual for state in expected)
