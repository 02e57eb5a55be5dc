"""`python -m gmm_registry` is `gmm-registry`."""

from gmm_registry.cli import main  # noqa: TID251

main()
