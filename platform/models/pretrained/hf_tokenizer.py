"""Tokenizers of transformers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from rl_platform.errors import ConfigError, Problem
from rl_platform.models.pretrained.folder_files import reading
from rl_platform.models.pretrained.model_folder import model_folder
from rl_platform.models.tokenizer import no_template
from rl_platform.records import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_TURN = "WORDS OF THE ASSISTANT"  # placeholder that marks the assistant's turn in a rendered template


class HFTokenizer:
    """A tokenizer of transformers. Responses end at its own EOS token and at those of the model's generation config."""

    def __init__(self, folder: str, key: str) -> None:
        hint = "" if (Path(folder) / "tokenizer.json").is_file() else _copy_hint(key)
        with reading(key, "no tokenizer can be loaded", folder, hint):
            self._tokenizer = _loaded(folder, _stamp(folder))
            if not isinstance(self._tokenizer.model_max_length, int | float):
                raise ValueError(f"model_max_length is {self._tokenizer.model_max_length!r}")
            ends = {self._tokenizer.eos_token_id, *_generation_eos(folder)} - {None}
        self._folder = folder
        if len(self._tokenizer) <= len(getattr(self._tokenizer, "added_tokens_decoder", ())):
            raise ConfigError([_without_vocabulary(folder, key)])
        if not ends:
            raise ConfigError([Problem(key, "the tokenizer has no EOS token: responses would never end", value=folder)])
        self.eos_token_ids: tuple[int, ...] = tuple(sorted(ends))
        pad = self._tokenizer.pad_token_id
        self.pad_token_id: int = pad if pad is not None else self.eos_token_ids[0]
        self.vocab_size = len(self._tokenizer)
        # of a text: a tokenizer whose BOS is its EOS encodes an empty one as this token, too
        self._end_added = self._tokenizer.encode("?")[-1:] == [self._tokenizer.eos_token_id]

    def encode(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text)
        # tokenizers with add_eos_token end every text, after which the policy would write a new one
        return tokens[:-1] if self._end_added else tokens

    def decode(self, token_ids: Iterable[int], *, special: bool = False) -> str:
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=not special)
        return text

    def save(self, folder: Path) -> None:
        self._tokenizer.save_pretrained(folder)

    def apply_chat(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> list[int]:
        return self._tokens(self._chat_text(messages, tools))

    def observation(self, text: str, chat: bool, ended: bool) -> list[int]:
        if not chat:
            return self._tokens(text)
        return self.continuation([{"role": "user", "content": text}], ended)

    def continuation(
        self, messages: Sequence[Message], ended: bool, tools: Sequence[object] | None = None
    ) -> list[int]:
        # The text that the template adds after the assistant's turn; earlier turns are not encoded again.
        before = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _TURN}]
        _, _, after = self._chat_text([*before, *messages], tools).partition(_TURN)
        tokens = self._tokens(after)
        end = next((place for place, token in enumerate(tokens) if token in self.eos_token_ids), None)
        if not ended or end is None or self.decode(tokens[:end], special=True).strip():
            return tokens
        return tokens[end + 1 :]  # some templates write a space before the EOS of a turn

    def _tokens(self, text: str) -> list[int]:
        tokens: list[int] = self._tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _chat_text(self, messages: Sequence[Message], tools: Sequence[object] | None = None) -> str:
        if self._tokenizer.chat_template is None:
            raise no_template(self._folder)
        try:
            options = {"tools": list(tools)} if tools else {}
            text = self._tokenizer.apply_chat_template(
                list(messages), tokenize=False, add_generation_prompt=True, **options
            )
            return str(text)
        except Exception as error:  # of any type, as a template is a program
            raise ValueError(f"the chat template refuses it: {error}") from error


@lru_cache(maxsize=4)
def _loaded(folder: str, _files: object) -> PreTrainedTokenizerBase:
    """Returns one tokenizer for all components of a process: each takes 0.2 s and 11 MB for 49,152 tokens."""
    from transformers import AutoTokenizer

    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    tokenizer.encode("")  # switches off truncation and padding of its file; later calls change nothing, in any thread
    return tokenizer


def _stamp(folder: str) -> tuple[tuple[str, int, int], ...]:
    """Returns names, times and sizes of the files of a folder; nothing for a hub id."""
    files = (file for file in Path(folder).glob("*.*") if file.is_file())  # no links to nothing
    return tuple(sorted((file.name, file.stat().st_mtime_ns, file.stat().st_size) for file in files))


def _without_vocabulary(folder: str, key: str) -> Problem:
    """Returns the problem of a folder from which transformers builds a tokenizer of special tokens alone."""
    missing = [name for name in ("tokenizer.json", "tokenizer_config.json") if not (Path(folder) / name).is_file()]
    files = f": {' and '.join(missing)} missing" if missing else ""
    return Problem(key, f"the tokenizer has no vocabulary{files}", value=folder, hint=_copy_hint(key))


def _copy_hint(key: str) -> str:
    hint = "copy the tokenizer files of the model there (save_pretrained of its tokenizer)"
    return hint if key.endswith(".tokenizer") else f"{hint}, or set {key.rpartition('.')[0]}.tokenizer"


def tokenizer_folder(name: str, key: str) -> str:
    """Returns `name` if it is a folder with a tokenizer, which needs no model; else resolves it as a model's path."""
    folder = Path(name).expanduser()
    return str(folder) if (folder / "tokenizer_config.json").is_file() else model_folder(name, key)


def _generation_eos(folder: str) -> list[int]:
    """Returns the EOS ids of the generation config. Chat models often end turns with another token."""
    file = Path(folder) / "generation_config.json"
    if not file.is_file():
        return []
    ids = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
    ids = ids if isinstance(ids, list) else [ids]
    if wrong := [each for each in ids if each is not None and (type(each) is not int or each < 0)]:
        raise ValueError(f"{file.name}: eos_token_id is {json.dumps(wrong[0])[:80]}, no number of a token")
    return ids
