"""Tokenizers: Hugging Face tokenizers, and plain bytes for tiny random models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from rl_platform.config.schema.models import Model
from rl_platform.errors import ConfigError, Problem
from rl_platform.models.folder_files import reading
from rl_platform.models.pretrained import model_folder
from rl_platform.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TURN = "WORDS OF THE ASSISTANT"  # placeholder that marks the assistant's turn in a rendered template


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
        raise _no_template("bytes")

    def continuation(
        self, messages: Sequence[Message], ended: bool, tools: Sequence[object] | None = None
    ) -> list[int]:
        raise _no_template("bytes")

    def observation(self, text: str, chat: bool, ended: bool) -> list[int]:
        if chat:
            raise _no_template("bytes")
        return self.encode(text)

    def save(self, folder: Path) -> None:
        """Writes nothing: bytes need no files."""


class HFTokenizer:
    """A tokenizer of transformers. Responses end at its own EOS token and at those of the model's generation config."""

    def __init__(self, folder: str, key: str) -> None:
        from transformers import AutoTokenizer

        with reading(key, "no tokenizer can be loaded", folder):
            self._tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
            if not isinstance(self._tokenizer.model_max_length, int | float):
                raise ValueError(f"model_max_length is {self._tokenizer.model_max_length!r}")
            ends = {self._tokenizer.eos_token_id, *_generation_eos(folder)} - {None}
        self._folder = folder
        if not ends:
            raise ConfigError([Problem(key, "the tokenizer has no EOS token: responses would never end", value=folder)])
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(ends))
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = pad if pad is not None else self.eos_token_ids[0]
        self.vocab_size = len(self._tokenizer)

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def decode(self, token_ids: Iterable[int], *, special: bool = False) -> str:
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def apply_chat(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> list[int]:
        return self._tokenizer.encode(self._chat_text(messages, tools), add_special_tokens=False)

    def observation(self, text: str, chat: bool, ended: bool) -> list[int]:
        if not chat:
            return self._tokenizer.encode(text, add_special_tokens=False)
        return self.continuation([{"role": "user", "content": text}], ended)

    def continuation(
        self, messages: Sequence[Message], ended: bool, tools: Sequence[object] | None = None
    ) -> list[int]:
        # The text that the template adds after the assistant's turn; earlier turns are not encoded again.
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, _, after = self._chat_text([*before, *messages], tools).partition(_TURN)
        tokens = self._tokenizer.encode(after, add_special_tokens=False)
        end = next((place for place, token in enumerate(tokens) if token in self.eos_token_ids), None)
        if not ended or end is None or self.decode(tokens[:end], special=True).strip():
            return tokens
        return tokens[end + 1 :]  # some templates write a space before the EOS of a turn

    def _chat_text(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> str:
        if self._tokenizer.chat_template is None:
            raise _no_template(self._folder)
        try:
            options = {"tools": list(tools)} if tools else {}
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
            return str(text)
        except Exception as error:  # of any type, as a template is a program
            raise ValueError(f"the chat template refuses it: {error}") from error


def load_tokenizer(model: Model, key: str = "actor.model") -> Tokenizer:
    """Returns a model's tokenizer: `model.tokenizer` if given, else that of the weights' folder, else bytes.

    Raises ConfigError if it cannot be loaded or has no EOS token.
    """
    if model.tokenizer == "bytes" or (model.tokenizer is None and model.path is None):
        return ByteTokenizer()
    if model.tokenizer is not None:
        return HFTokenizer(_tokenizer_folder(model.tokenizer, f"{key}.tokenizer"), f"{key}.tokenizer")
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


def _tokenizer_folder(name: str, key: str) -> str:
    """Returns `name` if it is a folder with a tokenizer, which needs no model; else resolves it as a model's path."""
    folder = Path(name).expanduser()
    return str(folder) if (folder / "tokenizer_config.json").is_file() else model_folder(name, key)


def _generation_eos(folder: str) -> list[int]:
    """EOS ids of the generation config. Chat models often end turns with another token than the tokenizer's EOS."""
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return []
    ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    if wrong := [each for each in ids if each is not None and (type(each) is not int or each < 0)]:
        raise ValueError(f"{file.name}: eos_token_id is {json.dumps(wrong[0])[:80]}, no number of a token")
    return ids


def _no_template(name: str) -> ConfigError:
    hint = "set data.use_chat_template: false"
    return ConfigError([Problem("data.use_chat_template", "the tokenizer has no chat template", name, hint=hint)])
