"""A sandbox that passes everything on to another one; the base of those that change or record some of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from understudy.sandbox.base import Completed, IgnoreFilter, Sandbox, TreeChanges


class ForwardingSandbox(Sandbox):
    """Passes everything on to an open sandbox. For the methods see Sandbox."""

    def __init__(self, sandbox: Sandbox) -> None:
        self._sandbox = sandbox

    @property
    def workdir(self) -> str:
        """See Sandbox."""
        return self._sandbox.workdir

    @property
    def home(self) -> str:
        """See Sandbox."""
        return self._sandbox.home

    def locate(self, target: str) -> str:
        """See Sandbox."""
        return self._sandbox.locate(target)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        reveal: bool = False,
    ) -> Completed:
        """See Sandbox."""
        return await self._sandbox.run(argv, timeout_s=timeout_s, stdin=stdin, env=env, cwd=cwd, reveal=reveal)

    async def read(self, path: str, *, limit: int = 64 << 20) -> bytes:
        """See Sandbox."""
        return await self._sandbox.read(path, limit=limit)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See Sandbox."""
        await self._sandbox.write(path, data, mode=mode)

    async def seal(self, paths: Sequence[str]) -> None:
        """See Sandbox."""
        await self._sandbox.seal(paths)

    async def count_opens(self, paths: Sequence[str]) -> None:
        """See Sandbox."""
        await self._sandbox.count_opens(paths)

    def opens(self) -> dict[str, int] | None:
        """See Sandbox."""
        return self._sandbox.opens()

    async def read_changes(self, *, file_limit: int, ignored: IgnoreFilter) -> TreeChanges | None:
        """See Sandbox."""
        return await self._sandbox.read_changes(file_limit=file_limit, ignored=ignored)

    async def reset(self) -> None:
        """See Sandbox."""
        await self._sandbox.reset()

    async def close(self) -> None:
        """See Sandbox."""
        await self._sandbox.close()
