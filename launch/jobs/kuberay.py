"""`platform-launch --kuberay`: a RayJob manifest that runs the config on Kubernetes with the KubeRay operator.

The manifest is plain YAML that users may read and edit. The image must hold this package, Ray of the same version and
the files of the config below its `FOLDER`: the Containerfile of the repository builds such an image.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import yaml

from rl_platform.config.schema import Config
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.jobs.job_file import write_job

if TYPE_CHECKING:
    from rl_platform.launch.command import Arguments

FOLDER = "/workspace"  # of the image: configs and data of relative paths
RUNS = "/runs"  # the volume that all pods share, and that outlives them
RETRIES = 3  # each makes a new cluster, which resumes from the newest checkpoint in RUNS
_NAME_LENGTH = 47  # KubeRay appends to the name of a job, and Kubernetes allows 63 characters
_PART = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_IMAGE = re.compile(
    rf"(?:{_PART}:\d+/)?{_PART}(?:/{_PART})*(?::\w[\w.-]{{0,127}})?(?:@sha256:[0-9a-f]{{64}})?", re.ASCII
)
_CLAIM = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?")
_LIMIT = re.compile(r"[a-z0-9][\w./-]*=[0-9]+(\.[0-9]+)?(m|k|[KMGTP]i?)?")


def write(arguments: Arguments, config: Config) -> str:
    """Writes the manifest into the working folder, named after the run; returns the line that says how to submit it.

    Raises ConfigError for options that Kubernetes would refuse.
    """
    name = _job_name(config)
    path = write_job(Path(f"{name}.rayjob.yaml"), _manifest(arguments, config, name))
    return f"{path}: submit it with kubectl create -f {path}"


def _manifest(arguments: Arguments, config: Config, name: str) -> str:
    """Returns the RayJob with one pod per node; the head is the first node."""
    image, claim = arguments.image or "", "runs" if arguments.claim is None else arguments.claim
    _check(image, claim, arguments.limit or [])
    cluster = config.cluster
    words = ["platform-launch", arguments.config, *arguments.overrides, "cluster.address=auto"]
    if not any(word.partition("=")[0] == "runner.output_dir" for word in arguments.overrides):
        words.append(f"runner.output_dir={RUNS}/{name}")
    gpus = {"nvidia.com/gpu": str(cluster.gpus_per_node)} if cluster.gpus_per_node else {}
    limits = gpus | dict(limit.split("=") for limit in arguments.limit or [])

    nodes: dict[str, object] = {
        "rayVersion": version("ray"),
        "authOptions": {"mode": "token"},  # joining the cluster and submitting to it need its token
        "headGroupSpec": {"rayStartParams": {}, "template": _pod("ray-head", limits, image, claim)},
    }
    if (workers := cluster.num_nodes - 1) > 0:
        count = {"replicas": workers, "minReplicas": workers, "maxReplicas": workers}
        pod = _pod("ray-worker", limits, image, claim)
        nodes["workerGroupSpecs"] = [{"groupName": "workers", **count, "rayStartParams": {}, "template": pod}]
    job = {
        "apiVersion": "ray.io/v1",
        "kind": "RayJob",
        "metadata": {"name": name},
        "spec": {
            "entrypoint": f"cd {FOLDER} && exec {shlex.join(words)}",
            "backoffLimit": RETRIES,
            "shutdownAfterJobFinishes": True,
            "rayClusterSpec": nodes,
        },
    }
    head = "# The run on KubeRay. Written by platform-launch --kuberay; submit it with kubectl create -f.\n"
    return head + yaml.safe_dump(job, sort_keys=False, width=120)


def _pod(container: str, limits: dict[str, str], image: str, claim: str) -> dict[str, object]:
    environment = {"RAY_worker_niceness": "0", "MALLOC_ARENA_MAX": "1"}  # as where a run starts Ray itself
    return {
        "spec": {
            "containers": [
                {
                    "name": container,
                    "image": image,
                    "env": [{"name": key, "value": value} for key, value in environment.items()],
                    "resources": {"limits": dict(limits)},
                    "volumeMounts": [{"name": "runs", "mountPath": RUNS}, {"name": "shm", "mountPath": "/dev/shm"}],
                }
            ],
            "volumes": [
                {"name": "runs", "persistentVolumeClaim": {"claimName": claim}},
                {"name": "shm", "emptyDir": {"medium": "Memory"}},  # Ray's object store; 64 MB without it
            ],
        }
    }


def _job_name(config: Config) -> str:
    """Returns the experiment's name as a DNS label: lower case letters, digits and dashes, a letter first."""
    label = re.sub(r"[^a-z0-9]+", "-", config.runner.experiment_name.lower()).strip("-")
    label = label if label[:1].isalpha() else f"run-{label}".rstrip("-")
    return label[:_NAME_LENGTH].rstrip("-")


def _check(image: str, claim: str, limits: Sequence[str]) -> None:
    problems = []
    if not _IMAGE.fullmatch(image):
        allowed = "the name of a container image in lower case, with a tag: NAME:TAG or ADDRESS/NAME:TAG"
        message = "not an image"
        problems.append(Problem("--image", message, value=image, allowed=allowed, hint=_image_hint(image)))
    if not _CLAIM.fullmatch(claim):
        allowed = "lower case letters, digits, dots and dashes"
        problems.append(Problem("--claim", "not the name of a claim", value=claim, allowed=allowed))
    problems += [
        Problem(
            "--limit",
            "not a resource of Kubernetes with its quantity",
            value=limit,
            allowed="NAME=QUANTITY",
            hint="as cpu=64, memory=512Gi or amd.com/gpu=8",
        )
        for limit in limits
        if not _LIMIT.fullmatch(limit)
    ]
    if problems:
        raise ConfigError(problems)


def _image_hint(image: str) -> str:
    """Returns what to write instead of a name that is no image's."""
    if image.startswith("REGISTRY/"):
        return "REGISTRY stands for the address of your registry, as ghcr.io/me"
    name, colon, tag = image.partition("://")[2].rpartition(":") if "://" in image else image.rpartition(":")
    lower = f"{name.lower()}{colon}{tag}" if colon else tag.lower()
    return f"did you mean {lower}?" if _IMAGE.fullmatch(lower) else "as ghcr.io/me/rl-platform:cpu"
