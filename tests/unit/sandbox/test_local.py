"""What the `local` sandbox keeps hostile commands from."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from understudy.config import SANDBOX_UID
from understudy.errors import SandboxError
from understudy.sandbox.base import Completed, Mount, SandboxLimits, SandboxSpec
from understudy.sandbox.local import files
from understudy.sandbox.local.sandboxes import LocalSandbox, LocalSandboxes

from support import until

MIB = 1 << 20
SYSTEM = (
    "bin",
    "sbin",
    "lib",
    "lib32",
    "lib64",
    "libx32",
    "usr",
    "etc",
    "dev",
    "proc",
    "tmp",
    "var",
    "run",
    "home",
)
PYTHON = "/usr/bin/python3"


@pytest.fixture(scope="module")
def kind() -> LocalSandboxes:
    sandboxes = LocalSandboxes()
    if problems := sandboxes.problems():
        pytest.skip("; ".join(problems))
    if not Path(PYTHON).exists():
        pytest.skip(f"{PYTHON} is missing; install it, for instance with: apt-get install python3")
    return sandboxes


@pytest.fixture
def tree(kind: LocalSandboxes, tmp_path: Path) -> Path:
    directory = tmp_path / "tree"
    directory.mkdir()
    (directory / "README").write_text("as it was\n")
    kind.prepare_tree(directory)
    return directory


@pytest.fixture
async def sandbox(kind: LocalSandboxes, tree: Path) -> AsyncIterator[LocalSandbox]:
    limits = SandboxLimits(memory_bytes=256 * MIB, processes=64, disk_bytes=32 * MIB, output_bytes=MIB)
    sandbox = await kind.open(SandboxSpec(tree=tree, limits=limits))
    yield sandbox
    await sandbox.close()


async def sh(sandbox: LocalSandbox, script: str, *, timeout_s: float = 20, reveal: bool = False) -> Completed:
    return await sandbox.run(["sh", "-c", script], timeout_s=timeout_s, reveal=reveal)


async def python(sandbox: LocalSandbox, script: str, *, timeout_s: float = 20) -> Completed:
    return await sandbox.run([PYTHON, "-I", "-S", "-c", script], timeout_s=timeout_s)


def processes() -> dict[str, list[tuple[bytes, str]]]:
    """Command lines and real user ids of this machine's processes, by word of the command line."""
    by_word: dict[str, list[tuple[bytes, str]]] = {}
    for directory in Path("/proc").glob("[0-9]*"):
        try:
            command_line = (directory / "cmdline").read_bytes()
            uid = (directory / "status").read_text().split("Uid:\t")[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        for word in command_line.split(b"\0"):
            by_word.setdefault(word.decode(errors="replace"), []).append((command_line, uid))
    return by_word


async def test_there_is_no_network_but_its_own_loopback_and_others_do_not_answer(sandbox: LocalSandbox) -> None:
    script = """
import socket
print(sorted(name for _, name in socket.if_nameindex()))
for address, family in ("10.255.255.1", socket.AF_INET), ("2606:4700::1", socket.AF_INET6):
    with socket.socket(family) as far:
        far.settimeout(0.1)
        try:
            far.connect((address, 80))
            print("connected")
        except OSError as error:
            print(type(error).__name__)
server = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(server.getsockname(), 5)
server.accept()[0].sendall(b"lo works")
print(client.recv(99).decode())
"""
    for _ in range(2):  # runs share the network
        done = await python(sandbox, script)
        assert done.stdout.decode().split("\n")[:4] == ["['lo']", "TimeoutError", "OSError", "lo works"], done


async def test_names_resolve_only_to_itself(sandbox: LocalSandbox) -> None:
    done = await sh(sandbox, "getent hosts localhost && ! getent hosts example.com")
    assert done.exit_code == 0


async def test_services_of_the_host_are_not_reached(sandbox: LocalSandbox) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    done = await python(sandbox, f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
    server.close()
    await server.wait_closed()
    assert b"ConnectionRefusedError" in done.stderr
    # Abstract Unix sockets belong to the network namespace too.
    done = await sh(sandbox, "cat /proc/net/unix | wc -l")
    assert done.stdout.strip() == b"1"


async def test_commands_run_as_a_user_without_rights(sandbox: LocalSandbox, kind: LocalSandboxes) -> None:
    done = await sh(sandbox, "id -u; grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    uid, *lines = done.stdout.decode().splitlines()
    assert uid == "1000"
    assert {line.split()[1] for line in lines[:-1]} == {"0" * 16}
    assert lines[-1].split()[1] == "1"
    if kind.user is not None:
        task = asyncio.create_task(sandbox.run(["sleep", "1.5123"], timeout_s=20))

        def sleeping() -> list[str]:
            return [
                uid for command_line, uid in processes().get("1.5123", []) if command_line.startswith(b"sleep")
            ]

        await until(sleeping)
        assert sleeping() == [str(SANDBOX_UID)]
        await task
        assert "1.5123" not in processes()


async def test_no_further_namespaces_can_be_made(sandbox: LocalSandbox) -> None:
    assert (await sh(sandbox, "unshare -Ur true")).exit_code != 0


async def test_only_the_sandbox_is_to_be_seen(sandbox: LocalSandbox, tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("x")
    places = f"/root /etc/shadow /var/run/docker.sock /run/docker.sock {secret} {__file__} /state /whole-proc"
    script = f"ls -A / | tr '\\n' ' '; echo; for f in {places}; do [ -e $f ] && echo found $f; done; true"
    done = await sh(sandbox, script)
    top = set(done.stdout.decode().splitlines()[0].split())
    assert top <= {"workspace", *SYSTEM}
    assert b"found" not in done.stdout
    done = await sh(sandbox, "cat /etc/passwd | wc -l; cat /etc/hostname 2>/dev/null; hostname")
    assert done.stdout.split() == [b"3", b"sandbox"]


async def test_proc_shows_only_the_run(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sh(sandbox, "sleep 0.4"))
    done = await sh(sandbox, "ls /proc | grep -c '^[0-9]'; cat /proc/1/cmdline | tr '\\0' ' '; ls /proc/self/fd")
    count, *rest = done.stdout.decode().splitlines()
    assert int(count) <= 5
    assert "SECRET" not in rest[0]
    # 0, 1, 2 and the directory itself: nothing of ours is handed down.
    assert len(rest[1:]) == 4 or len(rest) == 4, done
    await task


async def test_counters_of_the_whole_machine_are_not_shown(sandbox: LocalSandbox) -> None:
    files = "/proc/vmstat /proc/sys/fs/dentry-state /proc/sys/fs/inode-nr /proc/sys/fs/inode-state"
    done = await sh(sandbox, f"cat {files} | wc -c; echo 1 > /proc/vmstat || echo read-only")
    assert done.stdout.split() == [b"0", b"read-only"]


async def test_the_environment_is_in_no_command_line(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.run(["sleep", "0.5"], timeout_s=20, env={"KEY": "sk-very-secret"}))
    await asyncio.sleep(0.25)
    assert not any("sk-very-secret" in word for word in processes())
    assert (await task).exit_code == 0


async def test_loader_variables_do_not_reach_our_helpers(sandbox: LocalSandbox) -> None:
    env = {"LD_PRELOAD": "/workspace/evil.so", "LD_AUDIT": "/workspace/evil.so", "PATH": "/workspace"}
    await sandbox.write("nsenter", b"#!/bin/sh\necho taken over\n", mode=0o755)
    await sandbox.write("prlimit", b"#!/bin/sh\necho taken over\n", mode=0o755)
    done = await sandbox.run(["/bin/echo", "fine"], timeout_s=20, env=env)
    assert done.stdout == b"fine\n"


async def test_the_system_is_read_only(sandbox: LocalSandbox) -> None:
    places = "/ /usr /etc /dev /run /bin/ /proc /proc/sys/kernel"
    done = await sh(sandbox, f"for d in {places}; do touch $d/x 2>/dev/null && echo $d; done; true")
    assert (done.exit_code, done.stdout) == (0, b"")
    done = await sh(sandbox, "mv /bin /bin2 || ln -s /tmp /new || rm /lib64 || echo 1 > /etc/ld.so.preload")
    assert done.exit_code != 0
    assert (await sh(sandbox, "touch ~/x /tmp/x /var/tmp/x /var/x /dev/shm/x x")).exit_code == 0


async def test_no_daemon_outlives_its_run(sandbox: LocalSandbox) -> None:
    script = """
import os, signal, time
if os.path.exists("/tmp/beat"):
    os.remove("/tmp/beat")
for escape in range(3):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            for descriptor in (0, 1, 2):
                os.close(descriptor)
            while True:
                open("/tmp/beat", "w").write(str(time.time()))
                time.sleep(0.005)
        os._exit(0)
while not os.path.exists("/tmp/beat"):
    time.sleep(0.01)
"""
    started = time.monotonic()
    done = await python(sandbox, script, timeout_s=20)
    assert done.exit_code == 0 and time.monotonic() - started < 15
    beat = await sandbox.read("/tmp/beat")
    await asyncio.sleep(0.05)
    assert await sandbox.read("/tmp/beat") == beat
    done = await python(sandbox, f"{script}\ntime.sleep(60)", timeout_s=2.0)
    assert done.timed_out
    beat = await sandbox.read("/tmp/beat")
    await asyncio.sleep(0.05)
    assert await sandbox.read("/tmp/beat") == beat


async def test_a_fork_bomb_is_bounded(sandbox: LocalSandbox, kind: LocalSandboxes, tree: Path) -> None:
    other = await kind.open(SandboxSpec(tree=tree))
    bomb = """
import os, time
made = 0
while True:
    try:
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        made += 1
    except BlockingIOError:
        print(made, flush=True)
        time.sleep(60)
"""
    task = asyncio.create_task(python(sandbox, bomb, timeout_s=3.0))
    await asyncio.sleep(1.5)
    assert (await sh(other, "echo still here | cat")).stdout == b"still here\n"
    done = await task
    assert done.timed_out and 1 <= int(done.stdout) < 64
    assert (await sh(sandbox, "echo and here")).stdout == b"and here\n"
    await other.close()


async def test_a_memory_bomb_is_stopped(sandbox: LocalSandbox) -> None:
    bomb = "kept = []\nwhile True: kept.append(bytearray(16 << 20))"
    done = await python(sandbox, bomb)
    assert done.exit_code == -9 or b"MemoryError" in done.stderr, done
    assert (await sh(sandbox, "echo alive")).stdout == b"alive\n"


async def test_many_processes_together_cannot_exceed_the_memory(sandbox: LocalSandbox) -> None:
    if sandbox._holder.group is None:
        pytest.skip("needs a control group")
    bomb = """
import os, time
for _ in range(8):
    if os.fork() == 0:
        kept = bytearray(100 << 20)
        time.sleep(60)
alive = 8
for _ in range(100):
    time.sleep(0.1)
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            alive -= 1
    except ChildProcessError:
        pass
    if alive <= 3:
        break
print(alive)
"""
    done = await python(sandbox, bomb)
    assert done.exit_code == -9 or int(done.stdout) <= 3, done


async def test_files_without_content_are_bounded(kind: LocalSandboxes, tree: Path) -> None:
    sandbox = await kind.open(SandboxSpec(tree=tree, limits=SandboxLimits(disk_bytes=32 * MIB)))
    code = "import os\nfor number in range(5000):\n    os.mknod(f'/tmp/{number}')"
    done = await sandbox.run([PYTHON, "-c", code], timeout_s=60)
    await sandbox.close()
    assert b"No space left on device" in done.stderr


@pytest.mark.parametrize("directory", [".", "/tmp", "/home/agent", "/var/tmp", "/dev/shm"])
async def test_a_disk_flood_is_bounded(sandbox: LocalSandbox, directory: str) -> None:
    done = await sh(sandbox, f"head -c 100000000 /dev/zero > {directory}/flood")
    assert done.exit_code == 1 and b"No space left" in done.stderr
    with pytest.raises(SandboxError, match="No space left"):
        await sandbox.write("more", bytes(MIB))
    await sh(sandbox, f"rm {directory}/flood")
    await sandbox.write("more", bytes(MIB))


@pytest.mark.parametrize(
    "target",
    [
        "/etc/shadow",
        "../../../../../../../../etc/shadow",
        "/proc/1/root/etc/shadow",
        "/proc/self/environ",
        "/proc/self/mem",
        "/dev/zero",
        "/dev/stdin",
        "/private/0/x",
        "/state/upper",
    ],
)
async def test_links_lead_nowhere(sandbox: LocalSandbox, target: str) -> None:
    await sh(sandbox, f"ln -s {target} link; mkdir d; ln -s {os.path.dirname(target)} d/up")  # noqa: PTH120
    for path in ("link", f"d/up/{Path(target).name}", target):
        with pytest.raises((FileNotFoundError, SandboxError)):
            await asyncio.wait_for(sandbox.read(path), 60)


async def test_a_link_within_the_sandbox_is_followed_as_seen_from_inside(sandbox: LocalSandbox) -> None:
    await sh(sandbox, "echo there > /tmp/there; ln -s /tmp/there here; ln -s ../../../../../tmp/there climb")
    assert await sandbox.read("here") == b"there\n"
    assert await sandbox.read("climb") == b"there\n"
    assert b"agent" in await sandbox.read("/etc/passwd")


async def test_write_cannot_be_led_out(sandbox: LocalSandbox, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir(mode=0o777)
    outside.chmod(0o777)
    await sh(sandbox, f"ln -s {outside} out; ln -s /etc/passwd passwd; ln -s /usr usr")
    for path in ("out/f", "passwd", "usr/f", "/usr/f", "/etc/f", "/proc/f", "/dev/f", "/"):
        with pytest.raises(SandboxError):
            await sandbox.write(path, b"x")
    assert not list(outside.iterdir())


async def test_what_is_not_readable_inside_is_not_read_for_it(sandbox: LocalSandbox, kind: LocalSandboxes) -> None:
    if kind.user is None:
        pytest.skip("needs root")
    await sh(sandbox, "echo x > f; chmod 000 f")
    with pytest.raises(SandboxError, match="Permission denied"):
        await sandbox.read("f")


async def test_a_new_top_level_directory_can_be_made_by_write(sandbox: LocalSandbox) -> None:
    await sandbox.write("/logs/verifier/.keep", b"")
    done = await sh(sandbox, "mkdir -p /logs/verifier && echo 1 > /logs/verifier/reward.txt")
    assert done.exit_code == 0
    assert await sandbox.read("/logs/verifier/reward.txt") == b"1\n"
    await sandbox.reset()
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/logs/verifier/reward.txt")


async def test_private_mounts_are_unknown_until_revealed(kind: LocalSandboxes, tree: Path, tmp_path: Path) -> None:
    hidden, note = tmp_path / "hidden", tmp_path / "note"
    hidden.mkdir()
    (hidden / "answer").write_text("42")
    note.write_text("43")
    mounts = (Mount(hidden, "/tests", private=True), Mount(note, "/opt/deep/note", private=True))
    sandbox = await kind.open(SandboxSpec(tree=tree, mounts=mounts))
    search = "ls -R / 2>/dev/null | grep -c '^answer$'; grep -c -E 'tests|note' /proc/mounts; ls -d /tests /opt"
    assert (await sh(sandbox, search)).stdout.split() == [b"0", b"0"]
    with pytest.raises(FileNotFoundError):
        await sandbox.read("/tests/answer")
    revealed = await sh(sandbox, "cat /tests/answer /opt/deep/note; touch /tests/x", reveal=True)
    assert revealed.stdout == b"4243" and b"Read-only" in revealed.stderr
    assert (await sh(sandbox, "cat /tests/answer")).exit_code != 0
    await sandbox.close()


@pytest.mark.parametrize("target", ["/tmp/x", "/home/agent/x", "/workspace/x", "/var/x"])
async def test_private_mounts_where_commands_write_are_refused(
    kind: LocalSandboxes, tree: Path, target: str
) -> None:
    with pytest.raises(SandboxError, match="as workdir: commands" if "workspace" in target else "as private"):
        await kind.open(SandboxSpec(tree=tree, mounts=(Mount(tree, target, private=True),)))


async def test_mounts_may_lie_in_the_workdir_and_the_home(
    kind: LocalSandboxes, tree: Path, tmp_path: Path
) -> None:
    tool = tmp_path / "tool with space, comma:colon"
    tool.mkdir()
    (tool / "x").write_text("tool")
    mounts = (Mount(tool, "/workspace/a/b"), Mount(tool / "x", "/workspace/c/x"), Mount(tool, "/home/agent/t"))
    sandbox = await kind.open(SandboxSpec(tree=tree, mounts=mounts))
    done = await sh(sandbox, "cat a/b/x c/x ~/t/x; touch a/b/y || touch c/x || touch ~/t/y")
    assert done.stdout == b"tool" * 3 and done.exit_code != 0
    await sandbox.close()


async def test_a_link_of_the_tree_cannot_lead_a_mount_astray(kind: LocalSandboxes, tree: Path) -> None:
    (tree / "a").symlink_to("/usr")
    with pytest.raises(SandboxError, match="link"):
        await kind.open(SandboxSpec(tree=tree, mounts=(Mount(tree, "/workspace/a/b"),)))


@pytest.mark.parametrize("workdir", ["relative", "/", "/tmp", "/home", "/a/../b", "/var", "/nul\0"])
async def test_an_unusable_workdir_is_refused(kind: LocalSandboxes, tree: Path, workdir: str) -> None:
    with pytest.raises(SandboxError, match="workdir"):
        await kind.open(SandboxSpec(tree=tree, workdir=workdir))


@pytest.mark.parametrize("workdir", ["/testbed", "/home/agent/project", "/a/b/c", "/tmp/x y"])
async def test_the_workdir_may_be_elsewhere(kind: LocalSandboxes, tree: Path, workdir: str) -> None:
    sandbox = await kind.open(SandboxSpec(tree=tree, workdir=workdir))
    done = await sh(sandbox, "pwd; echo x >> README; cat README")
    assert done.stdout.decode() == f"{workdir}\nas it was\nx\n"
    await sandbox.close()


async def test_a_mount_that_cannot_be_made_is_told(kind: LocalSandboxes, tree: Path, tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match="absent"):
        await kind.open(SandboxSpec(tree=tree, mounts=(Mount(tmp_path / "absent", "/opt/x"),)))
    with pytest.raises(SandboxError, match="/usr/no-such-place"):
        await kind.open(SandboxSpec(tree=tree, mounts=(Mount(tree, "/usr/no-such-place"),)))


async def test_sixteen_open_at_once(kind: LocalSandboxes, tree: Path) -> None:
    boxes = await asyncio.gather(*(kind.open(SandboxSpec(tree=tree)) for _ in range(16)))
    outputs = await asyncio.gather(*(sh(box, f"echo {n} > n; cat n") for n, box in enumerate(boxes)))
    assert [int(done.stdout) for done in outputs] == list(range(16))
    await asyncio.gather(*(box.close() for box in boxes))


async def test_closing_ends_a_run(kind: LocalSandboxes, tree: Path) -> None:
    sandbox = await kind.open(SandboxSpec(tree=tree))
    task = asyncio.create_task(sh(sandbox, "sleep 60"))
    await asyncio.sleep(0.2)
    await sandbox.close()
    with pytest.raises(SandboxError, match="closed"):
        await task


async def test_git_works_in_the_tree(sandbox: LocalSandbox) -> None:
    done = await sh(
        sandbox, "git init -q && git add -A && git -c user.name=a -c user.email=a@b commit -qm x && git log"
    )
    assert done.exit_code == 0, done


def test_prepare_tree_does_not_follow_links(kind: LocalSandboxes, tmp_path: Path) -> None:
    if kind.user is None:
        pytest.skip("needs root")
    outside, tree = tmp_path / "outside", tmp_path / "tree"
    outside.mkdir()
    (outside / "f").touch()
    (tree / "d").mkdir(parents=True)
    (tree / "d" / "f").touch()
    (tree / "l").symlink_to(outside)
    (tree / "d" / "l").symlink_to(outside / "f")
    kind.prepare_tree(tree)
    assert {path.lstat().st_uid for path in (tree, *tree.rglob("*"))} == {SANDBOX_UID}
    assert {path.lstat().st_uid for path in (outside, *outside.rglob("*"))} == {0}


async def test_the_first_files_of_a_sandbox_can_be_read_by_its_commands(sandbox: LocalSandbox) -> None:
    done = await sandbox.run(
        ["sh", "-c", "cat /etc/hosts; stat -c %a /etc/hosts /etc/passwd; id -un"], timeout_s=30
    )
    assert done.stdout.decode().splitlines() == ["127.0.0.1 localhost", "::1 localhost", "644", "644", "agent"]


def test_the_first_files_of_a_sandbox_get_their_directories(tmp_path: Path) -> None:
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        files.write_first(root, {"etc/deep/below/a": b"a", "etc/b": b"", "etc/c": b"c" * MIB})
        (tmp_path / "file").write_bytes(b"")
        with pytest.raises(SandboxError, match="cannot write /file/x in a new sandbox: Not a directory"):
            files.write_first(root, {"file/x": b""})
    finally:
        os.close(root)
    contents = {
        str(path.relative_to(tmp_path)): path.read_bytes() for path in tmp_path.glob("etc/**/*") if path.is_file()
    }
    assert contents == {"etc/deep/below/a": b"a", "etc/b": b"", "etc/c": b"c" * MIB}


def test_a_directory_that_cannot_be_made_does_not_blame_the_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    root = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    try:
        with pytest.raises(SandboxError, match="/file/x in the sandbox: Not a directory; give a path") as caught:
            files.make_directory(root, "/file/x", None)
    finally:
        os.close(root)
    assert "space" not in str(caught.value)
