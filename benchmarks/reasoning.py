"""One PPO step on a language model, next to TRL's PPOTrainer in the same run.

Both do the same work on the same SmolLM2-135M-Instruct files: generate a response of fixed length to each of the same
prompts, score it, log-probabilities of policy and reference, values, then one epoch of one mini-batch for policy and
critic. float32, no end-of-text token (a copy of the model's folder names one that is never sampled), no gradient
checkpointing, no gradient clipping. Token counts are checked on both sides. Ours is driven by its real training loop,
scores every response with the task's verifier and computes the policy's log-probabilities in a forward of its own; TRL
takes them from generation and is given a reward model that costs nothing. Without a reference, ours does less than TRL,
which cannot leave it out: that ratio is printed, but it has no target. `--bfloat16` adds ours with `dtype: bfloat16`
and leaves the run without a reference out. `--trl-bfloat16` is TRL with `bf16` in place of float32.

    python benchmarks/reasoning.py [--prompts 32] [--tokens 16] [--rounds 5] [--warm-up 1] [--bfloat16]
        [--trl-bfloat16] [--quick] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from _common import (
    LONG_RUN,
    Entry,
    Lap,
    Turns,
    machine,
    new_parser,
    print_phases,
    print_verdict,
    race,
    ratios,
    total,
    train_ours,
    write_json,
)

CONFIG = Path(__file__).parents[1] / "configs/reasoning/ppo.yaml"
TARGET = 1.5
PACKAGES = ("torch", "transformers", "trl", "accelerate")
NEVER_SAMPLED = ("<empty_output>", 16)  # a special token of the code corpus: ends nothing, pads everything
OURS, OURS_ALONE, TRL = "rl_platform", "rl_platform, no reference", "TRL PPOTrainer"
HALF, HALF_TARGET = "rl_platform, bfloat16", 1.5  # on AVX512-BF16


def endless_model(source: Path, target: Path) -> None:
    """A copy of a model's folder whose end-of-text and padding token is never sampled."""
    token, token_id = NEVER_SAMPLED
    for file in source.iterdir():
        (target / file.name).symlink_to(file)
    for name, value in (
        ("config.json", token_id),
        ("generation_config.json", token_id),
        ("tokenizer_config.json", token),
    ):
        keys = ("eos_token", "pad_token") if value == token else ("eos_token_id", "pad_token_id")
        content = json.loads((source / name).read_text(encoding="utf-8"))
        (target / name).unlink()
        (target / name).write_text(json.dumps(content | dict.fromkeys(keys, value)), encoding="utf-8")


def overrides(settings: argparse.Namespace) -> list[str]:
    """What the shipped config is changed to, so that it asks for the same work as TRL's."""
    reference = "reference," if settings.reference else ""
    micro_batch = "{micro_batch_size: %d, max_tokens_per_micro_batch: null, optim: {lr: 1.0e-6, clip_grad: null}"
    return [
        f"cluster.component_placement={{'actor,critic,{reference}rollout,reward': all}}",
        "algorithm={adv_type: gae, gamma: 1.0, gae_lambda: 0.95, loss_type: actor, value_clip: 0.2, ppo_epochs: 1}",
        f"algorithm.use_kl_in_reward={str(settings.reference).lower()}",
        *(["algorithm.kl_ctrl={kl_coef: 0.05}"] if settings.reference else []),
        f"data.train_size={settings.prompts}",
        "data.val_size=1",
        f"data.train_batch_size={settings.prompts}",
        f"data.mini_batch_size={settings.prompts}",
        f"data.max_response_length={settings.tokens}",
        f"actor={micro_batch % settings.prompts}, model: {{path: {settings.model}, dtype: {settings.dtype}}}}}",
        f"critic={micro_batch % settings.prompts}, use_critic_model: true}}",
        f"rollout.max_running_requests={settings.prompts}",
        "rollout.sampling={temperature: 1.0}",
    ]


def ours(turns: Turns, settings: argparse.Namespace) -> None:
    train_ours(turns, str(CONFIG), overrides(settings))


def trl(turns: Turns, settings: argparse.Namespace) -> None:
    import torch
    from datasets import Dataset
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoTokenizer,
        PrinterCallback,
        TrainerCallback,
    )
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    prompts = same_prompts(settings)
    prompt_tokens = sum(map(len, prompts))

    class FreeReward(torch.nn.Module):
        """0 for every response, in the form TRL expects; counts the tokens it is shown."""

        base_model_prefix = "backbone"

        def __init__(self) -> None:
            super().__init__()
            self.backbone, self.score, self.tokens = self.zeros, torch.nn.Identity(), 0

        def zeros(self, attention_mask: torch.Tensor, **_: Any) -> SimpleNamespace:
            self.tokens += int(attention_mask.sum())
            return SimpleNamespace(hidden_states=(torch.zeros(*attention_mask.shape, 1),))

    class EveryStepALap(TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            turns.next()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            tokens, reward.tokens = reward.tokens, 0
            turns.next({"response_tokens": tokens - prompt_tokens, "prompt_tokens": prompt_tokens})

    def policy() -> Any:
        return AutoModelForCausalLM.from_pretrained(settings.model, dtype=torch.float32)

    reward = FreeReward()
    with tempfile.TemporaryDirectory() as folder:
        value = AutoModelForSequenceClassification.from_pretrained(settings.model, num_labels=1, dtype=torch.float32)
        arguments = PPOConfig(
            output_dir=folder,
            per_device_train_batch_size=settings.prompts,
            local_rollout_forward_batch_size=settings.prompts,
            gradient_accumulation_steps=1,
            num_mini_batches=1,
            num_ppo_epochs=1,
            total_episodes=LONG_RUN,
            response_length=settings.tokens,
            temperature=1.0,
            learning_rate=1e-6,
            kl_coef=0.05,
            gamma=1.0,
            lam=0.95,
            cliprange=0.2,
            cliprange_value=0.2,
            vf_coef=1.0,
            num_sample_generations=0,
            bf16=settings.dtype == "bfloat16",
            gradient_checkpointing=False,
            use_cpu=True,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trainer = PPOTrainer(
            args=arguments,
            processing_class=AutoTokenizer.from_pretrained(settings.model, padding_side="left"),
            model=policy(),
            ref_model=policy(),
            reward_model=reward,
            value_model=value,
            train_dataset=Dataset.from_dict({"input_ids": prompts}),
            callbacks=[EveryStepALap()],
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def same_prompts(settings: argparse.Namespace) -> list[list[int]]:
    """Token ids of the prompts that ours trains on."""
    from rl_platform.config import load_config
    from rl_platform.envs.reasoning.prompts import build_prompts
    from rl_platform.envs.reasoning.tasks import build_questions
    from rl_platform.models.tokenizer import load_tokenizer

    config = load_config(str(CONFIG), overrides(settings)).config
    questions = build_questions(config.data, config.runner.seed).train
    return [
        list(prompt.token_ids)
        for prompt in build_prompts(questions, load_tokenizer(config.actor.model), config.data).prompts
    ]


def check(name: str, laps: list[Lap], settings: argparse.Namespace) -> None:
    expected = settings.prompts * settings.tokens
    for lap in laps:
        tokens = lap.numbers["response_tokens"] if name == TRL else response_tokens(lap)
        if round(tokens) != expected:
            raise SystemExit(f"{name} generated {tokens:g} tokens instead of {expected}: the timings mean nothing")


def response_tokens(lap: Lap) -> float:
    """Of our lap: all tokens without those of the prompts."""
    return lap.numbers["perf/tokens"] - lap.numbers["len/prompt_mean"] * lap.numbers["perf/samples"]


def main() -> None:
    parser = new_parser(__doc__, rounds=5)
    parser.add_argument("--prompts", type=int, default=32, help="per step; also the mini-batch and the micro-batch")
    parser.add_argument("--tokens", type=int, default=16, help="length of every response")
    parser.add_argument("--bfloat16", action="store_true", help="ours also in bfloat16, beside float32")
    parser.add_argument("--trl-bfloat16", action="store_true", help="TRL in bfloat16 in place of float32")
    options = parser.parse_args()
    if options.quick:
        options.prompts, options.tokens, options.rounds = 4, 4, 2

    from rl_platform.models.pretrained.model_folder import model_folder

    found = machine(PACKAGES)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        endless_model(Path(model_folder("smollm2-135m-instruct")), Path(folder))
        for own, reference in ((OURS, True), (OURS_ALONE, False))[: 1 if options.bfloat16 else 2]:
            shared = {"prompts": options.prompts, "tokens": options.tokens, "model": folder, "reference": reference}
            settings = argparse.Namespace(**shared, dtype="float32")
            half = argparse.Namespace(**shared, dtype="bfloat16")
            of_trl = half if options.trl_bfloat16 else settings
            entries = {own: Entry(ours, settings, options.threads), TRL: Entry(trl, of_trl, options.threads)}
            if options.bfloat16:
                entries[HALF] = Entry(ours, half, options.threads)
            laps = race(entries, options.warm_up, options.rounds)
            report(own, laps, settings)
            results[own] = laps
    write_json(options.json, {"benchmark": "reasoning", "options": vars(options), "machine": found, "laps": results})


def report(own: str, laps: dict[str, list[Lap]], settings: argparse.Namespace) -> None:
    prompt_tokens = total(laps[TRL][-1:], "prompt_tokens")
    print(f"\n{settings.prompts} prompts ({prompt_tokens:g} tokens), {settings.tokens} new tokens each")
    print(f"{'seconds per PPO step':<28} {'median':>8} {'fastest':>8} {'slowest':>8} {'CPU seconds':>12}")
    for name, done in laps.items():
        check(name, done, settings)
        seconds = [lap.seconds for lap in done]
        cpu = statistics.median(lap.cpu_seconds for lap in done)
        print(f"{name:<28} {statistics.median(seconds):8.2f} {min(seconds):8.2f} {max(seconds):8.2f} {cpu:12.2f}")
    print_phases(laps[own])
    if HALF in laps:
        print_phases(laps[HALF])
        print_verdict("bfloat16, times as fast as TRL", ratios(laps[HALF], laps[TRL]), TARGET)
        print_verdict("bfloat16, times as fast as our float32", ratios(laps[HALF], laps[own]), HALF_TARGET)
    found = ratios(laps[own], laps[TRL])
    if settings.reference:
        print_verdict("times as fast as TRL, equal work", found, TARGET)
    else:
        print(f"times as fast as TRL, which cannot leave the reference out: {statistics.median(found):.2f} (no target)")


if __name__ == "__main__":
    main()
