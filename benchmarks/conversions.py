"""Shares of keys that `rl-platform convert` carries over from the public examples of other systems. No speed.

Each key of a file, with its merged defaults, counts once: translated, the same here, passed on to code of the user, or
not translated. Strictly, an evaluation key that repeats a training key shares the outcome of that key. The folders are
checkouts of the repositories; nothing in them is run. Environment variables that a result asks for are set.

With `--plan` every result that passes the schema is planned too. With `--rehearse FOLDER` one result of each shape is
rehearsed: the same components, training engines, losses, reward and model family, and of these the one with most kinds
of parallelism. FOLDER keeps the outcomes, so a second call goes on where the first ended; `--minutes` limits a call.
`--reasons` lists why keys are not carried over. Not covered: keys that the files leave out.

    python benchmarks/conversions.py [--rlinf DIR] [--verl DIR] [--nemo-rl DIR] [--zoo DIR] [--plan] [--reasons]
        [--rehearse FOLDER] [--minutes N] [--json FILE]
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePath

import yaml
from _common import write_json

import rl_platform as rl
from rl_platform.config import load_config
from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, PlatformError
from rl_platform.launch.tools.convert.conversion import Conversion, TranslatedKey, convert
from rl_platform.launch.tools.convert.converted_yaml import as_yaml
from rl_platform.launch.tools.convert.reading import read
from rl_platform.placement.estimates.architectures import family_of

SYSTEMS = ("rlinf", "verl", "nemo-rl", "zoo")
COLUMNS = ("files", "keys", "translated", "same", "passed", "untranslated", "repeated", "load", "plan")
LOSSES = ("actor", "actor_critic", "decoupled_actor_critic")  # RLinf's PPO and GRPO; others are SAC, imitation ...
ASKED = {  # environment variables that a file does not set, and what kind of value it needs
    "LLM": "moonshotai/Moonlight-16B-A3B-Instruct",
    **{name: f"{name}.parquet" for name in ("gsm8k_train_path", "gsm8k_test_path", "aime24_test_path")},
}
LONGEST_S = 600.0  # of a rehearsal


@dataclass(frozen=True)
class Example:
    """A converted file. problem: why its result does not load; config: the result if it does."""

    group: str
    path: Path
    done: Conversion
    text: str
    config: Config | None
    problem: str

    @property
    def rows(self) -> list[TranslatedKey]:
        return [row for row in self.done.rows if row.given]

    def counts(self) -> Counter[str]:
        missing = {row.key for row in self.rows if row.outcome.status in ("passed", "untranslated")}
        of_status = Counter(row.outcome.status for row in self.rows)
        repeated = sum(row.outcome.why == "as in training" and twin(row.key) in missing for row in self.rows)
        return of_status + Counter(files=1, keys=len(self.rows), repeated=repeated, load=int(self.config is not None))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for system in SYSTEMS:
        parser.add_argument(f"--{system}", type=Path, metavar="DIR", help="a checkout of its repository")
    parser.add_argument("--plan", action="store_true", help="plan each result")
    parser.add_argument(
        "--rehearse", type=Path, metavar="FOLDER", help="rehearse a result of each shape; keep outcomes"
    )
    parser.add_argument("--minutes", type=float, default=float("inf"), help="start no rehearsal after this time")
    parser.add_argument("--reasons", action="store_true", help="list why keys are not carried over")
    parser.add_argument("--json", type=Path, help="write the numbers here too")
    options = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    reasons: dict[str, Counter[str]] = {}
    planned: dict[Path, str] = {}
    examples = list(all_examples(vars(options)))
    for example in examples:
        count = counts.setdefault(example.group, Counter())
        count.update(example.counts())
        reasons.setdefault(example.group, Counter()).update(lost(example))
        if example.config is not None and (options.plan or options.rehearse):
            planned[example.path] = plan_problem(example)
            count["plan"] += not planned[example.path]
        if problem := example.problem or planned.get(example.path):
            print(f"{example.path.name}: {problem}", file=sys.stderr)
    print(f"{'examples':38}" + "".join(f"{name:>13}" for name in (*COLUMNS, "carried %", "strictly %")))
    for group, count in counts.items():
        carried = count["translated"] + count["same"]
        shares = (f"{100 * each / count['keys']:13.1f}" for each in (carried, carried - count["repeated"]))
        print(f"{group:38}" + "".join(f"{count[name]:13,}" for name in COLUMNS) + "".join(shares))
        for reason, number in reasons[group].most_common() if options.reasons else ():
            print(f"    {number:6,}  {reason}")
    rehearsed: list[dict[str, object]] = []
    if options.rehearse:
        plannable = [each for each in examples if planned.get(each.path) == ""]
        rehearsed = list(rehearse(plannable, options.rehearse, options.minutes))
    write_json(options.json, {"options": vars(options), "counts": counts, "reasons": reasons, "rehearsed": rehearsed})


def all_examples(options: dict[str, Path | None]) -> Iterator[Example]:
    for system in SYSTEMS:
        if folder := options[system.replace("-", "_")]:
            for group, path, done in conversions(system, folder):
                text = as_yaml(done, path)
                for name in re.findall(r"\$\{env:(\w+)\}", text):
                    os.environ.setdefault(name, ASKED.get(name, f"example/{name}"))
                with config_file(text, done) as file:
                    try:
                        config, problem = load_config(file).config, ""
                    except ConfigError as error:
                        config, problem = None, str(error).replace(str(file), "line")
                yield Example(group, path, done, text, config, problem)


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


@contextmanager
def config_file(text: str, done: Conversion) -> Iterator[Path]:
    """A file with a result, beside its stand-ins."""
    with tempfile.TemporaryDirectory() as folder:
        for name, (_, code) in done.stand_ins.items():
            (Path(folder) / name).write_text(code, encoding="utf-8")
        file = Path(folder) / "config.yaml"
        file.write_text(text, encoding="utf-8")
        yield file


def twin(key: str) -> str:
    return key.replace("env.eval.", "env.train.", 1)


def plan_problem(example: Example) -> str:
    """Why the plan of a result is refused; empty if it is not."""
    with config_file(example.text, example.done) as file:
        try:
            rl.plan(file)
        except PlatformError as error:
            return str(error).replace(str(file), "line")
    return ""


def lost(example: Example) -> Iterator[str]:
    """The reason of each key that is not carried over."""
    for row in example.rows:
        if row.outcome.status == "untranslated":
            yield row.outcome.why
        elif row.outcome.status == "passed":
            yield "an argument of code of the user"


def shape(config: Config) -> tuple[str, int]:
    """What decides which code a rehearsal runs, and the number of further features of the config.

    Generation engines are left out: without a GPU torch replaces them. So are the names of stand-ins.
    """
    algorithm, features = config.algorithm, 0
    places = sorted(",".join(sorted(names.split(","))) for names in config.cluster.component_placement)
    parts = [algorithm.adv_type, algorithm.policy_loss, *places]
    for role in ("actor", "critic") if config.critic.use_critic_model else ("actor",):
        section = config.section(role)
        split = [name for name, size in section.parallel if size not in (1, False)]
        features += len(split)
        parts.append(f"{role} {section.training_backend}{' split' if split else ''}{' lora' if section.lora else ''}")
    features += sum(map(bool, (config.actor.max_tokens_per_micro_batch, config.data.sources, algorithm.rollout_is)))
    parts += ["KL in the reward"] * algorithm.use_kl_in_reward + ["KL in the loss"] * algorithm.use_kl_loss
    parts += ["stale"] * bool(config.runner.max_staleness)
    if config.runner.task_type == "embodied":
        names = (config.actor.model.type, config.env.name)
        kinds = ["a stand-in" if ".py:" in name else name for name in names]
        return ", ".join([*parts, *kinds]), features + (config.actor.model.num_action_chunks > 1)
    path = config.actor.model.path or "random"
    family = family_of(path)
    kind = family.options["model_type"] if family else PurePath(path).name
    return ", ".join([*parts, f"reward {config.reward.type}", str(kind)]), features


def rehearse(examples: list[Example], folder: Path, minutes: float) -> Iterator[dict[str, object]]:
    """Rehearses a result of each shape, the one with the most features, unless `folder` has its outcome.

    Prints a row for each.
    """
    folder.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * minutes
    alike: dict[str, list[tuple[int, Example]]] = {}
    for example in examples:
        assert example.config is not None
        name, features = shape(example.config)
        alike.setdefault(name, []).append((features, example))
    print(f"\n{'file':62}{'alike':>6}{'keys':>6}{'plans':>6}{'seconds':>9}{'CPU':>6}  rehearses")
    for name, group in sorted(alike.items(), key=lambda each: (" split" in each[0], -len(each[1]))):
        first = max(group, key=lambda each: each[0])[1]
        others = [example for _, example in group if example is not first]
        kept = folder / f"{first.group}, {first.path.stem}.json"
        row = json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else {}
        if row.get("text") != first.text:
            if time.monotonic() > end:
                print(f"{first.path.name:62}{len(others):6}{len(first.rows):6}{'yes':>6}  not yet: {name}")
                continue
            row = {"text": first.text, **rehearsed(first)}
            kept.write_text(json.dumps(row), encoding="utf-8")
        outcome = "yes" if row["ok"] else str(row["output"]).strip()[-300:]
        numbers = f"{row['seconds']:9.0f}{row['cpu_seconds']:6.0f}"
        print(f"{first.path.name:62}{len(others):6}{len(first.rows):6}{'yes':>6}{numbers}  {outcome}", flush=True)
        yield {"file": first.path.name, "shape": name, "alike": [each.path.name for each in others], **row}


def rehearsed(example: Example) -> dict[str, object]:
    """Whether a result rehearses, its wall time, the CPU time of its processes, and the end of what it printed."""
    with config_file(example.text, example.done) as file:
        command = [str(Path(sys.executable).with_name("platform-launch")), "--rehearse", str(file)]
        limits = {"cwd": file.parent, "timeout": LONGEST_S}
        began = time.monotonic()
        try:
            ended = subprocess.run(command, **limits, capture_output=True, text=True, check=False)
            ok, output = ended.returncode == 0, ended.stdout + ended.stderr
        except subprocess.TimeoutExpired:
            ok, output = False, f"not ended after {LONGEST_S:.0f} s"
    cpu = re.search(r"(\d+) CPU seconds", " ".join(output.split()))
    seconds = time.monotonic() - began
    return {"ok": ok, "seconds": seconds, "cpu_seconds": float(cpu[1]) if cpu else 0.0, "output": output[-3000:]}


if __name__ == "__main__":
    os.environ["HF_HUB_OFFLINE"] = "1"
    main()
