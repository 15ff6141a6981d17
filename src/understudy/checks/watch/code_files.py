"""Compares code that runs in a watched process with what its file compiles to (see `process_watch`)."""

from __future__ import annotations

import _frozen_importlib_external
import marshal
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any


def content_reader() -> Callable[[str], bytes]:
    """Return a function from a path to the file's bytes; it raises OSError."""
    # The hook uses what tested code could replace in modules or builtins only as it is bound here.
    open_file, read_file, close_file = os.open, os.read, os.close

    def content_of(path: str) -> bytes:
        descriptor, content = open_file(path, 0), b""
        while True:
            part = read_file(descriptor, 1 << 20)
            if not part:
                break
            content += part
        close_file(descriptor)
        return content

    return content_of


def genuineness_check(standard: str, content_of: Callable[[str], bytes]) -> tuple[Any, ...]:
    """Return a function from a code object to whether its file compiles to it, and the functions and code that it
    uses.

    `standard` is the directory of the standard library, ending in "/", and `content_of` reads a file.
    """
    stat, statvfs, read_only, integer, kind_of = os.stat, os.statvfs, os.ST_RDONLY, int, type
    failures, os_error, value_error = (TypeError, ValueError, OSError, EOFError), OSError, ValueError
    load_code, cache_tag = marshal.loads, str(sys.implementation.cache_tag)
    magic: bytes = vars(_frozen_importlib_external)["MAGIC_NUMBER"]
    compile_text, code_type = compile, type(genuineness_check.__code__)
    # Without its sources, or compiled with other options, the standard library cannot be compared.
    comparable = os.path.isfile(standard + "linecache.py") and not sys.flags.optimize
    compiled: dict[str, set[Any]] = {}

    def compiled_before(path: str) -> Any:
        """Return the code that Python cached for a file, which is faster; None if processes here could write to
        the cache.
        """
        directory, _, name = path.rpartition("/")
        cached = directory + "/__pycache__/" + name[:-2] + cache_tag + ".pyc"
        try:
            if not statvfs(cached).f_flag & read_only:
                return None
            status, content = stat(path), content_of(cached)
            changed, length = integer(status.st_mtime) & 0xFFFFFFFF, status.st_size & 0xFFFFFFFF
            header = magic + b"\0\0\0\0" + changed.to_bytes(4, "little") + length.to_bytes(4, "little")
            return load_code(content[16:]) if content[:16] == header else None
        except failures:
            return None

    def compile_file(name: str) -> set[Any]:
        """Return the identities of all code in a file; empty if there is no such file."""
        paths = (name,)
        if name.startswith("<frozen "):
            module = standard + name[8:-1].replace(".", "/")
            paths = (module + ".py", module + "/__init__.py")
        bodies: set[Any] = set()
        for path in paths:
            try:
                code = compiled_before(path)
                pending: list[Any] = [code or compile_text(content_of(path), path, "exec", 0, True)]
            except (os_error, value_error, SyntaxError):
                continue
            while pending:
                code = pending.pop()
                bodies.add((code.co_name, code.co_firstlineno, code.co_code))
                pending += [constant for constant in code.co_consts if kind_of(constant) is code_type]
        return bodies

    def is_genuine(code: Any) -> bool:
        name = code.co_filename
        if not comparable:
            return True
        if name not in compiled:
            compiled[name] = compile_file(name)
        return (code.co_name, code.co_firstlineno, code.co_code) in compiled[name]

    inner_codes = [constant for constant in compile_file.__code__.co_consts if kind_of(constant) is code_type]
    return is_genuine, (compiled_before, compile_file), inner_codes
