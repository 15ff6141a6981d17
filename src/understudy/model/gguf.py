"""GGUF files: checks that they are complete, and dequantizes them to a directory of safetensors with
transformers.
"""

from __future__ import annotations

import contextlib
import io
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.model.directory import require_packages
from understudy.util.text import reason_of

_MAGIC = b"GGUF"


def open_gguf(file: Path) -> Any:
    """Return a `gguf.GGUFReader` of a file that contains all its tensors. Raises ConfigError for any
    other file.
    """
    require_packages("gguf")
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check its path and permissions") from error
    if magic != _MAGIC:
        raise ConfigError(
            f"{file} is not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}; give the path of a "
            "GGUF file"
        )
    library: Any = import_module("gguf")
    try:
        reader: Any = library.GGUFReader(file)
        ends = [int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors]
    except Exception as error:  # the library raises various errors, for example for a file that ends too early
        raise ConfigError(
            f"{file}: damaged or truncated GGUF file ({reason_of(error)}); download it again"
        ) from error
    if not ends:
        raise ConfigError(
            f"{file}: has no tensors, expected the weights of a model (some GGUF files are a vocabulary alone); "
            "give another GGUF file"
        )
    size = file.stat().st_size
    if max(ends) > size:
        raise ConfigError(
            f"{file}: truncated GGUF file: it has {size} bytes, expected {max(ends)} or more; download it again"
        )
    return reader


def declared_license(file: Path) -> str:
    """Return the licence that a GGUF file declares, or "not declared"."""
    field: Any = open_gguf(file).get_field("general.license")
    return "not declared" if field is None else str(field.contents())


def write_safetensors(file: Path, directory: Path, *, template: Path | None = None) -> None:
    """Write a GGUF file's model to a directory in float32, with its tokenizer and chat template.

    `template` replaces the file's own chat template. Raises ConfigError when the file is damaged, transformers
    does not support its architecture, or there is no chat template.
    """
    require_packages("torch", "transformers", "gguf")
    open_gguf(file)
    import torch
    import transformers

    library: Any = transformers
    library.logging.disable_progress_bar()
    options = {"gguf_file": file.name, "local_files_only": True, "trust_remote_code": False}
    source = str(file.parent.absolute())
    try:
        with contextlib.redirect_stderr(io.StringIO()):  # transformers always draws a progress bar
            tokenizer: Any = library.AutoTokenizer.from_pretrained(source, **options)
            model: Any = library.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
            # The written weights are not quantized, so the config must not say so.
            model.config.__dict__.pop("quantization_config", None)
            model.hf_quantizer = None
            model.save_pretrained(str(directory))
            tokenizer.save_pretrained(str(directory))
    except Exception as error:  # errors of these libraries have no narrower class
        raise ConfigError(
            f"{file}: cannot be dequantized: {reason_of(error)}; if disk or memory ran out, free some, else give "
            "a GGUF file of an architecture that transformers supports, or the directory of the model's "
            "safetensors"
        ) from error
    if template is not None:
        shutil.copyfile(template, directory / "chat_template.jinja")
    elif not (directory / "chat_template.jinja").is_file() and not tokenizer.chat_template:
        raise ConfigError(
            f"{file} has no chat template, expected one in tokenizer.chat_template; give a GGUF file of an "
            "instruction-tuned model, or a model's directory with chat_template.jinja"
        )
