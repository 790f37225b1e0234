"""Files that users saved in another encoding: the place and the command that converts them."""

from __future__ import annotations

import gzip
import shutil
import subprocess
from pathlib import Path

import pytest

from rl_platform.text_files import NotUTF8, text_of

TEXT = "runner:\n  experiment_name: Prüfung\n"


@pytest.mark.parametrize("text", [TEXT, "", "\n", "a"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_utf8_with_or_without_a_mark(text: str, mark: str):
    assert text_of((mark + text).encode(), "a.yaml") == text


@pytest.mark.parametrize(
    ("encoding", "line", "reason"),
    [
        ("latin-1", 2, "byte 22 of the line is 0xfc, which is ü in ISO-8859-1"),
        ("utf-16", 1, "the file begins with the mark of UTF-16"),
        ("utf-16-le", 1, "every other byte is NUL, as in UTF-16LE"),
        ("utf-16-be", 1, "every other byte is NUL, as in UTF-16BE"),
        ("utf-32", 1, "the file begins with the mark of UTF-32"),
    ],
)
def test_another_encoding_is_named_with_its_command(tmp_path: Path, encoding: str, line: int, reason: str):
    path = tmp_path / "my config.yaml"
    path.write_bytes(TEXT.encode(encoding))
    with pytest.raises(NotUTF8, match=f"^not UTF-8: {reason}$") as raised:
        text_of(path.read_bytes(), path)
    assert raised.value.line == line
    if shutil.which("iconv"):
        subprocess.run(raised.value.hint, shell=True, check=True)
        assert (tmp_path / "my config-utf8.yaml").read_text("utf-8").lstrip("\ufeff") == TEXT


def test_plain_english_in_utf16_is_valid_utf8_and_refused_too():
    with pytest.raises(NotUTF8, match="UTF-16LE"):
        text_of("runner: {}\n".encode("utf-16-le"), "a.yaml")


def test_windows_quotes():
    with pytest.raises(NotUTF8, match="byte 3 of the line is 0x93, which is “ in WINDOWS-1252") as raised:
        text_of("a\nb:“ü”".encode("cp1252"), "a.yaml")
    assert raised.value.hint == "iconv -f WINDOWS-1252 -t UTF-8 a.yaml > a-utf8.yaml"


def test_a_byte_behind_the_mark_of_utf8():
    with pytest.raises(NotUTF8, match="byte 5 of the line is 0xff") as raised:
        text_of(b"\xef\xbb\xbfa\xff", "a.yaml")
    assert raised.value.line == 1


def test_a_compressed_file_is_named_with_the_command_that_unpacks_it(tmp_path: Path):
    path = tmp_path / "my questions.jsonl"
    path.write_bytes(gzip.compress(TEXT.encode()))
    with pytest.raises(NotUTF8, match="the file is compressed by gzip") as raised:
        text_of(path.read_bytes(), path)
    if shutil.which("gunzip"):
        subprocess.run(raised.value.hint, shell=True, check=True)
        assert (tmp_path / "my questions-unpacked.jsonl").read_text("utf-8") == TEXT


def test_a_parquet_file_with_another_suffix():
    with pytest.raises(NotUTF8, match="format Parquet") as raised:
        text_of(b"PAR1\x15\xff", "a.jsonl")
    assert raised.value.hint == "its suffix is .parquet"
