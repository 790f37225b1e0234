"""What each advantage estimator needs and reads: the names of `algorithm.adv_type`, and the rules that follow.

The formulas are in `algorithms/`. A user's own estimator, written as module:function, may read any key.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from rl_platform.config.rules import FUNCTION
from rl_platform.config.schema import Config
from rl_platform.config.suggest import nearest

TYPE = "algorithm.adv_type"


class Estimator(NamedTuple):
    """values: needs a critic's; groups: compares samples of one prompt; whitens: always or never (None: as
    `normalize_advantages` says); keys: those of `algorithm` that only some estimators read, and this one does."""

    values: bool = False
    groups: bool = False
    whitens: bool | None = None
    keys: tuple[str, ...] = ()


ESTIMATORS = {
    "gae": Estimator(
        values=True,
        keys=(
            "gamma",
            "gae_lambda",
            "gae_lambda_policy",
            "gae_lambda_value",
            "length_adaptive_alpha",
            "bootstrap_truncated",
        ),
    ),
    "grpo": Estimator(groups=True, whitens=False, keys=("grpo_std_normalization", "grpo_leave_one_out")),
    "rloo": Estimator(groups=True, whitens=False),
    "reinforce_plus_plus": Estimator(whitens=True, keys=("gamma", "reinforce_kl_credit")),
    "reinforce_plus_plus_baseline": Estimator(groups=True, whitens=True, keys=("whiten_over",)),
    "raw": Estimator(),
}
_ANY = Estimator()


def estimator_of(adv_type: str) -> Estimator:
    """What `adv_type` needs. A user's function needs none of it, and gets values if there is a critic."""
    return ESTIMATORS.get(adv_type, _ANY)


def idle_estimator_keys(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """(key, reason, keys that decide it) of the estimators' keys without effect."""
    algorithm = config.algorithm
    name = algorithm.adv_type
    if name not in ESTIMATORS:
        return
    chosen = ESTIMATORS[name]
    for key in dict.fromkeys(key for estimator in ESTIMATORS.values() for key in estimator.keys):
        if key not in chosen.keys:
            readers = ", ".join(other for other, estimator in ESTIMATORS.items() if key in estimator.keys)
            yield f"algorithm.{key}", f"adv_type {name} does not read it (read by {readers})", (TYPE,)
    if chosen.whitens is not None and algorithm.normalize_advantages != chosen.whitens:
        reason = "always whitens" if chosen.whitens else "compares within groups and never whitens"
        yield "algorithm.normalize_advantages", f"adv_type {name} {reason}", (TYPE,)
    if name == "gae":
        yield from _idle_lambdas(config)


def _idle_lambdas(config: Config) -> Iterator[tuple[str, str, tuple[str, ...]]]:
    algorithm, alpha, policy = config.algorithm, "algorithm.length_adaptive_alpha", "algorithm.gae_lambda_policy"
    if algorithm.length_adaptive_alpha > 0:
        yield policy, f"{alpha} sets the lambda of the advantages", (alpha,)
    advantages_differ = algorithm.length_adaptive_alpha > 0 or algorithm.gae_lambda_policy is not None
    if advantages_differ and algorithm.gae_lambda_value is not None:
        reason = "advantages and returns both have a lambda of their own"
        yield "algorithm.gae_lambda", reason, (alpha, policy, "algorithm.gae_lambda_value")


def check_estimator(config: Config, fail: Callable[..., None]) -> None:
    """The rules between the estimator and the rest; `fail(key, message, *involved, hint=...)` takes what is broken."""
    algorithm, task = config.algorithm, "runner.task_type"
    name, switch = algorithm.adv_type, "critic.use_critic_model"
    if name not in ESTIMATORS and not FUNCTION.fullmatch(name):
        close = nearest(name, ESTIMATORS)
        message = f"neither one of {', '.join(ESTIMATORS)} nor a function written as module:function"
        fail(TYPE, message, hint=f"did you mean {close}?" if close else "")
        return
    estimator = estimator_of(name)
    if config.runner.task_type == "embodied":
        if name != "gae":
            message = "embodied training has gae only: its policy trains values anyway, and its rows hold many episodes"
            fail(TYPE, message, task, hint=f"{TYPE}: gae")
        elif algorithm.length_adaptive_alpha > 0:
            message = "a row of an embodied rollout holds several episodes: there is no response length to adapt to"
            fail("algorithm.length_adaptive_alpha", message, task)
        return
    if estimator.groups and algorithm.group_size < 2:
        message = f"adv_type {name} compares the samples of a prompt: it needs at least 2, of 1 every advantage is 0"
        fail("algorithm.group_size", message, TYPE, task, hint="algorithm.group_size: 8")
    if name in ESTIMATORS and not estimator.values and config.critic.use_critic_model:
        message = f"adv_type {name} works without values: a critic would be trained and never asked"
        fail(switch, message, TYPE, task, hint=f"{switch}: false, and no place for critic")
