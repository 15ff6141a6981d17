"""For TRL's own Python: how SFTTrainer prepares exports. Arguments: work directory, TOKENIZER=LOSS=EXPORT..."""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer


def prepared(directory: str, loss: str, export: str, work: Path) -> list:
    """Each row as the trainer has it: its text, its length, and what of it is learned."""
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = Qwen3Config(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=1, num_key_value_heads=1, head_dim=16,
    )  # fmt: skip
    settings = SFTConfig(
        output_dir=str(work / "out"), report_to=[], use_cpu=True, bf16=False, max_length=None, disable_tqdm=True,
        assistant_only_loss=loss == "assistant",
    )  # fmt: skip
    rows = load_dataset(export, cache_dir=str(work / "cache"))["train"]
    trainer = SFTTrainer(Qwen3ForCausalLM(config), args=settings, train_dataset=rows, processing_class=tokenizer)
    examples = []
    for row in trainer.train_dataset:
        learned = [label for label in row["labels"] if label != -100]
        examples.append([tokenizer.decode(row["input_ids"]), len(row["input_ids"]), tokenizer.decode(learned)])
    return examples


def main(directory: str, *exports: str) -> None:
    work = Path(directory)
    examples = [prepared(*each.split("="), work) for each in exports]
    (work / "told.json").write_text(json.dumps(examples))


main(*sys.argv[1:])
