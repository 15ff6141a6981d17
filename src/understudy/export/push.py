"""Pushes an export to the Hugging Face Hub with the hub's own library, which also handles authentication."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from msgspec import Struct, field

from understudy.errors import ConfigError
from understudy.export.files import CARD_NAME, MANIFEST, read_manifest, sha256_of

_REPO = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]*")
_LOGIN = "log in with `hf auth login`, or set HF_TOKEN to a token that may write"
_REMEDIES = {
    401: _LOGIN,
    403: _LOGIN,
    404: "check the owner's name and HF_ENDPOINT",
    413: "export less, with --where or --run",
}
"""What to do about a refusal of the hub, by its HTTP status. After others, a later attempt may succeed."""


class PushSummary(Struct, frozen=True, kw_only=True):
    """What was pushed, or would be: `files` with their size in bytes. `url` is where it is."""

    repo: str
    private: bool
    files: dict[str, int] = field(default_factory=dict[str, int])
    url: str | None = None


def plan_push(directory: Path, repo: str, *, private: bool = True, unredacted: bool = False) -> PushSummary:
    """Return what pushing an export would do, without sending anything.

    Raises ConfigError if the directory has no export, if a file of it is missing or was changed (except the card),
    if the repository's name is invalid, or if it contains unredacted sessions and `unredacted` is false.
    """
    manifest = read_manifest(directory)
    if manifest is None:
        raise ConfigError(f"{directory} is not an export (missing {MANIFEST}); make one with: understudy export")
    if not _REPO.fullmatch(repo):
        raise ConfigError(
            f"invalid repository name {repo!r}; give OWNER/DATASET, with letters, digits, dots, dashes "
            "and underscores"
        )
    # An export without this field is from an older release; what is not known to be redacted counts as unredacted.
    if manifest.get("unredacted", True) and not unredacted:
        raise ConfigError(
            f"{directory}: contains unredacted sessions, which may hold secrets, names and paths; export them "
            "again without --unredacted, or confirm with --unredacted that they may be published"
        )
    files: dict[str, int] = {}
    listed_files: Any = manifest.get("files")
    for name, about in (cast(dict[str, Any], listed_files) if isinstance(listed_files, dict) else {}).items():
        if about.get("kept"):
            continue
        path = directory / name
        if not path.is_file() or not path.resolve().is_relative_to(directory.resolve()):
            raise ConfigError(
                f"{path}: listed in {MANIFEST}, but missing, or not inside the export; write it again with: "
                "understudy export"
            )
        if name != CARD_NAME and sha256_of(path) != about.get("sha256"):
            raise ConfigError(
                f"{path}: changed since it was exported, as its SHA-256 shows (expected "
                f"{str(about.get('sha256'))[:12]}…); write it again with: understudy export"
            )
        files[name] = path.stat().st_size
    if not files:
        raise ConfigError(
            f"{directory / MANIFEST}: invalid manifest: expected the files of an export, got none; write the "
            "export again with: understudy export"
        )
    files[MANIFEST] = (directory / MANIFEST).stat().st_size
    return PushSummary(repo=repo, private=private, files=files)


def push(directory: Path, planned: PushSummary, report: Callable[[str], None] = lambda _: None) -> PushSummary:
    """Create the dataset's repository if needed, and upload the files in one commit.

    Files that the hub has already are not sent again, so an interrupted push can be repeated. Raises ConfigError
    if the hub refuses or cannot be reached, or if the repository is public although a private one was planned.
    """
    import huggingface_hub
    from huggingface_hub import errors

    # Its base classes include whatever errors its HTTP library raises.
    network = (OSError, *cast(tuple[type[Exception], ...], errors.HfHubHTTPError.__bases__))
    api: Any = huggingface_hub.HfApi(library_name="understudy")
    try:
        report("creating the repository")
        url = api.create_repo(planned.repo, repo_type="dataset", private=planned.private, exist_ok=True)
        repo: str = url.repo_id
        if planned.private and not api.repo_info(repo, repo_type="dataset").private:
            raise ConfigError(
                f"{repo}: the dataset exists and is public; give --public to push there, or choose another name"
            )
        report(f"uploading {len(planned.files)} files")
        api.upload_folder(
            repo_id=repo,
            repo_type="dataset",
            folder_path=directory,
            allow_patterns=list(planned.files),
            commit_message="Export of understudy",
        )
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        remedy = _REMEDIES.get(status, "run the same command again later")
        text = " ".join(str(getattr(error, "server_message", None) or error).split())[:300]
        raise ConfigError(
            f"the hub refused to store {planned.repo} (status {status}): {text}; {remedy}"
        ) from error
    except (errors.HFValidationError, errors.LocalTokenNotFoundError) as error:
        raise ConfigError(
            f"{planned.repo}: huggingface_hub refused to push: {error}; check the dataset's name, or {_LOGIN}"
        ) from error
    except network as error:
        raise ConfigError(
            f"the hub cannot be reached: {type(error).__name__}: {error}; check the network and HF_ENDPOINT, then "
            "retry: files that the hub already has are not sent again"
        ) from error
    return PushSummary(repo=repo, private=planned.private, files=planned.files, url=str(url))
