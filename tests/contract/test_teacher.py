"""Teachers over real HTTP: the embedded server, SGLang's form, other vocabularies, and the whole command."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec import structs

from understudy.errors import BackendError, ConfigError
from understudy.model.process import start_server
from understudy.train.metrics import read_metrics
from understudy.train.options import GRPOOptions
from understudy.train.teacher import (
    LONGER_THAN_CONTEXT,
    SGLangTeacherServer,
    TeacherServer,
    TeacherSettings,
    open_teacher,
)
from understudy.train.weights import load_model

from fakes.listen import listen
from support import lazily, optional, understudy
from support.model_server import serve_weights
from support.tiny_model import make_model
from support.train import make_groups, put_training_run

torch: Any = optional("torch")
[token_logprobs] = lazily("understudy.train.algorithms.forward", "token_logprobs")

Handler = Callable[[dict[str, Any]], Any]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("distill")
    make_model(directory / "student")
    make_model(directory / "teacher", seed=1)
    put_training_run(directory / "run", directory / "student", sampling={"temperature": 1.0})
    return directory


async def test_teacher_and_student_of_one_model_agree_on_every_token(place: Path):
    groups = make_groups(groups=2, rollouts=2, prompt=700)
    left_out = Counter[str]()
    async with serve_weights(place / "student") as url:
        teacher = TeacherServer(f"{url}/v1/")
        await teacher.open()
        await teacher.check_vocabulary(place / "student")
        scored = await teacher.with_logprobs(groups, left_out)
        await teacher.close()
    model = load_model(place / "student", GRPOOptions())
    sequences = [each for group in scored for rollout in group.rollouts for each in rollout.sequences]
    with torch.no_grad():
        ours = token_logprobs(model, sequences)
    assert not left_out and len(sequences) == 8
    for row, sequence in zip(ours.tolist(), sequences, strict=True):
        assert sequence.teacher_logprobs is not None
        pairs = zip(row, sequence.teacher_logprobs, strict=False)
        assert max(abs(one - other) for one, other in pairs) < 1e-3
        assert sum(value != 0 for value in sequence.teacher_logprobs) == sum(sequence.loss_mask)


async def test_a_sequence_that_the_teacher_cannot_read_is_left_out_and_counted(place: Path):
    left_out = Counter[str]()
    async with serve_weights(place / "teacher", max_model_len=40) as url:
        teacher = TeacherServer(url)
        await teacher.open()
        short, long = make_groups(groups=1, rollouts=1)[0], make_groups(groups=1, rollouts=1, prompt=60)[0]
        scored = await teacher.with_logprobs([short, long], left_out)
        await teacher.close()
    assert left_out == {LONGER_THAN_CONTEXT: 2}
    assert [rollout.sequences[0].teacher_logprobs is None for group in scored for rollout in group.rollouts] == [
        False,
        True,
    ]


async def test_a_scripted_policy_is_no_teacher():
    async with start_server("idle") as server:
        teacher = TeacherServer(server.url)
        await teacher.open()
        with pytest.raises(BackendError, match=r"/v1/completions: status 400.*scripted policies"):
            await teacher.logprobs([1, 2, 3])
        await teacher.close()


def sglang(generate: Handler) -> web.Application:
    """SGLang's models and /generate, the latter as `generate` answers a body."""

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "big", "max_model_len": 4096}]})

    async def generated(request: web.Request) -> web.Response:
        return web.json_response(generate(await request.json()))

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.post("/generate", generated)])
    return app


def entries(body: dict[str, Any]) -> list[list[Any]]:
    return [[None if not at else -0.25 * at, id_, None] for at, id_ in enumerate(body["input_ids"])]


async def test_sglang_tells_logprobs_of_its_input():
    def answer(body: dict[str, Any]) -> Any:
        assert body["return_logprob"] is True and body["logprob_start_len"] == 0
        return {"text": "", "meta_info": {"input_token_logprobs": entries(body)}}

    runner, url = await listen(sglang(answer))
    teacher = SGLangTeacherServer(url)
    await teacher.open()
    assert await teacher.logprobs([5, 6, 7]) == [0.0, -0.25, -0.5]
    await teacher.close()
    await runner.cleanup()


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda _: None, "returned no logprobs of a prompt"),
        (lambda logprobs: logprobs[:-1], "expected finite logprobs for the second and later of 3 tokens, got 2"),
        (lambda logprobs: [*logprobs[:-1], [-1.0, 9, None]], "or logprobs of other tokens"),
        (lambda logprobs: [*logprobs[:-1], [None, 7, None]], "expected finite logprobs"),
    ],
    ids=["none", "fewer", "others", "null"],
)
async def test_an_answer_that_is_not_about_these_tokens_is_refused(change: Callable[[Any], Any], expected: str):
    runner, url = await listen(sglang(lambda body: {"meta_info": {"input_token_logprobs": change(entries(body))}}))
    teacher = SGLangTeacherServer(url)
    await teacher.open()
    with pytest.raises(BackendError, match=expected):
        await teacher.logprobs([5, 6, 7])
    await teacher.close()
    await runner.cleanup()


async def test_a_server_without_logprobs_of_prompts_is_refused_when_it_is_opened(place: Path):
    runner, url = await listen(sglang(lambda _: {"meta_info": {}}))
    settings = TeacherSettings(teacher=url, teacher_backend="sglang", teacher_tokenizer=place / "student")
    with pytest.raises(BackendError, match="returned no logprobs of a prompt"):
        async with open_teacher(settings, place / "student"):
            pass
    await runner.cleanup()


async def test_a_server_that_does_not_tokenize_needs_a_tokenizer_beside_it(place: Path):
    runner, url = await listen(sglang(lambda _: {}))
    teacher = SGLangTeacherServer(url)
    await teacher.open()
    with pytest.raises(ConfigError, match=r"has no endpoint to compare .*--teacher-tokenizer"):
        await teacher.check_vocabulary(place / "student")
    await teacher.check_vocabulary(place / "student", place / "teacher")
    await teacher.close()
    await runner.cleanup()


def swapped(student: Path, directory: Path) -> Path:
    """The student's model with two tokens of its vocabulary in each other's place."""
    shutil.copytree(student, directory)
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    vocabulary = content["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    path.write_text(json.dumps(content))
    return directory


async def test_a_teacher_with_another_vocabulary_is_refused(place: Path, tmp_path: Path):
    other = swapped(place / "student", tmp_path / "other")
    async with serve_weights(other) as url:
        teacher = TeacherServer(url)
        await teacher.open()
        with pytest.raises(ConfigError, match=r"has another vocabulary than .*imitate them: understudy train sft"):
            await teacher.check_vocabulary(place / "student")
        await teacher.close()


def test_distilling_a_run_moves_the_student(place: Path, tmp_path: Path):
    made = understudy(
        *("train", "distill", str(place / "student"), "--teacher", str(place / "teacher")),
        *("--from", str(place / "run"), "-o", str(tmp_path / "out"), "--learning-rate", "0.01", "--track", "none"),
        *("--groups-per-update", "1", "--json"),
        env={"OMP_NUM_THREADS": "1"},
    )
    assert made.returncode == 0, made.stderr
    assert json.loads(made.stdout)["updated"] == 2
    lines = read_metrics(tmp_path / "out" / "training" / "metrics.jsonl")
    assert len(lines) == 2 and all(abs(line["teacher_kl"]) > 1e-4 for line in lines)


async def test_a_teacher_that_cannot_be_asked_is_an_error_and_no_model_is_written(place: Path, tmp_path: Path):
    async with serve_weights(swapped(place / "student", tmp_path / "other")) as url:
        made = await asyncio.to_thread(
            understudy,
            *(
                "train",
                "distill",
                str(place / "student"),
                "--from",
                str(place / "run"),
                "-o",
                str(tmp_path / "out"),
            ),
            *("--teacher", url),
        )
    assert made.returncode == 2 and "has another vocabulary" in made.stderr
    assert not (tmp_path / "out" / "config.json").exists()
    completed = structs.replace(TeacherSettings(), teacher="http://ann:pw@127.0.0.1:1")
    with pytest.raises(ConfigError, match="contains a user name or password"):
        completed.options(GRPOOptions())
