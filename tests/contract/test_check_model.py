"""`understudy check-model` against servers that can do a run's work, and servers that cannot."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from understudy.errors import BackendError
from understudy.gateway.check_model import ModelCheck, ModelChecker
from understudy.model.process import start_server

from support import optional, understudy
from support.model_server import serve_weights
from support.tiny_model import make_model

optional("torch")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("checked") / "model")


async def checked(model: Path, **options: Any) -> dict[str, ModelCheck]:
    async with serve_weights(model, **options) as url:
        return {check.name: check for check in await ModelChecker(f"{url}/v1").run()}


async def test_a_server_with_weights_passes_and_its_tool_format_is_told(model: Path):
    checks = await checked(model)
    assert all(check.ok for check in checks.values()), [each for each in checks.values() if not each.ok]
    assert "hermes" in checks["round trip of a tool call"].seen
    assert checks["context"].seen == "32768 tokens"
    assert set(checks) >= {"exact token ids", "logprobs", "prompt", "logprobs after temperature", "thinking"}


async def test_a_template_without_tools_and_a_short_context_are_said_with_a_remedy(model: Path, tmp_path: Path):
    other = Path(shutil.copytree(model, tmp_path / "other"))
    (other / "chat_template.jinja").write_text(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    checks = await checked(other, max_model_len=2_000)
    for name, remedy in (
        ("template with tools", "--chat-template"),
        ("round trip of a tool call", "--tool-format"),
        ("context", "--max-model-len"),
    ):
        assert checks[name].ok is False and remedy in checks[name].remedy
    assert not checks["context"].required and checks["exact token ids"].ok


async def test_a_template_that_opens_thinking_is_told(model: Path, tmp_path: Path):
    other = Path(shutil.copytree(model, tmp_path / "thinking"))
    template = other / "chat_template.jinja"
    text = template.read_text()
    assert text.count("{{- '<|im_start|>assistant\\n' }}\n{%- endif %}") == 1
    template.write_text(
        text.replace(
            "{{- '<|im_start|>assistant\\n' }}\n{%- endif %}",
            "{{- '<|im_start|>assistant\\n<think>\\n' }}\n{%- endif %}",
        )
    )
    checks = await checked(other)
    assert checks["thinking"].seen == "the prompt opens a thinking block"
    assert checks["round trip of a tool call"].ok


async def test_a_server_that_tells_no_logprobs_of_prompts_is_no_teacher():
    async with start_server("idle") as server:
        checks = {check.name: check for check in await ModelChecker(server.url).run()}
    teacher = checks["logprobs of a prompt (for teachers)"]
    assert teacher.ok is False and not teacher.required
    assert checks["exact token ids"].ok and checks["template with tools"].ok


async def test_a_name_that_the_server_has_not_and_a_server_that_is_not_there():
    async with start_server("idle") as server:
        (check,) = await ModelChecker(server.url, model="other").run()
    assert not check.ok and "understudy-embedded" in check.seen
    with pytest.raises(BackendError):
        await ModelChecker("http://127.0.0.1:9").run()


def test_the_command_says_what_is_missing():
    made = understudy("check-model", "http://127.0.0.1:9", "--json")
    assert made.returncode != 0 and "127.0.0.1:9" in made.stderr
    assert understudy("check-model", "127.0.0.1:9").returncode == 2
    assert "URL" in understudy("check-model", "--help").stdout
    assert json.loads(understudy("models", "list", "--json").stdout)["available"] is not None
