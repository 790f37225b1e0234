"""Mistakes that a small run would hide, looked for in the config as it is written: real sizes, real tokenizers, and
the user's own functions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing

from rl_platform.config.rollout_backend import HOSTED
from rl_platform.config.schema import Config
from rl_platform.config.schema.algorithm import ESTIMATORS, POLICY_LOSSES
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.errors import ConfigError, PlatformError, Problem, WorkerError
from rl_platform.extras import required
from rl_platform.launch.rehearse.materials import models
from rl_platform.launch.rehearse.small_models import Architecture
from rl_platform.launch.start_checks.extensions import check_extensions
from rl_platform.launch.start_checks.preflight import rank_problems
from rl_platform.launch.start_checks.sharding import shape_problems, sharding_problems
from rl_platform.placement.scheduler import Placement

TEXT = "Compute 12*(3+4)? Größe: 1,024.5 ≈ ∑ \\frac{1}{2} <|x|>\n\tdef f(): return 'ok'"
RESPONSES = 4  # questions that the reward function scores


class RehearsalFailed(PlatformError):
    """A function of the user gives another result than it should."""

    exit_code = 70


def check_sizes(config: Config, placement: Placement, known: dict[str, Architecture]) -> None:
    """Raises ConfigError for models that cannot be shared or fed as configured, in their real sizes."""
    problems = [*sharding_problems(config, placement), *shape_problems(config, placement)]
    keys = {problem.key for problem in problems}
    problems += [each for each in _unfit(config, placement, known) if each.key not in keys]
    problems += [each for each in rank_problems(config, placement) if each.key.startswith("env.")]
    problems += _tokenizers(config, known)
    if problems:
        raise ConfigError(problems)


def _unfit(config: Config, placement: Placement, known: dict[str, Architecture]) -> Iterator[Problem]:
    """Yields problems of the real models: families that are not computed, sharding, and sequences that are too long."""
    from transformers import AutoConfig

    from rl_platform.launch.start_checks.model_problems import model_problems
    from rl_platform.models.build import readable_positions
    from rl_platform.models.pretrained.families import architecture_problems
    from rl_platform.models.pretrained.folder_files import reading

    real = {}
    for role, model in models(config):
        path, key = model.path or "", f"{role}.model.path"
        try:
            with reading(key, "its config.json cannot be used", path):
                real[role] = AutoConfig.for_model(**known[role].options)
        except ConfigError as error:
            yield from error.problems
        else:
            yield from architecture_problems(real[role], path, key)
    if config.runner.task_type == "embodied":
        return
    if config.rollout.backend in HOSTED and "actor" in real:
        from rl_platform.engines.rollout.hosted.build import check_ranks

        owned = max(len(slot.accelerators) for slot in placement.components["rollout"])
        try:
            check_ranks(real["actor"], config.rollout.tensor_parallel_size or max(1, owned))
        except ConfigError as error:
            yield from error.problems
    longest = config.data.longest_sequence
    for role in ("actor", "critic", "reference"):
        loaded = real.get(role if role in known else "actor")
        if role not in placement.components or loaded is None or (role == "reference" and config.reference_as_actor):
            continue
        section, problems = config.section(role), []
        if section.training_backend == "megatron":
            with required("rl_platform.engines.training.megatron", f"{role}.training_backend"):
                from rl_platform.engines.training.megatron.supported import unfit
            problems = [*unfit(loaded, section.parallel, role, section.kernels)]
        yield from problems or model_problems(loaded, section, role)
        positions = readable_positions(loaded) or longest
        if longest > positions and role in known:
            message = f"prompt and response together may have {longest} tokens, {role}.model reads {positions}"
            allowed = f"data.max_prompt_length + data.max_response_length up to {positions}"
            yield Problem("data.max_response_length", message, allowed=allowed)


def _tokenizers(config: Config, known: dict[str, Architecture]) -> Iterator[Problem]:
    """Yields a problem for a critic or reference whose tokens are not the actor's."""
    sections = dict(models(config))
    for role in ("critic", "reference"):
        if role in sections and "actor" in sections and (reason := _differ(config, known, role)):
            yield Problem(
                f"{role}.model",
                f"{reason}: {role} would read other texts than the actor wrote",
                value=sections[role].path or "",
                hint=f"a model with the tokenizer of {sections['actor'].path}",
            )


def _differ(config: Config, known: dict[str, Architecture], role: str) -> str:
    """Returns how the tokenizer of `role` differs from the actor's; empty if it does not, as far as it can be read."""
    from rl_platform.models.tokenizer import load_tokenizer

    sections = dict(models(config))
    mine, actors = known[role], known["actor"]
    if mine.has_tokenizer and actors.has_tokenizer:
        one, other = load_tokenizer(sections[role], f"{role}.model"), load_tokenizer(sections["actor"])
        if one.encode(TEXT) != other.encode(TEXT):
            return "its tokenizer makes other tokens of a text than the actor's"
        if one.eos_token_ids != other.eos_token_ids:
            return f"its tokenizer ends with token {one.eos_token_ids}, the actor's with {other.eos_token_ids}"
        return ""
    if sections[role].tokenizer == sections["actor"].tokenizer is not None:
        return ""
    if mine.specials.family != actors.specials.family:
        return f"its tokenizer is that of {mine.specials.family}, the actor's that of {actors.specials.family}"
    return ""


def check_functions(config: Config) -> list[str]:
    """Imports the user's functions and tries the invariances of an estimator or a loss. Returns their names.

    Raises ConfigError for functions that cannot be imported, RehearsalFailed if a property does not hold.
    """
    check_extensions(config)
    algorithm = config.algorithm
    chosen = ((algorithm.adv_type, ESTIMATORS), (algorithm.policy_loss, POLICY_LOSSES))
    own = [name for name, known in chosen if name not in known]
    if own:
        with required("rl_platform.launch.check", "--rehearse"):
            from rl_platform.launch.check.property_check import outcomes_of
        if failed := [outcome for outcome in outcomes_of(config) if outcome.failed]:
            lines = [f"the results of {' or '.join(own)} depend on the batch layout", *map(str, failed)]
            raise RehearsalFailed("\n    ".join(lines))
    return own


def check_reward(config: Config, questions: Split) -> int:
    """Scores the expected answer, a wrong one and an empty one of a few questions; returns the number of scores.

    Raises ConfigError if it cannot be imported, WorkerError if it gives no number.
    """
    from rl_platform.components.reward import process_scorer
    from rl_platform.envs.reasoning.verifiers import ScoreItem

    def items(question: Question) -> list[ScoreItem]:
        texts = (question.answer, "0", "")
        return [ScoreItem(text, question.text, question.answer, question.metadata) for text in texts]

    asked = [item for question in questions.train[:RESPONSES] for item in items(question)]
    scoring = [part for _, part in config.reward.parts if part.type != "model" and part.address is None]
    for part in scoring:
        with closing(process_scorer(config.data, part)) as pool:
            scores = [future.result() for future in pool.submit(asked)]
        bad = [(item, score) for item, score in zip(asked, scores, strict=True) if not score.valid]
        if bad:
            item, score = bad[0]
            raise WorkerError(
                f"reward.type {part.type} scored {len(scores) - len(bad)} of {len(scores)} responses. The first "
                f"without a score ({score.reason}) is {item.response!r} to {item.question!r}:\n{score.detail}"
            )
    return len(asked) * len(scoring)
