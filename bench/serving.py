"""How many tokens the embedded server computes in a second of CPU time, beside what the processor could do.

    python bench/serving.py [--vllm PYTHON] [--json FILE]

Models of two shapes: `tiny` as shipped, and random weights in the shape of SmolLM2-135M. Sequences of 600 tokens
are decoded 1, 8 and 24 at a time, and a prompt of 512 tokens is computed: with torch's own linear layers, and for
the large model, whose layers the server packs, with packed ones. One thread, the best of three rounds.

`--vllm` gives the Python of an environment with vLLM for CPUs, the peer, which decodes with the large model in
float32.

The limits are of the same core in the same run: how fast it reads memory (a step reads all weights once, and all
keys and values of its sequences), and how fast the better of both kinds of layer multiplies large matrices in
float32.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from understudy.model.causal.cache import SlotCache
from understudy.model.causal.checkpoint import forward, load_model
from understudy.model.causal.linear_layers import PackedLinear, pack_linear_layers
from understudy.model.directory import TINY, directory_of

RESULTS = Path(__file__).parent / "results" / "serving.json"
BATCHES = (1, 8, 24)
CONTEXT, PROMPT = 600, 512
ROUNDS = 3
SMOLLM2 = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}


def cpu_s(work: Callable[[], Any], times: int) -> float:
    """Seconds of CPU time of one call of `work`, the best of some rounds."""
    work()
    rounds: list[float] = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(times):
            work()
        rounds.append((time.process_time() - began) / times)
    return min(rounds)


def limits() -> dict[str, float]:
    """The core's limits: bytes read in a second, and float32 operations in a second."""
    memory = torch.zeros(64 << 20)
    inputs, layer = torch.randn(1024, 1024), torch.nn.Linear(1024, 1024, bias=False)
    with torch.inference_mode():
        seconds = [cpu_s(partial(multiply, inputs), 4) for multiply in (layer, PackedLinear(layer))]
    return {
        "bytes_per_s": memory.numel() * 4 / cpu_s(memory.sum, 4),
        "flop_per_s": 2 * 1024**3 / min(seconds),
    }


def decoding(module: Any, batch: int, steps: int) -> float:
    """Seconds of CPU time of one step of `batch` sequences of `CONTEXT` tokens."""
    slots = SlotCache()
    slots.reserve(batch, CONTEXT + 1)
    forward(module, slots, [list(range(CONTEXT))], [0], [0])
    for row in range(1, batch):
        slots.move(0, row, CONTEXT)
    rows = list(range(batch))
    return cpu_s(lambda: forward(module, slots, [[7]] * batch, rows, [CONTEXT] * batch), steps)


def prompt(module: Any) -> float:
    """Seconds of CPU time of a prompt of `PROMPT` tokens."""
    slots = SlotCache()
    slots.reserve(1, PROMPT)
    return cpu_s(lambda: forward(module, slots, [list(range(PROMPT))], [0], [0]), 2)


def figures(module: Any, steps: int) -> dict[str, float]:
    """Tokens per second of CPU time, by what is computed."""
    with torch.inference_mode():
        decoded = {f"decoded {batch} at a time": batch / decoding(module, batch, steps) for batch in BATCHES}
        return decoded | {f"a prompt of {PROMPT}": PROMPT / prompt(module)}


def roof(module: Any, parameters: int, bound: dict[str, float]) -> dict[str, float]:
    """The tokens per second that the limits allow, by what is computed: the lower one of memory and operations.

    The embedding counts as weights only where it is the output layer.
    """
    config = module.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    kv_bytes = 2 * 4 * CONTEXT * config.num_hidden_layers * config.num_key_value_heads * head
    operations = 2 * parameters + 4 * CONTEXT * config.num_hidden_layers * config.num_attention_heads * head
    decoded = {
        f"decoded {batch} at a time": min(
            batch / ((4 * parameters + batch * kv_bytes) / bound["bytes_per_s"]), bound["flop_per_s"] / operations
        )
        for batch in BATCHES
    }
    return decoded | {f"a prompt of {PROMPT}": bound["flop_per_s"] / (2 * parameters)}


def vllm_figures(python: Path, model: Path) -> dict[str, float]:
    """What vLLM decodes with a model: tokens per second of CPU time."""
    script = Path(__file__).parent / "serving_parts" / "vllm_peer.py"
    command = [python, script, model, CONTEXT, 16, *BATCHES]
    done = subprocess.run([str(part) for part in command], stdout=subprocess.PIPE, text=True, check=True)
    decoded: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return {f"decoded {batch} at a time": tokens for batch, tokens in decoded.items()}


def models(directory: Path) -> dict[str, tuple[Path, int]]:
    """The directories of the models, and how many steps are timed."""
    large = directory / "smollm2"
    library: Any = transformers  # its type annotations are unusable
    library.logging.disable_progress_bar()
    library.LlamaForCausalLM(library.LlamaConfig(**SMOLLM2)).save_pretrained(large)
    return {TINY: (directory_of(TINY), 40), "SmolLM2-135M's shape": (large, 4)}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, default=RESULTS, help="write the figures here")
    parser.add_argument("--vllm", type=Path, metavar="PYTHON", help="measure vLLM of this environment too")
    options = parser.parse_args()
    torch.set_num_threads(1)
    bound = limits()
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}",
        "limits": bound,
    }
    print(f"one core: {bound['bytes_per_s'] / 1e9:.0f} GB/s, {bound['flop_per_s'] / 1e9:.0f} GFLOP/s in float32")
    with tempfile.TemporaryDirectory() as directory:
        for name, (path, steps) in models(Path(directory)).items():
            module = load_model(path)
            parameters = sum(parameter.numel() for parameter in module.parameters())
            table = {"torch's layers": figures(module, steps), "limit": roof(module, parameters, bound)}
            if name != TINY:
                pack_linear_layers(module)
                table["packed layers"] = figures(module, steps)
                if options.vllm:
                    table["vLLM"] = vllm_figures(options.vllm, path)
            result[name] = table
            print(f"\n{name}: tokens per second of CPU time, share of the limit")
            for what, most in table["limit"].items():
                cells = [
                    f"{kind}: {values[what]:,.0f} ({values[what] / most:.0%})"
                    for kind, values in table.items()
                    if kind != "limit" and what in values
                ]
                print(f"  {what:<22} {', '.join(cells)}; limit {most:,.0f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
