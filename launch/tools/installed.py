"""Lists what is installed: the packages that the platform requires, and the parts of it that need something more."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.util import find_spec
from typing import Literal

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rl_platform.envs.embodied.pictures.drawing import CannotDraw, with_drawing
from rl_platform.errors import WorkerError
from rl_platform.launch.tools import simulators
from rl_platform.runtime.child import Child, Death

NAME = "rl-platform"
State = Literal["ok", "note", "missing", "problem"]
EXTRAS = {  # purpose of each extra
    "sglang": "rollout.backend: sglang",
    "modelscope": "models named modelscope:ORG/NAME",
    "lora": "adapters: actor.lora, critic.lora",
    "warp": "env.backend: mujoco_warp, MuJoCo on the GPU",
    "onnx": "rl-platform export --format onnx",
    "rerun": "rl-platform rrd: episodes for the viewer of Rerun",
    "wandb": "runner.logger_backends: [wandb]",
    "trackio": "runner.logger_backends: [trackio]",
    "data": "questions in Parquet files and Hugging Face datasets",
    "demonstrations": "runner.warm_start: demonstrations in HDF5 and Parquet files",
    "plot": "pictures: rl-platform plot, timeline, sweep",
    "textarena": "rollout.agent.environment: {type: textarena}",
    "openenv": "rollout.agent.environment: {type: openenv}",
    "verifiers": "rollout.agent.environment: {type: verifiers}",
    "optuna": "rl-platform sweep --optuna",
}
_DRAW = "import mujoco\nmujoco.GLContext(8, 8).make_current()"
_VULKAN = """
import ctypes, sys
vulkan = ctypes.CDLL("libvulkan.so.1")
instance, devices = ctypes.c_void_p(), ctypes.c_uint32()
options = (ctypes.c_uint64 * 8)(1)  # VkInstanceCreateInfo without layers and extensions
if code := vulkan.vkCreateInstance(options, None, ctypes.byref(instance)):
    sys.exit(f"no driver can be used (error {code})")
vulkan.vkEnumeratePhysicalDevices(instance, ctypes.byref(devices), None)
if not devices.value:
    sys.exit("no device")
"""
DRAW_S = 10.0


@dataclass(frozen=True)
class Row:
    """A finding. state: ok, note (worth knowing), missing (an optional part), problem. fix: what to do. value: the
    number behind the text, bytes or a count."""

    name: str
    text: str
    state: State = "ok"
    fix: str = ""
    value: float | None = None


def packages() -> Iterator[Row]:
    """Yields the packages that every installation needs, and conflicts between what they require."""
    if not (needed := _requirements(NAME)):
        yield Row(NAME, "is not installed as a package, so its requirements are unknown", "problem", "pip install -e .")
        return
    fine = []
    for requirement in needed:
        problem = _problem(requirement)
        if problem:
            yield Row(requirement.name, problem, "problem", f"pip install '{requirement}'")
        else:
            fine.append(f"{requirement.name} {version(requirement.name)}")
    yield Row("installed", ", ".join(fine))
    conflicts = list(_conflicts(needed))
    for name, text, fix in conflicts:
        yield Row(name, text, "problem", fix)
    if not conflicts:
        yield Row("conflicts", "none between these packages and what they require")


def features() -> Iterator[Row]:
    """Yields the optional parts, with the line that installs what is missing."""
    for extra, purpose in EXTRAS.items():
        yield _extra(extra, purpose)
    yield _vllm()
    yield _megatron()
    yield _sandbox()
    yield _video()
    yield _drawing()
    yield _vulkan()
    yield from _simulators()


def _extra(extra: str, purpose: str) -> Row:
    needed = [each for each in _requirements(NAME, extra) if each.marker and "extra" in str(each.marker)]
    if not needed:
        text = "the installed package is older than this extra"
        return Row(
            extra, f"{text}; for {purpose}", "missing", f"install {NAME} again, for example with pip install -e ."
        )
    if problems := [problem for each in needed if (problem := _problem(each))]:
        return Row(extra, f"{'; '.join(problems)}; for {purpose}", "missing", f"pip install '{NAME}[{extra}]'")
    versions = ", ".join(f"{each.name} {version(each.name)}" for each in needed)
    return Row(extra, f"{versions}; for {purpose}")


def _vllm() -> Row:
    purpose = "for rollout.backend: vllm"
    try:
        from rl_platform.engines.rollout.vllm.installation import VERSION, installation_problem
    except ModuleNotFoundError:
        return Row("vllm", f"left out of this installation; {purpose}", "missing")
    if (problem := installation_problem(None)) is None:
        return Row("vllm", f"vllm {VERSION}; {purpose}")
    text = f"{problem.value}: {problem.message}; {purpose}"
    return Row("vllm", text, "missing", problem.hint)


def _megatron() -> Row:
    purpose = "for training_backend: megatron"
    if find_spec("rl_platform.engines.training.megatron") is None:
        return Row("megatron", f"left out of this installation; {purpose}", "missing")
    needed = [each for each in _requirements(NAME) if each.name == "megatron-core"]
    if problems := [problem for each in needed if (problem := _problem(each))]:
        return Row("megatron", f"{problems[0]}; {purpose}", "missing", f"pip install '{needed[0]}'")
    fused = "with" if find_spec("transformer_engine") else "without"
    return Row("megatron", f"megatron-core {version('megatron-core')}, {fused} Transformer Engine; {purpose}")


def _sandbox() -> Row:
    """Starts a sandbox: whether bubblewrap may make namespaces is known only then."""
    name, purpose = "code sandbox", "for reward.type: code"
    try:
        from rl_platform.envs.reasoning.sandbox.isolation import missing_layers
        from rl_platform.envs.reasoning.sandbox.process import Limits, Sandbox
    except ModuleNotFoundError:
        return Row(name, f"left out of this installation; {purpose}", "missing")
    if missing := missing_layers():
        return Row(name, f"{'; '.join(missing)}; {purpose}", "missing", "docs/sandbox.md")
    try:
        Sandbox("pass", Limits(1.0, 2**28), isolated=True).close()
    except (WorkerError, OSError) as error:
        fix = "docs/sandbox.md: what the kernel or the container must allow"
        return Row(name, f"{' '.join(str(error).split())}; {purpose}", "missing", fix)
    return Row(name, f"namespaces, Landlock and seccomp work; {purpose}")


def _video() -> Row:
    purpose = "for env.evaluation.video"
    try:
        import imageio_ffmpeg

        program = imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError) as error:
        return Row("video", f"{error}; {purpose}", "missing", "pip install 'imageio[ffmpeg]'")
    return Row("video", f"{os.path.basename(program)}; {purpose}")


def _drawing() -> Row:
    """Draws in a child process for each graphics library: a missing driver may crash it."""
    name, purpose = "MuJoCo drawing", "for videos and pixels"
    try:
        drawing = with_drawing(True, partial(_runs, _DRAW))
    except CannotDraw as error:
        fix = "apt install libegl1 libgl1-mesa-dri, or libosmesa6; MUJOCO_GL selects one"
        return Row(name, f"{error}; {purpose}", "missing", fix)
    return Row(name, f"MUJOCO_GL={drawing['MUJOCO_GL']}; {purpose}")


def _vulkan() -> Row:
    """Returns the row of Vulkan. A child process looks for a device, because a driver may crash."""
    name, purpose = "Vulkan", "for ManiSkill"
    try:
        _runs(_VULKAN, {})
    except RuntimeError as error:
        fix = "apt install libvulkan1 mesa-vulkan-drivers (Mesa 25 if there is no GPU): docs/maniskill.md"
        return Row(name, f"{error}; {purpose}", "missing", fix)
    return Row(name, f"has a device; {purpose}")


def _simulators() -> Iterator[Row]:
    """Yields a row for each environment of `rl-platform environment`."""
    for name in simulators.names():
        purpose = f"for env.python: {name}"
        if simulators.is_made(name):
            yield Row(name, f"{', '.join(simulators.packages(name))}; {purpose}")
        else:
            text = f"simulators of this version are not installed; {purpose}"
            yield Row(name, text, "missing", f"rl-platform environment {name}")


def _runs(code: str, variables: dict[str, str]) -> dict[str, str]:
    """Returns `variables` if a process runs the code with them. Raises RuntimeError with its last line of output."""
    with tempfile.TemporaryFile() as output:
        child = Child(code, Death.GUARD, environment=variables, output=output)
        try:
            reason = child.exit_reason(DRAW_S)
        finally:
            child.kill()
        if reason == "exit code 0":
            return variables
        output.seek(0)
        lines = output.read().decode(errors="replace").strip().splitlines()
        raise RuntimeError(lines[-1] if lines else reason)


def _requirements(name: str, extra: str = "") -> list[Requirement]:
    """Returns the requirements that apply here; none of a package that is not installed."""
    try:
        parsed = [Requirement(text) for text in requires(name) or ()]
    except PackageNotFoundError:
        return []
    return [each for each in parsed if each.marker is None or each.marker.evaluate({"extra": extra})]


def _problem(requirement: Requirement) -> str:
    """Returns what is wrong with an installed package, nothing if it fulfils the requirement."""
    try:
        installed = version(requirement.name)
    except PackageNotFoundError:
        return f"{requirement.name} is not installed"
    if requirement.specifier.contains(installed, prereleases=True):
        return ""
    return f"{requirement.name} {installed} is installed, {requirement.specifier} is needed"


def _conflicts(needed: list[Requirement]) -> Iterator[tuple[str, str, str]]:
    """Yields (package, conflict, fix) for what packages below `needed` require of each other."""
    waiting, seen = [(each.name, each.extras) for each in needed], set[str]()
    while waiting:
        name, extras = waiting.pop()
        if (key := canonicalize_name(name)) in seen:
            continue
        seen.add(key)
        requirements = {str(each): each for extra in ("", *extras) for each in _requirements(name, extra)}
        for each in requirements.values():
            if problem := _problem(each):
                yield (
                    name,
                    f"needs {each.name}{each.specifier}: {problem}",
                    f"pip install '{each.name}{each.specifier}'",
                )
            waiting.append((each.name, each.extras))
