"""Which weights of a loop stay on the disk."""

from __future__ import annotations

import contextlib
import shutil

from understudy.train.loop.state import LoopDirectory, LoopState


def prune(directory: LoopDirectory, state: LoopState, keep: int) -> None:
    """Remove weights but those that answer, those that did best, and the last ones, `keep` in all.

    What waits to be published stays. What a kill left of a directory or file that was being written goes: nobody
    may be writing.
    """
    trained = {step.version: step.step for step in state.published() if step.weights is not None}
    ranked = [state.version]
    tried = [each for each in state.evaluations if each.version in trained and each.total]
    if tried:
        ranked.append(max(tried, key=lambda each: (each.solved / each.total, each.step)).version)
    ranked += sorted(trained, key=lambda version: -trained[version])
    retained = list(dict.fromkeys(ranked))[: max(1, keep)]
    for version, number in trained.items():
        if version not in retained:
            shutil.rmtree(directory.weights(number), ignore_errors=True)
    for leftover in (path for end in ("new", "old") for path in directory.root.glob(f"steps/*/.*.{end}")):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            with contextlib.suppress(OSError):
                leftover.unlink()
