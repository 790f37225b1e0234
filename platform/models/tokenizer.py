"""Tokenizers: their interface, and plain bytes for tiny random models. Those of Hugging Face are in `pretrained/`."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from rl_platform.config.schema.models import Model
from rl_platform.errors import ConfigError, Problem
from rl_platform.extras import required
from rl_platform.models.causal_lm import PRETRAINED
from rl_platform.records import Message

SAMPLE = "def f(x):\n    return 3.14 * x  # größer, 面积, Σ"  # of text that tokenizers encode differently


class Tokenizer(Protocol):
    """The interface of tokenizers. `eos_token_ids`: tokens that end a response, at least one."""

    eos_token_ids: tuple[int, ...]
    pad_token_id: int
    vocab_size: int

    def encode(self, text: str) -> list[int]: ...

    def decode(self, token_ids: Iterable[int], *, special: bool = False) -> str:
        """Returns the text, with the special tokens if `special` is true."""
        ...

    def apply_chat(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> list[int]:
        """Returns token ids of the conversation and the header of the assistant's turn. tools: their JSON schemas.

        Raises ConfigError if there is no chat template, ValueError if it refuses these messages.
        """
        ...

    def observation(self, text: str, chat: bool, ended: bool) -> list[int]:
        """Returns the tokens by which `text` continues a conversation after a turn of the policy.

        With `chat` they are a user's turn and the header of the assistant's next turn, else the bare text.
        `ended`: the policy's turn contains its EOS already.
        """
        ...

    def continuation(
        self, messages: Sequence[Message], ended: bool, tools: Sequence[object] | None = None
    ) -> list[int]:
        """Returns the tokens of `messages` after a turn of the policy, and the header of its next turn."""
        ...

    def save(self, folder: Path) -> None:
        """Writes the files from which transformers loads the tokenizer."""
        ...


class ByteTokenizer:
    """UTF-8 bytes 0-255, then pad 256, bos 257 and eos 258. `encode` adds none of them."""

    pad_token_id = 256
    bos_token_id = 257
    eos_token_ids: tuple[int, ...] = (258,)
    vocab_size = 259

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Iterable[int], *, special: bool = False) -> str:
        return bytes(token for token in token_ids if token < 256).decode(errors="replace")

    def apply_chat(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> list[int]:
        raise no_template("bytes")

    def continuation(
        self, messages: Sequence[Message], ended: bool, tools: Sequence[object] | None = None
    ) -> list[int]:
        raise no_template("bytes")

    def observation(self, text: str, chat: bool, ended: bool) -> list[int]:
        if chat:
            raise no_template("bytes")
        return self.encode(text)

    def save(self, folder: Path) -> None:
        """Writes a byte-level BPE without merges."""
        from tokenizers import Tokenizer as Encoding
        from tokenizers import decoders, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast
        from transformers.convert_slow_tokenizer import bytes_to_unicode

        letters = {letter: byte for byte, letter in bytes_to_unicode().items()}
        encoding = Encoding(models.BPE(letters, merges=[]))
        encoding.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        encoding.decoder = decoders.ByteLevel()
        marks = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
        encoding.add_special_tokens([*marks.values()])  # 256, 257, 258
        PreTrainedTokenizerFast(tokenizer_object=encoding, **marks).save_pretrained(folder)


def load_tokenizer(model: Model, key: str = "actor.model") -> Tokenizer:
    """Returns a model's tokenizer: `model.tokenizer` if given, else that of the weights' folder, else bytes.

    Raises ConfigError if it cannot be loaded or has no EOS token.
    """
    if model.tokenizer == "bytes" or (model.tokenizer is None and model.path is None):
        return ByteTokenizer()
    with required(PRETRAINED, key):
        from rl_platform.models.pretrained.hf_tokenizer import HFTokenizer, tokenizer_folder
        from rl_platform.models.pretrained.model_folder import model_folder
    if model.tokenizer is not None:
        return HFTokenizer(tokenizer_folder(model.tokenizer, f"{key}.tokenizer"), f"{key}.tokenizer")
    return HFTokenizer(model_folder(model.path or "", f"{key}.path"), f"{key}.path")


def stops(tokenizer: Tokenizer, texts: Sequence[str]) -> tuple[list[int], list[str]]:
    """Returns the tokens and the texts of `rollout.stop` that end a response.

    A text of one token is that token; all but special tokens may also be parts of other tokens. Raises ConfigError for
    a text with a special token among others: generated text shows no special tokens.
    """
    tokens_of = {text: tokenizer.observation(text, chat=False, ended=False) for text in texts}
    shown = [text for text, tokens in tokens_of.items() if text in tokenizer.decode(tokens)]
    alone = [tokens[0] for tokens in tokens_of.values() if len(tokens) == 1]
    problems = [
        Problem(
            "rollout.stop",
            f"a special token among others: of its {len(tokens)} tokens the tokenizer shows "
            f"{json.dumps(tokenizer.decode(tokens), ensure_ascii=False)}",
            value=json.dumps(text, ensure_ascii=False),
            hint="the special token alone, or a text without one",
        )
        for text, tokens in tokens_of.items()
        if len(tokens) != 1 and text not in shown
    ]
    if problems:
        raise ConfigError(problems)
    return alone, shown


def check_same_tokens(own: Tokenizer, other: Tokenizer, key: str) -> None:
    """Raises ConfigError if the model of `key` has other tokens than the actor: it would read other text than the actor
    wrote."""
    if own.encode(SAMPLE) != other.encode(SAMPLE):
        message = "its tokenizer encodes text in other tokens than the actor's, and it reads the actor's tokens"
        raise ConfigError([Problem(key, message, allowed="a model with the actor's tokenizer")])


def no_template(name: str) -> ConfigError:
    """Returns the error of a tokenizer without a chat template. name: its folder or name."""
    hint = "set data.use_chat_template: false"
    return ConfigError([Problem("data.use_chat_template", "the tokenizer has no chat template", value=name, hint=hint)])
