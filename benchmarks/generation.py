"""Tokens per second of the built-in rollout engine, next to transformers' `generate` in the same run.

SmolLM2-135M-Instruct, float32, temperature 1, no filters, batch 32. Two cases:

* equal: as many requests as slots, prompts cut to one length, 64 new tokens each, no end-of-text token: pure decoding.
* mixed: three times as many requests (spelling, counting and word problems, in turns) that end where the model ends
  them, at most 64 tokens. `generate` takes them as three padded batches, each as long as its longest response; the
  engine refills slots. Lengths are sampled, so they differ a little between the sides and laps: the measure is real
  tokens per second.

Ours also returns the log-probability of every token, and its lap includes taking over new weights, which comes before
every generation phase of a run. `generate` returns tokens only. Not covered: several samples of one prompt, GPUs.

    python benchmarks/generation.py [--batch 32] [--tokens 64] [--rounds 5] [--warm-up 1] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from _common import Entry, Lap, Turns, machine, new_parser, print_verdict, race, rate, ratios, total, write_json

from rl_platform.config.components import Model
from rl_platform.config.schema import Data, Task
from rl_platform.models.pretrained import model_folder
from rl_platform.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

MODEL = "smollm2-135m-instruct"
QUESTIONS = ("spell_backward", "letter_counting", "gsm_symbolic")
TARGET = 1.5
OURS, TRANSFORMERS = "rl_platform torch engine", "transformers generate"


def prompts(settings: argparse.Namespace) -> list[tuple[int, ...]]:
    """Token ids of the requests of one lap, the same in every lap."""
    from rl_platform.envs.reasoning.prompts import build_prompts
    from rl_platform.envs.reasoning.reasoning_gym import reasoning_gym_questions

    tokenizer = load_tokenizer(Model(path=MODEL))
    kinds = []
    for name in QUESTIONS:
        task = Task(type="reasoning_gym", name=name)
        data = Data(task=task, train_size=settings.batch, val_size=1, max_prompt_length=1024)
        questions = reasoning_gym_questions(data, task, seed=1).train
        kinds.append([prompt.token_ids for prompt in build_prompts(questions, tokenizer, data).prompts])
    in_turns = [prompt for trio in zip(*kinds, strict=True) for prompt in trio]
    if settings.mixed:
        return in_turns
    shortest = min(map(len, in_turns))
    return [prompt[:shortest] for prompt in in_turns[: settings.batch]]


def ends(settings: argparse.Namespace) -> tuple[int, ...]:
    return load_tokenizer(Model(path=MODEL)).eos_token_ids if settings.mixed else ()


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.engines.rollout.base import Completion, Request
    from rl_platform.engines.rollout.torch import TorchRolloutEngine
    from rl_platform.models.language import LanguageModel
    from rl_platform.records import SamplingParams, Weights
    from rl_platform.rng import derive_seed

    network = causal_lm()
    requests = prompts(settings)
    engine = TorchRolloutEngine(network.config, ends(settings), settings.batch, torch.device("cpu"))
    state = LanguageModel(network).state_dict()
    sampling = SamplingParams(settings.tokens)

    def lap(number: int) -> int:
        done: list[Completion] = []
        engine.receive(Weights(number, state))
        engine.generate(
            [Request(index, prompt, derive_seed(1, number, index)) for index, prompt in enumerate(requests)],
            sampling,
            done.append,
        )
        if sorted(completion.index for completion in done) != list(range(len(requests))):
            raise SystemExit("requests were lost or answered twice: the timings mean nothing")
        return sum(len(completion.log_probs) for completion in done)

    run_laps(turns, lap)


def transformers(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    network = causal_lm()
    requests = prompts(settings)
    eos = ends(settings)
    network.generation_config.eos_token_id = list(eos) or None
    batches = [padded(requests[first : first + settings.batch]) for first in range(0, len(requests), settings.batch)]

    def lap(number: int) -> int:
        torch.manual_seed(number)
        tokens = 0
        for ids, mask in batches:
            out = network.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=settings.tokens,
                pad_token_id=0,
            )
            tokens += real_tokens(out[:, ids.shape[1] :], eos)
        return tokens

    run_laps(turns, lap)


def run_laps(turns: Turns, lap: Callable[[int], int]) -> None:
    turns.next()
    for number in range(1_000_000):
        turns.next({"tokens": lap(number)})


def causal_lm() -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(model_folder(MODEL), dtype=torch.float32).eval()


def padded(requests: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask [B,T] of prompts, padded on the left."""
    import torch

    width = max(map(len, requests))
    ids = [[0] * (width - len(request)) + list(request) for request in requests]
    mask = [[0] * (width - len(request)) + [1] * len(request) for request in requests]
    return torch.tensor(ids), torch.tensor(mask)


def real_tokens(responses: Tensor, eos: tuple[int, ...]) -> int:
    """Tokens of responses [B,T] up to and including the first end-of-text token of each."""
    import torch

    ended = torch.isin(responses, torch.tensor(eos, dtype=responses.dtype)).int().cumsum(dim=1)
    return int((ended == 0).sum() + (ended[:, -1] > 0).sum())


def report(case: str, laps: dict[str, list[Lap]], settings: argparse.Namespace) -> None:
    if not settings.mixed:
        expected = settings.batch * settings.tokens
        if any(lap.numbers["tokens"] != expected for done in laps.values() for lap in done):
            raise SystemExit(f"a lap did not generate {expected} tokens: the timings mean nothing")
    requests = settings.batch * (len(QUESTIONS) if settings.mixed else 1)
    print(f"\n{case}: {requests} requests, batch {settings.batch}, at most {settings.tokens} new tokens, float32")
    print(f"{'':<26} {'tokens/s':>9} {'seconds':>8} {'CPU seconds':>12} {'tokens per response':>20}")
    for name, done in laps.items():
        length = total(done, "tokens") / len(done) / requests
        seconds = statistics.median(lap.seconds for lap in done)
        cpu = statistics.median(lap.cpu_seconds for lap in done)
        print(f"{name:<26} {rate(done, 'tokens'):9.1f} {seconds:8.2f} {cpu:12.2f} {length:20.1f}")
    print_verdict("tokens/s in multiples of generate", ratios(laps[OURS], laps[TRANSFORMERS], "tokens"), TARGET)


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--batch", type=int, default=32, help="sequences decoded together")
    parser.add_argument("--tokens", type=int, default=64, help="longest response")
    options = parser.parse_args()
    if options.quick:
        options.batch, options.tokens, options.rounds = 4, 8, 2

    found = machine(("torch", "transformers"))
    results = {}
    for case in ("equal", "mixed"):
        settings = argparse.Namespace(batch=options.batch, tokens=options.tokens, mixed=case == "mixed")
        entries = {
            OURS: Entry(ours, settings, options.threads),
            TRANSFORMERS: Entry(transformers, settings, options.threads),
        }
        results[case] = race(entries, options.warm_up, options.rounds)
        report(case, results[case], settings)
    write_json(options.json, {"benchmark": "generation", "options": vars(options), "machine": found, "laps": results})


if __name__ == "__main__":
    main()
