"""Generation that stops when enough prompts are complete. A later call continues the other responses.

`LanguageRollout.generate_until` calls it on each rank of the rollout. Not covered: which prompts are open, see
`partial_rollouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rl_platform.engines.rollout.base import Completion, Request, RolloutEngine
from rl_platform.records import Prompt, SamplingParams, Trajectory

if TYPE_CHECKING:
    from rl_platform.components.rollout import Group


def share_of(groups: Sequence[Group], needed: int, rank: int, ranks: int) -> tuple[list[Group], int]:
    """Returns the groups of one rank and how many of them it must complete. These numbers add up to `needed`."""
    return list(groups[rank::ranks]), len(range(needed)[rank::ranks])


def generate_until(
    engine: RolloutEngine,
    groups: Sequence[Group],
    needed: int,
    sampling: SamplingParams,
    eos: Collection[int],
    seed: Callable[[Prompt, int], int],
    deliver: Callable[[Trajectory], None],
) -> None:
    """Continues the incomplete responses of `groups` until `needed` groups are complete, and delivers each of them
    once: complete, in the order they finish, or cut.

    A rank stops when its own share of the needed groups is complete, so it waits for no other rank. With an engine that
    draws the same numbers again, the same responses are cut again. Responses of the first groups begin first.
    `sampling.max_new_tokens` bounds the whole response: one that is longer, of a checkpoint with a larger bound, is
    shortened to it and complete.
    """
    longest = sampling.max_new_tokens
    unfinished = [(number, one) for number, group in enumerate(groups) for one in group if not one.complete]
    left = [sum(not one.complete for one in group) for group in groups]
    complete = delivered = 0

    def hand_over(number: int, trajectory: Trajectory) -> None:
        nonlocal complete, delivered
        delivered += 1
        deliver(trajectory)
        left[number] -= trajectory.complete
        complete += trajectory.complete and not left[number]

    for number, one in unfinished:
        if len(one.token_ids) >= longest:
            hand_over(number, _shortened(one, longest))
    work = [(number, one) for number, one in unfinished if len(one.token_ids) < longest]

    def on_finished(completion: Completion) -> None:
        number, before = work[completion.index]
        goes_on = complete < needed
        hand_over(number, continued(before, completion, engine.version, longest, eos))
        if goes_on and complete == needed and delivered < len(unfinished):
            engine.abort()

    if complete >= needed:
        for _, one in work:
            deliver(one)
    elif work:
        requests = [
            Request(
                index,
                one.prompt.token_ids + one.token_ids,
                seed(one.prompt, one.sample),
                longest - len(one.token_ids),
                len(one.token_ids),
            )
            for index, (_, one) in enumerate(work)
        ]
        engine.generate(requests, sampling, on_finished)


def _shortened(one: Trajectory, longest: int) -> Trajectory:
    """Returns the first `longest` tokens of an incomplete response, as one that the length limit has cut."""
    segments, rest = [], longest
    for version, count in one.tokens_by_version:
        if rest:
            segments.append((version, min(count, rest)))
            rest -= segments[-1][1]
    return replace(
        one,
        token_ids=one.token_ids[:longest],
        log_probs=one.log_probs[:longest],
        finish_reason="length",
        segments=tuple(segments) if len(segments) > 1 else (),
    )


def continued(
    before: Trajectory, completion: Completion, version: int, longest: int, eos: Collection[int]
) -> Trajectory:
    """Returns `before`, extended by a completion of weights `version`, without the text."""
    tokens, reason = before.token_ids + completion.token_ids, completion.finish_reason
    if reason == "abort" and tokens:  # the engine may have sampled the last token just before it was stopped
        reason = "stop" if tokens[-1] in eos else "length" if len(tokens) >= longest else "abort"
    segments = _segments(before, version, len(completion.token_ids))
    return replace(
        before,
        token_ids=tokens,
        log_probs=before.log_probs + completion.log_probs,
        finish_reason=reason,
        weights_version=segments[0][0] if segments else version,
        segments=segments if len(segments) > 1 else (),
    )


def _segments(before: Trajectory, version: int, count: int) -> tuple[tuple[int, int], ...]:
    """Returns the segments of `before` and `count` more tokens of this version."""
    segments = [segment for segment in before.tokens_by_version if segment[1]]
    if segments and segments[-1][0] == version:
        count += segments.pop()[1]
    return (*segments, (version, count)) if count else tuple(segments)
