"""The command `understudy replay`: killed, interrupted, wrongly called; teachers count what reaches them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from understudy.cli.app import app
from understudy.errors import ConfigError, UnderstudyError
from understudy.store import Store

from fakes.turns import Step, Turn, tool
from support import UNDERSTUDY, understudy
from support.replay import (
    AnthropicTeacher,
    OpenAITeacher,
    Teacher,
    VLLMTeacher,
    asked_about,
    environment,
    fill,
    session,
    table,
    teachers_of,
    until_seen,
)

PRICE = {"input": 1.0, "output": 2.0}


async def start(tmp_path: Path, *arguments: str) -> asyncio.subprocess.Process:
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(
        str(UNDERSTUDY),
        "replay",
        *arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
        env=environment(tmp_path),
        process_group=0,
    )


async def replay(tmp_path: Path, *arguments: str) -> tuple[int, str, str]:
    done = await asyncio.to_thread(understudy, "replay", *arguments, env=environment(tmp_path))
    return done.returncode, done.stdout, done.stderr


def often(server: Teacher) -> int:
    """How often one state reached a teacher at the most."""
    return max(Counter(asked_about(server)).values(), default=0)


@pytest.mark.services
async def test_a_kill_at_any_moment_asks_nothing_twice_and_stays_below_the_ceiling(tmp_path: Path):
    directory = str(fill(tmp_path / "s", *(session(f"n{number}", turns=4) for number in range(6))))
    gate = asyncio.Semaphore(0)

    def rule(_: dict[str, Any]) -> Step:
        hold = asyncio.Event()
        asyncio.get_running_loop().call_later(0.05, hold.set)
        gate.release()
        return Turn(text="I would look.", tools=[tool("Bash", command="ls")], hold=hold)

    async with OpenAITeacher(rule) as gpt, VLLMTeacher(rule) as qwen, AnthropicTeacher(rule) as claude:
        servers: dict[str, Teacher] = {"gpt": gpt, "qwen": qwen, "claude": claude}
        tables = [
            table(name, server, family="claude" if name == "claude" else name, price=PRICE, max_tokens=200)
            for name, server in servers.items()
        ]
        file = str(teachers_of(tmp_path, *tables))
        arguments = (directory, "-t", file, "--max-cost", "2", "--json", "-j", "4")
        for count in (3, 7, 12):
            process = await start(tmp_path, *arguments)
            for _ in range(count):
                await asyncio.wait_for(gate.acquire(), 60)
            os.killpg(process.pid, signal.SIGKILL)
            await process.communicate()
            while not gate.locked():
                await gate.acquire()
        code, out, err = await replay(tmp_path, *arguments)
        assert code == 0, err
        summary = json.loads(out)
        assert not claude.requests
        assert not claude.headers
        assert often(gpt) == often(qwen) == 1
        with Store.open(Path(directory)) as store:
            asks = store.asks.of_replay("replay")
            statuses = Counter((ask.teacher, ask.status) for ask in asks)
            for name in ("gpt", "qwen"):
                assert statuses[name, "answered"] + statuses[name, "asked"] == 24
                assert len(servers[name].requests) <= 24
            lost = statuses["gpt", "asked"] + statuses["qwen", "asked"]
            assert lost <= 3 * 4
            reserved = sum(ask.reserved_usd or 0 for ask in asks)
            assert (reserved > 0) == (lost > 0)
            spent = store.asks.cost("replay")
            assert summary["cost_usd"] == pytest.approx(spent.cost_usd + spent.reserved_usd)
        before = len(gpt.requests) + len(qwen.requests)
        code, out, err = await replay(tmp_path, *arguments, "--again")
        assert code == 0, err
        assert len(gpt.requests) + len(qwen.requests) == before + lost
        assert not claude.requests


async def test_ctrl_c_once_and_twice(tmp_path: Path):
    directory = str(fill(tmp_path / "s", session("a", turns=12)))
    hold = asyncio.Event()
    async with OpenAITeacher(lambda _: Turn(text="ok", hold=hold)) as gpt:
        file = str(teachers_of(tmp_path, table("gpt", gpt, family="gpt", price=PRICE)))
        process = await start(tmp_path, directory, "-t", file, "-j", "3")
        await until_seen(gpt, 3)
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(1.0)
        hold.set()
        out, err = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 130
        assert "3 answered" in out.decode()
        assert "9 asks are left" in err.decode()
        assert "same command" in err.decode()
        hold.clear()
        process = await start(tmp_path, directory, "-t", file, "-j", "3")
        await until_seen(gpt, 6)
        process.send_signal(signal.SIGINT)
        await asyncio.sleep(1.0)
        process.send_signal(signal.SIGINT)
        _, err = await asyncio.wait_for(process.communicate(), 8)
        assert process.returncode == 130
        assert "Traceback" not in err.decode()
        hold.set()
        code, out, err = await replay(tmp_path, directory, "-t", file, "-j", "3", "--json")
        assert code == 0, err
        tally = json.loads(out)["teachers"]["gpt"]
        assert (tally["answered"], tally["answered_before"], tally["lost"]) == (6, 3, 3)
        assert often(gpt) == 1


async def test_a_dry_run_estimates_and_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    directory = str(fill(tmp_path / "s", session("a", turns=3), session("b", model="gpt-5", turns=2)))
    async with OpenAITeacher() as gpt, VLLMTeacher() as qwen:
        file = str(
            teachers_of(tmp_path, table("gpt", gpt, family="gpt", price=PRICE), table("qwen", qwen, family="qwen"))
        )
        app(["replay", directory, "-t", file, "--dry-run"], standalone_mode=False)
        out = capsys.readouterr().out
        assert "5 states to ask about" in out
        assert "gpt is not asked about 2 states of its own family" in out
        assert "gpt: 3 asks, about" in out
        assert "at the most $0.0" in out
        assert "qwen: 5 asks" in out
        app(["replay", directory, "-t", file, "--dry-run", "--json", "--limit", "2"], standalone_mode=False)
        assert json.loads(capsys.readouterr().out)["estimate"]["qwen"]["asks"] == 2
        monkeypatch.delenv("NO_SUCH_KEY", raising=False)
        keyless = table("gpt", gpt, family="gpt", price=PRICE, api_key_env="NO_SUCH_KEY")
        other = str(teachers_of(tmp_path / "data", keyless))
        with pytest.raises(
            ConfigError, match=r"--teachers: teachers\.gpt: missing API key: the environment variable NO_SUCH_KEY"
        ):
            app(["replay", directory, "-t", other, "--dry-run"], standalone_mode=False)
        assert not gpt.headers and not qwen.headers, "nobody was contacted"
        code, out, err = await replay(tmp_path, directory, "-t", file, "--where", "family = 'gpt'")
        assert code == 0, err
        assert (len(gpt.requests), len(qwen.requests)) == (0, 2)
        assert "qwen: 2 answered" in out
        with Store.open(Path(directory)) as store:
            assert len(store.asks.of_replay("replay")) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere", "-t", "good.toml"], "nowhere does not exist"),
        (["s", "-t", "none.toml"], "--teachers none.toml: cannot be read"),
        (["s", "-t", "bad.toml"], "teachers.one.backend"),
        (["s", "-t", "good.toml", "--judge", "nobody"], "unknown teacher 'nobody'"),
        (["s", "-t", "good.toml", "--where", "nonsense ="], "cannot select states"),
        (["s", "-t", "good.toml", "--max-cost", "1"], "price of one"),
        (["s", "-t", "free.toml", "--max-cost", "-1"], "expected more than 0 and less than"),
        (["s", "-t", "free.toml", "--max-cost", "nan"], "expected more than 0 and less than"),
        (["s", "-t", "good.toml", "--name", "a/b"], "--name"),
        (["s", "-t", "free.toml"], "the environment variable NO_SUCH_KEY_HERE is not set"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str
):
    fill(tmp_path / "s", session("a"))
    (tmp_path / "good.toml").write_text(
        '[teachers.one]\nbackend = "openai"\nmodel = "some-gpt"\napi_key_env = "NO_SUCH_KEY_HERE"\n'
    )
    free = (tmp_path / "good.toml").read_text() + "price = { input = 0, output = 0 }\n"
    (tmp_path / "free.toml").write_text(free)
    (tmp_path / "bad.toml").write_text('[teachers.one]\nbackend = "oracle"\nmodel = "m"\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    with pytest.raises(UnderstudyError, match=re.escape(message)):
        app(["replay", *arguments], standalone_mode=False)


async def test_two_at_once_are_refused(tmp_path: Path):
    directory = str(fill(tmp_path / "s", session("a")))
    hold = asyncio.Event()
    async with OpenAITeacher(lambda _: Turn(text="ok", hold=hold)) as gpt:
        file = str(teachers_of(tmp_path, table("gpt", gpt, family="gpt")))
        process = await start(tmp_path, directory, "-t", file)
        await until_seen(gpt, 1)
        code, _, err = await replay(tmp_path, directory, "-t", file)
        assert (code, "another process" in err) == (2, True)
        hold.set()
        await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 0
        assert len(gpt.requests) == 1


async def test_what_is_sent_is_redacted_unless_the_user_says_otherwise(tmp_path: Path):
    secret = "AKIA" + "QX7Z3LMNP4RST6UV"
    fill(tmp_path / "s", session("/home/erika/logs/a", turns=2, text=f"use {secret} in /home/erika/x"))
    async with OpenAITeacher() as gpt, AnthropicTeacher() as other:
        tables = (table("gpt", gpt, family="gpt"), table("other", other, family="x"))
        arguments = (str(tmp_path / "s"), "-t", str(teachers_of(tmp_path, *tables)))
        code, _, err = await replay(tmp_path, *arguments, "--where", "position = 1")
        assert code == 0, err
        for server in (gpt, other):
            assert len(server.requests) == 1
            assert secret not in json.dumps(server.requests)
            assert "erika" not in json.dumps(server.requests)
        code, _, err = await replay(tmp_path, *arguments, "--unredacted", "--name", "raw", "--limit", "1")
        assert code == 0, err
        assert secret in json.dumps(gpt.requests[1])
