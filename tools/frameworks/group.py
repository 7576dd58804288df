"""Memory of a process bounded by a control group, for loaders.py and typed.py."""
import os, sys, time


def size(text):
    """Bytes of a size as 512MiB."""
    for unit, shift in (("KiB", 10), ("MiB", 20), ("GiB", 30)):
        if text.endswith(unit):
            return int(float(text.removesuffix(unit)) * (1 << shift))
    sys.exit(f"{text!r} is not a size: use KiB, MiB or GiB, as 512MiB")


def drop(path):
    """Takes a file out of the page cache."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Group:
    """A control group that bounds the memory of a process and of its daemon, page cache included."""

    def __init__(self, path):
        self.path = path
        self.v2 = os.path.exists(os.path.join(path, "cgroup.events"))

    @classmethod
    def below_own(cls):
        own = at = None
        with open("/proc/self/cgroup") as f:
            groups = [line.rstrip("\n").split(":", 2) for line in f]
        with open("/proc/self/mountinfo") as f:
            mounts = [line.split() for line in f]
        for _, kinds, path in groups:
            if "memory" in kinds.split(","):
                own, at = path, next((m[4] for m in mounts if "cgroup" in m and "memory" in m[-1].split(",")), None)
                break
            if kinds == "":
                own, at = path, next((m[4] for m in mounts if "cgroup2" in m), None)
        if at is None:
            sys.exit("--rows-memory: no memory controller is mounted (control groups, version 1 or 2)")
        path = os.path.join(at + own.rstrip("/"), f"loaders-{os.getpid()}-{time.monotonic_ns()}")
        try:
            os.mkdir(path)
        except OSError as e:
            sys.exit(f"--rows-memory: no control group can be made: {e}; run as root")
        group = cls(path)
        if not any(os.path.exists(os.path.join(path, n)) for n in ("memory.max", "memory.limit_in_bytes")):
            os.rmdir(path)
            sys.exit(f"--rows-memory: {os.path.dirname(path)} gives its groups no memory controller (cgroup.subtree_control)")
        return group

    def enter(self):
        with open(os.path.join(self.path, "cgroup.procs"), "w") as f:
            f.write(str(os.getpid()))

    def stat(self):
        with open(os.path.join(self.path, "memory.stat")) as f:
            return {k: int(v) for k, v in (line.split() for line in f)}

    def held(self):
        """Bytes that are no page cache of files."""
        s = self.stat()
        return s["anon"] + s["shmem"] if self.v2 else s["total_rss"] + s["total_shmem"]

    def bound(self, most):
        name = "memory.max" if self.v2 else "memory.limit_in_bytes"
        for turn in range(50):  # version 1 refuses a limit until enough pages are given back
            try:
                with open(os.path.join(self.path, name), "w") as f:
                    f.write(str(most))
                return
            except OSError:
                if turn == 49:
                    raise
                time.sleep(0.1)

    def cached(self):
        s = self.stat()
        return s["file"] - s["shmem"] if self.v2 else s["total_cache"] - s["total_shmem"]

    def remove(self):
        for turn in range(50):  # a process that just ended may still be there
            try:
                return os.rmdir(self.path)
            except OSError:
                if turn == 49:
                    raise
                time.sleep(0.1)
