"""The file of teachers: what stands in it, and how it is said what is wrong with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from understudy.errors import ConfigError
from understudy.replay.teachers import read_teachers

GPT = "[teachers.x]\nbackend = 'openai'\nmodel = 'm'\n"
DOCS = Path(__file__).parents[3] / "docs" / "replay.md"


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "teachers.toml"
    file.write_text(text)
    return file


def test_the_file_in_the_docs(tmp_path: Path):
    (text,) = re.findall(r"<!-- docs-test: teachers -->\n```toml\n(.*?)```", DOCS.read_text(), re.DOTALL)
    read = read_teachers(written(tmp_path, text))
    assert [(each.name, each.family) for each in read.teachers] == [
        ("gpt", "gpt"),
        ("deepseek", "deepseek"),
        ("ours", "qwen"),
    ]
    assert all(each.price is not None for each in read.teachers)
    assert read.judge is not None
    assert read.judge.family == "claude"
    assert all(not each.model.resend for each in read.teachers)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "teachers: there are none; add at least one table"),
        ("[teacher.x]\nmodel = 'm'\n", "teacher: unknown key"),
        ("[teachers.x]\nmodel = 'm'\n", "teachers.x: Object missing required field `backend`"),
        (
            "[teachers.x]\nbackend = 'oracle'\nmodel = 'm'\n",
            "teachers.x.backend: Invalid enum value 'oracle'; expected",
        ),
        (GPT + "key = 'sk'\n", "teachers.x.key: unknown key"),
        ("[teachers.x]\nbackend = 'openai'\nmodel = ''\n", "teachers.x.model is empty"),
        ("[teachers.x]\nbackend = 'openai'\nmodel = 1\n", "teachers.x.model: Expected `str`, got `int` (it is 1)"),
        (
            "[teachers.x]\nbackend = 'vllm'\nmodel = 'm'\n",
            "teachers.x.base_url: missing; the vllm backend needs one",
        ),
        (
            GPT + "base_url = 'ftp://x'\n",
            "teachers.x.base_url: invalid address 'ftp://x'; give one like http://host:port/v1",
        ),
        (
            GPT + "max_tokens = 0\n",
            "teachers.x.max_tokens: Expected `int` >= 1 (it is 0); correct this key",
        ),
        (
            GPT + "price = { input = 1 }\n",
            "teachers.x.price: Object missing",
        ),
        (
            GPT + "price = { input = -1, output = 1 }\n",
            "teachers.x.price.input: invalid price -1",
        ),
        (
            GPT + "price = { input = 1, output = nan }\n",
            "teachers.x.price.output: invalid price nan",
        ),
        (
            GPT + "price = { in = 1, output = 1 }\n",
            "teachers.x.price.in: unknown key; expected one of input, output",
        ),
        ("[teachers.'a b']\nbackend = 'openai'\nmodel = 'm'\n", "teachers.a b: expected a name"),
        (
            "[teachers.judge]\nbackend = 'openai'\nmodel = 'm'\n[judge]\nbackend = 'openai'\nmodel = 'm'\n",
            "teachers.judge: this name is reserved for the table [judge]",
        ),
        ("teachers = 3\n", "teachers: there are none"),
        ("[teachers]\nx = 3\n", "teachers.x: Expected `object`"),
        ("][", "is not valid TOML"),
    ],
)
def test_what_is_wrong_is_said_with_its_key(tmp_path: Path, text: str, expected: str):
    file = written(tmp_path, text)
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        read_teachers(file)
    assert str(file) in str(caught.value)


def test_prices_do_not_make_it_another_teacher_and_sampling_does(tmp_path: Path):
    head = "[teachers.x]\nbackend = 'openai'\nmodel = 'gpt-5'\n"

    def identity(more: str) -> str:
        return read_teachers(written(tmp_path, head + more)).teachers[0].identity

    assert identity("") == identity("price = { input = 9, output = 9 }\nconcurrency = 2\nfamily = 'x'\n")
    assert len({identity(""), identity("temperature = 0.5\n"), identity("max_tokens = 9\n")}) == 3
