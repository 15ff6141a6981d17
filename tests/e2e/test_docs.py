"""Every command in the README and in docs/ is run, or at least understood, as it stands there."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from understudy.cli import app
from understudy.gateway.config import parse_config
from understudy.types import Task
from understudy.util.settings import read_toml

from support import understudy, warm, warm_socket

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"(?:<!-- docs-test: (\w+) -->\n)?```(sh|json|toml)\n(.*?)```", re.DOTALL)
MARK = re.compile(r"<!-- docs-test: (.*?) -->")
MARKS = {"run", "help", "elsewhere", "teachers", "tutorial"}
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
COMMAND = re.compile(r"^\s*(\$ )?(understudy|python|pip|make) ", re.MULTILINE)
OUTSIDE = ("make", "vllm")
"""Commands that a test cannot run in place: CI itself calls make, and vllm needs a GPU."""


def blocks(language: str, mark: str | None) -> list[tuple[str, str]]:
    """(page, text) of each code block in a language with a mark."""
    return [
        (page.name, match[3])
        for page in PAGES
        for match in BLOCK.finditer(page.read_text())
        if match[2] == language and match[1] == mark
    ]


@pytest.mark.e2e
@pytest.mark.usefixtures("claude_code", "isolation")
@pytest.mark.parametrize(
    ("page", "text"),
    [
        # The tiny model needs torch, and many tokens for a task; validating the smoke tasks takes a minute.
        pytest.param(page, text, marks=pytest.mark.services if re.search("(--tasks|check) smoke", text) else ())
        for page, text in blocks("sh", "run")
    ],
)
def test_blocks_to_run(page: str, text: str, tmp_path: Path):
    run_script(page, text, tmp_path, timeout=280)


@pytest.mark.e2e
@pytest.mark.services
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("claude_code", "isolation")
def test_the_tutorial_makes_the_model_better(tmp_path: Path):
    """Its blocks one after the other: what a block leaves is what the next one works on.

    The untrained model, which solves nothing, takes each task once: 36 rollouts fewer.
    """
    text = "".join(text for _, text in blocks("sh", "tutorial"))
    script = text.replace("--samples 4 --output-dir runs/before", "--samples 1 --output-dir runs/before")
    assert script != text
    work = run_script("tutorial.md", script, tmp_path, timeout=3500)
    done = understudy("report", work / "runs" / "before", work / "runs" / "after", "--json", cwd=work)
    before, after = [point["solve_rate"]["estimate"] for point in json.loads(done.stdout)["points"]]
    assert before < after


def run_script(page: str, text: str, tmp_path: Path, *, timeout: float) -> Path:
    """Run a page's commands in an empty directory, which is returned; a command that fails is an error."""
    script = text.replace("source .venv/bin/activate\n", "")
    quick = tmp_path / "bin" / "understudy"
    quick.parent.mkdir()
    quick.write_text(f'#!/bin/sh\nexec {shlex.join(warm.COMMAND)} "$@"\n')
    quick.chmod(0o755)
    path = os.pathsep.join([str(quick.parent), str(Path(sys.executable).parent), os.environ["PATH"]])
    work = tmp_path / "work"
    work.mkdir()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=work,
        env={**os.environ, "PATH": path, warm.SOCKET: warm_socket()},
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=timeout,
        check=False,
    )
    assert done.returncode == 0, f"{page}:\n{done.stdout}\n{done.stderr}"
    return work


@functools.cache
def usage(*command: str) -> str:
    """What a command's help says, asked for once, however many lines of the pages give it."""
    if command[0] == "understudy":
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as stdout:
            patch.setenv("COLUMNS", "200")
            assert app.app([*command[1:], "--help"], standalone_mode=False) in (None, 0)
        return stdout.getvalue()
    arguments = [sys.executable, *command[1:], "--help"]
    return subprocess.run(arguments, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(("page", "text"), [*blocks("sh", "help"), *blocks("sh", "elsewhere")])
def test_blocks_whose_options_must_exist(page: str, text: str):
    """Those for other machines may have other commands too."""
    elsewhere = blocks("sh", "elsewhere")
    for line in text.replace("\\\n", "").strip().splitlines():
        arguments = shlex.split(line, comments=True)
        if not arguments:
            continue
        ours = arguments[:1] == ["understudy"] or (
            arguments[:2] == ["python", "-m"] and "understudy" in arguments[2]
        )
        if (page, text) in elsewhere and not ours:
            continue
        assert ours, f"{page}: {line}"
        count = 3 if arguments[0] == "python" or "COMMAND [ARGS]" in usage(*arguments[:2]) else 2
        help_text = usage(*arguments[:count])
        for option in (word.partition("=")[0] for word in arguments[count:] if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_text), f"{page}: {option}"


def test_no_other_command_stands_there():
    for page, text in blocks("sh", None):
        for line in text.strip().splitlines():
            assert line.split()[0] in OUTSIDE, f"{page}: {line!r} is run by no test; mark its block"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_command_stands_in_a_block_that_is_read(page: Path):
    text = page.read_text()
    assert set(MARK.findall(text)) <= MARKS
    fenced = FENCE.findall(text)
    assert {kind for kind, _ in fenced} <= {"", "sh", "json", "toml"}
    unread = [body for kind, body in fenced if not kind]
    unread += re.findall(r"^ {4}.*$", FENCE.sub("", text), re.MULTILINE)
    assert not [body for body in unread if COMMAND.search(body)]


@pytest.mark.parametrize(("page", "text"), blocks("json", None))
def test_the_record_in_the_docs_is_a_task(page: str, text: str):
    task = msgspec.json.decode(json.dumps(json.loads(text)), type=Task)
    assert task.instance_id, page


@pytest.mark.parametrize(("page", "text"), blocks("toml", None))
def test_the_configuration_in_the_docs_is_one(page: str, text: str, tmp_path: Path):
    file = tmp_path / "models.toml"
    file.write_text(text)
    assert parse_config(read_toml(file), file).models.high.model, page
