"""Objects that hold something until they are closed."""

from types import TracebackType
from typing import Self


class ClosedOnExit:
    """Leaving a ``with`` block closes the object."""

    def close(self) -> None:
        """Release everything; calling it twice is harmless."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()
