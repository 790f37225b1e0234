"""Scores of a reward model that vLLM or SGLang serves, for example with tensor parallelism.

    POST url  {"input": [[1, 2], ...], "use_activation": false}     vLLM
    200       {"data": [{"index": 0, "probs": [0.5]}, ...]}

    POST url  {"input_ids": [[1, 2], ...]}                          SGLang
    200       [{"embedding": [0.5]}, ...]

Both return the output of the score layer; without `use_activation` vLLM would return its sigmoid. Token ids are
sent, as a server would add special tokens to text. Not covered: retries, see `envs/reasoning/servers/http_scorer.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rl_platform.components.reward_models.classifier import ClassifierInput
from rl_platform.components.reward_models.model_scorer import conversation, scores_of
from rl_platform.config.schema.data import Data
from rl_platform.config.schema.reward import RewardModel
from rl_platform.envs.reasoning.score import RAISED, Score
from rl_platform.envs.reasoning.servers.judge import secret_of
from rl_platform.envs.reasoning.servers.reward_server import Server, Unanswered
from rl_platform.envs.reasoning.verifiers import ScoreItem

FORMATS = {"vllm": '{"data": [{"index": 0, "probs": [NUMBER]}, ...]}', "sglang": '[{"embedding": [NUMBER]}, ...]'}


class ClassifierServer(Server):
    """Encodes conversations as `ModelScorer` does and sends their token ids.

    Raises ConfigError if tokenizer or config cannot be loaded, or if the variable with the key is missing.
    """

    key = "reward.model.url"

    def __init__(self, data: Data, section: RewardModel, timeout_s: float) -> None:
        super().__init__(section.url or "", timeout_s, secret_of(section.api_key_env, "reward.model.api_key_env"))
        self._data, self._engine, self._input = data, section.server, ClassifierInput(section)

    def ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        if not items:
            self._forward([self._input.encode([{"role": "user", "content": "?"}])])
        rows = [self._without_padding(self._input.encode(conversation(self._data, item))) for item in items]
        return scores_of(rows, self._input.longest, self._forward)

    def _without_padding(self, row: list[int]) -> list[int]:
        """Removes padding at the end: transformers scores the last other token, a server the last of a request."""
        while row and row[-1] == self._input.padding:
            row.pop()
        return row

    def _forward(self, rows: Sequence[Sequence[int]]) -> list[object]:
        """Returns what the server answers for each row. Raises Unanswered."""
        vllm = self._engine == "vllm"
        request = {"input": rows, "use_activation": False} if vllm else {"input_ids": rows}
        answer = self.post(json.dumps(request).encode())
        try:
            reply = json.loads(answer)
            if vllm:
                outputs = {row["index"]: row["probs"] for row in reply["data"]}
            else:
                outputs = dict(enumerate(row["embedding"] for row in reply))
            if len(outputs) != len(rows):
                raise ValueError(f"{len(outputs)} outputs of {len(rows)} conversations")
            if any(len(output) != 1 for output in outputs.values()):
                raise ValueError("an output is not one number")
            return [outputs[index][0] for index in range(len(rows))]
        except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
            problem = f"{type(error).__name__}: {error}"
            message = f"{self.url} did not answer as {self._engine} with {FORMATS[self._engine]}: {problem}: "
            raise Unanswered(RAISED, message + self.shown(answer)) from error
