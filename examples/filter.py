"""Trains on prompts that the policy solves now and then, and on responses without a repeated character."""

from collections.abc import Sequence

from rl_platform.records import Trajectory


def solved_sometimes(group: Sequence[Trajectory]) -> bool:
    solved = sum(response.metric >= 1 for response in group)
    return 0 < solved < len(group)


def varied(response: Trajectory) -> bool:
    return len(set(response.token_ids)) == len(response.token_ids)
