"""Task folders: Harbor's layout and the simple one, read, built and refused."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from understudy.config import cache_dir
from understudy.errors import TaskError
from understudy.sandbox.unsafe import UnsafeSandboxes
from understudy.tasks import dockerfile, load
from understudy.tasks.dockerfile import copy_entry
from understudy.tasks.environment import TaskEnvironment, python_environment
from understudy.tasks.folder import load_folder
from understudy.types import Directory, ScriptChecks, Task

TOML = """\
version = "1.0"
[task]
name = "org/answer"
[metadata]
difficulty = "easy"
tags = ["a"]
[verifier]
timeout_sec = 60.0
env = { LEVEL = "2" }
[agent]
timeout_sec = 90.0
[environment]
cpus = 1
memory_mb = 2048
"""
DOCKERFILE = """\
# syntax=docker/dockerfile:1
FROM --platform=linux/amd64 python:3.11-slim AS base

ENV GREETING="hello world" \\
    # why not
    NAME=x
WORKDIR /app
COPY data/ ./data/
COPY *.txt /app/
RUN printf '%s' "$GREETING" > greeting.txt && \\
    mkdir out && printf '\\000\\377' > out/blob.bin
RUN ["chmod", "+x", "greeting.txt"]
ADD late.txt out/$NAME.txt
"""
SOLVE = (
    "#!/bin/bash\necho 42 > answer.txt\nprintf '\\000\\002' > out/blob.bin\nrm greeting.txt\nmkdir __pycache__\n"
)


def write(root: Path, files: dict[str, str | bytes | None]) -> Path:
    for name, content in files.items():
        path = root / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


@pytest.fixture
def harbor(tmp_path: Path) -> Path:
    return write(
        tmp_path / "tasks" / "answer",
        {
            "task.toml": TOML,
            "instruction.md": "Make answer.txt say 42.\n",
            "environment/Dockerfile": DOCKERFILE,
            "environment/data/x.txt": b"a\r\nb",
            "environment/late.txt": "late\n",
            "tests/test.sh": 'test "$(cat answer.txt)" = 42\n',
            "tests/helper.bin": b"\x00\xff",
            "solution/solve.sh": SOLVE,
        },
    )


@pytest.fixture
def simple(tmp_path: Path) -> Path:
    return write(
        tmp_path / "tasks" / "plain task!",
        {
            "instruction.md": "Make a say b.\n",
            "tree/a": b"a\n\xff\x00",
            "tree/sub/b": "x",
            "tests/test.sh": "grep -q b a\n",
            "gold.patch": "diff --git a/sub/b b/sub/b\n",
        },
    )


def files_of(root: Path) -> dict[str, bytes]:
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def apply(patch: str, tree: Path) -> None:
    subprocess.run(["git", "apply", "-"], cwd=tree, input=patch.encode(), check=True)


async def take(folder: Path, cache: Path) -> Task:
    return await load_folder(folder, sandboxes=UnsafeSandboxes(), environment=TaskEnvironment(), cache=cache)


async def test_a_folder_in_harbor_layout_becomes_a_task(harbor: Path, tmp_path: Path) -> None:
    task = await take(harbor, tmp_path / "cache")
    assert (task.instance_id, task.repo, task.workdir) == ("answer", "org/answer", "/app")
    assert task.env == {"GREETING": "hello world", "NAME": "x"}
    assert task.instruction == "Make answer.txt say 42.\n"
    assert task.meta == {"agent_timeout_s": 90.0, "metadata": {"difficulty": "easy", "tags": ["a"]}}
    assert isinstance(task.checks, ScriptChecks)
    assert task.checks.command == ("env", "LEVEL=2", "bash", "/tests/test.sh")
    assert task.checks.timeout_s == 60
    assert isinstance(task.source, Directory)
    tree = Path(task.source.path)
    assert files_of(tree) == {
        "data/x.txt": b"a\r\nb",
        "late.txt": b"late\n",
        "greeting.txt": b"hello world",
        "out/blob.bin": b"\x00\xff",
        "out/x.txt": b"late\n",
    }
    assert os.access(tree / "greeting.txt", os.X_OK)
    assert isinstance(task.checks.source, Directory)
    assert (Path(task.checks.source.path) / "helper.bin").read_bytes() == b"\x00\xff"
    apply(task.gold_patch, tree)
    assert (tree / "answer.txt").read_text() == "42\n"
    assert (tree / "out/blob.bin").read_bytes() == b"\x00\x02"
    assert not (tree / "greeting.txt").exists()


async def test_an_unchanged_folder_keeps_its_source_and_a_changed_one_gets_another(
    harbor: Path, tmp_path: Path
) -> None:
    first = await take(harbor, tmp_path / "cache")
    assert await take(harbor, tmp_path / "cache") == first
    write(harbor, {"environment/late.txt": "later\n"})
    changed = await take(harbor, tmp_path / "cache")
    assert changed.source != first.source


async def test_a_folder_in_the_simple_layout_becomes_a_task(simple: Path, tmp_path: Path) -> None:
    task = await take(simple, tmp_path / "cache")
    assert (task.instance_id, task.workdir) == ("plain-task", "/workspace")
    assert task.gold_patch == "diff --git a/sub/b b/sub/b\n"
    assert isinstance(task.source, Directory)
    assert (Path(task.source.path) / "a").read_bytes() == b"a\n\xff\x00"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"instruction.md": None}, r"instruction\.md: .*expected the agent's instruction: create it"),
        ({"instruction.md": " \n"}, r"instruction\.md: is empty"),
        ({"instruction.md": b"\xff"}, r"instruction\.md: is not UTF-8"),
        ({"task.toml": None}, r"task\.toml: missing"),
        ({"task.toml": "[verifier\n"}, r"task\.toml: invalid TOML: .*line 1"),
        (
            {"task.toml": "[verifier]\ntimeout_sec = 'long'"},
            r"task\.toml: verifier\.timeout_sec: expected `float`, got 'long'; correct",
        ),
        (
            {"task.toml": "[verifier]\ntimeout_sec = -1"},
            r"verifier\.timeout_sec: expected `float` > 0\.0, got -1;",
        ),
        ({"task.toml": "[verifier]\ntimeout_sec = nan"}, r"verifier\.timeout_sec: expected `float` .*, got nan;"),
        ({"task.toml": "[verifier.env]\nK = '${OPENAI_KEY}'"}, r"verifier\.env\.K: .* give a plain value"),
        ({"task.toml": "[verifier.env]\n'-i' = 'x'"}, r"verifier\.env: invalid name '-i'"),
        ({"task.toml": "[environment]\ngpus = 1"}, r"environment\.gpus is 1: sandboxes have no GPU"),
        ({"task.toml": "[[steps]]\nname = 'a'"}, "several steps"),
        ({"tests/test.sh": None}, r"tests/test\.sh: .*expected the script"),
        ({"environment/Dockerfile": None}, "exactly one of environment/Dockerfile and tree/"),
        ({"tree/x": ""}, "exactly one of environment/Dockerfile and tree/"),
        ({"solution/solve.sh": None}, r"neither gold\.patch nor solution/solve\.sh"),
        ({"solution/solve.sh": "echo why; exit 3"}, r"(?s)solve\.sh: ended with exit code 3.*why"),
        ({"solution/solve.sh": "true"}, "gold_patch: got .*, expected"),
    ],
)
async def test_an_invalid_folder_is_refused_with_the_reason(
    harbor: Path, tmp_path: Path, files: dict[str, str | bytes | None], message: str
) -> None:
    write(harbor, files)
    with pytest.raises(TaskError, match=message):
        await take(harbor, tmp_path / "cache")


@pytest.mark.parametrize(
    ("text", "line", "message"),
    [
        ("WORKDIR /app\n", 1, "expected FROM as the first instruction"),
        ("FROM a\nUSER me\n", 2, "unknown instruction USER: expected one of"),
        ("FROM a\nARG X=1\n", 2, "unknown instruction ARG: expected one of"),
        ("FROM a\nFROM b\n", 2, "a second FROM"),
        ("FROM $A\n", 1, "expected FROM IMAGE"),
        ("FROM a\nWORKDIR /app\nRUN --network=host ls\n", 3, "--network=host"),
        ("FROM a\nWORKDIR /app\nRUN cat <<EOF\n", 3, "here-document"),
        ("FROM a\nWORKDIR /app\n\nCOPY --from=x a b\n", 4, "--from=x"),
        ("FROM a\nWORKDIR /app\nCOPY ../../etc/passwd .\n", 3, "outside of the build context"),
        ("FROM a\nWORKDIR /app\nADD https://e.x/a .\n", 3, "URLs are unsupported"),
        ("FROM a\nWORKDIR /app\nADD a.tar.gz .\n", 3, "ADD a.tar.gz .: archives are unsupported"),
        ("FROM a\nWORKDIR /app\nCOPY a /etc/\n", 3, "outside the last WORKDIR /app"),
        ("FROM a\nRUN ls\nWORKDIR /app\n", 2, "outside the last WORKDIR /app"),
        ("FROM a\nENV PATH=/x:$PATH\n", 2, r"\$PATH: not set by an earlier ENV"),
        ("RUN true\nFROM a\n", 1, "RUN before FROM, expected FROM as the first instruction"),
        ("FROM a\nENV PATH=/x\n", 2, "ENV PATH"),
        ("FROM a\nENV A='unclosed\n", 2, "No closing quotation"),
        ("FROM a\nENV =x\n", 2, "expected NAME=value"),
        ("FROM a\nWORKDIR /app\nCOPY a\n", 3, "expected at least one source and a target"),
        ("FROM a\nWORKDIR /app\nRUN [1]\n", 3, "JSON array"),
        ("FROM a\nWORKDIR /app\nCOPY\n", 3, "expected at least one source and a target"),
        ("FROM a\nWORKDIR /app\nADD []\n", 3, "expected at least one source and a target"),
        ("FROM a\nWORKDIR /a b\n", 2, "WORKDIR /a b: expected one path, got 2; give one, in quotes"),
        ("FROM a\nWORKDIR\n", 2, "WORKDIR : expected one path, got 0"),
    ],
)
def test_dockerfile_refusals_name_the_line(tmp_path: Path, text: str, line: int, message: str) -> None:
    path = tmp_path / "Dockerfile"
    path.write_text(text)
    with pytest.raises(TaskError, match=rf"Dockerfile:{line}: .*{message}"):
        dockerfile.read_dockerfile(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty; expected a Dockerfile"),
        ("# FROM a\n", "no instruction; expected FROM"),
        ("FROM a\n", "WORKDIR is missing"),
        ("FROM a\nWORKDIR /\n", "WORKDIR is /;"),
    ],
)
def test_a_dockerfile_without_required_instructions_is_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "Dockerfile").write_text(text)
    with pytest.raises(TaskError, match=message):
        dockerfile.read_dockerfile(tmp_path / "Dockerfile")


async def test_a_failing_run_instruction_is_reported_with_line_and_output(harbor: Path, tmp_path: Path) -> None:
    write(harbor, {"environment/Dockerfile": "FROM a\nWORKDIR /app\nRUN true\nRUN echo no luck; exit 7\n"})
    with pytest.raises(
        TaskError, match=r"(?s)Dockerfile:4: RUN ended with exit code 7.*no luck.*--sandbox docker"
    ):
        await take(harbor, tmp_path / "cache")
    assert files_of(tmp_path / "cache" / "folders") == {}


async def test_a_missing_copy_source_is_reported_with_its_line(harbor: Path, tmp_path: Path) -> None:
    write(harbor, {"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY gone.* .\n"})
    with pytest.raises(TaskError, match=r"Dockerfile:3: 'gone\.\*' matches no file"):
        await take(harbor, tmp_path / "cache")


async def test_copy_refuses_links_that_leave_the_tree(harbor: Path, tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"secret": "s"})
    environment = harbor / "environment"
    (environment / "leak").symlink_to(outside / "secret")
    write(harbor, {"environment/Dockerfile": "FROM a\nWORKDIR /app\nCOPY leak x\n"})
    with pytest.raises(TaskError, match="outside of the build context"):
        await take(harbor, tmp_path / "cache")
    (environment / "leak").unlink()
    (environment / "links").mkdir()
    (environment / "links" / "way").symlink_to(outside)
    text = "FROM a\nWORKDIR /app\nCOPY links/ .\nCOPY data/ way/\n"
    write(harbor, {"environment/Dockerfile": text})
    with pytest.raises(TaskError, match=r"Dockerfile:4: way leads outside"):
        await take(harbor, tmp_path / "cache")
    assert sorted(path.name for path in outside.iterdir()) == ["secret"]


def test_copy_entry_replaces_links_and_never_follows_them(tmp_path: Path) -> None:
    outside = write(tmp_path / "outside", {"keep": "kept"})
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "d").symlink_to(outside)
    (tree / "f").symlink_to(outside / "keep")
    copy_entry(write(tmp_path / "new", {"d/keep": "new", "f": "new"}), tree)
    assert (outside / "keep").read_text() == "kept"
    assert (tree / "d" / "keep").read_text() == (tree / "f").read_text() == "new"
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TaskError, match="is a special file"):
        copy_entry(tmp_path / "pipe", tree / "p")


async def test_load_source_recognises_folders_of_tasks_and_single_tasks(
    harbor: Path, simple: Path, tmp_path: Path
) -> None:
    python_environment(cache_dir())
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "envs").symlink_to(cache_dir() / "envs")
    sandboxes = UnsafeSandboxes()
    both = tmp_path / "both"
    copy_entry(harbor.parent, both)
    loaded = await load.load_source(str(both), sandboxes=sandboxes, cache=cache)
    assert [task.instance_id for task in loaded.tasks] == ["answer", "plain-task"]
    loaded = await load.load_source(str(both), sandboxes=sandboxes, cache=cache, instance_ids=["plain-task"])
    assert [task.instance_id for task in loaded.tasks] == ["plain-task"]
    (one,) = (await load.load_source(str(both / "plain task!"), sandboxes=sandboxes, cache=cache)).tasks
    assert one.instance_id == "plain-task"
    for spec, message in ((both / "gone", "does not exist"), (both / "plain task!" / "tree", "unsupported kind")):
        with pytest.raises(TaskError, match=message):
            await load.load_source(str(spec), sandboxes=sandboxes, cache=cache)
