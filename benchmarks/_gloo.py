"""A second process that receives the weights' buckets by gloo's broadcast, for benchmarks/weights.py."""

from __future__ import annotations

import multiprocessing
from collections.abc import Mapping
from typing import Any

TIMEOUT_S = 120.0


class Broadcast:
    """The two ranks of a process group on this machine. `send` returns when the other one has all of the state.

    The buckets are those of `runtime/weights/store.py`: packed here, broadcast one after the other, and copied into the
    other's tensors. `checked`: each carries its checksum, which is taken on both sides.
    """

    def __init__(self, state: Mapping[str, Any]) -> None:
        from rl_platform.runtime.process_group import Rendezvous, join_group
        from rl_platform.runtime.weights.base import BUCKET, shapes_of

        meeting = Rendezvous("127.0.0.1", 2)
        context = multiprocessing.get_context("spawn")
        self._line, theirs = context.Pipe()
        self._process = context.Process(target=_receive, args=(theirs, meeting.port, shapes_of(state)))
        self._process.start()
        theirs.close()
        join_group(meeting, 0, 2, TIMEOUT_S, cuda=False)
        self._state, self._bucket = state, BUCKET

    def send(self, checked: bool) -> None:
        import torch
        import torch.distributed as dist

        from rl_platform.runtime.weights.base import checksum_of, shapes_of

        self._line.send(checked)
        packed = torch.empty(self._bucket, dtype=torch.uint8)
        for _, parts in _parts(self._state, shapes_of(self._state)):
            start = 0
            for part in parts:
                packed[start : start + part.size] = torch.from_numpy(part)
                start += part.size
            dist.broadcast(packed[:start], 0)
            if checked:
                dist.broadcast(torch.frombuffer(bytearray(checksum_of(parts)), dtype=torch.uint8), 0)
        self._line.recv()

    def total(self) -> float:
        """The sum of what arrived."""
        self._line.send(None)
        found: float = self._line.recv()
        return found

    def close(self) -> None:
        from rl_platform.runtime.process_group import leave_group

        self._line.close()
        leave_group()
        self._process.join()


def _parts(state: Any, tensors: Any) -> Any:
    """The buckets of distinct tensors, as `publish` cuts them."""
    from rl_platform.runtime.weights.base import BUCKET, bytes_of, in_buckets

    flat = ((tensor.name, bytes_of(state[tensor.name])) for tensor in tensors if tensor.same_as is None)
    return in_buckets(flat, BUCKET)


def _receive(line: Any, port: int, tensors: Any) -> None:
    """Until the line closes: a broadcast of all buckets for each `checked`, the sum for None."""
    import torch
    import torch.distributed as dist

    from rl_platform.runtime.process_group import join_group, leave_group
    from rl_platform.runtime.weights.base import BUCKET, checksum_of, empty

    join_group(("127.0.0.1", port), 1, 2, TIMEOUT_S, cuda=False)
    state = empty(tensors)
    packed, checksum = torch.empty(BUCKET, dtype=torch.uint8), torch.empty(16, dtype=torch.uint8)
    while True:
        try:
            checked = line.recv()
        except EOFError:
            leave_group()
            return
        if checked is None:
            line.send(float(sum(tensor.double().sum() for tensor in state.values())))
            continue
        for _, parts in _parts(state, tensors):
            dist.broadcast(packed[: sum(part.size for part in parts)], 0)
            start = 0
            for part in parts:
                torch.from_numpy(part).copy_(packed[start : start + part.size])
                start += part.size
            if checked:
                dist.broadcast(checksum, 0)
                if checksum_of(parts) != checksum.numpy().tobytes():
                    raise SystemExit("a bucket arrived damaged")
        line.send(None)
