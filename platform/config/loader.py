"""Loads a config: YAML, overrides, references, schema, checks. All problems are reported at once.

Neither torch nor any other heavy library is imported, so that a refusal takes less than a second.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from rl_platform.config.checks import check
from rl_platform.config.describe import default_tree
from rl_platform.config.explain import dotted, explain
from rl_platform.config.extends import read_config
from rl_platform.config.inheritance import stale_keys
from rl_platform.config.interpolation import resolve_references
from rl_platform.config.layers import Layers
from rl_platform.config.overrides import apply_overrides
from rl_platform.config.rules import without_effect
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import Cluster
from rl_platform.config.schema.runner import Runner
from rl_platform.config.source import COMMAND_LINE, CoreLoader
from rl_platform.errors import ConfigError, Problem


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config with its origin: `sources` maps every key that was written to "file:line" or "command line"."""

    config: Config
    sources: dict[str, str]
    notes: tuple[str, ...] = ()  # on what was decided for the user

    def with_backend(self, backend: str, why: str) -> LoadedConfig:
        """Returns the config with `rollout.backend` set to the engine that `auto` selects here."""
        if self.config.rollout.backend == backend or self.config.runner.task_type == "embodied":
            return self
        rollout = self.config.rollout.model_copy(update={"backend": backend})
        notes = (*self.notes, f"rollout.backend auto is {backend} here: {why}")
        return replace(self, config=self.config.model_copy(update={"rollout": rollout}), notes=notes)

    def where(self, key: str) -> str:
        """The line of `key` or, if it was not written, of the nearest section around it."""
        return _nearest_line(self.sources, key)

    def resolved_yaml(self) -> str:
        """The config with defaults and references filled in, without the keys that have no effect: it loads again."""
        tree = self.config.model_dump(mode="json")
        for rule in without_effect(self.config):
            _remove(tree, rule.key)
        return yaml.dump(_escaped(tree), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=120)


def load_config(
    path: str | Path, overrides: Sequence[str] = (), check_cluster: Callable[[Cluster], list[Problem]] | None = None
) -> LoadedConfig:
    """The config in the file at `path` with `section.key=value` overrides.

    `check_cluster` returns the problems of the placement, which depend on the machines. It is called if the section
    `cluster` can be read, even if others cannot. Raises ConfigError with all problems, in line order.
    """
    layers = read_config(path)
    apply_overrides(layers, overrides)
    tree, config, problems, dropped = _settle(layers)

    def where(key: str) -> str:
        return _nearest_line(layers.where, key)

    if check_cluster is not None and (cluster := _readable_cluster(tree, problems)) is not None:
        problems += [replace(problem, where=where(problem.key)) for problem in check_cluster(cluster)]
    if config is not None:
        problems += check(config, tree, where, _doubtful(problems))
    if problems or config is None:
        raise ConfigError(sorted(problems, key=_line_order))
    return LoadedConfig(config, layers.where, tuple(dropped))


def _settle(layers: Layers) -> tuple[dict[str, Any], Config | None, list[Problem], list[str]]:
    """The keys of all layers with references filled in, the config, the problems, and notes on what is not inherited.

    Keys that only a former choice reads are taken out of `layers`.
    """
    tree, config, problems = _resolved(layers)
    if config is None:
        return tree, config, problems, []
    doubtful = _doubtful(problems)
    stale = {key: switch for key, switch in stale_keys(config, layers) if not {key, switch} & doubtful}
    if not stale:
        return tree, config, problems, []
    notes = [f"{key} ({layers.where[key]}) is not inherited: {switch} is another" for key, switch in stale.items()]
    for key in stale:
        layers.drop(key)
    return *_resolved(layers), notes


def _resolved(layers: Layers) -> tuple[dict[str, Any], Config | None, list[Problem]]:
    """The keys of all layers with references filled in, the config, and the problems so far."""

    def where(key: str) -> str:
        return _nearest_line(layers.where, key)

    tree = copy.deepcopy(layers.tree)
    _fill_references(tree)
    tree, unresolved = resolve_references(tree, default_tree(), where)
    problems = [*layers.problems, *unresolved]
    for problem in problems:
        _remove(tree, problem.key)
    config, invalid = _validate(tree, where, {problem.key for problem in problems})
    return tree, config, problems + invalid


def _validate(
    tree: dict[str, Any], where: Callable[[str], str], known: set[str]
) -> tuple[Config | None, list[Problem]]:
    """The config and the problems that the schema reports.

    Keys with a problem get their defaults, so that the rules can still be checked. The config is None if one of them
    has no default.
    """
    try:
        return Config.model_validate(tree), []
    except ValidationError as error:
        problems = [problem for problem in explain(error, where) if problem.key not in known]
        for detail in error.errors(include_url=False):
            _remove(tree, dotted(detail["loc"]))
    try:
        return Config.model_validate(tree), problems
    except ValidationError:  # a required key has a problem, which is in the list already
        return None, problems


def _readable_cluster(tree: dict[str, Any], problems: list[Problem]) -> Cluster | None:
    """The section `cluster`, None if anything in it has a problem."""
    if "cluster" not in tree or any(problem.key.partition(".")[0] == "cluster" for problem in problems):
        return None
    return Cluster.model_validate(tree["cluster"])


def _fill_references(tree: dict[str, Any]) -> None:
    """Defaults that are references themselves are written out, to be resolved with the others."""
    runner = tree.get("runner")
    if isinstance(runner, dict):
        runner.setdefault("output_dir", Runner.model_fields["output_dir"].default)


def _doubtful(problems: list[Problem]) -> set[str]:
    """Keys whose values cannot be trusted: those with a problem, and those that a message or hint names."""
    named = {key for problem in problems for key in re.findall(r"\w+(?:\.\w+)+", f"{problem.message} {problem.hint}")}
    return named | {problem.key for problem in problems}


def _nearest_line(sources: dict[str, str], key: str) -> str:
    while key and key not in sources:
        key = key.rpartition(".")[0] if not key.endswith("]") else key.rpartition("[")[0]
    return sources.get(key, "")


def _remove(tree: dict[str, Any], key: str) -> None:
    """Takes `key` out of nested mappings; for an item of a list, the whole list."""
    *sections, leaf = key.partition("[")[0].split(".")
    for section in sections:
        inner = tree.get(section)
        if not isinstance(inner, dict):
            return
        tree = inner
    tree.pop(leaf, None)


def _line_order(problem: Problem) -> tuple[bool, str, int]:
    file, _, line = problem.where.rpartition(":")
    return problem.where == COMMAND_LINE, file, int(line) if re.fullmatch("[0-9]+", line) else 0


def _escaped(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value


class _Dumper(yaml.SafeDumper):
    """Quotes all text that YAML 1.2 or YAML 1.1 would read as something else."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's own attribute
        first: CoreLoader.yaml_implicit_resolvers.get(first, [])
        + yaml.SafeDumper.yaml_implicit_resolvers.get(first, [])
        for first in {*CoreLoader.yaml_implicit_resolvers, *yaml.SafeDumper.yaml_implicit_resolvers}
    }
