"""The scorer of `reward.type: code`, and the check of the tests that it needs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from rl_platform.config.schema.reward import Code, Scoring
from rl_platform.envs.reasoning.question import Question
from rl_platform.envs.reasoning.sandbox.cases import cases_of
from rl_platform.envs.reasoning.sandbox.process import Limits
from rl_platform.envs.reasoning.sandbox.spec import CodeSpec
from rl_platform.envs.reasoning.scoring import ScoringPool
from rl_platform.errors import DataError

if TYPE_CHECKING:
    from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer


def code_scorer(scoring: Scoring) -> ScoringPool | HttpScorer:
    """Returns the scorer of `reward.type: code`. Raises ConfigError if a layer of the isolation is missing or no
    sandbox-fusion server is at `code.url`, Unreachable if it does not answer."""
    code = scoring.code or Code()
    limits, partial = Limits(scoring.timeout_s, code.memory_mb << 20), code.score == "fraction"
    if code.url is not None:
        from rl_platform.envs.reasoning.sandbox.fusion import FusionServer
        from rl_platform.envs.reasoning.servers.http_scorer import HttpScorer

        server = FusionServer(code.url, code.api_key_env, limits, partial=partial)
        return HttpScorer(server, batch_size=1, num_workers=scoring.num_workers, retries=scoring.retries)
    spec = CodeSpec(limits, isolated=scoring.isolation == "sandbox", partial=partial)
    return ScoringPool(spec, num_workers=scoring.num_workers, timeout_s=spec.longest_s)


def check_cases(questions: Iterable[Question]) -> None:
    """Raises DataError, with file and row, for a question without valid tests."""
    for question in questions:
        try:
            cases_of(question.metadata)
        except ValueError as error:
            raise DataError(f"{question.where}: {error}. docs/sandbox.md#your-own-tests has the format.") from error
