"""The answers of vLLM: `vllm_tokens.py MODEL ANSWERS.json`, in an environment that has it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import vllm
from workload import MODEL_LEN, run


def main(model: str, answers: str) -> None:
    llm = vllm.LLM(
        model=model,
        dtype="float32",
        enforce_eager=True,
        skip_tokenizer_init=True,
        disable_log_stats=True,
        max_model_len=MODEL_LEN,
        max_num_seqs=8,
        block_size=32,
        enable_prefix_caching=True,
        seed=0,
    )

    def generate(prompts: list[list[int]], max_tokens: int) -> tuple[list[list[int]], list[int]]:
        sampling = vllm.SamplingParams(
            temperature=0, max_tokens=max_tokens, ignore_eos=True, detokenize=False
        )
        outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], sampling, use_tqdm=False)
        return [list(o.outputs[0].token_ids) for o in outputs], [o.num_cached_tokens or 0 for o in outputs]

    Path(answers).write_text(json.dumps(run(generate)))


if __name__ == "__main__":
    main(*sys.argv[1:])
