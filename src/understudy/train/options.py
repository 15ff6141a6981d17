"""The options of the trainers, with their defaults. Plain data, no torch: the command line and TOML fill it in."""

from __future__ import annotations

import math
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Struct, convert, structs

from understudy.errors import ConfigError
from understudy.util.settings import option

Advantage = Literal["group", "mean", "leave-one-out", "rloo"]
Loss = Literal["ppo", "gspo", "cispo"]
Normalisation = Literal["rollout-mean", "token-mean", "constant"]
Correction = Literal["truncate", "band", "none"]
Precision = Literal["auto", "bf16", "fp32"]

CLIPS: dict[Loss, tuple[float, float]] = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0)}
"""The default clip range of each loss, below and above 1: DAPO's, GSPO's, and for CISPO above only."""


_AT_LEAST: dict[str, float] = {
    "rank": 1, "warmup_steps": 0, "epochs": 1, "max_tokens": 2, "micro_batch_tokens": 1, "weight_decay": 0.0,
    "batch_rollouts": 1, "batch_pairs": 1, "constant_tokens": 1, "clip_low": 0.0, "clip_high": 0.0,
    "band_low": 0.0, "kl_coefficient": 0.0, "entropy_coefficient": 0.0, "overlong_tokens": 1, "overlong_buffer": 1,
    "mini_batches": 1, "teacher_coefficient": 0.0, "reward_coefficient": 0.0,
}  # fmt: skip
_ABOVE_ZERO = frozenset({"alpha", "learning_rate", "max_grad_norm", "beta", "truncate_at", "temperature"})
_SHARES = frozenset({"dropout", "beta1", "beta2"})


class _CheckedOptions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options whose numbers are checked by their names; `table` is what messages call them."""

    table: ClassVar[str] = "training"

    def __post_init__(self) -> None:
        """Raise ConfigError where a number is out of its bounds."""
        for name, value in structs.asdict(self).items():
            if not isinstance(value, int | float) or isinstance(value, bool):
                continue
            if name in _AT_LEAST and not value >= _AT_LEAST[name]:
                expected = f"at least {_AT_LEAST[name]}"
            elif name in _ABOVE_ZERO and not value > 0:
                expected = "above 0.0"
            elif name in _SHARES and not 0 <= value < 1:
                expected = "at least 0 and below 1"
            elif not math.isfinite(value):
                expected = "a finite number"
            else:
                continue
            raise ConfigError(f"{self.table}.{name} is {value}; it must be {expected}")


class LoraOptions(_CheckedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An adapter that is trained instead of all weights (arXiv 2106.09685)."""

    table: ClassVar[str] = "lora"
    rank: Annotated[int, option("The rank of the adapter.")] = 16
    alpha: Annotated[float, option("The adapter is scaled by this, divided by its rank.")] = 32.0
    dropout: Annotated[float, option("The share of the adapter's input that is dropped in training.")] = 0.0
    modules: Annotated[
        tuple[str, ...],
        option("Layers that get an adapter, with commas between them [default: all linear ones].", commas=True),
    ] = ()
    """Names of the layers that get an adapter; none: every linear layer but the head."""


class TrainOptions(_CheckedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that every trainer has."""

    learning_rate: Annotated[float, option("The highest learning rate.")] = 1e-5
    weight_decay: Annotated[float, option("The weight decay of AdamW.")] = 0.0
    beta1: Annotated[float, option("The first beta of AdamW: how slowly the mean of the gradient changes.")] = 0.9
    beta2: Annotated[float, option("The second beta of AdamW: the same for its square.")] = 0.95
    warmup_steps: Annotated[int, option("Optimizer steps in which the learning rate grows to its maximum.")] = 0
    max_grad_norm: Annotated[float, option("A gradient with a larger norm is scaled down to this one.")] = 1.0
    epochs: Annotated[int, option("How often training goes through the same data.")] = 1
    max_tokens: Annotated[int, option("Sequences with more tokens are left out, and counted.")] = 32_768
    """Sequences longer than this are left out and counted."""
    micro_batch_tokens: Annotated[
        int, option("Tokens that go through the model at once; lower it where memory runs out.")
    ] = 8_192
    """How many tokens, padding included, go through the model at once: lower it where memory runs out."""
    precision: Annotated[Precision, option("auto: bf16 on a GPU that supports it, else fp32.")] = "auto"
    """auto: bf16 where a GPU has it, else fp32."""
    gradient_checkpointing: Annotated[
        bool, option("Compute activations again in the backward pass: less memory, more time.")
    ] = False
    lora: Annotated[LoraOptions | None, option("Train an adapter in place of all weights.")] = None
    seed: Annotated[int, option("The seed of everything that is drawn at random.")] = 0


class SFTOptions(TrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Imitation of solved rollouts, with loss on the sampled tokens only."""

    table: ClassVar[str] = "sft"
    epochs: Annotated[int, option("How often training goes through the same data.")] = 3
    batch_rollouts: Annotated[int, option("Sequences that make one optimizer step.")] = 16
    """How many sequences make one optimiser step; a rollout is one mostly, more with subagents and compactions."""
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], option("How the learning rate goes down after the warm-up.")
    ] = "cosine"


class DPOOptions(TrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Preference pairs (arXiv 2305.18290).

    The loss of a pair is ((1 − ε) · −log σ(β h) − ε · −log σ(−β h)) / (1 − 2 ε), where h is how much likelier the
    better answer became than the worse, in nats, and ε is `label_smoothing` (arXiv 2403.00409; at 0 it is DPO's).
    """

    table: ClassVar[str] = "dpo"
    learning_rate: Annotated[float, option("The highest learning rate.")] = 1e-6
    beta: Annotated[float, option("How strongly the policy is kept near the reference.")] = 0.1
    label_smoothing: Annotated[
        float, option("The share of preferences that are assumed to be the wrong way round.")
    ] = 0.0
    batch_pairs: Annotated[int, option("Pairs that make one optimizer step.")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"dpo.label_smoothing is {self.label_smoothing}; it must be at least 0 and below 0.5"
            )


class GRPOOptions(TrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy updates over groups of rollouts. The formulas are in `advantages` and `losses`.

    GRPO as it was published: advantage "group", clip_low = clip_high = 0.2, "rollout-mean". Dr. GRPO: "mean" and
    "constant". DAPO: "group", "token-mean", `overlong_tokens`. GSPO: loss "gspo". RLOO: "leave-one-out".
    """

    table: ClassVar[str] = "grpo"
    learning_rate: Annotated[float, option("The highest learning rate.")] = 1e-6
    advantage: Annotated[
        Advantage,
        option("What a rollout is compared with: its group's mean and deviation, its mean, the others' mean."),
    ] = "group"
    loss: Annotated[
        Loss, option("What is clipped: ratios of tokens (ppo), of sequences (gspo), or weights of tokens (cispo).")
    ] = "ppo"
    clip_low: Annotated[float | None, option("How far below 1 a ratio counts [default: by the loss].")] = None
    clip_high: Annotated[float | None, option("How far above 1 a ratio counts [default: by the loss].")] = None
    """How far below and above 1 a ratio counts; None: what the loss has in `CLIPS`."""
    normalisation: Annotated[Normalisation, option("How the losses of tokens are averaged.")] = "rollout-mean"
    constant_tokens: Annotated[
        int, option("The number that a rollout's sum is divided by under --normalisation constant.")
    ] = 1024
    correction: Annotated[Correction, option("What is done about tokens that another policy sampled.")] = (
        "truncate"
    )
    """How the difference between the policy that sampled and the one that is trained is weighed."""
    truncate_at: Annotated[float, option("The most that such a token weighs under --correction truncate.")] = 2.0
    band_low: Annotated[float, option("The lower end of the band of --correction band.")] = 0.5
    band_high: Annotated[float, option("The upper end of that band.")] = 5.0
    kl_coefficient: Annotated[
        float, option("The weight of the KL divergence from the model that training began with.")
    ] = 0.0
    """Above 0 the policy is kept near the model that training began with."""
    entropy_coefficient: Annotated[float, option("The weight of the policy's entropy, which is rewarded.")] = 0.0
    temperature: Annotated[float, option("The temperature that the rollouts were sampled with.")] = 1.0
    """The temperature that the rollouts were sampled with: logprobs are computed again at the same one."""
    dynamic_sampling: Annotated[bool, option("Leave out groups whose rewards are all equal.")] = True
    """Groups whose rewards are all equal are left out; else they count in the normaliser."""
    overlong_tokens: Annotated[
        int | None,
        option("Sampled tokens at which a rollout's reward is 1 lower [default: length costs nothing]."),
    ] = None
    """Sampled tokens at which a rollout's reward is 1 lower; None: length costs nothing."""
    overlong_buffer: Annotated[int, option("How many tokens before that the penalty begins to grow.")] = 512
    """How many tokens before that the penalty begins to grow, in a straight line."""
    mini_batches: Annotated[int, option("Optimizer steps in each update.")] = 1
    """Optimizer steps in each update; the second and later ones are off-policy, which is what clipping is for."""

    @property
    def clip(self) -> tuple[float, float]:
        """How far below and above 1 a ratio counts."""
        low, high = CLIPS[self.loss]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band_high <= self.band_low:
            raise ConfigError(f"grpo.band_high is {self.band_high}; it must be above band_low, {self.band_low}")
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ConfigError(
                f"grpo.overlong_buffer is {self.overlong_buffer}; it must be at most overlong_tokens, "
                f"{self.overlong_tokens}"
            )


class DistillOptions(GRPOOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy updates towards a teacher, over groups of rollouts that the student sampled.

    The advantage of a token is `reward_coefficient` · A + `teacher_coefficient` · (log p − log π), with A that of
    its rollout and p the teacher; see `losses.distillation_gain`. `teacher` is what it was given by.
    """

    teacher: str
    teacher_coefficient: float = 1.0
    reward_coefficient: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_coefficient == 0:
            raise ConfigError(
                "teacher_coefficient is 0, so that nothing is learned from the teacher; leave the teacher out"
            )
        if self.temperature != 1:
            raise ConfigError(
                f"grpo.temperature is {self.temperature:g}; with a teacher it must be 1, for servers tell the "
                "logprobs of a prompt at temperature 1 alone"
            )


def read_options(values: dict[str, Any]) -> GRPOOptions:
    """The options of policy updates that were stored as JSON: those of distillation where they name a teacher.

    Raises msgspec.ValidationError.
    """
    return convert(values, DistillOptions if "teacher" in values else GRPOOptions)
