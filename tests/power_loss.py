"""What a disk may hold after a power loss: the file operations of some code, recorded, and replayed in part.

A file keeps what was there at its last fsync; of later writes any part may be there. A folder keeps the entries of its
last fsync; of later creations, renames and deletions any may be there, each as a whole. That is what POSIX promises;
file systems with a journal keep more.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = 512


@dataclass(eq=False)
class Node:
    """A file or a folder. contents: of a file, by the time at which it was read; synced: times of its fsyncs."""

    is_folder: bool
    entries: dict[str, Node] = field(default_factory=dict)  # now
    changes: list[tuple[int, dict[str, Node | None]]] = field(default_factory=list)
    contents: list[tuple[int, bytes]] = field(default_factory=list)
    synced: list[int] = field(default_factory=list)


class Recording:
    """File operations below `root`, which must not exist before. times: 0 .. `end`."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.above = Node(True)  # the folder that `root` is in
        self.marks: list[tuple[int, object]] = []
        self.end = 0
        self._lock = threading.RLock()

    def mark(self, value: object) -> None:
        """From now on `value` holds, whatever happens."""
        self.marks.append((self.end, value))

    def holding(self, time: int) -> list[object]:
        """The marks that were set before `time`."""
        return [value for at, value in self.marks if at <= time]

    def after_loss(self, time: int, draw: random.Random, target: Path) -> None:
        """Writes to `target` what may be there if the power fails at `time`."""
        ordered = draw.random() < 0.5  # as with a journal: if a change of a folder is there, those before it are too
        entries = _entries_after(self.above, time, draw, ordered)
        if (root := entries.get(self.root.name)) is not None:
            _write(root, time, draw, ordered, target)

    def _at(self, path: Path) -> tuple[Node, str] | None:
        """The folder that an entry is in, and its name; None outside of `root`."""
        path = Path(os.path.abspath(path))
        if path != self.root and self.root not in path.parents:
            return None
        folder = self.above
        for name in path.relative_to(self.root.parent).parts[:-1]:
            if name not in folder.entries:
                return None
            folder = folder.entries[name]
        return folder, path.name

    def _change(self, folder: Node, changes: dict[str, Node | None]) -> None:
        for name, node in changes.items():
            folder.entries.pop(name, None)
            if node is not None:
                folder.entries[name] = node
        folder.changes.append((self.end, changes))
        self.end += 1

    def _read(self, path: Path, node: Node) -> None:
        if not node.is_folder:
            with suppress(OSError):
                node.contents.append((self.end, path.read_bytes()))

    def heard(self, event: str, arguments: Sequence[object]) -> None:
        """An audit event, before its operation."""
        with self._lock:
            if event == "open":
                path, _, flags = arguments
                writes = isinstance(flags, int) and bool(flags & os.O_CREAT)
                if isinstance(path, str | bytes | os.PathLike) and writes:
                    self._created(Path(os.fsdecode(path)), is_folder=False)
            elif event == "os.mkdir":
                path, _, folder = arguments
                self._created(_resolved(path, folder), is_folder=True)
            elif event == "os.rename":
                source, target, source_folder, target_folder = arguments
                self._moved(_resolved(source, source_folder), _resolved(target, target_folder))
            elif event in ("os.remove", "os.rmdir"):
                path = _resolved(arguments[0], arguments[1])
                place = self._at(path)
                node = place and place[0].entries.get(place[1])
                if place and node and not node.entries:  # else it fails
                    self._read(path, node)
                    self._change(place[0], {place[1]: None})

    def _created(self, path: Path, *, is_folder: bool) -> None:
        place = self._at(path)
        if place is not None and place[1] not in place[0].entries:
            self._change(place[0], {place[1]: Node(is_folder)})

    def _moved(self, source: Path, target: Path) -> None:
        before, after = self._at(source), self._at(target)
        if before is None or before[1] not in before[0].entries:
            return
        assert after is not None, "moved out of the folder"
        assert before[0] is after[0], "moved to another folder"
        folder, moved = before[0], before[0].entries[before[1]]
        if (lost := folder.entries.get(after[1])) is not None:
            self._read(target, lost)
        self._change(folder, {before[1]: None, after[1]: moved})

    def synced(self, descriptor: int) -> None:
        """After an fsync."""
        with self._lock:
            path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
            place = self._at(path)
            node = self.above if path == self.root.parent else place and place[0].entries.get(place[1])
            if node:
                self._read(path, node)
                node.synced.append(self.end)
                self.end += 1

    def finish(self) -> None:
        """Reads what is in the files at last."""

        def read(folder: Node, path: Path) -> None:
            for name, node in folder.entries.items():
                self._read(path / name, node)
                read(node, path / name)

        read(self.above, self.root.parent)


_recording: Recording | None = None
_hooked = False


@contextmanager
def recording(root: Path) -> Iterator[Recording]:
    """Records what this process does below `root` during the block."""
    global _recording, _hooked
    if not _hooked:
        sys.addaudithook(_hear)  # Python has no way to remove it
        _hooked = True
    fsync: Callable[[int], None] = os.fsync

    def noted(descriptor: int) -> None:
        fsync(descriptor)
        record.synced(descriptor if isinstance(descriptor, int) else descriptor.fileno())

    record = _recording = Recording(root)
    os.fsync = noted  # type: ignore[assignment]
    try:
        yield record
    finally:
        os.fsync = fsync
        _recording = None
    record.finish()


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    if _recording is not None and (event == "open" or event.startswith("os.")):
        _recording.heard(event, arguments)


def _resolved(path: object, folder: object) -> Path:
    assert isinstance(path, str | bytes | os.PathLike)
    named = Path(os.fsdecode(path))
    if isinstance(folder, int) and folder >= 0 and not named.is_absolute():
        return Path(os.readlink(f"/proc/self/fd/{folder}")) / named
    return named


def _entries_after(folder: Node, time: int, draw: random.Random, ordered: bool) -> dict[str, Node]:
    kept = max((at for at in folder.synced if at < time), default=-1)
    open_changes = [changes for at, changes in folder.changes if kept < at < time]
    there = set(range(len(open_changes)))
    if ordered:
        there = set(range(draw.randint(0, len(open_changes))))
    elif draw.random() < 0.8:
        there = {number for number in there if draw.random() < 0.5}
    durable = [changes for at, changes in folder.changes if at < kept]
    entries: dict[str, Node] = {}
    for changes in [*durable, *(changes for number, changes in enumerate(open_changes) if number in there)]:
        for name, node in changes.items():
            entries.pop(name, None)
            if node is not None:
                entries[name] = node
    return entries


def _write(node: Node, time: int, draw: random.Random, ordered: bool, target: Path) -> None:
    if not node.is_folder:
        target.write_bytes(_content_after(node, time, draw))
        return
    target.mkdir()
    for name, entry in _entries_after(node, time, draw, ordered).items():
        _write(entry, time, draw, ordered, target / name)


def _content_after(node: Node, time: int, draw: random.Random) -> bytes:
    kept = max((at for at in node.synced if at < time), default=-1)
    durable = next((content for at, content in node.contents if at == kept), b"")
    later = [content for at, content in node.contents if at > kept]
    newest = later[0] if later else durable
    if newest == durable:
        return durable
    kind = draw.choice(("durable", "newest", "shorter", "holes"))
    if kind == "durable":
        return durable
    if kind == "shorter":
        return newest[: draw.randint(len(durable) if newest.startswith(durable) else 0, len(newest))]
    holes = bytearray(newest)
    if kind == "holes":
        begin = len(durable) if newest.startswith(durable) else 0
        for start in range(begin, len(holes), BLOCK):
            if draw.random() < 0.5:
                stop = min(start + BLOCK, len(holes))
                holes[start:stop] = bytes(stop - start)
    return bytes(holes)
