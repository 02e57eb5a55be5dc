"""Backends to be measured, chosen and repeated, and what the tests ask about them."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

from gmm_backends.eager import Eager
from gmm_registry import Problem, explain, gmm
from gmm_registry.cli.app import app
from gmm_registry.registry import records
from gmm_registry.registry.records import Machine, Signature

PROBLEM = Problem("cpu", None, torch.float32, rows=64, groups=4, k=8, n=16)
DIRECTIONS = ("forward", "grad_x", "grad_w")
FAST = {"uniform": 1.0, "zipf": 1.0}
ran: list[str] = []  # the implementation of every product of a stub


class Stub(Eager):
    """The loop over groups, noting that it was called."""

    def priority(self, problem: Problem) -> int:
        return 50

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append(self.impl)
        return super().forward(*args, **kwargs)

    def weight_grad(self, *args: Any, **kwargs: Any) -> Tensor:
        ran.append(self.impl)
        return super().weight_grad(*args, **kwargs)


class Preferred(Stub):
    """What the table chooses."""

    def priority(self, problem: Problem) -> int:
        return 90


class EvenOnly(Stub):
    def rejections(self, problem: Problem) -> list[str]:
        assert problem.skew is None
        return super().rejections(problem)

    def priority(self, problem: Problem) -> int:
        return 90 if problem.skew == 1 else 10


class ForwardOnly(Preferred):
    """It says itself that it is slow backward."""

    asked: ClassVar[list[str]] = []

    def rejections(self, problem: Problem) -> list[str]:
        self.asked.append(problem.direction)
        return []

    def priority(self, problem: Problem) -> int:
        return 90 if problem.direction == "forward" else 10


class Refusing(Stub):
    """It has changed its mind since it was measured."""

    def rejections(self, problem: Problem) -> list[str]:
        return ["closed today"]


class Missing(Stub):
    """It says yes, but its kernel is not there."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        raise NotImplementedError("no kernel for sm_89")


class Faulty(Stub):
    """Half of its kernels fail."""

    def weight_grad(self, *args: Any, **kwargs: Any) -> Tensor:
        raise RuntimeError("out of\nluck")


class Wrong(Stub):
    """One row of its result is wrong."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = super().forward(*args, **kwargs)
        result[-1] *= 1.1
        return result


class Unwritten(Stub):
    """It leaves a row as it was."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        result = super().forward(*args, **kwargs)
        result[-1] = torch.nan
        return result


class Shapeless(Stub):
    """It returns something else."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)[1:]


class Slow(Stub):
    """It takes a second, by the clock of these tests."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        Clock.now += 1
        return super().forward(*args, **kwargs)


class Clock:
    """Everything else takes a tenth of a millisecond."""

    now = 0.0

    def __call__(self) -> float:
        Clock.now += 1e-4
        return Clock.now


Offer = Callable[..., None]
Times = dict[str, dict[str, float]]


def operands(rows: int = 64, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, list[int]]:
    return torch.ones(rows, 8, dtype=dtype), torch.ones(4, 8, 16, dtype=dtype), [1, 2, 0, rows - 3]


def impls(rows: int = 64, **kwargs: Any) -> list[str]:
    """Return the implementations of forward, grad_x and grad_w."""
    ran.clear()
    x, weight, sizes = operands(rows)
    gmm(x.requires_grad_(), weight.requires_grad_(), sizes, **kwargs).sum().backward()
    return ran[:]


def chosen(problem: Problem = PROBLEM) -> tuple[str, str]:
    explanation = explain("cpu", problem)
    return str(explanation.chosen), explanation.source


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def command(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def valid(**changes: object) -> dict[str, object]:
    """Return an entry of a file, changed."""
    entry: dict[str, object] = {
        **Signature.of(PROBLEM)._asdict(),
        **Machine.of(PROBLEM)._asdict(),
        "backend": "cpu.quick",
        "distribution": "stubs 1.0",
        "source": "tuned",
        "ms": 1.0,
    }
    return {**entry, **changes}


def document(*entries: object) -> bytes:
    return json.dumps({"format": records._FORMAT, "choices": entries}).encode()


DAMAGED = {
    "empty": b"",
    "not JSON": b'{"format": "gmm_registry choices 1", "choices": [',
    "binary": bytes(range(256)),
    "deep": b"[" * 100_000,
    "another document": b'{"name": "left-pad", "version": "1.3.0"}',
    "a list": b"[]",
    "a later format": b'{"format": "gmm_registry choices 2", "choices": []}',
    "no choices": json.dumps({"format": records._FORMAT}).encode(),
    "an entry that is none": document(3),
    "a field missing": document({"device": "cpu"}),
    "a field of another type": document(valid(groups=[4])),
    "a field too many": document(valid(extra=1)),
    "a key that is none": document(valid(backend="quick")),
    "a key for another device": document(valid(backend="cuda.quick")),
}


def damage(path: Path, kind: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(DAMAGED[kind])
