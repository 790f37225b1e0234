"""Rules of `reward`, and of the keys of `algorithm` that change its scores: scaling, length, truncation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Set
from functools import partial
from urllib.parse import urlsplit

from rl_platform.config.rules.rule import TASK, Unread, embodied, reasoning, unknown_name, unread_keys, when
from rl_platform.config.schema import Config
from rl_platform.config.schema.reward import VERIFIERS, Judge, Scoring, WeightedReward
from rl_platform.errors import Problem

_TYPE, _TYPES = "reward.type", (*VERIFIERS, "code", "model", "judge", "http")
_SCALING, _OVERLONG = "algorithm.reward_scaling", "algorithm.overlong"
_COEF, _BUFFER, _MAX = (f"{_OVERLONG}.{name}" for name in ("stop_properly_coef", "buffer_length", "max_length"))
_OWN = "type exact num_workers timeout_s max_batch_size model judge url code isolation retries"
TAKEN = (  # metrics `reward/...`
    *("filtered", "kl", "kl_coef", "max", "mean", "min", "out_of_range", "process_mean", "process_moved", "raw_mean"),
    "unscored",
)
_LESS = "multiplying a negative reward by a factor below 1 would reward truncation"


def refused(config: Config) -> Iterator[Problem]:
    """Yields the problems of the keys of `reward`."""
    if not when(lambda: reasoning(config)):
        return
    for key, part in when(lambda: config.reward.parts) or ():
        yield from _part(key, part)
    functions = when(lambda: config.reward.functions) or []
    yield from _functions(functions)
    weights = [when(partial(getattr, function, "weight")) for function in functions]
    if functions and not any(weight != 0 for weight in weights) and when(lambda: config.rollout.agent is None):
        message = "all weights are 0, so every reward is 0 and nothing can be learned"
        yield Problem("reward.functions", message, hint="weight: 1.0, of the function that decides")
    scaling = when(lambda: config.algorithm.reward_scaling)
    if scaling is not None:
        if when(lambda: scaling.source_max <= scaling.source_min):
            message = f"must be above {_SCALING}.source_min, {scaling.source_min:g}"
            yield Problem(f"{_SCALING}.source_max", f"{message}: the range of scores would be empty")
        if when(lambda: scaling.target_max <= scaling.target_min):
            message = f"must be above {_SCALING}.target_min, {scaling.target_min:g}"
            yield Problem(f"{_SCALING}.target_max", f"{message}: better answers would get no higher reward")
    if when(lambda: config.algorithm.overlong.buffer_length is not None):
        yield from _soft_punishment(config)
    if when(lambda: config.algorithm.overlong.stop_properly_coef is not None):
        yield from _factor_of_truncation(config)


def _part(key: str, part: Scoring) -> Iterator[Problem]:
    if unknown := when(lambda: unknown_name(f"{key}.type", part.type, _TYPES)):
        yield unknown
    if when(lambda: part.type == "model" and part.model is None):
        yield Problem(f"{key}.model", f"{key}.type model needs a classifier", hint="for example model: {path: FOLDER}")
    if when(lambda: part.type == "model" and part.asks_server and not _is_address(part.address or "")):
        yield _no_address(f"{key}.model.url", "", "the server's classify", "http://HOST:8000/classify")
    judge = when(lambda: part.judge if part.type == "judge" else None)
    if judge is not None:
        yield from _judge(f"{key}.judge", judge)
    elif when(lambda: part.type == "judge" and part.judge is None):
        hint = "for example judge: {url: ..., model: ..., template: ...}"
        yield Problem(f"{key}.judge", f"{key}.type judge needs a server, a model and a template", hint=hint)
    if when(lambda: part.type == "http" and not _is_address(part.url or "")):
        yield _no_address(f"{key}.url", f"{key}.type http ", "a scoring server", "http://HOST:PORT/score")
    code = when(lambda: part.code if part.type == "code" else None)
    if code is not None and when(lambda: code.url is not None and not _is_address(code.url)):
        yield _no_address(f"{key}.code.url", "", "run_code", "http://HOST:8080/run_code")


def _no_address(key: str, subject: str, what: str, example: str) -> Problem:
    message = f"{subject}needs the http:// or https:// address of {what}, without user and password"
    return Problem(key, message, hint=f"for example {example}")


def _judge(key: str, judge: Judge) -> Iterator[Problem]:
    if when(lambda: not _is_address(judge.url)):
        yield _no_address(f"{key}.url", "", "chat completions", "http://HOST:PORT/v1/chat/completions")
    if when(lambda: "{response}" not in judge.template):
        yield Problem(f"{key}.template", "without {response} the judge would not see the response")
    if when(lambda: judge.verdict is not None and _groups(judge.verdict) != 1):
        message = "must be a regular expression with exactly one group, the score"
        yield Problem(f"{key}.verdict", message, hint=r"for example 'Score: (\d+(?:\.\d+)?)'")


def _groups(pattern: str) -> int:
    """Returns the number of groups of a regular expression, -1 if it is none."""
    try:
        return re.compile(pattern).groups
    except re.error:
        return -1


def _may_be_negative(part: Scoring) -> bool:
    return ":" in part.type or part.type in ("model", "judge", "http")


def _functions(functions: list[WeightedReward]) -> Iterator[Problem]:
    labels = [when(partial(getattr, function, "label")) for function in functions]
    models = [index for index, function in enumerate(functions) if when(partial(getattr, function, "computes_model"))]
    for index, label in enumerate(labels):
        key = f"reward.functions[{index}].name"
        if label is not None and label in labels[:index]:
            yield Problem(key, f"there is a function {label} already: metrics are named by it", hint="name: OTHER")
        elif label in TAKEN:
            yield Problem(key, f"the metric reward/{label} is another one", hint="name: OTHER")
        if index in models[1:]:
            message = "a reward rank holds one reward model"
            yield Problem(f"reward.functions[{index}].type", message, hint="serve the others: model.url, or type http")


def _is_address(url: str) -> bool:
    """Returns True for a URL that a request can be posted to. User and password would not be sent, so they are
    refused."""
    try:
        parts = urlsplit(url)
        named = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False
    return named and "@" not in parts.netloc and url.isascii() and url.isprintable() and " " not in url


def _soft_punishment(config: Config) -> Iterator[Problem]:
    overlong, data, rollout = config.algorithm.overlong, config.data, config.rollout

    def full_at() -> tuple[str, int]:
        """Returns the key and the length in tokens at which the soft punishment is full."""
        if overlong.max_length is None:
            return "data.max_response_length", data.max_response_length
        return _MAX, overlong.max_length

    def longest_response() -> tuple[str, int]:
        """Returns the key and the length of the longest response. Several turns may add up to more than one is long."""
        sampled = None if rollout.multi_turn or rollout.agent else rollout.sampling.max_new_tokens
        if sampled is None:
            return "data.max_response_length", data.max_response_length
        return "rollout.sampling.max_new_tokens", sampled

    def threshold() -> int:
        """Returns the number of tokens from which on a response is punished."""
        return full_at()[1] - (overlong.buffer_length or 0)

    if when(lambda: threshold() < 0):
        key, limit = full_at()
        yield Problem(_BUFFER, f"the buffer cannot be longer than the longest response, {limit} tokens ({key})")
    if when(lambda: threshold() >= longest_response()[1]):
        key, longest = longest_response()
        message = f"the penalty starts above {threshold()} tokens, and no response has more than {longest} ({key})"
        yield Problem(_BUFFER, message, hint=f"{_MAX}: {longest}")


def _factor_of_truncation(config: Config) -> Iterator[Problem]:
    algorithm, reward = config.algorithm, config.reward
    if when(lambda: algorithm.overlong.buffer_length is not None):
        message = f"truncated responses would be punished twice, by this factor and by the penalty of {_BUFFER}"
        yield Problem(_COEF, message, hint="keep one of them")
    if when(lambda: algorithm.overlong.filter):
        message = f"{_OVERLONG}.filter already drops truncated responses"
        yield Problem(_COEF, message, hint="keep one of them")
    lowest = when(lambda: None if algorithm.reward_scaling is None else algorithm.reward_scaling.target_min)
    if lowest is not None and lowest < 0:
        message = f"{_LESS}, and {_SCALING}.target_min is {lowest:g}"
        yield Problem(_COEF, message, hint=f"{_BUFFER} subtracts a penalty instead")
    for key, part in when(lambda: [] if algorithm.reward_scaling else reward.parts) or ():
        if when(partial(_may_be_negative, part)):
            message = f"{_LESS}, and the scores of {part.type} ({key}.type) may be negative"
            yield Problem(_COEF, message, hint=f"{_SCALING} maps them to a known range")
            break


def unread(config: Config) -> Iterator[Unread]:
    """Yields unread keys of `reward` and `algorithm`, each with the reason."""
    if when(lambda: embodied(config)):
        yield Unread("reward", "embodied rewards come from the environment", (TASK,))
        reason = "it belongs to responses; see env.normalize_rewards"
        yield from unread_keys("algorithm", "reward_scaling reward_whitening", reason, TASK)
        yield Unread(_OVERLONG, "it belongs to responses; embodied training has none", (TASK,))
    if when(lambda: reasoning(config)):
        if when(lambda: config.reward.functions):
            yield from unread_keys("reward", _OWN, "reward.functions has a value for each function", "reward.functions")
        for key, part in when(lambda: config.reward.parts) or ():
            yield from _unread_by(key, part, when(lambda: {task.type for _, task in config.data.tasks}))
    if when(lambda: config.algorithm.overlong.buffer_length is None):
        yield from unread_keys(_OVERLONG, "penalty max_length", f"{_BUFFER} is null, so there is no penalty", _BUFFER)


def _unread_by(key: str, part: Scoring, tasks: Set[str] | None) -> Iterator[Unread]:
    """Yields the keys of a function that its type does not read. A list is inherited as a whole: its items bind no
    keys."""
    kind, switches = when(lambda: part.type), (_TYPE,) if key == "reward" else ()
    if kind is None:
        return
    for name, reader in (("model", "model"), ("judge", "judge"), ("url", "http")):
        if kind != reader:
            yield Unread(f"{key}.{name}", f"it belongs to {key}.type {reader}", switches)
    if kind != "task" or (tasks is not None and "reasoning_gym" not in tasks):
        reason = f"only {key}.type task of reasoning_gym questions has partial scores"
        yield Unread(f"{key}.exact", reason, (*switches, "data.task.type"))
    if kind != "code":
        yield from unread_keys(key, "code isolation", f"it belongs to {key}.type code", *switches)
    elif when(lambda: part.address):
        yield Unread(f"{key}.isolation", "the server isolates programs (code.url)", switches)
    elif when(lambda: part.code is not None):
        yield Unread(f"{key}.code.api_key_env", "without code.url there is no server", switches)
    if kind not in ("http", "judge") and not when(lambda: part.address):
        reason = f"it belongs to {key}.type http or judge, or code or model with a url"
        yield Unread(f"{key}.retries", reason, switches)
    if kind not in ("model", "http"):
        yield Unread(f"{key}.max_batch_size", f"{key}.type {kind} scores responses one by one", switches)
    if kind == "model" and when(lambda: part.asks_server):
        yield Unread(f"{key}.model.dtype", "the server computes the model (model.url)", switches)
    elif kind == "model":
        yield from unread_keys(f"{key}.model", "server api_key_env", "without model.url there is no server", *switches)
        reason = "a classifier scores one batch after another in the reward's process"
        yield from unread_keys(key, "num_workers timeout_s", reason, *switches)
