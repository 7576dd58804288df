"""Batches on a GPU: the daemon's memory, mapped through a fake libcuda, and DLPack.

The fake's memory that leaves a process is a file in memory, so a ring of a fake daemon's is one.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib.util
import mmap
import os
import signal
import subprocess
import sys
import textwrap
import time
from types import SimpleNamespace

import numpy as np
import pytest
from fakeserver import HOPS, Loader, Peer, expected

import helios
from helios import _cuda

GRANULE = 65536  # of the fake's memory
NOTHING = "contexts=0 streams=0 events=0 modules=0 device=0 device_bytes=0"


class Library:
    """The fake libcuda in this process."""

    def __init__(self, path: str) -> None:
        self.lib = ctypes.CDLL(path)
        self.do("reset")
        _cuda._open.cache_clear()
        assert self.lib.cuInit(0) == 0

    def pci(self, number: int) -> str:
        pci = ctypes.create_string_buffer(32)
        assert self.lib.cuDeviceGetPCIBusId(pci, 32, number) == 0
        return pci.value.decode()

    def do(self, command: str) -> str:
        out = ctypes.create_string_buffer(8192)
        size = ctypes.c_ulonglong(8192)
        assert self.lib.hx_fake_control(command.encode(), out, size) >= 0, out.value
        return out.value.decode()

    def calls(self, name: str) -> int:
        return int(self.do(f"calls={name}"))

    def live(self) -> dict[str, int]:
        return {k: int(v) for k, v in (w.split("=") for w in self.do("live").split())}


@pytest.fixture
def gpu(fake_library, monkeypatch):
    """The fake, and the proof that nothing is left in it."""
    monkeypatch.setenv(_cuda.LIBRARY, fake_library)
    gc.collect()
    library = Library(fake_library)
    descriptors = len(os.listdir("/proc/self/fd"))
    GpuPeer.pci = library.pci(0)
    yield library
    # The fake daemon is in this process. Its threads may still be making a ring that nobody takes,
    # and close what they have on their own.
    deadline = time.monotonic() + 10
    while True:
        while GpuPeer.maps:  # each has a descriptor
            GpuPeer.maps.pop().close()
        gc.collect()
        left = len(os.listdir("/proc/self/fd")) - descriptors
        if left <= 0 or time.monotonic() > deadline:
            break
        time.sleep(0.005)
    assert left <= 0
    assert not any(library.live().values()), library.do("live")
    assert library.do("violations") == ""
    _cuda._open.cache_clear()


class GpuLoader(Loader):
    """Its ring is an allocation, in whole granules."""

    def _send_ring(self, message):
        size = -(-self.slots * self.slot_bytes // GRANULE) * GRANULE
        fd = os.memfd_create("ring", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self.map = mmap.mmap(fd, size)
        more = {"device": f"cuda:{self.peer.pci}", "file_bytes": size}
        GpuPeer.maps.append(self.map)
        try:
            self.peer.send({**message, **more, **self.peer.lies}, (fd,))
        finally:  # the client may be gone
            os.close(fd)


class HostLoader(Loader):
    """Its rings are closed with the test."""

    def _send_ring(self, message):
        super()._send_ring(message)
        GpuPeer.maps.append(self.map)


class GpuPeer(Peer):
    """Makes a ring on the GPU for whoever asks."""

    pci = ""
    maps: list[mmap.mmap] = []
    lies: dict = {}
    edges: object = [HOPS[0], HOPS[1] - HOPS[0]]

    def on_loader(self, message):
        number = len(self.loaders) + 1
        on_gpu = message.get("device", "cpu") != "cpu"
        self.loaders[number] = (GpuLoader if on_gpu else HostLoader)(self, number, message)

    def batch(self, loader, epoch, index, slot):
        message = super().batch(loader, epoch, index, slot)
        return message if self.edges is None else {**message, "hop_edges": self.edges}


def peer(**more):
    return type("P", (GpuPeer,), more)


class HostPeer(GpuPeer):
    """Its loaders run on the host, so it has no memory of a GPU to give."""

    def on_loader(self, message):
        if message.get("device", "cpu") == "cpu":
            super().on_loader(message)
            return
        self.send({"type": "error", "class": "capability", "code": 3, "message": "on the host"})


KINDS = pytest.mark.parametrize("kind", [GpuPeer, HostPeer], ids=["gpu", "pinned"])


def opened(server):
    return helios.open("somewhere", socket=server.path, timeout=20)


def check(batch, epoch, index):
    want = expected(epoch, index)
    for name in ("x", "n_id", "y", "edge_index"):
        got = getattr(batch, name)
        assert isinstance(got, helios.DeviceArray)
        assert np.array_equal(got.numpy(), want[name])
    for h, block in enumerate(batch.blocks):
        assert np.array_equal(block.indptr.numpy(), want[f"indptr.{h}"])
        assert np.array_equal(block.src.numpy(), want[f"src.{h}"])
    assert batch.num_sampled_edges == GpuPeer.edges


def test_epochs(gpu, fake):
    """Values, in two epochs; one mapping; nothing is left when all has gone."""
    server = fake(GpuPeer)
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda")
        assert loader.device == "cuda:0"
        for epoch in range(2):
            for i, batch in enumerate(loader):
                check(batch, epoch, i)
            assert i == 4
        assert server.peers[0].requests[2]["device"] == "cuda"
        assert (gpu.live()["reserved"], gpu.live()["physical"]) == (1, 1)
        assert gpu.calls("cuMemImportFromShareableHandle") == 1
        assert gpu.calls("cuMemAlloc_v2") == 0


def test_a_pinned_ring(gpu, fake):
    """It is pinned once, batches are copied beside other streams, and all of it goes."""
    server = fake(HostPeer)
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda")
        assert (loader.device, loader.ring) == ("cuda:0", "pinned")
        for epoch in range(2):
            for i, batch in enumerate(loader):
                check(batch, epoch, i)
            assert i == 4
        assert gpu.calls("cuMemHostRegister_v2") == 1
        assert gpu.calls("cuMemcpyHtoDAsync_v2") == 10
        assert gpu.calls("cuMemAlloc_v2") == 1
        assert gpu.calls("cuStreamCreate") == 1
        batch = next(iter(loader))
        del loader
        gc.collect()
        check(batch, 2, 0)
        del batch
        gc.collect()
        assert gpu.calls("cuMemHostUnregister") == 1
        assert not any(gpu.live().values())


def test_the_ranks_of_a_job_on_a_gpu_each(gpu, fake):
    """All of them ask for the CPU's ring, that on the daemon's GPU too: they are one job."""
    gpu.do("devices=2")
    server = fake(GpuPeer)
    with opened(server) as ds:
        for rank in range(2):
            loader = helios.NumpyLoader(ds, device=f"cuda:{rank}", rank=rank, world_size=2)
            assert (loader.device, loader.ring) == (f"cuda:{rank}", "pinned")
            batches = list(loader)
            assert [b.index for b in batches] == ([0, 2, 4], [1, 3, 1])[rank]
            for batch in batches:
                check(batch, 0, batch.index)
                assert batch.x.__dlpack_device__() == (2, rank)
            del batches, batch
        asked = [r for r in server.peers[0].requests if r["type"] == "loader"]
        assert not any("device" in r for r in asked)
        with pytest.raises(helios.CapabilityError, match="cuDeviceGet: .*that GPU is not visible"):
            helios.NumpyLoader(ds, device="cuda:7", world_size=2)


def test_the_gpu_by_its_number(gpu, fake):
    """The daemon's memory where it lies on that GPU, and else a pinned ring."""
    gpu.do("devices=2")
    with opened(fake(GpuPeer)) as ds:
        for number, ring in ((0, "gpu"), (1, "pinned")):
            loader = helios.NumpyLoader(ds, device=f"cuda:{number}")
            assert (loader.device, loader.ring) == (f"cuda:{number}", ring)
            check(next(iter(loader)), 0, 0)
        assert helios.NumpyLoader(ds).ring == "cpu"


@KINDS
def test_a_slot_goes_back_behind_its_kernels(gpu, fake, kind):
    """A slot whose tensors have gone is given back after a wait for the GPU, and never before."""
    server = fake(kind)
    with opened(server) as ds:
        it = iter(helios.NumpyLoader(ds, device="cuda", slots=4))
        first, second = next(it), next(it)
        loader = server.peers[0].loader
        del first
        third = next(it)
        assert gpu.calls("cuCtxSynchronize") == 0
        gpu.do("fail=cuCtxSynchronize:1:719")
        with pytest.raises(helios.DeviceError, match="cuCtxSynchronize: CUDA_ERROR_LAUNCH_FAILED"):
            next(it)  # 3 of 4 are ours by then, of which one has no tensor left
        assert loader.released == []
        check(second, 0, 1)
        check(third, 0, 2)
        del it


@KINDS
def test_slots_are_released_once(gpu, fake, kind):
    server = fake(kind)
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda", slots=4)
        it = iter(loader)
        batches = [next(it), next(it)]
        theirs = server.peers[0].loader
        batches.pop(0)
        gc.collect()
        assert theirs.released == []
        batches.append(next(it))
        gc.collect()
        batches.append(next(it))  # more than half are held
        server.wait(lambda: theirs.released == [0])
        assert gpu.calls("cuCtxSynchronize") == 1
        for i, batch in enumerate(batches):
            check(batch, 0, i + 1)
        del batches, batch
        assert [b.index for b in it] == [4]
        assert [b.index for b in loader] == [0, 1, 2, 3, 4]
        server.wait(lambda: len(theirs.released) >= 8)


def test_slots_that_wait_are_given_back(gpu, fake):
    """Before a batch would be copied for lack of slots, and with the next epoch."""
    server = fake(GpuPeer)
    with opened(server) as ds:
        it = iter(helios.NumpyLoader(ds, device="cuda", slots=2))
        for i in range(5):
            batch = next(it)
            check(batch, 0, i)
            del batch
        assert gpu.calls("cuMemAlloc_v2") == 0
        loader = helios.NumpyLoader(ds, device="cuda", slots=16)
        assert len(list(loader)) == 5
        theirs = server.peers[0].loaders[2]
        assert theirs.released == []
        kept = next(iter(loader))
        server.wait(lambda: sorted(theirs.released) == [0, 1, 2, 3, 4])
        check(kept, 1, 0)


@KINDS
@pytest.mark.parametrize("more", [{"copy": True}, {"slots": 2}, {"slots": 1}])
def test_copies(gpu, fake, more, kind):
    """A batch that is copied lies in memory of our own, which goes with it."""
    server = fake(kind)
    slots = 1 if kind is HostPeer else 0  # the memory of a pinned ring's
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda", **more)
        batches = list(loader)
        for i, batch in enumerate(batches):
            check(batch, 0, i)
        assert gpu.live()["device"] == slots + (4 if more.get("slots") == 2 else 5)
        del batches, batch, loader
        gc.collect()
        assert gpu.live()["device"] == 0


@KINDS
def test_a_larger_ring(gpu, fake, kind):
    """Batches of the former ring stay, and it goes with the last of them."""
    memory = "reserved" if kind is GpuPeer else "device"
    with opened(fake(type("P", (kind,), {"grow_at": 2, "slot_bytes": GRANULE}))) as ds:
        loader = helios.NumpyLoader(ds, device="cuda", slots=8)
        batches = list(loader)
        for i, batch in enumerate(batches):
            check(batch, 0, i)
        assert gpu.live()[memory] == 2
        del batches[:2], batch
        gc.collect()
        # The slots of the former ring are given back by the next epoch; it needs none of them.
        assert gpu.live()[memory] == 1
        del batches
        assert len(list(loader)) == 5


def test_another_gpu(gpu, fake):
    """The daemon's GPU has the number that this process has for it."""
    gpu.do("devices=2")
    with opened(fake(peer(pci=gpu.pci(1)))) as ds:
        loader = helios.NumpyLoader(ds, device="cuda")
        assert loader.device == "cuda:1"
        batch = next(iter(loader))
        check(batch, 0, 0)
        assert batch.x.__dlpack_device__() == (2, 1)
        managed, at = taken(batch.x)
        assert managed.tensor.device_id == 1
        _cuda._deleter(at)


def test_batches_outlive_all(gpu, fake):
    server = fake(GpuPeer)
    with opened(server) as ds:
        batch = next(iter(helios.NumpyLoader(ds, device="cuda")))
    server.close()
    gc.collect()
    check(batch, 0, 0)


MANAGED = _cuda._Managed


def taken(array, **arguments):
    """Takes a capsule over, as a consumer does."""
    capsule = array.__dlpack__(**arguments)
    api = ctypes.pythonapi
    api.PyCapsule_GetPointer.restype = ctypes.c_void_p
    api.PyCapsule_GetPointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
    api.PyCapsule_SetName.argtypes = (ctypes.py_object, ctypes.c_char_p)
    pointer = api.PyCapsule_GetPointer(capsule, b"dltensor")
    assert api.PyCapsule_SetName(capsule, USED) == 0
    return MANAGED.from_address(pointer), pointer


USED = b"used_dltensor"


def test_capsules(gpu, fake, monkeypatch):
    """The struct that consumers read, and what it keeps until they give it back."""
    freed, free = [], _cuda._libc.free
    monkeypatch.setattr(_cuda._libc, "free", lambda at: (freed.append(at), free(at)))
    server = fake(GpuPeer)
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda", slots=4)
        it = iter(loader)
        batch = next(it)
        assert batch.x.__dlpack_device__() == (2, 0)
        managed, pointer = taken(batch.x, stream=1, max_version=(1, 0))
        t = managed.tensor
        assert (t.device_type, t.device_id, t.ndim, t.byte_offset) == (2, 0, 2, 0)
        assert (t.code, t.bits, t.lanes) == (2, 32, 1)
        assert list((ctypes.c_int64 * 2).from_address(t.shape)) == [13, 4]
        assert list((ctypes.c_int64 * 2).from_address(t.strides)) == [4, 1]
        got = np.empty((13, 4), np.float32)
        driver = _cuda.driver()
        with batch.x._memory.gpu.current():
            driver.call("cuMemcpyDtoH_v2", got.ctypes.data, t.data, got.nbytes)
        assert np.array_equal(got, expected(0, 0)["x"])
        ids, ids_pointer = taken(batch.n_id)
        assert (ids.tensor.code, ids.tensor.bits, ids.tensor.ndim) == (0, 64, 1)
        assert ids.tensor.data - t.data == -(-got.nbytes // 64) * 64
        unused = batch.y.__dlpack__()
        remote = loader._remote
        del batch, unused
        gc.collect()
        assert remote.held == {0}
        assert list(remote._dead) == []
        for m, at in ((managed, pointer), (ids, ids_pointer)):
            assert list(remote._dead) == []
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(m.deleter)(at)
        assert list(remote._dead) == [0]
        assert _cuda._out == {}
        assert len(freed) == 3
        assert freed[1:] == [pointer, ids_pointer]
        last = next(it)
        for more in ({"dl_device": (1, 0)}, {"copy": True}):
            with pytest.raises(BufferError):
                last.x.__dlpack__(**more)
        assert last.x.__dlpack__(dl_device=(2, 0), copy=False) is not None
        kinds = {"bfloat16": (4, 16), "float16": (2, 16), "int8": (0, 8), "uint32": (1, 32)}
        for kind, (code, bits) in {**kinds, "int32": (0, 32)}.items():
            m, at = taken(_cuda.DeviceArray(last.x._memory, kind, (3, 0, 2), 0))
            assert (m.tensor.code, m.tensor.bits, m.tensor.ndim) == (code, bits, 3)
            _cuda._deleter(at)
        with pytest.raises(ValueError, match="different sizes"):
            last.x.view("int64")


class OnCpu:
    """Memory of NumPy's in our struct, which is then one that consumers without a GPU take."""

    def __init__(self, array, kind):
        self.array, self.kind = array, kind

    def __dlpack_device__(self):
        return 1, 0

    def __dlpack__(self, **_):
        at = self.array.ctypes.data
        return _cuda._capsule(self.array, at, (1, 0), self.kind, self.array.shape)


def consumers():
    try:
        import torch
    except ImportError:
        return [np.from_dlpack]
    return [np.from_dlpack, torch.from_dlpack]


@pytest.mark.parametrize("kind", _cuda.DTYPES)
def test_what_consumers_make_of_a_capsule(kind):
    """NumPy and PyTorch read the struct as we write it, and give it back."""
    for take in consumers():
        array = np.arange(24).reshape(2, 3, 4).astype(_cuda.DTYPES[kind])
        if kind == "bfloat16":
            if take is np.from_dlpack:
                continue
            array = (array.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
        if take is not np.from_dlpack and not hasattr(sys.modules["torch"], kind):
            continue  # uint32 is PyTorch's from 2.3 on
        t = take(OnCpu(array, kind))
        assert str(t.dtype).removeprefix("torch.") == kind
        assert tuple(t.shape) == (2, 3, 4)
        assert [float(v) for v in t.ravel()] == list(range(24))
        array.ravel()[23] = array.ravel()[1]
        assert float(t[1, 2, 3]) == 1  # the same memory
        assert list(_cuda._out.values())[0] is array
        del t
        assert _cuda._out == {}
        capsule = OnCpu(array, kind).__dlpack__()
        assert len(_cuda._out) == 1
        del capsule
        assert _cuda._out == {}


# Calls by what they are of, with a result that is another class of error.
MAPPING = (
    "cuDeviceGetByPCIBusId",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuMemImportFromShareableHandle",
    "cuMemAddressReserve",
    "cuMemMap",
    "cuMemSetAccess",
    "cuMemRelease",
)


@pytest.mark.parametrize("name", MAPPING)
def test_a_ring_that_cannot_be_mapped(gpu, fake, name):
    """What the GPU lacks for it is undone, and the ring pinned; what fails is told by its name."""
    server = fake(GpuPeer)
    with opened(server) as ds:
        for device in ("cuda", "auto"):
            gpu.do(f"fail={name}:1:801")
            loader = helios.NumpyLoader(ds, device=device)
            assert (loader.device, loader.ring) == ("cuda:0", "pinned")
            check(next(iter(loader)), 0, 0)
            del loader
            if name != "cuMemRelease":  # the handle that it did not release keeps the context
                gc.collect()
                assert not any(gpu.live().values()), gpu.do("live")
        gpu.do(f"fail={name}:1:719")
        with pytest.raises(helios.DeviceError, match=f"{name}: CUDA_ERROR_LAUNCH_FAILED"):
            helios.NumpyLoader(ds, device="auto")
        assert len(server.peers[0].requests) >= 6
    if name == "cuMemRelease":
        gc.collect()
        assert gpu.live()["reserved"] == 0
        gpu.do("reset")


PINNING = (
    "cuDeviceGet",
    "cuDevicePrimaryCtxRetain",
    "cuCtxPushCurrent_v2",
    "cuMemHostRegister_v2",
    "cuMemAlloc_v2",
    "cuStreamCreate",
)


@pytest.mark.parametrize("name", PINNING)
def test_a_ring_that_cannot_be_pinned(gpu, fake, name):
    """Each failure is told with that of the better way, and undone; the session goes on."""
    server = fake(HostPeer)
    with opened(server) as ds:
        gpu.do(f"fail={name}:1:801")
        with pytest.raises(
            helios.CapabilityError,
            match=f"on the host; and through pinned memory.*{name}: CUDA_ERROR_NOT_SUPPORTED",
        ):
            helios.NumpyLoader(ds, device="cuda")
        gc.collect()
        assert not any(gpu.live().values()), gpu.do("live")
        gpu.do(f"fail={name}:1:801")
        loader = helios.NumpyLoader(ds, device="auto")
        assert (loader.device, loader.ring) == ("cpu", "cpu")
        assert next(iter(loader)).x.tolist() == expected(0, 0)["x"].tolist()
        gpu.do(f"fail={name}:1:719")
        with pytest.raises(helios.DeviceError, match=f"{name}: CUDA_ERROR_LAUNCH_FAILED"):
            helios.NumpyLoader(ds, device="auto")


@pytest.mark.parametrize("name", ["cuMemcpyHtoDAsync_v2", "cuStreamSynchronize"])
def test_a_copy_from_pinned_memory_that_fails(gpu, fake, name):
    with opened(fake(HostPeer)) as ds:
        it = iter(helios.NumpyLoader(ds, device="cuda"))
        gpu.do(f"fail={name}:1:719")
        with pytest.raises(helios.DeviceError, match=f"{name}: CUDA_ERROR_LAUNCH_FAILED"):
            next(it)


@pytest.mark.parametrize("name", ["cuMemAlloc_v2", "cuMemcpyDtoD_v2", "cuCtxSynchronize"])
def test_a_copy_that_fails(gpu, fake, name):
    with opened(fake(GpuPeer)) as ds:
        it = iter(helios.NumpyLoader(ds, device="cuda", copy=True))
        gpu.do(f"fail={name}:1:719")
        with pytest.raises(helios.DeviceError, match=f"{name}: CUDA_ERROR_LAUNCH_FAILED"):
            next(it)


def test_no_memory_for_a_copy(gpu, fake):
    """It costs the batch alone: its slot goes back, and the next epoch is whole."""
    server = fake(GpuPeer)
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda", copy=True)
        it = iter(loader)
        gpu.do("fail=cuMemAlloc_v2:1:2")
        with pytest.raises(helios.CapabilityError, match="CUDA_ERROR_OUT_OF_MEMORY.*free memory"):
            next(it)
        assert [b.index for b in loader] == [0, 1, 2, 3, 4]
        theirs = server.peers[0].loader
        server.wait(lambda: len(theirs.released) == 10 and len(theirs.free) == 4)


@pytest.mark.parametrize(("code", "kind"), [(2, helios.CapabilityError), (719, helios.DeviceError)])
def test_a_larger_ring_that_cannot_be_mapped(gpu, fake, code, kind):
    """No batch is read from the ring before; the next epoch has a loader of its own."""
    server = fake(peer(grow_at=2))
    with opened(server) as ds:
        loader = helios.NumpyLoader(ds, device="cuda")
        it = iter(loader)
        batches = [next(it), next(it)]
        gpu.do(f"fail=cuMemMap:1:{code}")
        with pytest.raises(kind, match="cuMemMap"):
            next(it)
        for i, batch in enumerate(batches):
            check(batch, 0, i)
        for i, batch in enumerate(loader):
            check(batch, 1, i)
        assert len(server.peers[0].loaders) == 2


@pytest.mark.parametrize("name", ["cuCtxSynchronize", "cuMemUnmap", "cuMemAddressFree"])
def test_a_ring_that_cannot_be_freed(gpu, fake, name, monkeypatch):
    """It is told, though by nobody who could be asked; what can be freed is."""
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda u: told.append(str(u.exc_value)))
    monkeypatch.setattr(sys, "excepthook", lambda _k, e, _t: told.append(str(e)))
    with opened(fake(GpuPeer)) as ds:
        loader = helios.NumpyLoader(ds, device="cuda")
        gpu.do(f"fail={name}:1:719")
        del loader
    gc.collect()
    assert len(told) == 1
    assert f"{name}: CUDA_ERROR_LAUNCH_FAILED" in told[0]
    assert gpu.live()["contexts"] == 0
    if name != "cuCtxSynchronize":
        gpu.do("reset,error")


def test_no_library(gpu, fake, monkeypatch):
    for library, want in (
        ("libcuda-of-no-test.so", "install NVIDIA's driver"),
        ("libm.so.6", "libm.so.6 lacks cuInit, cuDeviceGet, cuDeviceGetByPCIBusId"),
    ):
        monkeypatch.setenv(_cuda.LIBRARY, library)
        with opened(fake(GpuPeer)) as ds:
            with pytest.raises(helios.CapabilityError, match=want):
                helios.NumpyLoader(ds, device="cuda")
            loader = helios.NumpyLoader(ds, device="auto")
            assert loader.device == "cpu"
            assert isinstance(next(iter(loader)).x, np.ndarray)


def test_no_gpu(gpu, fake):
    gpu.do("init=100")
    _cuda._open.cache_clear()
    with (
        opened(fake(GpuPeer)) as ds,
        pytest.raises(helios.CapabilityError, match="cuInit: CUDA_ERROR_NO_DEVICE .*no GPU is"),
    ):
        helios.NumpyLoader(ds, device="cuda")
    gpu.do("init=0")
    with opened(fake(peer(lies={"device": "cuda:0000:77:00.0"}))) as ds:
        assert helios.NumpyLoader(ds, device="cuda").ring == "pinned"
    with opened(fake(peer(lies={"device": None}))) as ds:
        assert helios.NumpyLoader(ds, device="cuda").ring == "pinned"
        gpu.do("fail=cuMemHostRegister_v2:1:2")
        with pytest.raises(helios.CapabilityError, match="daemon gives batches in the CPU's"):
            helios.NumpyLoader(ds, device="cuda")


LIES = [
    ({"device": "cuda"}, "unknown device 'cuda'"),
    ({"device": "npu:0000:01:00.0"}, "unknown device"),
    ({"device": 7}, "on device 7"),
    ({"file_bytes": None}, "ring of None bytes"),
    ({"file_bytes": 4096}, "in 4096"),
    ({"slots": 0}, "ring of 0 slots"),
]


@pytest.mark.parametrize(("lies", "want"), LIES)
def test_a_ring_that_is_no_ring(gpu, fake, lies, want):
    with (
        opened(fake(peer(lies=lies))) as ds,
        pytest.raises(helios.ProtocolError, match=want),
    ):
        helios.NumpyLoader(ds, device="cuda")


@pytest.mark.parametrize("edges", [None, [6], [7, 4], [7, 3], [6, 99], [6, -4], "64", [3, 7]])
def test_edges_that_do_not_fit(gpu, fake, edges):
    # The last one's sum fits: only the blocks tell, which are read on the CPU alone.
    device = "cpu" if edges == [3, 7] else "cuda"
    with opened(fake(peer(edges=edges))) as ds, pytest.raises(helios.ProtocolError, match="edges"):
        next(iter(helios.NumpyLoader(ds, device=device)))


def test_devices_by_name(gpu, fake):
    server = fake(GpuPeer)
    with opened(server) as ds:
        for name in ("gpu", "cuda:", "cuda:x", "cuda:-1"):
            with pytest.raises(helios.UsageError, match=f"'{name}'.*daemon_device names"):
                helios.NumpyLoader(ds, device=name)
        helios.NumpyLoader(ds, daemon_device="cuda:1")
        # The loader may have closed itself by now: it is kept nowhere.
        asked = next(r for r in server.peers[0].requests if r["type"] == "loader")
        assert asked["options"]["device"] == "cuda:1"
        assert "device" not in asked


def test_a_forked_child(gpu, fake):
    """It cannot use CUDA, and leaves what its parent mapped."""
    with opened(fake(GpuPeer)) as ds:
        batch = next(iter(helios.NumpyLoader(ds, device="cuda")))
        child = os.fork()
        if child == 0:
            code = 1
            try:
                with pytest.raises(helios.CapabilityError, match="start processes by spawn"):
                    _cuda.driver()
                del batch
                gc.collect()
                code = 0 if gpu.calls("cuMemUnmap") == 0 else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        check(batch, 0, 0)


def test_a_tensor_that_outlives_python(fake_library):
    """Its deleter is no function of an interpreter that has ended."""
    program = """
        import atexit, ctypes, os
        structs = []
        def last():
            deleters = [helios._cuda._Managed.from_address(s).deleter for s in structs]
            os._exit(0 if deleters == [None] else 1)
        atexit.register(last)  # runs after those of later imports
        import helios, helios._cuda
        memory = helios._cuda.Memory(None, 4096, 64)
        capsule = helios._cuda._capsule(memory, 4096, (2, 0), "int64", (8,))
        api = ctypes.pythonapi
        api.PyCapsule_SetName.argtypes = ctypes.py_object, ctypes.c_char_p
        name = b"used_dltensor"
        api.PyCapsule_SetName(capsule, name)
        structs += helios._cuda._out
        del capsule
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(program)], check=True, timeout=60)


@pytest.fixture
def wrapped(monkeypatch):
    """PyTorch on a CPU, which takes no array of a GPU: the test copies it in PyTorch's place."""
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    seen = []

    def from_dlpack(array):
        assert isinstance(array, helios.DeviceArray)
        seen.append(array)
        return torch.from_numpy(array.numpy())

    monkeypatch.setattr(torch, "from_dlpack", from_dlpack)
    return SimpleNamespace(torch=torch, seen=seen)


def test_tensors(gpu, fake, wrapped, monkeypatch):
    from helios.torch import Loader as TorchLoader
    from helios.torch import block_edges

    torch = wrapped.torch
    with opened(fake(GpuPeer)) as ds:
        named = functools.partial(
            helios.NeighborLoader, num_neighbors=[1, 1], split="train", seed=1
        )
        for kind in (TorchLoader, named):
            monkeypatch.setattr(torch.version, "cuda", None)
            with pytest.raises(helios.CapabilityError, match="is built without CUDA"):
                kind(ds, device="cuda")
            monkeypatch.setattr(torch.version, "cuda", "13.0")
            monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
            with pytest.raises(helios.CapabilityError, match="PyTorch finds no GPU here"):
                kind(ds, device="cuda")
            assert kind(ds, device="auto").device == "cpu"
            monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
            loader = kind(ds, device=torch.device("cuda"))
            wrapped.seen.clear()
            batch = next(iter(loader))
            assert len(wrapped.seen) == 8
            for name in ("x", "n_id", "y", "edge_index"):
                got, want = getattr(batch, name).numpy(), expected(0, 0)[name]
                assert np.array_equal(got[: len(want)], want)
            assert block_edges(batch.blocks[1])[1].tolist() == list(range(10))
            assert batch.num_sampled_edges == GpuPeer.edges
            assert len(helios.adjs(batch)) == 2
            del batch
            wrapped.seen.clear()


def test_without_pytorch(gpu, fake):
    """PyG's batch is an object of arrays that others take by DLPack."""
    if importlib.util.find_spec("torch"):
        pytest.skip("PyTorch is installed")
    with opened(fake(GpuPeer)) as ds:
        batch = next(iter(helios.NeighborLoader(ds, [1, 1], split="train", seed=1, device="cuda")))
        assert isinstance(batch.x, helios.DeviceArray)
        assert batch.edge_index.numpy().tolist() == expected(0, 0)["edge_index"].tolist()
        assert batch.num_sampled_edges == GpuPeer.edges
        with pytest.raises(helios.CapabilityError, match="made by PyTorch"):
            helios.adjs(batch)


def test_the_real_daemon(gpu, binary, tmp_path, monkeypatch):
    """heliosctl's GPU is another process's fake: its batches are those of the CPU's ring."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HELIOS_FAKECUDA", "mem=1073741824")

    def run(*arguments):
        helios.run(*arguments, binary=binary)

    run("generate", "--nodes=600", "--dim=256", f"--out={tmp_path / 'g'}")
    run("bind-ssds", f"--proxy={tmp_path / 'a.img'}", "--size=16MiB")
    run("load", str(tmp_path / "g"))
    options = {"mode": "helios", "gpu_cache": "16KiB", "cpu_cache": "0", "hotness": "degree"}
    options |= {"batch_size": 100, "daemon_device": "cuda"}
    seen = {}
    with helios.open(tmp_path / "g", binary=binary, timeout=120) as ds:
        for device in ("cpu", "cuda", "auto"):
            loader = helios.NumpyLoader(ds, [3, 2], device=device, **options)
            assert loader.device == ("cpu" if device == "cpu" else "cuda:0")
            seen[device] = [copied(b) for _ in range(2) for b in loader]
            loader.close()
            del loader
        assert len(seen["cpu"]) > 2
        for device in ("cuda", "auto"):
            for got, want in zip(seen[device], seen["cpu"], strict=True):
                assert got.keys() == want.keys()
                for name, array in want.items():
                    assert np.array_equal(got[name], array), name
        # Rows of a batch are larger than the first slots, so each ring was replaced once.
        assert gpu.calls("cuMemImportFromShareableHandle") == 4
        gc.collect()
        assert gpu.live()["reserved"] == 0
        # A daemon that works with the CPU, and the ring pinned: the same batches on the GPU.
        loader = helios.NumpyLoader(
            ds, [3, 2], device="cuda", **{**options, "mode": "inmem", "daemon_device": "host"}
        )
        assert (loader.device, loader.ring) == ("cuda:0", "pinned")
        for want, b in zip(seen["cpu"], (b for _ in range(2) for b in loader), strict=True):
            for name, array in copied(b).items():
                assert np.array_equal(array, want[name]), name
        del loader, b
        gc.collect()
        assert gpu.live()["device"] == 0
        it = iter(helios.NumpyLoader(ds, [3, 2], device="cuda", **options))
        batch = next(it)
        os.kill(ds.session()[0].daemon_pid, signal.SIGKILL)
        ds.close()  # waits for its end
        for name, array in copied(batch).items():
            assert np.array_equal(array, seen["cpu"][0][name]), name


def test_clients_that_see_a_gpu_each(gpu, binary, tmp_path, monkeypatch):
    """One daemon, which takes the GPU that a client means. The fake itself shows a process all."""
    monkeypatch.setenv("HELIOS_STATE", str(tmp_path / "state"))
    monkeypatch.setenv("HELIOS_FAKECUDA", "mem=1073741824,devices=3")
    gpu.do("devices=3")
    helios.run("generate", "--nodes=600", "--dim=64", f"--out={tmp_path / 'g'}", binary=binary)
    pids = set()
    for visible, named, number in (("2,0", "cuda:1", 0), ("2,0", None, 2), ("1", "cuda", 1)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        with helios.open(tmp_path / "g", binary=binary) as ds:
            pids.add(ds.session()[0].daemon_pid)
            options = {"batch_size": 100, "mode": "inmem", "daemon_device": named}
            loader = helios.NumpyLoader(ds, [3, 2], device="cuda", **options)
            assert (loader.device, loader.ring) == (f"cuda:{number}", "gpu")
            with pytest.raises(helios.CapabilityError, match="no GPU of the daemon's"):
                helios.NumpyLoader(ds, [3, 2], **{**options, "daemon_device": "cuda:2"})
            # Ranks that see a GPU each are one job, and take pinned rings.
            loader = helios.NumpyLoader(ds, [3, 2], device="cuda", world_size=2, **options)
            assert loader.ring == ("gpu" if "," in visible else "pinned")
            del loader
    assert len(pids) == 1


def copied(batch):
    """All numbers of a batch, in the CPU's memory."""
    arrays = {name: getattr(batch, name) for name in ("x", "n_id", "y", "edge_index")}
    for h, block in enumerate(batch.blocks):
        arrays |= {f"indptr.{h}": block.indptr, f"src.{h}": block.src}
    out = {
        k: a.numpy() if isinstance(a, helios.DeviceArray) else a.copy() for k, a in arrays.items()
    }
    return {**out, "about": [batch.epoch, batch.index, *batch.hop_end, *batch.num_sampled_edges]}
