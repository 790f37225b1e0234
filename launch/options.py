"""The arguments and options of `platform-launch`, with their help texts."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

PlanForm = Literal["text", "json", "svg", "html", "search", "simulate", "calibrate"]

Config = Annotated[
    str,
    typer.Argument(
        help="YAML file, for example configs/reasoning/ppo.yaml; with --eval: a run's folder, one of its "
        "checkpoints, or latest (in runs/)"
    ),
]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="for example runner.max_steps=10")
]
PrintConfig = Annotated[bool, typer.Option("--print-config", help="Print the config with all defaults and stop.")]
Plan = Annotated[
    PlanForm | None,
    typer.Option(
        "--plan",
        metavar="[=json|svg|html|search|simulate|calibrate]",
        help="Print the ranks of each GPU, memory and time of a step, and stop; nothing is started. html: a page "
        "with sliders. search: better placements. simulate: goodput with failures, on up to 10,000 GPUs. calibrate: "
        "measure this machine for later plans.",
    ),
]
Calibrate = Annotated[
    str | None,
    typer.Option(
        "--calibrate",
        metavar="RUN",
        help="With --plan: use the lengths and times in this run's folder or metrics.jsonl.",
    ),
]
Write = Annotated[
    str | None,
    typer.Option("--write", metavar="FILE", help="With --plan=search: write the config with the best placement to it."),
]
Check = Annotated[
    bool, typer.Option("--check", help="Try on small random numbers that batch layout changes no result, and stop.")
]
Rehearse = Annotated[
    bool,
    typer.Option(
        "--rehearse", help="Run it for real in small, on CPU workers here: 2 steps, a kill, a resume, a report."
    ),
]
RehearseIn = Annotated[
    str | None, typer.Option("--rehearse-in", metavar="FOLDER", help="With --rehearse: for its temporary files.")
]
Evaluate = Annotated[
    bool, typer.Option("--eval", help="Evaluate a checkpoint, with the most likely and with sampled actions, and stop.")
]
Slurm = Annotated[
    bool, typer.Option("--slurm", help="Write a batch script that runs CONFIG under Ray on a Slurm cluster.")
]
Nodes = Annotated[
    int | None,
    typer.Option("--nodes", min=1, help="With --slurm or --kuberay: machines; cluster.num_nodes if not given."),
]
Sbatch = Annotated[
    list[str] | None,
    typer.Option("--sbatch", metavar="NAME=VALUE", help="With --slurm: an option of sbatch, as partition=gpu."),
]
Setup = Annotated[
    str, typer.Option("--setup", metavar="SHELL", help="With --slurm: run first, as '. .venv/bin/activate'.")
]
Submit = Annotated[bool, typer.Option("--submit", help="With --slurm: submit the script with sbatch.")]
Kuberay = Annotated[
    bool, typer.Option("--kuberay", help="Write a RayJob manifest that runs CONFIG on Kubernetes with KubeRay.")
]
Image = Annotated[
    str | None, typer.Option("--image", metavar="NAME:TAG", help="With --kuberay: the container image of the pods.")
]
Claim = Annotated[
    str | None,
    typer.Option("--claim", metavar="NAME", help="With --kuberay: the volume claim of the runs; runs if not given."),
]
Limit = Annotated[
    list[str] | None,
    typer.Option("--limit", metavar="NAME=QUANTITY", help="With --kuberay: of each pod, as memory=512Gi."),
]
