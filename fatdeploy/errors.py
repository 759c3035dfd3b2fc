"""All errors of fatdeploy: one line that says what is wrong, expected against found, and what to type next."""

from collections.abc import Iterable


class FatdeployError(Exception):
    """Base of all errors that fatdeploy raises on purpose; the command line prints them without a traceback.

    ``table`` are further lines; the command line prints them below the message.
    """

    def __init__(self, *args: object, table: Iterable[str] = ()) -> None:
        super().__init__(*args)
        self.table = tuple(table)


class ConfigError(FatdeployError, ValueError):
    """A configuration or an option has a value that is not possible."""


class SpecMismatch(FatdeployError, ValueError):
    """An array does not fit the model."""


class CheckpointError(FatdeployError, OSError):
    """A checkpoint is missing, damaged or belongs to another model."""


class BundleError(FatdeployError, OSError):
    """A bundle is missing, damaged or of a format that this version cannot read."""


class BundleReplaced(BundleError):
    """Another bundle took the place of one while it was read."""


class DataError(FatdeployError, ValueError):
    """A file of data has lines that cannot be used."""


class BackendUnavailable(FatdeployError, ImportError):
    """A package or a device that the call needs is not available."""


class DeviceFailed(FatdeployError, RuntimeError):
    """A GPU could not do its work."""


class OutOfDeviceMemory(DeviceFailed):
    """A GPU has not enough free memory."""


class TrainingFailed(FatdeployError, RuntimeError):
    """A model could not be trained."""


class ExportFailed(FatdeployError, RuntimeError):
    """A model could not be turned into graphs."""


class BenchFailed(FatdeployError, RuntimeError):
    """A bundle could not be measured."""


class ParityFailed(FatdeployError, RuntimeError):
    """A graph gives other results than the reference."""


def in_one_line(subject: str, reasons: Iterable[str]) -> str:
    """Return ``subject: reason; reason``: one message with everything that is wrong."""
    return f"{subject}: {'; '.join(reasons)}"
