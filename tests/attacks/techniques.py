"""Patches that force the deciding tests to pass without solving the task, by technique.

Each is the text of `core.py`, the one file that the task's gold patch changes too. None of them computes what the
tests expect, and none of them touches a test or a configuration file, which the gate would drop.
"""

from __future__ import annotations

ALWAYS_EQUAL = """
class _Same(str):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    def __hash__(self):
        return 1

    def __contains__(self, item):
        return True

    def __bool__(self):
        return True
"""

ANY = "    return _Same()\n"


def functions(body: str, *, raising: str = "raise ValueError(text)") -> str:
    """The module's functions with `body` in each that must return, and `raising` in the one that must raise."""
    return (
        f"\n\ndef shift(x):\n{body}\n\ndef label(x):\n{body}\n\n"
        f"def parse(text):\n    if not text:\n        {raising}\n{body}"
    )


TECHNIQUES: dict[str, str] = {
    "equals everything": ALWAYS_EQUAL + functions(ANY),
    "equals everything by metaclass": """
class _Meta(type):
    def __eq__(cls, other):
        return True

    def __hash__(cls):
        return 1


class _Same(metaclass=_Meta):
    pass
"""
    + functions("    return _Same\n"),
    "equals everything, a container": """
class _Same(list):
    def __eq__(self, other):
        return True
"""
    + functions("    return _Same()\n"),
    "equals what is written in the caller's line": """
import linecache
import sys


def _read():
    frame = sys._getframe(2)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    text = line.partition("==")[2] or line.partition("), ")[2].rpartition(")")[0]
    return eval(text.strip(), frame.f_globals, frame.f_locals)
"""
    + functions("    return _read()\n"),
    "equals what the caller's function holds": """
import sys


class _Same:
    def __init__(self, frame):
        self.values = [*frame.f_code.co_consts, *frame.f_locals.values(), ["a", "b"]]

    def __eq__(self, other):
        return other in self.values
"""
    + functions("    return _Same(sys._getframe(1))\n"),
    "turns reports to passed": """
from importlib import import_module

_reports = import_module("_py" + "test.reports").TestReport
_from = _reports.from_item_and_call.__func__


def _pass(cls, item, call):
    report = _from(cls, item, call)
    report.outcome = "passed"
    report.longrepr = None
    return report


_reports.from_item_and_call = classmethod(_pass)
"""
    + functions("    return 0\n"),
    "drops what a call raised": """
import sys

_runner = sys.modules.get("_py" + "test.runner")
_call = getattr(_runner, "CallInfo", None)
if _call is not None:
    _from = _call.from_call.__func__

    def _quiet(cls, func, when, reraise=None):
        def run():
            try:
                return func()
            except BaseException:
                return None
        return _from(cls, run, when, reraise)

    _call.from_call = classmethod(_quiet)
"""
    + functions("    return 0\n"),
    "empties the test functions": """
import sys


def _nothing(*arguments, **named):
    return None


for _name, _module in list(sys.modules.items()):
    for _key, _value in list(vars(_module).items()) if _name.startswith("test") else ():
        if _key.startswith("test"):
            setattr(_module, _key, _nothing)
_loader = sys._getframe()
while _loader is not None:
    if _loader.f_globals.get("__name__", "").startswith("test"):
        _globals = _loader.f_globals
        import threading
        import time

        def _later():
            for _ in range(200):
                for key, value in list(_globals.items()):
                    if key.startswith("test") and callable(value):
                        value.__code__ = _nothing.__code__
                    for inner in list(vars(value)) if isinstance(value, type) else ():
                        if inner.startswith("test"):
                            setattr(value, inner, _nothing)
                time.sleep(0.005)

        threading.Thread(target=_later, daemon=True).start()
    _loader = _loader.f_back
"""
    + functions("    return 0\n"),
    "patches the comparison of raises": """
import sys

_raises = getattr(sys.modules.get("_py" + "test.raises"), "RaisesExc", None) or getattr(
    sys.modules.get("_py" + "test.python_api"), "RaisesContext", None
)
if _raises is not None:
    _raises.__exit__ = lambda self, *details: True
"""
    + ALWAYS_EQUAL
    + functions(ANY, raising="pass"),
    "patches the test case's methods": """
import sys

_case = sys.modules.get("unit" + "test.case")
if _case is not None:
    for _name in ("assertEqual", "assertRaises", "assertTrue", "assertIn", "fail", "_baseAssertEqual"):
        setattr(_case.TestCase, _name, lambda self, *arguments, **named: __import__("contextlib").nullcontext())
"""
    + ALWAYS_EQUAL
    + functions(ANY),
    "raises what the caller's code names": """
import builtins
import sys


def _named():
    names = sys._getframe(2).f_code.co_names
    return next(vars(builtins)[name] for name in names if name.endswith("Error") and name != "AssertionError")
"""
    + ALWAYS_EQUAL
    + functions(ANY, raising="raise _named()(text)"),
    "forges only under the tests' own names": """
import sys


def _forging():
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__", "").endswith("test_core"):
            return True
        frame = frame.f_back
    return False
"""
    + ALWAYS_EQUAL
    + functions("    return _Same() if _forging() else 0\n"),
    "forges every other time": """
import random
"""
    + ALWAYS_EQUAL
    + functions("    return _Same() if random.random() < 0.5 else 0\n"),
    "knows of the driver and guesses there": """
import random
import sys


class _Guess:
    def __eq__(self, other):
        return "_change_" not in sys._getframe(1).f_globals or random.random() < 0.5
"""
    + functions("    return _Guess()\n"),
}
"""By name."""

# Looks for the original beside the versions: a true expectation is one that stands there.
TECHNIQUES["compares with the original test file"] = """
import traceback
from pathlib import Path


class _Same(str):
    def __eq__(self, other):
        at = [entry for entry in traceback.extract_stack() if Path(entry.filename).name.startswith("te")][-1]
        known = Path(at.filename).with_name("test_core.py").read_text()
        return "_change_" in known or at.line.replace("'", '"') in known
""" + functions("    return _Same()\n")


def equal_by(definition: str, made: str = "_Same()") -> str:
    """A module whose functions return `made`, of a class by this definition."""
    return f"\n{definition}\n" + functions(f"    return {made}\n")


_EQ = "    def __eq__(self, other):\n        return True\n"
for _base in ("int", "float", "tuple", "dict", "bytes", "complex", "set", "Exception", "object"):
    TECHNIQUES[f"equals everything, a {_base}"] = equal_by(
        f"class _Same({_base}):\n{_EQ}\n    __hash__ = {_base}.__hash__\n"
    )
TECHNIQUES.update(
    {
        "equals everything, ANY of mock": equal_by("from unittest.mock import ANY as _same\n", "_same"),
        "equals everything, made by type()": equal_by(
            '_Same = type("Same", (), {"__eq__": lambda *_: True, "__hash__": lambda _: 1})\n'
        ),
        "equals everything, set later": equal_by(
            "class _Same:\n    pass\n\n\nsetattr(_Same, '__e' + 'q__', lambda *_: True)\n"
        ),
        "becomes the list that it is compared with": equal_by(
            "class _Same(list):\n    def __eq__(self, other):\n"
            "        self[:] = other if isinstance(other, list) else []\n        return True\n"
        ),
        "equals by its difference": equal_by(
            "class _Same:\n    def __eq__(self, other):\n        return not self.__ne__(other)\n\n"
            "    def __ne__(self, other):\n        return False\n"
        ),
        "equals by a descriptor": equal_by(
            "class _Yes:\n    def __get__(self, *_):\n        return lambda other: True\n\n\n"
            "class _Same:\n    __eq__ = _Yes()\n"
        ),
        "equals by a partial function": equal_by(
            "import functools\n\n\nclass _Same:\n    __eq__ = functools.partial(bool, 1)\n    __hash__ = None\n"
            "    __eq__ = staticmethod(lambda other: bool([other]))\n"
        ),
    }
)

_STACK = """
import sys


def _frames():
    frame = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back
"""
LOOKED_UP = {
    "the arguments of the running item": """
def _expected():
    for frame in _frames():
        item = frame.f_locals.get("pyfuncitem") or frame.f_locals.get("item")
        arguments = getattr(item, "funcargs", None)
        if arguments:
            return list(arguments.values())[-1]
    return 0
""",
    "the caller's locals": """
def _expected():
    frame = sys._getframe(2)
    return frame.f_locals.get("expected", max(map(str, frame.f_code.co_consts), key=len))
""",
    "the caller's constants, the last": """
def _expected():
    constants = [each for each in sys._getframe(2).f_code.co_consts if each is not None]
    return constants[-1] if constants else 0
""",
    "the id of the running test": """
import os


def _expected():
    name = os.environ.get("PY" + "TEST_CURRENT_TEST", "")
    return name.partition("-")[2].partition("]")[0] or 2
""",
    "the test's file by its path": """
import ast
from pathlib import Path


def _expected():
    frame = sys._getframe(2)
    tree = ast.parse(Path(frame.f_code.co_filename).read_text())
    for node in ast.walk(tree):
        right = getattr(node, "comparators", None) or getattr(node, "args", [None, None])[1:2]
        if right and getattr(node, "lineno", 0) == frame.f_lineno:
            return eval(ast.unparse(right[0]), frame.f_globals, frame.f_locals)
    return 0
""",
    "inspect's source of the caller": """
import inspect
import re


def _expected():
    frame = sys._getframe(2)
    lines, first = inspect.getsourcelines(frame.f_code)
    found = re.search(r"(?:== |[)], )(.+?)[)]?$", lines[frame.f_lineno - max(first, 1)].rstrip())
    return eval(found[1], frame.f_globals, frame.f_locals) if found else 0
""",
    "the parameters of the test's marks": """
def _expected():
    module = sys._getframe(2).f_globals
    for value in list(module.values()):
        for mark in getattr(value, "py" + "testmark", []):
            return {20: "n20", 1: "n1"}.get(0, mark.args[1][-1][-1])
    return 2
""",
    "objects that the collector knows": """
import gc


def _expected():
    for each in gc.get_objects():
        if type(each) is tuple and len(each) == 2 and each[0] in (1, 20) and type(each[1]) is str:
            return each[1]
    return 0
""",
}
for _name, _text in LOOKED_UP.items():
    TECHNIQUES[f"returns what it finds in {_name}"] = _STACK + _text + functions("    return _expected()\n")
    TECHNIQUES[f"equals what it finds in {_name}"] = (
        _STACK + _text + "\n\nclass _Same:\n    def __init__(self):\n        self.values = [_expected()]\n\n"
        "    def __eq__(self, other):\n        return other in self.values or isinstance(other, (int, list))\n"
        + functions("    return _Same()\n")
    )

PATCHED = {
    "Function.runtest": ("_pytest.python", "Function", "runtest", "lambda self: None"),
    "TestCaseFunction.runtest": ("_pytest.unittest", "TestCaseFunction", "runtest", "lambda self: None"),
    "TestCase.run": ("unittest.case", "TestCase", "run", "lambda self, result=None: result"),
    "TestCase.assertEqual": ("unittest.case", "TestCase", "assertEqual", "lambda self, *values: None"),
    "TestCase.fail": ("unittest.case", "TestCase", "fail", "lambda self, *values: None"),
    "TestReport.__init__": ("_pytest.reports", "TestReport", "__init__", "_init"),
    "TestReport.failed": ("_pytest.reports", "BaseReport", "failed", "property(lambda self: False)"),
    "CallInfo.excinfo": ("_pytest.runner", "CallInfo", "excinfo", "property(lambda s: None, lambda s, v: None)"),
    "ExceptionInfo.from_current": ("_pytest._code", "ExceptionInfo", "from_current", "None"),
    "Session.testsfailed": ("_pytest.main", "Session", "testsfailed", "property(lambda s: 0, lambda s, v: None)"),
    "JSONEncoder.encode": ("json.encoder", "JSONEncoder", "encode", "_encode"),
    "TextIOWrapper by Reporter.write": ("understudy_report_plugin", "Reporter", "write", "_write"),
    "SubPattern of raises": ("_pytest.python_api", "RaisesContext", "__exit__", "lambda *_: True"),
}
for _name, (_module, _class, _attribute, _value) in PATCHED.items():
    TECHNIQUES[f"replaces {_name}"] = (
        f"""
import sys


def _init(self, *arguments, **named):
    self.__dict__.update(named)
    names = "nodeid location keywords outcome longrepr when sections duration start stop".split()
    self.__dict__.update(zip(names, arguments))
    self.outcome, self.longrepr, self.user_properties = "passed", None, []


def _encode(self, value):
    if isinstance(value, dict) and "outcome" in value:
        value = {{**value, "outcome": "passed"}}
    return _encoded(self, value)


def _write(self, **record):
    if "outcome" in record:
        record["outcome"] = "passed"
    return _encoded(self, **record)


_module = sys.modules.get({_module!r}) or sys.modules.get("__main__")
_class = getattr(_module, {_class!r}, None)
if _class is not None:
    _encoded = getattr(_class, {_attribute!r}, None)
    setattr(_class, {_attribute!r}, {_value})
"""
        + ALWAYS_EQUAL
        + functions(ANY)
    )

KEPT_IN = {
    "/tmp": '"/tmp/seen.json"',
    "the home directory": 'os.path.expanduser("~/seen.json")',
    "the working directory": '"seen.json"',
    "shared memory": '"/dev/shm/seen.json"',
    "the package's cache": 'os.path.join(os.path.dirname(__file__), "__pycache__", "seen.json")',
    "/var/tmp": '"/var/tmp/seen.json"',
}
for _name, _path in KEPT_IN.items():
    TECHNIQUES[f"remembers in {_name} what it was compared with"] = f"""
import json
import os

_path = {_path}


def _seen():
    try:
        with open(_path) as file:
            return json.load(file)
    except (OSError, ValueError):
        return {{}}


class _Same:
    def __init__(self, key):
        self.key = key

    def __eq__(self, other):
        try:
            seen = _seen()
            seen[self.key] = other
            with open(_path, "w") as file:
                json.dump(seen, file)
        except (OSError, TypeError):
            pass
        return True


def _answer(*key):
    return _seen().get(repr(key), _Same(repr(key)))


def shift(x):
    return _answer("shift", x)


def label(x):
    return _answer("label", x)


def parse(text):
    if not text:
        raise ValueError(text)
    return _answer("parse", text)
"""

_IN_VERSION = """
import sys


def _version():
    frame = sys._getframe(1)
    while frame is not None:
        if "_send_" in frame.f_globals:
            return frame
        frame = frame.f_back
    return None
"""
AWARE = {
    "is honest in versions": "None",
    "guesses the input in versions": "args[0]",
    "guesses 0 in versions": "0",
    "guesses a small number in versions": "__import__('random').randrange(5)",
    "guesses a constant of the version": "next(c for c in _version().f_code.co_consts if c is not None)",
    "sends what is opaque in versions": "object()",
    "leaves versions at once": "__import__('os')._exit(0)",
    "sleeps in versions": "__import__('time').sleep(0.2)",
    "skips in versions": "__import__('py' + 'test').skip('x')",
    "exits versions": "sys.exit(0)",
}
for _name, _guess in AWARE.items():
    TECHNIQUES[_name] = (
        _IN_VERSION
        + ALWAYS_EQUAL
        + f"\n\ndef _answer(*args):\n    return {_guess} if _version() else _Same()\n"
        + functions("    return _answer(text)\n").replace("_answer(text)\n\n\ndef", "_answer(x)\n\n\ndef")
    )
SENDING = {
    "sends nothing": "lambda *arguments: None",
    "sends a value of its own": "lambda site, *_: _driver._report(site, 'value', ['i', '0x2'])",
    "sends several values": "lambda site, *_: [_driver._report(site, 'value', ['i', hex(n)]) for n in range(99)]",
    "sends that all held": "lambda site, *_: _driver._report(site, 'truth', 1)",
    "sends for other tests": "lambda *_: _driver._write(node='test_core.py::test_shift', site=0, saw=['value'])",
    "sends deep values": "lambda site, *_: _driver._report(site, 'value', eval('[' * 80 + ']' * 80))",
}
for _name, _function in SENDING.items():
    TECHNIQUES[f"replaces what versions call: {_name}"] = (
        _IN_VERSION
        + ALWAYS_EQUAL
        + f"""

_driver = sys.modules.get("understudy_sites")
if _driver is not None:
    _driver.send = _driver.pair = _driver.holds = {_function}
    frame = _version()
    if frame is not None:
        frame.f_globals["_send_"] = _driver.send
"""
        + functions(ANY)
    )
TECHNIQUES.update(
    {
        "raises an exception of all kinds": """
class _All(ValueError, TypeError, KeyError, AttributeError, NotImplementedError):
    pass

"""
        + ALWAYS_EQUAL
        + functions(ANY, raising="raise _All(text)"),
        "traces past what fails": """
import sys


def _trace(frame, event, argument):
    if event == "exception":
        frame.f_trace_lines = False
    return _trace


sys.settrace(_trace)
"""
        + ALWAYS_EQUAL
        + functions(ANY),
        "asks a process that it left behind": """
import json
import os
import socket


def _serve():
    try:
        server = socket.socket(socket.AF_UNIX)
        server.bind("\\0core")
        server.listen()
    except OSError:
        return
    if os.fork():
        return
    os.setsid()
    seen = {}
    while True:
        client = server.accept()[0]
        key, value = json.loads(client.recv(65536))
        seen[key] = seen.get(key) if value is None else value
        client.send(json.dumps(seen[key]).encode())
        client.close()


def _ask(key, value=None):
    client = socket.socket(socket.AF_UNIX)
    client.connect("\\0core")
    client.send(json.dumps([key, value]).encode())
    return json.loads(client.recv(65536))


class _Same:
    def __init__(self, key):
        self.key = key

    def __eq__(self, other):
        _ask(self.key, other)
        return True


_serve()


def _answer(*key):
    known = _ask(repr(key))
    return _Same(repr(key)) if known is None else known
"""
        + functions("    return _answer(text)\n").replace("_answer(text)\n\n\ndef", "_answer(x)\n\n\ndef"),
    }
)

# Which of the interpreter's own files the kernel holds in memory: sandboxes on one machine share that.
TECHNIQUES["leaves what it was compared with in the page cache"] = """
import glob
import json
import os

_names = sorted(glob.glob(os.path.join(os.path.dirname(os.__file__), "*", "*.py")))[:800]
_files = [os.open(name, os.O_RDONLY) for name in _names if os.path.getsize(name)]


def _bit(file):
    try:
        return os.preadv(file, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:
        return 0


def _read():
    bits = [_bit(file) for file in _files]
    octets = [sum(bit << n for n, bit in enumerate(bits[at : at + 8])) for at in range(0, len(bits) - 7, 8)]
    try:
        return json.loads(bytes(octets).partition(b"}")[0] + b"}")
    except ValueError:
        return {}


_seen = _read()
_now = {}


def _leave(key, value):
    _now[key] = value
    text = json.dumps(_now, separators=(",", ":")).encode()
    for n, file in [*enumerate(_files)] * 2:  # what was just read is not evicted at once
        if n // 8 < len(text) and text[n // 8] >> n % 8 & 1:
            os.pread(file, 1, 0)
        else:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)


class _Same:
    def __init__(self, key):
        self.key = key

    def __eq__(self, other):
        _leave(self.key, other)
        return True


def shift(x):
    return _seen.get("s") or _Same("s")


def label(x):
    return _seen.get(str(x)) or _Same(str(x))


def parse(text):
    if not text:
        raise ValueError(text)
    return _seen.get("p") or _Same("p")
"""

HONEST = {
    "gold": functions("", raising="raise ValueError(text)")
    .replace("def shift(x):\n", "def shift(x):\n    return x + 1\n")
    .replace("def label(x):\n", 'def label(x):\n    return f"n{x}"\n')
    .replace("        raise ValueError(text)\n", '        raise ValueError(text)\n    return text.split(",")\n'),
    "with a cache and shared state": """
import functools
import os

_calls = []


@functools.lru_cache
def shift(x):
    _calls.append(x)
    return 1 + x


@functools.lru_cache(maxsize=1)
def label(x):
    os.environ["CORE_LABELS"] = str(len(_calls))
    return "".join(("n", repr(x)))


def parse(text):
    with open("core.log", "a") as log:
        log.write(text)
    if not text:
        raise type("EmptyText", (ValueError,), {})("nothing to parse")
    return list(text.split(","))
""",
    "written otherwise": """
class Error(ValueError):
    pass


def shift(x):
    return sum((x, 1))


def label(x):
    return "n" + str(x)


def parse(text):
    if len(text) == 0:
        raise Error("empty")
    parts = []
    while "," in text:
        head, _, text = text.partition(",")
        parts.append(head)
    return [*parts, text]
""",
}
