"""Prompts and their order: templates, length limit, exact resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.prompts import PromptLoader, PromptSet, build_prompts, notes_on
from rl_platform.envs.reasoning.question import Question, Split
from rl_platform.errors import CheckpointError, ConfigError
from rl_platform.models.tokenizer import ByteTokenizer
from rl_platform.records import Message, Prompt


class ChatTokenizer(ByteTokenizer):
    def apply_chat(self, messages: Sequence[Message]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>")


BARE = Data(use_chat_template=False)


def prompts(count: int):
    return build_prompts([Question(f"q{n}", str(n)) for n in range(count)], ByteTokenizer(), BARE).prompts


def text(data: Data, question: str = "1+1?") -> str:
    tokenizer = ChatTokenizer()
    (prompt,) = build_prompts([Question(question, "2")], tokenizer, data).prompts
    return tokenizer.decode(prompt.token_ids)


def test_templates() -> None:
    assert text(BARE) == "1+1?"
    assert text(Data()) == "<user>1+1?<assistant>"
    assert text(Data(system_prompt="Be brief.")) == "<system>Be brief.<user>1+1?<assistant>"
    assert text(Data(system_prompt="")) == "<system><user>1+1?<assistant>"
    assert text(Data(prompt_template="{x} {question}!", use_chat_template=False), "{y}") == "{x} {y}!"


def test_a_prompt_carries_what_the_verifier_needs() -> None:
    question = Question("1+1?", "2", {"level": 1})
    (prompt,) = build_prompts([question], ByteTokenizer(), BARE).prompts
    assert (prompt.index, prompt.text, prompt.answer, prompt.metadata) == (0, "1+1?", "2", {"level": 1})


def test_long_prompts_are_left_out_and_counted() -> None:
    questions = [Question("x" * length, "1") for length in (3, 4, 5, 2)]
    built = build_prompts(questions, ByteTokenizer(), Data(use_chat_template=False, max_prompt_length=3))
    assert [(p.index, len(p.token_ids)) for p in built.prompts] == [(0, 3), (3, 2)]
    assert built.too_long == 2


def test_the_description_of_tools_counts_as_a_part_of_the_prompt() -> None:
    data = Data(use_chat_template=False, max_prompt_length=12, system_prompt="s")
    questions = [Question("x" * length, "1") for length in (3, 2)]

    def with_tools(messages: Sequence[Message]) -> int:
        return 10 + sum(len(message["content"]) for message in messages)

    with pytest.raises(ConfigError) as refused:
        build_prompts(questions, ByteTokenizer(), data, with_tools)
    assert "the shortest has 13 tokens with the description of the tools\n    value: 12\n" in str(refused.value)
    assert "hint: data.max_prompt_length=14 keeps all of them" in str(refused.value)
    some = build_prompts(questions, ByteTokenizer(), data.model_copy(update={"max_prompt_length": 13}), with_tools)
    assert ([prompt.text for prompt in some.prompts], some.too_long) == (["xx"], 1)


def test_each_kind_of_question_without_use_is_reported() -> None:
    one = [Question("1", "1")]
    assert notes_on(Split(one, one), PromptSet([], 0), PromptSet([], 0)) == []
    assert notes_on(Split(one, one, unused=3, repeated=4), PromptSet([], 2), PromptSet([], 1)) == [
        "2 training prompts are longer than data.max_prompt_length and were left out",
        "1 validation prompts are longer than data.max_prompt_length and were left out",
        "4 training questions equal a validation question, up to case and spacing, and were left out",
        "validation uses 1 questions and leaves out 3 more of its files: data.val_size",
    ]


def test_questions_of_files_with_two_answers_are_reported() -> None:
    rows = [("1+1?", "2"), ("2+2?", "4"), ("1+1?", "3"), ("2+2?", "4"), ("1+1?", "4")]
    stored = [Question(text, answer, where=f"a.jsonl:{line}") for line, (text, answer) in enumerate(rows, 1)]
    assert notes_on(Split(stored, []), PromptSet([], 0), PromptSet([], 0)) == [
        '1 training questions occur again with another answer, the first is "1+1?"'
    ]
    generated = [Question(text, answer) for text, answer in rows]  # the scorer of a data set may accept several answers
    assert notes_on(Split(generated, []), PromptSet([], 0), PromptSet([], 0)) == []


def test_images_that_the_model_does_not_get_are_reported() -> None:
    seen = [Question("<image>What is this?", "2", {"images": ["a.png"]})]
    assert notes_on(Split(seen, []), PromptSet([], 0), PromptSet([], 0)) == [
        "the column images of the questions is not part of any prompt: reasoning models read text only"
    ]
    empty = [Question("What is this?", "2", {"images": []})]
    assert notes_on(Split(empty, []), PromptSet([], 0), PromptSet([], 0)) == []


def test_a_column_with_another_name_in_the_metadata_is_reported() -> None:
    renamed = [Question("1", "1", {"source": "sums", "source_column": "aops"}, source="sums")]
    assert notes_on(Split(renamed, renamed), PromptSet([], 0), PromptSet([], 0)) == [
        "2 questions have a column 'source': metadata[\"source\"] is the label of data.sources, "
        'the column is metadata["source_column"]'
    ]


def test_the_shortest_of_the_long_prompts_is_shown_with_its_place() -> None:
    questions = [Question("12345", "1", where="v.jsonl:1"), Question("1234", "1", where="v.jsonl:2")]
    with pytest.raises(ConfigError, match=r"shortest has 4 tokens \(v\.jsonl:2\)"):
        build_prompts(questions, ByteTokenizer(), Data(use_chat_template=False, max_prompt_length=3))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (Data(use_chat_template=False, max_prompt_length=1), "not one of 1 prompts is that short; the shortest has 4"),
        (Data(), "the tokenizer has no chat template"),
    ],
)
def test_settings_that_make_no_sense(data: Data, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_prompts([Question("1+1?", "2")], ByteTokenizer(), data)
    assert expected in str(caught.value)


def test_every_epoch_has_each_prompt_once_in_a_new_order() -> None:
    loader = PromptLoader(prompts(10), batch_size=4, seed=1)
    drawn = [p.index for _ in range(5) for p in loader.next_batch()]
    assert Counter(drawn[:10]) == Counter(drawn[10:]) == Counter(range(10))
    assert drawn[:10] != drawn[10:] != list(range(10))
    assert loader.epoch == 2


def test_a_batch_may_be_larger_than_the_data() -> None:
    loader = PromptLoader(prompts(3), batch_size=8, seed=1)
    assert max(Counter(p.index for p in loader.next_batch()).values()) == 3
    assert loader.epoch == 2


def test_without_shuffling_the_order_is_that_of_the_data() -> None:
    loader = PromptLoader(prompts(3), batch_size=5, seed=1, shuffle=False)
    assert [p.index for p in loader.next_batch()] == [0, 1, 2, 0, 1]


def test_order_depends_on_the_seed() -> None:
    first, second, other = (PromptLoader(prompts(20), 20, seed).next_batch() for seed in (1, 1, 2))
    assert first == second != other


@pytest.mark.parametrize("taken", [0, 1, 2, 3, 7])
def test_resume_continues_with_the_very_next_prompt(taken: int) -> None:
    loader = PromptLoader(prompts(10), batch_size=4, seed=1)
    for _ in range(taken):
        loader.next_batch()
    resumed = PromptLoader(prompts(10), batch_size=4, seed=1)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.epoch == loader.epoch
    assert [resumed.next_batch() for _ in range(6)] == [loader.next_batch() for _ in range(6)]


def test_resume_with_other_data_or_seed_is_refused() -> None:
    state = PromptLoader(prompts(10), batch_size=4, seed=1).state_dict()
    with pytest.raises(CheckpointError, match=r"of other prompts .* start anew in another runner\.output_dir"):
        PromptLoader(prompts(11), batch_size=4, seed=1).load_state_dict(state)
    with pytest.raises(CheckpointError, match="of other seed"):
        PromptLoader(prompts(10), batch_size=4, seed=2).load_state_dict(state)
    in_order = PromptLoader(prompts(10), batch_size=4, seed=1, shuffle=False)
    with pytest.raises(CheckpointError, match=r"of other shuffle \(True, now False\): .*data\.shuffle"):
        in_order.load_state_dict(state)
    in_order.load_state_dict({name: value for name, value in state.items() if name != "shuffle"})


def test_resume_with_other_answers_warns(caplog: pytest.LogCaptureFixture) -> None:
    """The position in the data stays valid, as with another reward."""
    state = PromptLoader(prompts(10), batch_size=4, seed=1).state_dict()
    corrected = [*prompts(9), replace(prompts(10)[9], answer="corrected")]
    PromptLoader(prompts(10), batch_size=4, seed=1).load_state_dict(state)
    older = {name: value for name, value in state.items() if name != "answers"}
    PromptLoader(corrected, batch_size=4, seed=1).load_state_dict(older)
    assert caplog.messages == []
    PromptLoader(corrected, batch_size=4, seed=1).load_state_dict(state)
    assert "the expected answers of the training data differ" in caplog.messages[0]


def mixed(**counts: int) -> list[Prompt]:
    labels = [label for label, count in counts.items() for _ in range(count)]
    return [Prompt(index, str(index), "", (index,), source=label) for index, label in enumerate(labels)]


def test_sources_have_their_shares_in_every_batch_and_are_passed_through_one_by_one() -> None:
    loader = PromptLoader(mixed(a=30, b=3), batch_size=8, seed=1, weights={"a": 3.0, "b": 1.0})
    batches = [loader.next_batch() for _ in range(6)]
    assert all(Counter(prompt.source for prompt in batch) == {"a": 6, "b": 2} for batch in batches)
    of_a, of_b = ([p.index for batch in batches for p in batch if p.source == label] for label in "ab")
    assert Counter(of_a[:30]) == Counter(range(30))
    assert [Counter(of_b[start : start + 3]) for start in (0, 3, 6, 9)] == [Counter(range(30, 33))] * 4
    assert (loader.epoch, loader.left(2)) == (1, 66 - 48)


def test_a_single_source_keeps_the_order_that_it_had_before_there_were_several() -> None:
    expected = np.random.default_rng([1, 0]).permutation(20).tolist()
    assert [p.index for p in PromptLoader(prompts(20), 20, seed=1).next_batch()] == expected


@pytest.mark.parametrize("drawn", [0, 1, 5, 40])
def test_a_mixture_resumes_with_the_very_next_prompt(drawn: int) -> None:
    weights = {"a": 0.3, "b": 0.7, "c": 1e-3}
    loader, resumed = (PromptLoader(mixed(a=5, b=7, c=2), 4, seed=1, weights=weights) for _ in range(2))
    loader.next_batch(drawn)
    resumed.load_state_dict(loader.state_dict())
    assert resumed.next_batch(50) == loader.next_batch(50)


def test_resume_with_other_weights_is_refused() -> None:
    state = PromptLoader(mixed(a=5, b=7), 4, seed=1, weights={"a": 1.0, "b": 1.0}).state_dict()
    with pytest.raises(CheckpointError, match="of other weights"):
        PromptLoader(mixed(a=5, b=7), 4, seed=1, weights={"a": 1.0, "b": 2.0}).load_state_dict(state)


def test_a_source_whose_prompts_are_all_too_long_is_named() -> None:
    questions = [Question("1", "1", source="a"), Question("long enough", "1", source="b")]
    with pytest.raises(ConfigError, match="not one of 1 prompts of source b is that short"):
        build_prompts(questions, ByteTokenizer(), Data(use_chat_template=False, max_prompt_length=5))
