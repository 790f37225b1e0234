"""vLLM's side of rollout.py, in an interpreter of its own: the setup as a line of JSON, then a line per lap.

Answers with the number of tokens generated, each with its log-probability.
"""

from __future__ import annotations

import json
import os
import sys

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "2"}
os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # as many threads as OMP_NUM_THREADS says, like the others


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM prints

    from vllm import LLM, SamplingParams

    setup = json.loads(sys.stdin.readline())
    engine = LLM(
        model=setup["model"],
        dtype=setup["dtype"],
        max_model_len=setup["longest"],
        max_num_seqs=setup["count"],
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        seed=0,
    )
    prompts = [{"prompt_token_ids": prompt} for prompt, _ in setup["requests"]]
    options = {"temperature": 1.0, "ignore_eos": True, "logprobs": 0, "detokenize": False}
    params = [SamplingParams(max_tokens=tokens, **options) for _, tokens in setup["requests"]]
    print(0, file=answers, flush=True)
    for _ in sys.stdin:
        done = [found.outputs[0] for found in engine.generate(prompts, params, use_tqdm=False)]
        assert all(len(output.logprobs) == len(output.token_ids) for output in done)
        print(sum(len(output.token_ids) for output in done), file=answers, flush=True)


if __name__ == "__main__":
    main()
