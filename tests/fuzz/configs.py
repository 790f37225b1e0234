"""Configs: shipped ones and small ones with changed values, damaged text and absurd overrides."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from fuzz import values

from rl_platform.config.explanations.accepted_values import walk
from rl_platform.launch import command
from rl_platform.launch.plans.plan_forms import plan

CONFIGS = Path(__file__).parents[2] / "configs"
LAUGHS = "".join(f"{to}: &{to} [{', '.join([f'*{of}'] * 9)}]\n" for of, to in pairwise("abcdefghi"))
BOMBS = (
    f"a: &a [x, x, x, x, x, x, x, x, x]\n{LAUGHS}",
    "a: " + "[" * 5000,
    "a: " + "{a: " * 3000,
    "? " * 3000,
    "- " * 50000,
    "a:\n" + "".join(f"{'  ' * depth}a:\n" for depth in range(1, 300)),
    "a: &a {b: *a}\n",
    "a: &a {<<: *a}\n",
    "a: !!python/object/apply:os.system [id]\n",
    "a: " + "9" * 100_000 + "\n",
    "a: 0x" + "f" * 100_000 + "\n",
    "".join(f"k{number}: {number}\n" for number in range(20_000)),
    "".join(f"&a{number} k{number}: *a{number}\n" for number in range(2000)),
    "# " + "x" * 190_000 + "\n",
    "x" * 199_000,
    "\n" * 199_000,
    "\t" * 199_000,
    "'" * 100_001,
    '"' + "\\u0041" * 30_000 + '"',
    "[" + "a," * 90_000 + "]",
    "{" + "a: " * 60_000 + "}",
    "%YAML 9" + "9" * 5000 + ".1\n--- a\n",
    "- - " * 40_000,
    "&a " * 60_000,
    "!!a " * 40_000,
    "\ufeff" * 3000,
)
REFERENCES = (
    {"a": "${runner.experiment_name}" * 9},
    {f"k{number}": f"${{k{number + 1}}}${{k{number + 1}}}" for number in range(60)},
    {"experiment_name": "${runner.output_dir}", "output_dir": "${runner.experiment_name}"},
    {"experiment_name": "${" * 2000},
    {"experiment_name": "$" * 5000 + "{runner.seed}"},
)


class Configs:
    """Loads each as the command line does; then writes it, and plans it if it is valid."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "config.yaml"
        self.texts = [path.read_text() for path in sorted(CONFIGS.rglob("*.yaml"))]
        self.texts = [text for text in self.texts if "extends:" not in text]
        self.trees = [yaml.safe_load(text) for text in self.texts]
        self.keys = [key for key, _ in walk()]

    def case(self, numbers: random.Random) -> tuple[str, Callable[[], object]]:
        overrides: list[str] = []
        match numbers.randrange(12):
            case 0:
                text = numbers.choice(BOMBS)
            case 1 | 2:
                data = numbers.choice(self.texts).encode()
                for _ in range(numbers.randrange(1, 4)):
                    data = values.damaged(data, numbers)
                text = data.decode("latin-1" if numbers.random() < 0.2 else "utf-8", errors="surrogateescape")
            case 3:
                tree = {**numbers.choice(self.trees)}
                tree["runner"] = {**tree["runner"], **numbers.choice(REFERENCES)}
                text = yaml.safe_dump(tree)
            case 4:
                text = yaml.safe_dump({**numbers.choice(self.trees), "x": values.nested(numbers.choice((10, 60, 90)))})
            case _:
                text = yaml.safe_dump(values.changed(numbers.choice(self.trees), numbers, numbers.randrange(4)))
                overrides = [self._override(numbers) for _ in range(numbers.randrange(4))]
        shown = text if len(text) < 4000 else f"{text[:300]} ... {len(text)} characters"
        arguments, plans = " ".join(map(ascii, overrides)), numbers.random() < 0.1
        return f"{shown}\n{arguments[:2000]}", lambda: self._load(text, overrides, plans)

    def _override(self, numbers: random.Random) -> str:
        key = numbers.choice(self.keys)
        if numbers.random() < 0.1:
            key = numbers.choice((key + "s", key.replace(".", ""), "." + key, key + ".x", "+" + key, "a." * 3000))
        written: Any = values.value(numbers)
        text = written if isinstance(written, str) else yaml.safe_dump(written, default_flow_style=True).split("\n")[0]
        return numbers.choice((f"{key}={text}", f"{key}={text}", f"{key}={text}", f"{key} {text}", f"{key}=", text))

    def _load(self, text: str, overrides: list[str], plans: bool) -> None:
        self.file.write_bytes(text.encode("utf-8", errors="surrogateescape"))
        placed = command.load(str(self.file), overrides)
        placed.loaded.resolved_yaml()
        if plans:
            plan("text", placed)
