"""Shares of keys that `rl-platform convert` carries over from the public examples of other systems. No speed.

Each key of a file, with its merged defaults, counts once: translated, the same here, passed on to code of the user, or
not translated. Strictly, an evaluation key that repeats a training key shares the outcome of that key. The folders are
checkouts of the repositories; nothing in them is run. With `--plan` every result that passes the schema is planned too.
`--reasons` lists why keys are not carried over. Not covered: keys that the files leave out.

    python benchmarks/conversions.py [--rlinf DIR] [--verl DIR] [--nemo-rl DIR] [--zoo DIR] [--plan] [--reasons]
        [--json FILE]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import yaml
from _common import write_json

from rl_platform.errors import ConfigError
from rl_platform.launch.tools.convert.conversion import Conversion, convert
from rl_platform.launch.tools.convert.converted_file import problems_of
from rl_platform.launch.tools.convert.converted_yaml import as_yaml
from rl_platform.launch.tools.convert.reading import read

SYSTEMS = ("rlinf", "verl", "nemo-rl", "zoo")
COLUMNS = ("files", "keys", "translated", "same", "passed", "untranslated", "repeated", "load", "plan")
LOSSES = ("actor", "actor_critic", "decoupled_actor_critic")  # RLinf's PPO and GRPO; others are SAC, imitation ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for system in SYSTEMS:
        parser.add_argument(f"--{system}", type=Path, metavar="DIR", help="a checkout of its repository")
    parser.add_argument("--plan", action="store_true", help="run platform-launch --plan on each result")
    parser.add_argument("--reasons", action="store_true", help="list why keys are not carried over")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    for system in SYSTEMS:
        if folder := vars(options)[system.replace("-", "_")]:
            for group, path, done in conversions(system, folder):
                add(counts.setdefault(group, Counter()), path, done, plan=options.plan)
                reasons.setdefault(group, Counter()).update(lost(done))
    print(f"{'examples':38}" + "".join(f"{name:>13}" for name in (*COLUMNS, "carried %", "strictly %")))
    for group, count in counts.items():
        carried = count["translated"] + count["same"]
        shares = (f"{100 * each / count['keys']:13.1f}" for each in (carried, carried - count["repeated"]))
        print(f"{group:38}" + "".join(f"{count[name]:13,}" for name in COLUMNS) + "".join(shares))
        for reason, number in reasons[group].most_common() if options.reasons else ():
            print(f"    {number:6,}  {reason}")
    write_json(options.json, {"options": vars(options), "counts": counts, "reasons": reasons})


def conversions(system: str, folder: Path) -> Iterator[tuple[str, Path, Conversion]]:
    """The group, the file and the conversion of each example of a system."""
    if system == "zoo":
        path = folder / "hyperparams" / "ppo.yml"
        for name in yaml.safe_load(path.read_text(encoding="utf-8")):
            yield "zoo, PPO", path, converted(path, "sb3", name)
    elif system == "rlinf":
        for path in sorted((folder / "examples/reasoning/config/math").glob("*.yaml")):
            yield "RLinf, mathematics", path, converted(path, system)
        for path in sorted((folder / "examples/embodiment/config").glob("*.yaml")):
            tree = yaml.safe_load(path.read_text(encoding="utf-8"))
            if tree.get("algorithm", {}).get("loss_type") in LOSSES:
                done = converted(path, system)
                kind = next((row.value for row in done.rows if row.key == "actor.model.model_type"), None)
                small = kind in ("mlp_policy", "cnn_policy")
                yield f"RLinf, embodied, {'MLP or CNN' if small else 'vision-language-action'}", path, done
    else:
        patterns = {
            "verl": {"verl, PPO": "ppo_trainer/*.sh", "verl, GRPO": "grpo_trainer/*.sh"},
            "nemo-rl": {
                "NeMo-RL, PPO": "configs/ppo*.yaml",
                "NeMo-RL, recipes of PPO": "configs/recipes/llm/ppo*.yaml",
                "NeMo-RL, GRPO for mathematics": "configs/grpo_math*.yaml",
            },
        }[system]
        for group, pattern in patterns.items():
            for path in sorted((folder / "examples").glob(pattern)):
                try:
                    yield group, path, converted(path, system)
                except ConfigError as error:  # a script without a training command
                    print(f"not counted: {path.name}: {error.problems[0].message}", file=sys.stderr)


def converted(path: Path, name: str, env: str | None = None) -> Conversion:
    foreign = read(path, name, env)
    return convert(foreign.system, foreign.keys)


def add(count: Counter[str], path: Path, done: Conversion, *, plan: bool) -> None:
    """Adds the numbers of one file; prints why it does not load or plan."""
    of_status = Counter(row.outcome.status for row in done.rows if row.given)
    missing = {row.key for row in done.rows if row.given and row.outcome.status in ("passed", "untranslated")}
    text = as_yaml(done, path)
    problems = [str(each) for each in problems_of(text)]
    count.update(of_status)
    count["repeated"] += sum(row.outcome.why == "as in training" and twin(row.key) in missing for row in done.rows)
    count.update(files=1, keys=of_status.total(), load=not problems)
    if plan and not problems:
        problems = planned(text)
        count["plan"] += not problems
    for problem in problems:
        print(f"{path.name}: {problem}", file=sys.stderr)


def twin(key: str) -> str:
    return key.replace("env.eval.", "env.train.", 1)


def planned(text: str) -> list[str]:
    """Why `--plan` refuses a config, without a network."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        command = [str(Path(sys.executable).with_name("platform-launch")), "--plan", str(file)]
        ended = subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}, check=False
        )
    return [ended.stderr] if ended.returncode else []


def lost(done: Conversion) -> Iterator[str]:
    """The reason of each key that is not carried over."""
    for row in done.rows:
        if row.given and row.outcome.status == "untranslated":
            yield row.outcome.why
        elif row.given and row.outcome.status == "passed":
            yield "an argument of code of the user"


if __name__ == "__main__":
    main()
