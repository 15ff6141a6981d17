"""vLLM's figures for bench/serving.py, which starts this with the Python of an environment that has vLLM for CPUs.

    PYTHON bench/serving_parts/vllm_peer.py MODEL CONTEXT STEPS BATCH...

Prints one JSON object: tokens decoded per second of CPU time, by how many sequences are decoded at once. Two
lengths are generated, and their difference is counted, so that prompts, which come from the cache, and starts drop
out.
"""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"


def main() -> None:
    """Measure and print."""
    import vllm  # pyright: ignore[reportMissingImports]

    library: Any = vllm
    model, context, steps, *batches = sys.argv[1], *map(int, sys.argv[2:])
    server = library.LLM(model=model, dtype="float32", max_model_len=2 * context, skip_tokenizer_init=True)

    def cpu_s(prompts: list[dict[str, list[int]]], length: int) -> float:
        settings = library.SamplingParams(max_tokens=length, ignore_eos=True, seed=1, detokenize=False)
        began = time.process_time()
        server.generate(prompts, settings, use_tqdm=False)
        return time.process_time() - began

    figures: dict[int, float] = {}
    for batch in batches:
        prompts = [{"prompt_token_ids": [*range(context - 1), row]} for row in range(batch)]
        cpu_s(prompts, 2)
        rounds = [cpu_s(prompts, 2 + steps) - cpu_s(prompts, 2) for _ in range(3)]
        figures[batch] = batch * steps / min(rounds)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
