"""`runner.warm_start`: behaviour cloning before the first PPO step, and demonstrations in PPO's loss.

The policy maximises the log-probs of the demonstrated actions. Its deviations and its value head are not trained, so
PPO explores as much as `initial_log_std` says. Observations are normalised by the moments of the demonstrations, which
stay as they are during PPO.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn

from rl_platform.algorithms.aggregation import Denominators, aggregate
from rl_platform.algorithms.losses import ModelOutputs
from rl_platform.algorithms.metrics import Metrics, over
from rl_platform.components.demonstrations.demonstration_files import read_demonstrations
from rl_platform.config.schema import Config
from rl_platform.engines.offloading.offload import onloaded
from rl_platform.engines.training.base import Loss, MicroBatches, TrainingEngine
from rl_platform.envs.embodied.normalize import ObservationNormalizer
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import Diverged
from rl_platform.records import RolloutBatch
from rl_platform.rng import generator

LEAST_DEVIATION = 1e-3  # is added, as robomimic does: a number that is constant in the demonstrations may change later
OBSERVATIONS, ACTIONS = "demonstrated_observations", "demonstrated_actions"
Progress = Callable[[int, int, str], object]


def demonstration_normalizer(spaces: EnvSpaces, clip: float, observations: np.ndarray) -> ObservationNormalizer:
    """Returns a normaliser with the moments of observations [N,D], which nothing changes."""
    normalizer = ObservationNormalizer(spaces.observation_shape, clip, spaces.normalized)
    normalizer.update(observations)
    state = normalizer.state_dict()
    deviations = np.sqrt(np.asarray(state["variance"])) + LEAST_DEVIATION
    kept = [*spaces.normalized] or [True] * len(deviations)
    state["variance"] = np.where(kept, deviations**2, 1.0).tolist()
    normalizer.load_state_dict(state)
    normalizer.frozen = True
    return normalizer


class Cloning:
    """The demonstrations of a run, normalised. Raises ConfigError as `read_demonstrations` does."""

    def __init__(self, config: Config, spaces: EnvSpaces, seed: int) -> None:
        assert config.runner.warm_start is not None
        self.settings, self.seed = config.runner.warm_start, seed
        read = read_demonstrations(self.settings, spaces)
        self.episodes, observations = read.episodes, read.observations
        self.normalizer: ObservationNormalizer | None = None
        if config.env.normalize_observations:
            self.normalizer = demonstration_normalizer(spaces, config.env.clip_observations, observations)
            observations = self.normalizer(observations)
        self._observations, self._actions = torch.from_numpy(observations), torch.from_numpy(read.actions)

    def train(self, engine: TrainingEngine, micro_batches: MicroBatches, progress: Progress) -> dict[str, float]:
        """Makes `updates` optimizer steps. Called on all ranks. Adam's moments are 0 afterwards.

        Returns the mean negative log-likelihood of the first and of the last tenth of them. Raises Diverged if a
        gradient is not finite.
        """
        settings, losses = self.settings, list[float]()
        engine.set_learning_rate(settings.lr)
        with onloaded(engine):
            deviations = [(part, part.clone()) for part in _parts(engine, "model.", "log_std")]
        for update in range(settings.updates):
            progress(update, settings.updates, "updates of the warm start")
            batch = self._mini_batch(generator(self.seed, "warm_start", update))
            metrics = engine.step(batch, likelihood_loss, micro_batches)
            if metrics is None:
                message = f"{settings.demonstrations}: the gradient of update {update} was not finite"
                raise Diverged(f"{message}. Lower runner.warm_start.lr")
            losses.append(metrics.mean("actor/demonstration_nll") or 0.0)
            with onloaded(engine):
                for part, value in deviations:
                    part.copy_(value)
        with onloaded(engine):
            for part in _parts(engine, "optimizer."):
                part.zero_()
        tenth = max(len(losses) // 10, 1)
        return {
            "warm_start/nll_first": float(np.mean(losses[:tenth])),
            "warm_start/nll_last": float(np.mean(losses[-tenth:])),
            "warm_start/updates": float(settings.updates),
            "warm_start/transitions": float(len(self._actions)),
            "warm_start/demonstrations": float(self.episodes),
        }

    def beside(self, batch: RolloutBatch, step: int) -> RolloutBatch:
        """Returns the batch with a demonstrated step for each of its positions, if they count in PPO's loss."""
        if not self.settings.nll_coef:
            return batch
        shape = batch.action_mask.shape
        observations, actions = self._drawn(shape.numel(), generator(self.seed, "demonstrations", step))
        more = {OBSERVATIONS: torch.unflatten(observations, 0, shape), ACTIONS: torch.unflatten(actions, 0, shape)}
        return replace(batch, inputs=batch.inputs | more)

    def loss(self, loss: Loss, model: nn.Module) -> Loss:
        """Returns PPO's loss plus `nll_coef` times the negative log-likelihood of the demonstrated actions.

        As in DAPG (Rajeswaran et al., 2018), with a constant weight.
        """
        coefficient = self.settings.nll_coef
        if not coefficient:
            return loss

        def with_demonstrations(
            outputs: ModelOutputs, batch: RolloutBatch, denominators: Denominators
        ) -> tuple[Tensor, Metrics]:
            total, metrics = loss(outputs, batch, denominators)
            inputs = {"observations": batch.inputs[OBSERVATIONS], "actions": batch.inputs[ACTIONS]}
            nll, own = likelihood_loss(model(replace(batch, inputs=inputs)), batch, denominators)
            return total + coefficient * nll, metrics.merge(own)

        return with_demonstrations

    def _mini_batch(self, draw: torch.Generator) -> RolloutBatch:
        observations, actions = self._drawn(self.settings.mini_batch_size, draw)
        rows = len(actions)
        return RolloutBatch(
            inputs={"observations": observations[:, None], "actions": actions[:, None]},
            action_mask=torch.ones(rows, 1, dtype=torch.bool),
            sample_mask=torch.ones(rows, dtype=torch.bool),
            group_ids=torch.arange(rows),
            rewards=torch.zeros(rows, 1),
            rollout_log_probs=torch.zeros(rows, 1),
        )

    def _drawn(self, rows: int, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """Observations and actions [rows,...] of steps that are drawn with replacement."""
        chosen = torch.randint(len(self._actions), (rows,), generator=draw)
        return self._observations[chosen], self._actions[chosen]


def likelihood_loss(outputs: ModelOutputs, batch: RolloutBatch, denominators: Denominators) -> tuple[Tensor, Metrics]:
    """Returns -1/N sum log pi(a|s) of a micro-batch: its part of the mini-batch's mean."""
    assert outputs.log_probs is not None
    loss = aggregate(-outputs.log_probs, batch.mask, denominators, "token-mean")
    count = batch.mask.sum() / max(denominators.tokens, 1.0)
    return loss, Metrics(means=over(count, {"actor/demonstration_nll": loss.detach()}))


def _parts(engine: TrainingEngine, kind: str, name: str = "") -> list[Tensor]:
    """Returns this rank's parts of the tensors of the engine's state whose names begin with `kind` and contain
    `name`."""
    state = engine.sharded_state().items()
    return [part for key, tensor in state if key.startswith(kind) and name in key for _, part in tensor.parts]
