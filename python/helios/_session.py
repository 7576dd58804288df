"""A session with a daemon: requests, and the frames of several loaders on one connection."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from . import _daemon
from ._errors import (
    CapabilityError,
    DaemonDied,
    HeliosError,
    ProtocolError,
    UsageError,
    from_code,
)
from ._ring import is_count
from ._version import __version__
from ._wire import Connection, Message, close_all

PROTOCOL = 3

_START_S = 60.0  # for a daemon that another process starts

_log = logging.getLogger("helios")
_said: set[str] = set()

Frame = tuple[Message, list[int]]

# The answers to requests, beside errors without an id.
_ANSWERS = ("welcome", "opened", "loader")
_OF_LOADERS = ("ring", "batch", "epoch_end", "stopped", "error")


class Session:
    """One connection, used by the process that made it. Its methods may be called by any thread."""

    def __init__(self, sock: socket.socket, timeout: float, path: Path | None = None) -> None:
        """Says hello. The path is that of the user's own daemon, which keeps a log beside it."""
        self._connection = Connection(sock, timeout)
        self._path = path
        self._left = False  # by us
        self.daemon_pid: object = None
        self._asking = threading.Lock()  # one request at a time
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._answers: deque[Frame] = deque()
        self._boxes: dict[int, deque[Frame]] = {}
        # Garbage collection releases slots, at any moment and in any thread, also one that is
        # sending; so it only leaves a note here, and sends it where nobody else does.
        self._notes: deque[Message] = deque()
        try:
            self.welcome, _ = self.ask(
                {"type": "hello", "protocol": PROTOCOL, "client": f"helios-python {__version__}"},
                "welcome",
            )
        except BaseException:
            self.close()
            raise
        self._connection.greeted = True
        self.daemon_version = str(self.welcome.get("version", ""))
        self.daemon_pid = self.welcome.get("pid")

    @property
    def alive(self) -> bool:
        """Whether this process can still use the session."""
        return not self._connection.closed and self._connection.pid == os.getpid()

    def close(self) -> None:
        """Ends the session."""
        self._left = self._left or not self._connection.closed
        self._connection.close()

    def ask(
        self, message: Mapping[str, Any], answer: str, fds: Sequence[int] = ()
    ) -> tuple[Message, list[int]]:
        """Sends a request and waits for its answer, which is of the named type."""
        with self._asking:
            self.send(message, fds)
            try:
                got, received = self._next(self._answers)
            except BaseException:  # the answer would be taken for that of the next request
                self._connection.close()
                raise
        if got["type"] == answer:
            return got, received
        close_all(received)
        if got["type"] == "error":
            raise _error(got)
        raise self._broken(f"the daemon answered {message['type']} with {got['type']}")

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a message that has no answer, or whose answer comes into a loader's box."""
        try:
            with self._sending:
                self._connection.send(message, fds)
        except DaemonDied as e:
            raise self._died(e) from None
        self._send_notes()

    def note(self, message: Message) -> None:
        """Sends a message when that is possible; safe to call from garbage collection."""
        self._notes.append(message)
        self._send_notes()

    def _send_notes(self) -> None:
        while self._notes and self.alive:
            if not self._sending.acquire(blocking=False):
                return  # whoever sends looks here afterwards
            try:
                while self._notes:
                    self._connection.send(self._notes.popleft())
            except HeliosError:
                return  # who waits for the daemon next learns of it
            except IndexError:
                pass
            finally:
                self._sending.release()

    def next_of(self, loader: int) -> Frame:
        """Waits for the next frame of a loader; an error is raised."""
        box = self._boxes.get(loader)
        if box is None:
            raise HeliosError("the loader is closed")
        got, fds = self._next(box)
        if got["type"] == "error":
            close_all(fds)
            raise _error(got)
        return got, fds

    def release(self, loader: int, slot: int) -> None:
        """Gives a slot back, unless its loader is closed and the daemon has them all."""
        if loader in self._boxes:
            self.note({"type": "release", "id": loader, "slot": slot})

    def forget(self, loader: int) -> None:
        """Closes a loader without waiting. Frames of it that are under way are dropped."""
        if self._boxes.pop(loader, None) is not None:
            self.note({"type": "close", "id": loader})

    def _next(self, box: deque[Frame]) -> Frame:
        while True:
            if box:
                return box.popleft()
            with self._receiving:
                if box:
                    continue
                try:
                    self._dispatch(*self._connection.receive())
                except DaemonDied as e:
                    raise self._died(e) from None

    def _dispatch(self, message: Message, fds: list[int]) -> None:
        kind, of = message["type"], message.get("id")
        if of is not None and not is_count(of):
            close_all(fds)
            raise self._broken(f"the daemon sent {kind} with the id {of!r}")
        if kind == "loader" and of is not None:
            if of in self._boxes:
                close_all(fds)
                raise self._broken(f"the daemon gave two loaders the id {of}")
            self._boxes[of] = deque()
        if kind in _ANSWERS or (kind == "error" and of is None):
            if not self._asking.locked():
                close_all(fds)
                self._connection.close()
                if kind == "error":
                    raise _error(message)
                raise ProtocolError(f"the daemon sent {kind}, for which nobody asked")
            self._answers.append((message, fds))
        elif kind in _OF_LOADERS and of is not None:
            box = self._boxes.get(of)
            if box is None:
                close_all(fds)  # of a loader that is closed
            else:
                box.append((message, fds))
        else:
            close_all(fds)
            if kind != "closed":
                raise self._broken(f"the daemon sent a message of the unknown type {kind!r}")

    def _broken(self, what: str) -> ProtocolError:
        self._connection.close()
        return ProtocolError(what)

    def _died(self, error: DaemonDied) -> DaemonDied:
        if self._connection.pid != os.getpid():
            return DaemonDied("this iteration began before a fork, in the parent: begin another")
        if self._left or self._path is None or not isinstance(self.daemon_pid, int):
            return error
        return _daemon.cause(self.daemon_pid, self._path)


class _Stranger(UsageError):
    """A daemon that does not speak our protocol."""


def join(binary: str | None, timeout: float) -> Session:
    """Joins the daemon of this user, which is started where none runs.

    Where the one that runs is another than we would start, ours listens apart from it.
    """
    try:
        found: str | None = _daemon.find_binary(binary)
    except CapabilityError:
        found = None  # we can join a daemon all the same
    ours = _daemon.environment(found)
    path = _daemon.user_socket(ours["HELIOS_STATE"])
    try:
        session = _joined(path, found, ours, timeout)
    except _Stranger as e:
        if found is None:
            raise
        differs: str | None = f"refuses: {e}"
    else:
        if found is None:
            return session
        differs = _daemon.difference(session.welcome, ours, found)
        if differs is None:
            return session
        session.close()
    said = f"the daemon at {path} {differs}; this process has another daemon"
    if said not in _said:
        _said.add(said)
        _log.warning("%s", said)
    return _joined(_daemon.apart(path, ours), found, ours, timeout)


def _joined(path: Path, binary: str | None, ours: Mapping[str, str], timeout: float) -> Session:
    """Joins the daemon at path, and starts it if need be."""
    until = time.monotonic() + min(timeout, _START_S)
    while True:
        sock = _daemon.reach(path, timeout)
        if sock is not None:
            try:
                return Session(sock, timeout, path)
            except DaemonDied:  # it was about to end
                started = False
            except UsageError as e:
                raise _Stranger(str(e)) from None
        else:
            started = _daemon.start(binary or _daemon.find_binary(), path, ours, timeout)
        if not started:
            if time.monotonic() > until:
                raise HeliosError(f"the daemon of {path} does not listen; see {path}.log")
            time.sleep(0.02)


def _error(message: Message) -> HeliosError:
    return from_code(message.get("code"), str(message.get("message", "the daemon gave no reason")))
