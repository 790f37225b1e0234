"""A language model as judge: chat completions of an OpenAI-compatible server, and the number in its reply.

Not covered: retries, see `http_scorer.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence

from rl_platform.config.schema.reward import Judge
from rl_platform.envs.reasoning.score import RAISED, Score, checked_reward, unscored
from rl_platform.envs.reasoning.servers.reward_server import SHOWN, Server, Unanswered
from rl_platform.envs.reasoning.verifiers import ScoreItem
from rl_platform.errors import ConfigError, Problem

_FIELD = re.compile(r"\{(question|response|answer)\}")


class JudgeServer(Server):
    """Sends one response in a request and reads the number in the reply; a reply without a number is no score.

    Raises ConfigError if the variable with the key is missing.
    """

    key = "reward.judge.url"

    def __init__(self, judge: Judge, timeout_s: float) -> None:
        super().__init__(judge.url, timeout_s, secret_of(judge.api_key_env, "reward.judge.api_key_env"))
        self._judge = judge
        self._verdict = re.compile(judge.verdict) if judge.verdict is not None else None

    def ask(self, items: Sequence[ScoreItem]) -> list[Score]:
        if not items:
            self._reply("Reply with 1.", 1)
        return [self._score(item) for item in items]

    def _score(self, item: ScoreItem) -> Score:
        fields = {"question": item.question, "response": item.response, "answer": item.answer}
        # in one pass, so that a response that holds {answer} is not filled in
        text = _FIELD.sub(lambda match: fields[match[1]], self._judge.template)
        reply, finish_reason = self._reply(text, self._judge.max_tokens)
        whole = [reply] if reply.strip() else []
        verdicts = whole if self._verdict is None else self._verdict.findall(reply)
        try:
            return Score(checked_reward(float(verdicts[-1])))
        except (IndexError, ValueError) as error:
            cut = ", cut at judge.max_tokens" if finish_reason == "length" else ""
            reason = f"{error}" if verdicts else "no verdict in it"
            return unscored(RAISED, f"the judge's reply{cut}: {reason}: {reply[-SHOWN:]!r}")

    def _reply(self, text: str, max_tokens: int) -> tuple[str, object]:
        """Returns the text of the reply, and why it ends."""
        judge = self._judge
        system = [] if judge.system_prompt is None else [{"role": "system", "content": judge.system_prompt}]
        messages = [*system, {"role": "user", "content": text}]
        request = {"model": judge.model, "messages": messages, "temperature": judge.temperature}
        answer = self.post(json.dumps(request | {"max_tokens": max_tokens}).encode())
        try:
            choice = json.loads(answer)["choices"][0]
            content, finish_reason = choice["message"]["content"], choice.get("finish_reason")
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, RecursionError) as error:
            message = f"{self.url} answered with something else than a chat completion: {self.shown(answer)}"
            raise Unanswered(RAISED, message) from error
        return content if isinstance(content, str) else "", finish_reason


def secret_of(variable: str | None, key: str) -> str:
    """Returns the key of a server in an environment variable, empty without one. key: of the config, which names the
    variable.

    Raises ConfigError if the variable is not set."""
    if variable is None:
        return ""
    secret = os.environ.get(variable, "").strip()
    if not secret or not secret.isascii() or not secret.isprintable():
        message = "this environment variable holds no key" if not secret else "the key in it is not printable ASCII"
        hint = f"export {variable}=... where the reward runs; on a cluster: cluster.node_groups[].env_vars"
        raise ConfigError([Problem(key, message, value=variable, hint=hint)])
    return secret
