"""Frames of the daemon's protocol (docs/reference/protocol.md), and a connection that carries them.

A frame is a length (uint32, little-endian) and that many bytes of JSON: one object with the key
"type". File descriptors travel with its first byte.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import socket
import struct
import time
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from ._errors import DaemonDied, HeliosError, ProtocolError, from_code

MAX_FRAME = 16 << 20
MAX_FDS = 4
MAX_HELD = 256  # descriptors of frames that nobody has asked for
_LENGTH = struct.Struct("<I")
_TIME = struct.Struct("@ll")  # timeval
_ROOM = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)

Message = dict[str, Any]


def encode(message: Mapping[str, Any]) -> bytes:
    """Returns the frame of a message."""
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > MAX_FRAME:
        raise ProtocolError(
            f"a {message.get('type')} message of {len(body)} bytes is above the {MAX_FRAME} that "
            "the protocol allows; pass long lists of nodes as an array"
        )
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Message:
    """Returns the message of a frame's body."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"the daemon sent a frame that is not JSON: {e}") from None
    if not isinstance(message, dict) or not isinstance(message.get("type"), str):
        raise ProtocolError("the daemon sent a frame that is no JSON object with a type")
    return message


class Connection:
    """One end of a Unix socket that carries frames.

    Two threads may use it, one that sends and one that receives. A frame that was left in its
    middle, by an error or by Ctrl-C, closes the connection: nobody can tell where the next begins.
    """

    def __init__(self, sock: socket.socket, timeout: float) -> None:
        """Takes over a connected socket; timeout is what a whole frame may take, in seconds."""
        sock.setblocking(True)
        # The kernel's timeouts, because those of Python's sockets cost a poll(2) each time.
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            seconds, part = divmod(min(max(timeout, 1e-3), 1e9), 1)
            sock.setsockopt(socket.SOL_SOCKET, option, _TIME.pack(int(seconds), int(part * 1e6)))
        self._sock = sock
        self._timeout = timeout
        self._chunk = memoryview(bytearray(1 << 16))
        self._data = bytearray()  # received, from the next frame on
        self._before = 0  # bytes of the frames before that
        self._fds: list[tuple[int, int]] = []  # and the number of the byte that each came with
        self.pid = os.getpid()
        self.closed = False
        self.greeted = False  # the daemon let us in
        _alive.add(self)

    def __del__(self) -> None:
        self.close()

    def close(self) -> None:
        """Closes this process's end. Nothing happens where it is closed already."""
        self.closed = True
        self._sock.close()
        close_all([fd for _, fd in self._fds])
        self._fds.clear()

    def send(self, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
        """Sends a message, and descriptors with its first byte."""
        frame = encode(message)
        if self.closed:
            raise DaemonDied("the connection to the daemon is closed")
        try:
            sent = 0
            if fds:
                sent = self._sock.sendmsg(
                    [frame],
                    [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))],
                )
            self._sock.sendall(memoryview(frame)[sent:])
        except BlockingIOError:
            self.close()
            raise HeliosError(
                f"the daemon took no message for {self._timeout:g} s; it hangs or is stopped"
            ) from None
        except OSError as e:
            refused = None if self.greeted else self._refusal()
            self.close()
            if refused is not None:
                raise from_code(refused.get("code"), str(refused.get("message"))) from None
            raise DaemonDied(f"the daemon closed the connection ({e.strerror or e})") from None
        except BaseException:
            self.close()
            raise

    def _refusal(self) -> Message | None:
        """Returns the error that the daemon sent before it closed the connection, if it did.

        It sends away whom it does not let in, maybe before we have said anything.
        """
        try:
            message, fds = self.receive()
        except HeliosError:
            return None
        close_all(fds)
        return message if message["type"] == "error" else None

    def receive(self) -> tuple[Message, list[int]]:
        """Waits for a message; returns it and the descriptors that came with it."""
        if self.closed:
            raise DaemonDied("the connection to the daemon is closed")
        try:
            until = time.monotonic() + self._timeout
            self._fill(_LENGTH.size, until)
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MAX_FRAME:
                raise ProtocolError(
                    f"the daemon announced a frame of {length} bytes; {MAX_FRAME} is the most"
                )
            end = _LENGTH.size + length
            self._fill(end, until)
            message = decode(bytes(self._data[_LENGTH.size : end]))
            del self._data[:end]
            self._before += end
            fds = [fd for at, fd in self._fds if at <= self._before]
            if fds:
                self._fds = [(at, fd) for at, fd in self._fds if at > self._before]
            return message, fds
        except BlockingIOError:
            self.close()
            raise HeliosError(
                f"the daemon sent nothing for {self._timeout:g} s; it hangs, or its work takes "
                "longer: open the dataset with a larger timeout"
            ) from None
        except OSError as e:
            self.close()
            raise DaemonDied(f"the daemon closed the connection ({e.strerror or e})") from None
        except BaseException:
            self.close()
            raise

    def _fill(self, n: int, until: float) -> None:
        """Receives until n bytes of the next frame are there, and maybe frames behind it.

        What came with descriptors ends a chunk, so they belong to the frame of its last byte.
        """
        while len(self._data) < n:
            got, control, flags, _ = self._sock.recvmsg_into(
                [self._chunk], _ROOM, socket.MSG_CMSG_CLOEXEC
            )
            self._data += self._chunk[:got]
            for level, kind, payload in control:
                if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                    ints = array.array("i")
                    ints.frombytes(payload[: len(payload) - len(payload) % ints.itemsize])
                    self._fds += [(self._before + len(self._data), fd) for fd in ints]
            if flags & socket.MSG_CTRUNC or len(self._fds) > MAX_HELD:
                raise ProtocolError(f"the daemon sent more than {MAX_FDS} descriptors at once")
            if got == 0:
                raise DaemonDied("the daemon closed the connection")
            if len(self._data) < n and time.monotonic() > until:
                raise BlockingIOError


def close_all(fds: list[int]) -> None:
    """Closes descriptors and forgets them."""
    while fds:
        with contextlib.suppress(OSError):
            os.close(fds.pop())


# A forked child closes its copies of the connections: they are the parent's, and a copy that stays
# open would hide the parent's death from the daemon.
_alive: weakref.WeakSet[Connection] = weakref.WeakSet()


def _close_in_child() -> None:
    for connection in list(_alive):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
