"""For TRL's own Python: trains a tiny model a step on each export. Arguments: work directory, TRAINER=EXPORT..."""

import json
import sys
from pathlib import Path

import torch
from datasets import load_dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, SFTConfig, SFTTrainer

TEMPLATE = """\
{%- if tools %}<|im_start|>system
<tools>{% for tool in tools %}{{ tool | tojson }}{% endfor %}</tools><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{%- if 'reasoning_content' in message %}<think>{{ message.reasoning_content }}</think>{% endif %}
{{- message.content }}
{%- if 'tool_calls' in message %}{% for call in message.tool_calls %}<tool_call>{{ call.function.name }}
{%- for key, value in call.function.arguments | items %}<{{ key }}>{{ value | tojson }}</{{ key }}>{% endfor %}
</tool_call>{% endfor %}{% endif %}<|im_end|>{% endgeneration %}
{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def tokenizer() -> PreTrainedTokenizerFast:
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator([], trainers.BpeTrainer(special_tokens=special, initial_alphabet=alphabet))
    made = PreTrainedTokenizerFast(tokenizer_object=plain, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = TEMPLATE
    return made


def model(vocabulary: int) -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    return Qwen3ForCausalLM(config)


def train(kind: str, export: str, work: Path, tokenizer: PreTrainedTokenizerFast) -> dict:
    """Train a step; what the trainer made of the rows, and whether it learned."""
    dataset = load_dataset(export, cache_dir=str(work / "cache"))["train"]
    common = {
        "output_dir": str(work / "out"),
        "max_steps": 1,
        "per_device_train_batch_size": 2,
        "report_to": [],
        "save_strategy": "no",
        "logging_steps": 1,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "max_length": None,
        "disable_tqdm": True,
    }
    made = Qwen3ForCausalLM.from_pretrained(str(work / "model"))
    inputs = {"train_dataset": dataset, "processing_class": tokenizer}
    if kind == "sft":
        trainer = SFTTrainer(made, args=SFTConfig(**common, assistant_only_loss=True), **inputs)
    elif kind == "tokens":
        trainer = SFTTrainer(made, args=SFTConfig(**common), **inputs)
    elif kind == "dpo":
        trainer = DPOTrainer(made, args=DPOConfig(**common), **inputs)
    else:
        trainer = KTOTrainer(made, args=KTOConfig(**common), **inputs)
    prepared = trainer.train_dataset
    report = {"columns": prepared.column_names, "rows": len(prepared)}
    if "labels" in prepared.column_names:
        report["learned"] = [
            tokenizer.decode([label for label in row["labels"] if label != -100]) for row in prepared
        ]
        report["labels"] = [list(row["labels"]) for row in prepared]
    if "completion_ids" in prepared.column_names:
        report["completions"] = [tokenizer.decode(row["completion_ids"]) for row in prepared]
        report["prompts"] = [tokenizer.decode(row["prompt_ids"]) for row in prepared]
    if "chosen_ids" in prepared.column_names:
        report["chosen"] = [tokenizer.decode(row["chosen_ids"]) for row in prepared]
        report["rejected"] = [tokenizer.decode(row["rejected_ids"]) for row in prepared]
    before = {name: value.clone() for name, value in made.named_parameters()}
    result = trainer.train()
    report["steps"] = trainer.state.global_step
    report["loss"] = result.training_loss
    report["moved"] = any(not torch.equal(before[name], value) for name, value in made.named_parameters())
    return report


def main(directory: str, *exports: str) -> None:
    work, processor = Path(directory), tokenizer()
    model(len(processor)).save_pretrained(str(work / "model"))
    processor.save_pretrained(str(work / "model"))
    reports = {}
    for each in exports:
        kind, _, export = each.partition("=")
        reports[Path(export).name] = train(kind, export, work, processor)
    (work / "told.json").write_text(json.dumps(reports))


main(*sys.argv[1:])
