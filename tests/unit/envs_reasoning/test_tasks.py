"""Building questions: disjoint splits, determinism, and every way the input can be wrong."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from rl_platform.config.schema.data import Data, QuestionTask, Source
from rl_platform.config.schema.runner import Runner
from rl_platform.envs.reasoning.sources.rows import file_rows, final_answer, questions_of
from rl_platform.envs.reasoning.sources.tables import READERS
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec
from rl_platform.errors import ConfigError, DataError

TOY = "digits"
CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2}


def gym(name: str = "chain_sum", train: int = 50, val: int = 20, **params: object) -> Data:
    return Data(task=QuestionTask(type="reasoning_gym", name=name, params=params), train_size=train, val_size=val)


def digits(train: int = 50, val: int = 20, **params: object) -> Data:
    return Data(task=QuestionTask(type=TOY, params=params), train_size=train, val_size=val)


def jsonl(path: Path, val_size: int = 2, **task: object) -> Data:
    return Data(task=QuestionTask(type="jsonl", path=str(path), **task), val_size=val_size)


def write(path: Path, rows: list[object]) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def rows(*numbers: int) -> list[dict[str, str]]:
    return [{"question": f"What is {n}?", "answer": str(n)} for n in numbers]


@pytest.mark.parametrize("data", [gym(train=300, val=100, **CHAIN_SUM), digits(train=900, val=100, length=3)])
def test_generated_splits_have_the_sizes_asked_for_and_share_no_question(data: Data) -> None:
    split = build_questions(data, seed=3)
    train, validation = {q.key for q in split.train}, {q.key for q in split.validation}
    assert (len(split.train), len(split.validation)) == (data.train_size, data.val_size)
    assert (len(train), len(validation)) == (data.train_size, data.val_size)
    assert not train & validation


@pytest.mark.parametrize("make", [gym, digits])
def test_questions_depend_on_the_seed_alone(make) -> None:
    assert build_questions(make(), seed=1) == build_questions(make(), seed=1)
    assert build_questions(make(), seed=1) != build_questions(make(), seed=2)


def test_validation_does_not_depend_on_the_size_of_training() -> None:
    assert build_questions(gym(train=20), seed=1).validation == build_questions(gym(train=200), seed=1).validation


def test_a_seed_of_the_task_overrides_the_run() -> None:
    assert build_questions(gym(seed=7), seed=1) == build_questions(gym(seed=7), seed=2)


def test_too_small_a_task_is_named_with_numbers() -> None:
    tiny = gym(train=4000, val=200, min_terms=2, max_terms=2, min_digits=1, max_digits=1)
    with pytest.raises(ConfigError, match=r"too few distinct questions: 200 found in \d+ draws") as caught:
        build_questions(tiny, seed=1)
    assert "4000" in str(caught.value)
    with pytest.raises(ConfigError, match="only 100 questions of 2 digits"):
        build_questions(digits(train=99, val=2, length=2), seed=1)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (gym("chain_sun"), "did you mean chain_sum"),
        (gym(max_term=3), "did you mean max_terms"),
        (gym(size=3), "data.train_size and data.val_size"),
        (gym(min_terms=5, max_terms=2), "max_terms must be >= min_terms"),
        (gym(min_terms="2"), "refused by dataset chain_sum"),
        (digits(operation="min"), "no such operation"),
        (digits(lenght=3), "did you mean length"),
        (digits(length=0), "1 to 9"),
    ],
)
def test_bad_task_settings(data: Data, expected: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_questions(data, seed=1)
    assert expected in str(caught.value)


def test_digit_answers() -> None:
    last = build_questions(digits(operation="last", length=3), seed=1).train
    assert all(len(q.text) == 4 and q.text[-1] == "=" and q.answer == q.text[2] for q in last)
    assert all(q.answer == max(q.text[:-1]) for q in build_questions(digits(operation="max"), seed=1).train)


def test_jsonl_holds_out_the_last_lines_and_removes_duplicates_from_training(tmp_path: Path) -> None:
    repeated = {"question": " what is  9?", "answer": "9"}
    path = write(tmp_path / "a.jsonl", [*rows(1, 2, 3), repeated, *rows(8, 9)])
    split = build_questions(jsonl(path), seed=1)
    assert [q.answer for q in split.train] == ["1", "2", "3"]
    assert [q.answer for q in split.validation] == ["8", "9"]
    assert split.repeated == 1


def test_jsonl_with_a_validation_file(tmp_path: Path) -> None:
    path, val = write(tmp_path / "a.jsonl", rows(1, 2, 5)), write(tmp_path / "b.jsonl", rows(5, 6, 7))
    split = build_questions(jsonl(path, val_path=str(val)), seed=1)
    assert [q.answer for q in split.train] == ["1", "2"]
    assert [q.answer for q in split.validation] == ["5", "6"]
    assert split.unused == 1


def test_columns_can_be_renamed_and_others_are_kept(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"q": "1+1?", "a": 2, "level": 3}])
    (question,) = questions_of(file_rows(path, "q", "a", READERS[".jsonl"]), "q", "a")
    assert (question.text, question.answer, question.metadata) == ("1+1?", "2", {"a": 2, "level": 3})


@pytest.mark.parametrize(
    ("number", "answer"), [(3.0, "3"), (-0.0, "0"), (3, "3"), (2.5, "2.5"), ("3.0", "3.0"), (1e22, "1e+22")]
)
def test_whole_numbers_that_are_stored_as_floats(tmp_path: Path, number: object, answer: str) -> None:
    """A table with a gap has floats in all rows. `exact_match` never paid a response of 3."""
    path = write(tmp_path / "a.jsonl", [{"question": "1+2?", "answer": number}])
    (question,) = questions_of(file_rows(path, "question", "answer", READERS[".jsonl"]), "question", "answer")
    assert (question.answer, question.metadata) == (answer, {"answer": number})


@pytest.mark.parametrize(
    ("solution", "answer"),
    [
        ("He has 2*617=<<2*617=1234>>1234 apples.\n#### 1,234", "1234"),
        ("#### -5 ", "-5"),
        ("a #### 1\n#### 2.50", "2.50"),
        (r" \frac{1}{2} ", r"\frac{1}{2}"),
        ("(1,2)", "(1,2)"),
        ("#### $1,234,567.50", "$1234567.50"),
        ("#### 1,234 dollars", "1234 dollars"),
        ("#### [1,2]", "[1,2]"),
        ("#### (1,200)", "(1,200)"),
        ("#### 1, 2, 3", "1, 2, 3"),
        ("#### 1,000, 2,000", "1,000, 2,000"),
        ("#### 12,34", "12,34"),
    ],
)
def test_gold_answer_of_gsm8k(solution: str, answer: str) -> None:
    assert final_answer(solution) == answer


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ([], r"a\.jsonl: the file holds no questions"),
        (["", " "], r"the file holds no questions \(2 lines\)"),
        ([*rows(1), "", '{"question": 1'], r"a\.jsonl:3:\d+: not JSON"),
        ([*rows(1), {"prompt": "x", "answer": "1"}], r":2: no column 'question'. Columns there: prompt, answer"),
        ([{"question": "x", "solution": "1"}], r"a\.jsonl:1: no column 'answer'. Columns there: question, solution"),
        ([[1, 2]], r"a\.jsonl:1: a JSON object is needed, not \[1, 2\]"),
        ([{"question": "", "answer": "1"}], r"a\.jsonl:1: column 'question'"),
        ([{"question": "x", "answer": None}], r"a\.jsonl:1: column 'answer' .* not null"),
        ([{"question": "x", "answer": "####"}], r"a\.jsonl:1: column 'answer'"),
        (['{"question": "x", "answer": NaN}'], r"a\.jsonl:1: column 'answer' .* number, not NaN"),
        (
            [*rows(1), '{"question": "x", "answer": 1, "answer": 2}'],
            r':2: .* key "answer" more than once, with 1 and 2:',
        ),
        (['{"question": "x", "answer": 1, "meta": {"id": 1, "id": 1}}'], r'a\.jsonl:1: .* key "id" more than once'),
        (rows(1, 2), r"2 questions, of which data.val_size: 2"),
        (rows(2, 1, 2)[1:] + rows(1, 2), r"all 2 training questions are also validation questions"),
    ],
)
def test_bad_files(tmp_path: Path, content: list[object], expected: str) -> None:
    with pytest.raises(DataError, match=expected) as caught:
        build_questions(jsonl(write(tmp_path / "a.jsonl", content)), seed=1)
    assert caught.value.exit_code == 65


@pytest.mark.parametrize(
    ("row", "column"),
    [
        ({"question": "2\ud83d", "answer": "2"}, "question"),
        ({"question": [{"role": "user", "content": "2\ud83d"}], "answer": "2"}, "question"),
        ({"question": "2", "answer": "\ud83d"}, "answer"),
    ],
)
def test_half_a_character_is_refused_with_its_row(tmp_path: Path, row: dict[str, object], column: str) -> None:
    """No tokenizer encodes it."""
    path = write(tmp_path / "a.jsonl", [*rows(1, 2), row])
    with pytest.raises(DataError, match=rf"a\.jsonl:3: column '{column}' holds \\ud83d without its other half"):
        build_questions(jsonl(path), seed=1)


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", rows(1, 2))
    task = QuestionTask(type="jsonl", path="~/a.jsonl", val_path="~/a.jsonl")
    assert task.path == task.val_path == str(tmp_path / "a.jsonl")
    assert Runner(task_type="reasoning", resume="~/step-00000002").resume == str(tmp_path / "step-00000002")
    assert len(build_questions(jsonl(Path("~/a.jsonl"), val_size=1), seed=1).train) == 1


def test_files_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match=r"none\.jsonl: cannot be read: No such file"):
        build_questions(jsonl(tmp_path / "none.jsonl"), seed=1)
    with pytest.raises(DataError, match="cannot be read"):
        build_questions(jsonl(tmp_path), seed=1)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=rf"^none\.jsonl: cannot be read in {tmp_path}: No such file"):
        build_questions(jsonl(Path("none.jsonl")), seed=1)
    latin = tmp_path / "latin.jsonl"
    latin.write_bytes(b'{"question": "x", "answer": "1"}\n{"question": "caf\xe9", "answer": "1"}\n')
    with pytest.raises(DataError, match=r"latin\.jsonl:2: not UTF-8"):
        build_questions(jsonl(latin), seed=1)


def mixture(folder: Path, *more: Source) -> Data:
    path = write(folder / "a.jsonl", rows(1, 2, 3, 4, 5, 6))
    sources = [
        Source(label="toy", type="digits", weight=2.0, val_size=3),
        Source(label="sums", type="jsonl", path=str(path)),
        *more,
    ]
    return Data(sources=sources, train_size=5, val_size=2)


def test_sources_are_labelled_and_validated_one_by_one(tmp_path: Path) -> None:
    held_out = write(tmp_path / "b.jsonl", rows(7, 1, 8))
    split = build_questions(mixture(tmp_path, Source(label="more", type="jsonl", path=str(held_out), weight=0)), 1)
    assert Counter(q.source for q in split.train) == {"toy": 5, "sums": 3}
    assert Counter(q.source for q in split.validation) == {"toy": 3, "sums": 2, "more": 2}
    assert [q.answer for q in split.train if q.source == "sums"] == ["2", "3", "4"]
    assert split.train[-1].metadata == {"answer": "4", "source": "sums"}


def test_a_column_with_the_name_of_the_label_keeps_its_value(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", [{**row, "source": "aops"} for row in rows(7, 8)])
    split = build_questions(mixture(tmp_path, Source(label="more", type="jsonl", path=str(path), val_size=1)), 1)
    assert split.train[-1].metadata == {"answer": "7", "source": "more", "source_column": "aops"}
    assert split.validation[-1].metadata == {"answer": "8", "source": "more", "source_column": "aops"}
    assert build_questions(jsonl(path, val_size=1), 1).train[0].metadata == {"answer": "7", "source": "aops"}


def test_a_source_without_validation_trains_on_all_its_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "b.jsonl", rows(7, 8))
    split = build_questions(mixture(tmp_path, Source(label="all", type="jsonl", path=str(path), val_size=0)), 1)
    assert [q.answer for q in split.train if q.source == "all"] == ["7", "8"]


def test_problems_of_a_source_name_its_key_and_rows(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.sources\[2\]\.params\.lenght"):
        build_questions(mixture(tmp_path, Source(label="x", type="digits", params={"lenght": 3})), 1)
    path = write(tmp_path / "b.jsonl", [*rows(7, 8), {"question": "x"}])
    with pytest.raises(DataError, match=r"b\.jsonl:3: no column 'answer'"):
        build_questions(mixture(tmp_path, Source(label="x", type="jsonl", path=str(path))), 1)


def test_each_source_is_scored_by_its_own_task() -> None:
    specs = {"toy": VerifierSpec("task", "digits"), "sums": VerifierSpec("task", "jsonl")}
    score = VerifierSpec("task", sources=specs).load()
    items = [ScoreItem("7 is it", "?", "7", {"source": label}) for label in specs]
    assert [score(item) for item in items] == [1.0, 1.0]
    items = [ScoreItem("it is 7", "?", "7", {"source": label}) for label in specs]
    assert [score(item) for item in items] == [0.0, 1.0]
