"""Signals that end a run: SIGINT (Ctrl-C), SIGTERM (a batch system), SIGHUP (the terminal was closed).

A signal has one of three effects, by the stage that the command is in:

1. from `handle_signals` on, the process ends at once: nothing was started that outlives it;
2. within `shutting_down`, `Interrupted` is raised in the main thread, which ends what was started;
3. within `stopping_after_step`, the loop ends after the step. A second Ctrl-C acts as in stage 2, and so does the end
   of a grace period after SIGTERM and SIGHUP. Where a step can be dropped, that end raises `StepDropped` instead.

While the command shuts down, another Ctrl-C ends the process at once. Signals that the command inherited as ignored
(`nohup`, a shell's background job) stay ignored.

A program that calls a run handles its own signals. `interruptible` gives it stages 2 and 3 for Ctrl-C, and never ends
the process.
"""

from __future__ import annotations

import _thread
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
HELD_FROM_CHILDREN = (signal.SIGINT, signal.SIGHUP)  # a terminal sends them to all; SIGTERM ends Ray's processes
WORDS = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated", signal.SIGHUP: "the terminal was closed"}
SAME_PRESS_S = 0.1  # programs such as timeout send one signal to the process and again to its group
SHUTDOWN_S = 30.0  # a shutdown that takes longer is cut off
AGAIN_S = 0.05
_SHOW_CURSOR = b"\x1b[?25h"  # the live view hides it


class Interrupted(KeyboardInterrupt):
    """A signal ends the run. exit_code: that of a process ended by the signal, in a shell."""

    def __init__(self, number: int) -> None:
        self.exit_code, self.word = 128 + number, WORDS[signal.Signals(number)]
        super().__init__(self.word)


class StepDropped(Interrupted):
    """The grace period is too short for the step, which has changed nothing yet that a checkpoint stores."""


class Stop:
    """A request to end after a step. The loop sets `step`, the number of its current step, from 1."""

    def __init__(self, grace_s: float, note: Callable[[str], None]) -> None:
        self.step = 0
        self.number: int | None = None  # of the signal that requested it
        self._grace_s, self._note = grace_s, note
        self._ends = math.inf  # the end of the grace period
        self._answered = self._expired = self._droppable = False

    def due(self) -> bool:
        """Returns whether the run ends after this step. The loop calls it when the work of a step is done.

        If it returns True, the grace period does not cut off the checkpoint that follows.
        """
        self._answered = self.number is not None
        return self._answered

    @contextmanager
    def droppable(self, left_s: float | None) -> Iterator[None]:
        """Within the block the end of the grace period raises StepDropped. The end of the block raises it if less than
        `left_s` seconds of the period are left then: the rest of the step takes so long.

        left_s None: the step cannot be dropped, and the end of the grace period raises Interrupted.
        """
        if left_s is None:
            yield
            return
        self._droppable = True
        try:
            yield
            if time.monotonic() + left_s > self._ends:
                raise self.dropped()
        finally:
            self._droppable = False

    def drops(self, number: int) -> bool:
        """Returns whether a signal that `accept` refused raises `dropped()`. The signal handler calls it."""
        return self._droppable and self._expired and number != signal.SIGINT

    def dropped(self) -> StepDropped:
        assert self.number is not None
        self._answered = True
        return StepDropped(self.number)

    def accept(self, number: int) -> bool:
        """Returns whether the run waits for the end of the step. The signal handler calls it."""
        interrupt, first = number == signal.SIGINT, self.number is None
        if self._expired or (interrupt and not first) or (not interrupt and self._grace_s == 0):
            return False
        repeated = not interrupt and self.number not in (None, signal.SIGINT)
        self.number = number
        if repeated:
            return True
        if interrupt:
            text = f"stopping after step {self.step}, press Ctrl-C again to leave now"
        else:
            self._ends = time.monotonic() + self._grace_s
            _later(self._grace_s, self._expire)
            word = WORDS[signal.Signals(number)]
            limit = f"at most {self._grace_s:g} s from now (runner.stop_grace_s)"
            text = f"{word}: stopping after step {self.step}, {limit}"
        _later(0.0, self._note, text)
        return True

    def close(self) -> None:
        self._answered = True

    def _expire(self) -> None:
        if not self._answered and self.number is not None:
            self._expired = True
            os.kill(os.getpid(), self.number)


class _Signals:
    """State of the signal handler."""

    def __init__(self) -> None:
        self.raises = self.leaving = False
        self.ends_process = True
        self.stop: Stop | None = None
        self._last = (0, 0.0)

    def handle(self, number: int, frame: FrameType | None) -> None:
        last, self._last = self._last, (number, time.monotonic())
        if last[0] == number == signal.SIGINT and self._last[1] - last[1] < SAME_PRESS_S:
            return
        if self.leaving:
            if number == signal.SIGINT:
                self._end(number)
        elif not self.raises:
            self._end(number)
        elif self.stop is None or not self.stop.accept(number):
            self._raise(number, frame)

    def _end(self, number: int) -> None:
        if self.ends_process:
            _exit(number)
        raise Interrupted(number)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        if _imports(frame):  # an exception in the middle of a C++ module's import may abort the process
            _later(AGAIN_S, self._again, number)
            return
        if self.stop is not None and self.stop.drops(number):
            raise self.stop.dropped()
        self.leaving = True
        if self.ends_process:
            _later(SHUTDOWN_S, _exit, number)
        raise Interrupted(number)

    def _again(self, number: int) -> None:
        self._last = (0, 0.0)
        os.kill(os.getpid(), number)


_signals = _Signals()


def handle_signals() -> None:
    """Sets the signal handlers, once at the start of a command and before it imports large libraries."""
    _signals.raises, _signals.leaving = False, False
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _signals.handle)
    sys.unraisablehook = _unraisable
    wake_main_thread()


def wake_main_thread() -> None:
    """From now on, each signal with a Python handler interrupts a waiting main thread. The main thread calls it.

    The kernel gives a signal to any thread of the process, but Python's handlers run in the main thread. They would run
    only at the end of its system call, which may wait forever.
    """
    signal.signal(signal.SIGURG, lambda *_: None)  # without a handler it would interrupt nothing
    signal.set_wakeup_fd(_wake_up_pipe(os.getpid()), warn_on_full_buffer=False)


@lru_cache(maxsize=1)
def _wake_up_pipe(process: int) -> int:
    """Returns the end of a pipe to which Python writes the numbers of signals, and starts the thread that reads them.

    process: this one; a fork has no threads of its parent.
    """
    received, written = os.pipe()
    os.set_blocking(written, False)
    main_thread = threading.get_ident()

    def wake() -> None:
        while numbers := os.read(received, 4096):
            if set(numbers) != {signal.SIGURG}:
                signal.pthread_kill(main_thread, signal.SIGURG)

    _thread.start_new_thread(wake, ())
    return written


def take_back() -> None:
    """Restores the handlers in the main thread, after Ray has put its own in their place: Ray's aborts the process."""
    if threading.current_thread() is threading.main_thread():
        for number in SIGNALS:
            signal.signal(number, signal.getsignal(number))


@contextmanager
def interruptible() -> Iterator[None]:
    """Within the block of a program that continues afterwards, Ctrl-C lets a run save before Interrupted is raised.

    That is so in the main thread while Python's own handler of Ctrl-C is installed. Otherwise nothing changes. Handlers
    that the run or Ray has replaced are restored.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in SIGNALS}
    own = before[signal.SIGINT] is signal.default_int_handler
    if own:
        _signals.ends_process = _signals.raises = _signals.leaving = False
        signal.signal(signal.SIGINT, _signals.handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler is not None:  # None: a handler that is not Python's
                signal.signal(number, handler)
        if own:
            _signals.ends_process, _signals.raises, _signals.leaving = True, False, False


@contextmanager
def shutting_down() -> Iterator[None]:
    """Within the block a signal raises Interrupted in the main thread."""
    _signals.raises = True
    try:
        yield
    finally:
        _signals.raises = _signals.leaving


@contextmanager
def stopping_after_step(grace_s: float, note: Callable[[str], None]) -> Iterator[Stop]:
    """Within the block a signal is a request that the loop reads from `Stop`; raises Interrupted at the end of the
    block if there was one.

    grace_s: how long after SIGTERM and SIGHUP the step may take, in seconds; 0: no time. note: shows a sentence to the
    user, called in a thread of its own.
    """
    stop = _signals.stop = Stop(grace_s, note)
    try:
        yield stop
    finally:
        _signals.stop = None
        stop.close()
    if stop.number is not None:
        _signals.leaving = True
        raise Interrupted(stop.number)


def _imports(frame: FrameType | None) -> bool:
    while frame is not None and not frame.f_code.co_filename.startswith("<frozen importlib"):
        frame = frame.f_back
    return frame is not None


def _later(seconds: float, action: Callable[..., None], *arguments: object) -> None:
    """Calls `action` later, in a new thread: a threading.Thread takes a lock that interrupted code may hold."""

    def run() -> None:
        time.sleep(seconds)
        action(*arguments)

    _thread.start_new_thread(run, ())


def _exit(number: int) -> None:
    """Ends the process without the interpreter's cleanup, which a signal could interrupt again."""
    with suppress(OSError):
        if _signals.leaving and os.isatty(1):
            os.write(1, _SHOW_CURSOR)
        os.write(2, f"\n{WORDS[signal.Signals(number)]}\n".encode())
    os._exit(128 + number)


def _unraisable(unraisable: sys.UnraisableHookArgs) -> None:
    """Sends the signal of an Interrupted again that Python dropped, as it was raised in `__del__` or a callback."""
    if isinstance(unraisable.exc_value, Interrupted):
        _signals.leaving = False
        _later(AGAIN_S, _signals._again, unraisable.exc_value.exit_code - 128)
    else:
        sys.__unraisablehook__(unraisable)
