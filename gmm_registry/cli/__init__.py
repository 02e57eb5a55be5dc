"""The command line: gmm-registry list, explain, parity, bench, doctor."""

import sys


def main() -> None:
    """Run the command line, or say what it needs."""
    try:
        from gmm_registry.cli.app import app
    except ModuleNotFoundError as error:
        if error.name not in ("typer", "rich"):
            raise
        sys.exit(f"gmm-registry needs {error.name}: pip install 'gmm_registry[cli]'")
    app()
