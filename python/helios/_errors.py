"""Exceptions, one for each class of error of heliosctl.

heliosctl classifies an error once, where its cause is known; the class is the exit code of a verb
and stands in every error that the daemon sends. Here it chooses the exception's type.
"""

from __future__ import annotations

from typing import ClassVar


class HeliosError(RuntimeError):
    """Something failed. The base of all exceptions of this package.

    ``code`` is the exit code that heliosctl gives this class of error.
    """

    code: ClassVar[int] = 1


class UsageError(HeliosError, ValueError):
    """An option, a value, a file name or the content of an input is wrong."""

    code = 2


class CapabilityError(HeliosError):
    """The machine lacks what was asked for: hardware, a kernel feature, a right, a package."""

    code = 3


class RefusedError(HeliosError):
    """Refused for safety: data would be lost."""

    code = 4


class DeviceError(HeliosError):
    """An SSD, a compute device or stored data failed."""

    code = 5


class Interrupted(HeliosError):
    """Someone stopped the work."""

    code = 130


class ProtocolError(HeliosError):
    """The daemon sent something that the protocol does not allow. The connection is closed."""


class DaemonDied(HeliosError):
    """The daemon ended, or closed the connection, in the middle of the work.

    The next use of the dataset connects again. Tensors of earlier batches stay valid.
    """


_BY_CODE: dict[int, type[HeliosError]] = {
    c.code: c
    for c in (HeliosError, UsageError, CapabilityError, RefusedError, DeviceError, Interrupted)
}


def from_code(code: object, message: str) -> HeliosError:
    """Returns the exception of an exit code; HeliosError for a code that is not known."""
    kind = _BY_CODE.get(code, HeliosError) if isinstance(code, int) else HeliosError
    return kind(message)
