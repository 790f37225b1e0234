"""Built-in text environments: a guessing game, games of TextArena, and reasoning-gym with several attempts."""

from __future__ import annotations

import random
import re
import threading

from rl_platform.components.agents.agent_function import TEXT_ENVIRONMENT, JsonObject, TextEnvironment
from rl_platform.errors import ConfigError, Problem

_DEFAULTS: JsonObject = {
    "largest": 9,
    "turns": 4,
    "prompt": "Guess a number from 1 to {largest}. Answer with the number alone.",
}
OPENENV = "openenv"
_SEEDING = threading.Lock()
_NUMBER = re.compile(r"\d+")


def environment_class(name: str) -> type[TextEnvironment]:
    """Returns a built-in environment or the user's class of that name. Raises ConfigError if there is none."""
    if name == OPENENV:
        return _openenv()
    environment_type: type[TextEnvironment] = ENVIRONMENTS.get(name) or TEXT_ENVIRONMENT.load(name)
    return environment_type


class GuessNumber:
    """The policy looks for a number from 1 to `largest` in `turns` turns and reads higher or lower.

    The reward is 1 for the number at the first guess; each further guess lowers it by 1 / `turns`.
    """

    def __init__(self, params: JsonObject) -> None:
        options = _DEFAULTS | params
        if unknown := params.keys() - _DEFAULTS.keys():
            raise ValueError(f"there is no parameter {min(unknown)}, only {', '.join(_DEFAULTS)}")
        self._largest, self._turns, self._prompt = options["largest"], options["turns"], options["prompt"]
        self._guesses = 0

    def reset(self, question: JsonObject, seed: int) -> str:
        self._number = random.Random(seed).randint(1, self._largest)
        return str(self._prompt).replace("{largest}", str(self._largest))

    def step(self, text: str) -> tuple[str, float, bool]:
        self._guesses += 1
        number = _NUMBER.search(text)
        done = self._guesses >= self._turns
        if number is None:
            return "no number\n", 0.0, done
        guess = int(number[0][:9])
        if guess == self._number:
            return "yes\n", 1.0 - (self._guesses - 1) / self._turns, True
        return "higher\n" if guess < self._number else "lower\n", 0.0, done


class ReasoningGym:
    """Questions of `dataset`, a data set of reasoning-gym that reads all further parameters; `attempts` for each.

    The reward is the data set's score of the best attempt, divided by the number of attempts until then. As with
    `reward.type: task`, answers that read attributes or call unmathematical functions score 0.
    """

    def __init__(self, params: JsonObject) -> None:
        own = {"dataset", "attempts"}
        self._name, self._attempts = params["dataset"], params.get("attempts", 2)
        self._params = {name: value for name, value in params.items() if name not in own}
        self._count, self._best = 0, 0.0

    def reset(self, question: JsonObject, seed: int) -> str:
        from reasoning_gym import create_dataset

        self._data = create_dataset(self._name, seed=seed % 2**31, size=1, **self._params)
        self._entry = self._data[0]
        return str(self._entry["question"])

    def step(self, text: str) -> tuple[str, float, bool]:
        from rl_platform.envs.reasoning.answers.gym_verifier import guarded

        self._count += 1
        given = text.strip()
        score = guarded(given, str(self._entry["answer"]), lambda: self._scored(given))
        self._best = max(self._best, score / self._count)
        done = score >= 1 or self._count >= self._attempts
        return f"That is not right (score {score:.2f}). Try again.", 0.0, done

    def _scored(self, given: str) -> float:
        try:
            return float(self._data.score_answer(given, self._entry))
        except Exception:  # of the parsers and programs that read the answer
            return 0.0

    def score(self) -> float:
        return self._best


class TextArena:
    """The game `game` of the package textarena, for one player. The reward is that of the game at its end.

    A seed determines what a game draws at its reset. Later draws are not repeatable: all games share one generator.
    """

    def __init__(self, params: JsonObject) -> None:
        if params.keys() != {"game"}:
            raise ValueError(f"the one parameter is game, not {', '.join(params) or 'none'}")
        import textarena

        self._game = textarena.make(env_id=f"{params['game']}-raw")

    def reset(self, question: JsonObject, seed: int) -> str:
        with _SEEDING:  # the games draw from Python's global generator
            self._game.reset(num_players=1, seed=seed % 2**31)
        return self._read()

    def step(self, text: str) -> tuple[str, float, bool]:
        done, _ = self._game.step(action=text)
        if done:
            rewards, _ = self._game.close()
            return "", float(rewards[0]), True
        return self._read(), 0.0, False

    def _read(self) -> str:
        player, messages = self._game.get_observation()
        return "\n".join(str(message) for sender, message, _ in messages if sender != player)


def _openenv() -> type[TextEnvironment]:
    try:
        from rl_platform.components.agents.openenv_environment import OpenEnv
    except ModuleNotFoundError as error:
        message, hint = f"{error.name} is not installed", "pip install 'rl-platform[openenv]'"
        raise ConfigError([Problem("rollout.agent.environment.type", message, value=OPENENV, hint=hint)]) from None
    return OpenEnv


ENVIRONMENTS: dict[str, type[TextEnvironment]] = {
    "guess_number": GuessNumber,
    "reasoning_gym": ReasoningGym,
    "textarena": TextArena,
}
