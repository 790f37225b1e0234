"""`rl-platform export`: the trained model of a checkpoint as a folder that other programs load.

Checkpoints of every engine and number of ranks are read on a CPU, in this process. Language models become folders of
transformers. Embodied policies become graphs from observations of the environment to its actions, and SmolVLA a folder
of LeRobot. Not covered: critics and optimizer states.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
from torch import Tensor, nn

from rl_platform.config.schema import Config
from rl_platform.config.schema.models import FLOW_POLICIES, Model
from rl_platform.disk import no_space, replacing
from rl_platform.errors import CheckpointError, ConfigError, Problem, check_all
from rl_platform.launch.saved.loaded_policy import find_policy
from rl_platform.launch.saved.policy_folder import built, normalizer_of
from rl_platform.launch.saved.saved_run import SavedRun, find_run
from rl_platform.launch.saved.saved_weights import trained_weights, whole_weights
from rl_platform.launch.start_checks.output_check import unwritable
from rl_platform.models.build import language_model
from rl_platform.models.causal_lm import export_causal_lm, load_config
from rl_platform.models.saved_policy import DESCRIPTION, SavedPolicy
from rl_platform.models.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from rl_platform.models.vlas.flow_policy import FlowPolicy

Format = Literal["hf", "torch", "onnx", "lerobot"]
FORMATS: Mapping[str, tuple[Format, ...]] = {  # the default first
    "reasoning": ("hf",),
    "embodied": ("torch", "onnx", "lerobot"),
}
FILES = (".onnx", ".pt", ".pt2", ".pth", ".safetensors", ".zip")  # endings that no folder of an export should have
COMMAND = "rl-platform export"

Usage = tuple[str, str]
"""The call that loads an export, with `{}` for the path, and the file in the folder; "": the folder itself."""


def export(name: str, step: int | None, format: Format | None, output: Path | None) -> list[str]:
    """Writes the model of a run, see `find_policy`; returns lines that say where it is and how to load it.

    format None: the first one of the task. output None: a folder in that of the run. Raises ConfigError for a missing
    run or step, a format that the model does not have, and an output folder that is not empty; DataError if the disk is
    full.
    """
    if (Path(name).expanduser() / DESCRIPTION).is_file():
        return _exported(None, name, step, format, output)
    write = partial(_exported, name=name, step=step, format=format, output=output)
    return find_run(name, COMMAND, step).read_by(write)


def _exported(
    run: SavedRun | None, name: str, step: int | None, format: Format | None, output: Path | None
) -> list[str]:
    """Returns what `export` returns. run: None if `name` is the folder of a policy without its run."""
    task = "embodied" if run is None else run.load([]).config.runner.task_type
    chosen = format or FORMATS[task][0]
    check_all(partial(_check_format, chosen, task), partial(_check_folder, output))
    if chosen == "hf":
        assert run is not None
        config = run.load([]).config
        checkpoint = run.open(config)
        step, write = checkpoint.step, partial(_write_language_model, config, checkpoint.file("actor"))
    else:
        saved = find_policy(name, COMMAND, step)
        lerobot = partial(_write_lerobot, run)
        writers: dict[Format, Callable[[SavedPolicy, Path], Usage]]
        writers = {"torch": _write_program, "onnx": _write_onnx, "lerobot": lerobot}
        step, write = saved.description.step, partial(writers[chosen], saved)
    default = (Path(name).expanduser() if run is None else run.folder) / "export" / f"{chosen}-step-{step}"
    folder = (output or default).expanduser().absolute()
    _check_folder(folder)
    try:
        with replacing(folder) as stage:
            usage, file = write(stage)
    except Exception as error:  # safetensors has a type of its own for a full disk
        if (full := no_space(error, folder)) is not None:
            raise full from error
        if isinstance(error, OSError):
            raise _problem("--output", f"cannot be written: {error.strerror or error}", str(folder)) from error
        raise
    return [str(folder), f"load it: {usage.format(repr(str(folder / file)))}"]


def _check_format(format: Format, task: str) -> None:
    """Raises ConfigError if models of this task do not have the format."""
    if format in FORMATS[task]:
        return
    held, trained = (
        ("embodied policies", "a language model") if task == "reasoning" else ("language models", "an embodied policy")
    )
    message = f"holds {held}, and this run trained {trained}"
    raise _problem("--format", message, format, ", ".join(FORMATS[task]))


def _check_folder(folder: Path | None) -> None:
    """Raises ConfigError unless the folder is missing or empty; None is a folder that is not known yet."""
    if folder is None:
        return
    folder = folder.expanduser().absolute()
    if folder.suffix in FILES and not folder.is_dir():
        message = "names a file, and an export is a folder of several files"
        raise _problem("--output", message, str(folder), f"a new or empty folder, as {folder.with_suffix('').name}")
    if reason := unwritable(folder):
        raise _problem("--output", reason, str(folder), "a new or empty folder")
    if folder.is_dir() and any(folder.iterdir()):
        raise _problem("--output", "is not empty", str(folder), "a new or empty folder")


def _problem(key: str, message: str, value: str, allowed: str = "") -> ConfigError:
    return ConfigError([Problem(key, message, value=value, allowed=allowed)])


def _write_language_model(config: Config, shards: Path, folder: Path) -> Usage:
    """Writes a Hugging Face folder with the tokenizer. shards: the actor's, in a checkpoint."""
    section, lora = config.actor.model, config.actor.lora
    tokenizer = load_tokenizer(section)
    if lora is None:
        about = load_config(section, tokenizer.vocab_size, tokenizer.eos_token_ids[0])
        weights = trained_weights(shards)
    else:
        model = language_model(config, section, config.runner.seed, lora=lora)
        about, weights = model.config, whole_weights(shards, model, lora)
    try:
        export_causal_lm(weights, about, tokenizer, folder)
    except RuntimeError as error:  # names or shapes differ
        raise CheckpointError(f"{shards} is of another model: {' '.join(str(error).split())}") from error
    return "transformers.AutoModelForCausalLM.from_pretrained({})", ""


class PolicyGraph(nn.Module):
    """The most likely actions of the environment [N,...] for its observations [N,...], both as in its spaces;
    `gymnasium.spaces.flatten` joins the parts of a Dict or Tuple.

    The normaliser, the bounds and the first choice of a discrete space are inside. A recurrent policy also takes its
    memory [N,H], which is 0 where an episode begins, and returns the next one. A policy that chooses K actions returns
    [N,K,...]. A policy with several instructions takes their indices, tasks [N] int64. A policy that denoises takes the
    standard normal numbers that it begins with, noise [N,H,A].
    """

    def __init__(self, saved: SavedPolicy) -> None:
        super().__init__()
        self.policy, self.about, normalizer = built(saved), saved.description, normalizer_of(saved)
        self.clip = None if normalizer is None else normalizer.clip
        # torch.onnx gives constants inside of functions short names, as mean, and fails if a buffer has the same one
        if normalizer is not None:
            self.observation_mean, self.observation_scale = (
                nn.Buffer(torch.from_numpy(part)) for part in normalizer.mean_and_scale
            )
        spaces = self.about.spaces
        scale = spaces.pixel_scale
        self.observation_pixel_scale = None if scale is None else nn.Buffer(torch.from_numpy(scale))
        self.action_start = nn.Buffer(torch.tensor(spaces.action_start))
        self.action_low, self.action_high = (
            nn.Buffer(torch.tensor(bound)) for bound in (spaces.action_low, spaces.action_high)
        )

    def forward(
        self,
        observation: Tensor,
        memory: Tensor | None = None,
        tasks: Tensor | None = None,
        noise: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, ...]:
        rows, spaces = observation.reshape(observation.shape[0], -1), self.about.spaces
        if self.observation_pixel_scale is not None:
            rows = rows * self.observation_pixel_scale
        if self.clip is not None:
            rows = ((rows - self.observation_mean) * self.observation_scale).clamp(-self.clip, self.clip).float()
        given = {"hidden_states": memory, "tasks": tasks, "noise": noise}
        options: dict[str, Any] = {name: tensor for name, tensor in given.items() if tensor is not None}
        chosen, _, *memories = self.policy.act(rows, **options, deterministic=True)
        actions = self.policy.executed(chosen)
        if self.about.levels.num_actions == 1 and not self.about.levels.single:
            actions = actions[:, 0]
        if spaces.action.kind == "discrete":
            actions = actions + self.action_start
        elif spaces.action.kind == "multi_discrete":
            shifted = actions + self.action_start
            actions = shifted.to(getattr(torch, spaces.action_dtype)).unflatten(-1, spaces.action_shape)
        elif spaces.action_shape:
            actions = actions.clamp(self.action_low, self.action_high).unflatten(-1, spaces.action_shape)
        else:  # one number
            actions = actions.clamp(self.action_low, self.action_high).squeeze(-1)
        return (actions, *memories) if memories else actions

    def example(self) -> dict[str, Tensor]:
        """Returns inputs for N = 2."""
        spaces, model, language = self.about.spaces, self.about.model, self.about.language
        inputs = {
            "observation": torch.zeros(2, *spaces.observation_shape, dtype=getattr(torch, spaces.observation_dtype))
        }
        if model.type == "gru":
            inputs["memory"] = torch.zeros(2, model.recurrent_size)
        if language is not None and len(language.instruction_lengths) > 1:
            inputs["tasks"] = torch.zeros(2, dtype=torch.int64)
        if model.type in FLOW_POLICIES:
            policy = cast("FlowPolicy", self.policy)
            inputs["noise"] = torch.zeros(2, policy.horizon, policy.width)
        return inputs


def _program(graph: PolicyGraph) -> torch.export.ExportedProgram:
    inputs, batch = graph.example(), torch.export.Dim("batch")
    with torch.no_grad(), _unchecked():
        return torch.export.export(
            graph.eval(), (), kwargs=inputs, dynamic_shapes={name: {0: batch} for name in inputs}
        )


def _write_program(saved: SavedPolicy, folder: Path) -> Usage:
    """Writes policy.pt2, a program of torch.export, beside the files of the policy itself."""
    saved.write(folder)
    contents = io.BytesIO()  # torch's own writer ends the process if the disk is full
    with _quiet():
        torch.export.save(_program(PolicyGraph(saved)), contents)
    (folder / "policy.pt2").write_bytes(contents.getbuffer())
    return "torch.export.load({}).module()", "policy.pt2"


def _write_onnx(saved: SavedPolicy, folder: Path) -> Usage:
    """Writes policy.onnx beside the files of the policy itself."""
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError as error:
        hint = "pip install 'rl-platform[onnx]'"
        raise ConfigError([Problem("--format", f"{error.name} is not installed", value="onnx", hint=hint)]) from error
    saved.write(folder)
    graph = PolicyGraph(saved)
    outputs = ["action", "next_memory"] if "memory" in graph.example() else ["action"]
    with _quiet():
        converted = torch.onnx.export(_program(graph), output_names=outputs, verbose=False)
        assert converted is not None
        converted.save(folder / "policy.onnx")
    return "onnxruntime.InferenceSession({})", "policy.onnx"


def _write_lerobot(run: SavedRun | None, saved: SavedPolicy, folder: Path) -> Usage:
    """Writes the LeRobot folder that a SmolVLA policy started from, with the trained weights and the steps of the run.

    LeRobot then denoises as often as the run, and executes as many actions of a chunk. Raises ConfigError if LeRobot
    would scale actions or states in another way than the run.
    """
    about = saved.description
    if about.model.type != "smolvla":
        message = (
            "LeRobot builds a policy from the name of one of its own architectures, and of those this platform trains "
            f"smolvla; actor.model.type is {about.model.type}, so LeRobot could not load the folder"
        )
        raise _problem("--format", message, "lerobot", "torch, onnx")
    if run is None:
        message = "the policy alone does not name the folder of LeRobot that it started from"
        raise _problem(COMMAND, message, "lerobot", "the folder of the run")
    model = run.load([]).config.actor.model
    if model.path is None:
        message = "actor.model.random_init has no config.json and no processors of LeRobot, which the folder would need"
        raise _problem("--format", message, "lerobot", "torch, onnx")
    if about.normalizer is not None:
        message = "the run observes normalised numbers, and LeRobot's folder holds the statistics of a data set instead"
        raise _problem("--format", message, "lerobot", "torch, onnx; or a run with env.normalize_observations: false")
    if model.unnorm_key is not None:
        message = "LeRobot selects no data set by name, so it would not scale as the run did"
        raise _problem("--format", message, "lerobot", "torch, onnx")
    from rl_platform.models.vlas.lerobot_folder import LeRobotFolder

    _refuse_other_scales(model, saved)
    network = "network."
    trained = {name.removeprefix(network): each for name, each in saved.weights.items() if name.startswith(network)}
    assert about.language is not None
    steps = model.flow.denoising_steps or about.language.config["num_inference_steps"]
    LeRobotFolder(model.path).write(trained, folder, num_steps=steps, n_action_steps=about.levels.num_actions)
    return "lerobot.policies.smolvla.modeling_smolvla.SmolVLAPolicy.from_pretrained({})", ""


def _refuse_other_scales(model: Model, saved: SavedPolicy) -> None:
    """Raises ConfigError if the policy scales actions or states in another way than the folder of LeRobot does now."""
    from rl_platform.models.vlas.build import scales

    actions, states = scales(model, saved.description.spaces)
    for part, name, scale in (("actions", "action_range", actions), ("states", "state_scale", states)):
        for end, folders in ({} if scale is None else scale.state_dict()).items():
            ours = saved.weights[f"{name}.{end}"]
            if not torch.equal(ours, folders):
                message = (
                    f"LeRobot would act differently: {end} of the range of {part} is {ours.tolist()} in the policy and "
                    f"{folders.tolist()} by the statistics in {model.path}"
                )
                raise _problem("--format", message, "lerobot", "torch, onnx")


@contextmanager
def _unchecked() -> Iterator[None]:
    """Leaves transformers' checks out of a program. They count the images of a prompt, which are fixed in a policy, and
    ONNX has no operation for them."""
    name = "TRANSFORMERS_DISABLE_TORCH_CHECK"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences torch's remarks on itself and on packages that an export does not need."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
