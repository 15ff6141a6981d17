"""The trainer in a process of its own, driven as the loop drives it."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import uvloop
from msgspec import structs

from understudy.errors import ConfigError
from understudy.train.groups import write_groups
from understudy.train.loop.trainer_process import TrainerProcess, start_trainer
from understudy.train.options import GRPOOptions
from understudy.train.weights import read_weights_record

from support import optional
from support.train import make_groups

optional("torch")

OPTIONS = GRPOOptions(learning_rate=1e-2)


def saved(directory: Path) -> bytes:
    return (directory / "model.safetensors").read_bytes()


@pytest.mark.services
async def test_the_trainer_process_resumes_from_saved_weights_and_its_exit_is_reported(
    model: Path, tmp_path: Path
):
    groups = tmp_path / "groups.msgpack"
    write_groups(groups, make_groups())
    async with start_trainer(model, OPTIONS, threads=1) as trainer:
        assert trainer.ready.step == 0 and trainer.ready.trained == trainer.ready.parameters > 0
        first = await trainer.update(groups, 1, "step-0001", tmp_path / "one")
        assert first.updated and first.version == "step-0001" and first.groups == 3
        with pytest.raises(ConfigError, match="cannot be read"):
            await trainer.update(tmp_path / "none", 2, "step-0002", tmp_path / "two")
        second = await trainer.update(groups, 2, "step-0002", tmp_path / "two")
    written = read_weights_record(tmp_path / "two")
    assert written is not None and written.version == "step-0002"
    async with start_trainer(model, OPTIONS, resume=tmp_path / "one", threads=1) as trainer:
        assert trainer.ready.step == 1
        again = await trainer.update(groups, 2, "step-0002", tmp_path / "again")
        os.kill(trainer.pid, 9)
        with pytest.raises(ConfigError, match=r"ended by signal 9.*--micro-batch-tokens"):
            await trainer.update(groups, 3, "step-0003", tmp_path / "three")
    assert not (tmp_path / "three").exists()
    assert structs.replace(again, seconds=0) == structs.replace(second, seconds=0)
    assert saved(tmp_path / "again") == saved(tmp_path / "two") != saved(tmp_path / "one")


async def test_a_model_that_cannot_be_loaded_is_a_config_error(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"no config\.json"):
        async with start_trainer(tmp_path, OPTIONS):
            pass


def test_invalid_commands_get_a_response_and_the_trainer_ends_with_its_parent(model: Path):
    program = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from understudy.train.options import GRPOOptions\n"
        "from understudy.train.loop.trainer_process import start_trainer\n"
        "async def main():\n"
        "    async with start_trainer(Path(sys.argv[1]), GRPOOptions(), threads=1) as trainer:\n"
        "        print(trainer.pid, flush=True)\n"
        "        for order in (b'no', b'{\"op\": \"dance\"}'):\n"
        "            trainer._process.stdin.write(order + b'\\n')\n"
        "            print((await trainer._line()).decode().strip(), flush=True)\n"
        "        await asyncio.sleep(600)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, model], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        trainer = int(parent.stdout.readline())
        answers = [json.loads(parent.stdout.readline())["error"]["message"] for _ in range(2)]
        parent.kill()
    assert "invalid command" in answers[0] and "'dance'" in answers[1]
    deadline = time.monotonic() + 60
    while _runs(trainer) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _runs(trainer)


def test_an_earlier_exit_of_the_trainer_is_reported_at_the_next_update(tmp_path: Path):
    (tmp_path / "fleeting.py").write_text("print('no room', file=__import__('sys').stderr)")

    async def order() -> None:
        async with TrainerProcess.running("fleeting", [], {**os.environ, "PYTHONPATH": str(tmp_path)}) as trainer:
            await trainer._wait()
            await asyncio.sleep(0.1)  # until the pipe is closed, too
            await trainer.update(tmp_path / "groups", 1, "step-0001", tmp_path / "one")

    with pytest.raises(ConfigError, match="process ended with exit code 0; its last output: no room"):
        uvloop.run(order())


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
