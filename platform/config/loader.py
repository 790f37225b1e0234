"""Loads a config: YAML, overrides, references, schema, checks. All problems are reported at once.

Neither torch nor any other heavy library is imported, so that a refusal takes less than a second.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from os import PathLike
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args, get_origin

import yaml
from pydantic import ValidationError

from rl_platform.config.describe import default_tree, field_at, is_known
from rl_platform.config.extends import EXPLANATIONS, read_config
from rl_platform.config.layers import Layers, dotted, is_within_any, steps_of, strings_of, value_at
from rl_platform.config.overrides import apply_overrides
from rl_platform.config.python_values import OVERRIDES, Dumper, as_arguments
from rl_platform.config.schema import Config
from rl_platform.config.schema.cluster import PLACEMENT, Cluster
from rl_platform.config.schema.config import complete_models
from rl_platform.config.schema.runner import Runner
from rl_platform.config.source import COMMAND_LINE, Tree
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import find
from rl_platform.redact import without_secrets

if TYPE_CHECKING:
    from rl_platform.config.rules.rule import Unread

REFERENCES = "rl_platform.config.references"  # an extra
RULES = "rl_platform.config.rules"  # an extra


@dataclass(frozen=True)
class LoadedConfig:
    """A valid config with its origin: `sources` maps every key that was written to "file:line" or "command line".

    from_environment: keys whose values come from environment variables -> what was written, as `${env:NAME}`.
    """

    config: Config
    sources: dict[str, str]
    notes: tuple[str, ...] = ()  # on decisions made for the user
    from_environment: Mapping[str, str] = field(default_factory=dict)

    def with_backend(self, backend: str, why: str) -> LoadedConfig:
        """Returns the config with `rollout.backend` set to the engine that `auto` selects here."""
        if self.config.rollout.backend == backend or self.config.runner.task_type == "embodied":
            return self
        notes = (*self.notes, f"rollout.backend auto is {backend} here: {why}")
        return replace(self, config=self.config.changed({"rollout.backend": backend}), notes=notes)

    def shown(self, *, references: bool = True) -> Tree:
        """Returns all values without secrets, with `references` to environment variables instead of their values."""
        tree: Tree = without_secrets(self.config.model_dump(mode="json"))
        for key, text in self.from_environment.items() if references else ():
            _set(tree, steps_of(key), text)
        return tree

    def where(self, key: str) -> str:
        """Returns the line of `key` or, if it was not written, of the nearest section around it."""
        return _nearest_line(self.sources, key)

    def resolved_yaml(self, *, with_secrets: bool = False) -> str:
        """Returns the config with defaults and references filled in, without the keys that have no effect: it loads
        again.

        Values of environment variables stay references to them. Other secrets are replaced by `***`.
        """
        tree = _escaped(self.config.model_dump(mode="json") if with_secrets else self.shown(references=False))
        for key, text in self.from_environment.items():
            _set(tree, steps_of(key), text)
        for key in _unread_keys(self.config):
            _remove(tree, steps_of(key))
        return yaml.dump(tree, Dumper=Dumper, sort_keys=False, allow_unicode=True, width=120)


def load_config(
    source: str | PathLike[str] | Mapping[str, object],
    overrides: Sequence[str] | Mapping[str, object] = (),
    check_cluster: Callable[[Cluster], list[Problem]] | None = None,
    missing: Callable[[Config], Iterable[Problem]] | None = None,
    *,
    stored: bool = False,
) -> LoadedConfig:
    """Returns the config in a file or a dict, with overrides.

    overrides: texts `section.key=value`, or a dict of values by `section.key`. check_cluster: returns the problems of
    the placement, which depend on the machines; called if the section `cluster` can be read, even if others cannot.
    missing: yields the problems of files and environments that the machine lacks; called only if there are other
    problems, to list all at once. stored: a run wrote the file, maybe of an earlier version; keys without effect are
    then ignored. Raises ConfigError with all problems, in line order.
    """
    layers = read_config(source)
    if isinstance(overrides, Mapping):
        arguments, invalid = as_arguments(overrides)
        layers.problems += invalid
        apply_overrides(layers, arguments, OVERRIDES)
    else:
        apply_overrides(layers, overrides)
    resolved, notes = _settle(layers)
    config, problems, where = resolved.config, resolved.problems, partial(_nearest_line, layers.where)
    if check_cluster is not None and not any(problem.key.partition(".")[0] == "cluster" for problem in problems):
        problems += [replace(problem, where=where(problem.key)) for problem in check_cluster(config.cluster)]
    if stored:
        for key in _unread_keys(config):
            if where(key) not in (COMMAND_LINE, OVERRIDES):
                _remove(resolved.tree, steps_of(key))
    try:
        check: Callable[..., list[Problem]] = find(RULES, "checks.check", lambda *_: [])
        problems += check(config, resolved.tree, where, resolved.doubtful)
        doubtful = resolved.doubtful
        if problems and missing is not None and not doubtful & {"runner", "runner.task_type"}:
            absent = [each for each in missing(config) if not is_within_any(each.key, doubtful)]
            problems += [replace(each, where=where(each.key)) for each in absent]
    except OSError as error:
        refused_path: Callable[..., Problem | None] = find(EXPLANATIONS, "refused_paths.refused_path", lambda *_: None)
        if (refused := refused_path(error, strings_of(config.model_dump(mode="json")), where)) is None:
            raise
        problems.append(refused)
    if problems:
        raise ConfigError(sorted(problems, key=_line_order))
    return LoadedConfig(config, layers.where, tuple(notes), resolved.from_environment)


class _Resolved(NamedTuple):
    """All layers with their references filled in.

    tree: the written keys, without those that have a problem. config: has defaults in place of these. problems: all so
    far; later checks add theirs. failed: keys whose references have no value. from_environment: as in `LoadedConfig`.
    """

    tree: Tree
    config: Config
    problems: list[Problem]
    failed: set[str]
    from_environment: dict[str, str]

    @property
    def doubtful(self) -> set[str]:
        """The keys whose values cannot be trusted: those that failed, have a problem, or are named in one."""
        texts = (f"{problem.message} {problem.hint}" for problem in self.problems)
        named = {key for text in texts for key in re.findall(r"\w+(?:\.\w+)+", text)}
        return named | {problem.key for problem in self.problems} | self.failed


def _unread_keys(config: Config) -> list[str]:
    """Returns the keys that `config` does not read; none if the rules are not installed."""
    without_effect: Callable[[Config], Iterable[Unread]] = find(RULES, "without_effect", lambda _: ())
    return [unread.key for unread in without_effect(config)]


def _settle(layers: Layers) -> tuple[_Resolved, list[str]]:
    """Returns all layers resolved, and notes on keys that are not inherited.

    An inherited key is removed from `layers` if only a choice that a later layer replaced reads it.
    """
    resolved = _resolve(layers)
    stale_keys: Callable[..., dict[str, str]] = find(RULES, "inheritance.stale_keys", lambda *_: {})
    stale = stale_keys(resolved.config, layers, resolved.doubtful)
    if not stale:
        return resolved, []
    notes = [f"{key} ({layers.where[key]}) is not inherited: {switch} is another" for key, switch in stale.items()]
    for key in stale:
        layers.drop(key)
    return _resolve(layers), notes


def _resolve(layers: Layers) -> _Resolved:
    """Fills in the references of all layers. An unknown key is one problem, whatever its references."""
    tree, where = copy.deepcopy(layers.tree), partial(_nearest_line, layers.where)
    runner = tree.get("runner")
    if isinstance(runner, dict):  # its default is a reference, to be resolved with the others
        runner.setdefault("output_dir", Runner.model_fields["output_dir"].default)
    resolve_references = find(REFERENCES, "interpolation.resolve_references", _no_references)
    tree, unresolved, failed, from_environment = resolve_references(tree, default_tree(), where)
    problems = [*layers.problems, *(problem for problem in unresolved if is_known(problem.key))]
    failed = {key for key in failed if is_known(key)}
    config, invalid = _validate(tree, where, {*failed, *(problem.key for problem in problems)})
    return _Resolved(tree, config, problems + invalid, failed, from_environment)


def _no_references(
    tree: Tree, defaults: Tree, where: Callable[[str], str]
) -> tuple[Tree, list[Problem], set[str], dict[str, str]]:
    """Fills in the default of `runner.output_dir`, and reports all other references, which need the extra."""
    runner = {**defaults["runner"], **tree.get("runner", {})}
    if runner["output_dir"] == Runner.model_fields["output_dir"].default:
        tree["runner"]["output_dir"] = f"runs/{runner['experiment_name']}"
    failed = {key: text for key, text in strings_of(tree) if "${" in text}
    message = f"{REFERENCES} is not installed"
    return tree, [Problem(key, message, where=where(key), value=text) for key, text in failed.items()], {*failed}, {}


def _validate(tree: Tree, where: Callable[[str], str], known: set[str]) -> tuple[Config, list[Problem]]:
    """Returns the config and the problems that the schema reports beside those of the keys `known`.

    Keys with a problem are taken out of `tree`, so that the rules between the others can be checked. In the config they
    have their defaults or, without a default, any valid value.
    """
    completed = complete_models(copy.deepcopy(tree))  # while the models hold the keys that decide whether they need it
    for key in known:
        if not key.startswith(f"{PLACEMENT}."):  # the name of a component counts, whatever its place
            _remove(tree, steps_of(key))
            _remove(completed, steps_of(key))
    problems: list[Problem] | None = None
    while True:
        try:
            return Config.model_validate(completed), problems or []
        except ValidationError as error:
            if problems is None:
                explained = find(EXPLANATIONS, "explain.explain", _in_pydantics_words)
                problems = [problem for problem in explained(error, where) if problem.key not in known]
            for detail in error.errors(include_url=False):
                _remove(tree, detail["loc"])
                _remove(completed, detail["loc"])
                if detail["type"] == "missing":
                    _fill_in(completed, detail["loc"])


def _in_pydantics_words(error: ValidationError, where: Callable[[str], str]) -> list[Problem]:
    keys = [(dotted(detail["loc"]), detail["msg"]) for detail in error.errors(include_url=False)]
    return [Problem(key, message, where=where(key)) for key, message in keys]


def _remove(tree: object, path: Sequence[str | int]) -> None:
    """Takes the value at `path` out of nested mappings and lists; for an item of a list, the whole list."""
    while path and isinstance(path[-1], int):
        path = path[:-1]
    inner = value_at(tree, path[:-1])
    if path and isinstance(inner, dict):  # no path: of an argument that names no key
        inner.pop(path[-1], None)


def _set(tree: object, path: Sequence[str | int], value: str) -> None:
    inner = value_at(tree, path[:-1])
    if value_at(tree, path) is not None:
        inner[path[-1]] = value


def _fill_in(tree: object, path: Sequence[str | int]) -> None:
    """Sets the required key at `path` to any valid value."""
    inner, field = value_at(tree, path[:-1]), field_at(dotted(path))
    if not isinstance(inner, dict) or field is None:
        return
    kind = get_origin(field.annotation) or field.annotation
    if kind is Literal:
        inner[path[-1]] = get_args(field.annotation)[0]
    else:
        values: dict[object, object] = {str: "x", int: 1, float: 1.0}
        inner[path[-1]] = values.get(kind, {})


def _nearest_line(sources: dict[str, str], key: str) -> str:
    while key and key not in sources:
        key = key.rpartition(".")[0] if not key.endswith("]") else key.rpartition("[")[0]
    return sources.get(key, "")


def _line_order(problem: Problem) -> tuple[bool, str, int]:
    file, _, line = problem.where.rpartition(":")
    return problem.where in (COMMAND_LINE, OVERRIDES), file, int(line) if re.fullmatch("[0-9]+", line) else 0


def _escaped(value: object) -> object:
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return value.replace("${", "$${") if isinstance(value, str) else value
