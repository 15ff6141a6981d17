"""The processes of bench/gateway.py: the model server, and what stands between it and the load client."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec
from msgspec import Struct

from gateway_parts.load import Seen, Spec
from gateway_parts.traffic import MODEL
from understudy.config import cache_dir
from understudy.gateway.serve.admin import GatewayAddress
from understudy.gateway.serve.stored_keys import issue
from understudy.store import Store

UNDERSTUDY = Path(sys.executable).with_name("understudy")
LITELLM = "litellm[proxy]>=1.100,<1.101"
START_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Stack(Struct):
    """Something that answers at `url` for anyone with one of the keys; `pid` is None where nothing is between."""

    url: str
    keys: list[str]
    pid: int | None = None

    def cpu_s(self) -> float:
        """CPU seconds that the process and all its children have used, user and system."""
        return sum(_cpu_s(pid) for pid in _tree(self.pid)) if self.pid else 0.0

    def peak_mb(self) -> float:
        """The most memory that any one of the processes ever held, in MB."""
        return max((_peak_mb(pid) for pid in _tree(self.pid)), default=0.0) if self.pid else 0.0


def _tree(pid: int) -> list[int]:
    tree = [pid]
    for task in Path(f"/proc/{pid}/task").iterdir():
        for child in (task / "children").read_text().split():
            tree += _tree(int(child))
    return tree


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS


def _peak_mb(pid: int) -> float:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(lines["VmHWM"].split()[0]) / 1000


@contextmanager
def _process(
    command: Sequence[str | Path], log: Path, *, speaks: bool = False, env: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    """A running process that ends with the context; of one that `speaks`, stdout can be read."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE if speaks else output,
            stderr=output,
            env=env,
        )
    try:
        yield process
    finally:
        if process.stdin is not None:
            process.stdin.close()
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _until(true: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_S
    while not true():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"bench: {process.args!r} did not start: {log.read_text()[-2000:]}")
        time.sleep(0.05)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=1):
            return True
    except OSError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


# --- the two ends --------------------------------------------------------------------------------------


@contextmanager
def upstream(directory: Path) -> Generator[str]:
    """The model server; its address."""
    command = [sys.executable, "-m", "gateway_parts.upstream"]
    with _process(command, directory / "upstream.log", speaks=True, env=_environment()) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}"


def pace(url: str, seconds: float) -> None:
    """From now on an answer lasts so long; 0 is as fast as it goes."""
    data = json.dumps({"seconds": seconds}).encode()
    with urllib.request.urlopen(urllib.request.Request(f"{url}/pace", data)):
        pass


def load(spec: Spec) -> Seen:
    """Have the load client do what is asked."""
    command = [sys.executable, "-m", "gateway_parts.load"]
    done = subprocess.run(
        command, input=msgspec.json.encode(spec), stdout=subprocess.PIPE, check=True, env=_environment()
    )
    return msgspec.json.decode(done.stdout, type=Seen)


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}


# --- what stands between -------------------------------------------------------------------------------


@contextmanager
def direct(url: str, path: str) -> Generator[Stack]:
    """Nothing between."""
    yield Stack(url + path, ["none"])


@contextmanager
def ours(
    url: str, directory: Path, *, backend: str = "vllm", streaming: bool = False, agents: int = 64
) -> Generator[Stack]:
    """`understudy gateway serve` with one worker and a new store in `directory`."""
    directory.mkdir()
    with Store.open(directory) as store:
        keys = asyncio.run(_issue(store, agents))
    base = url if backend == "anthropic" else f"{url}/v1"
    mode = "--streaming" if streaming else "--atomic"
    command = [UNDERSTUDY, "gateway", "serve", backend, "--base-url", base, "--backend-model-high", MODEL]
    command += ["-d", directory, "--port", "0", mode]
    log = directory / "log"
    with _process(command, log) as process:
        announced = directory / "gateway.json"
        _until(announced.exists, process, log)
        address = msgspec.json.decode(announced.read_bytes(), type=GatewayAddress)
        yield Stack(f"{address.url}/v1/messages", keys, process.pid)


async def _issue(store: Store, agents: int) -> list[str]:
    return [await issue(store, f"agent{number:05d}") for number in range(agents)]


_NGINX = """
worker_processes 1;
pid {directory}/pid;
error_log {directory}/error.log;
daemon off;
{user}
events {{ worker_connections 4096; }}
http {{
    access_log off;
    client_body_temp_path {directory};
    proxy_temp_path {directory};
    fastcgi_temp_path {directory};
    uwsgi_temp_path {directory};
    scgi_temp_path {directory};
    client_body_buffer_size 1m;
    client_max_body_size 64m;
    keepalive_requests 1000000;
    upstream model {{ server {server}; keepalive 256; }}
    server {{
        listen 127.0.0.1:{port};
        location / {{
            proxy_pass http://model;
            proxy_http_version 1.1;
            proxy_set_header connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


def has_nginx() -> bool:
    """Whether nginx is installed."""
    return _nginx() is not None


def _nginx() -> str | None:
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")


@contextmanager
def nginx(url: str, directory: Path) -> Generator[Stack]:
    """nginx, passing everything on without buffering: what no gateway goes below."""
    directory.mkdir()
    port, log = _free_port(), directory / "log"
    user = "user root;" if os.geteuid() == 0 else ""
    text = _NGINX.format(directory=directory, server=url.removeprefix("http://"), port=port, user=user)
    (directory / "nginx.conf").write_text(text)
    command = [_nginx() or "", "-p", directory, "-c", directory / "nginx.conf"]
    with _process(command, log) as process:
        _until(lambda: _answers(f"http://127.0.0.1:{port}/v1/models"), process, log)
        yield Stack(f"http://127.0.0.1:{port}/v1/messages", ["none"], process.pid)


# --- peers ---------------------------------------------------------------------------------------------


def environment(name: str, requirement: str) -> Path | str:
    """A virtual environment with a peer in it, made in the cache when it is not there; or why there is none."""
    directory = cache_dir() / "bench" / name
    if (directory / "installed").exists():
        return directory
    python = directory / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    done = subprocess.run(
        [python, "-m", "pip", "install", "-q", requirement], capture_output=True, text=True, check=False
    )
    if done.returncode:
        shutil.rmtree(directory)
        return done.stderr.strip().splitlines()[-1]
    (directory / "installed").touch()
    return directory


_OFFLINE: Mapping[str, str] = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}


@contextmanager
def litellm(url: str, directory: Path, environment: Path) -> Generator[Stack]:
    """LiteLLM's proxy with one worker, from its own virtual environment, translating as we do."""
    directory.mkdir()
    port, log = _free_port(), directory / "log"
    parameters = {"model": f"hosted_vllm/{MODEL}", "api_base": f"{url}/v1", "api_key": "none"}
    # JSON is YAML.
    config = {"model_list": [{"model_name": MODEL, "litellm_params": parameters}]}
    (directory / "config.yaml").write_text(json.dumps(config))
    command = [environment / "bin" / "litellm", "--config", directory / "config.yaml", "--host", "127.0.0.1"]
    command += ["--port", str(port), "--num_workers", "1"]
    path = f"{environment / 'bin'}:{os.environ.get('PATH', '')}"
    with _process(command, log, env=os.environ | _OFFLINE | {"PATH": path}) as process:
        _until(lambda: _answers(f"http://127.0.0.1:{port}/health/liveliness"), process, log)
        yield Stack(f"http://127.0.0.1:{port}/v1/messages", ["none"], process.pid)
