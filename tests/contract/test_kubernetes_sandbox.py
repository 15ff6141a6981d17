"""Sandboxes in pods, through the real kubectl: what is created, when pods end, and what errors say."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from pathlib import Path

import pytest

from understudy.errors import ConfigError, SandboxError, SandboxLost
from understudy.sandbox.base import SandboxSpec, labelled, load_sandboxes, open_kind
from understudy.sandbox.remote.kubernetes import KubernetesSandboxes

from support import kubernetes_server, understudy
from support.kubernetes_server import Cluster

pytestmark = [pytest.mark.services, pytest.mark.usefixtures("isolation")]


async def test_a_pod_has_the_template_the_labels_and_a_deadline(cluster: Cluster, tree: Path) -> None:
    kind = KubernetesSandboxes(**cluster.options, deadline_s="600")
    with labelled(run="one", attempt="one.1"):
        sandbox = await kind.open(SandboxSpec(tree=tree))
    try:
        created = cluster.server.created[-1]
        assert created["metadata"]["labels"] == {
            "team": "research",
            "app.kubernetes.io/managed-by": "understudy",
            "app.kubernetes.io/component": "sandbox",
        }
        assert "generateName" not in created["metadata"]
        spec = created["spec"]
        assert (spec["restartPolicy"], spec["activeDeadlineSeconds"]) == ("Never", 600)
        assert spec["containers"][0]["securityContext"] == {"privileged": True}
        (listed,) = await kind.sandboxes()
        assert (listed.id, listed.labels) == (created["metadata"]["name"], {"run": "one", "attempt": "one.1"})
        assert listed.deadline - listed.opened == 600
    finally:
        await sandbox.close()
    assert listed.id not in cluster.server.pods


async def test_pods_end_at_their_deadline_or_when_they_are_reaped(cluster: Cluster, tree: Path) -> None:
    kind = KubernetesSandboxes(**cluster.options)
    first = await kind.open(SandboxSpec(tree=tree))
    second = await KubernetesSandboxes(**cluster.options, deadline_s="8").open(SandboxSpec(tree=tree))
    running = asyncio.ensure_future(second.run(["sleep", "100"], timeout_s=200))
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 60)
    async with asyncio.timeout(30):
        while len(await kind.sandboxes()) != 1:  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    running = asyncio.ensure_future(first.run(["sleep", "100"], timeout_s=200))
    (listed,) = await kind.sandboxes()
    reaped = understudy("sandboxes", "reap", listed.id, "--sandbox", cluster.name, "--json")
    assert (reaped.returncode, json.loads(reaped.stdout)) == (0, [listed.id]), reaped.stderr
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(running, 60)
    # The pod that ended at its deadline is deleted too.
    assert (await kind.sandboxes(), cluster.server.pods) == ([], {})
    for sandbox in (first, second):
        await sandbox.close()


async def test_a_pod_ends_when_our_process_is_gone(cluster: Cluster, tree: Path) -> None:
    kind = KubernetesSandboxes(**cluster.options)
    sandbox = await kind.open(SandboxSpec(tree=tree))
    (listed,) = await kind.sandboxes()
    process = sandbox._connection._process  # type: ignore[attr-defined]  # kubectl, as if we had been killed
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(SandboxError):
        await sandbox.run(["true"], timeout_s=10)
    async with asyncio.timeout(60):
        while await kind.sandboxes():  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert cluster.server.pods[listed.id].manifest["status"]["phase"] == "Succeeded"
    await sandbox.close()
    assert listed.id not in cluster.server.pods


async def test_a_cancelled_opening_leaves_no_pod(cluster: Cluster, tree: Path) -> None:
    kind = KubernetesSandboxes(**cluster.options)
    for delay_s in (0.1, 0.2, 0.3, 0.4, 0.8):
        opening = asyncio.ensure_future(kind.open(SandboxSpec(tree=tree)))
        await asyncio.sleep(delay_s)
        opening.cancel()
        await asyncio.wait([opening])
        if not opening.cancelled():  # it was open before
            await opening.result().close()
        assert cluster.server.pods == {}


async def test_a_pod_that_does_not_start_names_the_clusters_reason(
    cluster: Cluster, tree: Path, tmp_path: Path
) -> None:
    template = tmp_path / "pod.yaml"
    template.write_text(cluster.template.read_text().replace("understudy:0.1.0", kubernetes_server.MISSING_IMAGE))
    kind = KubernetesSandboxes(**{**cluster.options, "template": str(template)}, start_s="2")
    with pytest.raises(SandboxError, match=r"not ready within 2 s: ErrImagePull: image \"no-such-image:1\""):
        await kind.open(SandboxSpec(tree=tree))
    assert cluster.server.pods == {}


def test_errors_say_what_to_do(cluster: Cluster, tmp_path: Path) -> None:
    assert KubernetesSandboxes(**cluster.options).problems() == []
    deployment, broken = tmp_path / "deployment.yaml", tmp_path / "broken.yaml"
    deployment.write_text("apiVersion: v1\nkind: ConfigMap\nmetadata: {name: x}\n")
    broken.write_text("apiVersion: v1\nkind: [\n")
    reader = kubernetes_server.kubeconfig(cluster.kubeconfig.parent, cluster.server.port, kubernetes_server.READER)
    stranger = kubernetes_server.kubeconfig(cluster.kubeconfig.parent, cluster.server.port, "unknown")
    for options, message in (
        ({"template": ""}, "no template; give kubernetes:NAMESPACE"),
        ({"template": str(tmp_path / "missing.yaml")}, "cannot read the pod's template"),
        ({"template": str(broken)}, "cannot read the pod's template"),
        ({"template": str(deployment)}, "got 'ConfigMap'; give one object of kind Pod"),
        ({"kubeconfig": str(reader)}, "forbidden"),
        ({"kubeconfig": str(stranger)}, "must be logged in"),
        ({"target": "elsewhere"}, "kubectl create"),
    ):
        with pytest.raises((ConfigError, SandboxError), match=message):
            load_sandboxes("kubernetes", {**cluster.options, **options})
    assert cluster.server.pods == {}


def test_a_machine_without_kubectl(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"cannot start kubectl: .*; install kubectl"):
        load_sandboxes("kubernetes", cluster.options)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("kubernetes:agents?start_s=-1", "start_s"),
        ("kubernetes:agents?start_s=x", "start_s"),
    ],
)
def test_invalid_options(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_kind(name)


def test_deadlines_of_pods_are_whole_seconds_from_now(cluster: Cluster, tree: Path) -> None:
    kind = KubernetesSandboxes(**cluster.options, deadline_s=100)

    async def opened() -> float:
        sandbox = await kind.open(SandboxSpec(tree=tree))
        try:
            return (await kind.sandboxes())[0].deadline
        finally:
            await sandbox.close()

    before = time.time()
    assert before + 99 <= asyncio.run(opened()) <= time.time() + 101
