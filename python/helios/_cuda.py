"""Batches on a GPU, through libcuda alone: in memory of the daemon's, or copied to our own.

The daemon sends the descriptor of an allocation (docs/reference/protocol.md, "On the GPU"). It is
mapped into the device's primary context, which PyTorch, CuPy and JAX use too. Where the daemon has
no memory there to give, its ring in the CPU's memory is pinned, and each batch is copied from it.
Arrays go on by DLPack, without another copy.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import os
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np

from ._errors import CapabilityError, DeviceError, HeliosError, ProtocolError
from ._ring import DTYPES, Place, Ring, places

#: the variable that names another libcuda, for heliosctl too
LIBRARY = "HELIOS_LIBCUDA"

_Handle = ctypes.c_ulonglong  # of memory
_Address = ctypes.c_ulonglong


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("kind", ctypes.c_int), ("device", ctypes.c_int), ("flags", ctypes.c_int))


_ON_DEVICE = 1  # CU_MEM_LOCATION_TYPE_DEVICE
_READ_WRITE = 3  # CU_MEM_ACCESS_FLAGS_PROT_READWRITE
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING
_DESCRIPTOR = 1  # CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR

_pointer = ctypes.POINTER
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "cuInit": (ctypes.c_uint,),
    "cuDeviceGet": (_pointer(ctypes.c_int), ctypes.c_int),
    "cuDeviceGetByPCIBusId": (_pointer(ctypes.c_int), ctypes.c_char_p),
    "cuDevicePrimaryCtxRetain": (_pointer(ctypes.c_void_p), ctypes.c_int),
    "cuDevicePrimaryCtxRelease_v2": (ctypes.c_int,),
    "cuCtxPushCurrent_v2": (ctypes.c_void_p,),
    "cuCtxPopCurrent_v2": (_pointer(ctypes.c_void_p),),
    "cuCtxSynchronize": (),
    "cuMemImportFromShareableHandle": (_pointer(_Handle), ctypes.c_void_p, ctypes.c_int),
    "cuMemAddressReserve": (
        _pointer(_Address),
        ctypes.c_size_t,
        ctypes.c_size_t,
        _Address,
        ctypes.c_ulonglong,
    ),
    "cuMemMap": (_Address, ctypes.c_size_t, ctypes.c_size_t, _Handle, ctypes.c_ulonglong),
    "cuMemSetAccess": (_Address, ctypes.c_size_t, _pointer(_Access), ctypes.c_size_t),
    "cuMemUnmap": (_Address, ctypes.c_size_t),
    "cuMemRelease": (_Handle,),
    "cuMemAddressFree": (_Address, ctypes.c_size_t),
    "cuMemAlloc_v2": (_pointer(_Address), ctypes.c_size_t),
    "cuMemFree_v2": (_Address,),
    "cuMemHostRegister_v2": (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint),
    "cuMemHostUnregister": (ctypes.c_void_p,),
    "cuStreamCreate": (_pointer(ctypes.c_void_p), ctypes.c_uint),
    "cuStreamDestroy_v2": (ctypes.c_void_p,),
    "cuStreamSynchronize": (ctypes.c_void_p,),
    "cuMemcpyHtoDAsync_v2": (_Address, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p),
    "cuMemcpyDtoD_v2": (_Address, _Address, ctypes.c_size_t),
    "cuMemcpyDtoH_v2": (ctypes.c_void_p, _Address, ctypes.c_size_t),
    "cuGetErrorName": (ctypes.c_int, _pointer(ctypes.c_char_p)),
    "cuGetErrorString": (ctypes.c_int, _pointer(ctypes.c_char_p)),
}

# Results that say what the machine lacks; others are failures of the device.
_NOT_INITIALIZED = 3
_LACKS = {
    2: "free memory of the GPU, or take fewer slots or smaller batches",
    _NOT_INITIALIZED: "a forked child cannot use CUDA: start processes by spawn",
    34: "install NVIDIA's driver; this library is a stub",
    46: "another process has the GPU for itself",
    100: "no GPU is visible here (nvidia-smi, CUDA_VISIBLE_DEVICES)",
    101: "that GPU is not visible here (nvidia-smi, CUDA_VISIBLE_DEVICES)",
    800: "the driver does not allow it here",
    801: "the driver or GPU does not share memory between processes",
    803: "the driver's library and its kernel module are of different versions",
    804: "the driver is too old for this library",
}


class Driver:
    """libcuda, initialised in this process."""

    def __init__(self, library: str) -> None:
        self.pid = os.getpid()
        try:
            lib = ctypes.CDLL(library)
        except OSError as e:
            raise CapabilityError(
                f'device cuda: {e}; install NVIDIA\'s driver, or give device="cpu"'
            ) from None
        self._functions: dict[str, Any] = {}
        missing = []
        for name, arguments in _FUNCTIONS.items():
            try:
                f = getattr(lib, name)
            except AttributeError:
                missing.append(name)
                continue
            f.argtypes, f.restype = arguments, ctypes.c_int
            self._functions[name] = f
        if missing:
            raise CapabilityError(
                f"device cuda: {library} lacks {', '.join(missing)}; install a driver of CUDA 10.2 "
                'or later, or give device="cpu"'
            )
        self.call("cuInit", 0)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls a function of the driver's, and raises its failure."""
        result = self._functions[name](*arguments)
        if result == 0:
            return
        message = f"device cuda: {name}: {self._describe(result)}"
        if result in _LACKS:
            raise CapabilityError(f"{message}; {_LACKS[result]}")
        raise DeviceError(message)

    def _describe(self, result: int) -> str:
        words = []
        for f in ("cuGetErrorName", "cuGetErrorString"):
            text = ctypes.c_char_p()
            if self._functions[f](result, ctypes.byref(text)) == 0 and text.value:
                words.append(text.value.decode(errors="replace"))
        return f"{words[0]} ({', '.join(words[1:])})" if words else f"error {result}"


_open = functools.cache(Driver)


def driver() -> Driver:
    """Returns libcuda: $HELIOS_LIBCUDA, or the system's."""
    found = _open(os.environ.get(LIBRARY) or "libcuda.so.1")
    if found.pid != os.getpid():
        raise CapabilityError(
            "device cuda: a forked child cannot use CUDA, which its parent has used: start "
            'processes by spawn, or give device="cpu"'
        )
    return found


class Gpu:
    """A GPU by its PCI bus ID, or by the number that PyTorch has for it.

    Its primary context is kept while this object lives.
    """

    def __init__(self, name: str | int) -> None:
        self.driver = driver()
        number, context = ctypes.c_int(), ctypes.c_void_p()
        call = self.driver.call
        if isinstance(name, int):
            call("cuDeviceGet", ctypes.byref(number), name)
        else:
            call("cuDeviceGetByPCIBusId", ctypes.byref(number), name.encode())
        self.number = number.value  #: PyTorch has it as cuda:number
        call("cuDevicePrimaryCtxRetain", ctypes.byref(context), number)
        self._context = context
        free = weakref.finalize(self, _here, self.driver, "cuDevicePrimaryCtxRelease_v2", number)
        free.atexit = False

    @contextlib.contextmanager
    def current(self) -> Iterator[Any]:
        """Makes the context this thread's, and gives what calls functions."""
        call = self.driver.call
        call("cuCtxPushCurrent_v2", self._context)
        try:
            yield call
        finally:
            call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def synchronize(self) -> None:
        """Waits for all that this process has the GPU do, on whichever stream."""
        with self.current() as call:
            call("cuCtxSynchronize")

    def allocate(self, size: int) -> Memory:
        """Returns memory of this process's own."""
        address = _Address()
        with self.current() as call:
            call("cuMemAlloc_v2", ctypes.byref(address), max(size, 1))
        memory = Memory(self, address.value, size)
        free = weakref.finalize(memory, _end, self, (("cuMemFree_v2", address),))
        free.atexit = False
        return memory


def _here(of: Driver, name: str, *arguments: Any) -> None:
    """Calls a function, unless this is a forked child: there CUDA, and what we made, are not."""
    if of.pid == os.getpid():
        of.call(name, *arguments)


def _end(gpu: Gpu, calls: tuple[tuple[Any, ...], ...], _kept: object = None) -> None:
    """Frees memory, once no kernel can use it any more; what is kept goes with the last call."""
    if gpu.driver.pid != os.getpid():
        return
    failed = []
    with gpu.current() as call:
        for name, *arguments in (("cuCtxSynchronize",), *calls):
            try:
                call(name, *arguments)
            except HeliosError as e:  # the others free what can be freed
                failed.append(str(e))
    if failed:
        raise DeviceError("; ".join(failed))


class Memory:
    """Bytes on a GPU. They stay while this object lives."""

    def __init__(self, gpu: Gpu, address: int, size: int, of: object = None) -> None:
        self.gpu, self.address, self.size = gpu, address, size
        self._of = of


class GpuRing:
    """slots × slot_bytes of a GPU's memory, which the daemon made."""

    on_gpu = True
    kind = "gpu"

    def __init__(self, fd: int, slots: int, slot_bytes: int, device: str, file_bytes: int) -> None:
        """Maps the allocation behind the descriptor; the caller keeps fd."""
        if slots < 1 or slot_bytes < 1 or file_bytes < slots * slot_bytes:
            raise ProtocolError(
                f"the daemon made a ring of {slots} slots of {slot_bytes} bytes in {file_bytes}"
            )
        kind, _, pci = device.partition(":")
        if kind != "cuda" or not pci:
            raise ProtocolError(f"the daemon made a ring on the unknown device {device!r}")
        self.slots, self.slot_bytes = slots, slot_bytes
        self.gpu = Gpu(pci)
        self._address = _map(self.gpu, fd, file_bytes)
        at = _Address(self._address)
        calls = (("cuMemUnmap", at, file_bytes), ("cuMemAddressFree", at, file_bytes))
        weakref.finalize(self, _end, self.gpu, calls).atexit = False

    def take(
        self, described: object, slot: int, copy: bool
    ) -> tuple[dict[str, tuple[DeviceArray, str]], Memory | None]:
        """Returns the arrays of a batch, and what lives as long as one that lies in the slot."""
        of = places(described, self.slot_bytes)
        memory = Memory(self.gpu, self._address + slot * self.slot_bytes, self.slot_bytes, of=self)
        if not copy:
            return _arrays(memory, of), memory
        size = _end_of(of)
        copied = self.gpu.allocate(size)
        with self.gpu.current() as call:
            if size:
                call("cuMemcpyDtoD_v2", copied.address, memory.address, size)
            call("cuCtxSynchronize")  # a copy within a device goes on behind the call
        return _arrays(copied, of), None


class PinnedRing:
    """A ring in the CPU's memory, pinned, with as many slots on a GPU that batches are copied to.

    A slot of both is ours until its tensors have gone and the kernels that read them have ended.
    """

    on_gpu = True
    kind = "pinned"

    def __init__(self, fd: int, slots: int, slot_bytes: int, number: int) -> None:
        """Maps and pins the file; the caller keeps fd."""
        self._host = Ring(fd, slots, slot_bytes)
        self.slots, self.slot_bytes = slots, slot_bytes
        self.gpu = Gpu(number)
        stream, memory = ctypes.c_void_p(), _Address()
        with self.gpu.current() as call, contextlib.ExitStack() as undo:
            host, size = self._host.address, slots * slot_bytes
            call("cuMemHostRegister_v2", host, size, 0)
            undo.callback(call, "cuMemHostUnregister", host)
            call("cuMemAlloc_v2", ctypes.byref(memory), size)
            undo.callback(call, "cuMemFree_v2", memory)
            # One that does not wait for kernels of others on the default stream.
            call("cuStreamCreate", ctypes.byref(stream), _NON_BLOCKING)
            undo.pop_all()
        self._address, self._stream = memory.value, stream
        calls = (
            ("cuStreamDestroy_v2", stream),
            ("cuMemFree_v2", memory),
            ("cuMemHostUnregister", host),
        )
        # The host's mapping is kept until it is pinned no more.
        weakref.finalize(self, _end, self.gpu, calls, self._host).atexit = False

    def take(
        self, described: object, slot: int, copy: bool
    ) -> tuple[dict[str, tuple[DeviceArray, str]], Memory | None]:
        """Returns the arrays of a batch, and what lives as long as one that lies in the slot."""
        of = places(described, self.slot_bytes)
        size, at = _end_of(of), slot * self.slot_bytes
        if copy:
            memory = self.gpu.allocate(size)
        else:
            memory = Memory(self.gpu, self._address + at, self.slot_bytes, of=self)
        with self.gpu.current() as call:
            if size:
                host = self._host.address + at
                call("cuMemcpyHtoDAsync_v2", memory.address, host, size, self._stream)
            call("cuStreamSynchronize", self._stream)
        return _arrays(memory, of), None if copy else memory


def _arrays(memory: Memory, of: list[Place]) -> dict[str, tuple[DeviceArray, str]]:
    return {p.name: (DeviceArray(memory, p.kind, p.shape, p.offset), p.kind) for p in of}


def _end_of(of: list[Place]) -> int:
    return max((p.end for p in of), default=0)


def _map(gpu: Gpu, fd: int, size: int) -> int:
    """Maps an allocation of another process, which goes with the mapping."""
    handle, address = _Handle(), _Address()
    access = _Access(_ON_DEVICE, gpu.number, _READ_WRITE)
    with gpu.current() as call, contextlib.ExitStack() as undo:
        call(
            "cuMemImportFromShareableHandle", ctypes.byref(handle), ctypes.c_void_p(fd), _DESCRIPTOR
        )
        with contextlib.ExitStack() as imported:
            imported.callback(call, "cuMemRelease", handle)
            call("cuMemAddressReserve", ctypes.byref(address), size, 0, 0, 0)
            undo.callback(call, "cuMemAddressFree", address, size)
            call("cuMemMap", address, size, 0, handle, 0)
            undo.callback(call, "cuMemUnmap", address, size)
        call("cuMemSetAccess", address, size, ctypes.byref(access), 1)
        undo.pop_all()
    return address.value


class DeviceArray:
    """An array on a GPU, for whatever takes DLPack: ``torch.from_dlpack``, CuPy, JAX.

    It is of a loader with ``device="cuda"``; loaders of tensors give tensors. While it lives, or a
    tensor made of it, its slot in the ring stays yours.
    """

    def __init__(self, memory: Memory, dtype: str, shape: tuple[int, ...], offset: int) -> None:
        self._memory, self._offset = memory, offset
        self.dtype = dtype  #: the type's name, such as ``"float32"`` or ``"bfloat16"``
        self.shape = shape

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize

    def view(self, dtype: str) -> DeviceArray:
        """Returns the same bytes as elements of another type of that size."""
        if DTYPES[dtype].itemsize != DTYPES[self.dtype].itemsize:
            raise ValueError(f"{dtype} and {self.dtype} are of different sizes")
        return DeviceArray(self._memory, dtype, self.shape, self._offset)

    def numpy(self) -> np.ndarray[Any, Any]:
        """Returns a copy in the CPU's memory. bfloat16 has no type there: its bits are uint16."""
        out = np.empty(self.shape, DTYPES[self.dtype])
        if out.nbytes:
            with self._memory.gpu.current() as call:
                address = self._memory.address + self._offset
                call("cuMemcpyDtoH_v2", ctypes.c_void_p(out.ctypes.data), address, out.nbytes)
        return out

    def __len__(self) -> int:
        return self.shape[0]

    def __dlpack_device__(self) -> tuple[int, int]:
        """Returns the kind of device and its number."""
        return _CUDA, self._memory.gpu.number

    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: Any = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any:
        """Returns a capsule. What it has is complete, so no stream has to wait."""
        if dl_device is not None and tuple(dl_device) != self.__dlpack_device__():
            raise BufferError(f"the array lies on {self.__dlpack_device__()}, not {dl_device}")
        if copy:
            raise BufferError("the array is not copied; copy the tensor that is made of it")
        where = self._memory.address + self._offset
        return _capsule(self._memory, where, self.__dlpack_device__(), self.dtype, self.shape)


# DLPack (dlpack.h): a struct that its consumer gives back through its deleter.

_CUDA = 2  # kDLCUDA

_SIGNED, _UNSIGNED, _FLOAT, _BFLOAT = 0, 1, 2, 4
_CODES = {"bfloat16": _BFLOAT, "float32": _FLOAT, "float16": _FLOAT, "uint32": _UNSIGNED}


class _Tensor(ctypes.Structure):
    """DLTensor, with DLDevice and DLDataType in it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (
        ("tensor", _Tensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


_libc = ctypes.CDLL(None)
_libc.calloc.argtypes, _libc.calloc.restype = (ctypes.c_size_t, ctypes.c_size_t), ctypes.c_void_p
_libc.free.argtypes, _libc.free.restype = (ctypes.c_void_p,), None
_python = ctypes.pythonapi
_new_capsule = ctypes.PYFUNCTYPE(
    ctypes.py_object, ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p
)(("PyCapsule_New", _python))
_is_capsule = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_IsValid", _python)
)
_in_capsule = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ("PyCapsule_GetPointer", _python)
)
_NAME = b"dltensor"  # a capsule keeps the pointer to it; consumers change the name

# Objects that structs in use keep alive, by address. The structs are C's: one may outlive Python.
_out: dict[int, object] = {}


def _take_back(struct: int) -> None:
    """Frees a struct, and what it keeps; called by whatever thread the tensor dies in."""
    _out.pop(struct, None)
    _libc.free(struct)


def _drop(capsule: int) -> None:
    """Takes back the struct of a capsule that dies, unless someone has taken it over."""
    if _is_capsule(capsule, _NAME):
        _take_back(_in_capsule(capsule, _NAME))


_callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_deleter, _destructor = _callback(_take_back), _callback(_drop)


@atexit.register
def _forget_deleters() -> None:
    """Lets tensors outlive the interpreter, which a deleter must not call then."""
    for struct in list(_out):
        _Managed.from_address(struct).deleter = None


def _capsule(
    memory: object, where: int, device: tuple[int, int], dtype: str, shape: tuple[int, ...]
) -> Any:
    n = len(shape)
    struct = _libc.calloc(1, ctypes.sizeof(_Managed) + 2 * 8 * n)
    if not struct:
        raise MemoryError
    sizes = (ctypes.c_int64 * (2 * n)).from_address(struct + ctypes.sizeof(_Managed))
    step = 1
    for i in range(n - 1, -1, -1):
        sizes[i], sizes[n + i] = shape[i], step
        step *= shape[i]
    managed = _Managed.from_address(struct)
    managed.deleter = ctypes.cast(_deleter, ctypes.c_void_p).value
    t = managed.tensor
    t.data, t.ndim, (t.device_type, t.device_id) = where, n, device
    t.code, t.bits, t.lanes = _CODES.get(dtype, _SIGNED), 8 * DTYPES[dtype].itemsize, 1
    t.shape, t.strides = ctypes.addressof(sizes), ctypes.addressof(sizes) + 8 * n
    _out[struct] = memory
    try:
        return _new_capsule(struct, _NAME, ctypes.cast(_destructor, ctypes.c_void_p))
    except BaseException:
        _take_back(struct)
        raise
