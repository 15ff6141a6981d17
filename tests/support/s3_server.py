"""An S3 server of the tests' own: moto's, as a process. What it holds is lost when it ends."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import uuid
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from understudy.store import Store
from understudy.store.address import StoreLocation

_START_S = 60.0
_SERVER = """\
import sys
from moto.core import DEFAULT_ACCOUNT_ID
from moto.s3.models import s3_backends
from moto.server import main
if sys.argv[1]:
    s3_backends[DEFAULT_ACCOUNT_ID]["aws"].create_bucket(sys.argv[1], "us-east-1")
main(sys.argv[2:])
"""


@dataclass
class S3Server:
    """The server, at a port that stays the same when it is started again."""

    directory: Path
    port: int
    _process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def credentials(self) -> dict[str, str]:
        """Variables with which boto3 reaches the server, and reads no files of this machine's user."""
        return {
            "AWS_ACCESS_KEY_ID": "tests-key-id",
            "AWS_SECRET_ACCESS_KEY": "not-a-secret-81f0",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "AWS_CONFIG_FILE": str(self.directory / "none"),
            "AWS_SHARED_CREDENTIALS_FILE": str(self.directory / "none"),
        }

    def start(self, bucket: str = "") -> None:
        """Start the server, and wait until it answers. It has this bucket from its first answer on."""
        command = [sys.executable, "-c", _SERVER, bucket, "--host", "127.0.0.1", "--port", str(self.port)]
        with (self.directory / "log").open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, cwd=self.directory, env={**os.environ, **self.credentials()}
            )
        end = time.monotonic() + _START_S
        while True:
            assert self._process.poll() is None, (self.directory / "log").read_text()
            with suppress(OSError):
                self.ask("GET", "/moto-api/data.json")
                return
            assert time.monotonic() < end, (self.directory / "log").read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        """End the server at once."""
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
            self._process = None

    def ask(self, method: str, path: str, data: bytes | None = None) -> bytes:
        """Send a request to the server's own interface."""
        headers = {"Content-Type": "text/plain"}
        request = urllib.request.Request(self.url + path, data=data, method=method, headers=headers)
        with urllib.request.urlopen(request, timeout=10) as response:
            return response.read()

    def client(self, service: str = "s3") -> Any:
        """A client of Amazon's own."""
        import boto3

        variables = self.credentials()
        return boto3.session.Session(
            variables["AWS_ACCESS_KEY_ID"], variables["AWS_SECRET_ACCESS_KEY"], region_name="us-east-1"
        ).client(service, endpoint_url=self.url)

    def new_bucket(self, name: str = "") -> str:
        """Create a bucket, and return its name."""
        name = name or f"tests-{uuid.uuid4().hex[:12]}"
        self.client().create_bucket(Bucket=name)
        return name

    def give_bucket(self, location: StoreLocation, min_bytes: int) -> str:
        """Give a store a bucket of its own. Returns its name."""
        name = self.new_bucket()
        with Store.open(location, exclusive=True) as store:
            store.bucket.set(f"s3://{name}/some/prefix", endpoint_url=self.url, min_bytes=min_bytes)
        return name

    def objects(self, bucket: str) -> dict[str, bytes]:
        """The objects of a bucket, by key."""
        listed = self.client().list_objects_v2(Bucket=bucket).get("Contents", [])
        client = self.client()
        return {each["Key"]: client.get_object(Bucket=bucket, Key=each["Key"])["Body"].read() for each in listed}


@contextmanager
def running_server(directory: Path) -> Generator[S3Server]:
    """Run a server in a directory of its own."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    server = S3Server(directory, port)
    try:
        server.start()
        yield server
    finally:
        server.stop()
