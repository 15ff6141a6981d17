"""Rows of SWE-rebench: of the first version, which are like SWE-bench's classic ones, and of the second."""

from __future__ import annotations

import posixpath
import shlex

from understudy.errors import TaskError
from understudy.tasks.datasets import eval_script, swebench
from understudy.tasks.datasets.images import ImageChoice, named_image
from understudy.tasks.datasets.row import DatasetRow
from understudy.types import SuiteChecks, Task


def task(row: DatasetRow, choice: ImageChoice) -> Task:
    """The task of a row of SWE-rebench. Raises TaskError."""
    config = row.object("install_config")
    key = next((key for key in ("image_name", "docker_image") if row.has(key)), "")
    if not key:
        raise TaskError("image_name: is missing, so there is nothing to run the instance in")
    image = row.text(key)
    parser = config.text("log_parser" if config.has("log_parser") else "parser")
    commands = config.lines("test_cmd")
    if not commands:
        raise TaskError("install_config.test_cmd: is empty; expected at least one command")
    repo, test_patch = row.text("repo"), row.text("test_patch")
    first = "sweb.eval." in image  # an image made as SWE-bench's are
    directory = posixpath.basename(repo)
    if not first and directory in ("", ".", ".."):
        raise TaskError(f"repo: expected OWNER/NAME, found {repo[:80]!r}")
    workdir = swebench.WORKDIR if first else f"/{directory}"
    command = "\n".join(commands)
    if first:
        command = " ".join([command, *map(shlex.quote, swebench.directives(repo, test_patch))])
    checks = SuiteChecks(
        parser=swebench.parser_name(parser, "install_config.log_parser"),
        command=command,
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=swebench.test_files(test_patch),
        test_patch=test_patch,
        activate=swebench.ACTIVATE if first else eval_script.PIPEFAIL,
        install="\n".join(config.lines("install")) if first else "",
    )
    return swebench.make_task(
        row, checks, image=named_image(image, choice), dataset="swe-rebench", workdir=workdir
    )
