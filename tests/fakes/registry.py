"""An image registry on loopback, as far as an engine's pull needs one: one image, and refusals as told."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"


class Registry:
    """Holds `example/tree:1` with the given files; the first `limited` requests for a manifest get a 429."""

    def __init__(self, files: dict[str, bytes], *, limited: int = 0) -> None:
        self.limited = limited
        self.requests: list[str] = []
        layer, config = _layer(files)
        self._blobs = {_digest(blob): blob for blob in (gzip.compress(layer, mtime=0), config)}
        compressed = next(iter(self._blobs))
        self._manifest = json.dumps(
            {
                "schemaVersion": 2,
                "mediaType": _MANIFEST,
                "config": {
                    "mediaType": "application/vnd.docker.container.image.v1+json",
                    "size": len(config),
                    "digest": _digest(config),
                },
                "layers": [
                    {
                        "mediaType": "application/vnd.docker.image.rootfs.diff.tar.gzip",
                        "size": len(self._blobs[compressed]),
                        "digest": compressed,
                    }
                ],
            }
        ).encode()
        registry = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                registry._answer(self)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})

    @property
    def image(self) -> str:
        """The name of the image in it."""
        return f"127.0.0.1:{self._server.server_address[1]}/example/tree:1"

    def __enter__(self) -> Registry:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        status, kind, body = self._find(request.path)
        request.send_response(status)
        request.send_header("Content-Type", kind)
        request.send_header("Content-Length", str(len(body)))
        request.send_header("Docker-Distribution-Api-Version", "registry/2.0")
        if kind == _MANIFEST:
            request.send_header("Docker-Content-Digest", _digest(body))
        request.end_headers()
        if request.command == "GET":
            request.wfile.write(body)

    def _find(self, path: str) -> tuple[int, str, bytes]:
        if path == "/v2/":
            return 200, "application/json", b"{}"
        if "/manifests/" in path:
            self.requests.append(path)
            if self.limited > 0:
                self.limited -= 1
                return 429, "application/json", _error("TOOMANYREQUESTS", "You have reached your pull rate limit")
            if path.startswith("/v2/example/tree/"):
                return 200, _MANIFEST, self._manifest
            return 404, "application/json", _error("MANIFEST_UNKNOWN", "manifest unknown")
        digest = path.rpartition("/")[2]
        if digest in self._blobs:
            return 200, "application/octet-stream", self._blobs[digest]
        return 404, "application/json", _error("BLOB_UNKNOWN", "blob unknown")


def _error(code: str, message: str) -> bytes:
    return json.dumps({"errors": [{"code": code, "message": message}]}).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _layer(files: dict[str, bytes]) -> tuple[bytes, bytes]:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for name, data in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    layer = output.getvalue()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Cmd": ["/bin/true"]},
        "rootfs": {"type": "layers", "diff_ids": [_digest(layer)]},
    }
    return layer, json.dumps(config).encode()
