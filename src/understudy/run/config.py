"""What a run is: everything that decides its results, resolved, stored with the run, and hashed into its id."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from msgspec import UNSET, Struct, UnsetType, field
from msgspec.structs import replace

from understudy.gateway.config import GatewayConfig
from understudy.gateway.router import HIGH, LOW
from understudy.types import Task

Purpose = Literal["training", "evaluation"]


class ServedPolicy(Struct, frozen=True):
    """What answers a wave of a training loop: the addresses of the model's servers, and the policy version."""

    endpoints: tuple[str, ...]
    version: str


class RunConfig(Struct, frozen=True, kw_only=True):
    """The resolved configuration of a run.

    Two commands with equal configurations are the same run, and the second continues the first; concurrency,
    output formats and the like are not included. `gateway` says which models answer, and how. With `evaluation`,
    nothing is trained on, and the sampling parameters for evaluation apply. `policy` is for the embedded server
    that the run starts for the high model; None if it starts none. `tasks` maps each instance id to the digest of
    its record. `frontend_high` and `frontend_low` are the model names that the agent requests, if they differ from
    the models' own. A training loop's run in a database has its `wave`, such as LOOP/steps/step-0001, because two
    waves may otherwise be equal. `served` is the server that workers ask there, and not part of the run's
    identity.
    """

    gateway: GatewayConfig
    purpose: Purpose = "training"
    policy: str | None = None
    policy_args: dict[str, str] = field(default_factory=dict[str, str])
    weights: str | None = None
    weights_version: str | None = None
    frontend_high: str = ""
    frontend_low: str = ""
    agent: str = "claude-code"
    agent_options: dict[str, str] = field(default_factory=dict[str, str])
    sandbox: str = "local"
    samples: int = 1
    seed: int = 0
    max_turns: int = 30
    timeout_s: float = 1800.0
    tasks: dict[str, str] = field(default_factory=dict[str, str])
    wave: str | UnsetType = UNSET
    served: ServedPolicy | UnsetType = UNSET

    @property
    def starts_server(self) -> bool:
        """Whether the run starts the embedded server."""
        return self.policy is not None or self.weights is not None

    @property
    def backend(self) -> str:
        """The kind of backend of the high model."""
        return self.gateway.models.high.backend

    @property
    def model(self) -> str:
        """The name with which the agent requests the high model."""
        return self.frontend_high or self.gateway.models.high.model or HIGH

    @property
    def small_model(self) -> str:
        """The name with which the agent requests the model for small tasks."""
        low = self.gateway.models.low
        return self.frontend_low or (self.model if low is None else low.model or LOW)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that override the agent's."""
        chosen = self.gateway.sampling.training if self.purpose == "training" else self.gateway.sampling.evaluation
        return chosen.as_dict()

    @property
    def run_id(self) -> str:
        """Twelve hex digits derived from the configuration alone."""
        return digest(replace(self, served=UNSET))[:12]

    def record(self) -> dict[str, Any]:
        """Return the configuration as JSON types, for the store."""
        return msgspec.to_builtins(self)

    def rollout_id(self, task_id: str, sample_index: int) -> str:
        """Return the id of one rollout of this run. It is always the same, so that creating it again is harmless.

        The agent's name is part of it through the run's id. Its version is not: a run continues after an update of
        the agent, and the store records for each rollout which version worked on it.
        """
        return digest([self.run_id, task_id, sample_index])[:16]

    def sampling_seed(self, task_id: str, sample_index: int) -> int:
        """Return the seed that is sent to the backend with every call of a rollout; below 2**31."""
        return int(digest([self.seed, task_id, sample_index])[:8], 16) >> 1


def digest(value: Any) -> str:
    """Return the SHA-256 (hex) of a value's JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def task_digests(tasks: Sequence[Task]) -> dict[str, str]:
    """Return instance id → digest of the task's record."""
    return {task.instance_id: digest(task)[:16] for task in tasks}
