"""The options of the trainers with their defaults, as filled in from the command line or TOML. No torch
is needed.
"""

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
    """Options whose numbers are validated by field name; `table` is the name of the TOML table in error
    messages.
    """

    table: ClassVar[str] = "training"

    def __post_init__(self) -> None:
        """Raise ConfigError when a number is out of its bounds."""
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
            raise ConfigError(f"{self.table}.{name} is {value}, expected {expected}; give such a number")


class LoraOptions(_CheckedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A LoRA adapter, which is trained in place of all weights (arXiv 2106.09685)."""

    table: ClassVar[str] = "lora"
    rank: Annotated[int, option("The rank of the adapter.")] = 16
    alpha: Annotated[float, option("The scale of the adapter: its output is multiplied by alpha / rank.")] = 32.0
    dropout: Annotated[float, option("The dropout probability of the adapter's input in training.")] = 0.0
    modules: Annotated[
        tuple[str, ...],
        option(
            "Names of layers to adapt, separated by commas [default: all linear layers but the head].", commas=True
        ),
    ] = ()
    """Names of the layers to adapt; empty: every linear layer but the head."""


class TrainOptions(_CheckedOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The options that every trainer has."""

    learning_rate: Annotated[float, option("The highest learning rate.")] = 1e-5
    weight_decay: Annotated[float, option("The weight decay of AdamW.")] = 0.0
    beta1: Annotated[float, option("AdamW's beta1: the decay rate of the gradient's running mean.")] = 0.9
    beta2: Annotated[
        float, option("AdamW's beta2: the decay rate of the running mean of the squared gradient.")
    ] = 0.95
    warmup_steps: Annotated[
        int, option("Optimizer steps over which the learning rate rises linearly to its maximum.")
    ] = 0
    max_grad_norm: Annotated[
        float, option("Gradient clipping: a gradient with a larger norm is scaled down to this norm.")
    ] = 1.0
    epochs: Annotated[int, option("The number of passes over the training data.")] = 1
    max_tokens: Annotated[
        int, option("The maximum sequence length; longer sequences are left out, and counted.")
    ] = 32_768
    micro_batch_tokens: Annotated[
        int, option("The maximum tokens of one forward pass, with padding; lower it when memory runs out.")
    ] = 8_192
    precision: Annotated[Precision, option("auto: bf16 on a GPU that supports it, else fp32.")] = "auto"
    gradient_checkpointing: Annotated[
        bool, option("Recompute activations in the backward pass: needs less memory, takes more time.")
    ] = False
    lora: Annotated[LoraOptions | None, option("Train a LoRA adapter instead of all weights.")] = None
    seed: Annotated[int, option("The random seed.")] = 0


class SFTOptions(TrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """SFT on solved rollouts, with loss on the sampled tokens only."""

    table: ClassVar[str] = "sft"
    epochs: Annotated[int, option("The number of passes over the training data.")] = 3
    batch_rollouts: Annotated[int, option("Sequences per optimizer step.")] = 16
    """Sequences per optimizer step. A rollout has mostly one, more with subagents and compactions."""
    schedule: Annotated[
        Literal["constant", "linear", "cosine"], option("How the learning rate decays after the warmup.")
    ] = "cosine"


class DPOOptions(TrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DPO on preference pairs (arXiv 2305.18290).

    The loss of a pair is ((1 − ε) · −log σ(β h) − ε · −log σ(−β h)) / (1 − 2 ε). h is the log ratio of the chosen
    answer's probability to the rejected one's, relative to the reference, in nats; ε is `label_smoothing` (robust
    DPO, arXiv 2403.00409; with ε = 0 it is plain DPO).
    """

    table: ClassVar[str] = "dpo"
    learning_rate: Annotated[float, option("The highest learning rate.")] = 1e-6
    beta: Annotated[float, option("DPO's beta: larger values keep the policy closer to the reference.")] = 0.1
    label_smoothing: Annotated[
        float, option("The share of pairs that are assumed to have chosen and rejected swapped.")
    ] = 0.0
    batch_pairs: Annotated[int, option("Pairs per optimizer step.")] = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.label_smoothing < 0.5:
            raise ConfigError(
                f"dpo.label_smoothing is {self.label_smoothing}, expected at least 0 and below 0.5; give such "
                "a number"
            )


class GRPOOptions(TrainOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy updates over groups of rollouts. The formulas are in `batch.advantages` and `losses`.

    GRPO as it was published: advantage "group", clip_low = clip_high = 0.2, "rollout-mean". Dr. GRPO: "mean" and
    "constant". DAPO: "group", "token-mean", `overlong_tokens`. GSPO: loss "gspo". RLOO: "leave-one-out".
    """

    table: ClassVar[str] = "grpo"
    learning_rate: Annotated[float, option("The highest learning rate.")] = 1e-6
    advantage: Annotated[
        Advantage,
        option(
            "The baseline of advantages: the group's mean and deviation, its mean, or the other rollouts' mean."
        ),
    ] = "group"
    loss: Annotated[
        Loss,
        option(
            "The policy loss: clips ratios of tokens (ppo), of sequences (gspo), or weights of tokens (cispo)."
        ),
    ] = "ppo"
    clip_low: Annotated[
        float | None, option("The clip range below 1: ratios are clipped at 1 - clip_low [default: by the loss].")
    ] = None
    clip_high: Annotated[
        float | None, option("The clip range above 1: ratios are clipped at 1 + clip_high [default: by the loss].")
    ] = None
    """The clip range of the ratio below and above 1; None: the default of the loss in `CLIPS`."""
    normalisation: Annotated[Normalisation, option("How the token losses are averaged.")] = "rollout-mean"
    constant_tokens: Annotated[
        int, option("The divisor of a rollout's summed loss with --normalisation constant.")
    ] = 1024
    correction: Annotated[
        Correction, option("The importance weighting of tokens that another policy sampled.")
    ] = "truncate"
    """How importance weights correct for the difference between the sampling and the trained policy."""
    truncate_at: Annotated[float, option("The maximum importance weight with --correction truncate.")] = 2.0
    band_low: Annotated[float, option("The lowest importance weight that counts with --correction band.")] = 0.5
    band_high: Annotated[float, option("The highest importance weight that counts with --correction band.")] = 5.0
    kl_coefficient: Annotated[float, option("The weight of the KL penalty towards the initial model.")] = 0.0
    """A value above 0 keeps the policy near the initial model."""
    entropy_coefficient: Annotated[float, option("The weight of the entropy bonus.")] = 0.0
    temperature: Annotated[float, option("The temperature that the rollouts were sampled with.")] = 1.0
    """The temperature that the rollouts were sampled with; logprobs are recomputed at it."""
    dynamic_sampling: Annotated[bool, option("Leave out groups whose rewards are all equal.")] = True
    """Leave out groups with equal rewards; otherwise they count in the average, with advantages of 0."""
    overlong_tokens: Annotated[
        int | None,
        option("The number of sampled tokens at which a rollout's reward is lowered by 1 [default: no penalty]."),
    ] = None
    """The number of sampled tokens at which a rollout's reward is lowered by 1; None: no penalty."""
    overlong_buffer: Annotated[
        int, option("The number of tokens before --overlong-tokens over which the penalty grows from 0.")
    ] = 512
    """The number of tokens before `overlong_tokens` over which the penalty grows linearly from 0."""
    mini_batches: Annotated[int, option("Optimizer steps in each update.")] = 1
    """Optimizer steps in each update. Later ones are off-policy, which is why ratios are clipped."""

    @property
    def clip(self) -> tuple[float, float]:
        """Return the clip range of the ratio: how far below and above 1 it may be."""
        low, high = CLIPS[self.loss]
        return low if self.clip_low is None else self.clip_low, high if self.clip_high is None else self.clip_high

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.band_high <= self.band_low:
            raise ConfigError(
                f"grpo.band_high is {self.band_high}, expected more than band_low, {self.band_low}; raise it, or "
                "lower band_low"
            )
        if self.overlong_tokens is not None and self.overlong_buffer > self.overlong_tokens:
            raise ConfigError(
                f"grpo.overlong_buffer is {self.overlong_buffer}, expected at most overlong_tokens, "
                f"{self.overlong_tokens}; lower it, or raise overlong_tokens"
            )


class DistillOptions(GRPOOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Policy updates towards a teacher, over groups of rollouts that the student sampled.

    The advantage of a token is `reward_coefficient` · A + `teacher_coefficient` · (log p − log π), where A is the
    advantage of its rollout and p the teacher; see `losses.distillation_gain`. `teacher` is the teacher's address
    or model, as given by the user.
    """

    teacher: str
    teacher_coefficient: float = 1.0
    reward_coefficient: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.teacher_coefficient == 0:
            raise ConfigError(
                "teacher_coefficient is 0, expected more, because otherwise nothing would be learned from the "
                "teacher; give a value above 0, or train without a teacher"
            )
        if self.temperature != 1:
            raise ConfigError(
                f"grpo.temperature is {self.temperature:g}, expected 1 with a teacher, because model servers "
                "return logprobs of a prompt only at temperature 1; leave temperature out"
            )


def read_options(values: dict[str, Any]) -> GRPOOptions:
    """Return the options of policy updates from JSON: DistillOptions if they name a teacher, else GRPOOptions.

    Raises msgspec.ValidationError.
    """
    return convert(values, DistillOptions if "teacher" in values else GRPOOptions)
