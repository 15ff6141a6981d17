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

import time
import uuid
from pathlib import Path
from typing import Any

from verl.experimental.agent_loop.agent_loop import AgentLoopBase

from understudy.train.engines import verl
from understudy.train.engines.bridge import BridgeResponse
from understudy.train.engines.rollout_process import RolloutRunner, missing_instance_id


class UnderstudyLoop(AgentLoopBase):
    """A verl agent loop that collects one graded rollout per row. The options are those of `RolloutRunner`."""

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
        rollout = self.rollout_config
        self._lengths = verl.VerlLengths(int(rollout.prompt_length), int(rollout.response_length))
        self._runner = RolloutRunner(
            str(self.config.actor_rollout_ref.model.path),
            context=int(rollout.get("max_model_len") or 0) or self._lengths.prompt + self._lengths.response,
            tasks=tasks,
            output=Path(output),
            options=options or [],
            tool_format=tool_format,
            keep=keep,
        )

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[Any]:
        """Run and grade one rollout of the row's task; return an AgentLoopOutput for each of its sequences.

        Raises ConfigError or BackendError when the infrastructure, not the model, failed; verl then drops the
        group.
        """
        instance = (kwargs.get("extra_info") or {}).get("instance_id")
        if not instance:
            raise missing_instance_id("extra_info.instance_id in the row")
        began = time.monotonic()
        number = int(kwargs.get("session_id", 0))
        rollout, steps = await self._runner.run(
            str(instance),
            self._generate(uuid.uuid4().hex),
            sampling_params,
            name=f"{kwargs.get('uid') or uuid.uuid4().hex}-{number}",
            seed=number,
        )
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
