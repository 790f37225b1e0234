"""The interface of a runtime: it starts the components of a placement, connects them by channels and stops them.

Runners and components use this interface only. A runtime for another kind of cluster is one more module beside `local`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, Protocol, Self

from rl_platform.errors import ChannelClosed, PlatformError, WorkerDied, message_of
from rl_platform.runtime.channel import Channel
from rl_platform.runtime.host import ComponentSpec
from rl_platform.runtime.worker_group import WorkerGroup
from rl_platform.tracing import TraceSpan

__all__ = ["ComponentSpec", "Runtime"]

START_S = 1800.0  # of `cluster.start_timeout_s`: a large model is downloaded and sharded
SHUTDOWN_S = 10.0
INTERRUPTED_S = 3.0  # on Ctrl-C, where a person waits


class Runtime(Protocol):
    """A context manager that runs the components of one placement and shuts down at its end; because of an error, if
    there is one. Its constructor takes placement, deadline and seed.

    A runtime whose hosts are processes must also guarantee:
    - components of one host share one process and its `shared` dict; each rank's calls run in order, ranks run side
      by side;
    - a Worker's future raises a PlatformError as it was raised, and anything else as WorkerError with the remote
      traceback; a process or node that ends is WorkerDied, within seconds and not at the deadline;
    - a channel has the methods and meanings of `Channel`: exactly once or an error, back-pressure, deadlines that name
      the waiting thread and the state of the others, and order within a key per producer; a killed consumer closes it
      with an error, so that no item is lost unnoticed;
    - when a call fails or a process dies, channels that name this rank as producer or consumer are closed with that
      error;
    - `shutdown` and the end of the launching process end every process it started.
    """

    def start(self, components: Mapping[str, ComponentSpec]) -> dict[str, WorkerGroup]:
        """Constructs all ranks of all components and returns their groups; closes everything if one fails."""

    def channel(
        self, name: str, capacity: int, producers: Iterable[str] = (), consumers: Iterable[str] = ()
    ) -> Channel[Any]:
        """Returns a bounded stream between the named components, single ranks or `runner`."""

    @property
    def restarts(self) -> int:
        """Processes that were started again so far."""

    def restartable(self, component: str) -> bool:
        """Returns whether `restart` would start a process of this component, should it die now."""

    def restart(self, error: WorkerDied, settle: Callable[[], None]) -> list[tuple[str, int]]:
        """Starts the processes that died, after a call or channel failed with `error`, and returns their ranks.

        Their components are as their constructors left them, and channels of theirs stay closed. `settle` returns when
        no call is under way that uses such a channel. Raises WorkerDied, the reason to end the run, if a process is
        gone that is not started again.
        """

    def fail(self, error: PlatformError) -> None:
        """Closes every channel with `error`."""

    def spans(self) -> list[TraceSpan]:
        """Returns what hosts that are processes recorded for the timeline; they record no more then."""

    def shutdown(self, timeout: float = SHUTDOWN_S) -> None:
        """Stops everything within a bounded time; again: does nothing."""

    def shutdown_after(self, error: BaseException) -> None:
        """Shuts down because of `error`, which is the one reported: later failures become notes of it."""
        stopped = ChannelClosed(f"the run was stopped by {type(error).__name__}: {message_of(error)}")
        news = error if isinstance(error, PlatformError) else stopped
        timeout = INTERRUPTED_S if isinstance(error, KeyboardInterrupt) else SHUTDOWN_S
        for step in (partial(self.fail, news), partial(self.shutdown, timeout)):
            try:
                step()
            except PlatformError as failure:
                error.add_note(f"while shutting down: {failure}")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.shutdown()
        else:
            self.shutdown_after(error)
