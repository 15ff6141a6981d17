"""Fetching images: with progress, and with patience where a registry limits how often it may be asked."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from understudy.errors import SandboxError, TaskError
from understudy.sandbox.docker.engine import (
    ContainerEngine,
    EngineNotFound,
    EngineRefused,
    engine_errors,
    engine_message,
)

PullProgress = Callable[[str], None]
"""Called with one line on how far a pull is, at most once a second."""

_TRIES = 5
_LONGEST_WAIT_S = 600.0
_EVERY_S = 1.0
_LIMITED = re.compile(r"toomanyrequests|too many requests|rate limit|status.{0,10}429", re.I)
_RETRY_AFTER = re.compile(r"retry[- ]after\W{0,3}(\d+(?:\.\d+)?)\s*(ms|m\b|s|)", re.I)
_ABSENT = re.compile(r"not found|manifest unknown|does not exist|access denied|denied: requested access", re.I)
_UNITS = {"ms": 0.001, "s": 1.0, "": 1.0, "m": 60.0}

_log = logging.getLogger("understudy.sandbox.docker")


def log_progress(line: str) -> None:
    """The default progress callback."""
    _log.info("%s", line)


class _RateLimited(Exception):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        match = _RETRY_AFTER.search(message)
        self.wait_s = float(match[1]) * _UNITS[match[2].lower()] if match else None


class ImagePuller:
    """Fetches images through one engine. `wait_s` is the first pause when a registry refuses; it then doubles."""

    def __init__(self, engine: ContainerEngine, progress: PullProgress, wait_s: float) -> None:
        self._engine = engine
        self._progress = progress
        self._wait_s = wait_s
        self._stop = threading.Event()

    def stop(self) -> None:
        """Cancel what is being fetched, and refuse to fetch more."""
        self._stop.set()

    def pull(self, image: str) -> None:
        """Fetch an image. Raises TaskError when the registry has none, SandboxError when it cannot be had now."""
        pause = self._wait_s
        for attempt in range(1, _TRIES + 1):
            try:
                with engine_errors(f"fetch the image {image}"):
                    self._pull(image)
                return
            except EngineNotFound as error:
                raise _absent(image, engine_message(error)) from error
            except _RateLimited as error:
                if attempt == _TRIES:
                    raise SandboxError(
                        f"cannot fetch the image {image}: the registry limits how often it may be asked, "
                        f"{_TRIES} times now ({error}); log in with `docker login`, or wait and run this again"
                    ) from error
                wait = min(pause if error.wait_s is None else error.wait_s, _LONGEST_WAIT_S)
                self._progress(f"{image}: the registry limits pulls; trying again in {wait:.0f} s")
                if self._stop.wait(wait):
                    raise SandboxError(f"fetching the image {image} was cancelled") from error
                pause *= 2

    def _pull(self, image: str) -> None:
        name, tag = split(image)
        layers: dict[str, tuple[int, int]] = {}
        reported_at = 0.0
        try:
            for event in self._engine.api.pull(name, tag=tag, stream=True, decode=True):
                if self._stop.is_set():
                    raise SandboxError(f"fetching the image {image} was cancelled")
                if message := event.get("error"):
                    _raise_refusal(image, str(message))
                _note(layers, event)
                if time.monotonic() - reported_at >= _EVERY_S:
                    reported_at = time.monotonic()
                    self._progress(f"{image}: {_summary(layers)}")
        except EngineNotFound:
            raise
        except EngineRefused as error:
            _raise_refusal(image, f"{engine_message(error)}{_after(error)}", error)
            raise
        self._progress(f"{image}: fetched")


def _after(error: Any) -> str:
    """The header that names a time to wait, in words, or nothing."""
    headers: Mapping[str, str] = getattr(error.response, "headers", None) or {}
    status = " (status 429)" if getattr(error.response, "status_code", 0) == 429 else ""
    return status + (f" Retry-After: {headers['Retry-After']}" if "Retry-After" in headers else "")


def _raise_refusal(image: str, message: str, cause: Exception | None = None) -> None:
    """Raise what a refusal means: _Limited, TaskError, or for what comes in the stream SandboxError."""
    if _LIMITED.search(message):
        raise _RateLimited(message) from cause
    if _ABSENT.search(message):
        raise _absent(image, message) from cause
    if cause is None:
        raise SandboxError(f"cannot fetch the image {image}: {message}")


def _absent(image: str, message: str) -> TaskError:
    return TaskError(
        f"image {image!r} not found on this machine or in its registry ({message}); check the name, namespace "
        "and tag, log in with `docker login` when it is private, or build it under this name"
    )


def split(image: str) -> tuple[str, str | None]:
    """An image's name without its tag or digest, and that, which is "latest" where none is given."""
    if "@" in image:
        name, _, digest = image.partition("@")
        return name, digest
    name, colon, tag = image.rpartition(":")
    if colon and "/" not in tag:
        return name, tag
    return image, "latest"


def _note(layers: dict[str, tuple[int, int]], event: Mapping[str, Any]) -> None:
    detail: Mapping[str, int] = event.get("progressDetail") or {}
    if "id" in event and (status := event.get("status")) in ("Downloading", "Extracting"):
        whole = int(detail.get("total") or 0)
        done = int(detail.get("current") or 0) if status == "Downloading" else whole
        layers[event["id"]] = (done, max(whole, layers.get(event["id"], (0, 0))[1]))


def _summary(layers: Mapping[str, tuple[int, int]]) -> str:
    done, whole = (sum(layer[which] for layer in layers.values()) for which in (0, 1))
    return f"fetching, {done / 1e6:.0f} of {whole / 1e6:.0f} MB in {len(layers)} layers"
