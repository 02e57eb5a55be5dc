"""The backends of this repository, each one adapter, found through entry points like anybody else's."""
