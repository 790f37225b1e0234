"""`rollout.agent.environment: {type: openenv}`: an environment that a server of OpenEnv runs.

Covers environments whose action is one field of text. Not covered: starting the server, and actions that call tools.
"""

from __future__ import annotations

import json

from openenv.core import GenericEnvClient

from rl_platform.components.agents.agent_function import JsonObject

_DEFAULTS: JsonObject = {"url": None, "action": "message", "observation": None, "reset": {}}


class OpenEnv:
    """A session of the server at `url`. A response of the policy is the field `action` of an action.

    The policy reads the field `observation` of an observation, or all fields as JSON. reset: further arguments of the
    environment's reset().
    """

    def __init__(self, params: JsonObject) -> None:
        options = _DEFAULTS | params
        if unknown := params.keys() - _DEFAULTS.keys():
            raise ValueError(f"there is no parameter {min(unknown)}, only {', '.join(_DEFAULTS)}")
        if not isinstance(options["url"], str):
            raise ValueError("url is missing, for example http://127.0.0.1:8000")
        self._action, self._observation, self._reset = options["action"], options["observation"], options["reset"]
        self._session = GenericEnvClient(base_url=options["url"]).sync()

    def reset(self, question: JsonObject, seed: int) -> str:
        self._session.connect()
        return self._text(self._session.reset(seed=seed % 2**31, **self._reset).observation)

    def step(self, text: str) -> tuple[str, float, bool]:
        result = self._session.step({self._action: text})
        return self._text(result.observation), float(result.reward or 0.0), bool(result.done)

    def close(self) -> None:
        self._session.close()

    def _text(self, observation: JsonObject) -> str:
        if self._observation is None:
            return json.dumps(observation)
        if self._observation not in observation:
            raise KeyError(f"the observation has no field {self._observation}, only {', '.join(observation)}")
        return str(observation[self._observation])
