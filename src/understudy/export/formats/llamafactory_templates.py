"""What LLaMA-Factory's chat templates do to a row that can harm it: the words that they look for in answers.

Read from LLaMA-Factory 0.9.5. A template that is not in the tables has the words of most.
"""

from __future__ import annotations

from msgspec import Struct

_THOUGHT = ("<think>\n", "\n</think>\n\n")
_CALL = ("<tool_call>", "</tool_call>")

_THOUGHTS = {
    "aeva": ("<think>", "</think>"),
    "gemma4": ("<|channel>thought\n", "<channel|>"),
    "gemma4n": ("<|channel>thought\n", "<channel|>"),
    "glm4_7": ("<think>", "</think>"),
    "gpt_oss": ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    "hy3": ("<think>", "</think>"),
    "kimi_vl": ("◁think▷", "◁/think▷"),
    "mimo_v2": ("<think>", "</think>"),
    "seed_oss": ("<seed:think>", "</seed:think>"),
}
_CALLS = {
    "lfm2": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "lfm2_vl": ("<|tool_call_start|>", "<|tool_call_end|>"),
}
_TAGGED_RESULTS = """
bailing_v2 keye_vl lfm2 lfm2_vl llava_next_qwen mimo mimo_v2 mimo_vl qwen qwen2_omni qwen2_vl qwen3 qwen3_5
qwen3_5_nothink qwen3_6 qwen3_nothink qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink youtu
"""
_ONE_CALL = """
chatglm3 glm4 glm4v glm_ocr glmz1
"""
_PICTURES = """
dots_ocr ernie_vl gemma3 gemma3n gemma4 gemma4n glm4_5v glm4v glm_ocr granite3_vision intern_s1 intern_vl keye_vl
kimi_vl lfm2_vl llama4 llava llava_next llava_next_llama3 llava_next_mistral llava_next_qwen llava_next_video
llava_next_video_mistral llava_next_video_yi llava_next_yi mimo_vl minicpm_o minicpm_v minicpm_v_4_6 ministral3
mistral_small mllama paligemma paligemma_chat pixtral qwen2_audio qwen2_omni qwen2_vl qwen3_5 qwen3_5_nothink
qwen3_6 qwen3_omni qwen3_omni_nothink qwen3_vl qwen3_vl_nothink video_llava yi_vl youtu_vl
"""


class Template(Struct, frozen=True):
    """A chat template of LLaMA-Factory.

    `thought` stand around thinking and `call` around the JSON of tool calls, in the text of an answer; `results`
    is what joins the results of parallel calls. `placeholders` stand for pictures and sounds, so that text which
    has them ends a training. `parallel` is False where a template takes one call an answer.
    """

    name: str
    thought: tuple[str, str]
    call: tuple[str, str]
    results: str
    placeholders: tuple[str, ...]
    parallel: bool


def named(name: str) -> Template:
    """The template of that name."""
    return Template(
        name=name,
        thought=_THOUGHTS.get(name, _THOUGHT),
        call=_CALLS.get(name, _CALL),
        results="\n</tool_response>\n<tool_response>\n" if name in _TAGGED_RESULTS.split() else "\n\n",
        placeholders=("<image>", "<video>", "<audio>") if name in _PICTURES.split() else (),
        parallel=name not in _ONE_CALL.split(),
    )
