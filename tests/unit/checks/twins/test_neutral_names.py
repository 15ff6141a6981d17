"""Names of tests in versions: neutral, where the file does not need its own."""

from __future__ import annotations

from understudy.checks.twins.neutral_names import by_original_names
from understudy.checks.twins.versions import write_version

SOURCE = """\
from core import test_imported, is_empty

def test_empty_is_false(tmp_path):
    assert is_empty([1]) is False

def test_a_is_3():
    assert helper.test_kept == 3

def test_kept():
    pass

def test_in_text():
    assert getattr(helper, "test_in_text")

class TestAnswers42:
    def test_yes(self):
        assert TestAnswers42.value == 42

class Answers(TestAnswers42):
    class Inner:
        def test_no(self):
            global test_a_is_3

test_a_is_3.slow = True
"""


def test_tests_are_renamed_in_their_order_except_where_the_name_is_used_otherwise():
    version = write_version(SOURCE, neutral=True)
    assert version.names == {
        "test_0000": "test_a_is_3",
        "test_0001": "test_empty_is_false",
        "test_0004": "test_no",
        "test_0005": "test_yes",
        "Case0000": "Answers",
        "Case0001": "Inner",
        "Test0002": "TestAnswers42",
    }
    for old in version.names.values():
        assert old not in version.source
    assert "global test_0000" in version.source and "test_0000.slow" in version.source
    assert "test_kept" in version.source and "test_in_text" in version.source
    assert "test_empty_is_false" in write_version(SOURCE).source


def test_results_of_a_neutral_version_are_mapped_to_the_original_test_names():
    names = {"t.py": write_version(SOURCE, neutral=True).names}
    nodes = ["t.py::test_0001[a-test_0000]", "t.py::Case0000::Case0001::test_0004", "other.py::test_0001", "t.py"]
    assert list(by_original_names(dict.fromkeys(nodes, 0), names)) == [
        "t.py::test_empty_is_false[a-test_0000]",
        "t.py::Answers::Inner::test_no",
        "other.py::test_0001",
        "t.py",
    ]
