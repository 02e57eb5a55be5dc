"""Find backends through entry points, import them one at a time, and keep the cause of every failure.

This is the only module that imports stevedore.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import re
import sys
from dataclasses import dataclass
from functools import cache
from importlib.metadata import Distribution, EntryPoint, MetadataPathFinder, distributions
from pathlib import Path
from typing import Any

import torch
from stevedore.driver import DriverManager

from gmm_registry.contract import BackendKey, GroupedMatmulBackend
from gmm_registry.errors import DuplicateBackendError, UnknownBackendError, did_you_mean

_log = logging.getLogger("gmm_registry")
GROUP = "gmm_registry.backends"
ANY = "any"  # the device type of a backend that runs wherever torch does
FATAL = (KeyboardInterrupt, GeneratorExit)  # the only exceptions of a plugin that get out


@dataclass(frozen=True)
class Offer:
    """One distribution's offer of a backend: an entry point, not yet imported."""

    name: str
    value: str
    distribution: str
    version: str
    entry_point: EntryPoint

    def __str__(self) -> str:
        return f"{self.distribution} {self.version} ({self.value})"


@cache
def offers() -> dict[str, tuple[Offer, ...]]:
    """Return every offer by entry-point name, importing nothing; more than one under a name is a conflict.

    A distribution that stands on `sys.path` twice counts once, the first time, as for Python itself.
    One whose metadata cannot be read offers nothing, and that is logged.
    The path is scanned here rather than through stevedore, whose cache (in the process and on disk)
    forgets which distribution an entry point came from, and rather than through
    `importlib.metadata.entry_points`, where a stale empty dist-info hides the real one.
    """
    found: dict[str, list[Offer]] = {}
    seen = set()
    for distribution in distributions():
        try:
            ours = {point.name: point for point in distribution.entry_points if point.group == GROUP}
            if not ours:
                continue
            name, version = _identity(distribution)
        except Exception as error:
            place = getattr(distribution, "_path", distribution)
            _log.warning("the metadata of %s cannot be read: %s: %s", place, type(error).__name__, error)
            continue
        normal = re.sub(r"[-_.]+", "-", name).lower()
        if normal not in seen:
            seen.add(normal)
            for key, point in ours.items():
                found.setdefault(key, []).append(Offer(key, point.value, name, version, point))
    return {key: tuple(offers) for key, offers in sorted(found.items())}


def list_backends(device: str | torch.device | None = None) -> list[BackendKey]:
    """List the keys that installed packages offer, for one device or all; imports no plugin.

    >>> [str(key) for key in list_backends("cpu")]
    ['any.eager', 'any.torch_grouped_mm', 'cpu.megablocks_sparse']
    """
    wanted = None if device is None else (parse_device(device)[0], ANY)
    keys = filter(None, map(_key, offers()))
    return sorted(key for key in keys if wanted is None or key.device in wanted)


@cache
def candidates(device: str) -> tuple[BackendKey, ...]:
    """Return the keys for a device type, its own backends first: what they import may bring the device."""
    return tuple(sorted(list_backends(device), key=lambda key: key.device == ANY))


def _key(name: str) -> BackendKey | None:
    try:
        return BackendKey.parse(name)
    except ValueError:
        return None  # `doctor` shows it


def find(device: str | None, name: str) -> BackendKey:
    """Find the key that ``name`` ("eager" or "any.eager") means on a device type, or on some device.

    Raises:
        UnknownBackendError: there is none; the message lists those there are.
    """
    keys = list_backends(device)
    matching = [key for key in keys if name in (key.impl, str(key))]
    if matching:
        return min(matching, key=lambda key: key.device == ANY)
    elsewhere = [str(key) for key in list_backends() if name in (key.impl, str(key))]
    raise UnknownBackendError(
        f"no backend {name!r}{f' for {device}' if device else ''}; known: "
        f"{', '.join(map(str, keys)) or 'none'}"
        + did_you_mean(name, {key.impl for key in keys})
        + (f"; there is {', '.join(elsewhere)} for another device" if elsewhere else "")
    )


def parse_device(device: str | torch.device) -> tuple[str, int | None]:
    """Split "cuda:1" into type and index.

    `torch.device` would not do: it refuses the name of a device whose package is not imported.
    """
    if not isinstance(device, (str, torch.device)):
        raise TypeError(f"a device is a str or torch.device, not {type(device).__name__} {device!r}")
    kind, colon, index = str(device).partition(":")
    if not kind.isidentifier() or (colon and not index.isdecimal()):
        raise ValueError(f"{device!r} names no device; give a type such as 'cpu', 'cuda:1' or 'npu'")
    return kind, int(index) if colon else None


def _identity(distribution: Distribution) -> tuple[str, str]:
    metadata = distribution.metadata
    names, versions = (metadata.get_all(field, []) for field in ("Name", "Version"))
    if not names:
        raise ValueError("it has no Name")
    return names[0], (versions or ["?"])[0]


class _Driver(DriverManager[Any]):
    """stevedore's loader of a single plugin, over our own scan."""

    def list_entry_points(self) -> list[EntryPoint]:
        return [offer.entry_point for same in offers().values() for offer in same]


def _refuse_conflict(namespace: str, name: str, extensions: list[Any]) -> Any:
    raise _conflict(name)


def _conflict(name: str) -> DuplicateBackendError:
    return DuplicateBackendError(
        f"backend {name!r} is offered by {len(offers()[name])} distributions: "
        f"{', '.join(sorted(map(str, offers()[name])))}; uninstall all but one"
    )


@cache
def load(name: str) -> type[GroupedMatmulBackend] | BaseException:
    """Import the backend behind an entry point; return the exception if that cannot be done.

    Only this one is imported. Nothing that a plugin raises gets out but a keyboard interrupt: a module can
    also raise SystemExit, AssertionError, or a BaseException of its own, as extensions in Rust do.
    """
    try:
        BackendKey.parse(name)
        if name not in offers():
            raise UnknownBackendError("no installed package offers it")
        offer, *others = offers()[name]
        if others:
            raise _conflict(name)  # before stevedore imports both
        if not EntryPoint.pattern.match(offer.value):
            raise ValueError(f"{offer.value!r} is not of the form 'module:attribute'")
        driver = _Driver(GROUP, name, conflict_resolver=_refuse_conflict)
        return _checked(driver.driver, offer.value)
    except FATAL:
        raise
    except BaseException as error:
        return error


def _checked(plugin: object, value: str) -> type[GroupedMatmulBackend]:
    if not (isinstance(plugin, type) and issubclass(plugin, GroupedMatmulBackend)):
        raise TypeError(f"{value} is not a subclass of gmm_registry.contract.GroupedMatmulBackend")
    if inspect.isabstract(plugin):
        missing = ", ".join(sorted(plugin.__abstractmethods__))
        raise TypeError(f"{value} does not implement {missing}")
    return plugin


def stale_metadata() -> list[Path]:
    """Return the dist-info folders on `sys.path` without METADATA: leftovers that can hide a real package."""
    found = set()
    for entry in sys.path:
        try:
            folders = list(Path(entry or ".").glob("*.dist-info"))
            found |= {folder for folder in folders if not (folder / "METADATA").exists()}
        except OSError:
            continue  # a place that cannot be read hides nothing
    return sorted(found)


def forget() -> None:
    """Scan `sys.path` again and import again at the next question, after a package was installed."""
    # Python's finders go by the times of folders, which are coarse.
    importlib.invalidate_caches()
    MetadataPathFinder().invalidate_caches()  # the line above does not reach it before Python 3.12
    offers.cache_clear()
    candidates.cache_clear()
    load.cache_clear()
