"""Rollouts for another trainer: each is an `understudy run` in a process of its own, sampled by that trainer's own
servers through a bridge.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from understudy.errors import BackendError, ConfigError
from understudy.train import groups
from understudy.train.engines.bridge import Bridge, BridgeSession, Generate
from understudy.train.groups import TrainingRollout

_RUN_CODE = "from understudy.cli.main import main; main()"
_OUTPUT_TAIL = 2000
_STOP_S = 20.0
_SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


def missing_instance_id(where: str) -> ConfigError:
    """Return the error for a trainer's row without the id of its task; `where` is the key that should hold it."""
    return ConfigError(
        f"missing {where}, by which a rollout finds its task; make the dataset with `understudy export verl "
        "RUN_DIR --form rl --output DIR`"
    )


class RolloutRunner:
    """Runs an agent on tasks, with a model whose sampling the caller provides.

    `model` is the directory or name of the model's tokenizer, `context` the maximum length of prompt and answer in
    tokens, `tasks` as for `understudy run --tasks`. `output` gets a directory for each rollout, removed after it
    was read unless `keep`. `options` are passed to `understudy run`. `tool_format` is the syntax of the model's
    tool calls (docs/gateway.md). At most `concurrency` rollouts run at a time; all if it is None.
    """

    _bridges: ClassVar[dict[tuple[asyncio.AbstractEventLoop, str, int], asyncio.Task[Bridge]]] = {}

    def __init__(
        self,
        model: str,
        *,
        context: int,
        tasks: Sequence[str],
        output: Path,
        options: Sequence[str] = (),
        tool_format: str = "hermes",
        keep: bool = True,
        concurrency: int | None = None,
    ) -> None:
        self._model = model
        self._context = context
        self._tasks = list(tasks)
        self._output = output
        self._options = list(options)
        self._tool_format = tool_format
        self._keep = keep
        self._slots = contextlib.nullcontext() if concurrency is None else asyncio.Semaphore(concurrency)

    async def run(
        self,
        instance: str,
        generate: Generate,
        sampling: Mapping[str, Any],
        *,
        name: str | None = None,
        seed: int = 0,
    ) -> tuple[TrainingRollout, tuple[int, int]]:
        """Run and grade one rollout of a task, in the directory `name`; return it with the steps of the oldest and
        the newest weights that sampled it (0, 0 if unknown).

        Of the trainer's `sampling`, temperature and the like override what the agent requests. Raises ConfigError
        or BackendError when the infrastructure, not the model, failed. When cancelled, the agent is stopped.
        """
        async with self._slots:
            bridge = await self._bridge()
            chosen = {key: sampling[key] for key in _SAMPLING_KEYS if sampling.get(key) is not None}
            session = bridge.open(generate, chosen)
            directory = self._output / (name or f"{instance}-{uuid.uuid4().hex[:12]}")
            try:
                await self._collect(instance, session, directory, seed)
                rollout = await asyncio.to_thread(_read_rollout, directory, instance)
            finally:
                bridge.close(session)
                if not self._keep:
                    await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
            return rollout, (min(session.steps), max(session.steps)) if session.steps else (0, 0)

    async def _bridge(self) -> Bridge:
        """Return the bridge of this process: started for its first rollout, and running until the process ends."""
        key = (asyncio.get_running_loop(), self._model, self._context)
        if key not in self._bridges:
            self._bridges[key] = asyncio.create_task(Bridge(self._model, self._context).__aenter__())
        return await asyncio.shield(self._bridges[key])

    async def _collect(self, instance: str, session: BridgeSession, directory: Path, seed: int) -> None:
        """Run one rollout into `directory`. Raises BackendError with the output's end when the run fails."""
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        config = directory / "gateway.toml"
        config.write_text(_gateway_config(self._model, session.url, self._tool_format), encoding="utf-8")
        command = [sys.executable, "-c", _RUN_CODE, "run", "--config", str(config), "--samples", "1"]
        command += [word for path in self._tasks for word in ("--tasks", path)]
        command += ["--instance-ids", instance, "--seed", str(seed), "--output-dir", str(directory), "--json"]
        process = await asyncio.create_subprocess_exec(
            *command,
            *self._options,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
            env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        )
        try:
            _, stderr = await process.communicate()
        except asyncio.CancelledError:
            await _stop(process)
            raise
        if not (directory / "store.db").exists():
            message = stderr[-_OUTPUT_TAIL:].decode(errors="replace").strip()
            raise BackendError(
                f"{instance}: understudy run ended with exit code {process.returncode}, expected a store in "
                f"{directory}; correct what its output reports, then start the training again. The output ends: "
                f"{message or '(it is empty)'}"
            )


async def _stop(process: asyncio.subprocess.Process) -> None:
    """Stop a run as two Ctrl-C do, so that it closes its sandbox; kill it if it is not over after `_STOP_S`
    seconds.
    """
    try:
        async with asyncio.timeout(_STOP_S):
            for _ in range(2):
                os.killpg(process.pid, signal.SIGINT)
                await asyncio.sleep(0.2)
            await process.wait()
    except ProcessLookupError:
        return
    except TimeoutError:
        os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _read_rollout(directory: Path, instance: str) -> TrainingRollout:
    """Return the graded rollout in a run's output directory. Raises ConfigError when it has none to train on."""
    left_out = Counter[str]()
    rollouts = [
        rollout for group in groups.load_groups([directory], left_out=left_out) for rollout in group.rollouts
    ]
    if len(rollouts) != 1:
        raise ConfigError(
            f"{directory}: expected one rollout of {instance} to train on, got {len(rollouts)} (left out: "
            f"{', '.join(f'{count} {reason}' for reason, count in left_out.items()) or 'none'}); set keep: true "
            f"in the agent loop's config, retry, and see `understudy show --dir {directory}`"
        )
    return rollouts[0]


def _gateway_config(model: str, url: str, tool_format: str) -> str:
    gateway = {"backend": "vllm", "model": model, "endpoints": [url], "tokens": "exact"}
    gateway |= {"tokenizer": model, "tool_format": tool_format}
    # JSON strings and lists of strings are valid TOML, so json.dumps is enough to write the values.
    return "[models.high]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in gateway.items())
