"""What is left of local sandboxes when Understudy is killed; how they fare without root, without bubblewrap."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from understudy.errors import SandboxLost
from understudy.sandbox.local import holder
from understudy.sandbox.local.sandboxes import LocalSandboxes

PRELUDE = """
import asyncio, os, sys
from pathlib import Path
from understudy.errors import SandboxError
from understudy.sandbox.base import Mount, SandboxLimits, SandboxSpec
from understudy.sandbox.local.sandboxes import LocalSandboxes

tree = Path(sys.argv[1])
"""

RESTLESS = """
async def one(kind, n):
    while True:
        sandbox = await kind.open(SandboxSpec(tree=tree))
        script = f"(setsid sleep {tree.name} &) ; head -c 1000000 /dev/zero > f; sleep 0.0{n}"
        await sandbox.run(["sh", "-c", script], timeout_s=0.02 * (n + 1))
        await sandbox.reset()
        await sandbox.run(["sh", "-c", f"sleep 0.01; : {tree}"], timeout_s=5)
        await sandbox.close()

async def main():
    kind = LocalSandboxes()
    print("on", flush=True)
    await asyncio.gather(*(one(kind, n) for n in range(3)))

asyncio.run(main())
"""

NOBODY = """
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
"""

ROOTLESS = """
async def main():
    kind = LocalSandboxes()
    if problems := kind.problems():
        print("skip", problems)
        return
    kind.prepare_tree(tree)
    sandbox = await kind.open(SandboxSpec(tree=tree, limits=SandboxLimits(processes=40, memory_bytes=300 << 20)))
    async def sh(script):
        return await sandbox.run(["sh", "-c", script], timeout_s=20)
    done = await sh("id -u; echo more >> a; cat a; rm -r d; mkdir d; ls d; touch /etc/x || touch /x || echo no")
    assert done.stdout.decode().split() == ["1000", "as", "it", "was", "more", "no"], done
    assert (await sh("unshare -Ur true || nsenter -t 1 -m true")).exit_code != 0
    await sandbox.write("d/e/f", b"1")
    assert await sandbox.read("d/e/f") == b"1"
    assert (await sh("(setsid sleep 60 &); kill -9 $$")).exit_code == -9
    done = await sh("python3 -c 'bytearray(1 << 30)'; i=0; while [ $i -lt 60 ]; do sleep 3 & i=$((i+1)); done")
    assert b"MemoryError" in done.stderr and b"fork" in done.stderr, done
    await sandbox.reset()
    assert (await sh("cat a; ls d")).stdout.decode().split() == ["as", "it", "was", "b"]
    await sandbox.close()
    print("fine")

asyncio.run(main())
"""

WITHOUT_BUBBLEWRAP = """
import subprocess

async def main():
    kind = LocalSandboxes()
    sandbox = await kind.open(SandboxSpec(tree=tree))
    subprocess.run(["mount", "--bind", "/dev/null", "/usr/bin/bwrap"], check=True)
    print((await sandbox.run(["echo", "the open one goes on"], timeout_s=20)).stdout.decode().strip())
    await sandbox.close()
    try:
        await kind.open(SandboxSpec(tree=tree))
    except SandboxError as error:
        print(error)
    print(kind.problems())

asyncio.run(main())
"""


@pytest.fixture(autouse=True)
def _possible() -> None:
    if problems := LocalSandboxes().problems():
        pytest.skip("; ".join(problems))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    # The name is a number that `sleep` takes, and unlike any other on this machine.
    directory = tmp_path / f"1000.{os.getpid()}{time.monotonic_ns()}"
    (directory / "d").mkdir(parents=True)
    (directory / "a").write_text("as it was\n")
    (directory / "d" / "b").touch()
    LocalSandboxes().prepare_tree(directory)
    return directory


def traces(tree: Path, groups: Path | None, pid: int) -> list[str]:
    """Processes, mounts and control groups (in `groups`) that belong to sandboxes on `tree`, opened by `pid`."""
    remnants = [
        f"mount {line}" for line in Path("/proc/self/mountinfo").read_text().splitlines() if tree.name in line
    ]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command_line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if tree.name in command_line:
            remnants.append(f"process {command_line}")
    if groups is not None:
        remnants += [f"group {path}" for path in groups.glob(f"{holder.GROUP_PREFIX}-*-{pid}-*")]
    return remnants


def run(script: str, tree: Path, *wrap: str) -> subprocess.CompletedProcess[str]:
    argv = [*wrap, sys.executable, "-c", PRELUDE + script, str(tree)]
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("delay_s", [0.0, 0.004, 0.009, 0.015, 0.022, 0.03, 0.045, 0.07, 0.11, 0.2, 0.4])
def test_a_kill_leaves_nothing(tree: Path, delay_s: float) -> None:
    groups = holder.find_group_parent()  # Only now: finding it sweeps.
    argv = [sys.executable, "-c", PRELUDE + RESTLESS, str(tree)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as opener:
        assert opener.stdout is not None and opener.stdout.readline() == b"on\n"
        time.sleep(delay_s)
        opener.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 5
    while (remaining := traces(tree, groups, opener.pid)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not remaining


def test_a_kill_of_everything_leaves_a_group_that_the_next_sweeps(tree: Path) -> None:
    parent = holder.find_group_parent()
    if parent is None:
        pytest.skip("no control groups can be made here")
    script = """
from understudy.errors import SandboxLost
from understudy.sandbox.local import holder
group = holder.new_group_path(holder.find_group_parent())
holder.create_group(group, 1 << 30)
print(group.name)
"""
    name = run(script, tree).stdout.strip()
    assert (parent / name).is_dir()
    group = holder.new_group_path(parent)
    holder.create_group(group, 1 << 30)
    assert holder.find_group_parent() == parent
    assert not (parent / name).exists()
    assert group.is_dir()
    holder.remove_group(group)


def test_it_works_without_root(tree: Path) -> None:
    if os.geteuid() == 0:
        for path in (tree, *tree.rglob("*")):
            os.chown(path, 65534, 65534)
        # The temporary directory belongs to root alone; a user's own tree lies where that user may go.
        for path in tree.parents:
            if path == Path(tempfile.gettempdir()):
                break
            path.chmod(path.stat().st_mode | 0o055)
    done = run((NOBODY if os.geteuid() == 0 else "") + ROOTLESS, tree)
    if done.stdout.startswith("skip"):
        pytest.skip(done.stdout)
    assert done.stdout == "fine\n", done.stderr
    assert not traces(tree, None, 0)


def test_without_bubblewrap_it_says_how_to_get_it(tree: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to hide bubblewrap in a mount namespace of its own")
    done = run(WITHOUT_BUBBLEWRAP, tree, "unshare", "--mount", "--propagation", "private")
    first, error, problems = done.stdout.splitlines()
    assert first == "the open one goes on"
    assert "bwrap" in error and "understudy doctor" in error
    assert "`bwrap` is missing" in problems and "apt-get install bubblewrap" in problems


def test_without_user_namespaces_it_says_how_to_allow_them(tree: Path) -> None:
    # In a user namespace of its own the limit is that namespace's, so the machine keeps what it has.
    forbid = 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"'
    wrap = ("unshare", "--user", "--map-root-user", "sh", "-c", forbid, "sh")
    done = run("print(LocalSandboxes().problems())", tree, *wrap)
    assert "sysctl -w user.max_user_namespaces" in done.stdout, done.stderr


@pytest.mark.parametrize("wait", ["", "; exec sleep 0.2"])
async def test_a_sandbox_that_dies_while_it_is_opened_is_lost(wait: str):
    with pytest.raises(SandboxLost, match="killed"):
        await holder.start_holder(["/bin/sh", "-c", f"echo ready{wait}"], None, 1 << 30)
