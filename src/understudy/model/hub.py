"""Downloads models of the Hugging Face Hub with the hub's own library, and checks each file."""

from __future__ import annotations

import fnmatch
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from understudy.errors import ConfigError
from understudy.model.gguf import write_safetensors
from understudy.model.pretrained import (
    FetchedModel,
    ModelRecord,
    cached_directory,
    check_sha256,
    new_model,
    read_record,
    write_record,
)
from understudy.util.text import reason_of

_FILES = (
    "*.safetensors", "*.safetensors.index.json", "config.json", "generation_config.json", "tokenizer*", "*.jinja",
    "vocab.json", "merges.txt", "special_tokens_map.json", "added_tokens.json", "LICENSE*", "NOTICE*",
)  # fmt: skip
"""The files of a repository that are downloaded: safetensors and what belongs to them, no pickles and no code."""
_TIMEOUT_S = 10.0


def fetch_from_hub(
    name: str, *, revision: str | None, gguf: str | None, cache: Path, report: Callable[[str], None]
) -> FetchedModel:
    """Download a repository's safetensors, tokenizer and template to the cache, or convert its GGUF file `gguf`.

    All files are of the same commit. The SHA-256 is checked for files for which the hub has one (large ones,
    including weights). Raises ConfigError when the hub cannot be reached or refuses, when there are no
    safetensors, or when a file differs from what the hub says.
    """
    import huggingface_hub
    from huggingface_hub import errors

    # The base classes of its error are those of its HTTP library, whichever that is.
    network = (OSError, *cast("tuple[type[Exception], ...]", errors.HfHubHTTPError.__bases__))
    endpoint = os.environ.get("HF_ENDPOINT")
    api: Any = huggingface_hub.HfApi(endpoint=endpoint, library_name="understudy")
    try:
        report(f"asking the hub for {name}")
        about: Any = api.model_info(name, revision=revision, files_metadata=True, timeout=_TIMEOUT_S)
        siblings: list[Any] = about.siblings or []
        files: dict[str, Any] = {sibling.rfilename: sibling for sibling in siblings}
        chosen = [gguf] if gguf is not None else [name for name in sorted(files) if _is_wanted(name)]
        if gguf is not None and gguf not in files:
            available = ", ".join(name for name in sorted(files) if name.endswith(".gguf")) or "none"
            raise ConfigError(f"{name} has no file {gguf!r}; give one of its GGUF files: {available}")
        if gguf is None and not any(name.endswith(".safetensors") for name in chosen):
            raise ConfigError(
                f"{name} has no *.safetensors at its root; give a repository that has, or one of its GGUF files "
                f"with --gguf FILE"
            )
        with new_model(name, cache) as fresh:
            for file in chosen:
                report(f"downloading {file}")
                path = Path(api.hf_hub_download(name, file, revision=about.sha, local_dir=fresh / ".download"))
                if (large := files[file].lfs) is not None:
                    check_sha256(path, large.sha256)
                elif files[file].size is not None and path.stat().st_size != files[file].size:
                    raise ConfigError(
                        f"{file} has {path.stat().st_size} bytes, expected {files[file].size}, so the "
                        "download is incomplete; run the same command again"
                    )
                if gguf is None:
                    path.replace(fresh / path.name)
            if gguf is not None:
                report(f"dequantizing {gguf} to safetensors")
                write_safetensors(fresh / ".download" / gguf, fresh)
            shutil.rmtree(fresh / ".download")
            record = ModelRecord(
                name=name,
                source=f"{api.endpoint}/{name}" + (f"/{gguf}" if gguf else ""),
                license=_license(about),
                sha256=str(about.sha),
                files={},
            )
            write_record(fresh, record)
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        login = "check the name, and log in with `hf auth login` or set HF_TOKEN if the model is gated or private"
        remedy = login if status in (401, 403, 404) else "retry later"
        text = " ".join(str(getattr(error, "server_message", None) or "").split())[:300] or reason_of(error)
        raise ConfigError(f"the hub refused {name} (status {status}): {text}; {remedy}") from error
    except errors.HFValidationError as error:
        raise ConfigError(f"invalid name of a model {name!r}: {reason_of(error)}; give OWNER/NAME") from error
    except network as error:
        raise ConfigError(
            f"{name}: the hub cannot be reached: {type(error).__name__}: {reason_of(error)}; check the network "
            "and HF_ENDPOINT, or copy the model's directory here and give its path"
        ) from error
    directory = cached_directory(name, cache)
    return FetchedModel(directory=str(directory), record=read_record(directory))


def _is_wanted(file: str) -> bool:
    return "/" not in file and any(fnmatch.fnmatch(file, pattern) for pattern in _FILES)


def _license(about: Any) -> str:
    tags = [tag.removeprefix("license:") for tag in about.tags or () if tag.startswith("license:")]
    return tags[0] if tags else "not declared"
