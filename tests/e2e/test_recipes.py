"""The recipes for workers: manifests against Kubernetes' own schemas, and the commands as they stand there."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from understudy.store import Store
from understudy.store.address import StoreUrl

from support import UNDERSTUDY, require, understudy, wait_for
from support.workers import check, enqueue, started

RECIPES = Path(__file__).parents[2] / "recipes" / "workers"
PYTHON = os.environ.get("UNDERSTUDY_KUBERNETES_PYTHON", "")
KUBERNETES = "1.33"

# Prints what each document breaks of the schema; strict: an unknown key is an error too.
VALIDATE = """
import json, sys
from kubernetes_validate import ValidationError, validate
for document in json.load(sys.stdin):
    try:
        validate(document, sys.argv[1], strict=True)
    except ValidationError as error:
        print(document["kind"], list(error.path), error.message)
"""


def manifests() -> list[dict[str, Any]]:
    """What is in the manifests; of what Kubernetes itself does not have, a pod for each template."""
    (deployment,) = yaml.safe_load_all((RECIPES / "deployment.yaml").read_text())
    (sandbox,) = yaml.safe_load_all((RECIPES / "sandbox-pod.yaml").read_text())
    return [deployment, {**sandbox, "metadata": {**sandbox["metadata"], "name": "one"}}, *ray_pods()]


def ray_pods() -> list[dict[str, Any]]:
    (cluster,) = yaml.safe_load_all((RECIPES / "raycluster.yaml").read_text())
    groups = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    assert len(groups) == 2
    return [{"apiVersion": "v1", "kind": "Pod", "metadata": {}, **group["template"]} for group in groups]


def broken(documents: list[dict[str, Any]]) -> str:
    """What is wrong with them, a line each."""
    done = subprocess.run(
        [PYTHON, "-c", VALIDATE, KUBERNETES],
        input=json.dumps(documents),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


@pytest.mark.services
def test_manifests_are_what_kubernetes_takes() -> None:
    require([] if PYTHON else ["UNDERSTUDY_KUBERNETES_PYTHON names no Python with kubernetes-validate"])
    assert broken(manifests()) == ""
    misspelt = ray_pods()
    misspelt[0]["spec"]["containers"][0]["imagee"] = "x"
    assert "imagee" in broken(misspelt)


def commands() -> Iterator[list[str]]:
    """Every command of ours in the recipes, with its comments' continuation lines joined."""
    for path in sorted(RECIPES.iterdir()):
        text = re.sub(r"\n#\s+--", " --", path.read_text())
        for line in text.splitlines():
            if match := re.search(r"understudy ((?:worker|run) .*--.*)", line):
                yield re.findall(r"[\w-]+", match[1])[:1] + re.findall(r"--[\w-]+", match[1])
    (deployment,) = yaml.safe_load_all((RECIPES / "deployment.yaml").read_text())
    yield deployment["spec"]["template"]["spec"]["containers"][0]["command"][1:]


def test_their_commands_have_the_options_that_they_give() -> None:
    subcommands: list[str] = []
    for command in commands():
        subcommands.append(command[0])
        help_text = understudy(command[0], "--help", env={"COLUMNS": "200"}).stdout
        for option in (word.partition("=")[0] for word in command if word.startswith("--")):
            assert re.search(rf"(?<![\w-]){option}(?![\w-])", help_text), option
    assert set(subcommands) == {"run", "worker"} and len(subcommands) >= 4


def unit() -> str:
    """The command of the unit, for a shell."""
    text = (RECIPES / "understudy-worker.service").read_text()
    match = re.search(r"^ExecStart=/opt/understudy/bin/(.*)$", text, re.MULTILINE)
    assert match
    return f"exec {match[1]}"


@pytest.mark.services
@pytest.mark.e2e
@pytest.mark.parametrize("script", [(RECIPES / "worker.sbatch").read_text(), unit()], ids=["slurm", "systemd"])
def test_slurm_and_systemd_start_workers_that_end_when_they_are_told(
    tmp_path: Path, postgresql_store: StoreUrl, script: str
) -> None:
    assert enqueue(tmp_path, postgresql_store, "--engine", "detached", samples=1).returncode == 0
    environment = {
        "PATH": f"{UNDERSTUDY.parent}:{os.environ['PATH']}",
        "STORE": postgresql_store.secret_url,
        "CAPACITY": "2",
        "SLURM_CPUS_PER_TASK": "1",
    }

    def ended() -> bool:
        with Store.open(postgresql_store, create=False) as store:
            return all(rollout.status == "succeeded" for rollout in store.runs.rollouts())

    set_up = (f"{name}={value}" for name, value in environment.items())
    with started("/usr/bin/env", *set_up, "bash", "-c", script) as worker:
        if "--stop-when-idle" not in script:
            wait_for(ended, worker)
            worker.send_signal(signal.SIGTERM)
        _, stderr = worker.communicate(timeout=100)
    assert worker.returncode == 0, stderr
    assert check(tmp_path, postgresql_store, 4) == {"succeeded": 4}


def test_the_unit_is_what_systemd_takes(tmp_path: Path) -> None:
    if (verify := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    path = tmp_path / "understudy-worker.service"
    text = (RECIPES / "understudy-worker.service").read_text()
    path.write_text(
        text.replace("/opt/understudy/bin/understudy", str(UNDERSTUDY)).replace("User=understudy", "User=root")
    )
    done = subprocess.run([verify, "verify", path], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def dockerfile() -> list[str]:
    """The instructions of the Dockerfile."""
    text = re.sub(r"\\\n\s*", " ", (RECIPES / "Dockerfile").read_text())
    return [line for line in text.splitlines() if line and not line.startswith("#")]


@pytest.mark.services
@pytest.mark.e2e
@pytest.mark.timeout(600)
def test_the_image_is_built_of_the_checkout(tmp_path: Path) -> None:
    """Its base is not here: what it copies is put where it copies it, and its pip runs in an empty environment."""
    root = RECIPES.parents[1]
    sent = [line[1:] for line in (root / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copies = [line.split()[1:] for line in dockerfile() if line.startswith("COPY")]
    for *sources, target in copies:
        directory = tmp_path / target.strip("/")
        directory.mkdir(parents=True, exist_ok=True)
        for source in sources:
            assert source.strip("/") in sent, f".dockerignore does not send {source}"
            if source.endswith("/"):
                shutil.copytree(root / source, directory, dirs_exist_ok=True)
            else:
                shutil.copy(root / source, directory)
    (install,) = (line.removeprefix("RUN ") for line in dockerfile() if "pip install" in line)
    pip, _, rest = install.partition(" && ")
    assert rest.endswith("understudy setup")
    venv.create(tmp_path / "venv", with_pip=True)
    locks = [root / "requirements" / name for name in ("base.txt", "node.txt")]
    pins = [line.rstrip("\\ ") for lock in locks for line in lock.read_text().splitlines() if "==" in line]
    (tmp_path / "constraints.txt").write_text("\n".join(pins))
    command = pip.replace("/build", str(tmp_path / "build")).replace("${EXTRA}", "postgres")
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH",)}
    environment |= {
        "PATH": f"{tmp_path / 'venv' / 'bin'}:{os.environ['PATH']}",
        "PIP_CONSTRAINT": str(tmp_path / "constraints.txt"),
    }
    subprocess.run(["sh", "-ec", command], env=environment, check=True, capture_output=True, cwd=tmp_path)
    worker = [tmp_path / "venv" / "bin" / "understudy", "worker", "--help"]
    assert "--capacity" in subprocess.run(worker, capture_output=True, text=True, check=True, cwd=tmp_path).stdout


def test_the_images_of_the_manifests_are_those_that_the_dockerfile_makes() -> None:
    makes = set(re.findall(r"docker build -t (\S+)", (RECIPES / "Dockerfile").read_text()))
    named = {match for path in RECIPES.glob("*.yaml") for match in re.findall(r"image: (\S+)", path.read_text())}
    assert named == makes
