"""From trajectories to shaped rewards, a rollout batch, metrics and samples for the log. Pure functions."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from rl_platform.algorithms.rewards import place_outcome_rewards, place_process_rewards
from rl_platform.algorithms.shaping import ShapedRewards, shape_rewards
from rl_platform.config.schema.algorithm import Algorithm
from rl_platform.config.schema.reward import Reward
from rl_platform.envs.reasoning.score import DIED, OUTCOMES, TIMEOUT
from rl_platform.errors import Unreachable, WorkerError
from rl_platform.models.tokenizer import Tokenizer
from rl_platform.records import RolloutBatch, Trajectory
from rl_platform.reporter import Sample


def training_rows(trajectories: Sequence[Trajectory], multiple: int) -> list[Trajectory]:
    """Returns all rows of each trajectory, ordered by their tokens, with its reward. If a trajectory has several,
    masked rows fill them up to a multiple of `multiple`, so that mini-batches are whole."""
    rows = []
    for one in trajectories:
        own = sorted([one, *one.rows], key=lambda row: row.prompt.token_ids + row.token_ids)
        if one.rows:
            own = [
                replace(row, reward=one.reward, metric=one.metric, valid=one.valid, continues=number > 0)
                for number, row in enumerate(own)
            ]
        rows += own
    if len(rows) > len(trajectories):
        shortest = min(rows, key=lambda row: len(row.prompt.token_ids) + len(row.token_ids))
        rows += [replace(shortest, valid=False, continues=True)] * (-len(rows) % multiple)
    return rows


def shaped_rewards(
    trajectories: Sequence[Trajectory], algorithm: Algorithm, longest_response: int, kept: Tensor | None = None
) -> ShapedRewards:
    """Returns the rewards to train on, one per trajectory; `Trajectory.reward` and `metric` stay those of the verifier.

    kept [B] bool: of `algorithm.sample_filter`; None: there is no filter.
    """
    return shape_rewards(
        scores=torch.tensor([trajectory.reward for trajectory in trajectories]),
        scored=torch.tensor([trajectory.valid for trajectory in trajectories]),
        lengths=torch.tensor([sum(trajectory.sampled) for trajectory in trajectories]),
        truncated=torch.tensor([trajectory.truncated for trajectory in trajectories]),
        algorithm=algorithm,
        longest_response=longest_response,
        kept=kept,
        continues=torch.tensor([trajectory.continues for trajectory in trajectories]),
    )


def rollout_batch(trajectories: Sequence[Trajectory], shaped: ShapedRewards, pad_token_id: int) -> RolloutBatch:
    """Returns one row per trajectory, right-padded. Responses without a score or filtered stay in the batch, masked
    out."""
    rows = [trajectory.prompt.token_ids + trajectory.token_ids for trajectory in trajectories]
    shape = (len(rows), max(len(row) for row in rows))
    tokens = torch.full(shape, pad_token_id, dtype=torch.int64)
    action_mask = torch.zeros(shape, dtype=torch.bool)
    log_probs = torch.zeros(shape)
    for index, (row, trajectory) in enumerate(zip(rows, trajectories, strict=True)):
        response = slice(len(trajectory.prompt.token_ids), len(row))
        tokens[index, : len(row)] = torch.tensor(row)
        action_mask[index, response] = torch.tensor(trajectory.sampled)
        log_probs[index, response] = torch.tensor(trajectory.log_probs)
    continues = torch.tensor([trajectory.continues for trajectory in trajectories])
    inputs = {"tokens": tokens, "lengths": torch.tensor([len(row) for row in rows])}
    if (first := trajectories[0].routes) is not None:
        inputs["routes"] = torch.full((*shape, *first.shape[1:]), -1, dtype=first.dtype)
        for row, trajectory in zip(inputs["routes"], trajectories, strict=True):
            if trajectory.routes is not None:
                row[: len(trajectory.routes)] = trajectory.routes
    return RolloutBatch(
        inputs=inputs,
        action_mask=action_mask,
        sample_mask=shaped.sample_mask,
        compared=shaped.compared,
        continues=continues if bool(continues.any()) else None,
        group_ids=torch.tensor([trajectory.prompt.index for trajectory in trajectories]),
        rewards=place_outcome_rewards(shaped.rewards, action_mask),
        rollout_log_probs=log_probs,
        correct=torch.tensor([trajectory.metric > 0 for trajectory in trajectories]),
        versions=torch.tensor([trajectory.weights_version for trajectory in trajectories]),
        token_versions=_token_versions(trajectories, action_mask),
    )


def _token_versions(trajectories: Sequence[Trajectory], action_mask: Tensor) -> Tensor | None:
    """Returns [B,T] int32, -1 outside of responses; None if no response has tokens of several versions."""
    if not any(trajectory.segments for trajectory in trajectories):
        return None
    versions = torch.full(action_mask.shape, -1, dtype=torch.int32)
    for row, trajectory in zip(versions, trajectories, strict=True):
        first = len(trajectory.prompt.token_ids)
        for version, count in trajectory.tokens_by_version:
            row[first : first + count] = version
            first += count
    return versions


def process_rewards(trajectories: Sequence[Trajectory], action_mask: Tensor) -> tuple[Tensor, dict[str, float]]:
    """Returns [B,T] rewards of single steps, as the verifier gave them: neither scaled nor shaped."""
    addressed = torch.zeros(action_mask.shape)
    for row, trajectory in zip(addressed, trajectories, strict=True):
        for position, reward in trajectory.step_rewards:
            row[len(trajectory.prompt.token_ids) + position] += reward
    placed, moved = place_process_rewards(addressed, action_mask)
    count = sum(not trajectory.continues for trajectory in trajectories)
    return placed, {"reward/process_mean": placed.sum().item() / count, "reward/process_moved": float(moved)}


def cut_ends(trajectories: Sequence[Trajectory], action_mask: Tensor) -> Tensor:
    """Returns [B,T] bool: the last sampled token of responses that the length limit cut."""
    truncated = torch.tensor([trajectory.truncated for trajectory in trajectories])
    return place_outcome_rewards(truncated, action_mask) > 0


def check_any_scored(trajectories: Sequence[Trajectory], reward: Reward) -> None:
    """Raises an error with the counts of all causes and the details of the last one if no response has a score:
    Unreachable if only servers that did not answer are the cause, else WorkerError."""
    if not trajectories or any(one.valid for one in trajectories):
        return
    last = next((one for one in reversed(trajectories) if one.verdict), trajectories[-1])
    if all(one.conversation is not None and one.conversation.failed for one in trajectories):
        raise WorkerError(f"{last.outcome} for all of {len(trajectories)} responses. The last one:\n{last.verdict}")
    causes = Counter(one.outcome for one in trajectories)
    counts = ", ".join(f"{cause} {count}" for cause, count in sorted(causes.items()))
    parts = reward.by_label
    missing = {name for one in trajectories for name in parts.keys() - dict(one.reward_parts).keys()}
    silent = causes.keys() <= {DIED, TIMEOUT} and all(parts[name].address is not None for name in missing)
    what = "reward.functions" if reward.functions else f"reward.type {reward.type}"
    raise (Unreachable if silent else WorkerError)(
        f"{what} scored none of the {len(trajectories)} responses of a step ({counts}). The last one:\n{last.verdict}"
    )


def unscored_notes(trajectories: Sequence[Trajectory]) -> dict[str, str]:
    """Returns a message for each cause of responses without a score. It shows the error of the first of them: the last
    line of its traceback, and the innermost place in the code."""
    notes: dict[str, str] = {}
    causes = Counter(one.outcome for one in trajectories if not one.valid)
    for one in trajectories:
        if one.valid or not one.verdict or one.outcome in notes:
            continue
        places = re.findall(r'^ *File "(.+)", line (\d+), in ', one.verdict, re.MULTILINE)
        at = f" ({places[-1][0]}:{places[-1][1]})" if places else ""
        count = f"{causes[one.outcome]} of {len(trajectories)} responses have no score ({one.outcome})"
        error = one.verdict.strip().splitlines()[-1]
        notes[one.outcome] = f"{count} and do not count, see metric reward/unscored. The first: {error}{at}"
    return notes


def trajectory_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns metrics that the batch no longer shows: raw rewards, truncation, prompt lengths, token counts."""
    prompts = [len(trajectory.prompt.token_ids) for trajectory in trajectories]
    rows = [row for trajectory in trajectories for row in (trajectory, *trajectory.rows)]
    return {
        "reward/raw_mean": mean([trajectory.reward for trajectory in trajectories if trajectory.valid]),
        "reward/unscored": float(sum(not trajectory.valid for trajectory in trajectories)),
        "len/response_clip_frac": mean([trajectory.truncated for trajectory in trajectories]),
        "len/prompt_mean": mean(prompts),
        "len/prompt_max": float(max(prompts)),
        "perf/tokens": float(sum(len(row.prompt.token_ids) + len(row.token_ids) for row in rows)),
        "perf/samples": float(len(trajectories)),
    }


def by_source(trajectories: Sequence[Trajectory]) -> dict[str, list[Trajectory]]:
    """Returns the trajectories by the label of their source, in order; empty without `data.sources`."""
    parts: dict[str, list[Trajectory]] = {}
    for trajectory in trajectories:
        if trajectory.prompt.source:
            parts.setdefault(trajectory.prompt.source, []).append(trajectory)
    return dict(sorted(parts.items()))


def source_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns raw reward, response length and number of responses of each source; no reward without a scored one."""
    metrics: dict[str, float] = {}
    for label, part in by_source(trajectories).items():
        if scores := [trajectory.reward for trajectory in part if trajectory.valid]:
            metrics[f"source/{label}/reward"] = mean(scores)
        metrics[f"source/{label}/len"] = mean([one.sampled_tokens for one in part])
        metrics[f"source/{label}/responses"] = float(len(part))
    return metrics


def function_metrics(trajectories: Sequence[Trajectory], names: Sequence[str], part: str = "") -> dict[str, float]:
    """Returns the mean score of each reward function that gave one, without its weight, and the number of responses
    that it did not score."""
    metrics: dict[str, float] = {}
    for name in names:
        scores = [dict(trajectory.reward_parts).get(name) for trajectory in trajectories]
        given = [score for score in scores if score is not None]
        if given:
            metrics[f"{part}reward/{name}"] = mean(given)
        metrics[f"{part}reward/{name}/unscored"] = float(len(scores) - len(given))
    return metrics


def program_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Returns the fractions of scored programs by how their tests ended; empty for rewards that run no programs."""
    outcomes = [trajectory.outcome for trajectory in trajectories if trajectory.valid and trajectory.outcome]
    if not outcomes:
        return {}
    return {f"code/{outcome}": mean([each == outcome for each in outcomes]) for outcome in OUTCOMES}


def validation_metrics(trajectories: Sequence[Trajectory], metric: str, part: str = "") -> dict[str, float]:
    """Returns means over scored responses; without any there is no score. metric: name of the score, as `val/accuracy`.
    part: of the names, as `gsm8k/`."""
    scores = [trajectory.metric for trajectory in trajectories if trajectory.valid]
    numbers = {metric.removeprefix("val/"): mean(scores)} if scores else {}
    numbers |= {
        "len": mean([one.sampled_tokens for one in trajectories]),
        "unscored": float(len(trajectories) - len(scores)),
    }
    return {f"val/{part}{name}": number for name, number in numbers.items()}


def samples_of(trajectories: Sequence[Trajectory], tokenizer: Tokenizer) -> list[Sample]:
    """Returns the trajectories as text for the log, each prompt as the model reads it."""
    return [
        Sample(
            tokenizer.decode(each.prompt.token_ids, special=True),
            each.text,
            each.reward,
            each.prompt.answer,
            each.finish_reason,
            each.verdict,
            each.reward_parts,
        )
        for each in trajectories
    ]


def mean(numbers: Sequence[float]) -> float:
    """Returns the mean; 0 without numbers."""
    return float(sum(numbers)) / len(numbers) if numbers else 0.0
