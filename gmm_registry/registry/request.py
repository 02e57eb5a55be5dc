"""What backend was asked for by name: argument > `use_backend` > environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache

import torch

from gmm_registry.errors import UnknownBackendError
from gmm_registry.registry.discovery import find

ENVIRONMENT = "GMM_REGISTRY_BACKEND"

_scoped: ContextVar[str] = ContextVar("gmm_registry_backend", default="")
# A copy of the context variable for torch.compile alone, which guards on a module global but cannot
# read a context variable: a compiled function is traced again when this changes.
scope = ""


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def requested(argument: str | None, device: str, scope: str) -> str:
    """Return the name asked for on a device type, or "" where the choice is automatic.

    ``scope`` is this module's, passed so that a traced call depends on it.
    """
    for spec in (argument, _scoped.get(), os.environ.get(ENVIRONMENT)):
        if spec:
            names = parse(spec)
            name = names.get(device) or names.get("")
            if name:
                return name
    return ""


@lru_cache(maxsize=128)
def parse(spec: str) -> dict[str, str]:
    """Read "eager" as {"": "eager"}, and "cuda=triton,npu=npu_fused" as one name a device type."""
    names = {}
    for part in spec.split(","):
        device, equals, name = part.rpartition("=")
        names[device.strip()] = name.strip()
        if not name.strip() or bool(equals) != bool(device.strip()):
            raise UnknownBackendError(f"{spec!r} is not of the form 'eager' or 'cuda=triton,npu=npu_fused'")
    return names


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of every call inside the block, on this thread or task.

    A call that it cannot serve raises; it never falls back.

    Args:
        name: an implementation ("eager"), or one for each device type ("cuda=triton,npu=npu_fused").

    Raises:
        UnknownBackendError: no installed package offers it.

    >>> with use_backend("eager"):
    ...     requested(None, "cpu", scope)
    'eager'
    """
    global scope
    for device, impl in parse(name).items():
        find(device or None, impl)
    token, outer = _scoped.set(name), scope
    scope = name
    try:
        yield
    finally:
        _scoped.reset(token)
        scope = outer
