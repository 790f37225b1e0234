"""Text of files that users write: UTF-8, with or without a byte order mark.

Another encoding is refused with the place and the command that converts it, as a guess would change letters silently.
"""

from __future__ import annotations

import codecs
import shlex
from pathlib import Path

_MARKS = {codecs.BOM_UTF8: "UTF-8", codecs.BOM_UTF32_LE: "UTF-32", codecs.BOM_UTF32_BE: "UTF-32"}
_MARKS |= {codecs.BOM_UTF16_LE: "UTF-16", codecs.BOM_UTF16_BE: "UTF-16"}  # the first begins as that of UTF-32
_PACKED = {
    b"\x1f\x8b": ("gzip", "gunzip -c <"),
    b"BZh": ("bzip2", "bunzip2 -c <"),
    b"\x28\xb5\x2f\xfd": ("zstd", "unzstd -c <"),
    b"PK\x03\x04": ("ZIP", "unzip -p"),
}


class NotUTF8(ValueError):
    """Contents in another encoding. line: of the first byte that is not UTF-8, from 1; hint: how to convert them."""

    def __init__(self, reason: str, line: int, hint: str) -> None:
        super().__init__(reason)
        self.line, self.hint = line, hint


def text_of(contents: bytes, path: str | Path) -> str:
    """Returns the text in the contents of the file at `path`, without a byte order mark. Raises NotUTF8."""
    try:
        text = contents.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise _other(contents, path, error) from error
    if (wide := _wide(contents)) is not None:  # English text in UTF-16 is UTF-8 too, with a NUL behind each letter
        raise _converted(f"not UTF-8: every other byte is NUL, as in {wide}", 1, wide, path)
    return text


def _other(contents: bytes, path: str | Path, error: UnicodeDecodeError) -> NotUTF8:
    for start, (kind, program) in _PACKED.items():
        if contents.startswith(start):
            new = Path(path).with_name(f"{Path(path).stem}-unpacked{Path(path).suffix}")
            hint = f"{program} {shlex.quote(str(path))} > {shlex.quote(str(new))}"
            return NotUTF8(f"not UTF-8: the file is compressed by {kind}", 1, hint)
    if contents.startswith(b"PAR1"):
        return NotUTF8("not UTF-8: the file is in the format Parquet", 1, "its suffix is .parquet")
    for mark, encoding in _MARKS.items():
        if contents.startswith(mark) and encoding != "UTF-8":
            return _converted(f"not UTF-8: the file begins with the mark of {encoding}", 1, encoding, path)
    if (wide := _wide(contents)) is not None:
        return _converted(f"not UTF-8: every other byte is NUL, as in {wide}", 1, wide, path)
    at = error.start + (len(codecs.BOM_UTF8) if contents.startswith(codecs.BOM_UTF8) else 0)
    line, first = contents.count(b"\n", 0, at) + 1, contents.rfind(b"\n", 0, at) + 1
    encoding = "WINDOWS-1252" if any(0x80 <= byte < 0xA0 for byte in contents) else "ISO-8859-1"
    letter = contents[at : at + 1].decode("cp1252", errors="replace")
    reason = f"not UTF-8: byte {at - first + 1} of the line is 0x{contents[at]:02x}, which is {letter} in {encoding}"
    return _converted(reason, line, encoding, path)


def _converted(reason: str, line: int, encoding: str, path: str | Path) -> NotUTF8:
    new = Path(path).with_name(f"{Path(path).stem}-utf8{Path(path).suffix}")
    hint = f"iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > {shlex.quote(str(new))}"
    return NotUTF8(reason, line, hint)


def _wide(contents: bytes) -> str | None:
    """Returns the encoding of text with two bytes per letter and no mark, from the NULs among its first bytes."""
    first = contents[:1000]
    for encoding, zeros, letters in (("UTF-16LE", first[1::2], first[::2]), ("UTF-16BE", first[::2], first[1::2])):
        if len(first) > 3 and zeros.count(0) > 0.7 * len(zeros) and letters.count(0) < 0.1 * len(letters):
            return encoding
    return None
