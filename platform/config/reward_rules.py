"""Rules between the keys that change rewards: scaling, shaping by length, filtering. `checks.py` reports them."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rl_platform.config.rules import BrokenRule
from rl_platform.config.schema import Config

SCALING, OVERLONG = "algorithm.reward_scaling", "algorithm.overlong"
_COEF, _BUFFER, _MAX = (f"{OVERLONG}.{name}" for name in ("stop_properly_coef", "buffer_length", "max_length"))


def broken_reward_rules(config: Config) -> Iterator[BrokenRule]:
    """Of a reasoning config."""
    yield from _scorer(config)
    yield from _scaling(config)
    yield from _soft_punishment(config)
    yield from _stop_properly(config)


def idle_reward_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Keys of `reward` that the chosen type does not read, the reason, and the key that decides it."""
    kind, switch = config.reward.type, ("reward.type",)
    if kind != "model":
        yield "reward.model", "only reward.type model has a classifier", switch
    if kind != "http":
        for name in ("url", "retries"):
            yield f"reward.{name}", "only reward.type http asks a server", switch
    if kind not in ("model", "http"):
        yield "reward.max_batch_size", f"reward.type {kind} scores responses one by one", switch
    if kind == "model":
        for name in ("num_workers", "timeout_s"):
            yield f"reward.{name}", "a classifier scores in the reward's own process, one batch after another", switch


def _scorer(config: Config) -> Iterator[BrokenRule]:
    """What the types model and http cannot do without."""
    reward, switch = config.reward, ("reward.type",)
    if reward.type == "model" and reward.model is None:
        hint = "as reward.model: {path: FOLDER}"
        yield BrokenRule("reward.model", "reward.type model needs the classifier that scores", switch, hint)
    if reward.type == "http" and not _is_address(reward.url or ""):
        message = "reward.type http needs the address of the server that scores"
        yield BrokenRule("reward.url", message, switch, "as http://HOST:PORT/score")


def _is_address(url: str) -> bool:
    """Whether a request can be posted there. User and password would not be sent, so they are refused."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
    return named and "@" not in parts.netloc and url.isascii() and url.isprintable() and " " not in url


def _scaling(config: Config) -> Iterator[BrokenRule]:
    scaling = config.algorithm.reward_scaling
    if scaling is None:
        return
    for side, why in (
        ("source", "an empty range of scores cannot be stretched"),
        ("target", "better answers would earn no more"),
    ):
        low, high = (f"{SCALING}.{side}_{end}" for end in ("min", "max"))
        least, most = getattr(scaling, f"{side}_min"), getattr(scaling, f"{side}_max")
        if most <= least:
            yield BrokenRule(high, f"must be above {low}, {least:g}: {why}", (low,))


def _soft_punishment(config: Config) -> Iterator[BrokenRule]:
    overlong = config.algorithm.overlong
    if overlong.buffer_length is None:
        return
    limit_key = "data.max_response_length" if overlong.max_length is None else _MAX
    limit = config.data.max_response_length if overlong.max_length is None else overlong.max_length
    if overlong.buffer_length > limit:
        message = f"the buffer is the end of the longest response, {limit} tokens ({limit_key})"
        yield BrokenRule(_BUFFER, message, (limit_key,))
        return
    sampled = None if config.rollout.multi_turn else config.rollout.sampling.max_new_tokens
    longest = config.data.max_response_length if sampled is None else sampled
    longest_key = "data.max_response_length" if sampled is None else "rollout.sampling.max_new_tokens"
    if limit - overlong.buffer_length >= longest:
        message = f"punishes responses of more than {limit - overlong.buffer_length} tokens, and none has"
        message = f"{message} more than {longest} ({longest_key})"
        yield BrokenRule(_BUFFER, message, (limit_key, longest_key), f"{_MAX}: {longest}")


def _stop_properly(config: Config) -> Iterator[BrokenRule]:
    overlong, scaling = config.algorithm.overlong, config.algorithm.reward_scaling
    if overlong.stop_properly_coef is None:
        return
    if overlong.buffer_length is not None:
        message = "truncated responses would be punished twice, by the factor and by the soft punishment of"
        yield BrokenRule(_COEF, f"{message} {_BUFFER}", (_BUFFER,), "keep one of them")
    if overlong.filter:
        switch = f"{OVERLONG}.filter"
        yield BrokenRule(_COEF, f"truncated responses do not count, {switch} drops them", (switch,), "keep one of them")
    less = "multiplying a negative reward by a factor below 1 would reward truncation"
    if scaling is not None and scaling.target_min < 0:
        message = f"{less}, and {SCALING}.target_min is {scaling.target_min:g}"
        yield BrokenRule(_COEF, message, (SCALING, f"{SCALING}.target_min"), f"{_BUFFER} subtracts instead")
    if scaling is None and (":" in config.reward.type or config.reward.type in ("model", "http")):
        message = f"{less}, and the scores of {config.reward.type} (reward.type) may be negative"
        yield BrokenRule(_COEF, message, ("reward.type", SCALING), f"{SCALING} gives them a known range")
