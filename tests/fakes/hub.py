"""The Hugging Face Hub on loopback, as far as its library needs it to upload a dataset and to download a model."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "c" * 40
_LARGE = 2_000
"""Files of more bytes go by LFS, as on the hub those of more than 10 MB do."""


class Hub:
    """Holds datasets: their files, whether they are private, and how often each was committed to.

    `models` are repositories that anybody may download: their files. `wrong_sha256` is what is told of a file in
    the place of its true hash. Who has not `token` is refused a dataset. While `broken` is true, what goes by LFS
    is stored, and the commit after it
    fails.
    """

    def __init__(self, token: str = "hf_good") -> None:
        self.token = token
        self.broken = False
        self.private: dict[str, bool] = {}
        self.files: dict[str, dict[str, bytes]] = {}
        self.commits: list[str] = []
        self.stored: dict[str, bytes] = {}
        self.sent: list[str] = []
        self.requests: list[str] = []
        self.models: dict[str, dict[str, bytes]] = {}
        self.wrong_sha256: dict[str, str] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _do(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Transfer-Encoding") == "chunked":
                    body = b""
                    while size := int(self.rfile.readline(), 16):
                        body += self.rfile.read(size)
                        self.rfile.readline()
                    self.rfile.readline()
                if (file := hub._model_file(self.path)) is not None:
                    self._send_file(file)
                    return
                status, answer = hub._answer(self, body)
                data = json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 401:
                    self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
                self.end_headers()
                self.wfile.write(data)

            def _send_file(self, file: bytes) -> None:
                hub.requests.append(f"{self.command} {self.path}")
                self.send_response(200)
                self.send_header("Content-Length", str(len(file)))
                self.send_header("ETag", f'"{hashlib.sha256(file).hexdigest()}"')
                self.send_header("X-Repo-Commit", COMMIT)
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(file)

            do_GET = do_HEAD = do_POST = do_PUT = _do

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Hub:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def _model_file(self, path: str) -> bytes | None:
        match = re.fullmatch(r"/([^/]+/[^/]+)/resolve/[^/]+/(.+)", path.partition("?")[0])
        return self.models.get(match[1], {}).get(match[2]) if match else None

    def _model(self, name: str) -> tuple[int, Any]:
        if name not in self.models:
            return 404, {"error": "Repository not found"}
        siblings: list[dict[str, Any]] = []
        for file, data in self.models[name].items():
            about: dict[str, Any] = {"rfilename": file, "size": len(data), "blobId": "0" * 40}
            if len(data) > _LARGE:
                sha256 = self.wrong_sha256.get(file, hashlib.sha256(data).hexdigest())
                about["lfs"] = {"sha256": sha256, "size": len(data), "pointerSize": 130}
            siblings.append(about)
        return 200, {"id": name, "sha": COMMIT, "private": False, "tags": ["license:mit"], "siblings": siblings}

    def _answer(self, request: BaseHTTPRequestHandler, body: bytes) -> tuple[int, Any]:
        path = request.path.partition("?")[0]
        self.requests.append(f"{request.command} {path}")
        if path.startswith("/lfs/"):
            self.stored[path.removeprefix("/lfs/")] = body
            self.sent.append(path.removeprefix("/lfs/"))
            return 200, {}
        if match := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/revision/[^/]+)?", path):
            return self._model(match[1])
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return 401, {"error": "Invalid username or password."}
        if path == "/api/repos/create":
            fields = json.loads(body)
            name = f"{fields.get('organization') or 'ann'}/{fields['name']}"
            there = name in self.private
            if not there:
                private = fields.get("private") or fields.get("visibility") == "private"
                self.private[name], self.files[name] = bool(private), {}
            created = {"url": f"{self.url}/datasets/{name}", "id": name, "name": name}
            return (409 if there else 200), {**created, **({"error": "You already created this"} if there else {})}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path == "/api/whoami-v2":
            return 200, {"name": "ann", "type": "user", "orgs": []}
        if match := re.fullmatch(r"/api/datasets/([^/]+/[^/]+)(/.*)?", path):
            return self._dataset(match[1], match[2] or "", body)
        if match := re.fullmatch(r"/datasets/([^/]+/[^/]+)\.git/info/lfs/objects/batch", path):
            objects = [self._object(each) for each in json.loads(body)["objects"]]
            return 200, {"transfer": "basic", "objects": objects}
        return 404, {"error": f"not found: {path}"}

    def _object(self, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["oid"] in self.stored:
            return entry
        return {**entry, "actions": {"upload": {"href": f"{self.url}/lfs/{entry['oid']}"}}}

    def _dataset(self, name: str, rest: str, body: bytes) -> tuple[int, Any]:
        if name not in self.private:
            return 404, {"error": "Repository not found"}
        if rest.startswith("/preupload/"):
            files = json.loads(body)["files"]
            return 200, {
                "files": [
                    {
                        "path": each["path"],
                        "uploadMode": "lfs" if each["size"] > _LARGE else "regular",
                        "shouldIgnore": False,
                    }
                    for each in files
                ]
            }
        if rest.startswith("/commit/"):
            if self.broken:
                return 500, {"error": "Internal error"}
            for line in map(json.loads, body.splitlines()):
                value = line["value"]
                if line["key"] == "file":
                    self.files[name][value["path"]] = base64.b64decode(value["content"])
                elif line["key"] == "lfsFile":
                    self.files[name][value["path"]] = self.stored[value["oid"]]
            self.commits.append(name)
            oid = f"{len(self.commits):040x}"
            return 200, {
                "success": True,
                "commitOid": oid,
                "commitUrl": f"{self.url}/datasets/{name}/commit/{oid}",
            }
        info = {"id": name, "private": self.private[name], "sha": "0" * 40, "tags": [], "siblings": []}
        return 200, {**info, "downloads": 0, "likes": 0, "gated": False, "disabled": False}
