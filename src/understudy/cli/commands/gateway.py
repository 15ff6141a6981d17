"""`understudy gateway`: runs the gateway on its own, manages its keys, and controls a running one."""

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
_Dir = Annotated[
    Path, typer.Option("--dir", "-d", help="The gateway's directory, with its store, admin key and address.")
]
_StoreOption = Annotated[
    str | None,
    typer.Option(
        "--store", metavar="URL", help="The gateway's store if it is a database: postgresql://USER@HOST/NAME."
    ),
]


class ServeSettings(Struct, frozen=True, kw_only=True):
    """The options of `understudy gateway serve`."""

    table: ClassVar[str] = "serve"
    needs_table: ClassVar[bool] = False
    model: BackendSettings = BackendSettings()
    directory: Annotated[
        Path, option("The gateway's directory, with its store, admin key and address.", "--dir", "-d")
    ] = DEFAULT_DIR
    store: Annotated[
        str | None,
        option(
            "Keep keys and calls in this database, postgresql://USER@HOST/NAME; other files stay in --dir "
            "[default: a store in --dir].",
            metavar="URL",
        ),
    ] = None
    host: Annotated[
        str, option("The address to listen on; every request needs a key, wherever it comes from.")
    ] = "127.0.0.1"
    port: Annotated[int, option("The port to listen on; 0 chooses a free one.", ge=0, le=65535)] = 8484
    socket: Annotated[Path | None, option("Also listen on this Unix socket.")] = None
    admin_port: Annotated[
        int, option("The port on loopback for admin requests and metrics; 0 chooses a free one.", ge=0, le=65535)
    ] = 0
    workers: Annotated[
        int, option("Number of worker processes, which share the store.", "--workers", "-w", ge=1)
    ] = 1
    streaming: Annotated[
        bool | None,
        option(
            "Stream a response while it is generated, or send it once it is complete and stored.",
            "--streaming/--atomic",
        ),
    ] = None


@app.command()
@command
def serve(settings: ServeSettings) -> None:
    """Answer agents on this machine until Ctrl-C, and store every call.

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
    """Return the database that --store names, or None if it was not given. Raises ConfigError for a directory."""
    from understudy.store.address import StoreUrl, parse_location

    if store is None:
        return None
    location = parse_location(store)
    if not isinstance(location, StoreUrl):
        raise ConfigError(
            f"--store: {store[:200]!r} is not the URL of a database; give one such as "
            "postgresql://USER@HOST/NAME, or use --dir for a directory"
        )
    return location


def _location(store: str | None, directory: Path) -> StoreLocation:
    """Return where the keys of a gateway are.

    Raises ConfigError if --store is not the database that holds them.
    """
    from understudy.gateway.serve.admin import ADDRESS, GatewayAddress

    with suppress(OSError, msgspec.DecodeError):
        address = msgspec.json.decode((directory / ADDRESS).read_bytes(), type=GatewayAddress)
        if store is None and address.store is not None:
            raise ConfigError(
                f"the gateway of {directory} keeps its keys in {address.store}; name that database with --store"
            )
    return _database(store) or directory


def _started(address: GatewayAddress, key: str | None) -> None:
    """Print how to use the gateway. The key is shown only this once."""
    key_text = key or "YOUR_KEY"
    if key:
        typer.echo(f"key: {key}", err=True)
    typer.echo(f"listening at {address.url}; orders and metrics at {address.admin_url}", err=True)
    typer.echo(f"  ANTHROPIC_BASE_URL={address.url} ANTHROPIC_AUTH_TOKEN={key_text} claude", err=True)
    typer.echo(f"  OPENAI_BASE_URL={address.url}/v1 OPENAI_API_KEY={key_text} …", err=True)


@app.command()
def issue(
    name: Annotated[
        str, typer.Argument(help="Name of the client that the key is for; its calls are stored under this name.")
    ],
    directory: _Dir = DEFAULT_DIR,
    store_url: _StoreOption = None,
    expires: Annotated[
        str | None, typer.Option(help="How long the key is valid, such as 90m, 8h or 30d [default: no limit].")
    ] = None,
    calls: Annotated[int | None, typer.Option(min=1, help="Maximum number of calls with this key.")] = None,
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens with this key, prompts included.")
    ] = None,
    cost_usd: Annotated[float | None, typer.Option(help="Maximum cost with this key, in US dollars.")] = None,
) -> None:
    """Make a key and print it. Only its hash is stored. An older key of the same client stops working."""
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
    name: Annotated[str, typer.Argument(help="Name of the client whose key is revoked.")],
    directory: _Dir = DEFAULT_DIR,
    store_url: _StoreOption = None,
) -> None:
    """Revoke a key. It stops working within a second."""
    from understudy.store import Store
    from understudy.store.keys import CLIENT

    location = _location(store_url, directory)
    with Store.open(location, create=False) as store:
        if not store.keys.revoke(CLIENT + name).result():
            raise ConfigError(
                f"{location} has no key named {name!r}, or it was revoked before; give one that `understudy "
                "gateway keys` lists as not revoked"
            )


@app.command()
def keys(directory: _Dir = DEFAULT_DIR, store_url: _StoreOption = None) -> None:
    """List the keys: the clients, and whether each key works. The keys themselves are not stored."""
    from understudy.store import Store
    from understudy.store.keys import CLIENT

    with Store.open(_location(store_url, directory), create=False) as store:
        for key in store.keys.all():
            expired = key.expires_at is not None and key.expires_at <= time.time()
            status = "revoked" if key.revoked_at is not None else "expired" if expired else "works"
            typer.echo(f"{key.attempt_id.removeprefix(CLIENT)}\t{status}")


@app.command()
def state(directory: _Dir = DEFAULT_DIR) -> None:
    """Show the state of the gateway: whether it is paused, the policy version, and the calls in progress and
    waiting.
    """
    _print_admin_response(directory, "GET", "/state")


@app.command()
def pause(
    directory: _Dir = DEFAULT_DIR,
    drain: Annotated[float, typer.Option(min=0, help="Seconds to wait for calls in progress.")] = 60.0,
) -> None:
    """Hold new calls back and wait for calls in progress. Agents wait; no call fails."""
    _print_admin_response(directory, "POST", "/pause", {"drain_s": drain})


@app.command()
def resume(
    directory: _Dir = DEFAULT_DIR,
    version: Annotated[str | None, typer.Option(help="The policy version that answers from now on.")] = None,
) -> None:
    """Answer calls again after a pause."""
    _print_admin_response(directory, "POST", "/resume", {} if version is None else {"version": version})


@app.command()
def publish(
    version: Annotated[str, typer.Argument(help="The policy version that answers from now on.")],
    directory: _Dir = DEFAULT_DIR,
) -> None:
    """Set the version of the weights that answers. Every later call records it."""
    _print_admin_response(directory, "POST", "/publish", {"version": version})


def _print_admin_response(directory: Path, method: str, path: str, body: dict[str, Any] | None = None) -> None:
    from understudy.gateway.serve.admin import send_admin_request

    typer.echo(_run(send_admin_request(directory, method, path, body)))


def _run(work: Coroutine[Any, Any, Any]) -> Any:
    import uvloop

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)
