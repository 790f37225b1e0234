"""`--check` on a text environment of the user: it answers the expected answer and empty responses to a question.

It runs in a process of its own, as in a run, for a few steps. Not covered: built-in environments, calls of tools, and
questions that are not on this machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

from rl_platform.components import agents
from rl_platform.components.agents.agent_function import TEXT_ENVIRONMENT
from rl_platform.components.agents.agent_process import AgentFailed
from rl_platform.components.agents.tool_processes import LETTERS_PER_TOKEN, Lease, ToolProcesses
from rl_platform.config.schema import Config
from rl_platform.config.schema.rollout import EnvironmentOptions
from rl_platform.envs.reasoning.prompts import messages_of
from rl_platform.envs.reasoning.question import Question
from rl_platform.errors import ConfigError, PlatformError, Problem
from rl_platform.launch.check.reward_examples import SCORING, error_with_line, example_questions, shown_response
from rl_platform.rng import derive_seed
from rl_platform.user_code import is_named

KEY = "rollout.agent.environment.type"
MOST_STEPS = 3
_AROUND = (str(Path(agents.__file__).parent), SCORING)  # frames of the process around the environment


def episode_examples(config: Config) -> Iterator[str]:
    """Yields a line with the rewards of the user's text environment, or the reason why it was not called.

    Raises ConfigError if one of its methods raises, hangs or returns something else than it should.
    """
    agent = config.rollout.agent
    if config.runner.task_type != "reasoning" or agent is None or agent.environment is None:
        return
    if not is_named(agent.environment.type):
        return
    try:
        question = example_questions(config)[0]
    except PlatformError as error:  # a start refuses it
        yield f"the text environment was not called: {error}"
        return
    steps = min(MOST_STEPS, agent.max_calls)
    with closing(ToolProcesses(1)) as processes:
        rewards = [
            f"{_reward(config, agent.environment, processes, question, response, steps)} for "
            f"{shown_response(response, question.answer)}"
            for response in dict.fromkeys((question.answer, ""))
        ]
    yield f"{KEY} {agent.environment.type} gave the reward {', '.join(rewards)}"


def _reward(
    config: Config, spec: EnvironmentOptions, processes: ToolProcesses, question: Question, response: str, steps: int
) -> str:
    """Returns the reward of an episode in which the policy always says `response`, and its length, as text."""
    cause: Exception
    try:
        reward, count, done = asyncio.run(_episode(config, spec, processes, question, response, steps))
    except TimeoutError as error:
        failure, cause = f"gave no result within {spec.timeout_s:g} s", error
    except AgentFailed as error:
        failure, cause = error_with_line(str(error), _AROUND, TEXT_ENVIRONMENT.load(spec.type)), error
    else:
        end = "" if done else ", which did not end it,"
        return f"{reward:g} after {count} step{'s' * (count != 1)}{end}"
    message = f"{failure}, for {shown_response(response, question.answer)}"
    hint = "such a trajectory is left out of training: answer every response"
    raise ConfigError([Problem(KEY, message, value=spec.type, hint=hint)]) from cause


async def _episode(
    config: Config, spec: EnvironmentOptions, processes: ToolProcesses, question: Question, response: str, steps: int
) -> tuple[float, int, bool]:
    """Returns the reward, the number of steps and whether the last one ended the episode; see `EnvironmentLoop`."""
    seed = derive_seed(config.runner.seed, "environment", question.text, question.answer)
    messages = question.messages or messages_of(question.text, config.data)
    asked = {"text": question.text, "messages": messages, "answer": question.answer, "metadata": question.metadata}
    longest = spec.max_result_tokens * LETTERS_PER_TOKEN
    lease = Lease(processes, 0, environment=spec.type)
    try:
        built = {"type": spec.type, "params": spec.params}
        await lease.ask("reset", spec.timeout_s, environment=built, question=asked, seed=seed, longest=longest)
        total, count, done = 0.0, 0, False
        while not done and count < steps:
            _, reward, done = await lease.ask("step", spec.timeout_s, text=response, longest=longest)
            total, count = total + reward, count + 1
        score = await lease.end()
        return total if score is None else score, count, done
    finally:
        lease.leave()
