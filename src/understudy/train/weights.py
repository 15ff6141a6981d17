"""Model directories in training: loading a model to train it, and saving it so that it can be served."""

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
from understudy.model.pretrained import RECORD
from understudy.train.options import LoraOptions, TrainOptions
from understudy.util.files import atomic_path, locked

if TYPE_CHECKING:
    import torch

TRL_PACKAGES = ("torch", "transformers", "accelerate", "datasets", "peft", "trl")


TRAINING = "training"
"""The subdirectory of a model with the state from which its training can be resumed."""
ADAPTER = "adapter"

_WEIGHT_PATTERNS = (
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
"""Patterns of weights files and their indexes, which are never copied from one model to another."""


class WeightsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The record of a saved model's origin, in `training/written.json`."""

    version: str
    step: int
    base: str


def check_model(directory: Path) -> None:
    """Raise ConfigError unless a directory holds a model with tokenizer and chat template."""
    require_files(directory, "config.json", "tokenizer.json")
    if not has_template(directory):
        raise missing_template(directory)


def has_template(directory: Path) -> bool:
    """Return whether a model's directory has a chat template, in a file of its own or in the tokenizer's
    config.
    """
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
            f"{directory / 'tokenizer_config.json'}: expected a JSON object ({error}); download the file again "
            "with the model"
        ) from error


def load_model(directory: Path, options: TrainOptions) -> Any:
    """Return the causal language model in a directory, on the training device, with an adapter if `options.lora`
    is set.

    Trained weights are fp32, whatever they were saved as, because small updates are rounded away in bf16. Weights
    below an adapter keep their type on a GPU. Raises ConfigError when there is no such model.
    """
    require_packages()
    check_model(directory)
    import torch

    from understudy.model.causal.checkpoint import load_module
    from understudy.model.causal.linear_layers import use_onednn_for_training

    silence_transformers()
    device = pick_device()
    frozen_base = options.lora is not None and device.type != "cpu"
    model = load_module(directory, None if frozen_base else torch.float32)
    check_vocabulary(directory, model)
    with explain_out_of_memory(options):
        model.to(device)
        if device.type == "cpu":
            use_onednn_for_training(model)
        if options.lora is not None:
            model = _with_adapter(model, options.lora)
        if options.gradient_checkpointing:
            _checkpoint_activations(model)
    return model


def silence_transformers() -> None:
    """Turn off the progress bars and warnings of transformers; what a user needs to know is reported by our own
    code.
    """
    import warnings

    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")


def load_chat_tokenizer(directory: Path) -> Any:
    """Return a model's tokenizer as transformers loads it, with a padding token. Raises ConfigError."""
    silence_transformers()
    import transformers

    auto: Any = transformers.AutoTokenizer
    try:
        tokenizer = auto.from_pretrained(str(directory), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # errors of transformers and tokenizers have no narrower class
        raise ConfigError(
            f"{directory}: its tokenizer cannot be loaded: {error}; download it again with the model"
        ) from error
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def check_vocabulary(directory: Path, model: Any) -> None:
    """Raise ConfigError when the tokenizer has more tokens than the model has embeddings."""
    import tokenizers

    try:
        size = tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json")).get_vocab_size()
    except Exception as error:  # errors of `tokenizers` have no narrower class
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
    """Return the number of tokens that a model has embeddings for."""
    return int(model.get_input_embeddings().weight.shape[0])


def max_sequence_length(model: Any, options: TrainOptions) -> int:
    """Return the maximum length of a sequence in tokens: `options.max_tokens`, at most the model's
    context length.
    """
    context_length: int | None = getattr(model.config, "max_position_embeddings", None)
    return min(options.max_tokens, context_length or options.max_tokens)


def seed_torch(number: int) -> None:
    """Seed torch's random number generators, on every device."""
    import torch

    torch.manual_seed(number)  # pyright: ignore[reportUnknownMemberType]


def pick_device() -> torch.device:
    """Return a GPU if one works, otherwise the CPU."""
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def uses_bf16(options: TrainOptions) -> bool:
    """Return whether forward passes use bf16. Raises ConfigError when bf16 was requested but is not supported."""
    import torch

    able = torch.cuda.is_available() and torch.cuda.is_bf16_supported()
    if options.precision == "bf16" and not able:
        raise ConfigError("--precision bf16: no GPU on this machine supports it; give --precision fp32 or auto")
    return able and options.precision != "fp32"


@contextmanager
def explain_out_of_memory(options: TrainOptions) -> Generator[None]:
    """Turn torch's out-of-memory error of a GPU into a ConfigError that says which options to change."""
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
    """Write a model to the directory `target`, atomically; an existing one is replaced.

    Everything except weights (tokenizer, chat template, generation settings) is copied from `source`. A model with
    an adapter is written with the adapter merged in, and the adapter itself goes to `adapter` in `target`. `state`
    is what a resumed training needs; the trained weights are saved with it in their own precision. Raises
    ConfigError when the model cannot be written.
    """
    target = target.absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(target) as fresh:
            fresh.mkdir()
            _copy_other_files(source, fresh)
            _write_weights(model, source, fresh)
            (fresh / TRAINING).mkdir()
            (fresh / TRAINING / "written.json").write_bytes(msgspec.json.encode(written))
            if state is not None:
                import torch

                torch.save({**state, "trained": trained_weights(model)}, fresh / TRAINING / "state.pt")
    except Exception as error:  # safetensors and torch raise classes of their own when the disk is full
        raise ConfigError(
            f"{target}: the model cannot be written: {type(error).__name__}: {error}; check the free disk space "
            f"and the permissions of {target.parent}, then run the same command again"
        ) from error


def load_state(directory: Path, model: Any) -> dict[str, Any]:
    """Return the `state` that `save_model` was given, and load its trained weights into `model`.

    Raises ConfigError when the directory has no state, or that of another model.
    """
    import torch

    path = directory / TRAINING / "state.pt"
    if not path.is_file():
        raise ConfigError(
            f"{directory} cannot be resumed: its training state ({TRAINING}/state.pt) is missing; "
            "start a new training from it as the model instead"
        )
    device = next(model.parameters()).device
    try:
        state: dict[str, Any] = torch.load(path, map_location=device, weights_only=True)
        trained: dict[str, torch.Tensor] = state.pop("trained")
        with torch.no_grad():
            parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
            if parameters.keys() != trained.keys():
                raise ValueError("the names of its trained parameters differ from this model's, expected the same")
            for name, value in parameters.items():
                value.copy_(trained[name])
    except (RuntimeError, KeyError, EOFError, ValueError, pickle.UnpicklingError) as error:
        raise ConfigError(
            f"{path}: invalid training state for this model ({error}); resume with the options of the first "
            "start, such as --lora, or start again from the model"
        ) from error
    return state


def read_weights_record(directory: Path) -> WeightsRecord | None:
    """Return the record of a saved model's origin; None if it was not written by training."""
    try:
        return msgspec.json.decode((directory / TRAINING / "written.json").read_bytes(), type=WeightsRecord)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{directory / TRAINING / 'written.json'}: cannot be read ({error}); use another checkpoint, or start "
            "the training again from the model"
        ) from error


def trained_weights(model: Any) -> dict[str, torch.Tensor]:
    """Return the trained parameters by name."""
    return {name: value.detach() for name, value in model.named_parameters() if value.requires_grad}


def _checkpoint_activations(model: Any) -> None:
    # transformers renamed this method in 5.20.
    name = "activation_checkpointing_enable"
    enable = getattr(model, name, None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def _with_adapter(model: Any, lora: LoraOptions) -> Any:
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
            f"--lora-modules {','.join(lora.modules)}: not layers of the model that can be adapted ({error}); "
            "give names of its linear layers, such as q_proj,v_proj, or leave it out for all of them"
        ) from error
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(torch.float32)
    return adapted


def _copy_other_files(source: Path, target: Path) -> None:
    # Not the record of a fetched model: its hashes are those of the files before training.
    for path in sorted(source.iterdir()):
        if path.name in (TRAINING, ADAPTER, RECORD, "config.json") or path.name.startswith("."):
            continue
        if any(path.match(pattern) for pattern in _WEIGHT_PATTERNS):
            continue
        if path.is_dir():
            if path.name == "additional_chat_templates":
                shutil.copytree(path, target / path.name)
        elif path.stat().st_size < 64 << 20:
            shutil.copyfile(path, target / path.name)


def _write_weights(model: Any, source: Path, target: Path) -> None:
    """Write the weights in the type of the source model, and copy its config unchanged."""
    adapter = is_adapted(model)
    plain: Any = model.get_base_model() if adapter else model
    dtype: torch.dtype = _dtype(source, plain)
    if adapter:
        # Only this adapter: TRL may hold a second one as its reference.
        model.save_pretrained(str(target / ADAPTER), selected_adapters=["default"])
    weights = merged_weights(plain) if adapter else plain.state_dict()
    cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()}
    with _preserving(target / "generation_config.json"):
        plain.save_pretrained(str(target), state_dict=cast)
    shutil.copyfile(source / "config.json", target / "config.json")
    for path in target.rglob("*.safetensors"):  # safetensors creates files that only the owner can read
        path.chmod((target / "config.json").stat().st_mode)


def is_adapted(model: Any) -> bool:
    """Return whether a model has an adapter."""
    return hasattr(model, "get_base_model")


def merged_weights(plain: Any) -> dict[str, torch.Tensor]:
    """Return the weights of an adapted model with the adapter merged in, by the base model's names.

    The model itself is not changed: merging in place and undoing that would change bf16 weights a little each
    time.
    """
    weights: dict[str, torch.Tensor] = {}
    layers: dict[str, Any] = dict(plain.named_modules())
    for name, value in plain.state_dict().items():
        if ".lora_" in name:
            continue
        owner, separator, after_base = name.rpartition(".base_layer.")
        if separator and after_base == "weight":
            delta: torch.Tensor = layers[owner].get_delta_weight("default")
            value = (value.to(delta.dtype) + delta).to(value.dtype)
        weights[f"{owner}.{after_base}" if separator else name] = value
    return weights


@contextmanager
def _preserving(path: Path) -> Generator[None]:
    before = path.read_bytes() if path.exists() else None
    yield
    if before is not None:
        path.write_bytes(before)


def _dtype(source: Path, model: Any) -> torch.dtype:
    """Return the dtype that the source's config names for its weights, otherwise the model's."""
    import torch

    # json, not msgspec, because transformers accepts NaN in config.json
    config = json.loads((source / "config.json").read_text("utf-8"))
    named = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or ""), None)
    return named if isinstance(named, torch.dtype) else next(model.parameters()).dtype


CHECKPOINTS = "checkpoints"
_FINAL = "final"
_LOCK = ".lock"
_REMEDY = "choose another --output"


@contextmanager
def lock_output(
    output: Path, *, resume: bool, overwrite: bool = False, needed: Iterable[Path] = ()
) -> Generator[None]:
    """Prepare the output directory, and lock it against other trainings while the context lasts.

    `needed` are the paths that the training reads: a directory that contains one of them is not overwritten.
    Raises ConfigError when the directory must not be overwritten, or another training is using it.
    """
    lock = output / TRAINING / _LOCK
    busy = f"another training is writing to {output}; wait for it, or choose another --output"
    if lock.exists():
        with locked(lock, busy=busy, remedy=_REMEDY):
            pass  # holding the lock shows that no other training is using what is removed below
    _prepare_output(output, resume=resume, overwrite=overwrite, needed=needed)
    with locked(lock, busy=busy, remedy=_REMEDY):
        yield


def _prepare_output(output: Path, *, resume: bool, overwrite: bool, needed: Iterable[Path]) -> None:
    inside = next((path for path in needed if path.resolve().is_relative_to(output.resolve())), None)
    if overwrite and inside is not None:
        raise ConfigError(f"{output} contains {inside}, which this training reads; choose another --output")
    # With this directory, a training was killed while moving its model into place: the other files belong to it.
    unfinished = (output / TRAINING / _FINAL).is_dir()
    if (output / "config.json").exists():
        if not overwrite:
            raise ConfigError(f"{output} already holds a model; choose another --output, or give --overwrite")
        if not (output / TRAINING).is_dir():
            raise ConfigError(
                f"{output} holds a model that was not written by training, so it is not overwritten; "
                "choose another --output"
            )
        _remove(output)
    elif output.is_dir() and not unfinished and any(path.name != TRAINING for path in output.iterdir()):
        raise ConfigError(
            f"{output} has files, but no model (config.json), so nothing in it is overwritten; choose a new or "
            "empty directory as --output"
        )
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


def last_checkpoint(directory: Path, resume: bool | Path, marker: str = "trainer_state.json") -> Path | None:
    """Return the checkpoint to resume from: the given one, otherwise the last complete one; None if there is none.

    `marker` is a file that complete checkpoints have. Raises ConfigError when the given path is not a checkpoint.
    """
    if isinstance(resume, Path):
        if not (resume / marker).is_file():
            raise ConfigError(
                f"--checkpoint {resume}: it has no {marker}, so it is not a complete checkpoint of this training; "
                f"give one in {directory / CHECKPOINTS}"
            )
        return resume
    candidates = (directory / CHECKPOINTS).glob("checkpoint-*") if resume else ()
    complete = [path for path in candidates if _is_complete_json(path / marker)]
    return max(complete, key=lambda path: int(path.name.rpartition("-")[2]), default=None)


def _is_complete_json(path: Path) -> bool:
    """Return whether a JSON file was written completely; a full disk or a kill may have prevented that."""
    try:
        json.loads(path.read_bytes())
    except (OSError, ValueError):
        return False
    return True


def install_model(model: Any, source: Path, output: Path, written: WeightsRecord) -> None:
    """Write the final model to `output`, beside the training's files.

    config.json is moved there last, so a directory that has it is complete.
    """
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
    """Remove the checkpoints of a finished training, and the leftovers of writes that were interrupted."""
    for path in (directory / CHECKPOINTS, *directory.glob(".*.new"), *directory.glob(".*.old")):
        shutil.rmtree(path, ignore_errors=True)
