"""Reward models: frozen transformers sequence classifiers with one label, one score per conversation.

Not covered: reward models that a server computes, see `classifier_server.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from rl_platform.config.schema.reward import RewardModel
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.causal_lm import quiet_transformers
from rl_platform.models.pretrained.families import quantisation_problem
from rl_platform.models.pretrained.folder_files import check_options, check_weights, reading
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.records import Message

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

KEY = "reward.model"


class ClassifierInput:
    """The token ids that the model of `reward.model` reads, at most `longest` of them; without its weights.

    Raises ConfigError if its tokenizer or config cannot be loaded, or if it has several labels.
    """

    def __init__(self, section: RewardModel) -> None:
        self.tokenizer, self.config = load_parts(section)
        self._chat = section.use_chat_template
        self.padding: int | None = self.config.get_text_config().pad_token_id
        limits = (self.tokenizer.model_max_length, getattr(self.config, "max_position_embeddings", None))
        self.longest: int = min(limit for limit in limits if limit is not None)

    def encode(self, conversation: Sequence[Message]) -> list[int]:
        """Returns token ids of the conversation, rendered by the chat template or joined without separators."""
        if not self._chat:
            return list(self.tokenizer.encode("".join(message["content"] for message in conversation)))
        text = self.tokenizer.apply_chat_template(list(conversation), tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))


class SequenceClassifier(ClassifierInput):
    """The model of `reward.model` on `device`. Raises ConfigError if it cannot be loaded or has several labels."""

    def __init__(self, section: RewardModel, device: torch.device) -> None:
        super().__init__(section)
        self._device = device
        self._network = _load(section, self.config).requires_grad_(False).eval().to(device)

    @torch.inference_mode()
    def scores(self, rows: Sequence[Sequence[int]]) -> list[float]:
        """Returns the score of each row of token ids, computed in one forward pass."""
        shape = (len(rows), max(len(row) for row in rows))
        tokens = torch.full(shape, self._padding(rows))
        mask = torch.zeros(shape, dtype=torch.int64)
        for index, row in enumerate(rows):
            tokens[index, : len(row)] = torch.tensor(row)
            mask[index, : len(row)] = 1
        logits: Tensor = self._network(input_ids=tokens.to(self._device), attention_mask=mask.to(self._device)).logits
        return logits[:, 0].float().tolist()

    def _padding(self, rows: Sequence[Sequence[int]]) -> int:
        """Returns the model's padding token, else a token that ends no row: decoders score the last token that is not
        padding."""
        if self.padding is not None:
            return self.padding
        ends = {row[-1] for row in rows}
        free = next(token for token in range(len(ends) + 1) if token not in ends)
        self._network.config.get_text_config().pad_token_id = free
        return free


def load_parts(section: RewardModel) -> tuple[PreTrainedTokenizerBase, PretrainedConfig]:
    """Returns tokenizer and config, without weights. Raises ConfigError if `SequenceClassifier` cannot use them."""
    from transformers import AutoConfig, AutoTokenizer

    path = f"{KEY}.path"
    folder = model_folder(section.path, path)
    source, key = (folder, path) if section.tokenizer is None else (section.tokenizer, f"{KEY}.tokenizer")
    check_options(folder, path)
    with reading(path, "cannot be loaded", folder):
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    with reading(key, "no tokenizer can be loaded", source):
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=False)
        if not isinstance(tokenizer.model_max_length, int | float):
            raise ValueError(f"model_max_length is {tokenizer.model_max_length!r}")
    if (problem := quantisation_problem(config, folder, path)) is not None:
        raise ConfigError([problem])
    if config.num_labels != 1:
        message = f"a reward is one number, this classifier has {config.num_labels} labels"
        raise ConfigError([Problem(path, message, value=folder)])
    if section.use_chat_template and tokenizer.chat_template is None:
        template = f"{KEY}.use_chat_template"
        message, hint = "the tokenizer has no chat template", f"set {template}: false"
        raise ConfigError([Problem(template, message, value=source, hint=hint)])
    if section.use_chat_template:
        with reading(key, "its chat template fails", source):
            if not tokenizer.apply_chat_template([{"role": "user", "content": "?"}], tokenize=False).strip():
                raise ValueError("it renders nothing")
    return tokenizer, config


def _load(section: RewardModel, config: PretrainedConfig) -> PreTrainedModel:
    from transformers import AutoModelForSequenceClassification

    folder, key = model_folder(section.path, f"{KEY}.path"), f"{KEY}.path"
    options = {"config": config, "output_loading_info": True, "trust_remote_code": False}
    with reading(key, "cannot be loaded", folder), quiet_transformers():
        network, loading = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=getattr(torch, section.dtype), **options
        )
        check_weights(network, loading["missing_keys"], loading["unexpected_keys"], folder, key)
    return network
