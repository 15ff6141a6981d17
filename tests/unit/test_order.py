"""The order of the tests: the processes that run them begin with the longest modules, and no test is lost."""

from __future__ import annotations

from typing import Any, cast

import pytest

from support.order import longest_first


class Item:
    """What the order needs of a test."""

    def __init__(self, nodeid: str, limit: float | None) -> None:
        self.nodeid, self.config = nodeid, self
        self._limit = limit

    def getini(self, name: str) -> str:
        return {"timeout": "300"}[name]

    def get_closest_marker(self, name: str) -> pytest.Mark | None:
        return None if self._limit is None else getattr(pytest.mark, name)(self._limit).mark


def order(items: list[Item], workers: int) -> list[str]:
    return [item.nodeid for item in longest_first(cast("Any", items), workers)]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_no_test_is_lost_and_the_tests_of_a_module_keep_their_order(workers: int) -> None:
    limits = {3: 900.0, 7: 3600.0, 8: 60.0, 15: 400.0}
    items = [Item(f"m{module}.py::t{test}", limits.get(module)) for module in range(16) for test in range(3)]
    names = order(items, workers)
    assert sorted(names) == sorted(item.nodeid for item in items)
    for module in range(16):
        assert [name for name in names if name.startswith(f"m{module}.py")] == [
            f"m{module}.py::t{test}" for test in range(3)
        ]


def test_each_process_begins_with_a_long_module() -> None:
    items = [
        Item(f"m{number // 4}.py::t{number}", 900.0 if number // 4 in (3, 9) else None) for number in range(40)
    ]
    names = order(items, 2)
    assert [names[at].partition("::")[0] for at in (0, 20)] == ["m3.py", "m9.py"]


def test_a_module_whose_tests_stand_apart_is_run_together_if_it_is_long() -> None:
    items = [Item("a.py::one", None), Item("b.py::one", None), Item("a.py::two", 900.0)]
    assert order(items, 1) == ["a.py::one", "a.py::two", "b.py::one"]
