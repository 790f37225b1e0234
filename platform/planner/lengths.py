"""Distributions of prompt and response lengths, and the sizes of the batches during decoding.

Without a measurement prompts have half of their greatest length, because the limit is that of the longest one.
Responses have their greatest length unless `data.expected_response_length` is set. `calibration` reads the lengths of
other runs, `rates` those of samples of the data.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from rl_platform.config.schema import Config

POINTS = 32  # values of a distribution
DETAILED = 4  # the last responses of a slot are simulated one by one; before them the batch is full


@dataclass(frozen=True)
class Lengths:
    """Tokens of prompts and of responses: equally likely values in ascending order, and their sources in words.

    inserted: mean tokens of a response that come from a tool or an environment.
    """

    prompts: tuple[int, ...]
    responses: tuple[int, ...]
    inserted: float = 0.0
    prompt_source: str = "their limit"
    response_source: str = "their limit"

    @property
    def prompt(self) -> float:
        return sum(self.prompts) / len(self.prompts)

    @property
    def response(self) -> float:
        """Mean tokens that the policy samples."""
        return sum(self.responses) / len(self.responses)

    @property
    def sequence(self) -> float:
        """Mean tokens of prompt and response."""
        return self.prompt + self.response + self.inserted

    @property
    def context(self) -> float:
        """The length of equal sequences with the same attention scores per token: E[L^2] / E[L]."""
        # E[(P + R)^2] = E[P^2] + 2 E[P] E[R] + E[R^2] of independent prompts P and responses R
        added = [length + self.inserted for length in self.responses]
        squares = sum(length**2 for length in self.prompts) / len(self.prompts)
        squares += 2 * self.prompt * sum(added) / len(added) + sum(length**2 for length in added) / len(added)
        return squares / self.sequence

    def __str__(self) -> str:
        inserted = f", {self.inserted:.3g} of tools" if self.inserted else ""
        texts = [f"prompts {self.prompt:.4g} tokens", f"responses {self.response:.4g}{inserted}"]
        if self.prompt_source == self.response_source:
            return f"{', '.join(texts)} ({self.prompt_source})"
        return f"{texts[0]} ({self.prompt_source}), {texts[1]} ({self.response_source})"


def limits(config: Config) -> Lengths:
    """Returns the greatest lengths that a config allows. `sampling.max_new_tokens` limits one of several turns."""
    rollout, longest = config.rollout, config.data.max_response_length
    turns = 1
    if rollout.multi_turn is not None:
        turns = rollout.multi_turn.max_turns
    elif rollout.agent is not None:
        turns = rollout.agent.max_calls
    tokens = min(turns * (rollout.sampling.max_new_tokens or longest), longest)
    return Lengths((config.data.max_prompt_length,), (tokens,))


def expected(config: Config) -> Lengths:
    """Returns the lengths before a measurement: prompts of half the limit, and responses of the greatest length or of
    `data.expected_response_length`."""
    known, mean = limits(config), config.data.expected_response_length
    known = replace(known, prompts=(-(-known.prompts[0] // 2),), prompt_source="half of their limit")
    if mean is None:
        return known
    source = "data.expected_response_length"
    return replace(known, responses=spread(1, mean, known.responses[0]), response_source=source)


def spread(least: float, mean: float, most: float) -> tuple[int, ...]:
    """Returns a distribution with this minimum, mean and maximum."""
    # least + (most - least) u^k of uniform u
    if not least < mean < most:
        return (max(1, round(mean)),)
    # E[u^k] = 1 / (k + 1)
    exponent = (most - least) / (mean - least) - 1
    points = ((index + 0.5) / POINTS for index in range(POINTS))
    return tuple(max(1, round(least + (most - least) * point**exponent)) for point in points)


def sampled(values: Sequence[int]) -> tuple[int, ...]:
    """Returns up to POINTS values with the quantiles of `values`."""
    ordered, count = sorted(values), min(len(values), POINTS)
    return tuple(ordered[int((index + 0.5) * len(ordered) / count)] for index in range(count))


def of_metrics(metrics: Mapping[str, float], config: Config, source: str) -> Lengths:
    """Returns lengths from the metrics `len/*` of a run, cut at the limits of `config`; without a metric, the limit."""
    known, first = limits(config), expected(config)
    prompts, responses = first.prompts, first.responses
    sources = [first.prompt_source, first.response_source]
    if (mean := metrics.get("len/prompt_mean")) is not None:
        most = metrics.get("len/prompt_max", mean)
        prompts = tuple(min(length, known.prompts[0]) for length in spread(max(1, 2 * mean - most), mean, most))
        sources[0] = source
    if (mean := metrics.get("len/response_mean")) is not None:
        least, most = metrics.get("len/response_min", mean), metrics.get("len/response_max", mean)
        responses = tuple(min(length, known.responses[0]) for length in spread(least, mean, most))
        sources[1] = source
    return Lengths(prompts, responses, metrics.get("len/observation_mean", 0.0), *sources)


@lru_cache(maxsize=1024)
def decoding(responses: tuple[int, ...], share: int, running: int) -> tuple[tuple[float, float], ...]:
    """Returns the batches of `share` responses in `running` slots, each as (sequences, steps).

    The slot of a finished response takes the next response, so the batch shrinks when none is left. Batches of similar
    size are joined.
    """
    if len(responses) == 1:
        full, rest = divmod(share, running)
        return tuple((count, steps) for count, steps in ((running, full * responses[0]), (rest, responses[0])) if count)
    detailed = min(share, DETAILED * running)
    before = (share - detailed) * sum(responses) / len(responses) / running
    lengths = [responses[int((index + 0.5) * len(responses) / detailed)] for index in range(detailed)]
    random.Random(0).shuffle(lengths)
    ends = lengths[:running]
    heapq.heapify(ends)
    for length in lengths[running:]:
        heapq.heapreplace(ends, ends[0] + length)
    batches: dict[int, tuple[float, float]] = {}  # logarithm of the size -> steps, tokens
    last, left = -before, len(ends)
    for end in sorted(ends):
        steps, tokens = batches.get(left.bit_length(), (0.0, 0.0))
        batches[left.bit_length()] = steps + end - last, tokens + (end - last) * left
        last, left = end, left - 1
    return tuple((tokens / steps, steps) for steps, tokens in batches.values() if steps)
