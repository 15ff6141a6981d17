"""What a stranger installs: the wheel, in an environment that never saw the checkout."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.services,
    pytest.mark.e2e,
    pytest.mark.usefixtures("claude_code", "isolation"),
    pytest.mark.timeout(900),
]

ROOT = Path(__file__).parents[2]
INTERPRETERS = ("python3.11", "python3.12", "python3.13", "python3.14")


def run(*command: str | Path, cwd: Path) -> str:
    hidden = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE")
    environment = {name: value for name, value in os.environ.items() if name not in hidden}
    done = subprocess.run(
        command, cwd=cwd, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(python: str | Path, *words: str | Path, cwd: Path) -> None:
    """Install by pip, without compiling modules that nothing imports."""
    run(python, "-m", "pip", "install", "-qq", "--no-compile", "--disable-pip-version-check", *words, cwd=cwd)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the source distribution as `pip` would."""
    directory = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", directory, cwd=ROOT)
    (sdist,) = directory.glob("*.tar.gz")
    shutil.unpack_archive(sdist, directory, filter="data")
    run(
        sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", directory, cwd=directory / sdist.name[:-7]
    )
    (wheel,) = directory.glob("*.whl")
    return wheel


def test_the_quick_demo_of_an_installed_wheel_goes_through(wheel: Path, tmp_path: Path):
    environment = tmp_path / "environment"
    venv.create(environment, with_pip=True)
    # The versions of the lock files, whose other packages nobody needs here.
    locks = [ROOT / "requirements" / name for name in ("base.txt", "node.txt")]
    pins = [line.rstrip("\\ ") for lock in locks for line in lock.read_text().splitlines() if "==" in line]
    (tmp_path / "constraints.txt").write_text("\n".join(pins))
    install(environment / "bin" / "python", f"{wheel}[hf,node]", "-c", "constraints.txt", cwd=tmp_path)
    printed = run(environment / "bin" / "understudy", "demo", "--quick", "--tasks", "1", cwd=tmp_path)
    assert "oracle: 2 of 2 solved" in printed
    assert (tmp_path / "runs" / "demo-quick" / "oracle" / "store.db").exists()


def find_interpreter(name: str) -> str | None:
    """The path of an interpreter that starts; pyenv has programs of every name, which refuse most of them."""
    path = shutil.which(name)
    if path is None:
        return None
    candidates = [Path(path), *sorted(Path(path).parents[1].glob(f"versions/*/bin/{name}"))]
    works = (
        each
        for each in candidates
        if not subprocess.run([each, "-c", ""], capture_output=True, check=False).returncode
    )
    return next(map(str, works), None)


@pytest.mark.parametrize("interpreter", INTERPRETERS)
def test_the_wheel_installs_and_answers_on_each_python_that_is_here(wheel: Path, interpreter: str, tmp_path: Path):
    """uv installs here, in a twentieth of pip's time; the quick demo's environment is made by pip."""
    program = find_interpreter(interpreter)
    if program is None:
        pytest.skip(f"there is no {interpreter} on this machine")
    uv = (sys.executable, "-m", "uv", "--quiet")
    run(*uv, "venv", "--python", program, tmp_path / "environment", cwd=tmp_path)
    python = tmp_path / "environment" / "bin" / "python"
    run(*uv, "pip", "install", "--python", python, wheel, cwd=tmp_path)
    assert run(python, "-m", "understudy", "--version", cwd=tmp_path) == "understudy 0.1.0\n"
    assert (
        "datasets"
        in subprocess.run(
            [python, "-m", "understudy", "demo", "--quick"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        ).stderr
    )
