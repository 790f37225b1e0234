"""Rules of `reward`, and of the keys of `algorithm` that change its scores: scaling, length, truncation."""

from __future__ import annotations

from urllib.parse import urlsplit

from rl_platform.config.rules.rule import FUNCTION, TASK, Rule, embodied, only, reasoning
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import RewardScaling
from rl_platform.config.schema.reward import VERIFIERS
from rl_platform.config.suggest import nearest

_TYPE, _TYPES = "reward.type", (*VERIFIERS, "model", "http")
_SCALING, _OVERLONG = "algorithm.reward_scaling", "algorithm.overlong"
_COEF, _BUFFER, _MAX = (f"{_OVERLONG}.{name}" for name in ("stop_properly_coef", "buffer_length", "max_length"))
_LESS = "multiplying a negative reward by a factor below 1 would reward truncation"


def _is_address(url: str) -> bool:
    """True for a URL that a request can be posted to. User and password would not be sent, so they are refused."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
    return named and "@" not in parts.netloc and url.isascii() and url.isprintable() and " " not in url


def _hint_of_type(config: Config) -> str:
    close = nearest(config.reward.type, _TYPES)
    return f"did you mean {close}?" if close else ""


def _range_rule(side: str, reason: str) -> Rule:
    low = f"{_SCALING}.{side}_min"

    def is_empty(scaling: RewardScaling) -> bool:
        return bool(getattr(scaling, f"{side}_max") <= getattr(scaling, f"{side}_min"))

    return Rule(
        f"{_SCALING}.{side}_max",
        lambda config: (scaling := config.algorithm.reward_scaling) is not None and is_empty(scaling),
        lambda config: f"must be above {low}, {getattr(config.algorithm.reward_scaling, f'{side}_min'):g}: {reason}",
        (low,),
    )


def _limit(config: Config) -> tuple[str, int]:
    """The key and the length in tokens at which the soft punishment is full."""
    longest = config.algorithm.overlong.max_length
    return ("data.max_response_length", config.data.max_response_length) if longest is None else (_MAX, longest)


def _longest_response(config: Config) -> tuple[str, int]:
    """The key and the length in tokens of the longest response. Several turns may add up to more than one is long."""
    sampled = None if config.rollout.multi_turn else config.rollout.sampling.max_new_tokens
    if sampled is None:
        return "data.max_response_length", config.data.max_response_length
    return "rollout.sampling.max_new_tokens", sampled


def _threshold(config: Config) -> int:
    """Tokens from which on a response is punished."""
    return _limit(config)[1] - (config.algorithm.overlong.buffer_length or 0)


def _lowest_reward(config: Config) -> float:
    scaling = config.algorithm.reward_scaling
    return 0.0 if scaling is None else scaling.target_min


_LENGTHS = ("data.max_response_length", _MAX, "rollout.sampling.max_new_tokens")

REFUSED = only(
    reasoning,
    Rule(
        _TYPE,
        lambda config: config.reward.type not in _TYPES and not FUNCTION.fullmatch(config.reward.type),
        f"neither one of {', '.join(_TYPES)} nor a function written as module:function",
        (TASK,),
        _hint_of_type,
    ),
    Rule(
        "reward.model",
        lambda config: config.reward.type == "model" and config.reward.model is None,
        "reward.type model needs the classifier that scores",
        (_TYPE,),
        "as reward.model: {path: FOLDER}",
    ),
    Rule(
        "reward.url",
        lambda config: config.reward.type == "http" and not _is_address(config.reward.url or ""),
        "reward.type http needs the address of the server that scores",
        (_TYPE,),
        "as http://HOST:PORT/score",
    ),
    _range_rule("source", "an empty range of scores cannot be stretched"),
    _range_rule("target", "better answers would earn no more"),
    *only(
        lambda config: config.algorithm.overlong.buffer_length is not None,
        Rule(
            _BUFFER,
            lambda config: _threshold(config) < 0,
            lambda config: (
                f"the buffer is the end of the longest response, {_limit(config)[1]} tokens ({_limit(config)[0]})"
            ),
            _LENGTHS,
        ),
        Rule(
            _BUFFER,
            lambda config: _threshold(config) >= _longest_response(config)[1],
            lambda config: (
                f"punishes responses of more than {_threshold(config)} tokens, and none has more than "
                f"{_longest_response(config)[1]} ({_longest_response(config)[0]})"
            ),
            _LENGTHS,
            lambda config: f"{_MAX}: {_longest_response(config)[1]}",
        ),
    ),
    *only(
        lambda config: config.algorithm.overlong.stop_properly_coef is not None,
        Rule(
            _COEF,
            lambda config: config.algorithm.overlong.buffer_length is not None,
            "truncated responses would be punished twice, by the factor and by the soft punishment of " + _BUFFER,
            (_BUFFER,),
            "keep one of them",
        ),
        Rule(
            _COEF,
            lambda config: config.algorithm.overlong.filter,
            f"truncated responses do not count, {_OVERLONG}.filter drops them",
            (f"{_OVERLONG}.filter",),
            "keep one of them",
        ),
        Rule(
            _COEF,
            lambda config: (scaling := config.algorithm.reward_scaling) is not None and scaling.target_min < 0,
            lambda config: f"{_LESS}, and {_SCALING}.target_min is {_lowest_reward(config):g}",
            (_SCALING, f"{_SCALING}.target_min"),
            f"{_BUFFER} subtracts instead",
        ),
        Rule(
            _COEF,
            lambda config: (
                config.algorithm.reward_scaling is None
                and (":" in config.reward.type or config.reward.type in ("model", "http"))
            ),
            lambda config: f"{_LESS}, and the scores of {config.reward.type} (reward.type) may be negative",
            (_TYPE, _SCALING),
            f"{_SCALING} gives them a known range",
        ),
    ),
)

WITHOUT_EFFECT = (
    Rule("reward", embodied, "embodied rewards come from the environment", (TASK,)),
    Rule(
        _SCALING,
        embodied,
        "it maps the scores of responses; see env.normalize_rewards",
        (TASK,),
    ),
    Rule(
        "algorithm.reward_whitening",
        embodied,
        "it scales the scores of responses; see env.normalize_rewards",
        (TASK,),
    ),
    Rule(_OVERLONG, embodied, "embodied episodes have no responses with a length", (TASK,)),
    *only(
        reasoning,
        Rule(
            "reward.model",
            lambda config: config.reward.type != "model",
            "only reward.type model has a classifier",
            (_TYPE,),
        ),
        *(
            Rule(
                f"reward.{name}",
                lambda config: config.reward.type != "http",
                "only reward.type http asks a server",
                (_TYPE,),
            )
            for name in ("url", "retries")
        ),
        Rule(
            "reward.max_batch_size",
            lambda config: config.reward.type not in ("model", "http"),
            lambda config: f"reward.type {config.reward.type} scores responses one by one",
            (_TYPE,),
        ),
        *(
            Rule(
                f"reward.{name}",
                lambda config: config.reward.type == "model",
                "a classifier scores in the reward's own process, one batch after another",
                (_TYPE,),
            )
            for name in ("num_workers", "timeout_s")
        ),
    ),
    *(
        Rule(
            f"{_OVERLONG}.{name}",
            lambda config: config.algorithm.overlong.buffer_length is None,
            f"{_BUFFER} is null: no soft punishment",
            (_BUFFER,),
        )
        for name in ("penalty", "max_length")
    ),
)
