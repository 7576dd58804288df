"""Finding heliosctl, and a daemon of our own: ``heliosctl serve --inherit FD``."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import IO

from ._errors import CapabilityError, DaemonDied, HeliosError, UsageError, from_code

_GRACE_S = 10.0  # for a daemon to end when its client has gone
_LOG_BYTES = 4000


def find_binary(binary: str | os.PathLike[str] | None = None) -> str:
    """Returns heliosctl's path: binary, else $HELIOSCTL, else that of its wheel, else in PATH."""
    named = os.fspath(binary) if binary is not None else os.environ.get("HELIOSCTL")
    if named:
        found = shutil.which(named)
        if found is None:
            raise UsageError(f"{named} is no program that can be run; name heliosctl's binary")
        return str(Path(found).absolute())
    # The wheel heliosctl puts it beside this interpreter, which need not be in PATH.
    beside = Path(sysconfig.get_path("scripts")) / "heliosctl"
    found = shutil.which(beside) or shutil.which("heliosctl")
    if found is None:
        raise CapabilityError(
            "heliosctl is not here; install the wheel heliosctl, or build it with "
            '"make build" and set HELIOSCTL to bin/heliosctl, or pass binary='
        )
    return found


class PrivateDaemon:
    """A daemon that serves one connection and ends with it.

    It has a session of its own, so Ctrl-C at the terminal reaches Python only.
    """

    def __init__(self, binary: str) -> None:
        """Starts it; ``sock`` is our end of its connection."""
        self.pid = os.getpid()
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self.sock, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._process = subprocess.Popen(
                [binary, "serve", "--inherit", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        except OSError as e:
            self.sock.close()
            self._log.close()
            raise UsageError(f"{binary} cannot be started: {e.strerror}") from None
        finally:
            theirs.close()
        self.process_id = self._process.pid

    def cause(self) -> HeliosError:
        """Returns why it ended, by its exit code and its last words."""
        try:
            code: int | None = self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            code = None
        said = ""
        with contextlib.suppress(ValueError, OSError):
            size = self._log.seek(0, os.SEEK_END)
            self._log.seek(max(0, size - _LOG_BYTES))
            said = self._log.read().decode(errors="replace").strip()
        said = f": {said}" if said else ""
        if code is None:
            return DaemonDied(f"the daemon closed the connection, and still runs{said}")
        if code < 0:
            return DaemonDied(f"the daemon was killed by signal {-code}{said}")
        if code == 0:
            return DaemonDied(f"the daemon ended{said}")
        error = from_code(code, f"the daemon ended with exit code {code}{said}")
        return DaemonDied(str(error)) if type(error) is HeliosError else error

    def stop(self) -> None:
        """Waits for the daemon, whose connection is closed, and ends it if it stays."""
        if self.pid != os.getpid():
            self._process.returncode = 0  # the parent's child, not ours to wait for
            self._log.close()
            return
        try:
            self._process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._log.close()


def connect(path: str, timeout: float) -> socket.socket:
    """Connects to a daemon's socket."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        sock.connect(path)
    except OSError as e:
        sock.close()
        raise UsageError(
            f"no daemon answers at {path} ({e.strerror or e}); start one with "
            f'"heliosctl serve --socket {path}"'
        ) from None
    return sock
