"""A dataset, opened through a daemon."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from . import _daemon
from ._errors import HeliosError, ProtocolError
from ._ring import is_count
from ._session import Session

PathLike = str | os.PathLike[str]


@dataclass(frozen=True)
class _How:
    """How to reach the daemon, and what it is to open."""

    dataset: str
    socket: str | None
    binary: str | None
    timeout: float
    options: tuple[tuple[str, Any], ...]


class Dataset:
    """A dataset that a daemon has open. Make one with :func:`helios.open`.

    A forked child that uses it gets a connection of its own. After the daemon's death the next use
    connects again.
    """

    def __init__(self, how: _How) -> None:
        self._how = how
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._live: Session | None = None
        self._handle = 0
        self._closed = False
        self._finalizer: weakref.finalize[Any, Any] | None = None
        self._describe(self._connect()[2])

    def _describe(self, d: Mapping[str, Any]) -> None:
        try:
            self.name = str(d["name"])
            self.uuid = str(d.get("uuid", ""))
            self.num_nodes = int(d["nodes"])
            self.num_edges = int(d["edges"])
            self.num_features = int(d["dim"])
            self.num_classes = int(d["classes"])
            self.row_dtype = str(d["row_dtype"])
            #: how many nodes each split has, by its name
            self.splits: dict[str, int] = {str(k): int(v) for k, v in d["splits"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            self.close()
            raise ProtocolError(f"the daemon described the dataset as {d!r}: {e!r}") from None

    @property
    def path(self) -> str:
        """The dataset's folder."""
        return self._how.dataset

    def session(self) -> tuple[Session, int]:
        """Returns a session of this process and the dataset's handle in it."""
        session, handle, _ = self._connect()
        return session, handle

    def _connect(self) -> tuple[Session, int, Mapping[str, Any]]:
        if self._pid != os.getpid():
            # The parent's session and a lock that one of its threads may have held.
            self._lock, self._pid, self._live = threading.Lock(), os.getpid(), None
            if self._finalizer is not None:
                self._finalizer()
        with self._lock:
            if self._closed:
                raise HeliosError(f"dataset {self._how.dataset} is closed")
            if self._live is not None and self._live.alive:
                return self._live, self._handle, {}
            if self._finalizer is not None:
                self._finalizer()
            self._live = session = self._new_session()
            self._finalizer = weakref.finalize(self, session.close)
            try:
                opened, _ = session.ask(
                    {"type": "open", "dataset": self._how.dataset, **dict(self._how.options)},
                    "opened",
                )
                if not is_count(opened.get("handle")) or not isinstance(
                    opened.get("dataset"), dict
                ):
                    raise ProtocolError(f"the daemon opened the dataset with {opened!r}")
            except BaseException:
                self._finalizer()
                raise
            self._handle = opened["handle"]
            return session, self._handle, opened["dataset"]

    def _new_session(self) -> Session:
        how = self._how
        if how.socket is not None:
            return Session(_daemon.connect(how.socket, how.timeout), how.timeout)
        daemon = _daemon.PrivateDaemon(_daemon.find_binary(how.binary))
        return Session(daemon.sock, how.timeout, daemon)

    def close(self) -> None:
        """Closes the connection, and ends a daemon of our own. Batches that live stay valid."""
        self._closed = True
        if self._finalizer is not None and self._pid == os.getpid():
            self._finalizer()

    def __enter__(self) -> Dataset:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        return Dataset, (self._how,)

    def __repr__(self) -> str:
        return (
            f"<helios.Dataset {self.name}: {self.num_nodes} nodes, {self.num_edges} edges, "
            f"{self.num_features} features>"
        )


def open(  # noqa: A001 - the name that users write is helios.open
    dataset: PathLike,
    socket: PathLike | None = None,
    binary: PathLike | None = None,
    *,
    ssd_file: PathLike | Iterable[PathLike] | None = None,
    ssd: str | Iterable[str] | None = None,
    timeout: float = 600.0,
) -> Dataset:
    """Opens a dataset's folder through a daemon.

    Args:
        dataset: the folder that ``heliosctl import`` or :func:`helios.save` made.
        socket: of a daemon that runs (``heliosctl serve --socket PATH``). Without one, a private
            daemon is started, and ends with this process or :meth:`Dataset.close`.
        binary: heliosctl, for a private daemon; else $HELIOSCTL, else the one in PATH.
        ssd_file: files that play SSDs and hold the dataset's rows.
        ssd: names of bound SSDs to use. Without either, all that are bound.
        timeout: seconds that the daemon may be silent while we wait for it, such as while it finds
            the hottest rows of a large graph. A daemon that dies is noticed at once.
    """
    options: list[tuple[str, Any]] = []
    if ssd_file is not None:
        files = [ssd_file] if isinstance(ssd_file, (str, os.PathLike)) else list(ssd_file)
        options.append(("ssd_file", [os.path.abspath(f) for f in files]))  # noqa: PTH100
    if ssd is not None:
        options.append(("ssd", [ssd] if isinstance(ssd, str) else list(ssd)))
    return Dataset(
        _How(
            dataset=os.path.abspath(dataset),  # noqa: PTH100
            socket=None if socket is None else os.path.abspath(socket),  # noqa: PTH100
            binary=None if binary is None else os.fspath(binary),
            timeout=timeout,
            options=tuple(options),
        )
    )
