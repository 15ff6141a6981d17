"""What a run is: everything that decides its results, resolved, saved with it, and hashed to its id."""

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

    Two commands with equal configurations are one run, and the second continues the first; concurrency, output
    formats and the like are no part of it. `gateway` says which models answer, and how. In a run for `evaluation`
    nothing is meant to be trained on: it has sampling parameters of its own. `policy` is that of the embedded
    server which the run starts for the high model; None: it starts none. `tasks` maps each instance id to the
    digest of its record. `frontend_high` and `frontend_low` are the names by which the agent asks for the models,
    where they are others than the models' own.

    A training loop's run in a database has its `wave`, as LOOP/steps/step-0001: two may be equal in all else.
    `served` is what workers ask there, and no part of the run's identity.
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
        """The kind of the backend of the high model."""
        return self.gateway.models.high.backend

    @property
    def model(self) -> str:
        """The name by which the agent asks for the high model."""
        return self.frontend_high or self.gateway.models.high.model or HIGH

    @property
    def small_model(self) -> str:
        """The name by which the agent asks for the model of small tasks."""
        low = self.gateway.models.low
        return self.frontend_low or (self.model if low is None else low.model or LOW)

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that are laid over what the agent asks."""
        chosen = self.gateway.sampling.training if self.purpose == "training" else self.gateway.sampling.evaluation
        return chosen.as_dict()

    @property
    def run_id(self) -> str:
        """Twelve hex digits that follow from the configuration alone."""
        return digest(replace(self, served=UNSET))[:12]

    def record(self) -> dict[str, Any]:
        """The configuration as JSON types, for the store."""
        return msgspec.to_builtins(self)

    def rollout_id(self, task_id: str, sample_index: int) -> str:
        """The id of one rollout of this run; asking again gives the same, so creation can be repeated.

        The agent's name is in it by the run's id. Its version is not: a run goes on after an update of the agent,
        and the store notes with each rollout which version worked on it.
        """
        return digest([self.run_id, task_id, sample_index])[:16]

    def sampling_seed(self, task_id: str, sample_index: int) -> int:
        """The seed sent to the backend with every call of a rollout, below 2**31."""
        return int(digest([self.seed, task_id, sample_index])[:8], 16) >> 1


def digest(value: Any) -> str:
    """SHA-256 in hex of a value's JSON with sorted keys."""
    return hashlib.sha256(msgspec.json.encode(value, order="deterministic")).hexdigest()


def task_digests(tasks: Sequence[Task]) -> dict[str, str]:
    """Instance id → digest of the task's record."""
    return {task.instance_id: digest(task)[:16] for task in tasks}
