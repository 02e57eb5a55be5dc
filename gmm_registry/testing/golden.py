"""Results in a file, so that two kinds of hardware can be compared that never sit in one machine."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from gmm_registry import environment
from gmm_registry.testing.cases import Case, digest
from gmm_registry.testing.parity import Outputs, Result, differences, judged

_FORMAT = "gmm_registry parity 1"
_SEPARATOR = "|"


class GoldenError(ValueError):
    """A file of results that cannot be used; the message says why."""


@dataclass(frozen=True)
class Golden:
    """Outputs by backend and case, with where they came from and the fingerprint of each case's inputs.

    ``refused`` are the cases that none of the backends took.
    """

    environment: dict[str, str]
    inputs: dict[str, str]
    refused: frozenset[str]
    outputs: dict[tuple[str, str], Outputs]


def save(
    path: Path, device: str, cases: Collection[Case], outputs: Mapping[tuple[str, str], Outputs]
) -> None:
    """Write outputs, keyed by backend and case name, to a safetensors file."""
    from safetensors.torch import save_file

    tensors = {
        _SEPARATOR.join((backend, case, name)): tensor.contiguous()
        for (backend, case), output in outputs.items()
        for name, tensor in output._asdict().items()
    }
    metadata = {
        "format": _FORMAT,
        "environment": json.dumps(environment.describe(device)),
        "inputs": json.dumps({case.name: case.inputs().fingerprint() for case in cases}),
        "refused": json.dumps(sorted({case.name for case in cases} - {case for _, case in outputs})),
        "digests": json.dumps({name: digest(tensor) for name, tensor in tensors.items()}),
    }
    save_file(tensors, path, metadata)


def load(path: Path) -> Golden:
    """Read what `save` wrote.

    Raises:
        GoldenError: the file is none of ours, or a number in it is not what was written.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise GoldenError(f"{path} cannot be read: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise GoldenError(
            f"{path} has the format {metadata.get('format')!r}, not {_FORMAT!r}: "
            "it was not written by 'gmm-registry parity --save'"
        )
    try:
        digests, inputs, where = (
            dict(json.loads(metadata[name])) for name in ("digests", "inputs", "environment")
        )
        refused = frozenset(json.loads(metadata.get("refused", "[]")))
    except (KeyError, TypeError, ValueError) as error:
        raise GoldenError(f"{path} is damaged; its metadata cannot be read: {error!r}") from error
    wanted = digests.keys() | {
        _SEPARATOR.join((*name.split(_SEPARATOR)[:2], field)) for name in tensors for field in Outputs._fields
    }
    changed = sorted(
        name
        for name in wanted | tensors.keys()
        if name not in tensors or digests.get(name) != digest(tensors[name])
    )
    if changed:
        named = "; ".join(name.replace(_SEPARATOR, ", ") for name in changed)
        raise GoldenError(f"{path} is damaged; not what was saved: {named}")
    outputs = {
        (backend, case): Outputs(
            *(tensors[_SEPARATOR.join((backend, case, field))] for field in Outputs._fields)
        )
        for backend, case in {tuple(name.split(_SEPARATOR)[:2]) for name in tensors}
    }
    return Golden(where, inputs, refused, outputs)


def check_inputs(golden: Golden, cases: Iterable[Case]) -> None:
    """Raise GoldenError if a case or its outputs are missing there, or it was computed from other inputs."""
    if not golden.outputs:
        raise GoldenError("the file holds no outputs: no backend could run where it was saved")
    there = {case for _, case in golden.outputs} | golden.refused
    for case in cases:
        if case.name not in there:
            raise GoldenError(
                f"the file holds no outputs of case {case.name!r}, nor that they were refused: "
                "another version wrote it, or part of it is gone"
            )
        if case.name not in golden.inputs:
            raise GoldenError(f"the file has no case {case.name!r}: another version wrote it")
        if golden.inputs[case.name] != case.inputs().fingerprint():
            raise GoldenError(f"case {case.name!r} was computed from other inputs")


def compare_golden(
    golden: Golden, cases: Iterable[Case], outputs: Mapping[tuple[str, str], Outputs]
) -> list[Result]:
    """Compare outputs of this machine with every backend's of the other, case by case."""
    where = golden.environment.get("device", "another machine")
    results = []
    for case in cases:
        theirs = {backend: out for (backend, name), out in golden.outputs.items() if name == case.name}
        ours = {backend: out for (backend, name), out in outputs.items() if name == case.name}
        results += [
            judged(backend, case.name, f"{other} on {where}", differences(got, want, case))
            for backend, got in sorted(ours.items())
            for other, want in sorted(theirs.items())
        ]
    return results
