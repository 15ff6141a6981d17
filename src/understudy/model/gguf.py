"""GGUF files: checked to be whole, and dequantized to a directory of safetensors by transformers."""

from __future__ import annotations

import contextlib
import io
import shutil
from importlib import import_module
from pathlib import Path
from typing import Any

from understudy.errors import ConfigError
from understudy.model.directory import missing_template, require_packages

_MAGIC = b"GGUF"


def open_gguf(file: Path) -> Any:
    """A `gguf.GGUFReader` of a file of which every tensor is there. Raises ConfigError for any other file."""
    require_packages("gguf")
    try:
        with file.open("rb") as stream:
            magic = stream.read(4)
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}; check its path and permissions") from error
    if magic != _MAGIC:
        raise ConfigError(f"{file} is not a GGUF file: it starts with {magic!r}, expected {_MAGIC!r}")
    library: Any = import_module("gguf")
    try:
        reader: Any = library.GGUFReader(file)
        ends = [int(tensor.data_offset) + int(tensor.n_bytes) for tensor in reader.tensors]
    except (
        Exception
    ) as error:  # the library trips over whatever it met, as an end of the file that comes too early
        raise ConfigError(f"{file}: damaged or truncated GGUF file ({error}); download it again") from error
    size = file.stat().st_size
    if not ends or max(ends) > size:
        raise ConfigError(
            f"{file}: truncated GGUF file: it has {size} bytes, expected {max(ends, default=0)} or more; download "
            "it again"
        )
    return reader


def declared_license(file: Path) -> str:
    """The licence that a GGUF file names, or "not declared"."""
    field: Any = open_gguf(file).get_field("general.license")
    return "not declared" if field is None else str(field.contents())


def write_safetensors(file: Path, directory: Path, *, template: Path | None = None) -> None:
    """Write the model of a GGUF file to a directory in float32, with its tokenizer and chat template.

    `template` is a chat template for the place of the file's own. Raises ConfigError when the file is damaged, its
    architecture is not one that transformers reads, or there is no chat template.
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
        with contextlib.redirect_stderr(io.StringIO()):  # where a progress bar is drawn in any case
            tokenizer: Any = library.AutoTokenizer.from_pretrained(source, **options)
            model: Any = library.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **options)
            # What is written is not quantized, and must not say so.
            model.config.__dict__.pop("quantization_config", None)
            model.hf_quantizer = None
            model.save_pretrained(str(directory))
            tokenizer.save_pretrained(str(directory))
    except Exception as error:  # the libraries raise whatever they met
        raise ConfigError(
            f"{file}: cannot be dequantized: {error}; give a GGUF file of an architecture that transformers "
            f"supports, or the model's safetensors"
        ) from error
    if template is not None:
        shutil.copyfile(template, directory / "chat_template.jinja")
    elif not (directory / "chat_template.jinja").is_file() and not tokenizer.chat_template:
        raise missing_template(file)
