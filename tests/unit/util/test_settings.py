"""Settings structs: what was given, what a file says, the defaults, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import pytest
from msgspec import Struct

from understudy.errors import ConfigError
from understudy.util.settings import build, option, options_of, read_toml, require_table


class Adapter(Struct, frozen=True, kw_only=True):
    rank: Annotated[int, option("Of the adapter.", ge=1)] = 16
    layers: Annotated[tuple[str, ...], option("Which.", commas=True)] = ()


class Speed(Struct, frozen=True, kw_only=True):
    rate: Annotated[float, option("How fast.", "--rate", "-r", gt=0)] = 1.0


class Other(Struct, frozen=True, kw_only=True):
    table: ClassVar[str] = "other"
    seed: Annotated[int, option("Of all.")] = 0


class Job(Struct, frozen=True, kw_only=True):
    table: ClassVar[str] = "job"
    samples: Annotated[int, option("How many.", "--samples", "-n", ge=1, le=9)] = 2
    kind: Annotated[Literal["a", "b"] | None, option("Which.")] = None
    output: Annotated[Path | None, option("Where.", "--output-dir")] = None
    plain: Annotated[bool, option("As it is.", "--unredacted", off=True)] = True
    note: str = "no option"
    speed: Speed = Speed()
    other: Other = Other()
    lora: Annotated[Adapter | None, option("Train an adapter.")] = None


def test_every_field_with_an_option_is_one_and_groups_are_flat():
    options = {each.name: (each.table, each.key, each.path) for each in options_of(Job)}
    assert options == {
        "samples": ("job", "samples", ("samples",)),
        "kind": ("job", "kind", ("kind",)),
        "output": ("job", "output_dir", ("output",)),
        "plain": ("job", "plain", ("plain",)),
        "rate": ("job", "rate", ("speed", "rate")),
        "seed": ("other", "seed", ("other", "seed")),
        "lora": ("job", "lora", ("lora",)),
        "lora_rank": ("job", "rank", ("lora", "rank")),
        "lora_layers": ("job", "layers", ("lora", "layers")),
    }


def test_the_command_line_counts_before_the_file_and_that_before_the_default():
    file = {"job": {"samples": 5, "rate": 2, "output_dir": "x"}, "other": {"seed": 7}, "unrelated": {"a": 1}}
    settings = build(Job, {"samples": 3, "rate": None}, file)
    assert (settings.samples, settings.speed.rate, settings.output, settings.other.seed) == (3, 2.0, Path("x"), 7)
    assert build(Job, {}, {}) == Job()


def test_a_group_that_may_be_none_is_there_when_it_is_asked_for():
    assert build(Job, {"lora": True}, {}).lora == Adapter()
    assert build(Job, {"lora_rank": 3}, {}).lora == Adapter(rank=3)
    assert build(Job, {"lora_layers": "q, v"}, {"job": {"lora": {"rank": 4}}}).lora == Adapter(
        rank=4, layers=("q", "v")
    )
    assert build(Job, {"lora": False}, {"job": {"lora": {"rank": 4}}}).lora is None
    with pytest.raises(ConfigError, match="--no-lora and --lora-rank contradict each other"):
        build(Job, {"lora": False, "lora_rank": 3}, {})


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"job": {"sample": 3}}, r"f.toml: \[job\] has an unknown key 'sample'; did you mean 'samples'\?"),
        ({"job": {"zzz": 3}}, r"unknown key 'zzz'; remove it, or give some of: "),
        ({"job": {"note": "x"}}, "unknown key 'note'"),
        ({"job": {"seed": 3}}, "unknown key 'seed'"),
        ({"job": {"lora": {"rnk": 3}}}, r"\[job.lora\] has an unknown key 'rnk'; did you mean 'rank'\?"),
        ({"job": 3}, r"job: expected a table, got 3; write \[job\]"),
        ({"job": {"samples": 0}}, r"\[job\] samples: expected `int` >= 1, got 0; correct this key"),
        (
            {"job": {"lora": {"rank": "x"}}},
            r"^f\.toml: \[job\.lora\] rank: expected `int`, got 'x'; correct this key$",
        ),
        ({"job": {"samples": "many"}}, r"\[job\] samples: expected `int`, got 'many'"),
        ({"job": {"rate": 0}}, r"\[job\] rate: expected `float` > 0"),
        ({"job": {"kind": "c"}}, r"\[job\] kind: invalid enum value 'c'; expected one of a, b"),
        ({"job": {"output_dir": 3}}, r"\[job\] output_dir: expected a path in quotes, got 3; correct"),
    ],
)
def test_what_a_file_has_wrong_is_said_with_its_place(file: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        build(Job, {}, file, "f.toml")


def test_what_an_option_has_wrong_is_said_with_its_flag():
    with pytest.raises(ConfigError, match=r"^--samples: expected `int` >= 1, got 0; correct this option$"):
        build(Job, {"samples": 0}, {})
    with pytest.raises(ConfigError, match=r"^--lora-rank: expected `int`"):
        build(Job, {"lora_rank": "x"}, {})
    with pytest.raises(ConfigError, match=r"^--samples: expected `int` >= 1, got 0; correct this option$"):
        build(Job, {"samples": 0}, {"job": {"samples": 3}}, "f.toml")


def test_a_file_without_the_table_or_without_toml(tmp_path: Path):
    require_table({"other": {}}, Job, "f.toml")
    with pytest.raises(ConfigError, match=r"has no table \[job\] or \[other\], expected at least one, got run;"):
        require_table({"run": {}}, Job, "f.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path / "missing.toml")
    (tmp_path / "bad.toml").write_text("[job\n")
    with pytest.raises(ConfigError, match="invalid TOML"):
        read_toml(tmp_path / "bad.toml")
