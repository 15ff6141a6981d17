"""The command line's surface: help, versions, errors, and what importing does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

import understudy as package
from understudy import plugins
from understudy.agents.packages import AGENT_PACKAGES
from understudy.errors import ConfigError

from support import understudy


@pytest.mark.parametrize(
    "command",
    [
        (),
        ("run",),
        ("grade",),
        ("ingest",),
        ("integrity",),
        ("show",),
        ("report",),
        ("doctor",),
        ("setup",),
        ("tasks", "make"),
        ("tasks", "check"),
        ("export", "hf"),
    ],
)
def test_every_command_has_help(command: tuple[str, ...]):
    done = understudy(*command, "--help")
    assert done.returncode == 0
    assert "Usage: understudy" in done.stdout


def test_help_shows_defaults_and_table_names_in_brackets():
    help_text = " ".join(understudy("run", "--help").stdout.split())
    for expected in ("[default: embedded]", "[sampling.evaluation]", "[default: CPUs + 1]"):
        assert expected in help_text


def test_version():
    assert understudy("--version").stdout == f"understudy {package.__version__}\n"


def test_help_loads_nothing_heavy():
    script = (
        "import sys; sys.argv = ['understudy', '--help']\n"
        "from understudy.cli.app import app\n"
        "try: app()\n"
        "except SystemExit: pass\n"
        "heavy = {'sqlalchemy', 'alembic', 'aiohttp', 'uvicorn', 'datasets', 'pyarrow', 'tokenizers'}\n"
        "heavy |= {'torch', 'transformers', 'matplotlib'}\n"
        "print(sorted(heavy & set(sys.modules)), file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"


def test_long_output_is_complete_although_signals_interrupt_it_unbuffered():
    """As with PYTHONUNBUFFERED in a container, while children of a command end."""
    script = (
        "import signal, sys\n"
        "from understudy.cli import app as commands\n"
        "from understudy.cli.main import main\n"
        "from understudy.cli.output import print_json\n"
        "signal.signal(signal.SIGALRM, lambda *_: None)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)\n"
        "commands.app = lambda: print_json({'text': 'x' * 4_000_000})\n"
        "main()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=env) as process:
        assert process.stdout is not None
        pieces = [process.stdout.read(1)]
        time.sleep(0.5)
        pieces.append(process.stdout.read())
    assert process.returncode == 0
    assert len(json.loads(b"".join(pieces))["text"]) == 4_000_000


def test_doctor_names_everything_with_its_state():
    report = json.loads(understudy("doctor", "--json").stdout)
    names = {check["name"] for check in report["checks"]}
    assert {"Python", "git", "sandbox: local", "npm", "Claude Code", "cache directory"} <= names
    assert all(check["ok"] or check["remedy"] for check in report["checks"])


def test_doctor_names_what_each_extra_is_for():
    """A Python without the extras: each is missed by name, none is required, and the remedy is its own."""
    script = (
        "import sys\n"
        "sys.modules.update(dict.fromkeys(('pyarrow', 'datasets', 'torch', 'trl')))\n"
        "from understudy.cli.main import main\n"
        "main()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script, "doctor", "--json"], capture_output=True, check=False)
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    writing = checks["pyarrow (writing and reading datasets)"]
    assert (writing["ok"], writing["required"]) == (False, False)
    assert writing["remedy"] == "pip install 'understudy[hf]'"
    assert not checks["datasets (tasks of the Hugging Face Hub)"]["ok"]
    assert checks["training"]["remedy"] == "pip install 'understudy[train]'"
    assert "torch" in checks["training"]["found"] and "trl" in checks["training"]["found"]
    assert not checks["training"]["required"]
    assert "GPU (training)" in checks


def test_doctor_on_a_machine_that_lacks_things(tmp_path: Path):
    done = understudy("doctor", "--json", env={"PATH": str(tmp_path), "UNDERSTUDY_CACHE": str(tmp_path / "cache")})
    assert done.returncode == 1
    report = json.loads(done.stdout)
    missing = {check["name"] for check in report["checks"] if not check["ok"]}
    assert {"git", "Claude Code"} <= missing
    assert report["ok"] is False


def test_doctor_shows_each_agent_and_how_it_is_installed(tmp_path: Path):
    done = understudy("doctor", "--json", env={"UNDERSTUDY_CACHE": str(tmp_path / "cache")})
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    others = [package for package in AGENT_PACKAGES.values() if package.agent != "claude-code"]
    assert len(others) == 7
    for agent in others:
        check = checks[f"agent: {agent.title}"]
        assert (check["ok"], check["required"]) == (False, False)
        if not agent.unsupported:
            assert check["found"] == f"{agent.version} is not fetched"
            assert check["remedy"] == f"understudy setup --agent {agent.agent}"


def test_a_key_with_an_invalid_budget_is_refused_and_the_old_key_stays_valid(tmp_path: Path):
    assert understudy("gateway", "issue", "me", "--dir", tmp_path).returncode == 0
    done = understudy("gateway", "issue", "me", "--dir", tmp_path, "--cost-usd", "-1")
    assert (done.returncode, done.stdout) == (2, "")
    assert "cost_usd: expected a number above 0" in done.stderr
    assert understudy("gateway", "keys", "--dir", tmp_path).stdout == "me\tworks\n"


def test_an_unknown_agent_adapter_is_refused_with_the_available_ones():
    with pytest.raises(ConfigError, match=r"give one of: .*claude-code, .*shell"):
        plugins.load("agents", "nobody")


def test_show_and_export_of_a_directory_without_a_store(tmp_path: Path):
    for command in (("show", "--dir"), ("export", "hf")):
        done = understudy(*command, tmp_path / "nothing")
        assert done.returncode == 2
        assert "nothing" in done.stderr
        assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_while_the_command_is_being_imported_is_an_interrupt():
    script = (
        "import os, signal, sys\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "class Interrupting:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'typer': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Interrupting())\n"
        "from understudy.cli.main import main\n"
        "main()\n"
        "signal.setitimer(signal.ITIMER_REAL, 0)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "understudy: interrupted\n")


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_full_disk_under_stdout_is_reported(unbuffered: str):
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run(
            [sys.executable, "-c", "from understudy.cli.main import main; main()", "--version"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    assert done.returncode == 2
    assert done.stderr.startswith("understudy: ") and "No space left on device" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_stdout_pipe_is_no_error(unbuffered: str):
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", "from understudy.cli.main import main; main()", "--help"],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
    )
    os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


def test_help_names_each_command_in_a_whole_sentence():
    done = understudy("--help", env={"COLUMNS": "80"})
    _, _, commands = done.stdout.partition("Commands:\n")
    assert len(commands.splitlines()) == 29
    assert all(line.endswith(".") and not line.endswith("...") for line in commands.splitlines())


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "postgres://me:geheim@h/db"),
        ("redact", "--dir=postgresql://me:geheim@h/db"),
        ("gateway", "serve", "vllm", "--dir", "postgresql://me:geheim@h/db"),
        ("gateway", "issue", "me", "--dir", "postgresql://me:geheim@h/db"),
        ("train", "sft", "tiny", "--from", "postgresql://me:geheim@h/db"),
        ("ingest", "postgresql://me:geheim@h/db"),
    ],
)
def test_a_database_is_refused_where_a_directory_is_needed(arguments: tuple[str, ...], tmp_path: Path):
    done = understudy(*arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert f"understudy {arguments[0]} needs a directory, and postgresql://me@h/db is a database" in done.stderr
    assert "understudy store copy 'postgresql://me@h/db' DIRECTORY" in done.stderr
    assert "geheim" not in done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
