"""`understudy gateway`: the gateway on its own, its keys, and orders to one that runs."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import msgspec
import typer
from msgspec import Struct

from understudy.cli.options import command, command_group, duration_s
from understudy.cli.settings import BackendSettings, gateway_config
from understudy.errors import ConfigError
from understudy.util.settings import option

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from understudy.gateway.serve.admin import GatewayAddress
    from understudy.store.address import StoreLocation, StoreUrl

app = command_group("Run the gateway on its own, give out keys for it, steer one that runs.")

DEFAULT_DIR = Path("gateway")
_Dir = Annotated[Path, typer.Option("--dir", "-d", help="The gateway's directory: store, admin key, address.")]
_StoreOption = Annotated[
    str | None,
    typer.Option("--store", metavar="URL", help="The store, where it is a database: postgresql://USER@HOST/NAME."),
]


class ServeSettings(Struct, frozen=True, kw_only=True):
    """All that `understudy gateway serve` can be told."""

    table: ClassVar[str] = "serve"
    needs_table: ClassVar[bool] = False
    model: BackendSettings = BackendSettings()
    directory: Annotated[Path, option("The gateway's directory: store, admin key, address.", "--dir", "-d")] = (
        DEFAULT_DIR
    )
    store: Annotated[
        str | None,
        option(
            "Keep keys and calls in this database, postgresql://USER@HOST/NAME; the rest stays in --dir "
            "[default: --dir].",
            metavar="URL",
        ),
    ] = None
    host: Annotated[str, option("Where to listen; every request needs a key, anywhere.")] = "127.0.0.1"
    port: Annotated[int, option("The port; 0 takes a free one.", ge=0, le=65535)] = 8484
    socket: Annotated[Path | None, option("Listen on this Unix socket too.")] = None
    admin_port: Annotated[
        int, option("Port on loopback for orders and metrics; 0 takes a free one.", ge=0, le=65535)
    ] = 0
    workers: Annotated[int, option("Worker processes, over one store.", "--workers", "-w", ge=1)] = 1
    streaming: Annotated[
        bool | None,
        option(
            "Stream a response as it is generated, or send it once it is complete and stored.",
            "--streaming/--atomic",
        ),
    ] = None


@app.command()
@command
def serve(settings: ServeSettings) -> None:
    """Answer agents on this machine until Ctrl-C, keeping every call.

    The first start makes a key and shows it once; `understudy gateway issue` makes more.
    """
    from understudy.gateway.serve.supervisor import ServicePaths, serve_until_signal

    config = gateway_config(settings.model, backend=settings.model.backend)
    if settings.streaming is not None:
        config = msgspec.structs.replace(config, streaming=settings.streaming)
    paths = ServicePaths(
        settings.directory.absolute(),
        settings.host,
        settings.port,
        settings.socket,
        settings.admin_port,
        _database(settings.store),
    )
    _run(serve_until_signal(config, paths, workers=settings.workers, started=_started))


def _database(store: str | None) -> StoreUrl | None:
    """The database that --store names; None where it was not given. Raises ConfigError for a directory."""
    from understudy.store.address import StoreUrl, parse_location

    if store is None:
        return None
    location = parse_location(store)
    if not isinstance(location, StoreUrl):
        raise ConfigError(
            f"--store: {location} is a directory; expected postgresql://USER@HOST/NAME (a directory is --dir)"
        )
    return location


def _location(store: str | None, directory: Path) -> StoreLocation:
    """Where the keys of a gateway are. Raises ConfigError where --store does not name their database."""
    from understudy.gateway.serve.admin import ADDRESS, GatewayAddress

    with suppress(OSError, msgspec.DecodeError):
        address = msgspec.json.decode((directory / ADDRESS).read_bytes(), type=GatewayAddress)
        if store is None and address.store is not None:
            raise ConfigError(
                f"the gateway of {directory} keeps its keys in {address.store}; name that database with --store"
            )
    return _database(store) or directory


def _started(address: GatewayAddress, key: str | None) -> None:
    """Say how to use the gateway; the key is shown this once."""
    key_text = key or "YOUR_KEY"
    if key:
        typer.echo(f"key: {key}", err=True)
    typer.echo(f"listening at {address.url}; orders and metrics at {address.admin_url}", err=True)
    typer.echo(f"  ANTHROPIC_BASE_URL={address.url} ANTHROPIC_AUTH_TOKEN={key_text} claude", err=True)
    typer.echo(f"  OPENAI_BASE_URL={address.url}/v1 OPENAI_API_KEY={key_text} …", err=True)


@app.command()
def issue(
    name: Annotated[str, typer.Argument(help="Who the key is for; its calls are kept under this name.")],
    directory: _Dir = DEFAULT_DIR,
    store_url: _StoreOption = None,
    expires: Annotated[
        str | None, typer.Option(help="How long the key works: 90m, 8h, 30d [default: for ever].")
    ] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="Calls that it may make.")] = None,
    tokens: Annotated[int | None, typer.Option(min=1, help="Tokens that it may use.")] = None,
    cost_usd: Annotated[float | None, typer.Option(help="US dollars that it may spend.")] = None,
) -> None:
    """Make a key and print it: only its hash is kept. An older key of the same name stops working."""
    from understudy.gateway.budget import Budget
    from understudy.gateway.serve.stored_keys import issue as issue_key
    from understudy.store import Store

    limits = msgspec.structs.asdict(Budget(calls=calls, tokens=tokens, cost_usd=cost_usd))
    budget = {name: limit for name, limit in limits.items() if limit is not None}
    expires_at = None if expires is None else time.time() + duration_s("--expires", expires)
    with Store.open(_location(store_url, directory)) as store:
        typer.echo(_run(issue_key(store, name, expires_at=expires_at, budget=budget)))


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Whose key.")],
    directory: _Dir = DEFAULT_DIR,
    store_url: _StoreOption = None,
) -> None:
    """Revoke a key; it stops working within a second."""
    from understudy.store import Store
    from understudy.store.keys import CLIENT

    location = _location(store_url, directory)
    with Store.open(location, create=False) as store:
        if not store.keys.revoke(CLIENT + name).result():
            raise ConfigError(
                f"{location} has no valid key named {name!r}; `understudy gateway keys` lists the names"
            )


@app.command()
def keys(directory: _Dir = DEFAULT_DIR, store_url: _StoreOption = None) -> None:
    """List the keys: who they are for, and whether they work. The keys themselves are not kept."""
    from understudy.store import Store
    from understudy.store.keys import CLIENT

    with Store.open(_location(store_url, directory), create=False) as store:
        for key in store.keys.all():
            expired = key.expires_at is not None and key.expires_at <= time.time()
            status = "revoked" if key.revoked_at is not None else "expired" if expired else "works"
            typer.echo(f"{key.attempt_id.removeprefix(CLIENT)}\t{status}")


@app.command()
def state(directory: _Dir = DEFAULT_DIR) -> None:
    """Show the state of the gateway: paused, policy version, calls under way and waiting."""
    _order(directory, "GET", "/state")


@app.command()
def pause(
    directory: _Dir = DEFAULT_DIR,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to wait for the calls under way.")] = 60.0,
) -> None:
    """Hold new calls, wait for those under way; the agents wait, none fails."""
    _order(directory, "POST", "/pause", {"drain_s": drain})


@app.command()
def resume(
    directory: _Dir = DEFAULT_DIR,
    version: Annotated[str | None, typer.Option(help="The policy version that answers from now on.")] = None,
) -> None:
    """Answer again after a pause."""
    _order(directory, "POST", "/resume", {} if version is None else {"version": version})


@app.command()
def publish(
    version: Annotated[str, typer.Argument(help="The policy version that answers from now on.")],
    directory: _Dir = DEFAULT_DIR,
) -> None:
    """Say which weights answer; every later call records it."""
    _order(directory, "POST", "/publish", {"version": version})


def _order(directory: Path, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    from understudy.gateway.serve.admin import send_admin_request

    typer.echo(_run(send_admin_request(directory, method, path, body)))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
