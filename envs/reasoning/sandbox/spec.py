"""Settings of a scoring process that scores programs in sandboxes of this machine."""

from __future__ import annotations

from dataclasses import dataclass

from rl_platform.envs.reasoning.sandbox.cases import Case, cases_of
from rl_platform.envs.reasoning.sandbox.isolation import missing_layers
from rl_platform.envs.reasoning.sandbox.process import START_S, WALL_FACTOR, Limits, Sandbox
from rl_platform.envs.reasoning.sandbox.program_verdict import judge, passes, program_of
from rl_platform.envs.reasoning.score import Score
from rl_platform.envs.reasoning.verifiers import ScoreItem, Verifier
from rl_platform.errors import ConfigError, Problem, WorkerError

_HINT = (
    "docs/sandbox.md has the layers of each kernel; or a sandbox-fusion server: reward.code.url; or, only where the "
    "machine holds nothing of value, reward.isolation: none"
)


@dataclass(frozen=True)
class CodeSpec:
    """`reward.type: code` without a server. partial: the score is the fraction of passed tests."""

    limits: Limits
    isolated: bool
    partial: bool
    type: str = "code"
    key: str = "reward.type"

    @property
    def longest_s(self) -> float:
        """The seconds after which a scoring process that has not scored a response is broken."""
        return WALL_FACTOR * self.limits.cpu_s + START_S

    def load(self) -> Verifier:
        """Raises ConfigError if a layer of the isolation is missing."""
        if self.isolated:
            self._require_layers()
        return self._score

    def _score(self, item: ScoreItem) -> Score:
        program, cases = program_of(item.final), cases_of(item.metadata)
        with Sandbox(program, self.limits, isolated=self.isolated) as sandbox:
            return judge(program, cases, sandbox.run, partial=self.partial)

    def _require_layers(self) -> None:
        missing = missing_layers()
        if not missing:
            case = Case("42", input="42")
            try:
                with Sandbox("print(input())", self.limits, isolated=True) as sandbox:
                    result = sandbox.run(case)
                if not passes(case, result):
                    missing.append(f"a sandbox that works: a program that echoes 42 {result.status}: {result.note}")
            except WorkerError as error:
                allowed = (
                    "Linux lets only some users make them: sysctl kernel.unprivileged_userns_clone=1 (Debian), "
                    "kernel.apparmor_restrict_unprivileged_userns=0 (Ubuntu), docker run --privileged"
                )
                missing.append(f"namespaces: {error} ({allowed})")
        if missing:
            message = f"programs cannot be isolated on this machine, which lacks {'; '.join(missing)}"
            raise ConfigError([Problem("reward.isolation", message, value="sandbox", hint=_HINT)])
