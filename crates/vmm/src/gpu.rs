//! What the GPU backends share: a driver over the virtual memory calls of a GPU's own library.
//!
//! The book is asked before each call, and no lock is held across it: freeing a range takes 80 ms on an H200, during which
//! another group may map. What a call ends is out of the book while the call lasts and back in it if the call fails.

#![allow(unsafe_code)]

use std::fmt;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::book::{Book, check_size};
use crate::driver::{Access, Device, Driver, DriverError, Handle, MemInfo, gpu_identity};

type Result<T> = std::result::Result<T, DriverError>;

/// The calls of one GPU, each made with that GPU selected, from any thread. They fail as those of [`Driver`] do, save that
/// they check nothing: what is unsafe here is safe once a book was asked.
pub(crate) trait Api: fmt::Debug + Send + Sync {
    /// Whether the memory of `create` reads as zeros. Where it may not, it is cleared as it is opened for the first time.
    const FRESH_IS_ZERO: bool;

    fn device(&self) -> Device;

    fn granularity(&self) -> u64;

    fn reserve(&self, bytes: u64) -> Result<usize>;

    /// # Safety
    /// One whole reservation of this value's, nothing mapped in it, which nobody else frees.
    unsafe fn free(&self, address: usize, bytes: u64) -> Result<()>;

    fn create(&self, bytes: u64) -> Result<Handle>;

    /// # Safety
    /// A handle of this value's that is not mapped and that nobody else releases.
    unsafe fn release(&self, handle: Handle) -> Result<()>;

    /// # Safety
    /// A hole in a reservation of this value's, and a handle of this value's that has this size.
    unsafe fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()>;

    /// # Safety
    /// Exactly one mapping of this value's.
    unsafe fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()>;

    /// # Safety
    /// Exactly one mapping of this value's each, open for writing, which their owner keeps until this returns.
    unsafe fn clear(&self, mappings: &[(usize, u64)]) -> Result<()>;

    /// # Safety
    /// Exactly one mapping of this value's, which nobody else unmaps.
    unsafe fn unmap(&self, address: usize, bytes: u64) -> Result<()>;

    fn uuid(&self) -> Result<[u8; 16]>;

    fn mem_info(&self) -> Result<MemInfo>;

    fn synchronise(&self) -> Result<()>;
}

/// One GPU and what was given out of it.
#[derive(Debug)]
pub(crate) struct Gpu<A> {
    api: A,
    /// Process that opened it. A GPU's library does not survive a fork, and the book's lock may not either.
    owner: u32,
    book: Mutex<Book>,
}

impl<A: Api> Gpu<A> {
    /// Nothing has been taken from `api` yet.
    pub fn new(api: A) -> Self {
        Gpu { api, owner: std::process::id(), book: Mutex::default() }
    }

    fn book(&self) -> MutexGuard<'_, Book> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses in a fork of the process that opened the device. Asked where a caller may begin, not in every call: whoever has
    /// a range asks before (it costs a system call), and a GPU's library itself refuses in a fork.
    fn enter(&self, call: &'static str) -> Result<()> {
        match self.owner == std::process::id() {
            true => Ok(()),
            false => Err(DriverError::Forked { call, owner: self.owner }),
        }
    }

    /// Opens a mapping of memory that was never open and may hold anything: as zeros.
    ///
    /// # Safety
    /// Exactly one mapping of ours.
    unsafe fn open_fresh(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        // SAFETY: the caller's mapping, which is open for writing when it is cleared. Nobody knows yet that there is memory.
        unsafe {
            self.api.set_access(address, bytes, Access::ReadWrite)?;
            self.api.clear(&[(address, bytes)])?;
            match access {
                Access::ReadWrite => Ok(()),
                Access::Read => self.api.set_access(address, bytes, access),
            }
        }
    }
}

impl<A: Api> Driver for Gpu<A> {
    fn device(&self) -> Device {
        self.api.device()
    }

    fn granularity(&self) -> u64 {
        self.api.granularity()
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        self.enter("reserve")?;
        check_size("reserve", bytes, self.granularity())?;
        let address = self.api.reserve(bytes)?;
        self.book().put_range(address, bytes);
        Ok(address)
    }

    fn free(&self, address: usize, bytes: u64) -> Result<()> {
        self.book().take_range("free", address, bytes)?;
        // SAFETY: this is one whole reservation of ours with nothing mapped in it, and now out of the book.
        let freed = unsafe { self.api.free(address, bytes) };
        if freed.is_err() {
            self.book().put_range(address, bytes);
        }
        freed
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        check_size("create", bytes, self.granularity())?;
        let handle = self.api.create(bytes)?;
        self.book().add_handle(handle, bytes);
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        let held = self.book().take_handle("release", handle)?;
        // SAFETY: the handle is ours and unmapped, and nobody else can release it now.
        let released = unsafe { self.api.release(handle) };
        if released.is_err() {
            self.book().put_handle(handle, held);
        }
        released
    }

    fn share(&self, handle: Handle) -> Result<()> {
        self.book().share("share", handle)
    }

    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        self.book().add_mapping("map", address, bytes, handle)?;
        // SAFETY: a hole in a reservation of ours, and a handle of ours that has this size.
        let mapped = unsafe { self.api.map(address, bytes, handle) };
        if mapped.is_err() {
            self.book().take_mapping("map", address, bytes)?;
        }
        mapped
    }

    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        let opened = self.book().check_access("set_access", address, bytes, access)?;
        // SAFETY: exactly one mapping of ours.
        unsafe {
            match opened || A::FRESH_IS_ZERO {
                true => self.api.set_access(address, bytes, access)?,
                false => self.open_fresh(address, bytes, access)?,
            }
        }
        self.book().opened(address, access);
        Ok(())
    }

    fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        self.book().check_writable("clear", mappings)?;
        // SAFETY: mappings of ours, open for writing, which their owner keeps until this returns.
        unsafe { self.api.clear(mappings) }
    }

    fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        let mapping = self.book().take_mapping("unmap", address, bytes)?;
        // SAFETY: exactly one mapping of ours, which nobody else can unmap now.
        let unmapped = unsafe { self.api.unmap(address, bytes) };
        if unmapped.is_err() {
            self.book().put_mapping(address, mapping);
        }
        unmapped
    }

    fn identity(&self) -> Result<String> {
        self.enter("identity")?;
        Ok(gpu_identity(self.api.uuid()?))
    }

    fn mem_info(&self) -> Result<MemInfo> {
        self.enter("mem_info")?;
        self.api.mem_info()
    }

    fn synchronise(&self) -> Result<()> {
        self.enter("synchronise")?;
        self.api.synchronise()
    }
}

/// Selects `wanted` (a context, a device) on this thread for `f`, and what the thread had after it.
pub(crate) fn selecting<S: Copy + PartialEq, T>(
    wanted: S,
    current: impl FnOnce() -> Result<S>,
    select: impl Fn(S) -> Result<()>,
    f: impl FnOnce() -> Result<T>,
) -> Result<T> {
    let was = current()?;
    if was == wanted {
        return f();
    }
    let _back = Back { was, select: &select };
    select(wanted)?;
    f()
}

/// Puts a thread's selection back.
struct Back<S: Copy, F: Fn(S) -> Result<()>> {
    was: S,
    select: F,
}

impl<S: Copy, F: Fn(S) -> Result<()>> Drop for Back<S, F> {
    fn drop(&mut self) {
        if let Err(error) = (self.select)(self.was) {
            // The call's own result stands: losing it would lose what it created.
            tracing::error!(%error, "what this thread had selected on the GPU could not be put back");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    /// A GPU that nothing may reach.
    #[derive(Debug)]
    struct OutOfReach;

    impl Api for OutOfReach {
        const FRESH_IS_ZERO: bool = false;
        fn device(&self) -> Device {
            Device::Cuda(0)
        }
        fn granularity(&self) -> u64 {
            1
        }
        fn reserve(&self, _: u64) -> Result<usize> {
            unreachable!()
        }
        unsafe fn free(&self, _: usize, _: u64) -> Result<()> {
            unreachable!()
        }
        fn create(&self, _: u64) -> Result<Handle> {
            unreachable!()
        }
        unsafe fn release(&self, _: Handle) -> Result<()> {
            unreachable!()
        }
        unsafe fn map(&self, _: usize, _: u64, _: Handle) -> Result<()> {
            unreachable!()
        }
        unsafe fn set_access(&self, _: usize, _: u64, _: Access) -> Result<()> {
            unreachable!()
        }
        unsafe fn clear(&self, _: &[(usize, u64)]) -> Result<()> {
            unreachable!()
        }
        unsafe fn unmap(&self, _: usize, _: u64) -> Result<()> {
            unreachable!()
        }
        fn uuid(&self) -> Result<[u8; 16]> {
            unreachable!()
        }
        fn mem_info(&self) -> Result<MemInfo> {
            unreachable!()
        }
        fn synchronise(&self) -> Result<()> {
            unreachable!()
        }
    }

    #[test]
    fn a_fork_is_refused_where_it_may_begin() {
        let gpu = Gpu { owner: u32::MAX, ..Gpu::new(OutOfReach) };
        let forked = |call: &str, r: Result<()>| match r {
            Err(DriverError::Forked { call: named, owner: u32::MAX }) => assert_eq!(named, call),
            other => panic!("{call}: {other:?}"),
        };
        forked("reserve", gpu.reserve(1).map(drop));
        forked("identity", gpu.identity().map(drop));
        forked("mem_info", gpu.mem_info().map(drop));
        forked("synchronise", gpu.synchronise());
    }

    #[test]
    fn a_thread_has_its_own_selection_back_however_the_call_ends() {
        let (selected, selections) = (Cell::new(1), Cell::new(0));
        let select = |wanted| {
            selections.set(selections.get() + 1);
            selected.set(wanted);
            Ok(())
        };
        let run = |wanted, f: &dyn Fn() -> Result<u8>| selecting(wanted, || Ok(selected.get()), select, f);
        let failed = || DriverError::NoSymbol { call: "f" };
        assert_eq!(run(2, &|| Ok(selected.get())), Ok(2));
        assert_eq!((selected.get(), selections.get()), (1, 2));
        assert_eq!(run(1, &|| Ok(selected.get())), Ok(1));
        assert_eq!((selected.get(), selections.get()), (1, 2), "nothing to select");
        assert_eq!(run(2, &|| Err(failed())), Err(failed()));
        assert!(catch_unwind(AssertUnwindSafe(|| run(2, &|| panic!("f")))).is_err());
        assert_eq!((selected.get(), selections.get()), (1, 6));
        assert_eq!(selecting(2, || Err(failed()), select, || Ok(())), Err(failed()));
        assert_eq!((selected.get(), selections.get()), (1, 6));
    }
}
