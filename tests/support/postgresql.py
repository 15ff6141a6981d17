"""A PostgreSQL server of the tests' own, made of Debian's programs: a cluster in a directory, with its socket."""

from __future__ import annotations

import contextlib
import os
import pwd
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from understudy.store import Store
from understudy.store.address import StoreUrl

from support.hosts import Host

PASSWORD = "not-a-secret-5f1c"
_PORT = 5432
_START_S = 60.0


@cache
def programs() -> Path | None:
    """Where `initdb` and `postgres` are; None where they are not installed."""
    here = shutil.which("initdb")
    paths = [Path(here)] if here else sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    return paths[-1].parent if paths else None


def problems() -> list[str]:
    """Why there can be no server here."""
    if programs() is None:
        return ["PostgreSQL is not installed (Debian's package is postgresql)"]
    if os.geteuid() == 0 and _owner() is None:
        return ["PostgreSQL does not run as root, and there is no user postgres"]
    return []


def _owner() -> pwd.struct_passwd | None:
    try:
        return pwd.getpwnam("postgres")
    except KeyError:
        return None


@dataclass
class PostgresqlServer:
    """A cluster and the server on it. Its one user is `postgres`, who needs `PASSWORD`, also over the socket.

    With a `host` it runs there, and other hosts reach it at `remote`; tests themselves use the socket.
    """

    directory: Path
    is_durable: bool = False
    host: Host | None = None
    _process: subprocess.Popen[bytes] | None = None
    _has_template: bool = False

    @property
    def _as_user(self) -> dict[str, Any]:
        owner = _owner() if os.geteuid() == 0 else None
        return {} if owner is None else {"user": owner.pw_uid, "group": owner.pw_gid}

    @property
    def pid(self) -> int:
        """The server's process."""
        assert self._process is not None
        return self._process.pid

    def create(self) -> None:
        """Make the cluster."""
        password = self.directory / "password"
        password.write_text(PASSWORD)
        if user := self._as_user:
            os.chown(self.directory, user["user"], user["group"])
            os.chown(password, user["user"], user["group"])
        arguments = ["-D", self.directory / "data", "-U", "postgres", "-A", "scram-sha-256", "-E", "UTF8"]
        subprocess.run(
            [str(programs()) + "/initdb", *arguments, "--locale=C", "--no-sync", f"--pwfile={password}"],
            check=True,
            capture_output=True,
            cwd="/",
            timeout=120,
            **self._as_user,
        )
        if self.host is not None:
            with (self.directory / "data" / "pg_hba.conf").open("a") as access:
                access.write("host all all samenet scram-sha-256\n")

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        settings = {
            "listen_addresses": "" if self.host is None else self.host.address,
            "unix_socket_directories": str(self.directory),
            "shared_buffers": "32MB",
            "max_connections": "60",
            # Kills of the server are survived without it; only a power cut is not, and these tests have none.
            "fsync": "on" if self.is_durable else "off",
        }
        options = [text for name, value in settings.items() for text in ("-c", f"{name}={value}")]
        command = [str(programs()) + "/postgres", "-D", str(self.directory / "data"), *options]
        owner = self._as_user
        if self.host is not None:
            as_owner = ["setpriv", f"--reuid={owner['user']}", f"--regid={owner['group']}", "--clear-groups"]
            command, owner = [*self.host.enter, *as_owner, *command], {}  # only root may enter
        end = time.monotonic() + _START_S
        while True:
            # After a kill it ends at once until its former processes have left the memory that they share.
            if self._process is None or self._process.poll() is not None:
                with (self.directory / "log").open("ab") as log:
                    self._process = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", **owner)
            try:
                self.execute("SELECT 1")
                return
            except Exception:
                if time.monotonic() > end:
                    raise
                time.sleep(0.1)

    def stop(self, how: signal.Signals = signal.SIGQUIT) -> None:
        """End the server: at once, as a crash does it (SIGQUIT, SIGKILL), or after its last writes (SIGINT)."""
        if self._process is not None:
            self._process.send_signal(how)
            self._process.wait(60)
            self._process = None

    def execute(self, statement: str, database: str = "postgres") -> None:
        """Run a statement of an administrator."""
        import psycopg

        with psycopg.connect(self.url(database), autocommit=True, connect_timeout=5) as connection:
            connection.execute(statement.encode())

    def url(self, database: str, password: str | None = PASSWORD) -> str:
        """The URL of a database."""
        secret = "" if password is None else f":{password}"
        return f"postgresql://postgres{secret}@/{database}?host={self.directory}&port={_PORT}"

    def remote(self, url: StoreUrl) -> StoreUrl:
        """The URL of a database, for other hosts."""
        assert self.host is not None
        name = urlsplit(url.secret_url).path
        return StoreUrl(f"postgresql://postgres:{PASSWORD}@{self.host.address}:{_PORT}{name}")

    def new_database(self, template: str = "template0") -> StoreUrl:
        """An empty database, or the copy of another one."""
        name = f"store_{uuid.uuid4().hex[:12]}"
        self.execute(f"CREATE DATABASE {name} TEMPLATE {template}")
        return StoreUrl(self.url(name))

    def new_store(self) -> StoreUrl:
        """A database with a store in it that is empty."""
        if not self._has_template:
            self.execute("CREATE DATABASE store_template TEMPLATE template0")
            Store.open(StoreUrl(self.url("store_template"))).close()
            self._has_template = True
        return self.new_database("store_template")


@contextlib.contextmanager
def running_server(*, is_durable: bool = False, host: Host | None = None) -> Generator[PostgresqlServer]:
    """A server in a directory of its own, gone afterwards."""
    # Short: a socket's path has 107 characters.
    directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
    server = PostgresqlServer(directory, is_durable, host)
    try:
        server.create()
        server.start()
        yield server
    finally:
        server.stop()
        shutil.rmtree(directory, ignore_errors=True)


class LosingProxy:
    """A socket in front of a server's, in a directory of its own.

    It can lose the answer to a commit, cut all connections, and stop carrying anything.
    """

    def __init__(self, server: PostgresqlServer) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="pg-", dir="/tmp"))
        self.lost = 0
        self._target = str(server.directory / f".s.PGSQL.{_PORT}")
        self._armed = threading.Event()
        self._is_cut = threading.Event()
        self._is_flowing = threading.Event()
        self._is_flowing.set()
        self._clients: set[socket.socket] = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.directory / f".s.PGSQL.{_PORT}"))
        self._listener.listen()

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        shutil.rmtree(self.directory)

    def lose_next_commit(self) -> None:
        """The next commit reaches the server, and its answer nobody."""
        self._armed.set()

    def url(self, url: StoreUrl) -> StoreUrl:
        """The URL of a database of the server, through this proxy."""
        return StoreUrl(url.secret_url.replace(str(Path(self._target).parent), str(self.directory)))

    def cut(self) -> None:
        """Cut every connection, and each new one until `mend`."""
        self._is_cut.set()
        for client in list(self._clients):
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)

    def mend(self) -> None:
        """Let connections through again."""
        self._is_cut.clear()

    def freeze(self) -> None:
        """Carry no byte in either direction until `thaw`, with connections left open."""
        self._is_flowing.clear()

    def thaw(self) -> None:
        """Carry bytes again."""
        self._is_flowing.set()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                if self._is_cut.is_set():
                    client.close()
                    continue
                self._clients.add(client)
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    @contextlib.contextmanager
    def _forgetting(self, client: socket.socket) -> Generator[None]:
        try:
            yield
        finally:
            self._clients.discard(client)

    def _serve(self, client: socket.socket) -> None:
        silent = False
        with (
            contextlib.suppress(OSError),
            self._forgetting(client),
            client,
            socket.socket(socket.AF_UNIX) as server,
        ):
            server.connect(self._target)
            while True:
                readable = select.select([client, server], [], [])[0]
                self._is_flowing.wait()
                for source in readable:
                    if not (data := source.recv(65536)):
                        return
                    if source is client and self._armed.is_set() and b"COMMIT" in data:
                        self._armed.clear()
                        silent = True
                    elif source is server and silent:
                        self.lost += 1
                        return
                    (server if source is client else client).sendall(data)
