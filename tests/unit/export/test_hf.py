"""`understudy export hf` on a real store: rows, streams, rewards, and what is left out."""

from __future__ import annotations

import ast
import json
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import ConfigError, TaskError
from understudy.export.formats.hf import COLUMNS, file_name
from understudy.export.parquet import SavedDatasetWriter
from understudy.export.push import plan_push
from understudy.model.scripted.tokenizer import scripted_tokenizer
from understudy.store import Store
from understudy.types import ErrorInfo, Task, Verdict

from support import calc_task, optional, understudy
from support.export import export_hf as export
from support.trajectory import Session, assistant, text, tool_result, tool_use, user

datasets: Any = optional("datasets")


END = "<|im_end|>"


def wait(future: Future[Any]) -> Any:
    return future.result(30)


def converse(
    attempt_id: str, instruction: str, *, backend: str, tokens: bool = True, policy: str | None = None
) -> Session:
    """Two turns, a tool between them, with the embedded model's tokens."""
    session = Session(attempt_id)
    encode = scripted_tokenizer().encode
    completions = ["I look.\n<tool_call>\n{}\n</tool_call>" + END, "Done, naïvely ✓." + END]
    prompts = [f"<|im_start|>user\n{instruction}{END}\n<|im_start|>assistant\n"]
    prompts.append(f"{prompts[0]}{completions[0]}\n<|im_start|>user\nok{END}\n<|im_start|>assistant\n")
    ask = user(text(instruction))
    messages = [[ask], [ask, assistant(text("I look."), tool_use("t1", command="ls")), user(tool_result("t1"))]]
    answers = [[text("I look."), tool_use("t1", command="ls")], [text("Done, naïvely ✓.")]]
    for sent, answer, prompt, completion in zip(messages, answers, prompts, completions, strict=True):
        ids = encode(completion)
        session.ask(
            sent,
            answer,
            prompt=encode(prompt) if tokens else None,
            completion=ids if tokens else None,
            logprobs=[-0.25] * len(ids) if tokens else None,
            policy=policy,
            backend=backend,
        )
    session.ask(messages[1], None, status="error")
    return session


def written(directory: Path) -> list[str]:
    """What is in a directory beside the card and the manifest."""
    return sorted({path.name for path in directory.iterdir()} - {"README.md", "understudy.json"})


def fill(
    directory: Path,
    tasks: list[Task],
    *,
    samples: int = 1,
    backend: str = "embedded",
    tokens: bool = True,
    policy: str | None = None,
) -> None:
    """A store of one run, all of whose rollouts were graded: the first of each task 1, the others 0."""
    with Store.open(directory) as store:
        wait(store.runs.create("run1", {"backend": backend}))
        wait(store.runs.add_tasks("run1", tasks))
        ids = [(f"{task.instance_id}-{n}", task.instance_id, n) for task in tasks for n in range(samples)]
        wait(store.runs.create_rollouts("run1", ids))
        by_id = {task.instance_id: task for task in tasks}
        for rollout_id, task_id, number in ids:
            attempt = wait(store.runs.start_attempt(rollout_id))
            wait(store.runs.mark_running(attempt.id))
            instruction = by_id[task_id].instruction
            talk = converse(attempt.id, instruction, backend=backend, tokens=tokens, policy=policy)
            for call in talk.calls:
                wait(store.calls.append(call))
            verdict = Verdict(reward=1.0 - min(number, 1), reason="x", tests={"t.py::test": "passed"})
            finished = store.runs.finish_attempt(
                attempt.id, "succeeded", "succeeded", patch=b"+x\n", verdict=verdict
            )
            wait(finished)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_are_the_calls_with_their_exact_tokens(tmp_path: Path):
    task = calc_task()
    fill(tmp_path, [task], samples=2)
    with Store.open(tmp_path, create=False) as store:
        exported = export(store, tmp_path)
    assert (exported.instances, exported.rollouts, exported.rows, exported.spans) == (1, 2, 4, 8)
    rows = datasets.load_from_disk(str(tmp_path / "dataset-calc-0"))
    assert rows.column_names == list(COLUMNS)
    assert rows["turn"][:] == [0, 1, 0, 1]
    assert rows["reward"][:] == [1.0, 1.0, 0.0, 0.0]
    decode = scripted_tokenizer().decode
    for row in rows:
        answer = row["messages"][-1]
        whole = decode(row["prompt_ids"] + row["gold_completion_ids"])
        assert whole == row["prompt"] + decode(row["gold_completion_ids"])
        assert answer["content"] in whole
        assert task.instruction in row["prompt"]
        assert (row["repo"], row["instance_id"], row["prompt_source"]) == ("example/calc", "calc-0", "tokens")
        assert row["logprobs"] == [-0.25] * len(row["gold_completion_ids"])
        assert (row["branch"], row["policy_version"]) == ("main", None)
    call = rows[0]["messages"][-1]["tool_calls"][0]
    assert (call["id"], call["function"]) == ("t1", {"name": "Bash", "arguments": '{"command": "ls"}'})
    assert [message["role"] for message in rows[1]["messages"]] == [
        "system",
        "user",
        "assistant",
        "tool",
        "assistant",
    ]


def test_only_rows_of_the_selected_roles_are_exported(tmp_path: Path):
    fill(tmp_path, [calc_task()])
    with Store.open(tmp_path, create=False) as store:
        whole = export(store, tmp_path / "all")
        main_only = export(store, tmp_path / "main", roles=("main",))
        none = export(store, tmp_path / "none", roles=("subagent", "compaction"))
    assert whole.roles == main_only.roles == none.roles == {"main": 3}
    assert (whole.rows, main_only.rows, none.rows) == (2, 2, 0)
    assert none.segments == {}
    assert set(datasets.load_from_disk(str(tmp_path / "main" / "dataset-calc-0"))["role"][:]) == {"main"}
    spans = lines(tmp_path / "main" / "stream_calc-0.json")
    assert [span["attributes"].get("understudy.role") for span in spans] == ["main"] * 3 + [None]
    assert [span["name"] for span in lines(tmp_path / "none" / "stream_calc-0.json")] == [
        "agentlightning.annotation"
    ]


def test_the_stream_has_the_spans_that_agent_lightning_reads(tmp_path: Path):
    fill(tmp_path, [calc_task()])
    with Store.open(tmp_path, create=False) as store:
        export(store, tmp_path / "out")
    spans = lines(tmp_path / "out" / "stream_calc-0.json")
    assert [span["name"] for span in spans] == ["raw_gen_ai_request"] * 3 + ["agentlightning.annotation"]
    assert [span["sequence_id"] for span in spans] == [1, 2, 3, 4]
    assert len({span["span_id"] for span in spans}) == 4
    assert {len(span["trace_id"]) for span in spans} == {32}
    assert [span["status"]["status_code"] for span in spans] == ["OK", "OK", "ERROR", "OK"]
    assert spans[2]["status"]["description"] == "the model server is down"
    assert spans[3]["attributes"]["agentlightning.reward.0.value"] == 1.0
    attributes = spans[1]["attributes"]
    prompt = ast.literal_eval(attributes["llm.hosted_vllm.prompt_token_ids"])
    (choice,) = ast.literal_eval(attributes["llm.hosted_vllm.choices"])
    assert scripted_tokenizer().decode(prompt + choice["token_ids"]).endswith("Done, naïvely ✓." + END)
    assert [token["logprob"] for token in choice["logprobs"]["content"]] == [-0.25] * len(choice["token_ids"])
    assert choice["message"]["content"] == "Done, naïvely ✓."
    assert ast.literal_eval(attributes["llm.hosted_vllm.messages"])[0] == {"role": "system", "content": "S"}


def test_without_token_ids_there_is_a_stream_and_no_dataset(tmp_path: Path):
    fill(tmp_path, [calc_task()])
    with Store.open(tmp_path, create=False) as store:
        export(store, tmp_path / "out")
    assert (tmp_path / "out" / "dataset-calc-0").is_dir()
    fill(tmp_path / "bare", [calc_task()], backend="openai", tokens=False)
    with Store.open(tmp_path / "bare", create=False) as store:
        exported = export(store, tmp_path / "out")
    assert (exported.rows, exported.spans, exported.without_tokens) == (0, 4, 2)
    assert written(tmp_path / "out") == ["stream_calc-0.json"]
    assert "configs" not in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("backend", ["vllm", "embedded"])
def test_an_unknown_tokenizer_leaves_a_rendered_prompt(tmp_path: Path, backend: str):
    fill(tmp_path, [calc_task()], backend=backend, policy="3")  # only weights have a version
    with Store.open(tmp_path, create=False) as store:
        export(store, tmp_path)
    row = datasets.load_from_disk(str(tmp_path / "dataset-calc-0"))[0]
    assert (row["prompt_source"], row["policy_version"]) == ("messages", "3")
    assert row["prompt"].startswith("[system]\nS\n\n[user]\n")


def test_rollouts_without_a_verdict_are_left_out_and_counted(tmp_path: Path):
    tasks = [calc_task(number) for number in range(3)]
    with Store.open(tmp_path) as store:
        wait(store.runs.create("run1", {"backend": "embedded"}))
        wait(store.runs.add_tasks("run1", tasks))
        wait(store.runs.create_rollouts("run1", [(f"r{n}", task.instance_id, 0) for n, task in enumerate(tasks)]))
        attempt = wait(store.runs.start_attempt("r1"))
        error = ErrorInfo("sandbox", "SandboxError", "no space")
        wait(store.runs.finish_attempt(attempt.id, "failed", "failed", error=error))
        exported = export(store, tmp_path)
    assert (exported.instances, exported.left_out) == (0, {"queuing": 2, "failed": 1})
    assert [path.name for path in tmp_path.iterdir() if not path.name.startswith("store.db")] == []


def test_a_new_export_replaces_the_old_and_leaves_nothing_beside(tmp_path: Path):
    fill(tmp_path, [calc_task()])
    for _ in range(2):
        with Store.open(tmp_path, create=False) as store:
            export(store, tmp_path / "out")
        assert written(tmp_path / "out") == ["dataset-calc-0", "stream_calc-0.json"]
    assert len(datasets.load_from_disk(str(tmp_path / "out" / "dataset-calc-0"))) == 2


def test_the_export_has_a_card_that_loads_and_a_manifest_by_which_it_is_pushed(tmp_path: Path):
    tasks = [calc_task(n) for n in range(3)]
    fill(tmp_path / "store", tasks, samples=2)
    out = tmp_path / "out"
    with Store.open(tmp_path / "store", create=False) as store:
        exported = export(store, out)
    # Datasets that this export did not make are not of it.
    shutil.copytree(out / "dataset-calc-0", out / "dataset-calc-0.1")
    loaded = datasets.load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert len(loaded) == exported.rows == 12
    assert loaded.features == datasets.load_from_disk(str(out / "dataset-calc-0")).features
    card = (out / "README.md").read_text()
    assert "only rollouts in sandboxes" in card and "| rollout | 12 |" in card and str(tmp_path) not in card
    planned = plan_push(out, "ann/rollouts")
    assert sorted(planned.files) == sorted([*exported.files, "understudy.json"])
    assert "dataset-calc-2/data-00000-of-00001.arrow" in planned.files and "stream_calc-1.json" in planned.files
    fill(tmp_path / "less", tasks[:1])
    with Store.open(tmp_path / "less", create=False) as store:
        export(store, out)
    assert written(out) == ["dataset-calc-0", "dataset-calc-0.1", "stream_calc-0.json"]


def test_a_saved_dataset_equals_the_one_the_datasets_library_saves(tmp_path: Path):
    columns = {"words": ["string"], "n": "float64", "deep": [{"a": "string", "b": [{"c": "int32"}]}], "s": "bool"}
    rows = [
        {
            "words": ["x", "ü\ud800"],
            "n": 0.5,
            "deep": [{"a": None, "b": [{"c": 3}]}, {"a": "y", "b": []}],
            "s": True,
        },
        {"words": [], "n": None, "deep": [], "s": None},
    ]
    file = SavedDatasetWriter(tmp_path / "ours", columns)
    for row in rows:
        file.write(row)
    file.close()
    ours = datasets.load_from_disk(str(tmp_path / "ours"))
    rows[0]["words"] = ["x", "ü?"]
    theirs = datasets.Dataset.from_list(rows, features=ours.features)
    theirs.save_to_disk(str(tmp_path / "theirs"))
    theirs = datasets.load_from_disk(str(tmp_path / "theirs"))
    assert ours[:] == theirs[:] and ours.data.schema == theirs.data.schema and ours.info == theirs.info
    for name in ("dataset_info.json", "state.json"):
        both = [json.loads((tmp_path / who / name).read_text()) for who in ("ours", "theirs")]
        assert both[0] | {"_fingerprint": ""} == both[1] | {"_fingerprint": ""}


def test_an_unknown_run_id_is_refused_with_the_known_runs(tmp_path: Path):
    fill(tmp_path, [calc_task()])
    with Store.open(tmp_path, create=False) as store, pytest.raises(ConfigError, match=r"'run2'.*run1"):
        export(store, tmp_path, run_id="run2")


def test_a_gateways_own_store_is_refused(tmp_path: Path):
    with Store.open(tmp_path) as store:
        store.keys.add_client("me").result()
        with pytest.raises(ConfigError, match="the store of a gateway, with calls but without runs"):
            export(store, tmp_path)


def test_an_output_that_is_a_file_is_refused(tmp_path: Path):
    fill(tmp_path, [calc_task()])
    (tmp_path / "file").write_text("")
    with Store.open(tmp_path, create=False) as store, pytest.raises(ConfigError, match="--output"):
        export(store, tmp_path / "file")


@pytest.mark.parametrize(
    "name", ["", ".", "..", "../x", "a/b", "/etc", "a\\b", "a\nb", "a\0b", "\x1b[2J", "x" * 190]
)
def test_ids_that_are_no_file_names_are_refused(name: str):
    with pytest.raises(TaskError, match="file name"):
        file_name("dataset-", name)


@pytest.mark.parametrize("name", ["django__django-1234", "toolz-0.1+x", "été"])
def test_safe_ids_are_used_as_file_names_unchanged(name: str):
    assert file_name("stream_", name, ".json") == f"stream_{name}.json"


def test_the_command_prints_json_and_reports_rows_without_token_ids(tmp_path: Path):
    fill(tmp_path, [calc_task()], backend="openai", tokens=False)
    done = understudy("export", "hf", tmp_path, "--json")
    assert json.loads(done.stdout)["without_tokens"] == 2
    done = understudy("export", "hf", tmp_path)
    done.check_returncode()
    assert "1 instances, 1 rollouts, 0 rows and 4 spans" in done.stdout
    assert "no token ids" in done.stderr
