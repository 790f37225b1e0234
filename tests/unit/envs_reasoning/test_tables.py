"""Questions in JSON, CSV and Parquet files: the same questions as JSON Lines, and every wrong content."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest

from rl_platform.config.schema.data import FILE_SUFFIXES, Data, QuestionTask
from rl_platform.envs.reasoning.sources.tables import READERS
from rl_platform.envs.reasoning.tasks import build_questions
from rl_platform.envs.reasoning.verifiers import ScoreItem, VerifierSpec
from rl_platform.errors import ConfigError, DataError

ROWS = [
    {"question": f'What is "{n}",\nin digits?', "answer": f"so\n#### {n},000", "level": f"l{n}"} for n in range(1, 5)
]


def write(folder: Path, suffix: str) -> Path:
    path = folder / f"questions{suffix}"
    if suffix == ".csv":
        with path.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, list(ROWS[0]))
            table.writeheader()
            table.writerows(ROWS)
    elif suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra data")
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    else:
        lines = "\n".join(map(json.dumps, ROWS))
        path.write_text(lines if suffix == ".jsonl" else json.dumps(ROWS))
    return path


def of(path: Path, **task: str) -> Data:
    return Data(task=QuestionTask(type="file", path=str(path), **task), val_size=1)


@pytest.mark.parametrize("suffix", FILE_SUFFIXES)
def test_formats_give_the_same_questions(tmp_path: Path, suffix: str) -> None:
    split = build_questions(of(write(tmp_path, suffix)), seed=1)
    found = [*split.train, *split.validation]
    assert [(q.text, q.answer) for q in found] == [(row["question"], f"{n}000") for n, row in enumerate(ROWS, 1)]
    assert [q.metadata["level"] for q in found] == [row["level"] for row in ROWS]


def test_path_and_val_path_may_have_different_formats(tmp_path: Path) -> None:
    split = build_questions(of(write(tmp_path, ".csv"), val_path=str(write(tmp_path, ".json"))), seed=1)
    assert [q.answer for q in split.train] == ["2000", "3000", "4000"]
    assert [q.answer for q in split.validation] == ["1000"]


def test_every_suffix_has_a_reader() -> None:
    assert set(READERS) == set(FILE_SUFFIXES)


def test_texts_of_any_length_in_csv(tmp_path: Path) -> None:
    path, text = tmp_path / "a.csv", "x" * 200_000
    path.write_text(f"question,answer,tests\na,1,{text}\nb,2,y\n")
    (question,) = build_questions(of(path), seed=1).train
    assert question.metadata["tests"] == text


def test_nan_is_an_answer_behind_its_mark_and_where_there_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("question,answer\nx,#### nan\ny,nanny\n")
    split = build_questions(of(path), seed=1)
    assert [q.answer for q in (*split.train, *split.validation)] == ["nan", "nanny"]
    path.write_text("question,answer\nx,nan\ny,\n")
    task = QuestionTask(type="file", path=str(path), answer_column=None)
    assert len(build_questions(Data(task=task, val_size=1), seed=1).train) == 1


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.json", b'{"question": "x"}', r"a\.json: a JSON array of objects is needed"),
        ("a.json", b'[{"question": "x", "answer": "1"}, 3]', r"a\.json, row 2: a JSON object is needed, not 3"),
        ("a.json", b'[{"question": "x"}]', r"a\.json, row 1: no column 'answer'. Columns there: question"),
        ("a.json", b"[\n{", r"a\.json:2:2: not JSON"),
        ("a.json", b"[]", r"a\.json: the file holds no questions"),
        ("a.csv", b"question,answer\nx,1\ny\n", r"a\.csv:3: the header names 2 columns, this row has others"),
        ("a.csv", b"question,answer\nx,1,2\n", r"a\.csv:2: the header names 2 columns, this row has others"),
        ("a.csv", b'question,answer\nx,1\n"y', r"a\.csv:3: not CSV: .*, in the row that begins here"),
        ("a.csv", b"question,answer\nx,1\ny,nan\n", r"a\.csv:3: column 'answer' is \"nan\", .* missing value: remove"),
        ("a.jsonl", b'{"question": "x", "answer": " NaN"}', r"a\.jsonl:1: .* or write '#### NaN' if it is the answer"),
        ("a.json", b'[{"question": "x", "answer": "<NA>"}]', r"row 1: column 'answer' is \"<NA>\""),
        ("a.csv", b"question,answer,answer\nx,1,2\n", r"a\.csv:1: several columns have the name 'answer'"),
        (
            "a.csv",
            b"question,answer\n\"[{'role': 'user', 'content': 'x'}]\",1\n",
            r"a\.csv:2: .* store the list itself",
        ),
        ("a.json", b'[{"question": "[{\\"content\\": \\"x\\"}]", "answer": 1}]', r"row 1: .* store the list itself"),
        (
            "a.json",
            b'[{"question": "x", "answer": 1, "answer": 2}]',
            r'a\.json: .* "answer" more than once, with 1 and 2',
        ),
        ("a.csv", b"question;answer\nx;1\n", r"a\.csv:2: no column 'question'. Columns there: question;answer"),
        ("a.csv", b"question,answer\nx,1\n\xe9,2\n", r"a\.csv:3: not UTF-8: byte 1 of the line is 0xe9"),
        (
            "a.csv",
            "question,answer\nx,1\n".encode("utf-16"),
            r"a\.csv:1: not UTF-8: .*mark of UTF-16. Convert it: iconv",
        ),
        ("a.jsonl", '{"question": "x"}\n'.encode("utf-16-le"), r"a\.jsonl:1: not UTF-8: .* as in UTF-16LE. Convert"),
        ("a.jsonl", b'{"question": "x"}\n\xe9', r"a\.jsonl:2: not UTF-8: .*-f ISO-8859-1 -t UTF-8 .*a\.jsonl > "),
        ("a.CSV", b"question,answer\n", r"the file holds no questions"),
    ],
)
def test_wrong_contents_name_file_and_row(tmp_path: Path, name: str, content: bytes, expected: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=expected) as caught:
        build_questions(of(tmp_path / name), seed=1)
    assert caught.value.exit_code == 65


def test_parquet_with_wrong_contents(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs the extra data")
    (tmp_path / "a.parquet").write_bytes(b"question,answer\n")
    with pytest.raises(DataError, match=r"a\.parquet: not Parquet"):
        build_questions(of(tmp_path / "a.parquet"), seed=1)


def test_texts_that_parquet_has_as_bytes_and_columns_of_one_name(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="Parquet needs the extra data")
    from pyarrow import parquet

    columns = [[b"caf\xc3\xa9?", b"b?"], [b"5", b"6"], [b"\xff", b"x"]]
    for names in (["question", "answer", "picture"], ["question", "answer", "answer"]):
        parquet.write_table(pyarrow.table(columns, names=names), tmp_path / f"{names[2]}.parquet")
    split = build_questions(of(tmp_path / "picture.parquet"), seed=1)
    assert [(q.text, q.answer, q.metadata["picture"]) for q in split.train] == [("café?", "5", "b'\\xff'")]
    with pytest.raises(DataError, match=r"answer\.parquet: several columns have the name 'answer'"):
        build_questions(of(tmp_path / "answer.parquet"), seed=1)


def test_parquet_without_pyarrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="pyarrow, which is not installed") as caught:
        build_questions(of(tmp_path / "a.parquet"), seed=1)
    assert "data.task.path" in str(caught.value)
    assert caught.value.exit_code == 2


def test_the_task_verifier_compares_final_answers() -> None:
    score = VerifierSpec("task", "file").load()
    assert [score(ScoreItem(f"#### {n}", "?", "5", {}, None)) for n in (5, 6)] == [1.0, 0.0]
