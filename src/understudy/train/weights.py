"""A model's directory as training needs it: loaded to be trained, saved whole for whoever serves it."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from understudy.errors import ConfigError
from understudy.model.directory import missing_template, require_files, require_packages
from understudy.train.options import LoraOptions, TrainOptions
from understudy.util.files import atomic_path, locked

if TYPE_CHECKING:
    import torch

FULL = ("torch", "transformers", "accelerate", "datasets", "peft", "trl")


TRAINING = "training"
"""The directory in a model's directory that holds what training goes on from."""
ADAPTER = "adapter"

_WEIGHTS = (
    "*.safetensors",
    "*.safetensors.index.json",
    "*.bin",
    "*.bin.index.json",
    "*.pt",
    "*.pth",
    "*.h5",
    "*.msgpack",
    "*.gguf",
    "*.onnx",
)
"""Files that are weights, or name those that are: never copied from one model to the next."""


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a saved model says of itself in `training/written.json`."""

    version: str
    step: int
    base: str


def check_model(directory: Path) -> None:
    """Raise ConfigError unless a directory holds a model, its tokenizer and its chat template."""
    require_files(directory, "config.json", "tokenizer.json")
    if not has_template(directory):
        raise missing_template(directory)


def has_template(directory: Path) -> bool:
    """Whether a model's directory has a chat template, in a file or in the tokenizer's settings."""
    if (directory / "chat_template.jinja").is_file():
        return True
    if (directory / "additional_chat_templates" / "default.jinja").is_file():
        return True
    try:
        content = (directory / "tokenizer_config.json").read_bytes()
    except FileNotFoundError:
        return False
    try:
        return bool(msgspec.json.decode(content, type=dict[str, Any]).get("chat_template"))
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{directory / 'tokenizer_config.json'}: invalid JSON ({error}); download it again"
        ) from error


def load_model(directory: Path, options: TrainOptions) -> Any:
    """The causal model in a directory, on the device it will be trained on, with an adapter where one is wanted.

    Weights that are trained are fp32, whatever they were saved as: small steps would vanish in bf16. Those under
    an adapter keep their type on a GPU. Raises ConfigError when there is no such model.
    """
    require_packages()
    check_model(directory)
    import torch

    from understudy.model.causal.checkpoint import load_module

    quiet()
    device = pick_device()
    frozen_base = options.lora is not None and device.type != "cpu"
    model = load_module(directory, None if frozen_base else torch.float32)
    check_vocabulary(directory, model)
    model.config.use_cache = False
    with explain_out_of_memory(options):
        model.to(device)
        if options.lora is not None:
            model = _adapted(model, options.lora)
        if options.gradient_checkpointing:
            _checkpoint_activations(model)
    return model


def quiet() -> None:
    """Have transformers draw no progress bars, and keep its warnings to itself: what there is to tell, we tell."""
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def load_chat_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model as transformers has it, with something to pad with. Raises ConfigError."""
    quiet()
    import transformers

    auto: Any = transformers.AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # the library, and the one below it, raise whatever they met
        raise ConfigError(
            f"{directory}: its tokenizer cannot be loaded: {error}; download it again with the model"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def check_vocabulary(directory: Path, model: Any) -> None:
    """Raise ConfigError when the tokenizer has tokens that the model has no embedding for."""
    import tokenizers

    try:
        size = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    except Exception as error:  # what `tokenizers` raises has no narrower class
        raise ConfigError(
            f"{directory / 'tokenizer.json'}: invalid tokenizer ({error}); download it again with the model"
        ) from error
    rows = vocabulary_size(model)
    if size > rows:
        raise ConfigError(
            f"{directory}: the tokenizer has {size} tokens and the model embeddings for {rows}; use the "
            "tokenizer that the model was trained with"
        )


def vocabulary_size(model: Any) -> int:
    """How many tokens a model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def max_sequence_length(model: Any, options: TrainOptions) -> int:
    """How many tokens a sequence may have: what was said, and no more than the model was made for."""
    made_for: int | None = getattr(model.config, "max_position_embeddings", None)
    return min(options.max_tokens, made_for or options.max_tokens)


def seed(number: int) -> None:
    """Seed what torch draws, on every device."""
    import torch

    torch.manual_seed(number)  # pyright: ignore[reportUnknownMemberType]


def pick_device() -> torch.device:
    """A GPU where there is one that works, else the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def uses_bf16(options: TrainOptions) -> bool:
    """Whether passes through the model are made in bf16. Raises ConfigError where that was asked for in vain."""
    import torch

    able = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    if options.precision == "bf16" and not able:
        raise ConfigError("precision: bf16 needs a GPU that has it; give --precision fp32, or auto")
    return able and options.precision != "fp32"


@contextmanager
def explain_out_of_memory(options: TrainOptions) -> Generator[None]:
    """Turn a GPU that has no memory left into a ConfigError that says what to lower."""
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        first = str(error).partition(". ")[0]
        advice = [f"lower --micro-batch-tokens (now {options.micro_batch_tokens})"]
        advice.append(f"lower --max-tokens (now {options.max_tokens})")
        if not options.gradient_checkpointing:
            advice.append("give --gradient-checkpointing")
        if options.lora is None:
            advice.append("train an adapter: --lora")
        raise ConfigError(f"the GPU is out of memory ({first}); {', or '.join(advice)}") from error


def save_model(
    model: Any, source: Path, target: Path, *, written: WeightsRecord, state: dict[str, Any] | None = None
) -> None:
    """Write a model to the directory `target`, whole or not at all; what was there is replaced.

    All that is no weight — tokenizer, chat template, generation settings — is copied from `source` as it is. A
    model with an adapter is written with it merged in, and the adapter beside it in `adapter`. `state` is what
    training goes on from, with the weights as they are trained where they are saved in another type. Raises
    ConfigError when it cannot be written.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as fresh:
            fresh.mkdir()
            _copy_rest(source, fresh)
            _write_weights(model, source, fresh)
            (fresh / TRAINING).mkdir()
            (fresh / TRAINING / "written.json").write_bytes(msgspec.json.encode(written))
            if state is not None:
                import torch

                torch.save({**state, "trained": trained_weights(model)}, fresh / TRAINING / "state.pt")
    except Exception as error:  # safetensors and torch raise classes of their own where there is no room
        raise ConfigError(
            f"{target}: the model cannot be written: {error}; make room, or choose another --output"
        ) from error


def load_state(directory: Path, model: Any) -> dict[str, Any]:
    """What `save_model` was given as state; the weights are put into `model`.

    Raises ConfigError when a directory has none, or that of another model.
    """
    import torch

    path = directory / TRAINING / "state.pt"
    if not path.is_file():
        raise ConfigError(
            f"{directory} cannot be resumed: its training state ({TRAINING}/state.pt) is missing; start with "
            "it as the model instead"
        )
    device = next(model.parameters()).device
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        trained: dict[str, torch.Tensor] = state.pop("trained")
        with torch.no_grad():
            parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
            if parameters.keys() != trained.keys():
                raise ValueError("the parameters that were trained are not those of this model")
            for name, value in parameters.items():
                value.copy_(trained[name])
    except (RuntimeError, KeyError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path}: invalid training state for this model ({error}); resume with the same options"
        ) from error
    return state


def read_weights_record(directory: Path) -> WeightsRecord | None:
    """What a saved model says of itself; None where training did not write it."""
    try:
        return msgspec.json.decode((directory / TRAINING / "written.json").read_bytes(), type=WeightsRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{directory / TRAINING / 'written.json'}: cannot be read ({error}); use another checkpoint"
        ) from error


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """The weights that are trained, by name."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def _checkpoint_activations(model: Any) -> None:
    # transformers 5.20 gave it another name.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _adapted(model: Any, lora: LoraOptions) -> Any:
    require_packages("torch", "transformers", "peft")
    import torch
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # pyright: ignore[reportArgumentType]
        lora_dropout=lora.dropout,
        target_modules=list(lora.modules) or "all-linear",
        task_type="CAUSAL_LM",
    )
    try:
        adapted = get_peft_model(model, config)
    except ValueError as error:
        raise ConfigError(
            f"lora.modules: no such layers in the model ({error}); expected names of its linear layers"
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def _copy_rest(source: Path, target: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.name in (TRAINING, ADAPTER, "config.json") or path.name.startswith("."):
            continue
        if any(path.match(pattern) for pattern in _WEIGHTS):
            continue
        if path.is_dir():
            if path.name == "additional_chat_templates":
                shutil.copytree(path, target / path.name)
        elif path.stat().st_size < 64 << 20:
            shutil.copyfile(path, target / path.name)


def _write_weights(model: Any, source: Path, target: Path) -> None:
    """The weights in the type that the model came in, with its config as it is."""
    adapter = is_adapted(model)
    plain: Any = model.get_base_model() if adapter else model
    dtype: torch.dtype = _dtype(source, plain)
    if adapter:
        # Not the one that TRL holds to beside it.
        model.save_pretrained(str(target / ADAPTER), selected_adapters=["default"])
    weights = merged(plain) if adapter else plain.state_dict()
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    with _untouched(target / "generation_config.json"):
        plain.save_pretrained(str(target), state_dict=cast)
    shutil.copyfile(source / "config.json", target / "config.json")
    for path in target.rglob("*.safetensors"):  # which safetensors writes for its owner alone
        path.chmod((target / "config.json").stat().st_mode)


def is_adapted(model: Any) -> bool:
    """Whether a model has an adapter."""
    return hasattr(model, "get_base_model")


def merged(plain: Any) -> dict[str, torch.Tensor]:
    """The weights of an adapted model's base with the adapter added, by the base's own names; it stays as it is.

    Merging in place and taking it back would change bf16 weights a little each time.
    """
    weights: dict[str, torch.Tensor] = {}
    layers: dict[str, Any] = dict(plain.named_modules())
    for name, value in plain.state_dict().items():
        if ".lora_" in name:
            continue
        owner, separator, rest = name.rpartition(".base_layer.")
        if separator and rest == "weight":
            delta: torch.Tensor = layers[owner].get_delta_weight("default")
            value = (value.to(delta.dtype) + delta).to(value.dtype)
        weights[f"{owner}.{rest}" if separator else name] = value
    return weights


@contextmanager
def _untouched(path: Path) -> Generator[None]:
    before = path.read_bytes() if path.exists() else None
    yield
    if before is not None:
        path.write_bytes(before)


def _dtype(source: Path, model: Any) -> torch.dtype:
    """The type that the source's config names for its weights, else that of the model."""
    import torch

    config = json.loads((source / "config.json").read_text("utf-8"))  # which takes NaN, as transformers does
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or ""), None)
    return named if isinstance(named, torch.dtype) else next(model.parameters()).dtype


CHECKPOINTS = "checkpoints"
_FINAL = "final"
_LOCK = ".lock"
_REMEDY = "choose another --output"


@contextmanager
def claim_output(
    output: Path, *, resume: bool, overwrite: bool = False, needed: Iterable[Path] = ()
) -> Generator[None]:
    """Make the output directory ready, and keep other trainings out of it while the context lasts.

    `needed` is what the training reads: a directory that holds some of it is not overwritten. Raises ConfigError
    when the directory holds what must not be written over, or another training is at it.
    """
    lock = output / TRAINING / _LOCK
    busy = f"another training is writing to {output}; wait for it, or choose another --output"
    if lock.exists():
        with locked(lock, busy=busy, remedy=_REMEDY):
            pass  # nobody is in there whose work would be removed
    _make_ready(output, resume=resume, overwrite=overwrite, needed=needed)
    with locked(lock, busy=busy, remedy=_REMEDY):
        yield


def _make_ready(output: Path, *, resume: bool, overwrite: bool, needed: Iterable[Path]) -> None:
    inside = next((each for each in needed if each.resolve().is_relative_to(output.resolve())), None)
    if overwrite and inside is not None:
        raise ConfigError(f"{output} holds {inside}, which is training data; choose another --output")
    # Killed while the model was being put in place: what lies beside the training is of it.
    unfinished = (output / TRAINING / _FINAL).is_dir()
    if (output / "config.json").exists():
        if not overwrite:
            raise ConfigError(f"{output} holds a model already; choose another --output, or give --overwrite")
        if not (output / TRAINING).is_dir():
            raise ConfigError(f"{output} holds a model that no training wrote; choose another --output")
        _remove(output)
    elif output.is_dir() and not unfinished and any(path.name != TRAINING for path in output.iterdir()):
        raise ConfigError(f"{output} is not empty, and what it holds is not a model; choose another --output")
    elif _holds_more_than_a_lock(output / TRAINING) and not resume:
        if not overwrite:
            raise ConfigError(
                f"{output} holds an unfinished training; continue it with --resume, or start again with "
                "--overwrite"
            )
        _remove(output if unfinished else output / TRAINING)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{output}: cannot be created: {error.strerror}; choose another --output") from error


def _remove(directory: Path) -> None:
    try:
        shutil.rmtree(directory)
    except OSError as error:
        raise ConfigError(f"{directory}: cannot be removed: {error}; {_REMEDY}") from error


def _holds_more_than_a_lock(directory: Path) -> bool:
    return directory.exists() and any(path.name != _LOCK for path in directory.iterdir())


def last_checkpoint(directory: Path, resume: bool | Path, mark: str = "trainer_state.json") -> Path | None:
    """The checkpoint to go on from: the one named, else the last whole one; None where there is none yet.

    `mark` is a file that whole ones have. Raises ConfigError when the one named is none.
    """
    if isinstance(resume, Path):
        if not (resume / mark).is_file():
            raise ConfigError(
                f"{resume} is not a checkpoint of this training; expected one in DIR/{TRAINING}/{CHECKPOINTS}"
            )
        return resume
    candidates = (directory / CHECKPOINTS).glob("checkpoint-*") if resume else ()
    complete = [path for path in candidates if _is_whole(path / mark)]
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _is_whole(mark: Path) -> bool:
    """Whether a file of JSON was written to its end, which a full disk or a kill may have prevented."""
    try:
        json.loads(mark.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def install_model(model: Any, source: Path, output: Path, written: WeightsRecord) -> None:
    """Write the model into a directory in which its training stays, the config last."""
    final = output / TRAINING / _FINAL
    save_model(model, source, final, written=written)
    shutil.rmtree(final / TRAINING)
    for path in sorted(final.iterdir(), key=lambda path: path.name == "config.json"):
        target = output / path.name
        if target.is_dir():
            shutil.rmtree(target)
        path.replace(target)
    final.rmdir()


def remove_checkpoints(directory: Path) -> None:
    """Remove the checkpoints of a training that ended, and what was half written when it was killed."""
    for path in (directory / CHECKPOINTS, *directory.glob(".*.new"), *directory.glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True)
