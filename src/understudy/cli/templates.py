"""The chat template of `--tokenizer`, which counts the tokens of conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from understudy.errors import BackendError, ConfigError

if TYPE_CHECKING:
    from understudy.gateway.exact.codec import LocalCodec


@contextmanager
def chat_template(directory: Path | None) -> Generator[RenderingTemplate | None]:
    """Return the chat template in a tokenizer's directory; None for None. Raises ConfigError if there is none."""
    if directory is None:
        yield None
        return
    if not directory.is_dir():
        raise ConfigError(f"--tokenizer: {directory} is not a directory; give one with a model's tokenizer.json")
    from understudy.gateway.exact.codec import LocalCodec

    with asyncio.Runner() as runner:
        yield RenderingTemplate(LocalCodec.load(str(directory)), runner)


class RenderingTemplate:
    """A tokenizer with its chat template, which implements `preference.checks.Template`."""

    def __init__(self, codec: LocalCodec, runner: asyncio.Runner) -> None:
        self._codec = codec
        self._runner = runner

    def render(
        self, messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]], *, generation_prompt: bool
    ) -> Sequence[int] | None:
        """See `checks.Template`."""
        try:
            return self._runner.run(self._codec.render(messages, tools, generation_prompt=generation_prompt))
        except BackendError:
            return None
