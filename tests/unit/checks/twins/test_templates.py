"""Templates of versions: what is drawn from them is what would have been written."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from understudy.checks.base import GradingOptions, OtherInputs, TwinTest
from understudy.checks.input_changes import InputChanges
from understudy.checks.twins.other_inputs import input_versions
from understudy.checks.twins.run import write_versions
from understudy.checks.twins.templates import draw_versions, load_templates, make_templates, version_of
from understudy.checks.twins.test_ids import DecidingTests

SOURCE = '''\
from package import Point, area, names


def test_points():
    first, second = area(1), area(2)
    assert first == Point(3, 4)
    assert second == Point("north \x0c and south", 5)
    for number in range(3):
        assert area(number) == Point(number, f"{number}\\u2028" "east"), "one of three"
    if first:
        assert names(first) == Point(
            7,
            """west
of here""",
        )


def test_names():
    assert names(1) == ["seventeen", "eighteen"]
    assert area(9) == Point(19, 20) and names(4) == Point(21, 22)
'''
OTHER = "from package import area, Point\n\ndef test_other():\n    assert area(5) == Point(31, 32)\n"
FILES = {"test_a.py": SOURCE, "tests/test_b.py": OTHER, "data.py": "not Python (\n", "notes.txt": "text\n"}
TESTS = DecidingTests(
    FILES, ("test_a.py::test_points", "tests/test_b.py::test_other"), ("test_a.py::test_names",), {}
)


def options_of(**options: object) -> GradingOptions:
    sites = write_versions(TESTS, GradingOptions(), lambda _: False).sites
    twins = {"test_a.py::test_points": TwinTest("test_a.py::test_points", dict.fromkeys(sites, "[]"))}
    return replace(GradingOptions(twins=twins, twin_seed=5), **options)


@given(st.sets(st.integers(0, 40)), st.booleans())
def test_a_version_is_what_would_have_been_written(chosen: set[int], apart: bool) -> None:
    options = options_of(twin_apart=apart)
    templates = make_templates(TESTS, options)
    assert len(templates.changeable) >= 6
    changed = {number for index, number in enumerate(templates.changeable) if index in chosen}
    for template in templates.templates:
        assert template.parts is not None
        assert apart or set(template.parts) == {"test_a.py", "tests/test_b.py"}
        written = write_versions(TESTS, options, changed.__contains__, emptied=template.true.emptied)
        assert version_of(template, TESTS, options, changed) == written
        alone = replace(template, parts=None)
        assert version_of(alone, TESTS, options, changed) == written


def test_what_is_fixed_or_was_not_observed_is_never_changed() -> None:
    every = make_templates(TESTS, options_of()).changeable
    fixed = make_templates(TESTS, options_of(twin_fixed=every[:2]))
    assert fixed.changeable == every[2:]
    twins = {"test_a.py::test_points": TwinTest("test_a.py::test_points", dict.fromkeys(every[:1], "[]"))}
    assert make_templates(TESTS, options_of(twins=twins)).changeable == every[:1]


def test_each_expectation_is_changed_in_half_of_the_versions() -> None:
    options = options_of()
    templates = make_templates(TESTS, options)
    versions = draw_versions(TESTS, options, templates)
    assert len(versions) == 2
    for number in templates.changeable:
        assert sorted(version.sites[number].changed for version in versions) == [False, True]
    few = options_of(twin_fixed=templates.changeable[3:])
    assert len(draw_versions(TESTS, few, make_templates(TESTS, few))) == 4
    none = options_of(twin_fixed=templates.changeable)
    assert len(draw_versions(TESTS, none, make_templates(TESTS, none))) == 1


def test_templates_are_read_again_and_made_anew_when_they_cannot_be(tmp_path: Path) -> None:
    options, directory = options_of(), tmp_path / "versions"
    made = make_templates(TESTS, options)
    assert load_templates(TESTS, options, directory, "1") == made
    (path,) = directory.iterdir()
    written = path.read_bytes()
    first = load_templates(TESTS, options, directory, "1")
    assert first == made and first is load_templates(TESTS, options, directory, "1")
    path.unlink()
    assert load_templates(TESTS, options, directory, "1") == made and path.read_bytes() == written
    load_templates(TESTS, options, directory, "2")
    load_templates(TESTS, replace(options, twin_seed=6), directory, "1")
    assert len(list(directory.iterdir())) == 3


def test_versions_with_other_inputs_are_among_the_templates(tmp_path: Path) -> None:
    other = [options_of(twin_inputs=(OtherInputs(InputChanges({"9": each}), {}, 1.0),)) for each in ("7", "8")]
    for number, options in enumerate(other, 1):
        templates = load_templates(TESTS, options, tmp_path, "1")
        assert list(templates.inputs) == input_versions(TESTS, options)
        assert f"area({6 + number})" in templates.inputs[0].files["test_a.py"]
    assert make_templates(TESTS, options_of()).inputs == ()


def test_a_broken_file_is_replaced(tmp_path: Path) -> None:
    options = options_of()
    load_templates(TESTS, options, tmp_path, "1")
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"broken")
    assert load_templates(TESTS, options, tmp_path, "1") == make_templates(TESTS, options)
    assert path.read_bytes() != b"broken"
