"""What can go wrong, by name. Bad shapes and counts are ValueError, bad types TypeError."""


class GmmRegistryError(Exception):
    """Base of every error that is about backends rather than about one call's arguments."""


class UnknownBackendError(GmmRegistryError, LookupError):
    """A backend was asked for by a name that no installed distribution offers."""


class BackendUnavailableError(GmmRegistryError, RuntimeError):
    """Every backend that could have served was refused; the message gives all reasons of each."""


class DuplicateBackendError(GmmRegistryError, RuntimeError):
    """Two distributions offer one key, so asking for that key is ambiguous."""
