"""Files of questions: JSON Lines, JSON, CSV and Parquet with damaged bytes and absurd values."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz import values

from rl_platform.config.schema.data import Data
from rl_platform.envs.reasoning.tasks import build_questions

ROW: dict[str, Any] = {
    "question": "What is 1 + 1?",
    "answer": "so it is\n#### 2",
    "level": 3,
    "extra": {"tags": ["sum", None], "score": 0.5},
    "prompt": [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}],
}
ABSURD = (
    b'{"question": "a", "answer": ' + b"9" * 5000 + b"}\n",
    b'{"question": "a", "answer": -' + b"9" * 5000 + b"}\n",
    b'{"question": "a", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n",
    b"[" * 100_000 + b"\n",
    *(b"[" * depth + b"]" * depth + b"\n" for depth in (45, 60, 900, 980, 990, 995)),
    *(
        b'{"question": "a", "answer": "1", "x": ' + b"[" * depth + b"]" * depth + b"}\n"
        for depth in (45, 60, 900, 980, 990)
    ),
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"\n",
    b'{"question": "a", "answer": 1e999}\n',
    b'{"question": "a", "answer": NaN}\n',
    b'{"question": "\\ud800", "answer": "\\udfff"}\n',
    b'{"question": "a\\u0000", "answer": "1"}\n',
    b'{"question": "a", "answer": "' + b"x" * 3_000_000 + b'"}\n',
    b"\xff\xfe{\x00\n",
    b"\xef\xbb\xbf\xef\xbb\xbf{}\n",
    b'"' + b"\\" * 100_001 + b"\n",
    b"\r" * 50_000,
    b"," * 200_000 + b"\n",
    b'"' + b"a" * 200_000 + b"\n",
    b"PAR1" + b"\x00" * 100 + b"PAR1",
)


class Questions:
    """Reads each as a run does: the rows, their columns, the split into training and validation."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def case(self, numbers: random.Random) -> tuple[str, Callable[[], object]]:
        suffix = numbers.choice((".jsonl", ".jsonl", ".json", ".csv", ".parquet"))
        rows: list[Any] = [ROW | {"question": f"What is 1 + {number}?"} for number in range(numbers.randrange(1, 8))]
        if numbers.random() < 0.7:
            rows = values.changed(rows, numbers, numbers.randrange(1, 4))
        data = self._written(rows, suffix)
        if data is None or numbers.random() < 0.2:
            data, rows = numbers.choice(ABSURD), []
            if numbers.random() < 0.5:
                data = b'{"question": "b", "answer": "2"}\n' * 3 + data
        elif numbers.random() < 0.4:
            data = values.damaged(data, numbers)
        task: dict[str, Any] = {
            "type": "jsonl" if suffix == ".jsonl" else "file",
            "path": str(self.folder / f"questions{suffix}"),
        }
        columns = ("question", "prompt", "answer", "extra", "extra.tags", "level", "", "a.b.c", "extra.tags.0")
        if numbers.random() < 0.5:
            task |= {"prompt_column": numbers.choice(columns), "answer_column": numbers.choice(columns)}
        sizes = {"val_size": numbers.choice((1, 3))}
        shown = data[:1500].decode("utf-8", "backslashreplace")
        return f"{task} {sizes}, {len(data)} bytes\n{shown}", lambda: self._read(task, sizes, data)

    def _written(self, rows: Any, suffix: str) -> bytes | None:
        """The rows in a format, None if it cannot hold them."""
        text = io.StringIO()
        try:
            match suffix:
                case ".jsonl":
                    text.writelines(json.dumps(row) + "\n" for row in rows)
                case ".json":
                    json.dump(rows, text)
                case ".csv":
                    names = list(rows[0])
                    writer = csv.DictWriter(text, names)
                    writer.writeheader()
                    writer.writerows(rows)
                case _:
                    import pyarrow
                    from pyarrow import parquet

                    binary = io.BytesIO()
                    parquet.write_table(pyarrow.Table.from_pylist(rows), binary)
                    return binary.getvalue()
        except Exception:
            return None
        return text.getvalue().encode("utf-8", "surrogatepass")

    def _read(self, task: dict[str, Any], sizes: dict[str, int], data: bytes) -> None:
        Path(task["path"]).write_bytes(data)
        build_questions(Data.model_validate({"task": task, **sizes}), 1)
