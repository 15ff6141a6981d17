"""What a reader of a kind of log offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Protocol

from understudy.ingest.log_files import LogFile
from understudy.ingest.trace import Trace


class LogFormat(Protocol):
    """A kind of log. Logs are hostile input: nothing in them may raise, and each loss is counted in a trace."""

    name: str

    def detect(self, path: str, head: bytes) -> bool:
        """Whether a file is of this format, by its name and its first 64 KB; cheap."""
        ...

    def group(self, path: str) -> str:
        """A key: files with the same one must be given to `read` together."""
        ...

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """The traces in the files of a group. Raises OSError when a file cannot be read."""
        ...


class SingleFileFormat(ABC):
    """A format whose files are read one by one."""

    def group(self, path: str) -> str:
        """The file itself."""
        return path

    def read(self, files: Sequence[LogFile]) -> Iterator[Trace]:
        """The traces of each file. Raises OSError when one cannot be read."""
        for file in files:
            yield from self.read_file(file)

    @abstractmethod
    def read_file(self, file: LogFile) -> Iterator[Trace]:
        """The traces of one file. Raises OSError when it cannot be read."""
