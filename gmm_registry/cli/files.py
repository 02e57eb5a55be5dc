"""Where commands write what they found."""

from __future__ import annotations

import os
from pathlib import Path


def check_writable(**files: Path | None) -> None:
    """Find out before a run, not after it, that a result has nowhere to go. Names are those of options.

    Raises:
        ValueError: a file cannot be written, or two options name one.
    """
    given = {name: file for name, file in files.items() if file is not None}
    for file in given.values():
        if not file.parent.is_dir():
            raise ValueError(f"{file} cannot be written: there is no folder {file.parent}")
        if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
            raise ValueError(f"{file} cannot be written")
    if len(set(given.values())) < len(given):
        raise ValueError(
            f"{' and '.join(f'--{name}' for name in given)} both name {next(iter(given.values()))}"
        )
