"""Both tokenizers behind one interface. The Hugging Face one is made here, from a handful of words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rl_platform.config.schema.models import Model, RandomLM
from rl_platform.errors import ConfigError
from rl_platform.models.tokenizer import ByteTokenizer, load_tokenizer
from rl_platform.records import Prompt, Trajectory
from rl_platform.runners.trajectories import samples_of

TEMPLATE = "{% for m in messages %}<s> {{ m['role'] }} {{ m['content'] }} </s>{% endfor %}<s> assistant"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<unk>", "<s>", "</s>", "<end>", "user", "system", "assistant", "one", "two"]
    inner = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 3]}))
    return tmp_path


def test_bytes_round_trip() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("1+1=2 é")
    assert tokenizer.decode([257, *ids, *tokenizer.eos_token_ids, tokenizer.pad_token_id]) == "1+1=2 é"
    assert tokenizer.decode([0xC3]) == "\ufffd"
    assert max(*tokenizer.eos_token_ids, tokenizer.pad_token_id, *ids) < tokenizer.vocab_size


def test_transformers_loads_saved_bytes(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    ours, text = ByteTokenizer(), "1+1=2 é\n  面积 "
    ours.save(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == ours.encode(text)
    assert loaded.decode(ours.encode(text)) == text
    special = loaded.pad_token_id, loaded.bos_token_id, loaded.eos_token_id
    assert special == (ours.pad_token_id, ours.bos_token_id, *ours.eos_token_ids)
    assert len(loaded) == ours.vocab_size


def test_hugging_face_tokenizer(folder: Path) -> None:
    tokenizer = load_tokenizer(Model(tokenizer=str(folder)))
    assert tokenizer.eos_token_ids == (2, 3)
    assert tokenizer.pad_token_id == 2
    assert tokenizer.vocab_size == 9
    assert tokenizer.encode("one two") == [7, 8]
    assert tokenizer.decode([1, 7, 8, 2]) == "one two"
    assert tokenizer.apply_chat([{"role": "user", "content": "one"}]) == [1, 4, 7, 2, 1, 6]


@pytest.mark.parametrize(("template", "encoded"), [("<s> $A </s>", [1, 7, 8]), ("</s> $A", [2, 7, 8])])
def test_an_eos_that_the_tokenizer_appends_is_no_part_of_a_prompt(
    folder: Path, template: str, encoded: list[int]
) -> None:
    """The policy would write a new text after it. Tokenizers with add_eos_token append it; that of OPT begins
    with it."""
    from tokenizers import processors

    file = folder / "tokenizer.json"
    fields = json.loads(file.read_text())
    special = [("<s>", 1), ("</s>", 2)]
    fields["post_processor"] = json.loads(
        processors.TemplateProcessing(single=template, special_tokens=special).__getstate__()
    )
    file.write_text(json.dumps(fields))
    tokenizer = load_tokenizer(Model(tokenizer=str(folder)))
    assert tokenizer.encode("one two") == encoded
    assert tokenizer.encode("one </s>") == [*encoded[:2], 2]


@pytest.mark.parametrize("with_config", [False, True])
@pytest.mark.parametrize("family", ["Qwen2", "GPT2"])
def test_a_folder_without_a_vocabulary_is_refused(family: str, with_config: bool, tmp_path: Path) -> None:
    """transformers makes a tokenizer of it, which encodes every text as nothing."""
    import transformers

    getattr(transformers, f"{family}Config")().save_pretrained(tmp_path)
    if with_config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": f"{family}Tokenizer"}))
    with pytest.raises(ConfigError) as failed:
        load_tokenizer(Model(path=str(tmp_path)))
    (problem,) = failed.value.problems
    missing = "tokenizer.json" if with_config else "tokenizer.json and tokenizer_config.json"
    assert (problem.key, problem.value) == ("actor.model.path", str(tmp_path))
    assert problem.message == f"the tokenizer has no vocabulary: {missing} missing"
    assert problem.hint.endswith("or set actor.model.tokenizer")


def test_components_share_what_is_read_until_the_files_change(folder: Path) -> None:
    first, second = (load_tokenizer(Model(tokenizer=str(folder))) for _ in range(2))
    assert vars(first)["_tokenizer"] is vars(second)["_tokenizer"]
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"two"', '"three"'))
    changed = load_tokenizer(Model(tokenizer=str(folder)))
    assert changed.encode("one three") == first.encode("one two") == [7, 8]


def test_a_logged_sample_has_the_prompt_as_rendered(folder: Path) -> None:
    tokenizer = load_tokenizer(Model(tokenizer=str(folder)))
    prompt = Prompt(0, "one", "two", tuple(tokenizer.apply_chat([{"role": "user", "content": "one"}])))
    (sample,) = samples_of([Trajectory(prompt, 0, (8, 2), (-1.0, -1.0), "stop", 1, "two", 0.5)], tokenizer)
    assert sample == ("<s> user one </s> <s> assistant", "two", 0.5, "two", "stop", "", ())


def test_what_continues_a_conversation(folder: Path) -> None:
    """As in the whole conversation rendered at once, without what the policy's own turn has already."""
    tokenizer = load_tokenizer(Model(tokenizer=str(folder)))
    turns = [("user", "one"), ("assistant", "two"), ("user", "one one")]
    whole = tokenizer.apply_chat([{"role": role, "content": text} for role, text in turns])
    before, sampled = tokenizer.apply_chat([{"role": "user", "content": "one"}]), [8, 2]
    assert [*before, *sampled, *tokenizer.observation("one one", chat=True, ended=True)] == whole
    assert tokenizer.observation("one one", chat=True, ended=False)[0] == 2  # the turn that was cut is closed
    assert tokenizer.observation("one one", chat=False, ended=True) == [7, 7]
    assert ByteTokenizer().observation("7", chat=False, ended=True) == [55]
    with pytest.raises(ConfigError, match="no chat template"):
        ByteTokenizer().observation("7", chat=True, ended=True)


def test_a_template_with_a_space_before_the_end_of_a_turn(folder: Path) -> None:
    """As Llama 2's. A tokenizer of bytes encodes the space, where the other one has no token for it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizer, decoders.ByteLevel()
    saved = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="</s>")
    saved.chat_template = TEMPLATE
    saved.save_pretrained(folder)
    tokenizer = load_tokenizer(Model(tokenizer=str(folder)))
    cut = tokenizer.observation("one", chat=True, ended=False)
    assert tokenizer.decode(cut, special=True) == " </s><s> user one </s><s> assistant"
    ended = tokenizer.observation("one", chat=True, ended=True)
    assert tokenizer.decode(ended, special=True) == "<s> user one </s><s> assistant"


def test_tools_and_their_results_in_a_conversation(folder: Path) -> None:
    template = "{% if tools %}<s> system {{ tools[0]['name'] }} </s>{% endif %}" + TEMPLATE
    (folder / "chat_template.jinja").write_text(template)
    tokenizer, tools = load_tokenizer(Model(tokenizer=str(folder))), [{"name": "two"}]
    question, result = {"role": "user", "content": "one"}, {"role": "user", "content": "one one"}
    before = tokenizer.apply_chat([question], tools)
    assert before == [1, 5, 8, 2, *tokenizer.apply_chat([question])]
    whole = tokenizer.apply_chat([question, {"role": "assistant", "content": "two"}, result], tools)
    assert [*before, 8, 2, *tokenizer.continuation([result], ended=True, tools=tools)] == whole


def test_without_a_chat_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match="no chat template"):
        load_tokenizer(Model(tokenizer=str(folder))).apply_chat([{"role": "user", "content": "one"}])


def test_which_tokenizer_is_loaded(tmp_path: Path) -> None:
    assert isinstance(load_tokenizer(Model(tokenizer="bytes")), ByteTokenizer)
    assert isinstance(load_tokenizer(Model(random_init=RandomLM())), ByteTokenizer)
    with pytest.raises(ConfigError, match=r"actor\.model\.tokenizer"):
        load_tokenizer(Model(tokenizer=str(tmp_path / "none")))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"critic\.model\.path: no tokenizer can be loaded") as failed:
        load_tokenizer(Model(path=str(tmp_path)), key="critic.model")
    assert failed.value.problems[0].hint.endswith("or set critic.model.tokenizer")
