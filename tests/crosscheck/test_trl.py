"""The same data through TRL: its masked statistics, log-probs and entropies, GRPO and RLOO advantages, the GRPO losses.

Needs the extra `crosscheck`. The trainers are real ones with a tiny random model; only the log-probs that a loss is
computed from are given instead of computed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from neutral_batches import neutral_batch
from torch import Tensor

REASON = "trl is not installed: pip install -e '.[crosscheck]'"
pytest.importorskip("trl", reason=REASON)
pytest.importorskip("datasets", reason=REASON)

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.experimental.ppo import ppo_trainer as theirs
from trl.trainer.utils import entropy_from_logits, selective_log_softmax

from rl_platform.algorithms.advantages import advantages
from rl_platform.algorithms.aggregation import Denominators
from rl_platform.algorithms.losses import ModelOutputs, actor_loss
from rl_platform.algorithms.rewards import place_outcome_rewards
from rl_platform.algorithms.statistics import masked_mean, masked_var, whiten
from rl_platform.algorithms.variants.importance_weights import mismatch_weights
from rl_platform.config.schema.algorithm import Algorithm, RolloutIS
from rl_platform.models.language import token_log_probs
from rl_platform.records import RolloutBatch

PROMPTS, SAMPLES, WIDTH = 3, 4, 7
ROWS = PROMPTS * SAMPLES


@pytest.mark.parametrize("seed", range(3))
def test_masked_statistics(seed: int) -> None:
    numbers = torch.Generator().manual_seed(seed)
    x, mask = torch.randn(6, 9, generator=numbers) * 3 + 2, torch.rand(6, 9, generator=numbers) < 0.6
    close = torch.testing.assert_close
    close(masked_mean(x, mask), theirs.masked_mean(x, mask))
    close(masked_var(x, mask), theirs.masked_var(x, mask))
    close(whiten(x, mask)[mask], theirs.masked_whiten(x, mask)[mask], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_log_probs_and_entropies_of_tokens(temperature: float) -> None:
    numbers = torch.Generator().manual_seed(0)
    states, head = torch.randn(11, 8, generator=numbers), 0.3 * torch.randn(23, 8, generator=numbers)
    targets = torch.randint(23, (11,), generator=numbers)
    logits = (states @ head.T / temperature)[None]
    log_probs, entropies = token_log_probs(states, targets, head, temperature, "entropy")
    torch.testing.assert_close(log_probs, selective_log_softmax(logits, targets[None])[0])
    torch.testing.assert_close(entropies, entropy_from_logits(logits)[0])


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    words = Tokenizer(models.WordLevel({"<pad>": 0, "<eos>": 1, "one": 2, "two": 3, "three": 4}, unk_token="<eos>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")


class Scores:
    """A reward function that gives each completion a random score and remembers them."""

    __name__ = "scores"

    def __init__(self) -> None:
        self.numbers, self.given = torch.Generator().manual_seed(3), torch.empty(0)

    def __call__(self, completions: list[Any], **_: Any) -> list[float]:
        # far apart, so that the 1e-4 that they add to a deviation and the 1e-6 of ours do not show
        self.given = 1000 * torch.randn(len(completions), generator=self.numbers)
        self.given[:SAMPLES] = 5.0  # a group without a difference
        return self.given.tolist()


@pytest.fixture
def trainer(tokenizer: Any, tmp_path: Path) -> Any:
    """trainer("grpo", scale_rewards="none"): their trainer on a random model, and its reward function."""

    def build(kind: str, **options: Any) -> tuple[Any, Scores]:
        torch.manual_seed(0)
        size = {"vocab_size": 5, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1}
        model = LlamaForCausalLM(LlamaConfig(**size, num_attention_heads=2, max_position_embeddings=32))
        make_config, make_trainer = {"grpo": (GRPOConfig, GRPOTrainer), "rloo": (RLOOConfig, RLOOTrainer)}[kind]
        arguments = make_config(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=False,
            report_to=[],
            num_generations=SAMPLES,
            per_device_train_batch_size=ROWS,
            max_completion_length=WIDTH,
            beta=0.0,
            **options,
        )
        scores = Scores()
        data = Dataset.from_dict({"prompt": ["one two", "two two", "three"]})
        made = make_trainer(
            model=model, reward_funcs=scores, args=arguments, train_dataset=data, processing_class=tokenizer
        )
        return made, scores

    return build


@pytest.mark.parametrize(
    ("kind", "options", "keys"),
    [
        ("grpo", {"scale_rewards": "group"}, {"adv_type": "grpo"}),
        ("grpo", {"scale_rewards": "none"}, {"adv_type": "grpo", "grpo_std_normalization": False}),
        ("rloo", {"normalize_advantages": False}, {"adv_type": "rloo"}),
    ],
)
def test_advantages_of_groups(trainer: Any, kind: str, options: dict[str, Any], keys: dict[str, Any]) -> None:
    made, scores = trainer(kind, **options)
    prompts = [{"prompt": text} for text in ("one two", "two two", "three") for _ in range(SAMPLES)]
    made.model.train()
    found = made._generate_and_score_completions(prompts)
    mask = found["completion_mask"].bool()
    batch = language_batch(mask, rewards=place_outcome_rewards(scores.given, mask))
    ours = advantages(batch, Algorithm(group_size=SAMPLES, **keys))[0]
    expected = found["advantages"][:, None].expand_as(ours)
    torch.testing.assert_close(ours, torch.where(mask, expected, 0.0), rtol=1e-5, atol=1e-5)
    assert ours[SAMPLES:].abs().max() > 0.5
    assert not ours[:SAMPLES].any()


def language_batch(mask: Tensor, **fields: Tensor) -> RolloutBatch:
    return neutral_batch(mask, group_ids=torch.arange(len(mask)) // SAMPLES, **fields)


class Case:
    """Random log-probs of responses of many lengths under the policy, the old one, the reference and the engine."""

    def __init__(self) -> None:
        numbers = torch.Generator().manual_seed(7)
        lengths = torch.randint(1, WIDTH + 1, (ROWS, 1), generator=numbers)
        self.mask = torch.arange(WIDTH) < lengths

        def noise(scale: float) -> Tensor:
            return scale * torch.randn(ROWS, WIDTH, generator=numbers)

        self.old = noise(0.5) - 2
        self.log_probs = (self.old + noise(0.6)).requires_grad_()
        self.reference, self.engine = self.old + noise(0.4), self.old + noise(0.5)
        self.advantages = torch.randn(ROWS, 1, generator=numbers)

    def inputs(self) -> dict[str, Tensor]:
        """What their loss reads."""
        tokens = torch.zeros(ROWS, WIDTH, dtype=torch.int64)
        prompt = torch.zeros(ROWS, 2, dtype=torch.int64)
        return {
            "prompt_ids": prompt,
            "prompt_mask": torch.ones_like(prompt),
            "completion_ids": tokens,
            "completion_mask": self.mask.long(),
            "advantages": self.advantages[:, 0],
            "old_per_token_logps": self.old,
            "ref_per_token_logps": self.reference,
            "importance_sampling_ratio": (self.old - self.engine).exp().clamp(max=2.0),
            "num_items_in_batch": self.mask.sum(),
        }

    def ours(self, **keys: Any) -> tuple[Tensor, Tensor, dict[str, float]]:
        """Loss, its gradient in the log-probs and our metrics."""
        batch = language_batch(
            self.mask,
            log_probs=self.old,
            reference_log_probs=self.reference,
            rollout_log_probs=self.engine,
            advantages=torch.where(self.mask, self.advantages, 0.0),
        )
        algorithm = Algorithm(**keys)
        if algorithm.rollout_is is not None:
            weights = mismatch_weights(self.old, self.engine, self.mask, algorithm.rollout_is)[0]
            batch.loss_weights = weights
        outputs = ModelOutputs(log_probs=self.log_probs, entropy=torch.zeros(ROWS, WIDTH))
        loss, metrics = actor_loss(outputs, batch, Denominators.of(self.mask, WIDTH), algorithm)
        return loss, torch.autograd.grad(loss, self.log_probs)[0], metrics.finalize()


TOKENS, SEQUENCES = "token-mean", "seq-mean-token-mean"
CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
LOSSES = {
    # name: (attributes of their trainer, of its arguments, our keys)
    "per token": ({"loss_type": "bnpo"}, {}, CLIP),
    "dapo": ({"loss_type": "dapo"}, {}, CLIP),
    "per sequence": ({"loss_type": "grpo"}, {}, CLIP | {"loss_agg_func": SEQUENCES}),
    "constant length": ({"loss_type": "dr_grpo"}, {}, CLIP | {"loss_agg_func": "seq-mean-token-sum-norm"}),
    "dual clip": ({"loss_type": "bnpo"}, {"delta": 1.5}, CLIP | {"clip_ratio_c": 1.5}),
    "sequence ratio": (
        {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        {},
        CLIP | {"policy_loss": "gspo", "loss_agg_func": SEQUENCES},
    ),
    # their weight has an upper bound only, and it is the bound itself
    "cispo": (
        {"loss_type": "cispo", "epsilon_high": 1.4},
        {},
        {"policy_loss": "cispo", "clip_ratio_low": 1.0, "clip_ratio_high": 0.4},
    ),
    "kl": (
        {"loss_type": "bnpo", "beta": 0.3},
        {"use_bias_correction_kl": False},
        CLIP | {"use_kl_loss": True, "kl_loss_coef": 0.3},
    ),
    "kl, score form": (
        {"loss_type": "bnpo", "beta": 0.3},
        {"use_bias_correction_kl": True},
        CLIP | {"use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_grad": "score"},
    ),
    "truncated importance sampling": (
        {"loss_type": "bnpo", "use_vllm": True, "vllm_importance_sampling_correction": True},
        {},
        CLIP | {"rollout_is": RolloutIS(high=2.0)},
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_losses_and_gradients(trainer: Any, name: str) -> None:
    attributes, arguments, keys = LOSSES[name]
    made, _ = trainer("grpo")
    for target, changes in ((made, {"epsilon_low": 0.2, "epsilon_high": 0.28} | attributes), (made.args, arguments)):
        for attribute, value in changes.items():
            assert hasattr(target, attribute)
            setattr(target, attribute, value)
    case = Case()
    made._get_per_token_logps_and_entropies = lambda *_, **__: (case.log_probs, torch.zeros(ROWS, WIDTH), None)
    made.current_gradient_accumulation_steps = 1
    made.model.train()
    expected = made._compute_loss(made.model, case.inputs())
    (gradient,) = torch.autograd.grad(expected, case.log_probs)
    loss, found, metrics = case.ours(**keys)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, torch.where(case.mask, gradient, 0.0), rtol=1e-5, atol=1e-7)
    assert found.abs().max() > 1e-3
    if attributes["loss_type"] == "bnpo" and "clip_ratio_c" not in keys:  # they count after cutting at the dual clip
        clipped = made._metrics["train"]["clip_ratio/region_mean"][-1]
        assert metrics["actor/clip_frac"] == pytest.approx(clipped, abs=1e-6)
        assert clipped > 0.1
