"""What every kind of sandbox promises; `unsafe-local` is held to what it can promise."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from understudy import plugins
from understudy.errors import SandboxError
from understudy.sandbox.base import Mount, Sandbox, Sandboxes, SandboxLimits, SandboxSpec

from support import require, ssh_server
from support.docker_engine import test_image

DOCKER = pytest.param("docker", marks=pytest.mark.services)


SSH = pytest.param("ssh", marks=pytest.mark.services)
KUBERNETES = pytest.param("kubernetes", marks=pytest.mark.services)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ssh_server.SshMachine]:
    require(ssh_server.problems())
    with ssh_server.ssh_machine(tmp_path_factory.mktemp("ssh")) as started:
        yield started


@pytest.fixture(params=["local", "unsafe-local", DOCKER, SSH, KUBERNETES])
async def kind(request: pytest.FixtureRequest) -> AsyncIterator[Sandboxes]:
    options: dict[str, Any] = {}
    if request.param == "ssh":
        options = request.getfixturevalue("machine").options
    if request.param == "kubernetes":
        options = request.getfixturevalue("cluster").options
    if request.param == "docker":
        options = {"image": test_image(request.getfixturevalue("engine"))}
    sandboxes: Sandboxes = plugins.load("sandboxes", request.param)(**options)
    if problems := sandboxes.problems():
        pytest.skip("; ".join(problems))
    yield sandboxes
    await sandboxes.aclose()


@pytest.fixture
def tree(kind: Sandboxes, tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    (directory / "pkg").mkdir(parents=True)
    (directory / "README").write_text("as it was\n")
    (directory / "pkg" / "run.sh").write_text("#!/bin/sh\necho ran $1\n")
    (directory / "pkg" / "run.sh").chmod(0o755)
    (directory / "link").symlink_to("README")
    kind.prepare_tree(directory)
    return directory


@pytest.fixture
async def sandbox(kind: Sandboxes, tree: Path) -> AsyncIterator[Sandbox]:
    open_sandbox = await kind.open(SandboxSpec(tree=tree))
    yield open_sandbox
    await open_sandbox.close()


async def sh(sandbox: Sandbox, script: str, *, timeout_s: float = 20, reveal: bool = False) -> str:
    done = await sandbox.run(["sh", "-c", script], timeout_s=timeout_s, reveal=reveal)
    assert done.exit_code == 0, done
    return done.stdout.decode()


def snapshot(tree: Path) -> dict[str, tuple[int, int, bytes]]:
    return {
        str(path.relative_to(tree)): (
            path.lstat().st_mode,
            path.lstat().st_uid,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in sorted(tree.rglob("*"))
    }


async def test_a_command_gives_its_output_and_exit_code(sandbox: Sandbox) -> None:
    done = await sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 3"], timeout_s=20)
    assert (done.exit_code, done.stdout, done.stderr) == (3, b"out\n", b"err\n")
    assert not done.timed_out and not done.truncated and 0 < done.duration_s < 20


async def test_a_signal_is_a_negative_exit_code(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["sh", "-c", "kill -9 $$"], timeout_s=20)).exit_code == -9


async def test_stdin_reaches_the_command_and_ends(sandbox: Sandbox) -> None:
    data = os.urandom(300_000)
    assert (await sandbox.run(["cat"], timeout_s=20, stdin=data)).stdout == data
    assert (await sandbox.run(["cat"], timeout_s=20)).stdout == b""


async def test_a_command_may_leave_its_stdin_unread(sandbox: Sandbox) -> None:
    assert (await sandbox.run(["true"], timeout_s=20, stdin=b"x" * 300_000)).exit_code == 0


async def test_the_environment_is_what_was_given_and_no_more(
    kind: Sandboxes, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_OF_THE_HOST", "1")
    spec = SandboxSpec(tree=tree, env={"FROM_SPEC": "a b", "BOTH": "spec"}, path_prefixes=("/opt/tool/bin",))
    sandbox = await kind.open(spec)
    done = await sandbox.run(["env"], timeout_s=20, env={"BOTH": "run", "FROM_RUN": "ü\n'"})
    env = dict(line.split("=", 1) for line in done.stdout.decode().splitlines() if "=" in line)
    assert set(env) <= {"PATH", "HOME", "LANG", "USER", "TMPDIR", "PWD", "FROM_SPEC", "BOTH", "FROM_RUN"}
    assert (env["FROM_SPEC"], env["BOTH"], env["FROM_RUN"]) == ("a b", "run", "ü")
    assert env["HOME"] == sandbox.home
    assert env["PATH"].startswith("/opt/tool/bin:")
    await sandbox.close()


async def test_commands_start_in_the_workdir_or_below(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, "pwd; ls")).splitlines() == [sandbox.workdir, "README", "link", "pkg"]
    done = await sandbox.run(["./run.sh", "it"], timeout_s=20, cwd="pkg")
    assert done.stdout == b"ran it\n"


async def test_a_timeout_kills_all_in_time(sandbox: Sandbox) -> None:
    started = time.monotonic()
    done = await sandbox.run(["sh", "-c", "trap '' TERM INT; echo on; sleep 60 & sleep 60"], timeout_s=1.5)
    assert time.monotonic() - started < 30
    assert (done.exit_code, done.timed_out, done.stdout) == (None, True, b"on\n")
    assert (await sandbox.run(["true"], timeout_s=20)).exit_code == 0


@pytest.mark.parametrize("timeout_s", [0.0, 0.002, 0.005, 0.01])
async def test_a_timeout_may_come_while_the_command_starts(sandbox: Sandbox, timeout_s: float) -> None:
    done = await sandbox.run(["sleep", "60"], timeout_s=timeout_s)
    assert done.timed_out


async def test_what_runs_in_the_background_ends_with_the_run(sandbox: Sandbox) -> None:
    script = "(while :; do date +%s%N > beat; sleep 0.01; done) & until [ -s beat ]; do sleep 0.01; done"
    await sh(sandbox, script)
    first = await sh(sandbox, "cat beat")
    await asyncio.sleep(0.1)
    assert await sh(sandbox, "cat beat") == first


async def test_a_background_process_that_keeps_the_pipes_does_not_delay(sandbox: Sandbox) -> None:
    started = time.monotonic()
    await sh(sandbox, "sleep 60 & exit 0")
    assert time.monotonic() - started < 15


async def test_a_flood_is_cut_and_drained(kind: Sandboxes, tree: Path) -> None:
    sandbox = await kind.open(SandboxSpec(tree=tree, limits=SandboxLimits(output_bytes=1000)))
    done = await sandbox.run(
        ["sh", "-c", "head -c 3000000 /dev/zero; head -c 2000000 /dev/zero >&2; exit 7"], timeout_s=20
    )
    assert (done.exit_code, len(done.stdout), len(done.stderr), done.truncated) == (7, 1000, 1000, True)
    done = await sandbox.run(["yes"], timeout_s=1.5)
    assert (done.timed_out, len(done.stdout)) == (True, 1000)
    exact = await sandbox.run(["head", "-c", "1000", "/dev/zero"], timeout_s=20)
    assert (len(exact.stdout), exact.truncated) == (1000, False)
    await sandbox.close()


async def test_a_missing_command_is_a_sandbox_error(sandbox: Sandbox) -> None:
    with pytest.raises(SandboxError, match="no-such-command"):
        await sandbox.run(["no-such-command"], timeout_s=20)
    with pytest.raises(SandboxError, match="nowhere"):
        await sandbox.run(["true"], timeout_s=20, cwd="nowhere")


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.01, 0.3])
async def test_cancelling_kills_the_command(sandbox: Sandbox, delay_s: float) -> None:
    script = "while :; do date +%s%N > beat; sleep 0.01; done"
    task = asyncio.create_task(sandbox.run(["sh", "-c", script], timeout_s=60))
    await asyncio.sleep(delay_s)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    first = await sh(sandbox, "cat beat 2>/dev/null || true")
    await asyncio.sleep(0.1)
    assert await sh(sandbox, "cat beat 2>/dev/null || true") == first


async def test_read_gives_what_a_command_wrote(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkdir -p d && printf 'a\\000b' > d/f; ln -s f d/link")
    assert await sandbox.read(f"{sandbox.workdir}/d/f") == b"a\0b"
    assert await sandbox.read("d/link") == b"a\0b"
    assert await sandbox.read("README") == b"as it was\n"


async def test_read_refuses_what_is_no_file_or_too_big(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkfifo pipe; head -c 101 /dev/zero > big; ln -s /dev/zero zero; ln -s loop loop")
    for path in ("absent", "absent/f", "README/f"):
        with pytest.raises((FileNotFoundError, SandboxError)):
            await sandbox.read(path)
    with pytest.raises(FileNotFoundError):
        await sandbox.read("absent")
    for path in ("pipe", "zero", "loop", "pkg"):
        with pytest.raises((SandboxError, FileNotFoundError)):
            await asyncio.wait_for(sandbox.read(path), 60)
    with pytest.raises(SandboxError, match="100 bytes"):
        await sandbox.read("big", limit=100)
    assert len(await sandbox.read("big", limit=101)) == 101


async def test_write_makes_files_that_commands_own(sandbox: Sandbox) -> None:
    await sandbox.write(f"{sandbox.workdir}/new/deep/tool", b"#!/bin/sh\necho hi\n", mode=0o755)
    await sandbox.write("README", b"changed")
    await sandbox.write(f"{sandbox.home}/.conf/x", b"1")
    script = "new/deep/tool && cat README && cat ~/.conf/x && rm -r new && [ -O README ] && echo more >> README"
    assert await sh(sandbox, script) == "hi\nchanged1"


async def test_write_refuses_what_is_no_file(sandbox: Sandbox) -> None:
    await sh(sandbox, "mkfifo pipe; touch file")
    for path in ("pkg", "file/below"):
        with pytest.raises(SandboxError):
            await sandbox.write(path, b"x")


async def test_mounts_are_seen_where_locate_says(kind: Sandboxes, tree: Path, tmp_path: Path) -> None:
    tools = tmp_path / "tools"
    (tools / "bin").mkdir(parents=True)
    (tools / "bin" / "hello-tool").write_text("#!/bin/sh\necho hello\n")
    (tools / "bin" / "hello-tool").chmod(0o755)
    (tools / "inner").mkdir()
    extra, file = tmp_path / "extra", tmp_path / "file.txt"
    extra.mkdir()
    (extra / "x").write_text("extra")
    file.write_text("file")
    sandbox = await kind.open(
        SandboxSpec(
            tree=tree,
            mounts=(
                Mount(tools, "/opt/tools"),
                Mount(file, "/opt/one/file.txt"),
                Mount(extra, "/opt/tools/inner"),
            ),
            path_prefixes=("/opt/tools/bin",),
        )
    )
    assert (await sandbox.run(["hello-tool"], timeout_s=20)).stdout == b"hello\n"
    assert await sh(sandbox, f"cat {sandbox.locate('/opt/one/file.txt')}") == "file"
    assert await sh(sandbox, f"cat {sandbox.locate('/opt/tools/inner')}/x") == "extra"
    assert await sandbox.read("/opt/one/file.txt") == b"file"
    with pytest.raises(SandboxError, match="/opt/other"):
        sandbox.locate("/opt/other")
    await sandbox.close()


@pytest.mark.parametrize("deep", [False, True])
async def test_a_unix_socket_can_be_mounted(
    kind: Sandboxes, tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deep: bool
) -> None:
    path = tmp_path / ("long-name-" * 12 if deep else "short") / "gateway.sock"
    path.parent.mkdir()
    # The kernel takes 107 bytes for the name of a socket: it is made from within its directory.
    monkeypatch.chdir(path.parent)
    served: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        served.append(await reader.readline())
        writer.write(b"pong\n")
        writer.close()
        await writer.wait_closed()

    server = await asyncio.start_unix_server(serve, path.name)
    path.chmod(0o666)
    sandbox = await kind.open(SandboxSpec(tree=tree, mounts=(Mount(path, "/run/understudy/gateway.sock"),)))
    client = (
        "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]);"
        "s.sendall(b'ping\\n'); print(s.recv(9).decode())"
    )
    argv = ["/usr/bin/env", "python3", "-c", client, sandbox.locate("/run/understudy/gateway.sock")]
    done = await sandbox.run(argv, timeout_s=20)
    assert (done.stdout, served) == (b"pong\n\n", [b"ping\n"]), done.stderr
    await sandbox.close()
    server.close()
    await server.wait_closed()


async def test_private_mounts_are_seen_on_reveal(kind: Sandboxes, tree: Path, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "test.sh").write_text("#!/bin/sh\necho secret\n")
    (hidden / "test.sh").chmod(0o755)
    sandbox = await kind.open(SandboxSpec(tree=tree, mounts=(Mount(hidden, "/hidden", private=True),)))
    path = sandbox.locate("/hidden")
    done = await sandbox.run([f"{path}/test.sh"], timeout_s=20, reveal=True)
    assert done.stdout == b"secret\n"
    await sandbox.close()


async def test_reset_drops_all_that_was_written(sandbox: Sandbox) -> None:
    await sh(sandbox, "echo x > README; rm link; mkdir n; echo x > ~/h; chmod 000 pkg")
    await sandbox.reset()
    assert (await sh(sandbox, "cat README; ls; ls -A ~")).split() == ["as", "it", "was", "README", "link", "pkg"]


async def test_the_tree_is_never_changed(kind: Sandboxes, tree: Path) -> None:
    before = snapshot(tree)
    sandbox = await kind.open(SandboxSpec(tree=tree))
    await sh(
        sandbox, "echo x >> README; chmod 777 pkg; rm pkg/run.sh; ln -sf pkg link; mkdir n; touch n/f; rm -r pkg"
    )
    await sandbox.write("README", b"y")
    await sandbox.close()
    assert snapshot(tree) == before


async def test_sandboxes_see_nothing_of_each_other(kind: Sandboxes, tree: Path) -> None:
    spec = SandboxSpec(tree=tree)
    one, two = await asyncio.gather(kind.open(spec), kind.open(spec))
    await sh(one, "echo x > mine; echo x > ~/mine")
    assert (await sh(two, "ls; ls -A ~")).split() == ["README", "link", "pkg"]
    await asyncio.gather(one.close(), two.close())
    three = await kind.open(spec)
    assert (await sh(three, "ls; ls -A ~")).split() == ["README", "link", "pkg"]
    await three.close()


async def test_closing_twice_is_fine_and_ends_use(kind: Sandboxes, tree: Path) -> None:
    sandbox = await kind.open(SandboxSpec(tree=tree))
    await asyncio.gather(sandbox.close(), sandbox.close())
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await sandbox.run(["true"], timeout_s=20)


async def test_many_runs_at_once_in_one_sandbox(sandbox: Sandbox) -> None:
    outputs = await asyncio.gather(*(sh(sandbox, f"echo {n}; echo {n} > f{n}") for n in range(8)))
    assert [int(output) for output in outputs] == list(range(8))
    assert (await sh(sandbox, "cat f?")).split() == [str(n) for n in range(8)]


async def test_a_tree_that_is_not_there_is_refused(kind: Sandboxes, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="absent"):
        await kind.open(SandboxSpec(tree=tmp_path / "absent"))


async def test_a_nul_byte_cannot_smuggle_anything(sandbox: Sandbox) -> None:
    for call in (
        lambda: sandbox.run(["true"], timeout_s=20, env={"A": "b\0--bind\0/\0/"}),
        lambda: sandbox.run(["echo", "a\0b"], timeout_s=20),
        lambda: sandbox.run(["true"], timeout_s=20, cwd="pkg\0"),
    ):
        with pytest.raises(SandboxError):
            await call()


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


async def test_descriptors_are_given_back(kind: Sandboxes, tree: Path) -> None:
    async def life() -> None:
        sandbox = await kind.open(SandboxSpec(tree=tree))
        await sandbox.run(["true"], timeout_s=20)
        await sandbox.reset()
        with pytest.raises(SandboxError):
            await sandbox.run(["no-such-command"], timeout_s=20)
        await sandbox.close()

    await life()
    before = descriptors()
    for _ in range(3):
        await life()
    async with asyncio.timeout(10):  # a server of the tests may still be closing its own
        while descriptors() > before:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
