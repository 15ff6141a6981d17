"""SFT by LLaMA-Factory: writes its dataset and config, and runs its CLI.

LLaMA-Factory needs an environment of its own: UNDERSTUDY_LLAMAFACTORY_PYTHON names that environment's python;
without it, `llamafactory-cli` is looked up in PATH.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.export.corpus import Corpus, ExportSelection
from understudy.export.formats import llamafactory as exporting
from understudy.store import Store
from understudy.train.options import SFTOptions
from understudy.trajectory.roles import Role
from understudy.types import WORK_ROLES

PYTHON = "UNDERSTUDY_LLAMAFACTORY_PYTHON"
TRAINING = "training"
"""The directory in the output that holds data, config, log and checkpoints, everything but the model."""

ADAPTER = "adapter"
LOG = "llamafactory.log"

_RUN_CODE = "from llamafactory.cli import main; main()"
_OUTPUT_CHARACTERS = 2000
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
_TEMPLATE_BY_MODEL_TYPE = {
    "deepseek_v3": "deepseek3",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
    "glm4": "glm4",
    "glm4_moe": "glm4_moe",
    "llama": "llama3",
    "mistral": "mistral",
    "qwen2": "qwen",
    "qwen2_moe": "qwen",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3",
    "qwen3_next": "qwen3",
}
"""LLaMA-Factory's chat templates by the type in a model's config.json."""


class LlamaFactorySummary(Struct, frozen=True, kw_only=True):
    """The result of a training: first and last step's loss; `left_out` counts excluded rollouts by reason."""

    output: str
    rows: int
    steps: int
    first_loss: float
    last_loss: float
    left_out: dict[str, int] = field(default_factory=dict[str, int])
    seconds: float = 0.0


class _Config(Struct):
    model_type: str = ""


class _LoggedStep(Struct):
    loss: float | None = None
    current_steps: int = 0


def train(
    model: Path,
    sources: Sequence[Path],
    output: Path,
    options: SFTOptions,
    *,
    template: str | None = None,
    run: str | None = None,
    roles: tuple[Role, ...] | None = None,
    include_suspicious: bool = False,
    on_line: Callable[[str], None] | None = None,
) -> LlamaFactorySummary:
    """Train the model in directory `model` on the solved rollouts of the stores `sources`; write the new one to
    `output`.

    A dataset of `understudy export llamafactory` may be given instead, as the only source. Data, config and log
    stay in `output/training`; with LoRA the adapter stays in `output/adapter`. `template` is LLaMA-Factory's name
    of the model's chat template (default: by model type). `on_line` gets each line of the program's output. Raises
    ConfigError when LLaMA-Factory is not installed, there is nothing to train on, or the training fails.
    """
    began = time.monotonic()
    program = command()
    template = template or _template(model)
    if output.exists() and any(path.name != TRAINING for path in output.iterdir()):
        raise ConfigError(f"{output} is not empty; expected a new or empty directory: choose another --output")
    training_dir = output / TRAINING
    if training_dir.exists():
        raise ConfigError(
            f"{training_dir} holds an unfinished training, which --engine llamafactory cannot continue; remove "
            "it, or choose another --output"
        )
    training_dir.mkdir(parents=True)
    left_out = Counter[str]()
    selection = ExportSelection(
        origins=("rollouts",),
        run=run,
        roles=roles or WORK_ROLES,
        include_suspicious=include_suspicious,
        solved_only=True,
        test_share=0.0,
    )
    names, directory, rows = _datasets(
        model, sources, selection, training_dir / "data", template, options, left_out
    )
    config = training_dir / exporting.CONFIG
    config.write_text(
        _training_config(model, directory, names, template, options, training_dir / "model"), encoding="utf-8"
    )
    log = training_dir / LOG
    _run([*program, "train", str(config)], log, on_line)
    steps = _logged_steps(training_dir / "model")
    if options.lora is None:
        produced = training_dir / "model"
    else:
        produced = training_dir / "merged"
        (training_dir / "model").replace(output / ADAPTER)
        merging = training_dir / "merge.yaml"
        merging.write_text(_yaml(_merge_config(model, output / ADAPTER, template, produced)), encoding="utf-8")
        _run([*program, "export", str(merging)], log, on_line)
    _install_model(produced, model, output)
    losses = [step.loss for step in steps if step.loss is not None]
    return LlamaFactorySummary(
        output=str(output),
        rows=rows,
        steps=max((step.current_steps for step in steps), default=0),
        first_loss=losses[0] if losses else 0.0,
        last_loss=losses[-1] if losses else 0.0,
        left_out=dict(left_out),
        seconds=round(time.monotonic() - began, 3),
    )


def command() -> list[str]:
    """Return the command that runs LLaMA-Factory's CLI. Raises ConfigError where it is not installed."""
    python = os.environ.get(PYTHON)
    if python:
        if shutil.which(python) is None:
            raise ConfigError(
                f"{PYTHON} is set to {python}, which is not an executable program; set it to the python of "
                "LLaMA-Factory's environment, DIR/bin/python"
            )
        return [python, "-c", _RUN_CODE]
    program = shutil.which("llamafactory-cli")
    if program is None:
        raise ConfigError(
            "LLaMA-Factory is not installed. Give it an environment of its own, python -m venv DIR and "
            f"DIR/bin/pip install llamafactory, and set {PYTHON}=DIR/bin/python"
        )
    return [program]


def _template(model: Path) -> str:
    try:
        kind = msgspec.json.decode((model / "config.json").read_bytes(), type=_Config).model_type
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"{model}: its config.json cannot be read, or names no model_type: {error}; give the directory of a "
            "model of transformers, with weights and tokenizer"
        ) from error
    if kind not in _TEMPLATE_BY_MODEL_TYPE:
        raise ConfigError(
            f"{model} has the unsupported model type {kind!r}: LLaMA-Factory's name of its chat template is "
            f"unknown; supported: {', '.join(sorted(_TEMPLATE_BY_MODEL_TYPE))}. Export with `understudy export "
            "llamafactory --template NAME` and run llamafactory-cli on the config that it writes"
        )
    return _TEMPLATE_BY_MODEL_TYPE[kind]


def _datasets(
    model: Path,
    sources: Sequence[Path],
    selection: ExportSelection,
    output: Path,
    template: str,
    options: SFTOptions,
    left_out: Counter[str],
) -> tuple[list[str], Path, int]:
    """Return the names of the datasets, the directory that holds them, and their number of rows."""
    ready = [source for source in sources if (source / exporting.CONFIG).is_file()]
    if ready:
        if len(sources) > 1:
            raise ConfigError(
                f"{ready[0]} is a LLaMA-Factory dataset, which cannot be combined with other sources; "
                "give it as the only --from"
            )
        source = ready[0].resolve()
        lines = (source / "train.jsonl").read_bytes().count(b"\n") if (source / "train.jsonl").is_file() else 0
        info = source.parent / exporting.DATASET_INFO
        if not lines or not info.is_file():
            problem = f"{info} is missing" if lines else f"{source / 'train.jsonl'} is missing or has no rows"
            raise ConfigError(
                f"--from {source}: {problem}; export again with: understudy export llamafactory RUN_DIR --output "
                "DIR"
            )
        return [source.name], source.parent, lines
    names: list[str] = []
    rows = 0
    for number, source in enumerate(sources):
        names.append(f"understudy-{number}")
        with Store.open(source, create=False) as store:
            exported = exporting.export(
                Corpus(store, selection),
                output,
                name=names[-1],
                model=str(model),
                template=template,
                finetuning="full" if options.lora is None else "lora",
                cutoff=options.max_tokens,
            )
        rows += exported.rows
        left_out.update(exported.left_out)
    return names, output.resolve(), rows


def _training_config(
    model: Path, directory: Path, names: Sequence[str], template: str, options: SFTOptions, output: Path
) -> str:
    """Return the YAML config of a training: the exporter's defaults, overridden by `options`."""
    proposed = exporting.training_config(
        stage="sft",
        model=str(model.resolve()),
        template=template,
        finetuning="full" if options.lora is None else "lora",
        dataset_dir=directory,
        name=",".join(names),
        test=None,
        cutoff=options.max_tokens,
        mask_history=False,
        output=output.resolve(),
    )
    gpu = _has_gpu()
    settings: dict[str, Any] = {
        "learning_rate": options.learning_rate,
        "weight_decay": options.weight_decay,
        "adam_beta1": options.beta1,
        "adam_beta2": options.beta2,
        "warmup_steps": options.warmup_steps,
        "max_grad_norm": options.max_grad_norm,
        "num_train_epochs": float(options.epochs),
        "lr_scheduler_type": options.schedule,
        "gradient_accumulation_steps": options.batch_rollouts,
        "bf16": options.precision == "bf16" or (options.precision == "auto" and gpu),
        "gradient_checkpointing": options.gradient_checkpointing,
        "disable_gradient_checkpointing": not options.gradient_checkpointing,
        "seed": options.seed,
        "logging_steps": 1,
        "use_cpu": not gpu,
    }
    if options.lora is not None:
        lora = options.lora
        settings |= {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout}
        settings |= {"lora_target": ",".join(lora.modules) or "all"}
    # The options set `warmup_steps`, so the default `warmup_ratio` is dropped.
    replaced = {*settings, "warmup_ratio"}
    unchanged = [line for line in proposed.splitlines() if line.partition(":")[0] not in replaced]
    return "\n".join([*unchanged, "### from the options of this training", _yaml(settings)])


def _merge_config(model: Path, adapter: Path, template: str, output: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(model.resolve()),
        "adapter_name_or_path": str(adapter.resolve()),
        "template": template,
        "export_dir": str(output.resolve()),
        "export_device": "cpu",
    }


def _yaml(settings: Mapping[str, Any]) -> str:
    # YAML reads 1e-05 as a string; a float needs a decimal point.
    scalars = {
        key: f"{value:.8e}" if isinstance(value, float) else json.dumps(value) for key, value in settings.items()
    }
    return "".join(f"{key}: {value}\n" for key, value in scalars.items())


def _has_gpu() -> bool:
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
    return Path("/dev/nvidiactl").exists() and not hidden


def _run(arguments: list[str], log: Path, on_line: Callable[[str], None] | None) -> None:
    """Run a program with its output appended to `log`. Raises ConfigError with the end of its output when it
    fails.
    """
    # Models are local directories, and its version check rejects releases newer than itself.
    environment = {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", **os.environ}
    with log.open("a", encoding="utf-8") as file:
        try:
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env=environment,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                f"LLaMA-Factory: {arguments[0]} cannot be started: {error.strerror}; set {PYTHON} to the python "
                "of an environment that has LLaMA-Factory"
            ) from error
        with process:
            assert process.stdout is not None
            try:
                for line in process.stdout:
                    file.write(line)
                    if on_line is not None:
                        on_line(line.rstrip("\n"))
            except BaseException:
                # With several GPUs it runs torchrun, whose workers would outlive it.
                os.killpg(process.pid, signal.SIGKILL)
                raise
    if process.returncode == 0:
        return
    output = log.read_text(encoding="utf-8", errors="replace")
    if "out of memory" in output.lower():
        remedy = (
            f"free memory, and merge the adapter with: {' '.join(arguments)}"
            if "export" in arguments
            else "lower --max-tokens, or give --gradient-checkpointing or --lora"
        )
        raise ConfigError(f"LLaMA-Factory ran out of memory; {remedy}. Its output is in {log}")
    raise ConfigError(
        f"LLaMA-Factory ended with exit code {process.returncode}; correct what its output in {log} reports, then "
        "start again with another --output. The output ends: "
        f"{output[-_OUTPUT_CHARACTERS:].strip() or '(it is empty)'}"
    )


def _logged_steps(model: Path) -> list[_LoggedStep]:
    """Return the steps in its log, oldest first."""
    log = model / "trainer_log.jsonl"
    lines = log.read_text("utf-8").splitlines() if log.is_file() else []
    # json, not msgspec: the log may contain NaN.
    return [msgspec.convert(json.loads(line), _LoggedStep) for line in lines if line.strip()]


def _install_model(produced: Path, model: Path, output: Path) -> None:
    """Move the new model into `output`; config.json goes last, since it marks a directory as a complete model."""
    if not any(produced.glob("*.safetensors")):
        raise ConfigError(
            f"LLaMA-Factory wrote no weights to {produced}, expected *.safetensors; its output in "
            f"{output / TRAINING / LOG} says why: correct that, then start again with another --output"
        )
    for name in _TOKENIZER_FILES:
        # Training changes the weights only: the tokenizer files stay byte for byte the same.
        if (model / name).is_file():
            shutil.copyfile(model / name, produced / name)
        else:
            (produced / name).unlink(missing_ok=True)
    _keep_cache_setting(model / "config.json", produced / "config.json")
    files_to_move = [
        path
        for path in produced.iterdir()
        if path.suffix == ".safetensors"
        or path.name in {*_TOKENIZER_FILES, "config.json", "generation_config.json"}
        or path.name.endswith(".safetensors.index.json")
    ]
    for path in sorted(files_to_move, key=lambda path: path.name == "config.json"):
        path.replace(output / path.name)
    for path in produced.glob("checkpoint-*"):
        shutil.rmtree(path)


def _keep_cache_setting(source: Path, trained: Path) -> None:
    """Give a trained config the `use_cache` of its source: false is for training, and makes generation slow."""
    # json, not msgspec, because transformers accepts NaN in config.json
    config: dict[str, Any] = json.loads(trained.read_text("utf-8"))
    config["use_cache"] = json.loads(source.read_text("utf-8")).get("use_cache", True)
    trained.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
