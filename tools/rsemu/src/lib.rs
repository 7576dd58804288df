//! The NVMe controller of the crate rsemu behind a few C functions: registers, doorbells, and a list
//! of the memory that it may reach. Addresses on its bus are those of this process.
//!
//! The caller keeps a handle alive while it calls, and memory while it is mapped. Functions of one
//! handle may be called by several threads at once.

use std::ffi::{CStr, c_char};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, RwLock};

use rsemu::core::error::BusError;
use rsemu::core::space::{
    AccessConstraints, AddressSpace, MemAttrs, MemOps, MemResult, RamStore, Region, RequesterId,
};
use rsemu::dev::medium::Medium;
use rsemu::dev::nvme::{Controller, Namespace, Params};

/// The memory of this process that the controller may reach, as regions of address and length.
#[derive(Debug, Default)]
struct Host {
    maps: RwLock<Vec<(u64, u64)>>,
    refused: AtomicU64, // accesses of other memory
}

impl Host {
    /// Runs f unless the access leaves what is mapped. Nothing is unmapped while it runs.
    fn within(&self, at: u64, bytes: usize, f: impl FnOnce()) -> MemResult {
        let maps = self.maps.read().unwrap();
        let end = at.checked_add(bytes as u64).ok_or(BusError::BadAccess)?;
        if !maps.iter().any(|&(a, n)| a <= at && end <= a + n) {
            self.refused.fetch_add(1, Ordering::Relaxed);
            return Err(BusError::Unassigned);
        }
        f();
        Ok(())
    }
}

impl MemOps for Host {
    fn read(&self, at: u64, dst: &mut [u8], _: MemAttrs) -> MemResult {
        self.within(at, dst.len(), || {
            // SAFETY: the caller keeps what is mapped alive, and within has held at to it.
            unsafe { ptr::copy_nonoverlapping(at as *const u8, dst.as_mut_ptr(), dst.len()) }
        })
    }

    fn write(&self, at: u64, src: &[u8], _: MemAttrs) -> MemResult {
        self.within(at, src.len(), || {
            // SAFETY: as in read. Words go in order, so that the phase of a completion, in its last
            // one, is seen after the rest.
            unsafe {
                if at % 8 == 0 && src.len() % 8 == 0 && src.len() <= 16 {
                    for (i, w) in src.chunks_exact(8).enumerate() {
                        let to = AtomicU64::from_ptr((at as *mut u64).add(i));
                        to.store(u64::from_ne_bytes(w.try_into().unwrap()), Ordering::Release);
                    }
                } else {
                    ptr::copy_nonoverlapping(src.as_ptr(), at as *mut u8, src.len());
                }
            }
        })
    }

    fn constraints(&self) -> AccessConstraints {
        AccessConstraints::ANY
    }
}

/// A controller and the bus that it masters.
pub struct Handle {
    ctrl: Arc<Controller>,
    host: Arc<Host>,
    _space: Arc<AddressSpace>, // the controller has a weak reference
}

/// Makes a controller with one namespace of so many bytes of memory in blocks of 1 << shift; null
/// where rsemu takes no such namespace.
///
/// # Safety
///
/// serial is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_new(
    bytes: u64,
    shift: u32,
    queues: u32,
    serial: *const c_char,
) -> *mut Handle {
    // SAFETY: by the contract.
    let serial = unsafe { CStr::from_ptr(serial) }.to_string_lossy().into_owned();
    let medium: Arc<dyn Medium> = Arc::new(RamStore::new(bytes));
    let Ok(ns) = Namespace::new(medium, shift, false) else {
        return ptr::null_mut();
    };
    let params = Params { serial, io_queues: queues as u16, ..Params::default() };
    let ctrl = Arc::new(Controller::new(ns, params));
    let host = Arc::new(Host::default());
    let space = Arc::new(AddressSpace::new("host", 64));
    let region = Region::io("memory", 1 << 48, Arc::clone(&host) as Arc<dyn MemOps>);
    if space.topology().map(region, 0).is_err() {
        return ptr::null_mut();
    }
    ctrl.attach_space(&space, RequesterId(1));
    ctrl.set_master(true);
    Box::into_raw(Box::new(Handle { ctrl, host, _space: space }))
}

/// Frees a controller.
///
/// # Safety
///
/// h is of helios_rsemu_new, and nobody uses it any more.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_free(h: *mut Handle) {
    // SAFETY: by the contract.
    drop(unsafe { Box::from_raw(h) });
}

/// Reads a register into value; 0 where there is none.
///
/// # Safety
///
/// h is alive, and value can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_read32(h: *const Handle, off: u32, value: *mut u32) -> i32 {
    let mut b = [0; 4];
    // SAFETY: by the contract.
    let h = unsafe { &*h };
    let ok = h.ctrl.read(off.into(), &mut b, MemAttrs::DEFAULT).is_ok();
    // SAFETY: by the contract.
    unsafe { *value = u32::from_le_bytes(b) };
    ok.into()
}

/// Writes a register or a doorbell, and carries out what that asks for; 0 where there is none.
///
/// # Safety
///
/// h is alive, and so is all memory that is mapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_write32(h: *const Handle, off: u32, value: u32) -> i32 {
    // SAFETY: by the contract.
    let h = unsafe { &*h };
    let ok = h.ctrl.write(off.into(), &value.to_le_bytes(), MemAttrs::DEFAULT).is_ok();
    h.ctrl.run(); // what a long burst has left
    ok.into()
}

/// Lets the controller reach memory.
///
/// # Safety
///
/// h is alive; the memory stays until it is unmapped.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_map(h: *const Handle, at: u64, bytes: u64) {
    // SAFETY: by the contract.
    unsafe { &*h }.host.maps.write().unwrap().push((at, bytes));
}

/// Takes one mapping back, after accesses under way; 0 where there is none such.
///
/// # Safety
///
/// h is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_unmap(h: *const Handle, at: u64, bytes: u64) -> i32 {
    // SAFETY: by the contract.
    let mut maps = unsafe { &*h }.host.maps.write().unwrap();
    let Some(i) = maps.iter().position(|&m| m == (at, bytes)) else {
        return 0;
    };
    maps.swap_remove(i);
    1
}

/// Accesses of memory that is not mapped, since the beginning.
///
/// # Safety
///
/// h is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn helios_rsemu_refused(h: *const Handle) -> u64 {
    // SAFETY: by the contract.
    unsafe { &*h }.host.refused.load(Ordering::Relaxed)
}
