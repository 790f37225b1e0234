"""The sizes of a rehearsal: rows, tokens, environments and small models that several keys depend on. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Literal

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Trainable
from rl_platform.launch.rehearse.small_placement import small_parallel
from rl_platform.placement.estimates.workload import data_parallel
from rl_platform.placement.layout import LEARNERS
from rl_platform.placement.scheduler import Placement

RESPONSE, CONVERSATION, ROWS = 8, 16, 4
BYTES_PER_TOKEN = 6  # of a prompt whose tokenizer is replaced by one of bytes


@dataclass(frozen=True)
class Materials:
    """The replacements of files and programs in a rehearsal, decided before.

    folder: of the rehearsal. real_tokenizer: the models keep their tokenizers. backend: the generation engine, and
    why_backend the reason if it is not the config's. megatron: it is installed. reward_url: of the server that scores.
    """

    folder: Path
    real_tokenizer: bool = True
    backend: str = "torch"
    why_backend: str = ""
    megatron: bool = True
    reward_url: str | None = None

    def model(self, name: str) -> str:
        """Returns the folder of the small model of a component."""
        return str(self.folder / "models" / name)

    def questions(self, number: int, part: Literal["train", "validation"]) -> Path:
        """Returns the file in place of those of the source with this number."""
        return self.folder / f"{part}-{number}.jsonl"


@dataclass(frozen=True)
class Sizes:
    """The sizes that several keys depend on."""

    config: Config
    placement: Placement
    cluster: dict[str, object]
    small: Placement
    materials: Materials

    @property
    def embodied(self) -> bool:
        return self.config.runner.task_type == "embodied"

    @property
    def updates(self) -> int:
        """Mini-batches of a rollout: one, or two where the config has several."""
        return min(2, max(1, self.config.rows_per_step // self.config.data.mini_batch_size))

    @property
    def group(self) -> int:
        return min(self.config.algorithm.group_size, 2)

    def copies(self, role: str) -> int:
        """Copies of a learner's model in the rehearsal, which share the rows of a mini-batch."""
        if role not in self.small.components:
            return 1
        section = self.config.section(role)
        section = section.model_copy(update={"parallel": small_parallel(section.parallel)})
        return data_parallel(section, self.small.world_size(role))

    @cached_property
    def mini_batch(self) -> int:
        if self.embodied:
            return self.num_envs * self.rollout_steps // self.config.actor.model.num_action_chunks // self.updates
        return ROWS * max(self.copies(role) for role in LEARNERS)

    def micro_batch(self, role: str) -> int | None:
        """Returns the rows of a micro-batch: half of a rank's share if the config splits mini-batches, else all of
        it."""
        size = self.config.section(role).micro_batch_size
        if size is None:
            return None
        if size >= self.config.mini_batch_size(role):
            return self.critic_mini_batch or self.mini_batch if role == "critic" else self.mini_batch
        return self.mini_batch // 2 if self.embodied else ROWS // 2

    @property
    def critic_mini_batch(self) -> int | None:
        """Rows of a mini-batch of the critic's own size: a rollout or half of it."""
        own, data = self.config.critic.mini_batch_size, self.config.data
        if own is None:
            return None
        several = data.train_batch_size * self.config.algorithm.group_size > own
        return self.mini_batch * self.updates // (2 if several else 1)

    @property
    def prompts(self) -> int:
        """Prompts of a step."""
        return self.mini_batch * self.updates // self.group

    @property
    def prompt_length(self) -> int:
        longest = self.config.data.max_prompt_length
        return longest if self.materials.real_tokenizer else longest * BYTES_PER_TOKEN

    @property
    def response(self) -> int:
        return min(self.config.data.max_response_length, CONVERSATION if self.config.rollout.multi_turn else RESPONSE)

    @property
    def engine_ranks(self) -> int:
        """Ranks of SGLang or vLLM that share a model, in the config."""
        owned = max(len(slot.accelerators) for slot in self.placement.components["rollout"])
        return self.config.rollout.tensor_parallel_size or owned

    @property
    def sequence(self) -> int:
        """Tokens of prompt and response."""
        return self.prompt_length + self.response

    # embodied

    @property
    def parts(self) -> int:
        """Equal parts of the environments: env ranks, each in stages."""
        return self.small.world_size("env") * self.config.env.pipeline_stages

    @property
    def workers(self) -> int:
        workers = self.config.env.num_workers
        return workers and self.parts * min(2, max(1, workers // self.parts))

    @property
    def num_envs(self) -> int:
        unit = math.lcm(self.parts, max(self.workers, 1), max(len(self.config.env.tasks), 1) * self.group)
        return unit if unit > 1 or self.config.env.num_envs == 1 else 2

    @property
    def sequence_length(self) -> int | None:
        """Of a recurrent policy: up to 8 steps. They divide those of a rollout, of an episode, and the rows of a
        micro-batch."""
        model = self.config.actor.model
        if model.type != "gru":
            return model.sequence_length
        rows = math.gcd(self.mini_batch, self.micro_batch("actor") or self.mini_batch)
        if model.sequence_length is None:
            return None if rows % self.rollout_steps == 0 else math.gcd(rows, 8)
        power_of_two = 1 << (min(model.sequence_length, 8).bit_length() - 1)
        return math.gcd(rows, power_of_two)

    @property
    def rollout_steps(self) -> int:
        return 16 * self.config.actor.model.num_action_chunks

    @property
    def episode_steps(self) -> int:
        """Steps of an episode at most; they divide those of a rollout that plays whole episodes."""
        longest = self.config.env.max_episode_steps or 50
        if self.config.whole_episodes:
            return self.rollout_steps // min(2, self.config.env.rollout_steps // longest)
        return min(longest, 50)

    @property
    def episodes(self) -> int:
        return max(len(self.config.env.tasks), 1)


def small_heads(heads: int, kv_heads: int) -> tuple[int, int]:
    """Returns numbers of attention heads and of key and value heads that keep their relation: equal, grouped, one."""
    if kv_heads == 1:
        return min(heads, 4), 1
    return (2, 2) if heads == kv_heads else (4, 2)


def small_layers(layers: int, section: Trainable) -> int:
    """Returns the number of layers of a small model: two, or more for the stages of a pipeline."""
    parallel = small_parallel(section.parallel)
    return min(layers, max(2, parallel.pipeline * parallel.virtual_pipeline))
