"""Weights reach a server by its own control endpoints, and no token is ever of two minds."""

from __future__ import annotations

import asyncio
import json
import struct
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from understudy.errors import BackendError, ConfigError
from understudy.train.publish.base import PathMapping, Publisher
from understudy.train.publish.choice import make_publisher
from understudy.train.publish.vllm_transfer import SyncClient, TransferPublisher, WeightsDirectory, vllm_engine

from fakes.control import FakeSGLangControl, FakeVLLMControl, Served


def full(directory: Path, contents: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_text(contents)
    return directory


def adapter(directory: Path, contents: str) -> Path:
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text("{}")
    (directory / "adapter_model.safetensors").write_text(contents)
    return directory


async def publishes(publisher: Publisher, server: Served, tmp_path: Path) -> None:
    """Two versions, one after the other, and the second again."""
    assert await publisher.current() is None
    assert server.sample() == ("first", "default")
    for step in (1, 2, 2):
        weights = tmp_path / f"step-{step}"
        if not weights.exists():
            full(weights, f"weights {step}")
        await publisher.publish(weights, f"step-000{step}")
        assert server.sample() == (f"weights {step}", f"step-000{step}")
        assert await publisher.current() == f"step-000{step}"


@pytest.mark.parametrize("kind", ["vllm", "embedded"])
async def test_vllm_loads_whole_weights_between_a_pause_and_a_resume(kind: str, tmp_path: Path):
    async with FakeVLLMControl() as server:
        publisher = make_publisher(kind, server.url + "/v1/")
        await publishes(publisher, server, tmp_path)
        assert server.called[1:6] == [
            "/pause",
            "/collective_rpc",
            "/reset_prefix_cache",
            "/update_weight_version",
            "/resume",
        ]
        assert server.mode == "keep" and not publisher.capabilities.drained


async def test_a_busy_prefix_cache_is_reset_again_until_it_succeeds(tmp_path: Path):
    async with FakeVLLMControl() as server:
        server.sample()
        server.busy_resets = 2
        await make_publisher("vllm", server.url).publish(full(tmp_path / "w", "new"), "v1")
        assert server.called.count("/reset_prefix_cache") == 3 and server.sample() == ("new", "v1")


async def test_vllm_sleeps_between_release_and_publish(tmp_path: Path):
    async with FakeVLLMControl() as server:
        publisher = make_publisher("vllm", server.url, method="sleep")
        assert publisher.capabilities.releases and publisher.capabilities.drained
        await publisher.release()
        await publisher.release()
        assert server.asleep == {"weights", "kv_cache"} and server.called.count("/sleep") == 1
        await publisher.publish(full(tmp_path / "w", "new"), "v1")
        assert server.sample() == ("new", "v1")
        assert server.called.index("/update_weight_version") < len(server.called) - 1, "before it samples again"


async def test_a_paused_server_is_put_to_sleep_before_it_is_woken(tmp_path: Path):
    async with FakeVLLMControl() as server:
        server.paused = True
        await make_publisher("vllm", server.url, method="sleep").publish(full(tmp_path / "w", "new"), "v1")
        assert server.sample() == ("new", "v1") and "/sleep" in server.called


@pytest.mark.parametrize(("kind", "make"), [("vllm", FakeVLLMControl), ("sglang", FakeSGLangControl)])
async def test_a_published_adapter_replaces_the_previous_one(kind: str, make: type[Any], tmp_path: Path):
    async with make() as server:
        publisher = make_publisher(kind, server.url, method="lora", adapter="mine")
        requested_model = {"vllm": "mine", "sglang": "lora:mine"}[kind]
        assert (publisher.capabilities.kind, publisher.capabilities.model) == ("lora", requested_model)
        for step in (1, 2):
            await publisher.publish(adapter(tmp_path / f"a{step}", f"adapter {step}"), f"v{step}")
            assert server.adapters == {"mine": f"adapter {step}"}
            assert await publisher.current() == f"v{step}"
        assert not server.paused and server.weights == "first"


async def test_sglang_loads_whole_weights_between_pause_and_continue(tmp_path: Path):
    async with FakeSGLangControl() as server:
        await publishes(make_publisher("sglang", server.url), server, tmp_path)
        assert server.called[1:4] == ["/pause_generation", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.parametrize(("kind", "make"), [("vllm", FakeVLLMControl), ("sglang", FakeSGLangControl)])
async def test_after_a_failed_load_the_server_stays_paused_until_one_succeeds(
    kind: str, make: type[Any], tmp_path: Path
):
    async with make() as server:
        publisher = make_publisher(kind, server.url, seen_as=PathMapping(tmp_path / "here", tmp_path / "there"))
        weights = full(tmp_path / "here" / "w", "new")
        with pytest.raises(BackendError, match="stays paused") as failed:
            await publisher.publish(weights, "v1")
        assert str(tmp_path / "there" / "w") in str(failed.value)
        assert server.paused and await publisher.current() is None
        full(tmp_path / "there" / "w", "seen there")
        await publisher.publish(weights, "v1")
        assert server.sample() == ("seen there", "v1")


async def test_a_failed_adapter_leaves_the_old_one_serving(tmp_path: Path):
    async with FakeVLLMControl() as server:
        publisher = make_publisher("vllm", server.url, method="lora")
        await publisher.publish(adapter(tmp_path / "a", "old"), "v1")
        server.fails["/v1/load_lora_adapter"] = web.json_response({"error": {"message": "rank"}}, status=500)
        with pytest.raises(BackendError, match="max-lora-rank"):
            await publisher.publish(adapter(tmp_path / "b", "new"), "v2")
        assert not server.paused and server.adapters == {"policy": "old"} and server.version == "v1"
        away = make_publisher("vllm", server.url, method="lora", seen_as=PathMapping(tmp_path, Path("/nowhere")))
        with pytest.raises(BackendError, match="check that it has that path"):
            await away.publish(tmp_path / "b", "v2")
        server.fails["/v1/load_lora_adapter"] = web.json_response({"detail": "Not Found"}, status=404)
        with pytest.raises(ConfigError, match="--enable-lora"):
            await publisher.publish(tmp_path / "b", "v2")
        assert not server.paused and server.adapters == {"policy": "old"}


async def test_weights_are_published_to_all_servers_and_a_failure_names_its_server(tmp_path: Path):
    async with FakeVLLMControl() as one, FakeVLLMControl() as other:
        publisher = make_publisher("vllm", [one.url, other.url])
        other.fails["/collective_rpc"] = web.Response(status=500, text="no")
        weights = full(tmp_path / "w", "new")
        with pytest.raises(BackendError, match=other.url):
            await publisher.publish(weights, "v1")
        assert one.sample() == ("new", "v1") and await publisher.current() is None
        await publisher.publish(weights, "v1")
        assert other.sample() == ("new", "v1") and await publisher.current() == "v1"


async def test_missing_endpoints_are_a_config_error_and_failures_a_backend_error(tmp_path: Path):
    weights = full(tmp_path / "w", "new")
    async with FakeSGLangControl() as other:
        with pytest.raises(ConfigError, match="VLLM_SERVER_DEV_MODE=1"):
            await make_publisher("vllm", other.url).publish(weights, "v1")
        with pytest.raises(ConfigError, match="--weights"):
            await make_publisher("embedded", other.url).publish(weights, "v1")
    with pytest.raises(BackendError, match="start the server"):
        await make_publisher("vllm", "http://127.0.0.1:9").publish(weights, "v1")
    async with FakeVLLMControl() as server:
        server.fails["/pause"] = ConnectionResetError()
        with pytest.raises(BackendError, match="connection broke during the response"):
            await make_publisher("vllm", server.url).publish(weights, "v1")
        server.fails["/weight_info"] = web.Response(text="<html>")
        with pytest.raises(BackendError, match="invalid response"):
            await make_publisher("vllm", server.url).current()


async def test_the_api_key_is_sent_and_hidden_in_errors(tmp_path: Path):
    async with FakeVLLMControl() as server:
        publisher = make_publisher("vllm", server.url, api_key="secret-key")
        server.fails["/pause"] = web.Response(status=401, text="not secret-key")
        with pytest.raises(BackendError) as failed:
            await publisher.publish(full(tmp_path / "w", "new"), "v1")
        assert "secret-key" not in str(failed.value) and failed.value.status == 401
        assert server.keys == ["Bearer secret-key"]
        user = make_publisher("vllm", server.url.replace("//", "//me:pass-word@"))
        server.fails["/weight_info"] = web.Response(status=403)
        with pytest.raises(BackendError) as failed:
            await user.current()
        assert "pass-word" not in str(failed.value) and str(server.keys[-1]).startswith("Basic ")


async def test_a_redirect_is_not_followed(tmp_path: Path):
    async with FakeVLLMControl() as server:
        server.fails["/pause"] = web.Response(status=307, headers={"location": "http://127.0.0.1:9/"})
        with pytest.raises(BackendError, match="status 307"):
            await make_publisher("vllm", server.url).publish(full(tmp_path / "w", "new"), "v1")


async def test_an_invalid_weights_directory_is_refused_before_any_request(tmp_path: Path):
    async with FakeVLLMControl() as server:
        whole, lora = make_publisher("vllm", server.url), make_publisher("vllm", server.url, method="lora")
        with pytest.raises(ConfigError, match="or publish its adapter with --publish lora"):
            await whole.publish(adapter(tmp_path / "a", "x"), "v1")
        with pytest.raises(ConfigError, match="or publish its model with --publish disk"):
            await lora.publish(full(tmp_path / "f", "x"), "v1")
        (tmp_path / "f" / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match="not saved completely"):
            await whole.publish(tmp_path / "f", "v1")
        with pytest.raises(ConfigError, match="has no config"):
            await whole.publish(tmp_path / "nowhere", "v1")
        elsewhere = make_publisher("vllm", server.url, seen_as=PathMapping(tmp_path / "x", Path("/mnt")))
        with pytest.raises(ConfigError, match="not below"):
            await elsewhere.publish(full(tmp_path / "g", "x"), "v1")
        assert server.orders == []


@pytest.mark.parametrize(
    ("kind", "urls", "method", "message"),
    [
        ("vllm", [], "disk", "--base-url"),
        ("tgi", "http://a", "disk", "sglang by disk, .*vllm by transfer"),
        ("sglang", "http://a", "sleep", "--publish sleep: .*expected one of sglang by disk"),
        ("embedded", "http://a", "?", "expected one of embedded by disk"),
    ],
)
def test_an_unsupported_publish_method_lists_the_supported_ones(kind: str, urls: Any, method: str, message: str):
    with pytest.raises(ConfigError, match=message):
        make_publisher(kind, urls, method=method)


@pytest.mark.parametrize("url", ["", "127.0.0.1:80", "ftp://a", "http://[::"])
def test_an_invalid_server_address_is_refused(url: str):
    with pytest.raises(ConfigError, match="invalid server address"):
        make_publisher("vllm", url)


@pytest.mark.parametrize("url", ["ftp://me:hunter2@host:80", "http://me:hunter2@[::", "me:hunter2@host:80"])
def test_an_invalid_server_address_is_shown_without_its_password(url: str):
    with pytest.raises(ConfigError, match="invalid server address") as raised:
        make_publisher("vllm", url)
    assert "hunter2" not in str(raised.value)


# --- transfer ----------------------------------------------------------------------------------------------


def tensors(directory: Path, **values: bytes) -> Path:
    """A model directory whose tensors are bytes, written without any library."""
    full(directory, "")
    header, data = {}, b""
    for name, value in values.items():
        header[name] = {"dtype": "U8", "shape": [len(value)], "data_offsets": [len(data), len(data) + len(value)]}
        data += value
    encoded_header = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(encoded_header)) + encoded_header + data)
    return directory


class Sender:
    """What vLLM's sending end does, through a queue instead of NCCL: its orders, from its threads."""

    def __init__(self, client: SyncClient, source: WeightsDirectory, server: FakeVLLMControl, loop: Any) -> None:
        self.client, self.source, self.server, self.loop = client, source, server, loop
        self.left = False

    def send_weights(self) -> None:
        from concurrent.futures import ThreadPoolExecutor

        names = [name for name, _, _ in self.source.shapes()]
        self.client.start_weight_update()
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(self.client.update_weights, {"names": names})
            for _, tensor in self.source.tensors():
                text = bytes(tensor.tolist()).decode()
                asyncio.run_coroutine_threadsafe(self.server.received.put(text), self.loop).result()
            waiting.result()
        self.client.finish_weight_update()

    def shutdown(self) -> None:
        self.left = True


async def test_a_transfer_goes_through_vllms_four_phases(tmp_path: Path):
    pytest.importorskip("safetensors.torch")
    senders: list[Sender] = []
    async with FakeVLLMControl() as server:
        loop = asyncio.get_running_loop()

        def connect(client: SyncClient, source: WeightsDirectory, address: str, workers: int) -> Sender:
            assert (address, workers) == ("127.0.0.1", 2)
            client.init_weight_transfer_engine({"master_address": address})
            source._device = "cpu"
            senders.append(Sender(client, source, server, loop))
            return senders[-1]

        publisher = TransferPublisher(server.url, connect=connect)
        await publisher.publish(tensors(tmp_path / "one", b=b"second ", a=b"first "), "v1")
        assert server.sample() == ("first second ", "v1")
        await publisher.publish(tensors(tmp_path / "two", a=b"other "), "v2")
        assert server.sample() == ("other ", "v2") and len(senders) == 1
        server.fails["/start_weight_update"] = web.Response(status=500, text="lost")
        with pytest.raises(BackendError, match="lost"):
            await publisher.publish(tmp_path / "one", "v3")
        assert server.paused and senders[0].left
        await publisher.publish(tmp_path / "one", "v3")
        assert server.sample() == ("first second ", "v3") and len(senders) == 2


def test_a_transfer_without_vllm_or_a_gpu_says_what_is_missing(tmp_path: Path):
    pytest.importorskip("torch")
    client = TransferPublisher("http://127.0.0.1:9")._client
    with pytest.raises(ConfigError, match="--publish disk"):
        vllm_engine(client, WeightsDirectory(tmp_path), "127.0.0.1", 1)
