"""The word problems of the shipped config are those that the example writes."""

from __future__ import annotations

import json
from pathlib import Path

from script_modules import module_of

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "configs" / "reasoning"


def test_the_example_writes_the_files_of_the_config_and_no_question_is_in_both(tmp_path: Path) -> None:
    module = module_of(ROOT / "examples" / "word_problems.py")
    module.write_all(tmp_path)
    questions = []
    for name in ("word_problems.jsonl", "word_problems_val.jsonl"):
        text = (tmp_path / name).read_text(encoding="utf-8")
        assert text == (FOLDER / name).read_text(encoding="utf-8")
        rows = [json.loads(line) for line in text.splitlines()]
        assert all(0 < int(row["answer"]) <= module.LARGEST for row in rows)
        questions.append({row["question"] for row in rows})
    assert [len(each) for each in questions] == [2000, 200]
    assert not questions[0] & questions[1]
