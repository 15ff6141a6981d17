"""Columns that hold JSON: errors, findings, configurations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from understudy.errors import StoreError
from understudy.types import ErrorInfo, Finding

encode = msgspec.json.Encoder().encode
canonical = msgspec.json.Encoder(order="sorted").encode
_error = msgspec.json.Decoder(ErrorInfo).decode
_findings = msgspec.json.Decoder(tuple[Finding, ...]).decode


def error_column(error: ErrorInfo | None) -> bytes | None:
    """The column of an error. What is not valid Unicode in its message (a file name, say) is replaced."""
    if error is None:
        return None
    return encode(msgspec.structs.replace(error, message=_unicode(error.message)))


def read_error(column: bytes | None) -> ErrorInfo | None:
    """The error in a column."""
    return None if column is None else _error(column)


def findings_column(findings: Sequence[Finding]) -> bytes:
    """The column of findings; what is not valid Unicode in their messages is replaced."""
    return encode([msgspec.structs.replace(finding, message=_unicode(finding.message)) for finding in findings])


def read_findings(column: bytes | None) -> tuple[Finding, ...]:
    """The findings in a column."""
    return () if column is None else _findings(column)


def json_column(encoder: Callable[[object], bytes], value: object, what: str) -> bytes:
    """The column of a value. Raises StoreError with `what` in its message when the value is not JSON."""
    try:
        return encoder(value)
    except (TypeError, ValueError, RecursionError, OverflowError) as error:
        raise StoreError(f"{what} cannot be written as JSON: {error}") from error


def _unicode(text: str) -> str:
    return text.encode(errors="replace").decode()
