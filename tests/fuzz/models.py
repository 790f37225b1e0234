"""Model folders: damaged, truncated and mistyped files, weights that are missing, unexpected or not finite."""

from __future__ import annotations

import json
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from fuzz import values
from safetensors.torch import load_file, save_file

from rl_platform.components.reward_models.classifier import SequenceClassifier
from rl_platform.config.schema import Config
from rl_platform.config.schema.models import Model
from rl_platform.config.schema.reward import RewardModel
from rl_platform.envs.reasoning.prompts import build_prompts
from rl_platform.envs.reasoning.question import Question
from rl_platform.launch.start_checks.model_checks import check_architectures, check_models
from rl_platform.models.build import language_model
from rl_platform.models.pretrained.weight_parts import WeightParts
from rl_platform.models.tokenizer import load_tokenizer
from rl_platform.placement.inventory import inventory_for
from rl_platform.placement.scheduler import schedule

WORDS = ("<pad>", "<eos>", "a", "b", "c", "d", "what", "is", "?", "[UNK]")
SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
JSON_FILES = ("config.json", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json")


class Ran:
    """Unpickling it would run code."""

    def __reduce__(self) -> tuple[Any, ...]:
        return pickle.loads, (b"",)


class Models:
    """Checks each folder and builds the actor from it as a run does, with one rank or as parts for several."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "model"
        self.kinds = {name: self._base(folder, name) for name in ("llama", "qwen3_moe", "classifier")}

    def _base(self, folder: Path, kind: str) -> Path:
        from tokenizers import Tokenizer
        from tokenizers.models import WordLevel
        from tokenizers.pre_tokenizers import Whitespace
        from transformers import (
            AutoModelForCausalLM,
            LlamaConfig,
            LlamaForSequenceClassification,
            PreTrainedTokenizerFast,
            Qwen3MoeConfig,
        )

        place = folder / kind
        options = SIZES | {
            "vocab_size": len(WORDS),
            "max_position_embeddings": 64,
            "eos_token_id": 1,
            "pad_token_id": 0,
        }
        if kind == "classifier":
            network: Any = LlamaForSequenceClassification(LlamaConfig(**options, num_labels=1))
        elif kind == "llama":
            network = AutoModelForCausalLM.from_config(LlamaConfig(**options))
        else:
            moe = {"moe_intermediate_size": 16, "num_experts": 2, "num_experts_per_tok": 1, "head_dim": 8}
            network = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**options, **moe))
        network.save_pretrained(place, max_shard_size="12KB")
        words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
        words.pre_tokenizer = Whitespace()
        tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<pad>")
        tokenizer.chat_template = "{% for message in messages %}{{ message.content }} {% endfor %}"
        tokenizer.save_pretrained(place)
        return place

    def case(self, numbers: random.Random) -> tuple[str, Callable[[], object]]:
        kind = numbers.choice(("llama", "llama", "llama", "qwen3_moe", "classifier"))
        shutil.rmtree(self.folder, ignore_errors=True)
        shutil.copytree(self.kinds[kind], self.folder)
        done = [self._change(numbers) for _ in range(numbers.choice((1, 1, 1, 2)))]
        parts = numbers.random() < 0.3
        read = self._classifier if kind == "classifier" else lambda: self._language_model(parts)
        return f"{kind}{' in parts' if parts else ''}: {'; '.join(done)}"[:3000], read

    def _change(self, numbers: random.Random) -> str:
        files = sorted(path for path in self.folder.iterdir() if path.is_file())
        if not files:
            return "nothing left"
        match numbers.randrange(9):
            case 0:
                file = numbers.choice(files)
                file.unlink()
                return f"no {file.name}"
            case 1 | 2:
                file = numbers.choice(files)
                file.write_bytes(values.damaged(file.read_bytes(), numbers))
                return f"damaged {file.name}"
            case 3 | 4 | 5:
                return self._json(numbers, self.folder / numbers.choice((*JSON_FILES, "model.safetensors.index.json")))
            case 6:
                return self._remade(numbers)
            case _:
                return self._weights(numbers)

    def _json(self, numbers: random.Random, file: Path) -> str:
        if not file.is_file():
            return f"no {file.name} to change"
        try:
            tree = json.loads(file.read_text())
        except (ValueError, RecursionError):
            return f"{file.name} is no JSON"
        deep = numbers.random()
        if deep < 0.05:
            file.write_text("[" * 100_000 + "]" * 100_000)
        elif deep < 0.1:
            file.write_text(json.dumps(values.value(numbers)))
        else:
            file.write_text(json.dumps(values.changed(tree, numbers)))
        return f"{file.name}: {file.read_text()[:2000]}"

    def _remade(self, numbers: random.Random) -> str:
        """Files of another kind instead of a file."""
        file = self.folder / numbers.choice(
            ("config.json", "tokenizer.json", "model.safetensors", "generation_config.json")
        )
        _remove(file)
        match numbers.randrange(4):
            case 0:
                file.mkdir()
                return f"{file.name} is a folder"
            case 1:
                file.symlink_to(file)
                return f"{file.name} is a link to itself"
            case 2:
                for weights in self.folder.glob("*.safetensors*"):
                    _remove(weights)
                with open(self.folder / "pytorch_model.bin", "wb") as target:
                    torch.save({"model.embed_tokens.weight": Ran()}, target)
                return "a pickle for weights"
            case _:
                options = json.loads((self.kinds["llama"] / "config.json").read_text())
                options["auto_map"] = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
                options["model_type"] = "unheard_of"
                (self.folder / "code.py").write_text("raise SystemExit('remote code ran')\n")
                _remove(self.folder / "config.json")
                (self.folder / "config.json").write_text(json.dumps(options))
                return "remote code"

    def _weights(self, numbers: random.Random) -> str:
        files = sorted(self.folder.glob("*.safetensors"))
        if not files or not files[0].is_file():
            return "no weights to change"
        file = numbers.choice(files)
        try:
            tensors = load_file(file)
        except Exception:
            return "weights unreadable already"
        name = numbers.choice(sorted(tensors))
        tensor = tensors.pop(name)
        match numbers.randrange(7):
            case 0 | 1:
                bad = numbers.choice((float("nan"), float("inf"), -float("inf")))
                tensor.view(-1)[numbers.randrange(tensor.numel())] = bad
                tensors[name] = tensor
                said = f"{bad} in {name}"
            case 2:
                said = f"no {name}"
            case 3:
                tensors[name] = tensor[:-1].contiguous() if numbers.random() < 0.5 else tensor[None].contiguous()
                said = f"{name} in another shape"
            case 4:
                tensors[name] = tensor
                tensors[name.replace(".0.", ".2.").replace(".1.", ".3.") + numbers.choice(("", ".x"))] = tensor.clone()
                said = f"beside {name} another one"
            case 5:
                kind = numbers.choice(
                    (torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.int8, torch.complex64)
                )
                tensors[name] = tensor.to(kind)
                said = f"{name} as {kind}"
            case _:
                tensors[name] = tensor
                twin = numbers.choice([other for other in files if other.is_file()])
                try:
                    save_file({**load_file(twin), name: tensor.clone()}, twin, {"format": "pt"})
                except Exception:
                    return f"{twin.name} unreadable already"
                return f"{name} also in {twin.name}"
        save_file(tensors, file, numbers.choice(({"format": "pt"}, {"format": "pt"}, {"format": "tf"}, None)))
        return f"{file.name}: {said}"

    def _language_model(self, parts: bool) -> None:
        config = _config(self.folder)
        inventory = inventory_for(config.cluster)
        placement = schedule(config.cluster, inventory)
        check_architectures(config, placement)
        check_models(config, placement, inventory)
        section: Model = config.actor.model
        build_prompts([Question("what is a ?", "a", {})], load_tokenizer(section), config.data)
        network = language_model(config, section, 1, probed=True)
        if parts and any(self.folder.glob("*.safetensors")):
            for part in WeightParts(str(self.folder), network.config, "actor.model.path", value_head=False):
                part.clear()

    def _classifier(self) -> None:
        classifier = SequenceClassifier(RewardModel(path=str(self.folder)), torch.device("cpu"))
        classifier.scores([classifier.encode([{"role": "user", "content": "what is a ?"}])])


def _remove(file: Path) -> None:
    """Removes what an earlier change may have made of the file: a folder, a link to itself, nothing."""
    if file.is_dir():
        file.rmdir()
    else:
        file.unlink(missing_ok=True)


def _config(folder: Path) -> Config:
    return Config.model_validate(
        {
            "runner": {"task_type": "reasoning"},
            "cluster": {"component_placement": {"actor,rollout,reward": "0"}, "gpus_per_node": 0},
            "data": {"task": {"type": "digits"}, "max_prompt_length": 16, "max_response_length": 8},
            "actor": {"model": {"path": str(folder)}},
        }
    )
