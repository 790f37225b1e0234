"""Rollout of embodied policies: observations in, actions out.

`PolicyInference` acts, `PolicyRollout` is the component of a run. Environments send observations to its ranks through
channels (`RemotePolicy`), or call the only rank in their own process (`LocalPolicy`).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from rl_platform import acceleration
from rl_platform.components.actor import embodied_policy
from rl_platform.components.learner import device_of
from rl_platform.config.schema import Config
from rl_platform.envs.embodied.spaces import EnvSpaces
from rl_platform.errors import ChannelClosed, WorkerError
from rl_platform.models.policy import ActorCriticPolicy
from rl_platform.records import Weights, WeightsReceived
from rl_platform.rng import derive_seed
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.cpu import compute_alone
from rl_platform.runtime.host import ComponentContext
from rl_platform.tracing import recorder

if TYPE_CHECKING:
    from rl_platform.accel.compiled_policy import CompiledPolicy
    from rl_platform.models.embodied_policy import EmbodiedPolicy


class Observations(NamedTuple):
    """[N,D] float32, or uint8 of images. `draw` names the random numbers of this choice; `deterministic` needs none.

    among: (first, total) where these are rows of a larger choice, None: they are all of it. An observation gets the
    same random numbers whichever rank and micro-batch it is in. hidden_states [N,H] float32: of a recurrent policy,
    which stores none itself. tasks [N] int64: indices of the instructions, for a policy that reads them. valued: the
    answer has values, if the policy is one without memory, chunks and language.
    """

    array: np.ndarray
    draw: tuple[str | int, ...] = ()
    deterministic: bool = False
    among: tuple[int, int] | None = None
    hidden_states: np.ndarray | None = None
    tasks: np.ndarray | None = None
    valued: bool = False


class Actions(NamedTuple):
    """[N,A] float32 or [N] int64, and the log-probability [N] of each; of a policy that chooses chunks of K actions
    with D components [N,K,A] or [N,K], and [N,K,D].

    executed: the actions of the environment, in its shape, where they differ from those that the policy chose and is
    trained on, as bins and denoising chains do. hidden_states [N,H]: those after the observations, of a recurrent
    policy. values [N]: of `valued` observations.
    """

    array: np.ndarray
    log_probs: np.ndarray
    executed: np.ndarray | None = None
    hidden_states: np.ndarray | None = None
    values: np.ndarray | None = None

    @property
    def to_execute(self) -> np.ndarray:
        return self.array if self.executed is None else self.executed


class PolicyInference:
    """Answers observations with the actions of a policy. Its randomness depends on `seed` and `Observations.draw`
    alone.

    rows: the most observations of one forward pass; None: all. After a change of the parameters call `use_parameters`.
    """

    def __init__(self, policy: EmbodiedPolicy, device: torch.device, seed: int, rows: int | None) -> None:
        self.policy, self.device, self.seed, self.rows = policy.to(device), device, seed, rows
        self.generator = torch.Generator(device)
        self.compiled_class = acceleration.find("policy_class", self.policy, device)
        self.ahead: dict[tuple[str | int, ...], np.ndarray] = {}  # random numbers of coming choices
        self.use_parameters()

    def use_parameters(self) -> None:
        """Acts with the present parameters of the policy from now on."""
        self.compiled = None if self.compiled_class is None else self.compiled_class(self.policy)

    def act(self, observations: Observations) -> Actions:
        began = time.monotonic()
        first, total = observations.among or (0, len(observations.array))
        if self.compiled is not None:
            drawn = self.ahead.pop(observations.draw, None)
            if drawn is None:
                drawn = self._drawn(self.compiled, observations.draw, total, observations.deterministic)
            actions = Actions(*self.compiled.act(observations.array, drawn[first : first + len(observations.array)]))
        else:
            actions = self._act(observations, self._seed(observations.draw), first, total)
        if observations.valued and type(self.policy) is ActorCriticPolicy:
            with torch.inference_mode():
                _, values = self.policy(torch.from_numpy(observations.array).to(self.device))
            actions = actions._replace(values=values.cpu().numpy())
        recorder.add("work", "inference", began)
        return actions

    def draw_ahead(self, draws: Iterable[tuple[str | int, ...]], count: int) -> None:
        """Draws the random numbers of coming choices for `count` observations each.

        A choice then takes about 15 us less than with a draw of its own between two steps of the simulation.
        """
        if self.compiled is not None:
            self.ahead = {draw: self._drawn(self.compiled, draw, count, False) for draw in draws}

    def _drawn(
        self, compiled: CompiledPolicy, draw: tuple[str | int, ...], count: int, deterministic: bool
    ) -> np.ndarray:
        generator = None if deterministic else self.generator.manual_seed(self._seed(draw))
        return compiled.draw(count, generator)

    def _seed(self, draw: tuple[str | int, ...]) -> int:
        return derive_seed(self.seed, "rollout", *draw)

    @torch.inference_mode()
    def act_on_device(self, observations: Tensor, draw: tuple[str | int, ...]) -> tuple[Tensor, Tensor, Tensor]:
        """Chooses the actions of `act` with tensors of `device`, without waiting for it.

        observations [N,D] float32 -> actions [N,A], log_probs [N], executed [N,A]. For policies without memory, chunks
        and language.
        """
        count = len(observations)
        if self.compiled is not None:  # on a CPU, where arrays share the memory of tensors
            chosen = self.compiled.act(observations.numpy(), self._drawn(self.compiled, draw, count, False))
            actions, log_probs = (torch.from_numpy(array) for array in chosen)
            return actions, log_probs, actions
        seen = {"observations": observations}
        actions, log_probs, _, executed = self._chosen(seen, self._seed(draw), False, 0, count)
        return actions, log_probs, executed

    @torch.inference_mode()
    def _act(self, observations: Observations, seed: int, first: int, total: int) -> Actions:
        known = {"hidden_states": observations.hidden_states, "tasks": observations.tasks}
        arrays = {"observations": observations.array}
        arrays |= {name: array for name, array in known.items() if array is not None}
        seen = {name: torch.from_numpy(array).to(self.device) for name, array in arrays.items()}
        actions, log_probs, states, executed = self._chosen(seen, seed, observations.deterministic, first, total)
        return Actions(
            actions.cpu().numpy(),
            log_probs.cpu().numpy(),
            executed=None if executed is actions else executed.cpu().numpy(),
            hidden_states=states[0].cpu().numpy() if states else None,
        )

    def _chosen(
        self, seen: dict[str, Tensor], seed: int, deterministic: bool, first: int, total: int
    ) -> tuple[Tensor, Tensor, list[Tensor], Tensor]:
        """Returns actions, log-probs, hidden states if there are any, and the actions to execute."""
        options = {"generator": self.generator, "deterministic": deterministic}
        count, parts = len(seen["observations"]), []
        act = cast("Callable[..., tuple[Tensor, ...]]", self.policy.act)
        for rows in zip(*(torch.split(each, self.rows or count) for each in seen.values()), strict=True):
            self.generator.manual_seed(seed)
            parts.append(act(**dict(zip(seen, rows, strict=True)), **options, among=(first, total)))
            first += len(rows[0])
        actions, log_probs, *states = (torch.cat(field) for field in zip(*parts, strict=True))
        return actions, log_probs, states, self.policy.executed(actions)


class PolicyRollout(PolicyInference):
    """The component of a run: it receives weights and serves channels.

    Components in the same process find it in `context.shared` and may call `act` without a channel.
    """

    def __init__(self, context: ComponentContext, config: Config, spaces: EnvSpaces) -> None:
        self.context = context
        device = device_of(context, config)
        policy = embodied_policy(config, spaces, context.seed)
        super().__init__(policy, device, context.seed, config.algorithm.rollout_micro_batch_size)
        self.version = -1
        self.places: list[int] = []  # of the parameters in memory, as they were received last
        if self.device.type == "cpu":
            compute_alone()  # a few rows: a thread pool would take longer, and the simulation needs the cores
        context.shared[context.label] = self

    def receive(self, weights: Weights) -> WeightsReceived:
        """Loads these weights; later actions are chosen with them."""
        self.version = -1  # until all of them are there
        state = {name: tensor.to(self.device) for name, tensor in weights.state.items()}
        places = [tensor.data_ptr() for tensor in state.values()]
        if places != self.places:  # else the policy's own parameters are these tensors already
            self.places = []  # if one is missing, some are loaded already
            self.policy.load_state_dict(state, assign=True)
            self.places = places
        self.use_parameters()
        self.version = weights.version
        return WeightsReceived(weights.version, weights.bytes, weights.buckets)

    def serve(self, source: Channel[Observations], sink: Channel[Actions]) -> None:
        """Answers observations until `source` is closed. Raises WorkerError without a complete set of weights."""
        self.check_complete()
        key = self.context.rank if self.context.world_size > 1 else None
        while True:
            try:
                observations = source.get(key=key)
            except ChannelClosed:
                return
            sink.put(self.act(observations), key=key)

    def check_complete(self) -> None:
        """Raises WorkerError without a complete set of weights."""
        if self.version < 0:
            raise WorkerError(f"{self.context.label} has no complete weights: its last receive() did not end well")


@dataclass(frozen=True)
class RemotePolicy:
    """The channels to and from `ranks` rollout ranks; with several, a message's key is the rank."""

    to_policy: Channel[Observations]
    from_policy: Channel[Actions]
    ranks: int = 1

    def request(self, observations: Observations) -> None:
        """Sends observations; several batches of them may await their actions."""
        if self.ranks == 1:
            self.to_policy.put(observations)
            return
        count = len(observations.array)
        for rank, rows in self._parts(count):
            states, tasks = observations.hidden_states, observations.tasks
            part = observations._replace(
                array=observations.array[rows],
                among=(rows.start, count),
                hidden_states=None if states is None else states[rows],
                tasks=None if tasks is None else tasks[rows],
            )
            self.to_policy.put(part, key=rank)

    def actions(self, count: int) -> Actions:
        """Returns the actions for the `count` observations that were sent first."""
        if self.ranks == 1:
            return self.from_policy.get()
        parts = [self.from_policy.get(key=rank) for rank, _ in self._parts(count)]
        names = [name for name in Actions._fields if getattr(parts[0], name) is not None]
        return Actions(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def _parts(self, count: int) -> Iterator[tuple[int, slice]]:
        """Yields the ranks that have rows, with these."""
        for rank in range(self.ranks):
            first, last = count * rank // self.ranks, count * (rank + 1) // self.ranks
            if last > first:
                yield rank, slice(first, last)


class LocalPolicy:
    """The only rollout rank, which is in this process: it acts in the thread of the caller, without a channel.

    rollout: that rank, with complete weights.
    """

    def __init__(self, rollout: PolicyRollout) -> None:
        """Raises WorkerError if it has no complete weights."""
        rollout.check_complete()
        if rollout.device.type == "cpu" and torch.get_num_threads() > 1:
            compute_alone()  # as the rollout's own thread does
        self.rollout = rollout
        self._pending: deque[Actions] = deque()

    def request(self, observations: Observations) -> None:
        """Computes actions; several batches of them may wait for `actions`."""
        self._pending.append(self.rollout.act(observations))

    def actions(self, count: int) -> Actions:
        """Returns the actions for the `count` observations that were given first."""
        return self._pending.popleft()


Policy = RemotePolicy | LocalPolicy
