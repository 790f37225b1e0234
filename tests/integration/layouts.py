"""PPO steps on the same data in different batch layouts, in one process or on several ranks. Not a test by itself.

`main(rank, folder)` is one of several gloo processes and saves what it learned into the folder; a test that
imports this module is the single one. Real actors, critics and references behind the real `PPO.update`.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from neutral_batches import neutral_batch
from stand_ins import DirectGroup, SilentReporter
from torch import Tensor
from torch.nn import functional as F

from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.components.actor import EmbodiedActor, LanguageActor
from rl_platform.components.critic import LanguageCritic
from rl_platform.components.reference import LanguageReference
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.records import Prompt, RolloutBatch, Trajectory
from rl_platform.runners.ppo import PPO
from rl_platform.runners.task_runner import Learners
from rl_platform.runners.trajectories import rollout_batch, shaped_rewards
from rl_platform.runtime.host import ComponentContext

STEPS, PROMPTS, SAMPLES, MINI_BATCH = 2, 8, 2, 8
PROMPT_LENGTH, RESPONSE_LENGTH = 6, 12
SYSTEM = (72, 105)  # every prompt begins with it: the packed forward computes it once per micro-batch
TINY = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "intermediate_size": 32, "max_positions": 64}
ENVS, ENV_STEPS = 4, 8
SPACES = EnvSpaces((3,), ActionSpace("continuous", 2), (2,), (-1.0, -1.0), (1.0, 1.0))

EVERY_TERM = {"entropy_bonus": 0.01, "positive_nll_coef": 0.1, "rollout_is": {}, "use_kl_loss": True}
CASES: dict[str, dict[str, Any]] = {
    "gae": {"value_clip": 0.5, "gae_lambda": 0.9, "use_kl_in_reward": True, "allow_both_kl": True, **EVERY_TERM},
    "grpo": {"adv_type": "grpo", "loss_agg_func": "seq-mean-token-mean", **EVERY_TERM},
    "embodied": {"loss_type": "actor_critic", "value_clip": 0.5, "huber_delta": 1.0, "entropy_bonus": 0.01},
}
CASES["recurrent"] = CASES["embodied"]
SEQUENCE = 4  # steps of a recurrent policy's sequences


@dataclass(frozen=True)
class Layout:
    """rows, tokens: of a micro-batch (both None: the mini-batch at once); padding: columns added to every batch;
    packed False: transformers runs on padded rows; context: ranks that share the tokens of a micro-batch."""

    rows: int | None = None
    tokens: int | None = None
    padding: int = 0
    packed: bool = True
    context: int = 1


BASE = Layout()
RANKED = {  # what two ranks run, case by case
    "gae": [Layout(), Layout(rows=2, padding=37), Layout(tokens=40), Layout(context=2, tokens=40, padding=37)],
    "grpo": [Layout(), Layout(rows=1), Layout(tokens=40, padding=37), Layout(context=2)],
    "embodied": [Layout(), Layout(rows=1)],
    "recurrent": [Layout(), Layout(rows=1)],
}


def build(case: str, layout: Layout) -> Config:
    embodied, length = case in ("embodied", "recurrent"), SEQUENCE if case == "recurrent" else 1
    # eps above rounding: else the noise of an element whose gradient vanishes would make a whole step of Adam
    optim = {"lr": 1e-2, "eps": 3e-4, "clip_grad": 0.5}
    split: dict[str, Any] = {"micro_batch_size": layout.rows and layout.rows * length}
    split |= {"max_tokens_per_micro_batch": layout.tokens}
    if not embodied:
        split |= {"parallel": {"context": layout.context}}
    model: dict[str, Any] = {"hidden_sizes": [16, 16]} if embodied else {"random_init": TINY, "tokenizer": "bytes"}
    if case == "recurrent":
        model |= {"type": "gru", "recurrent_size": 12, "sequence_length": SEQUENCE}
    placed = "actor_critic,env,rollout" if embodied else "actor,critic,rollout,reward,reference"
    return Config(
        runner={"task_type": "embodied" if embodied else "reasoning", "seed": 5},
        cluster={"component_placement": {placed: "all"}},
        data={
            "mini_batch_size": MINI_BATCH * (2 if case == "recurrent" else 1),  # 4 of its sequences
            "max_prompt_length": PROMPT_LENGTH,
            "max_response_length": RESPONSE_LENGTH,
        },
        actor={"model": model, "optim": optim, **split},
        critic={"use_critic_model": case == "gae", "optim": optim, **split},
        algorithm={"ppo_epochs": 2, "group_size": SAMPLES if case == "grpo" else 1, **CASES[case]},
        env={"id": "CartPole-v1" if embodied else "", "rollout_steps": ENV_STEPS},
    )


def language_batch(config: Config, step: int) -> RolloutBatch:
    """As the runner builds it: prompts and responses of many lengths, one of them without a score."""
    draw = random.Random(step)

    def tokens(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(256) for _ in range(count))

    trajectories = []
    for index in range(PROMPTS):
        prompt = Prompt(index, "", "", SYSTEM + tokens(draw.randint(1, PROMPT_LENGTH - len(SYSTEM))))
        for sample in range(SAMPLES):
            response = tokens(draw.randint(1, RESPONSE_LENGTH))
            log_probs = tuple(draw.gauss(-5.5, 0.3) for _ in response)
            score = draw.choice((0.0, 0.5, 1.0))
            kept = (index, sample) != (3, 1)
            trajectories.append(
                Trajectory(prompt, sample, response, log_probs, "stop", 0, reward=score, metric=score, valid=kept)
            )
    shaped = shaped_rewards(trajectories, config.algorithm, RESPONSE_LENGTH)
    return rollout_batch(trajectories, shaped, pad_token_id=0)


def padded(batch: RolloutBatch, columns: int) -> RolloutBatch:
    """`columns` more positions that nobody chose, with NaN in them where a number may stand."""

    def wider(tensor: Tensor, filling: float) -> Tensor:
        return F.pad(tensor, (0, columns), value=filling)

    return replace(
        batch,
        inputs=batch.inputs | {"tokens": wider(batch.inputs["tokens"], 7)},
        action_mask=wider(batch.action_mask, False),
        rewards=wider(batch.rewards, float("nan")),
        rollout_log_probs=wider(batch.rollout_log_probs, float("nan")),
    )


def embodied_batch(step: int) -> RolloutBatch:
    """As environments fill it: several episodes per row, some of them cut off, and a step that does not count."""
    numbers = torch.Generator().manual_seed(step)
    shape = (ENVS, ENV_STEPS)

    def noise(*more: int) -> Tensor:
        return torch.randn(*shape, *more, generator=numbers)

    ends = torch.rand(shape, generator=numbers) < 0.3
    ends[:, -1] = True
    mask = torch.ones(shape, dtype=torch.bool)
    mask[1, 3] = False
    return neutral_batch(
        mask,
        inputs={"observations": noise(3), "actions": noise(2)},
        rewards=noise(),
        rollout_log_probs=noise() - 3,
        ends=ends,
        bootstrapped=ends & (torch.rand(shape, generator=numbers) < 0.5),
        end_observations=noise(3),
    )


def recurrent_batch(step: int) -> RolloutBatch:
    """The same with what a recurrent policy remembered at the beginning of each sequence."""
    batch, numbers = embodied_batch(step), torch.Generator().manual_seed(step + 100)
    states = torch.randn(ENVS, ENV_STEPS // SEQUENCE, 12, generator=numbers)
    starts = torch.zeros(ENVS, ENV_STEPS, dtype=torch.bool)
    starts[:, 1:] = batch.ends[:, :-1]  # type: ignore[index]
    return replace(batch, inputs=batch.inputs | {"hidden_states": states, "episode_starts": starts})


def learners(case: str, config: Config) -> dict[str, DirectGroup]:
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    def context(name: str) -> ComponentContext:
        return ComponentContext(name=name, rank=rank, world_size=size, accelerators=(), seed=5)

    if case in ("embodied", "recurrent"):
        return {"actor": DirectGroup(EmbodiedActor(context("actor"), config, SPACES))}
    found = {
        "actor": DirectGroup(LanguageActor(context("actor"), config)),
        "reference": DirectGroup(LanguageReference(context("reference"), config)),
    }
    return found | ({"critic": DirectGroup(LanguageCritic(context("critic"), config))} if case == "gae" else {})


def learn(case: str, layout: Layout) -> dict[str, Any]:
    """`start` and `end`: parameters by model and name, before and after STEPS updates; `metrics` of the last one."""
    config = build(case, layout)
    groups = learners(case, config)
    if not layout.packed:
        for group in groups.values():
            run_padded(group.component)
    trained = {name: group for name, group in groups.items() if name != "reference"}
    start = {name: group.parameters() for name, group in trained.items()}
    ppo = PPO(config, Learners(**groups), SilentReporter())  # type: ignore[arg-type]
    metrics: dict[str, float] = {}
    for step in range(STEPS):
        made = {"embodied": embodied_batch, "recurrent": recurrent_batch}
        batch = made[case](step) if case in made else language_batch(config, step)
        metrics = ppo.update(padded(batch, layout.padding) if layout.padding else batch, step)
    return {"start": start, "end": {name: group.parameters() for name, group in trained.items()}, "metrics": metrics}


def run_padded(component: Any) -> None:
    """Replace the packed forward by that of transformers: rows beside each other, padding hidden by its mask."""
    model = component.engine.model
    language = model.model
    language.backbone.set_attn_implementation("eager")

    def forward(batch: RolloutBatch, *, entropy: bool = False) -> ModelOutputs:
        tokens, lengths = batch.inputs["tokens"], batch.inputs["lengths"]
        real = torch.arange(tokens.shape[1]) < lengths[:, None]
        states = language.backbone(input_ids=tokens, attention_mask=real.long(), use_cache=False).last_hidden_state
        before = F.pad(language.head(states)[:, :-1], (0, 0, 1, 0))  # what predicts each position stands before it
        if isinstance(component, LanguageCritic):
            return ModelOutputs(values=torch.where(batch.action_mask, before.squeeze(-1), 0.0))
        distribution = before.log_softmax(-1)
        chosen = distribution.gather(-1, tokens[..., None]).squeeze(-1)
        spread = -(distribution.exp() * distribution).sum(-1)
        return ModelOutputs(
            log_probs=torch.where(batch.action_mask, chosen, 0.0),
            entropy=torch.where(batch.action_mask, spread, 0.0) if entropy else None,
        )

    model.forward = forward


def main(rank: int, folder: Path) -> None:
    found = {case: [learn(case, layout) for layout in layouts] for case, layouts in RANKED.items()}
    torch.save(found, folder / f"rank{rank}.pt")
