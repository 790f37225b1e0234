"""Files of a rehearsal: random models of the same architecture, their tokenizers, a few questions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from rl_platform.config.layers import put_at
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Model, Trainable
from rl_platform.config.schema.reward import RewardModel
from rl_platform.config.source import Tree
from rl_platform.envs.reasoning.sources.rows import rows_of
from rl_platform.errors import ConfigError, Problem
from rl_platform.launch.rehearse.rehearsal_sizes import Materials
from rl_platform.launch.rehearse.small_models import PLAIN, Architecture, Specials, options_of, small_options
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.pretrained.model_folder import PACKAGED, packaged_gguf
from rl_platform.placement.estimates.architectures import known_options

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

READ, QUESTIONS, VALIDATION = 200, 40, 8  # rows that are read; rows that are used
_TEMPLATE = (
    "{%- macro turn(role) -%}{{ START | replace('{role}', role) | replace('{Role}', role | title) }}{%- endmacro -%}"
    "{%- for message in messages -%}{{ turn(message['role']) }}{{ message['content'] }}{{ END }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ turn('assistant') }}{%- endif -%}"
)


def models(config: Config) -> Iterator[tuple[str, Model]]:
    """Yields the components whose section names a language model by path."""
    sections = {"actor": config.actor.model}
    if config.runner.task_type == "reasoning":
        if config.critic.use_critic_model and config.critic.model is not None:
            sections["critic"] = config.critic.model
        if config.has_reference and config.reference.model is not None:
            sections["reference"] = config.reference.model
    elif config.actor.model.type != "vla":
        return
    yield from ((role, model) for role, model in sections.items() if model.path is not None)


def architectures(config: Config) -> dict[str, Architecture]:
    """Returns the architectures of the language models by component. Raises ConfigError with all unknown ones."""
    architectures: dict[str, Architecture] = {}
    problems: list[Problem] = []
    for role, model in models(config):
        try:
            architectures[role] = options_of(model.path or "", f"{role}.model.path")
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(problems)
    return architectures


def has_real_tokenizers(config: Config, known: dict[str, Architecture]) -> bool:
    """Returns whether the tokenizers of all models are on this machine."""
    return all(
        model.tokenizer == "bytes" or _tokenizer_source(model, known[role]) is not None
        for role, model in models(config)
    )


def write_models(config: Config, known: dict[str, Architecture], materials: Materials, longest: int) -> None:
    """Writes the random models that the small config names. longest: tokens of a sequence in the rehearsal."""
    for role, model in models(config):
        folder = Path(materials.model(role))
        write_tokenizer(model, known[role], folder, materials.real_tokenizer)
        write_model(known[role], config.section(role), folder, config.runner.seed, longest)
        if model.tokenizer not in (None, "bytes") and not materials.real_tokenizer:
            write_tokenizer(model, known[role], Path(materials.model(f"{role}-tokenizer")), real=False)
    if (scoring := config.reward.classifier) is not None and scoring.model is not None:
        _write_classifier(config, scoring.model, known, materials, longest)


def write_model(
    known: Architecture, section: Trainable, folder: Path, seed: int, longest: int, *, labels: int = 0
) -> None:
    """Writes a random causal model, or with `labels` a sequence classifier, beside the tokenizer in `folder`."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

    with quiet_transformers(), torch.random.fork_rng(devices=[]):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
        tokens = len(tokenizer)
        rows = (
            -(-tokens // 64) * 64
            if tokens < known.options["vocab_size"] // 8
            else max(known.options["vocab_size"], tokens)
        )
        options = small_options(known.options, section, rows)
        options |= ids | {"pad_token_id": tokenizer.pad_token_id}
        options["max_position_embeddings"] = max(options.get("max_position_embeddings", 0), longest)
        torch.manual_seed(seed)
        model_type = options.pop("model_type")
        if labels:
            network = AutoModelForSequenceClassification.from_config(
                AutoConfig.for_model(model_type, **options, num_labels=labels)
            )
        else:
            network = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **options))
        network.float().save_pretrained(folder)


def write_tokenizer(model: Model, known: Architecture, folder: Path, real: bool) -> None:
    """Writes the model's own tokenizer, or one of bytes with its special tokens and turns."""
    from transformers import AutoTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    source = _tokenizer_source(model, known) if real else None
    if source is None:
        byte_tokenizer(known.specials).save_pretrained(folder)
        return
    with quiet_transformers():
        AutoTokenizer.from_pretrained(**source).save_pretrained(folder)
    if known.folder is not None and (known.folder / "generation_config.json").is_file():
        text = (known.folder / "generation_config.json").read_text(encoding="utf-8")
        (folder / "generation_config.json").write_text(text, encoding="utf-8")


def byte_tokenizer(specials: Specials) -> PreTrainedTokenizerFast:
    """Returns a transformers tokenizer of bytes with the special tokens and a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [*dict.fromkeys(filter(None, (specials.eos, specials.pad, specials.bos, *specials.others)))]
    )
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=specials.eos, pad_token=specials.pad, bos_token=specials.bos
    )
    start, end = (json.dumps(text, ensure_ascii=False) for text in (specials.start, specials.end))
    made.chat_template = _TEMPLATE.replace("START", start).replace("END", end)
    return made


def _tokenizer_source(model: Model, known: Architecture) -> dict[str, object] | None:
    """Returns the arguments of `from_pretrained` for a model's own tokenizer; None if it is not on this machine."""
    if model.tokenizer == "bytes":
        return None
    if model.tokenizer is not None:
        folder = Path(model.tokenizer).expanduser()
        return {"pretrained_model_name_or_path": str(folder)} if folder.is_dir() else None
    if known.has_tokenizer:
        return {"pretrained_model_name_or_path": str(known.folder)}
    if model.path == PACKAGED and (gguf := packaged_gguf()) is not None:
        return {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    return None


def _write_classifier(
    config: Config, model: RewardModel, known: dict[str, Architecture], materials: Materials, longest: int
) -> None:
    """The reward model: of its own architecture, or of the actor's if its config.json is not known here."""
    folder = Path(materials.model("reward"))
    try:
        architecture = options_of(model.path, "reward.model.path")
    except ConfigError:
        architecture = known.get("actor", Architecture(known_options(PACKAGED) or {}, PLAIN))
    source = Model(path=model.path, tokenizer=model.tokenizer)
    write_tokenizer(source, architecture, folder, materials.real_tokenizer)
    write_model(architecture, config.actor, folder, config.runner.seed, longest, labels=1)


# Questions


def write_questions(config: Config, materials: Materials) -> list[str]:
    """Writes a few rows of each stored source of questions. Returns the paths that are not on this machine."""
    missing: list[str] = []
    programs = any(part.type == "code" for _, part in config.reward.parts)
    for number, (_, task) in enumerate(config.data.tasks):
        if task.path is None:
            continue
        parts = [(task.path, task.split, materials.questions(number, "train"), QUESTIONS)]
        if task.val_path or task.val_split:
            validation = materials.questions(number, "validation")
            parts.append((task.val_path or task.path, task.val_split, validation, VALIDATION))
        for start, (path, split, target, count) in enumerate(parts):
            if Path(path).exists():
                lines = _shortest([json.dumps(row) for _, row in rows_of(task, path, split)[:READ]], count)
            else:
                missing.append(path)
                lines = invented(task.prompt_column, task.answer_column, count, 100 * start, programs)
            target.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return missing


def invented(prompt: str, answer: str | None, count: int, start: int, programs: bool) -> list[str]:
    """Returns lines of sums with the columns of the task, and with tests of `programs`."""
    lines = []
    for i in range(count):
        row: Tree = {}
        put_at(row, prompt, f"What is {start + i} + {i}?")
        if answer is not None:
            put_at(row, answer, str(start + 2 * i))
        if programs:
            row["tests"] = [{"input": "", "output": str(start + 2 * i)}]
        lines.append(json.dumps(row))
    return lines


def _shortest(lines: list[str], count: int) -> list[str]:
    """Returns the shortest lines, in their order."""
    chosen = sorted(sorted(range(len(lines)), key=lambda number: (len(lines[number]), number))[:count])
    return [lines[number] for number in chosen]
