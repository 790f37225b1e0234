"""Kinds of user code: all are documented with an example, and wrong code of each is named before the start."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from rl_platform.envs.embodied.spaces import ActionSpace, EnvSpaces
from rl_platform.errors import ConfigError
from rl_platform.launch.start_checks.extensions import USES
from rl_platform.models.policies.network import check_network

ROOT = Path(__file__).parents[3]
KINDS = {use.kind.kind: use.kind for use in USES}
BACKEND = "from rl_platform.envs.embodied.user_backend import EnvBackend\nclass own(EnvBackend):\n"
METHODS = "receive generate abort offload close"


def test_every_kind_is_in_the_guide_with_its_protocol_and_an_example() -> None:
    guide = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    for use in USES:
        assert f"`{use.kind.key}`" in guide, use.kind.kind
        assert f"[`{use.kind.protocol.__name__}`]" in guide, use.kind.kind
        if use.example:
            assert f"../examples/{use.example}.py" in guide
            assert (ROOT / "examples" / f"{use.example}.yaml").exists()


def function(*arguments: str) -> str:
    return f"def own({', '.join(arguments)}): ..."


WRONG = {  # of each kind: its source, and a part of the message
    "advantage estimator": [(function("batch"), "too many"), (function("a", "b", "c"), "'c'")],
    "policy loss": [(function("log_probs"), "too many"), (function("a", "b", "c", "d", "e", "f"), "'f'")],
    "filter of groups": [(function(), "too many"), (function("group", "limit"), "'limit'")],
    "filter of samples": [(function(), "too many"), (function("response", "limit"), "'limit'")],
    "tool": [(function("conversation"), "too many"), (function("a", "b", "c"), "'c'")],
    "agent": [(function("question"), "too many"), (function("a", "b", "c", "d"), "'d'")],
    "tool by JSON schema": [
        ("class own:\n  def __init__(self, question, params): ...", "has no method call"),
        ("class own:\n  def __init__(self): ...\n  def call(self, arguments): ...", "constructor"),
    ],
    "text environment": [
        ("class own:\n  def reset(self, question, seed): ...", "has no method step"),
        ("class own:\n  def reset(self, seed): ...\n  def step(self, text): ...", "reset() is called with"),
    ],
    "reward": [
        (function("response"), "too many"),
        (function("a", "b", "c", "d"), "'d'"),
        (function("data_source", "solution_str", "ground_truth", "extra_info=None"), "are verl's"),
        (function("completions", "**kwargs"), "are TRL's"),
        (function("prompts", "completions", "answer"), "are TRL's"),
        ("class own:\n  def __call__(self, prompts, completions, answer): ...", "are TRL's"),
        (function("prompt", "response", "answer"), "are in another order"),
        (function("gold", "prediction", "info"), "are in another order"),
        (function("prompt", "completion", "info"), "are in another order"),
        (function("response", "answer", "question"), "are in another order"),
    ],
    "callback": [(function("step"), "too many"), ("class own:\n  def __call__(self): ...", "too many")],
    "policy network": [
        ("class own:\n  def __init__(self, spaces): ...", "has no method forward"),
        ("class own:\n  def __init__(self): ...\n  def forward(self, x): ...", "constructor"),
    ],
    "environment backend": [
        ("class own:\n  def reset(self, which, seeds): ...", "has no method spaces, step, save, restore, close"),
        (BACKEND + "  def reset(self, which, seeds): ...", "has no method spaces, step"),
        (
            BACKEND + "  spaces = classmethod(id)\n  def reset(self, which): ...\n  def step(self, actions, idle): ...",
            "reset() is called with (which, seeds)",
        ),
        (
            BACKEND + "  spaces = classmethod(id)\n  step = reset = lambda self, a, b: a\n  def __init__(self): ...",
            "its constructor is called with (num_envs)",
        ),
    ],
    "rollout engine": [
        ("class own:\n  def __init__(self, setup): ...", "has no method receive, generate, abort, offload, close"),
        ("class own:\n" + "".join(f"  def {name}(self): ...\n" for name in METHODS.split()), "receive()"),
    ],
    "logger": [
        ("class own:\n  def step(self, step, metrics): ...", "has no method start, phase, progress, samples"),
        (
            "from rl_platform.metrics import Reporter\nclass own(Reporter):\n  def step(self, step): ...",
            "step() is called with (step, metrics)",
        ),
    ],
}
EVERYWHERE = [("own = 3", "is not a "), ("other = 3", "cannot be imported"), ("\n1 / 0", "own.py:2: division by zero")]
CASES = [(kind, *case) for kind, cases in WRONG.items() for case in (*cases, *EVERYWHERE)]


def test_wrong_code_of_every_kind_is_tried() -> None:
    assert WRONG.keys() == KINDS.keys()


@pytest.mark.parametrize(("kind", "source", "message"), CASES)
def test_wrong_code(kind: str, source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(source)
    name = f"{tmp_path / 'own.py'}:own"
    with pytest.raises(ConfigError) as failed:
        KINDS[kind].load(name)
    (problem,) = failed.value.problems
    assert (failed.value.exit_code, problem.key, problem.value) == (2, KINDS[kind].key, name)
    assert message in problem.message
    assert problem.allowed


SPACES = EnvSpaces((4,), ActionSpace("discrete", 2), ())
NET = "import torch\nclass own(torch.nn.Module):\n  def __init__(self, spaces, **options):\n    super().__init__()\n"
LINEAR = (
    f"{NET}    self.width, self.layer = 3, torch.nn.Linear(4, 3)\n"
    "    self.layers = [torch.nn.Linear(4, 3)]\n  def forward(self, x): return "
)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class own:\n  def __init__(self, spaces): ...\n  def forward(self, x): ...", "torch.nn.Module"),
        (NET + "  def forward(self, x): return x", "has no integer width"),
        (
            NET + "    self.width = 3\n  def forward(self, x): return x",
            "[2, 4] for 2 observations, not features [2",
        ),
        (NET + "    self.width = 3\n  def forward(self, x): return x @ x", "own.py:6: "),
        (NET + "    options['depth']\n  def forward(self, x): return x", "cannot be built with actor.model.kwargs {}"),
        (NET + "    self.width = 0\n  def forward(self, x): return x[:, :0]", "has no integer width of at least 1"),
        (LINEAR + "self.layer(x).squeeze()", "[3] for 1 observation, not features [1, 3]"),
        (LINEAR + "torch.dropout(self.layer(x), 0.5, True)", "when it is called with the same observations again"),
        (LINEAR + "self.layer(x) + torch.rand(1)", "when it is called with the same observations again"),
        (LINEAR + "(lambda y: y - y.mean(0))(self.layer(x))", "depend on the other observations of the batch"),
        (LINEAR + "self.layer(x).double()", "returned torch.float64"),
        (LINEAR + "self.layer(x) / 0", "not finite"),
        (LINEAR + "self.layer(x.add_(1))", "changes the observations"),
        (LINEAR + "self.layers[0](x)", "are not in its state_dict"),
        (LINEAR.replace("torch.nn.Linear(4, 3)\n", "torch.nn.LazyLinear(3)\n") + "self.layer(x)", "may not be lazy"),
        (
            LINEAR.replace("torch.nn.Linear(4, 3)\n", "torch.nn.BatchNorm1d(4)\n") + "self.layer(x)[:, :3]",
            "1 observation",
        ),
    ],
)
def test_networks_that_cannot_be_used(source: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(source)
    with pytest.raises(ConfigError) as failed:
        check_network(f"{tmp_path / 'own.py'}:own", dataclasses.replace(SPACES), {})
    assert message in failed.value.problems[0].message
