"""Finding heliosctl, and the daemon of this user, which is started where it does not run."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import os
import select
import shutil
import socket
import stat
import struct
import subprocess
import sysconfig
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ._errors import CapabilityError, DaemonDied, HeliosError, RefusedError, UsageError, from_code

LINGER = "3s"  # of a daemon that we start, without clients
_GRACE_S = 10.0  # for a daemon that closed its output to end, and for a program's version
_LOG_BYTES = 1000
_FAULTS = ("panic:", "fatal error:", "runtime:", "unexpected fault", "SIG", "heliosctl serve:")
_AGAIN = "begin the iteration again: the next use of the dataset starts another"
# Variables that a daemon goes by, beside the state folder; they are in its welcome.
_VARIABLES = ("HELIOS_RUN", "HELIOS_LIBCUDA", "CUDA_DEVICE_ORDER")
# The GPUs that this process sees. Ranks see one each, so a daemon that we start sees all, and goes
# by our numbers of them (docs/reference/protocol.md).
VISIBLE = "CUDA_VISIBLE_DEVICES"


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


def environment(binary: str | None) -> dict[str, str]:
    """Returns what decides which daemon is ours: variables, the state folder and the program."""
    state = os.environ.get("HELIOS_STATE")
    if not state:
        home = os.environ.get("XDG_STATE_HOME", "")
        home = home if Path(home).is_absolute() else str(Path("~/.local/state").expanduser())
        state = str(Path(home) / "heliosctl")
    program = ""
    if binary is not None:
        st = Path(binary).stat()
        program = f"{st.st_ino}-{st.st_size}-{st.st_mtime_ns}"
    # A process sees an instance of a GPU (MIG) only where the variable names it.
    names = (*_VARIABLES, VISIBLE) if "MIG-" in os.environ.get(VISIBLE, "") else _VARIABLES
    given = {name: os.environ[name] for name in names if name in os.environ}
    all_of = {"HELIOS_STATE": state, **given}
    for name, value in all_of.items():
        if name == "HELIOS_STATE" or os.sep in value:
            all_of[name] = os.path.abspath(value)  # noqa: PTH100 - it is not started in our folder
    return {"program": program, **all_of}


def user_socket(state: str) -> Path:
    """Returns where the daemon of this user listens, as ``heliosctl serve`` has it."""
    runtime = Path(os.environ.get("XDG_RUNTIME_DIR", ""))
    with contextlib.suppress(OSError):
        if runtime.is_absolute() and runtime.stat().st_uid == os.geteuid():
            return runtime / "heliosctl.sock"
    return Path(state) / f"heliosctl-{socket.gethostname()}.sock"


def apart(path: Path, ours: Mapping[str, str]) -> Path:
    """Returns where a daemon listens that is ours alone, as the one at path is another's."""
    digest = hashlib.sha256(repr(sorted(ours.items())).encode()).hexdigest()[:8]
    return path.with_name(f"{path.stem}-{digest}.sock")


def difference(welcome: Mapping[str, object], ours: Mapping[str, str], binary: str) -> str | None:
    """Says in what a daemon is another than the one that we would start; None: in nothing."""
    theirs, version = welcome.get("environment"), welcome.get("version")
    who = f"(process {welcome.get('pid')})"
    if not isinstance(theirs, dict):
        return f"{who} is heliosctl {version}, which does not say how it was started"
    for name in ("program", "HELIOS_STATE", *_VARIABLES, VISIBLE):
        have, value = theirs.get(name), ours.get(name)
        if name == VISIBLE and have is not None:  # it sees some GPUs alone: the same as we
            value = os.environ.get(name)
        if name == "program" and have != value:
            mine = _version(binary, value)
            if mine != version or mine.startswith("(") or "dirty" in mine:
                return f"{who} is heliosctl {version}, and {binary} is {mine} or another build"
        elif have != value:
            was, here = ("unset" if v is None else repr(v) for v in (have, value))
            return f"{who} was started with {name} {was}, and here it is {here}"
    return None


@functools.cache
def _version(binary: str, program: str) -> str:  # noqa: ARG001 - the file may change
    try:
        said = subprocess.run(
            [binary, "version"], capture_output=True, text=True, check=False, timeout=_GRACE_S
        )
    except OSError as e:
        raise UsageError(f"{binary} cannot be started: {e.strerror}") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"{binary} version hangs; name another program") from None
    return (said.stdout.split() or ["heliosctl"] * 2)[1]


def start(binary: str, path: Path, ours: Mapping[str, str], timeout: float) -> bool:
    """Starts the daemon of path; returns whether it listens: another one may be about to.

    It has a session of its own, so Ctrl-C at a terminal reaches Python only, and ends a moment
    after its last client.
    """
    _reap()
    try:
        path.parent.mkdir(0o700, parents=True, exist_ok=True)
    except OSError as e:
        raise UsageError(
            f"{path.parent} cannot be made: {e.strerror}; name another folder with HELIOS_STATE"
        ) from None
    command = [binary, "serve", "--json", "--linger", LINGER, "--socket", str(path)]
    with tempfile.TemporaryFile() as said:
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=said,
                bufsize=0,
                cwd="/",
                env={
                    **{k: v for k, v in os.environ.items() if k != VISIBLE},
                    **{k: v for k, v in ours.items() if k != "program"},
                },
                start_new_session=True,
            )
        except OSError as e:
            raise UsageError(f"{binary} cannot be started: {e.strerror}") from None
        assert process.stdout is not None
        with process.stdout as out:
            while select.select([out], [], [], timeout)[0] and (heard := out.readline()):
                if b'"listening"' in heard:
                    _started.append(process)
                    return True
        try:
            code = process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise HeliosError(f"{' '.join(command)} hangs: it does not listen") from None
        said.seek(0)
        why = said.read(_LOG_BYTES).decode(errors="replace").strip()
    if code == RefusedError.code:
        return False  # a daemon has the place
    error = from_code(code, f"{' '.join(command)} ended with exit code {code}: {why}")
    raise DaemonDied(str(error)) if type(error) is HeliosError else error


_started: list[subprocess.Popen[bytes]] = []  # daemons that stay when we go


def _reap() -> None:
    """Lets go of daemons that we started and that have ended."""
    _started[:] = [p for p in _started if p.poll() is None]


@atexit.register
def _leave() -> None:
    for process in _started:
        process.returncode = 0


def cause(pid: int, path: Path) -> DaemonDied:
    """Returns why the daemon at path has closed a connection.

    Its log is quoted where it ended by a mistake of its own: other lines are of other clients.
    """
    who = f"the daemon (process {pid})"
    if not _ended(pid):
        return DaemonDied(f"{who} closed the connection, and still runs")
    with (
        contextlib.suppress(OSError),
        path.with_name(path.name + ".log").open(errors="replace") as log,
    ):
        if log.readline().endswith(f"process {pid}\n"):
            for line in log:
                if line.startswith(_FAULTS):
                    return DaemonDied(f"{who} ended: {line}{log.read(_LOG_BYTES)}".rstrip())
            return DaemonDied(f"{who} was killed; {log.name} has no reason; {_AGAIN}")
    return DaemonDied(f"{who} ended; {_AGAIN}")


def _ended(pid: int) -> bool:
    """Reports whether a process has ended, or does so in a moment."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return True
    try:
        return bool(select.select([fd], [], [], 1.0)[0])
    finally:
        os.close(fd)
        _reap()


def reach(path: Path, timeout: float) -> socket.socket | None:
    """Connects to the daemon of this user at path; returns None where nobody listens."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        _connect(sock, path)
        peer = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        _pid, uid, _gid = struct.unpack("3i", peer)
        if uid not in (os.geteuid(), 0):
            raise RefusedError(f"{path} is a socket of user {uid}; remove it")
    except (FileNotFoundError, ConnectionRefusedError):
        sock.close()
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise RefusedError(f"the daemon's place {path} is no socket; remove it") from None
        return None
    except OSError as e:
        sock.close()
        raise UsageError(f"the daemon's socket {path}: {e.strerror or e}") from None
    except BaseException:
        sock.close()
        raise
    return sock


def _connect(sock: socket.socket, path: Path) -> None:
    """Connects to a socket whose path may be longer than an address."""
    folder = os.open(path.parent, os.O_PATH | os.O_CLOEXEC)
    try:
        sock.connect(f"/proc/self/fd/{folder}/{path.name}")
    finally:
        os.close(folder)


def connect(path: str, timeout: float) -> socket.socket:
    """Connects to the socket that the user names."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(timeout)
    try:
        _connect(sock, Path(path))
    except OSError as e:
        sock.close()
        raise UsageError(
            f"no daemon answers at {path} ({e.strerror or e}); start one with "
            f'"heliosctl serve --socket {path}"'
        ) from None
    return sock
