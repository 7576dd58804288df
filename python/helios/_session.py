"""A session with a daemon: requests, and the frames of several loaders on one connection."""

from __future__ import annotations

import os
import socket
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from ._daemon import PrivateDaemon
from ._errors import DaemonDied, HeliosError, ProtocolError, from_code
from ._ring import is_count
from ._version import __version__
from ._wire import Connection, Message, close_all

PROTOCOL = 3

Frame = tuple[Message, list[int]]

# The answers to requests, beside errors without an id.
_ANSWERS = ("welcome", "opened", "loader")
_OF_LOADERS = ("ring", "batch", "epoch_end", "stopped", "error")


class Session:
    """One connection, used by the process that made it. Its methods may be called by any thread."""

    def __init__(
        self, sock: socket.socket, timeout: float, daemon: PrivateDaemon | None = None
    ) -> None:
        self._connection = Connection(sock, timeout)
        self._daemon = daemon
        self._asking = threading.Lock()  # one request at a time
        self._receiving = threading.Lock()
        self._sending = threading.Lock()
        self._answers: deque[Frame] = deque()
        self._boxes: dict[int, deque[Frame]] = {}
        # Garbage collection releases slots, at any moment and in any thread, also one that is
        # sending; so it only leaves a note here, and sends it where nobody else does.
        self._notes: deque[Message] = deque()
        try:
            welcome, _ = self.ask(
                {"type": "hello", "protocol": PROTOCOL, "client": f"helios-python {__version__}"},
                "welcome",
            )
        except BaseException:
            self.close()
            raise
        self._connection.greeted = True
        self.daemon_version = str(welcome.get("version", ""))
        self.daemon_pid = welcome.get("pid")

    @property
    def alive(self) -> bool:
        """Whether this process can still use the session."""
        return not self._connection.closed and self._connection.pid == os.getpid()

    def close(self) -> None:
        """Ends the session, and the daemon with it where it is our own."""
        self._connection.close()
        daemon, self._daemon = self._daemon, None
        if daemon is not None:
            daemon.stop()

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

    def _died(self, error: DaemonDied) -> HeliosError:
        return error if self._daemon is None else self._daemon.cause()


def _error(message: Message) -> HeliosError:
    return from_code(message.get("code"), str(message.get("message", "the daemon gave no reason")))
