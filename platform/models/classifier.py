"""Reward models: frozen transformers sequence classifiers with one label, one score per conversation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from rl_platform.config.schema.reward import RewardModel
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.families import quantisation_problem
from rl_platform.models.pretrained import model_folder, quiet_transformers
from rl_platform.records import Message

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase

KEY = "reward.model"


class SequenceClassifier:
    """The model of `reward.model` on `device`. Raises ConfigError if it cannot be loaded or has several labels."""

    def __init__(self, section: RewardModel, device: torch.device) -> None:
        self.tokenizer, config = load_parts(section)
        self._chat, self._device = section.use_chat_template, device
        self._own_padding: int | None = config.get_text_config().pad_token_id
        self._network: Any = _load(section, config).requires_grad_(False).eval().to(device)
        limits = (self.tokenizer.model_max_length, getattr(config, "max_position_embeddings", None))
        self.longest: int = min(limit for limit in limits if limit is not None)

    def encode(self, conversation: Sequence[Message]) -> list[int]:
        """Returns token ids of the conversation, rendered by the chat template or joined without separators."""
        if not self._chat:
            return list(self.tokenizer.encode("".join(message["content"] for message in conversation)))
        text = self.tokenizer.apply_chat_template(list(conversation), tokenize=False)
        return list(self.tokenizer.encode(text, add_special_tokens=False))

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
        if self._own_padding is not None:
            return self._own_padding
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
    try:
        config = AutoConfig.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(path, f"cannot be loaded: {error}", value=folder)]) from error
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
    except (OSError, ValueError) as error:
        raise ConfigError([Problem(key, f"no tokenizer can be loaded: {error}", value=source)]) from error
    if (problem := quantisation_problem(config, folder, path)) is not None:
        raise ConfigError([problem])
    if config.num_labels != 1:
        message = f"a reward is one number, this classifier has {config.num_labels} labels"
        raise ConfigError([Problem(path, message, value=folder)])
    if section.use_chat_template and tokenizer.chat_template is None:
        template = f"{KEY}.use_chat_template"
        message, hint = "the tokenizer has no chat template", f"set {template}: false"
        raise ConfigError([Problem(template, message, value=source, hint=hint)])
    return tokenizer, config


def _load(section: RewardModel, config: PretrainedConfig) -> nn.Module:
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification

    folder, key = model_folder(section.path, f"{KEY}.path"), f"{KEY}.path"
    try:
        with quiet_transformers():
            network, loading = AutoModelForSequenceClassification.from_pretrained(
                folder, config=config, dtype=getattr(torch, section.dtype), output_loading_info=True
            )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError([Problem(key, f"cannot be loaded: {error}", value=folder)]) from error
    missing = sorted(loading["missing_keys"])
    if missing:  # transformers fills them with random numbers
        message = f"{len(missing)} weights are missing, as {missing[0]}: is it a classifier?"
        raise ConfigError([Problem(key, message, value=folder)])
    return network
