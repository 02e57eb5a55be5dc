"""What backend was asked for by name: argument > `use_backend` > environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from threading import Lock
from typing import Literal

import torch

from gmm_registry.errors import UnknownBackendError
from gmm_registry.registry.discovery import ANY, find

ENVIRONMENT = "GMM_REGISTRY_BACKEND"
# What os.environ looks into, without an exception for a variable that is not there.
_environment = getattr(os.environ, "_data", os.environ)
_KEY = os.environ.encodekey(ENVIRONMENT)

_is_compiling = torch.compiler.is_compiling
_scoped: ContextVar[str] = ContextVar("gmm_registry_backend", default="")
# torch.compile guards on a module global, but cannot read a context variable. So compiled code goes by
# the block entered last on any thread, and is traced again when that changes.
scope = ""
_open: dict[object, str] = {}  # the blocks that are open, in the order of entering
_lock = Lock()


def requested(argument: str | None, device: str | torch.device) -> str:
    """Return the name asked for on a type of device, or "" where the choice is automatic."""
    if _is_compiling():
        return _named(argument, scope, _kind(device))
    scoped = _scoped.get()
    if not (argument or scoped) and _KEY not in _environment:
        return ""  # as in nearly every call, at a tenth of the cost
    return _named(argument, scoped, _kind(device))


def _kind(device: str | torch.device) -> str:
    return device if isinstance(device, str) else device.type


def _named(argument: str | None, scoped: str, device: str) -> str:
    if argument or scoped:
        for spec in (argument, scoped):
            if spec and (name := _select(spec, device)):
                return name
    spec = os.environ.get(ENVIRONMENT)
    if not spec:
        return ""
    try:
        return _checked(_select(spec, device), device)
    except UnknownBackendError as error:
        raise UnknownBackendError(f"{ENVIRONMENT}={spec}: {error}") from error


def origin(argument: str | None, device: str) -> Literal["argument", "use_backend", "environment"]:
    """Say which of them `requested` has a name from, if it has one."""
    if argument and _select(argument, device):
        return "argument"
    scoped = _scoped.get()
    return "use_backend" if scoped and _select(scoped, device) else "environment"


def _select(spec: str, device: str) -> str:
    names = parse(spec)
    return names.get(device) or names.get("", "")


@lru_cache(maxsize=128)
def _checked(name: str, device: str) -> str:
    if name:
        find(device, name)
    return name


# As torch.compiler.assume_constant_result does, which imports the compiler first, and with it triton.
_named._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache(maxsize=128)
def parse(spec: str) -> dict[str, str]:
    """Read "eager" as {"": "eager"}, and "cpu=eager,npu=npu_fused" as one name a device type."""
    if not isinstance(spec, str):
        raise TypeError(
            f"a backend is asked for by a str such as 'eager', not {type(spec).__name__} {spec!r}"
        )
    names: dict[str, str] = {}
    for part in spec.split(","):
        device, equals, name = map(str.strip, part.rpartition("="))
        if not name or device in names or (equals and not device.isidentifier()):
            raise UnknownBackendError(f"{spec!r} is not of the form 'eager' or 'cpu=eager,npu=npu_fused'")
        names["" if device == ANY else device] = name
    return names


@contextmanager
def use_backend(name: str) -> Iterator[None]:
    """Choose the backend of every call inside the block, on this thread or task.

    A call that it cannot serve raises; it never falls back. Under torch.compile a call goes by the block
    entered last on any thread.

    Args:
        name: an implementation ("eager"), or one for each device type ("cpu=eager,npu=npu_fused").

    Raises:
        UnknownBackendError: no installed package offers it.

    >>> from gmm_registry import explain
    >>> with use_backend("eager"):
    ...     print(explain("cpu").chosen)
    any.eager
    """
    for device, impl in parse(name).items():
        find(device or None, impl)
    name = _within(_scoped.get(), name)
    token, block = _scoped.set(name), object()
    _enter(block, name)
    try:
        yield
    finally:
        _leave(block)  # first, since a block that ends in another context cannot reset the variable
        _scoped.reset(token)


def _within(outer: str, inner: str) -> str:
    """Add to a block's request what the block around it asks for on other devices."""
    names = parse(inner)
    if outer and "" not in names:
        names = {**parse(outer), **names}
    return ",".join(f"{device}={name}" if device else name for device, name in names.items())


def _enter(block: object, name: str) -> None:
    global scope
    with _lock:
        _open[block] = scope = name


def _leave(block: object) -> None:
    global scope
    with _lock:
        del _open[block]
        scope = next(reversed(_open.values()), "")
