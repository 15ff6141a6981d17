"""Every error that Understudy raises on purpose, named by the boundary it crossed.

    UnderstudyError
    ├── TaskError       a task file, tree or gold patch is not usable
    ├── SandboxError    isolation is missing, or a sandbox broke
    │   └── SandboxLost     it was killed or removed from outside while in use
    ├── AgentError      the agent could not be started, or crashed
    ├── GatewayError    our own gateway failed
    ├── BackendError    the model server is down, refused, or answered nonsense
    ├── GraderError     grading itself failed: never a reward of 0
    ├── StoreError      the store cannot be read or written
    │   ├── LeaseLost       an attempt wrote that was taken from its worker
    │   ├── StoreInUse      others have the store open, and this needs it alone
    │   ├── StoreLocked     another process held the store's lock for too long
    │   └── StoreUnavailable  the database's server did not answer, and may be back soon
    │       └── BucketUnavailable  the server of the store's bucket did not
    └── ConfigError     an option, a setting or the machine is not as needed

A message says what was found, where, what was expected, and what to do next.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar


class UnderstudyError(Exception):
    """Base class of all errors that are raised on purpose.

    `boundary` is the part of the system that failed; it is stored with a failed attempt. `retryable` says whether
    running the same thing again can help.
    """

    boundary: ClassVar[str] = "understudy"
    retryable: ClassVar[bool] = False
    logs: Mapping[str, bytes] = MappingProxyType({})
    """The log files of an agent whose attempt ends with this error."""


class TaskError(UnderstudyError):
    """A task that cannot be used: missing or malformed file, a patch that does not apply, failed validation."""

    boundary: ClassVar[str] = "task"


class SandboxError(UnderstudyError):
    """A sandbox that cannot be opened, or that broke while in use."""

    boundary: ClassVar[str] = "sandbox"
    retryable: ClassVar[bool] = True


class ProcessKilled(SandboxError):
    """A program in a sandbox that got SIGKILL: from its own code, for the memory it used, or from outside."""


class SandboxLost(SandboxError):
    """A sandbox that was killed or removed from outside: by a person, the engine or the kernel.

    Programs inside cannot cause this, so it says nothing about the agent or its patch.
    """


class AgentError(UnderstudyError):
    """An agent that did not start, crashed, or ended without a result.

    `had_answers` says that the model had responded before; then the model may have caused the end.
    """

    boundary: ClassVar[str] = "agent"
    retryable: ClassVar[bool] = True

    def __init__(self, message: str, *, had_answers: bool = False) -> None:
        super().__init__(message)
        self.had_answers = had_answers


class GatewayError(UnderstudyError):
    """An error in the gateway itself."""

    boundary: ClassVar[str] = "gateway"
    retryable: ClassVar[bool] = True


class BackendError(UnderstudyError):
    """A model server that is down, refuses the request, or answers with nonsense.

    `status` is the HTTP status of its answer, or None when there was no answer. `retry_after_s` and `should_retry`
    are what the server asked for, if it did, and `body` is the beginning of what it said.
    """

    boundary: ClassVar[str] = "backend"
    retryable: ClassVar[bool] = True

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
        body: bytes = b"",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s
        self.should_retry = should_retry
        self.body = body


class GraderError(UnderstudyError):
    """Grading that could not be carried out. An infrastructure failure, never a reward of 0."""

    boundary: ClassVar[str] = "grader"
    retryable: ClassVar[bool] = True


class StoreError(UnderstudyError):
    """A store that cannot be opened, read or written, or an illegal state transition."""

    boundary: ClassVar[str] = "store"


class NotInStore(StoreError):
    """The store has no entry with the requested id."""


class LeaseLost(StoreError):
    """A write of an attempt that was taken from its worker, because that did not answer in time; or a gateway that
    another one took its store's clients from.

    Another attempt of the rollout has the next number, and what this one did does not count.
    """


class StoreInUse(StoreError):
    """A store that needs exclusive access, while other processes have it open."""


class StoreLocked(StoreError):
    """A store whose lock another process held for longer than this one waits. Nothing was written."""


class StoreUnavailable(StoreError):
    """A database whose server cannot be reached or broke off at the moment. Asking again may succeed."""


class BucketUnavailable(StoreUnavailable):
    """A bucket whose server cannot be reached or broke off at the moment. Asking again may succeed."""


class ConfigError(UnderstudyError):
    """An option, a setting, or the machine itself is not as needed."""

    boundary: ClassVar[str] = "config"
