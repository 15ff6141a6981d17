"""What is true of containers alone: images, their past and future, isolation, readiness, faults of the engine."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import io
import os
import platform
import signal
import socket
import subprocess
import sys
import tarfile
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from understudy.checks.base import GradingOptions
from understudy.errors import SandboxError, SandboxLost, TaskError
from understudy.sandbox import time_limit
from understudy.sandbox.base import Mount, Sandbox, SandboxLimits, SandboxSpec
from understudy.sandbox.docker import container
from understudy.sandbox.docker.engine import find_engine
from understudy.sandbox.docker.images import remove_images
from understudy.sandbox.docker.sandboxes import DockerSandboxes
from understudy.sandbox.local.seccomp import _NUMBERS, _SHARED  # pyright: ignore[reportPrivateUsage]
from understudy.sandbox.system_calls import DENIED_CALLS, DENIED_FAMILY
from understudy.tasks.environment import TaskEnvironment
from understudy.tasks.patch import NO_PATCH, PristineRepository, extract_patch
from understudy.tasks.prepare import PreparedTask, prepare, sandbox_spec
from understudy.types import ImageTree, SuiteChecks, Task
from understudy.util.diffs import parse_diff

from fakes.registry import Registry
from support.docker_engine import ENDS, Engine, InstanceImage, instance_image, test_image

pytestmark = pytest.mark.services

FILES = {
    "calc.py": "def shift(x):\n    return x - 1\n",
    "test_calc.py": "from calc import shift\n\n\ndef test_shift():\n    assert shift(1) == 2\n",
    "docs/guide.txt": "guide\n",
    "docs/deep/more.txt": "more\n",
    ".gitignore": "build/\n",
}
ASK = """
import ctypes, json, sys
libc = ctypes.CDLL(None, use_errno=True)
answers = []
for number, *arguments in json.loads(sys.argv[1]):
    ctypes.set_errno(0)
    result = libc.syscall(number, *arguments)
    answers.append([result, ctypes.get_errno()])
print(json.dumps(answers))
"""
FUTURE = {"calc.py": "def shift(x):\n    return x + 1\n"}
ID = "example__calc-7"


@pytest.fixture(scope="module")
def instance(engine: Engine) -> InstanceImage:
    return instance_image(engine, ID, FILES, future=FUTURE)


@pytest.fixture
async def kind(engine: Engine) -> AsyncIterator[DockerSandboxes]:
    sandboxes = DockerSandboxes(image=test_image(engine), pull_wait_s=0.01)
    yield sandboxes
    await sandboxes.aclose()
    assert ours(engine) == []


def ours(engine: Engine) -> list[str]:
    """The containers of this process."""
    with contextlib.closing(engine.client) as client:
        containers = client.api.containers(all=True, filters={"label": "understudy.owner"})
    return [
        each["Id"] for each in containers if each["Labels"]["understudy.owner"].split("/")[2] == str(os.getpid())
    ]


def task(instance: InstanceImage, **changes: Any) -> Task:
    base = Task(
        instance_id=ID,
        repo="example/calc",
        instruction="Mend shift.",
        source=ImageTree(instance.base_commit),
        checks=SuiteChecks("pytest", "pytest", ("test_calc.py::test_shift",)),
        gold_patch="",
        workdir="/testbed",
        image=instance.name,
    )
    return replace(base, **changes)


@pytest.fixture
def prepared(kind: DockerSandboxes, instance: InstanceImage, tmp_path: Path) -> PreparedTask:
    return prepare(task(instance), tmp_path / "cache", kind)


@pytest.fixture
async def sandbox(kind: DockerSandboxes, prepared: PreparedTask) -> AsyncIterator[Sandbox]:
    open_sandbox = await kind.open(sandbox_spec(prepared, TaskEnvironment()))
    yield open_sandbox
    await open_sandbox.close()


async def sh(sandbox: Sandbox, script: str, *, timeout_s: float = 30) -> str:
    done = await sandbox.run(["bash", "-c", script], timeout_s=timeout_s)
    assert done.exit_code == 0, done
    return done.stdout.decode()


# --- images --------------------------------------------------------------------------------------------


def test_the_tree_of_an_image_comes_out_without_its_repository(prepared: PreparedTask) -> None:
    files = {str(path.relative_to(prepared.tree)) for path in prepared.tree.rglob("*") if path.is_file()}
    assert {name for name in files if not name.startswith(".git/")} == set(FILES)
    assert (prepared.tree / "calc.py").read_text() == FILES["calc.py"]


async def test_an_image_of_another_commit_or_without_the_directory_is_refused(
    kind: DockerSandboxes, instance: InstanceImage, tmp_path: Path
) -> None:
    with pytest.raises(TaskError, match=r"neither the task's base commit .* nor a descendant of it"):
        kind.export_tree(instance.name, "/testbed", instance.future_commit, tmp_path / "a")
    with pytest.raises(TaskError, match="has no directory /nowhere"):
        kind.export_tree(instance.name, "/nowhere", "", tmp_path / "b")
    with pytest.raises(TaskError, match="has no directory /nowhere"):
        kind.export_tree(instance.name, "/nowhere", instance.base_commit, tmp_path / "c")


async def test_an_agent_finds_the_past_of_the_repository_and_nothing_of_its_future(
    sandbox: Sandbox, instance: InstanceImage
) -> None:
    assert (await sh(sandbox, "git rev-parse HEAD; git status --porcelain")).split() == [instance.base_commit]
    assert (await sh(sandbox, "git log --all --format=%s")).split() == ["Base", "First"]
    assert (await sh(sandbox, "git tag")).split() == ["v0.1", "v1.0"]
    assert (await sh(sandbox, "git describe")).strip() == "v1.0"
    assert await sh(sandbox, "git remote; git reflog; git stash list; ls .git/logs 2>/dev/null || true") == ""
    assert (await sandbox.run(["git", "cat-file", "-e", instance.future_commit], timeout_s=20)).exit_code != 0
    reachable = await sh(sandbox, "git rev-list --all --objects | wc -l")
    tags = 1  # the one of v1.0 is an object too
    stored = await sh(sandbox, "git cat-file --batch-all-objects --batch-check | wc -l")
    assert int(stored) == int(reachable) or int(stored) == int(reachable) + tags
    assert await sh(sandbox, "grep -rl 'x + 1' / --include=calc.py 2>/dev/null || true") == ""


async def test_a_tree_that_belongs_to_the_sandboxes_user_already_is_not_copied(
    kind: DockerSandboxes, engine: Engine, tmp_path: Path
) -> None:
    large = instance_image(engine, "example__large-1", FILES | {"large": b"\0" * 4_000_000})
    made = prepare(task(large, image=large.name), tmp_path, kind)
    for as_root in (False, True):
        sandbox = await kind.open(
            sandbox_spec(replace(made, options=GradingOptions(as_root=as_root)), TaskEnvironment())
        )
        assert (await sh(sandbox, "stat -c %u large")).strip() == ("0" if as_root else "1000")
        await sandbox.close()
    with contextlib.closing(engine.client) as client:
        images = client.api.images(filters={"label": f"understudy.prepared={large.name}"})
        sizes = [client.api.history(image["Id"])[0]["Size"] for image in images]
    assert min(sizes) < 1_000_000 < 4_000_000 <= max(sizes)


async def test_what_an_image_configures_its_programs_by_stays(sandbox: Sandbox) -> None:
    assert (await sh(sandbox, 'echo "$PIP_NO_INDEX $LANG"')).split() == ["1", "C.UTF-8"]


async def test_the_environment_of_the_image_works_for_an_ordinary_user(sandbox: Sandbox) -> None:
    script = "source /opt/miniconda3/bin/activate && conda activate testbed && sed -i s/-/+/ calc.py && pytest -q"
    done = await sandbox.run(["bash", "-c", script.replace("pytest", "python -m pytest")], timeout_s=60)
    assert done.exit_code == 0 and b"1 passed" in done.stdout, done
    assert (await sh(sandbox, "id -u; id -un; stat -c %u . calc.py .git/HEAD $HOME")).split() == [
        "1000",
        "agent",
        *["1000"] * 4,
    ]


async def test_a_pull_waits_for_a_registry_that_limits_it(engine: Engine, tmp_path: Path) -> None:
    progress: list[str] = []
    with Registry({"testbed/a.txt": b"a"}, limited=2) as registry:
        kind = DockerSandboxes(cache_level="none", pull_wait_s=0.01, progress=progress.append)
        kind.export_tree(registry.image, "/testbed", "", tmp_path / "tree")
        assert (tmp_path / "tree" / "a.txt").read_bytes() == b"a"
        assert any("trying again" in line for line in progress) and any("fetched" in line for line in progress)
        await kind.aclose()
        registry.limited = 99
        kind = DockerSandboxes(pull_wait_s=0.01, force_rebuild=True)
        with pytest.raises(SandboxError, match="docker login"):
            kind.export_tree(registry.image, "/testbed", "", tmp_path / "again")
        await kind.aclose()


async def test_an_image_that_is_nowhere_is_a_fault_of_the_task(kind: DockerSandboxes, tmp_path: Path) -> None:
    with Registry({}) as registry:
        name = registry.image.replace("tree", "absent")
        with pytest.raises(TaskError, match=f"image '{name}' not found on this machine"):
            kind.export_tree(name, "/testbed", "", tmp_path / "tree")
        with pytest.raises(TaskError, match="not found on this machine"):
            await kind.open(SandboxSpec(tree=tmp_path, image=name))


async def test_a_name_that_stands_for_another_image_now_is_noticed(
    kind: DockerSandboxes, engine: Engine, tmp_path: Path
) -> None:
    name = f"renewed__calc-{os.getpid()}"
    before = instance_image(engine, name, FILES)
    first = prepare(task(before), tmp_path, kind)
    assert prepare(task(before), tmp_path, kind) == first
    after = instance_image(engine, name, {**FILES, "calc.py": "x = 2\n"})
    with pytest.raises(TaskError, match="built from that commit"):
        prepare(task(before), tmp_path, kind)
    assert (prepare(task(after), tmp_path, kind).tree / "calc.py").read_text() == "x = 2\n"
    # What has been removed is not fetched to see whether it is still the same.
    with contextlib.closing(engine.client) as client:
        client.api.remove_image(after.name)
    assert (prepare(task(after), tmp_path, kind).tree / "calc.py").read_text() == "x = 2\n"


async def test_a_rebuild_makes_do_with_what_was_built_here(engine: Engine, tmp_path: Path) -> None:
    progress: list[str] = []
    with Registry({}) as registry, contextlib.closing(engine.client) as client:
        name, _, tag = registry.image.replace("tree", "built-here").rpartition(":")
        client.api.tag(test_image(engine), name, tag)
        kind = DockerSandboxes(force_rebuild=True, progress=progress.append)
        try:
            assert (
                kind.image_id(f"{name}:{tag}", fetch=False) == client.api.inspect_image(test_image(engine))["Id"]
            )
        finally:
            await kind.aclose()
            client.api.remove_image(f"{name}:{tag}")
    assert any("no registry has it" in line for line in progress)


async def test_images_that_a_run_fetched_can_be_removed_when_it_ends(engine: Engine, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    with contextlib.closing(engine.client) as client:
        kind = DockerSandboxes(image=test_image(engine), cache_level="none")
        sandbox = await kind.open(SandboxSpec(tree=tree, workdir=f"/w{os.getpid()}"))
        (container,) = ours(engine)
        prepared = client.api.inspect_container(container)["Image"]
        await sandbox.close()
        assert prepared in {image.id for image in client.images.list()}
        await kind.aclose()
        assert prepared not in {image.id for image in client.images.list()}


async def test_an_image_in_use_does_not_keep_the_others(engine: Engine) -> None:
    used, free = (imported(engine, f"{name}-{os.getpid()}", {"a": name.encode()}) for name in ("used", "yonder"))
    with contextlib.closing(find_engine()) as image_engine, contextlib.closing(engine.client) as client:
        container = client.api.create_container(used, ["/a"])["Id"]
        try:
            assert remove_images(image_engine, {used, free}) == [free]
            assert client.api.images(used, quiet=True) and not client.api.images(free, quiet=True)
        finally:
            client.api.remove_container(container)
        assert remove_images(image_engine, {used, free}) == [used, free]
        assert not client.api.images(used, quiet=True)


def imported(engine: Engine, name: str, files: dict[str, bytes]) -> str:
    output = io.BytesIO()
    with tarfile.open(fileobj=output, mode="w") as tar:
        for path, data in files.items():
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(data), 0o755
            tar.addfile(info, io.BytesIO(data))
    with contextlib.closing(engine.client) as client:
        client.api.import_image_from_data(output.getvalue(), f"understudy-test/{name}", "1")
    return f"understudy-test/{name}:1"


async def test_an_image_without_a_shell_is_named(kind: DockerSandboxes, engine: Engine, tmp_path: Path) -> None:
    image = imported(engine, "no-shell", {"etc/os-release": b"x"})
    with pytest.raises(SandboxError, match=f"{image}: it has no /bin/sh"):
        await kind.open(SandboxSpec(tree=tmp_path, image=image))


async def test_a_program_whose_loader_the_image_lacks_is_named(
    kind: DockerSandboxes, engine: Engine, tmp_path: Path
) -> None:
    program = tmp_path / "program"
    program.write_text("#!/lib/ld-of-another-libc.so\n")
    program.chmod(0o755)
    tree = tmp_path / "tree"
    tree.mkdir()
    sandbox = await kind.open(SandboxSpec(tree=tree, mounts=(Mount(program, "/opt/program"),)))
    with pytest.raises(SandboxError, match="it exists but does not start"):
        await sandbox.run(["/opt/program"], timeout_s=20)
    await sandbox.close()


async def test_a_task_without_an_image_needs_one_named(engine: Engine, tmp_path: Path) -> None:
    kind = DockerSandboxes()
    with pytest.raises(TaskError, match="--image"):
        await kind.open(SandboxSpec(tree=tmp_path))


# --- isolation -----------------------------------------------------------------------------------------


async def test_a_command_has_no_network_no_rights_and_no_way_to_get_any(sandbox: Sandbox) -> None:
    status = await sh(sandbox, "grep -E '^(Cap(Eff|Prm|Bnd|Inh|Amb)|NoNewPrivs)' /proc/self/status")
    assert {line.split()[1].lstrip("0") for line in status.splitlines() if "Cap" in line} == {""}
    assert "NoNewPrivs:\t1" in status
    assert (await sh(sandbox, "cd /sys/class/net; echo *")).strip() == "lo"
    done = await sandbox.run(
        ["bash", "-c", "echo x > /usr/bin/evil; echo x > /etc/passwd; kill -9 1"], timeout_s=20
    )
    assert done.exit_code != 0
    assert await sandbox.run(["test", "-e", "/usr/bin/evil"], timeout_s=20) != 0
    assert (await sh(sandbox, "kill -9 $(ls /proc | grep -E '^[0-9]+$' | grep -v $$) 2>/dev/null; true")) == ""
    assert (await sh(sandbox, "echo on")) == "on\n"


async def test_system_calls_are_denied_as_in_local_sandboxes_and_others_work(sandbox: Sandbox) -> None:
    numbers = _NUMBERS[platform.machine()] | _SHARED
    calls = [[numbers[name], -1, 0, 0, 0, 0, 0] for name in DENIED_CALLS]
    calls += [
        [numbers["socket"], DENIED_FAMILY, 1, 0],
        [numbers["socket"], 2, 1, 0],
        [numbers["memfd_create"], 0, 0],
    ]
    done = await sandbox.run(["python", "-c", ASK, msgspec.json.encode(calls).decode()], timeout_s=60)
    *denied, family, inet, memory = msgspec.json.decode(done.stdout, type=list[tuple[int, int]])
    assert [code for _, code in denied] == list(DENIED_CALLS.values())
    assert family == (-1, errno.EAFNOSUPPORT)
    assert inet[0] >= 0
    assert memory == (-1, errno.EFAULT), "files in memory are counted by the container's control group"


async def test_connections_to_other_machines_time_out_also_after_a_restart(sandbox: Sandbox) -> None:
    probe = "timeout 0.2 bash -c 'exec 3<>/dev/tcp/10.255.255.1/80' 2>/dev/null; echo $?"
    for _ in range(2):
        assert await sh(sandbox, probe) == "124\n", "a connection without a route would fail at once, with 1"
        await sandbox.run(["sh", "-c", "sleep 60 &"], timeout_s=20)  # what outlives a run ends the container


async def test_shares_do_not_read_as_a_single_processor(sandbox: Sandbox) -> None:
    shares = await sh(sandbox, "cat /sys/fs/cgroup/cpu/cpu.shares 2>/dev/null || echo 2048")
    assert int(shares) >= 2048


async def test_a_fork_bomb_ends_with_its_run(kind: DockerSandboxes, prepared: PreparedTask) -> None:
    spec = replace(sandbox_spec(prepared, TaskEnvironment()), limits=SandboxLimits(processes=64))
    sandbox = await kind.open(spec)
    done = await sandbox.run(["bash", "-c", "trap '' TERM; b() { b | b & }; b; sleep 60"], timeout_s=1)
    assert done.timed_out
    await sandbox.run(["bash", "-c", "for i in 1 2 3; do setsid -f sleep 60; done"], timeout_s=20)
    processes = await sh(sandbox, "cat /proc/[0-9]*/comm | sort | uniq -c | sort")
    assert "sleep" not in processes, processes
    await sandbox.close()


async def test_root_in_a_container_can_end_it_and_it_starts_again(
    kind: DockerSandboxes, prepared: PreparedTask
) -> None:
    sandbox = await kind.open(
        sandbox_spec(replace(prepared, options=GradingOptions(as_root=True)), TaskEnvironment())
    )
    assert (await sh(sandbox, "id -u; touch /usr/local/x && chown 1000 /usr/local/x && git status -s")) == "0\n"
    await sandbox.run(["bash", "-c", "echo 1 > kept; kill -9 -1; sleep 60"], timeout_s=20)
    assert await sh(sandbox, "cat kept") == "1\n"
    assert b"kept" in await extract_patch(sandbox, prepared.git)
    await sandbox.close()


@pytest.mark.parametrize("name", ENDS)
async def test_a_container_that_is_ended_from_outside_is_a_lost_sandbox(
    sandbox: Sandbox, engine: Engine, name: str
) -> None:
    assert await sh(sandbox, "echo ready") == "ready\n"
    command = asyncio.create_task(sandbox.run(["sleep", "60"], timeout_s=50))
    await asyncio.sleep(1)
    with contextlib.closing(engine.client) as client:
        await asyncio.to_thread(ENDS[name], client.api, ours(engine)[0])
    with pytest.raises(SandboxLost):
        await command


async def test_a_command_that_kills_itself_is_no_lost_sandbox(sandbox: Sandbox) -> None:
    done = await sandbox.run(["sh", "-c", "kill -9 $$"], timeout_s=30)
    assert done.exit_code == -9
    assert await sh(sandbox, "echo again") == "again\n"


async def test_what_was_shown_to_one_run_is_hidden_from_the_next(
    kind: DockerSandboxes, prepared: PreparedTask, tmp_path: Path
) -> None:
    (tmp_path / "hidden" / "sub").mkdir(parents=True)
    (tmp_path / "hidden" / "sub" / "test.py").write_text("secret\n")
    mount = Mount(tmp_path / "hidden", "/opt/secret/hidden", private=True)
    sandbox = await kind.open(sandbox_spec(prepared, TaskEnvironment(), mounts=(mount,)))
    script = ["bash", "-c", "cat /opt/secret/hidden/sub/test.py; [ ! -w /opt/secret/hidden/sub/test.py ]"]
    assert (await sandbox.run(script, timeout_s=20)).stdout == b""
    revealed = await sandbox.run(script, timeout_s=20, reveal=True)
    assert (revealed.exit_code, revealed.stdout) == (0, b"secret\n")
    assert await sh(sandbox, "ls -d /opt/secret /opt/understudy/git 2>/dev/null || true") == ""
    await sandbox.close()


# --- what changed --------------------------------------------------------------------------------------


async def paths(sandbox: Sandbox, prepared: PreparedTask) -> set[bytes]:
    patch = await extract_patch(sandbox, prepared.git)
    assert not patch.startswith(NO_PATCH), patch
    return {path for file in parse_diff(patch) for path in file.paths}


async def test_an_honest_change_of_an_instance_is_its_patch(sandbox: Sandbox, prepared: PreparedTask) -> None:
    script = (
        "sed -i s/-/+/ calc.py; mkdir -p build; echo 1 > build/x; git commit -qam x; rm -rf .git; echo 1 > new"
    )
    await sh(sandbox, script)
    assert await paths(sandbox, prepared) == {b"calc.py", b"new"}


async def test_thousands_of_files_come_in_few_archives(sandbox: Sandbox, prepared: PreparedTask) -> None:
    script = """python - <<'E'
import os
for n in range(3000):
    os.makedirs(f"many/{n % 50}", exist_ok=True)
    open(f"many/{n % 50}/{n}", "w").write(str(n))
E
echo x >> calc.py; ln many/1/1 hard; rm -r docs; mkdir docs; echo new > docs/guide.txt"""
    await sh(sandbox, script)
    files = await paths(sandbox, prepared)
    assert len(files) == 3000 + 4
    assert {b"hard", b"calc.py", b"docs/guide.txt", b"docs/deep/more.txt"} < files


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("for n in $(seq 40); do mkdir {0}; cd {0}; done; touch x", "file name too long"),
        ("head -c 1000000 /dev/urandom >h; for n in $(seq 150); do ln h h$n; done", "files have more than"),
    ],
)
async def test_what_an_agent_does_to_the_tree_is_no_fault_of_the_sandbox(
    sandbox: Sandbox, prepared: PreparedTask, script: str, reason: str
) -> None:
    await sh(sandbox, script.format("d" * 200))
    patch = await extract_patch(sandbox, prepared.git)
    assert patch.startswith(NO_PATCH)
    assert reason in patch.decode()
    assert len(patch) < 500


async def test_a_patch_is_read_no_further_than_it_may_be_long(sandbox: Sandbox, prepared: PreparedTask) -> None:
    await sh(sandbox, "head -c 3000000 /dev/urandom >a; ln a b; ln a c")
    delta = await sandbox.read_changes(file_limit=16 << 20, ignored=lambda paths: frozenset())
    assert delta is not None
    assert len(PristineRepository(prepared.git).patch(delta, limit=100_000)) == 100_001


async def test_a_workdir_that_became_a_link_is_an_empty_one(kind: DockerSandboxes, prepared: PreparedTask) -> None:
    sandbox = await kind.open(
        sandbox_spec(replace(prepared, options=GradingOptions(as_root=True)), TaskEnvironment())
    )
    await sandbox.run(["bash", "-c", "cd /; mv testbed elsewhere; ln -s /etc testbed"], timeout_s=20)
    assert await paths(sandbox, prepared) == {name.encode() for name in FILES}
    await sandbox.close()


# --- readiness, and what is left behind ------------------------------------------------------------------


async def test_an_expected_sandbox_is_ready_and_one_not_opened_is_dropped(
    kind: DockerSandboxes, prepared: PreparedTask, engine: Engine
) -> None:
    spec = sandbox_spec(prepared, TaskEnvironment())
    for _ in range(9):
        kind.expect(spec)
    sandbox = await kind.open(replace(spec, env={"A": "b"}))
    assert await sh(sandbox, "echo $A; ls") == "b\ncalc.py\ndocs\ntest_calc.py\n"
    await sandbox.close()
    await kind.aclose()
    assert ours(engine) == []
    again = await kind.open(spec)
    await again.close()


async def test_opening_may_be_called_off(kind: DockerSandboxes, prepared: PreparedTask) -> None:
    for delay_s in (0.0, 0.01, 0.05, 0.2):
        opening = asyncio.create_task(kind.open(sandbox_spec(prepared, TaskEnvironment())))
        await asyncio.sleep(delay_s)
        opening.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await (await opening).close()


_KILLED = """
import asyncio, os, sys
from pathlib import Path
from understudy.sandbox.base import SandboxSpec
from understudy.sandbox.docker.sandboxes import DockerSandboxes
async def main():
    await DockerSandboxes(image=sys.argv[1]).open(SandboxSpec(tree=Path(sys.argv[2])))
    print("open", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


async def test_what_a_killed_understudy_left_is_removed_by_the_next(engine: Engine, tmp_path: Path) -> None:
    argv = [sys.executable, "-c", _KILLED, test_image(engine), str(tmp_path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as killed:  # noqa: ASYNC220
        assert killed.stdout is not None and killed.stdout.readline() == b"open\n"
        killed.send_signal(signal.SIGKILL)

    def leftover_containers() -> list[str]:
        with contextlib.closing(engine.client) as client:
            containers = client.api.containers(all=True, filters={"label": "understudy.owner"})
        return [each["Id"] for each in containers if f"/{killed.pid}/" in each["Labels"]["understudy.owner"]]

    assert len(leftover_containers()) == 1
    kind = DockerSandboxes(image=test_image(engine))
    await (await kind.open(SandboxSpec(tree=tmp_path))).close()
    await kind.aclose()
    assert leftover_containers() == []


# --- faults of the engine ----------------------------------------------------------------------------------


class Line:
    """A socket that leads to the engine until it is cut."""

    def __init__(self, path: Path, engine: Engine) -> None:
        self.url = f"unix://{path}"
        self._to = engine.url.removeprefix("unix://")
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(path))
        self._server.listen()
        self._ends: list[socket.socket] = [self._server]
        self._threads = [threading.Thread(target=self._serve)]
        self._threads[0].start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._to)
                self._ends += [near, far]
                for pair in ((near, far), (far, near)):
                    self._threads.append(threading.Thread(target=self._pass, args=pair))
                    self._threads[-1].start()

    def _pass(self, source: socket.socket, to: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                to.sendall(data)
            to.shutdown(socket.SHUT_WR)

    def cut(self) -> None:
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in self._ends:
            end.close()


@pytest.fixture
def line(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Line]:
    line = Line(tmp_path / "engine.sock", engine)
    monkeypatch.setenv("DOCKER_HOST", line.url)
    yield line
    line.cut()


async def test_an_engine_that_goes_down_is_a_fault_of_the_sandbox(
    line: Line, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    kind = DockerSandboxes(image=test_image(engine))
    sandbox = await kind.open(SandboxSpec(tree=tree))
    running = asyncio.create_task(sandbox.run(["sleep", "60"], timeout_s=60))
    await asyncio.sleep(0.3)
    line.cut()
    with pytest.raises(SandboxError, match="engine"):
        await asyncio.wait_for(running, 20)
    for call in (
        lambda: sandbox.read("x"),
        lambda: sandbox.run(["true"], timeout_s=5),
        lambda: kind.open(SandboxSpec(tree=tree)),
    ):
        with pytest.raises(SandboxError, match="engine"):
            await call()
    await sandbox.close()
    await kind.aclose()
    assert DockerSandboxes().problems() != []
    monkeypatch.setenv("DOCKER_HOST", engine.url)
    with contextlib.closing(engine.client) as client:
        for container in ours(engine):
            client.api.remove_container(container, force=True)


def test_a_machine_without_an_engine_is_told_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "no container engine responds" in DockerSandboxes().problems()[0]
    monkeypatch.setenv("DOCKER_HOST", "tcp://192.0.2.1:2375")
    assert "must run on this machine" in DockerSandboxes().problems()[0]


SPINS = """
import os, time
if os.fork():
    os._exit(0)  # the other one is now a child of the first process of the container
while time.process_time() < 0.5: pass
open("/tmp/spun", "w").close()
time.sleep(600)
"""


async def test_how_long_processes_of_a_container_ran_and_waited_is_known(
    sandbox: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []

    class Recorded(time_limit.TimeLimit):
        def count(self, roots: Iterable[int]) -> None:
            seen.extend(times.ran_s for times in time_limit.read_threads(roots).values())
            super().count(roots)

    monkeypatch.setattr(container, "TimeLimit", Recorded)
    script = f"python3 -c '{SPINS}'; until [ -e /tmp/spun ]; do sleep 0.1; done; sleep 1; sleep 0.01"
    assert (await sandbox.run(["sh", "-c", script], timeout_s=60)).exit_code == 0
    assert max(seen) >= 0.5
