"""Trajectories that wait for a later step, as plain values of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rl_platform.records import Conversation, Prompt, StateDict, Trajectory


def state_of(trajectory: Trajectory) -> StateDict:
    """Returns plain values for checkpoints, with the index in place of the prompt."""
    turns = None if trajectory.conversation is None else vars(trajectory.conversation)
    context = {} if trajectory.conversation is None else {"context": trajectory.prompt.token_ids}
    rows = [state_of(row) for row in trajectory.rows]
    return {**vars(trajectory), "prompt": trajectory.prompt.index, "conversation": turns, "rows": rows, **context}


def from_state(state: StateDict, prompts: Mapping[int, Prompt]) -> Trajectory:
    """Returns the trajectory of a `state_of`. prompts: by their index."""
    turns = state["conversation"]
    conversation = None if turns is None else Conversation(**turns)
    prompt = prompts[state["prompt"]]
    if tuple(state.get("context", prompt.token_ids)) != prompt.token_ids:  # an agent changed it
        prompt = replace(prompt, token_ids=tuple(state["context"]))
    rows = tuple(from_state(row, prompts) for row in state.get("rows", ()))
    fields = {name: value for name, value in state.items() if name != "context"}
    return Trajectory(**{**fields, "prompt": prompt, "conversation": conversation, "rows": rows})
