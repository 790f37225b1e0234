"""Tokens per second of SGLang as the platform runs it, next to SGLang alone, on GPUs and with the same requests.

A model of the shape of Qwen2.5-1.5B with random weights (nothing is downloaded), bfloat16, log-probabilities of sampled
tokens, no end-of-text token. Alone means what SGLang's offline benchmark times: all requests in one call of
`Engine.generate`. Ours sends them to the engine's process, one by one, and gets each back as soon as it is finished.
Both engines have the same arguments and run one after the other, each in a process of its own: two of them do not fit
one GPU. Not covered: new weights (weights.py), several nodes.

    python benchmarks/rollout_gpu.py [--requests 256] [--prompt 512] [--tokens 512] [--gpus 1] [--json FILE]
    python benchmarks/rollout_gpu.py --dry-run     # a tiny shape, on a CPU: whether it runs
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from _common import machine, new_parser, print_verdict, write_json
from _language import STAND_INS, gpu_shape, sglang_installed

if TYPE_CHECKING:
    from rl_platform.engines.rollout.sglang.program import SGLangSetup

OURS, ALONE = "rl_platform with SGLang", "SGLang alone"
TARGET = 0.95
NO_GPU = "rollout_gpu.py: torch sees too few GPUs on this machine. --dry-run tries the script out on the CPU."
NO_SGLANG = "rollout_gpu.py: SGLang is not installed: pip install 'rl-platform[sglang]'"


def setup_of(settings: argparse.Namespace) -> SGLangSetup:
    from rl_platform.engines.rollout.sglang.program import SGLangSetup

    return SGLangSetup(
        model_config=gpu_shape(settings.dry_run)
        | {"architectures": ["Qwen2ForCausalLM"], "eos_token_id": None, "bos_token_id": None},
        device="cpu" if settings.dry_run else "cuda",
        tensor_parallel=settings.gpus,
        dtype="float32" if settings.dry_run else "bfloat16",
        max_running=settings.requests,
        cache_tokens=settings.requests * (settings.prompt + settings.tokens + 1) if settings.dry_run else None,
        memory_share=0.8,
        seed=1,
        accelerators=tuple(range(settings.gpus)),
    )


def prompts(settings: argparse.Namespace, lap: int) -> list[list[int]]:
    """New ones in every lap: an engine keeps the beginnings it has seen."""
    import torch

    numbers = torch.Generator().manual_seed(lap)
    found: list[list[int]] = torch.randint(1, 500, (settings.requests, settings.prompt), generator=numbers).tolist()
    return found


def ours(settings: argparse.Namespace, folder: str) -> list[float]:
    from rl_platform.engines.rollout.base import Completion, Request
    from rl_platform.engines.rollout.sglang.sglang_client import SGLangEngine
    from rl_platform.records import SamplingParams

    environment = {"PYTHONPATH": str(STAND_INS)} if settings.dry_run else {}
    engine = SGLangEngine("rollout", setup_of(settings), (), environment, Path(folder, "sglang.log"))

    def lap(number: int) -> int:
        done: list[Completion] = []
        wanted = [Request(index, tuple(ids), index) for index, ids in enumerate(prompts(settings, number))]
        engine.generate(wanted, SamplingParams(settings.tokens), done.append)
        return sum(len(one.log_probs) for one in done)

    try:
        return timed(settings, lap)
    finally:
        engine.close()


def alone(settings: argparse.Namespace, folder: str) -> list[float]:
    """In this process, whose end takes the schedulers with it."""
    import json
    import sys
    from dataclasses import replace

    from rl_platform.engines.rollout.sglang.program import engine_arguments, engine_environment

    setup = replace(setup_of(settings), folder=folder)
    Path(folder, "config.json").write_text(json.dumps(setup.model_config))
    os.environ |= engine_environment(setup, sorted(os.sched_getaffinity(0)), [str(gpu) for gpu in range(settings.gpus)])
    if settings.dry_run:
        sys.path.insert(0, str(STAND_INS))
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    import sglang

    engine = sglang.Engine(**engine_arguments(setup))
    params = {"max_new_tokens": settings.tokens, "temperature": 1.0}

    def lap(number: int) -> int:
        done = engine.generate(input_ids=prompts(settings, number), sampling_params=params, return_logprob=True)
        return sum(len(one["meta_info"]["output_token_logprobs"]) for one in done)

    try:
        return timed(settings, lap)
    finally:
        engine.shutdown()


def timed(settings: argparse.Namespace, lap: Callable[[int], int]) -> list[float]:
    """Seconds of each lap."""
    seconds = []
    for number in range(settings.warm_up + settings.rounds):
        began = time.perf_counter()
        tokens = lap(number)
        if tokens != settings.requests * settings.tokens:
            raise SystemExit(f"{tokens} tokens were generated: the timings mean nothing")
        if number >= settings.warm_up:
            seconds.append(time.perf_counter() - began)
    return seconds


def main() -> None:
    import torch

    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=512, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=512, help="new tokens of a request")
    parser.add_argument("--gpus", type=int, default=1, help="tensor-parallel ranks of an engine")
    parser.add_argument("--dry-run", action="store_true", help="a tiny shape on the CPU")
    settings = parser.parse_args()
    settings.dry_run |= settings.quick
    if not sglang_installed():
        raise SystemExit(NO_SGLANG)
    if settings.dry_run:
        settings.requests, settings.prompt, settings.tokens, settings.rounds, settings.warm_up = 4, 8, 8, 1, 1
    elif torch.cuda.device_count() < settings.gpus:
        raise SystemExit(NO_GPU)

    found: dict[str, list[float]] = {}
    context: Any = multiprocessing.get_context("spawn")
    for name, run in ((OURS, ours), (ALONE, alone)):
        with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, context) as process:
            found[name] = process.submit(run, settings, folder).result()
        rate = settings.requests * settings.tokens / statistics.median(found[name])
        print(f"{name:<28} {rate:10.1f} tokens/s")
    shares = [theirs / own for own, theirs in zip(found[OURS], found[ALONE], strict=True)]
    print_verdict(f"in multiples of {ALONE}", shares, TARGET)
    described = machine(("torch", "sglang"))
    write_json(settings.json, {"benchmark": "rollout_gpu", "machine": described, "seconds": found})


if __name__ == "__main__":
    main()
