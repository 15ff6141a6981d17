"""Rows of SWE-bench-Live: images of their own, and the commands that rebuild, test and print."""

from __future__ import annotations

from understudy.errors import TaskError
from understudy.tasks.datasets import eval_script, swebench
from understudy.tasks.datasets.images import ImageChoice, instance_image, named_image
from understudy.tasks.datasets.row import DatasetRow
from understudy.types import SuiteChecks, Task

_NAMESPACE = "starryzhang"
_PARSERS = {"pytest": "parse_log_pytest"}


def task(row: DatasetRow, choice: ImageChoice) -> Task:
    """The task of a row of SWE-bench-Live. Raises TaskError."""
    name = row.text("log_parser").strip()
    if "\n" in name:
        raise TaskError(
            "log_parser: is a program, which is not run here; expected the name of a parser, as pytest"
        )
    tests, prints = row.lines("test_cmds"), row.lines("print_cmds")
    if not tests:
        raise TaskError("test_cmds: is empty; expected at least one command")
    if prints:  # what is read is printed afterwards; what counts is how the tests ended
        tests = (*tests, "tests_ended=$?", *prints, "(exit $tests_ended)")
    test_patch = row.text("test_patch")
    checks = SuiteChecks(
        parser=_PARSERS.get(name.lower()) or swebench.parser_name(name),
        command="\n".join(tests),
        fail_to_pass=row.texts("FAIL_TO_PASS"),
        pass_to_pass=row.texts("PASS_TO_PASS"),
        files=swebench.test_files(test_patch),
        test_patch=test_patch,
        activate=eval_script.PIPEFAIL,
        install="\n".join(row.lines("rebuild_cmds")),
    )
    instance_id = row.text("instance_id")
    image = row.text("docker_image") if row.has("docker_image") else ""
    if "/sweb.eval.win." in image:
        raise TaskError("docker_image: is for Windows; expected one for Linux")
    return swebench.make_task(
        row,
        checks,
        image=named_image(image, choice) if image else instance_image(instance_id, choice, _NAMESPACE),
        dataset="swe-bench-live",
    )
