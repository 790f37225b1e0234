"""The table of recipes in docs/recipes.md: plan, rehearsal and acceptance of each.

    python benchmarks/recipes.py                          # writes the table into docs/recipes.md
    python benchmarks/recipes.py --record qwen2_7b_8gpu   # checks and rehearses first; without a name all of them

The plan is computed when the table is written. The CPU seconds of `--rehearse` are stored in recipes.json beside this
script, if `--check` passes too. Not covered: runs on GPUs.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from acceptance import ACCEPTANCE

from rl_platform.launch.placed_config import load
from rl_platform.placement.estimates.hardware import GIB
from rl_platform.planner.report import Report, plan_report
from rl_platform.planner.step_timeline import duration

ROOT = Path(__file__).parents[1]
CONFIGS, PAGE, RECORDS = ROOT / "configs", ROOT / "docs" / "recipes.md", Path(__file__).with_name("recipes.json")
BEGIN, END = "<!-- recipes -->", "<!-- /recipes -->"
COMMAND = [sys.executable, "-c", "from rl_platform.launch.cli import main; main()"]
HEAD = (
    "| recipe | what it is | values from | GPUs | GiB of a GPU | step | rehearsal, CPU seconds | acceptance |",
    "|---|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True)
class Recipe:
    """A config and the header that says what it is, and where its values come from."""

    path: Path
    what: str
    source: str

    @classmethod
    def of(cls, path: Path) -> Recipe:
        header = []
        for line in path.read_text(encoding="utf-8").splitlines():
            if not line.startswith("#"):
                break
            header.append(line.removeprefix("#").strip())
        text, _, source = " ".join(header).partition(" Values: ")
        return cls(path, re.split(r"(?<=[a-z0-9)])\. ", text)[0].rstrip("."), source.split(". ")[0].rstrip("."))

    @property
    def name(self) -> str:
        return self.path.stem


def recipes() -> list[Recipe]:
    files = [*sorted(CONFIGS.glob("reasoning/recipes/*.yaml")), *sorted(CONFIGS.glob("embodied/recipes/*.yaml"))]
    return [Recipe.of(path) for path in files]


def report_of(recipe: Recipe) -> Report:
    loaded, placement, inventory = load(str(recipe.path), [])
    return plan_report(loaded.config, placement, inventory)


def row(recipe: Recipe, records: dict[str, dict[str, str]]) -> str:
    report, record = report_of(recipe), records.get(recipe.name, {})
    on_gpus = [use for use in report.devices if use.number is not None and use.ranks]
    memory = "-"
    if on_gpus:
        memory = f"{max(use.usage.peak for use in on_gpus) / GIB:.0f}"
    limits = ACCEPTANCE.get(report.config.runner.experiment_name, ())
    cells = [
        f"[{recipe.name}](../{recipe.path.relative_to(ROOT)})",
        recipe.what,
        recipe.source or "-",
        f"{len(on_gpus)} {report.device.kind}" if on_gpus else "none",
        memory,
        duration(report.seconds) if on_gpus else "-",  # without GPUs it depends on the processor of this machine
        record.get("rehearsal", "-"),
        ", ".join(map(str, limits)),
    ]
    return f"| {' | '.join(cells)} |"


def table() -> str:
    records = json.loads(RECORDS.read_text(encoding="utf-8"))
    return "\n".join([*HEAD, *(row(recipe, records) for recipe in recipes())])


def written(page: str) -> str:
    """Returns the page with the table as it is now."""
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}\n{END}{rest.partition(END)[2]}"


def record(recipe: Recipe) -> dict[str, str]:
    """Checks and rehearses a recipe. Raises CalledProcessError if either fails."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        for option in ("--check", "--rehearse"):
            command = [*COMMAND, option, str(recipe.path), f"runner.output_dir={folder}/run"]
            subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, check=True)
        report = json.loads(Path(folder, "run-rehearsal.json").read_text(encoding="utf-8"))
    return {"rehearsal": f"{report['cpu_seconds']:.0f}"}


def main(words: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", nargs="*", metavar="NAME", help="check and rehearse these, or all")
    options = parser.parse_args(words)
    if options.record is not None:
        for recipe in recipes():
            if not options.record or recipe.name in options.record:
                records = json.loads(RECORDS.read_text(encoding="utf-8"))
                records[recipe.name] = record(recipe)
                RECORDS.write_text(json.dumps(records, indent=2, sort_keys=True) + "\n", encoding="utf-8")
                print(recipe.name, records[recipe.name], flush=True)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
