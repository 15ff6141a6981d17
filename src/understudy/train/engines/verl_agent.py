"""An agent loop for verl that runs Claude Code in a sandbox, with verl's own engine behind our gateway.

    - name: understudy
      _target_: understudy.train.engines.verl_agent.UnderstudyLoop
      tasks: [/data/tasks.jsonl]
      output: /data/runs

Its dataset is made by `understudy export verl --form rl`, or is any whose rows have a task's `instance_id` in
`extra_info`. Understudy must be installed in verl's environment.
"""

# pyright: reportMissingImports=false, reportUnknownVariableType=false, reportUnknownMemberType=false
# pyright: reportUnknownArgumentType=false, reportUntypedBaseClass=false

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import time
import uuid
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from understudy.errors import BackendError, ConfigError
from understudy.train import groups
from understudy.train.engines import verl
from understudy.train.engines.verl import Bridge, BridgeResponse, BridgeSession
from understudy.train.groups import TrainingRollout

_RUN = "from understudy.cli.main import main; main()"
_OUTPUT_TAIL = 2000
_STOP_S = 20.0
_SAMPLED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class UnderstudyLoop(AgentLoopBase):
    """A verl agent loop that collects one graded rollout per row.

    `options` are passed to `understudy run`, such as ["--max-turns", "20"]. `tool_format` is the syntax of the
    model's tool calls (docs/gateway.md). With `keep`, run directories are not removed after their rollout was
    read.
    """

    _bridges: ClassVar[dict[asyncio.AbstractEventLoop, asyncio.Task[Bridge]]] = {}

    def __init__(
        self,
        *args: Any,
        tasks: list[str],
        output: str,
        options: list[str] | None = None,
        tool_format: str = "hermes",
        keep: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._tasks = list(tasks)
        self._output = Path(output)
        self._options = list(options or [])
        self._tool_format = tool_format
        self._keep = keep
        rollout = self.rollout_config
        self._model = str(self.config.actor_rollout_ref.model.path)
        self._lengths = verl.VerlLengths(int(rollout.prompt_length), int(rollout.response_length))
        self._context = int(rollout.get("max_model_len") or 0) or sum(
            (self._lengths.prompt, self._lengths.response)
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Run and grade one rollout of the row's task; return an AgentLoopOutput for each of its sequences.

        Raises ConfigError or BackendError when the infrastructure, not the model, failed; verl then drops the
        group.
        """
        instance = (kwargs.get("extra_info") or {}).get("instance_id")
        if not instance:
            raise ConfigError(
                "extra_info.instance_id is missing in the row; "
                "make the dataset with `understudy export verl --form rl`"
            )
        began = time.monotonic()
        bridge = await self._bridge()
        session = bridge.open(self._generate(f"{uuid.uuid4().hex}"), _sampling(sampling_params))
        directory = self._output / f"{kwargs.get('uid') or uuid.uuid4().hex}-{kwargs.get('session_id', 0)}"
        try:
            await self._collect(str(instance), session, directory, int(kwargs.get("session_id", 0)))
            rollout = await asyncio.to_thread(read, directory, str(instance))
        finally:
            bridge.close(session)
            if not self._keep:
                await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        steps = (min(session.steps), max(session.steps)) if session.steps else (0, 0)
        return verl.outputs(rollout, self._lengths, steps=steps, seconds=time.monotonic() - began)

    def _generate(self, request_id: str) -> Any:
        """Return a function that samples through verl's servers.

        Requests with the same id go to the same server, so that a rollout's turns find their prefix in its cache.
        """

        async def generate(prompt: list[int], sampling: dict[str, Any]) -> BridgeResponse:
            limit = sampling["max_tokens"]
            output = await self.server_manager.generate(
                request_id=request_id, prompt_ids=prompt, sampling_params={**sampling, "logprobs": True}
            )
            return BridgeResponse(
                ids=list(output.token_ids),
                logprobs=list(output.log_probs) if output.log_probs else None,
                stopped=len(output.token_ids) < limit,
                aborted=output.stop_reason == "aborted",
                step=output.extra_fields.get("max_global_steps"),
            )

        return generate

    async def _bridge(self) -> Bridge:
        """Return the bridge of this worker process: started for its first rollout, and running until the process
        ends.
        """
        loop = asyncio.get_running_loop()
        if loop not in self._bridges:
            self._bridges[loop] = asyncio.create_task(Bridge(self._model, self._context).__aenter__())
        return await asyncio.shield(self._bridges[loop])

    async def _collect(self, instance: str, session: BridgeSession, directory: Path, seed: int) -> None:
        """Run one rollout into `directory`. Raises BackendError with the output's end when the run fails."""
        await asyncio.to_thread(directory.mkdir, parents=True, exist_ok=True)
        config = directory / "gateway.toml"
        config.write_text(_config(self._model, session.url, self._tool_format), encoding="utf-8")
        command = [sys.executable, "-c", _RUN, "run", "--config", str(config), "--samples", "1"]
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
                f"understudy run ended with exit code {process.returncode} without a store; its output: "
                f"{message or 'none'}; correct the cause, then start the training again"
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


def read(directory: Path, instance: str) -> TrainingRollout:
    """Return the graded rollout in a run's output directory. Raises ConfigError when it has none to train on."""
    left_out = Counter[str]()
    rollouts = [each for group in groups.load_groups([directory], left_out=left_out) for each in group.rollouts]
    if len(rollouts) != 1:
        raise ConfigError(
            f"{directory}: expected one rollout of {instance} to train on, got {len(rollouts)} (left out: "
            f"{', '.join(f'{count} {reason}' for reason, count in left_out.items()) or 'none'}); set keep: true "
            f"in the agent loop's config, retry, and see `understudy show --dir {directory}`"
        )
    return rollouts[0]


def _sampling(params: dict[str, Any]) -> dict[str, Any]:
    return {name: params[name] for name in _SAMPLED if params.get(name) is not None}


def _config(model: str, url: str, tool_format: str) -> str:
    gateway = {"backend": "vllm", "model": model, "endpoints": [url], "tokens": "exact"}
    gateway |= {"tokenizer": model, "tool_format": tool_format}
    # JSON strings and lists of strings are valid TOML, so json.dumps is enough to write the values.
    return "[models.high]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in gateway.items())
