"""Results of a user's rollout engine: converted where they can be, refused where they do not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from rl_platform.engines.rollout.base import Completion, Request
from rl_platform.engines.rollout.user_engines.checked_engine import CheckedEngine
from rl_platform.errors import ConfigError, WorkerError
from rl_platform.records import SamplingParams, Weights, WeightsReceived

VOCABULARY = 10
REQUESTS = [Request(0, (1, 2), 5), Request(1, (3,), 6, max_new_tokens=2)]
FINE = [Completion(0, (4, 5, 9), (-1.0, -0.5, 0.0), "stop"), Completion(1, (7, 8), (-2.0, -3.0), "length")]


class Engine:
    """Answers with `answers`; receives weights with `receipt`."""

    def __init__(self, answers: Sequence[Any] = (), receipt: Any = None, version: int = 3) -> None:
        self.answers, self.receipt, self.version = answers, receipt, version

    def receive(self, weights: Any) -> Any:
        return self.receipt

    def generate(self, requests: Any, sampling: Any, on_finished: Callable[[Any], None]) -> None:
        for answer in self.answers:
            on_finished(answer)

    def abort(self) -> None: ...

    def offload(self) -> None: ...

    def close(self) -> None:
        raise RuntimeError("already closed")


def generated(engine: Engine) -> list[Completion]:
    completions: list[Completion] = []
    CheckedEngine(engine, "mine:Engine", VOCABULARY).generate(REQUESTS, SamplingParams(3, 1.0), completions.append)
    return completions


def problem_of(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as refused:
        call()
    (problem,) = refused.value.problems
    assert (problem.key, problem.value) == ("rollout.backend", "mine:Engine")
    return problem.message


def test_results_that_fit_pass() -> None:
    assert generated(Engine(FINE[::-1])) == FINE[::-1]


@pytest.mark.parametrize("convert", [list, np.array, torch.tensor, lambda values: list(torch.tensor(values))])
def test_lists_arrays_and_tensors_become_tuples(convert: Callable[[Any], Any]) -> None:
    first = replace(FINE[0], token_ids=convert((4, 5, 9)), log_probs=convert((-1.0, -0.5, 0.0)))
    assert generated(Engine([first, FINE[1]])) == FINE


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_probs": (-1.0, -0.5)}, "request 0 has 3 token ids and 2 log-probs"),
        ({"log_probs": (-1.0, -0.5, 0.5)}, "has the log-prob 0.5, the logarithm of more than 1"),
        ({"token_ids": (4, 5, 10)}, "has the token 10, the model has 0 to 9"),
        ({"token_ids": (4, -1, 9)}, "has the token -1"),
        ({"token_ids": (4.0, 5.0, 9.0)}, "other token ids or log-probs than numbers"),
        ({"log_probs": None}, "other token ids or log-probs than numbers"),
        ({"token_ids": (1,) * 4, "log_probs": (0.0,) * 4}, "has 4 tokens"),
        ({"token_ids": (), "log_probs": ()}, "has no tokens"),
        ({"finish_reason": "eos"}, "ended by 'eos', not by one of stop, length, abort"),
        ({"index": 2}, "request 2, which is none or had one already"),
    ],
)
def test_a_response_that_does_not_fit_is_refused(change: dict[str, Any], message: str) -> None:
    assert message in problem_of(lambda: generated(Engine([replace(FINE[0], **change), FINE[1]])))


def test_a_limit_of_a_request_counts() -> None:
    long = Completion(1, (1, 2, 3), (0.0, 0.0, 0.0), "length")
    assert "request 1 has 3 tokens" in problem_of(lambda: generated(Engine([FINE[0], long])))


def test_a_response_that_was_cut_may_be_empty() -> None:
    cut = Completion(1, (), (), "abort")
    assert generated(Engine([FINE[0], cut])) == [FINE[0], cut]


def test_every_request_has_one_response() -> None:
    assert "without 1 of 2 responses, first 1" in problem_of(lambda: generated(Engine(FINE[:1])))
    assert "request 0, which is none or had one" in problem_of(lambda: generated(Engine([*FINE, FINE[0]])))
    assert "on_finished got dict" in problem_of(lambda: generated(Engine([{"index": 0}])))


def test_an_error_of_a_thread_of_the_engine_is_raised() -> None:
    class Threaded(Engine):
        def generate(self, requests: Any, sampling: Any, on_finished: Callable[[Any], None]) -> None:
            def answer() -> None:
                with pytest.raises(ConfigError):
                    on_finished(replace(FINE[0], index=7))
                for each in FINE:
                    on_finished(each)

            thread = threading.Thread(target=answer)
            thread.start()
            thread.join()

    assert "request 7" in problem_of(lambda: generated(Threaded()))


@pytest.mark.parametrize(
    ("receipt", "version", "message"),
    [
        (None, 3, "receive returned NoneType"),
        (WeightsReceived(0, 8, 1), 3, "receive returned 0 after weights of version 3"),
        (WeightsReceived(3, 8, 1), -1, "its attribute version is -1 after weights of version 3"),
    ],
)
def test_a_receipt_names_the_version(receipt: Any, version: int, message: str) -> None:
    engine = CheckedEngine(Engine(receipt=receipt, version=version), "mine:Engine", VOCABULARY)
    assert message in problem_of(lambda: engine.receive(Weights(3, {})))


def test_an_exception_has_the_users_traceback() -> None:
    with pytest.raises(WorkerError, match=r"rollout.backend mine:Engine raised RuntimeError at .*already closed"):
        CheckedEngine(Engine(), "mine:Engine", VOCABULARY).close()
