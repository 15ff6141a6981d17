"""What an export does not hold twice, or at all."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from zlib import crc32

import pytest

from understudy.errors import StoreError, TaskError
from understudy.export.corpus import Corpus, ExportSelection, split
from understudy.export.formats.openai import export
from understudy.export.overlap import Benchmark, NearDuplicates
from understudy.ingest.trace import Trace
from understudy.redact.redactor import Redactor
from understudy.store import Store
from understudy.store.address import parse_location

from support.export import Log, put_sessions

LINES = [f"line {number} of a file that an agent has read today" for number in range(200)]
ROW = {
    "instance_id": "acme__shop-17",
    "repo": "acme/shop",
    "patch": "--- a/x.py\n+++ b/x.py\n@@ -1 +1,4 @@\n-old = 1\n"
    "+total = sum(item.price for item in items)\n+    if total > limit and not force:\n"
    "+        raise LimitExceeded(total, limit)\n",
}


def near(first: list[str], second: list[str]) -> list[str]:
    duplicates = NearDuplicates()
    names, sketch = duplicates.find(first)
    assert names == []
    duplicates.add("first", sketch)
    return duplicates.find(second)[0]


def test_a_copy_with_a_few_other_lines_is_a_near_duplicate_and_other_work_is_not() -> None:
    assert near(["\n".join(LINES)], ["\n".join(LINES[:190]), "a line that is in the copy alone, and long"]) == [
        "first"
    ]
    assert near(LINES, [f"{line}, by another agent" for line in LINES]) == []
    assert near(LINES, LINES[:100] + [f"{line}, and then" for line in LINES[100:]]) == []
    assert near(LINES[:5], LINES[:5]) == []  # too short to tell


@pytest.mark.parametrize("share", [2, 4, 8])
def test_a_log_before_it_grew_is_a_near_duplicate_whichever_is_read_first(share: int) -> None:
    whole = [f"{number}: what a tool printed in this session, or the model wrote" for number in range(4000)]
    part = whole[: len(whole) // share]
    assert near(whole, part) == ["first"] and near(part, whole) == ["first"]
    half_new = part[::2] + [f"{line}, elsewhere" for line in part[1::2]]
    assert near(whole, half_new) == near(half_new, whole) == []


def near_by_definition(one: set[int], other: set[int], threshold: float) -> bool:
    """Of the smallest hashes of both, or of what both know of one of them, the share that both have."""
    first, second = set(sorted(one)[:256]), set(sorted(other)[:256])
    smallest = set(sorted(first | second)[:256])
    if len(first & second & smallest) >= threshold * len(smallest):
        return True
    reach = min(max(some) if len(some) == 256 else 1 << 32 for some in (first, second))
    parts = [{key for key in some if key <= reach} for some in (first, second)]
    return any(len(part) >= 16 and len(part & first & second) >= threshold * len(part) for part in parts)


@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.0])
def test_near_duplicates_are_those_of_the_definition_whatever_the_sizes(threshold: float) -> None:
    dice = random.Random(7)
    duplicates, earlier, counts = NearDuplicates(threshold), list[list[str]](), Counter[bool]()
    sets: list[set[int]] = []
    smallest: list[set[int]] = []
    for number in range(150):
        lines = [f"{number}: line {dice.random()} of a file" for _ in range(dice.choice((16, 40, 300, 900)))]
        if earlier:
            base = dice.choice(earlier)
            share = dice.choice((0.25, 0.8, 0.97, 1))
            lines = dice.sample(base, round(len(base) * share)) + lines[: dice.choice((0, 5, 900))]
        earlier.append(lines)
        names, sketch = duplicates.find(lines)
        duplicates.add(str(number), sketch)
        sets.append({crc32(line.encode()) for line in lines})
        smallest.append(set(sorted(sets[-1])[:64]))
        for other, some in enumerate(sets[:-1]):
            # Only sessions that share one of their smallest hashes are compared.
            if len(sets[-1]) < 16 or not smallest[-1] & smallest[other]:
                continue
            expected = len(some) >= 16 and near_by_definition(sets[-1], some, threshold)
            assert (str(other) in names) is expected
            counts[expected] += 1
    assert min(counts[True], counts[False]) > 100


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("acme__shop-17", "", "task of the benchmark"),
        ("/home/me/acme__shop", "", "repository of the benchmark"),
        ("github.com/Acme/shop", "", "repository of the benchmark"),
        ("mine", "please solve acme__shop-17 now", "task of the benchmark"),
        ("mine", ROW["patch"], "gold patch of the benchmark"),
        (
            "mine",
            "\n".join(f"  {at}→{line[1:]}" for at, line in enumerate(ROW["patch"].split("\n"))),
            "gold patch",
        ),
        ("mine", "    if total > limit and not force:\nother", None),
        ("acme__shop-171", "acme/shopping", None),
    ],
)
def test_benchmark_overlap_is_detected_by_id_repository_and_patch(
    name: str, text: str, reason: str | None
) -> None:
    overlap = Benchmark([ROW]).overlap(name, [text])
    assert overlap is None if reason is None else overlap is not None and overlap.startswith(reason)


def stored(tmp_path: Path, projects: list[str], body: str) -> Store:
    """A store with the same conversation in each of the projects."""
    traces: list[Trace] = []
    for number, project in enumerate(projects):
        log = Log(f"s{number}", project=project)
        log.answer(log.user(-1, body), "Done.")
        traces.append(log.trace)
    put_sessions(tmp_path / "store", traces)
    return Store.open(tmp_path / "store", create=False)


def groups(store: Store, **choices: object) -> tuple[set[str], dict[str, int]]:
    corpus = Corpus(
        store, ExportSelection(origins=("sessions",), **choices), Redactor(b"k" * 32, betterleaks=False)
    )
    return {example.group for example in corpus.examples()}, dict(corpus.counts.left_out)


def test_splits_share_no_near_duplicates_and_copies_are_left_out_when_asked(tmp_path: Path) -> None:
    names = [f"/srv/project{number}" for number in range(40)]
    train = [name for name in names if split(name) == "train"][:2]
    [test] = [name for name in names if split(name) == "test"][:1]
    with stored(tmp_path, [*train, test], "\n".join(LINES)) as store:
        remaining, left_out = groups(store)
        assert {split(name) for name in remaining} in ({"train"}, {"test"})
        assert sum(left_out.values()) == 3 - len(remaining)
        assert set(left_out) == {"near-duplicate of a session in the other split"}
        assert groups(store, test_share=0.0) == ({*train, test}, {})
        remaining, left_out = groups(store, test_share=0.0, drop_near_duplicates=True)
        assert len(remaining) == 1 and left_out == {"near-duplicate of another session": 2}


def test_an_export_holds_nothing_of_excluded_tasks(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    with stored(tmp_path, ["/srv/mine"], "please look at acme__shop-17") as store:
        assert groups(store) == ({"/srv/mine"}, {})
        assert groups(store, exclude_tasks=rows) == (set(), {"task of the benchmark": 1})
        with pytest.raises(TaskError, match="nothing"):
            groups(store, exclude_tasks=tmp_path / "nothing.jsonl")


def test_the_manifest_and_card_name_the_file_of_excluded_tasks_without_its_directory(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    with stored(tmp_path, ["/srv/mine"], "please look at the shop") as store:
        selection = ExportSelection(origins=("sessions",), exclude_tasks=rows)
        export(Corpus(store, selection, Redactor(b"k" * 32, betterleaks=False)), tmp_path / "out")
    assert (
        json.loads((tmp_path / "out" / "understudy.json").read_text())["selection"]["exclude_tasks"] == rows.name
    )
    card = (tmp_path / "out" / "README.md").read_text()
    assert "| excluded tasks | rows.jsonl |" in card and str(tmp_path) not in card


def test_sessions_of_other_stores_count_as_exported_before(tmp_path: Path) -> None:
    names = [f"/srv/project{number}" for number in range(40)]
    train, other = [name for name in names if split(name) == "train"][:2]
    test = next(name for name in names if split(name) == "test")
    stored(tmp_path / "elsewhere", [train], "\n".join(LINES)).close()
    elsewhere = {"apart_from": (tmp_path / "elsewhere" / "store",)}
    with stored(tmp_path / "here", [other, test], "\n".join(LINES)) as store:
        assert groups(store, **elsewhere) == ({other}, {"near-duplicate of a session in the other split": 1})
        remaining, left_out = groups(store, drop_near_duplicates=True, **elsewhere)
        assert (remaining, left_out) == (set(), {"near-duplicate of another session": 2})
        with pytest.raises(StoreError):
            groups(store, apart_from=(tmp_path / "nothing",))
        with pytest.raises(StoreError) as error:
            groups(store, apart_from=(parse_location("postgresql://me:geheim@127.0.0.1:1/db"),))
        assert "geheim" not in str(error.value)
