"""Standard output and standard error that never fail: text is dropped while it cannot be written, and a character
that the encoding does not have is written as an escape.

A run outlives the reader of its output: the pipe to `head`, the terminal, the disk of a log file. Output is dropped
while it cannot be written and appears again if that changes. Files that a run writes are not covered.
"""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


def never_fail() -> None:
    """Replaces `sys.stdout` and `sys.stderr`, once at the start of a command, and opens descriptors that are closed.

    A closed descriptor 1 would become that of the next file that is opened, and a child process would print into it.
    Streams that a caller has replaced already stay.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one
    if sys.stdout is sys.__stdout__:
        sys.stdout = _tolerant(sys.stdout, 1)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _tolerant(sys.stderr, 2)


def _tolerant(stream: TextIO | None, descriptor: int) -> TextIO:
    """Returns a stream like `stream`, which is None for a descriptor that was closed."""
    buffer = io.BufferedWriter(_Descriptor(descriptor, "w", closefd=False))
    if not isinstance(stream, io.TextIOWrapper):
        return io.TextIOWrapper(buffer, "utf-8", "backslashreplace", line_buffering=True)
    at_once = stream.line_buffering or stream.write_through
    errors = "backslashreplace" if stream.errors == "strict" else stream.errors
    return io.TextIOWrapper(buffer, stream.encoding, errors, line_buffering=at_once)


class _Descriptor(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        """Returns the length of `data`, also if it could not be written."""
        try:
            written = super().write(data)
        except OSError:
            written = None
        return memoryview(data).nbytes if written is None else written
