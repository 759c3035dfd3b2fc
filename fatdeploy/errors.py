"""Every error of ours: one line that says what is wrong, expected against found, and what to type next."""

from collections.abc import Iterable


class FatdeployError(Exception):
    """Base of all errors that fatdeploy raises on purpose; the command line prints them without a traceback.

    ``table`` are lines that do not fit into the one line of the message; the command line prints them below it.
    """

    def __init__(self, *said: object, table: Iterable[str] = ()) -> None:
        super().__init__(*said)
        self.table = tuple(table)


class ConfigError(FatdeployError, ValueError):
    """A configuration or an option has a value that cannot be had."""


class SpecMismatch(FatdeployError, ValueError):
    """An array does not fit the model it is given to."""


class CheckpointError(FatdeployError, OSError):
    """A checkpoint is missing, damaged or belongs to another model."""


class BundleError(FatdeployError, OSError):
    """A bundle is missing, damaged or of a format that this version cannot read."""


class DataError(FatdeployError, ValueError):
    """A file of data has lines that cannot be used."""


class BackendUnavailable(FatdeployError, ImportError):
    """What was asked for needs a package or a device that is not here."""


class DeviceFailed(FatdeployError, RuntimeError):
    """A GPU could not do what it was asked for."""


class OutOfDeviceMemory(DeviceFailed):
    """A GPU has no memory left for what was asked for."""


class TrainingFailed(FatdeployError, RuntimeError):
    """A model could not be trained."""


class ExportFailed(FatdeployError, RuntimeError):
    """A model could not be turned into graphs."""


class BenchFailed(FatdeployError, RuntimeError):
    """A bundle could not be measured."""


class ParityFailed(FatdeployError, RuntimeError):
    """A graph gives another answer than the reference."""


def in_one_line(subject: str, reasons: Iterable[str]) -> str:
    """Return ``subject: reason; reason``: everything that is wrong is said at once."""
    return f"{subject}: {'; '.join(reasons)}"
