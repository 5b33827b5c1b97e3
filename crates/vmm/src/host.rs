//! Ordinary memory, made elastic: real addresses and real pages on a machine without a GPU.
//!
//! A reservation is a range that nothing may touch. Physical memory is a run of one anonymous file (memfd), mapped over a
//! hole of the range and later replaced by a hole again; releasing it punches the run out of the file, so that the kernel
//! has the memory back and the next use of the run reads zeros. The kernel takes real pages as they are first written.

#![allow(unsafe_code)]

use std::collections::{BTreeMap, HashMap};
use std::ffi::c_void;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::fs::{FallocateFlags, MemfdFlags};
use rustix::io::Errno;
use rustix::mm::{Advice, MapFlags, MprotectFlags, ProtFlags};

use crate::book::{Book, check_size};
use crate::driver::{Access, Device, Driver, DriverError, Handle, MemInfo};

type Result<T> = std::result::Result<T, DriverError>;

/// Memory of this machine. Open it with [`open`](crate::open), which keeps one a process.
#[derive(Debug)]
pub struct Host {
    owner: u32,
    granularity: u64,
    total_bytes: u64,
    file: OwnedFd,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    book: Book,
    runs: Runs,
    offsets: HashMap<Handle, u64>,
    next_handle: u64,
}

fn failed(call: &'static str, bytes: u64) -> impl Fn(Errno) -> DriverError {
    move |errno| {
        let code = errno.raw_os_error();
        if errno == Errno::NOMEM || errno == Errno::NOSPC {
            return DriverError::OutOfMemory { call, bytes, code };
        }
        let name = std::io::Error::from_raw_os_error(code).to_string();
        // The code follows anyway.
        let name = name.split(" (os error").next().unwrap_or_default().to_owned();
        DriverError::Call { call, code, name }
    }
}

impl Host {
    /// May use half of this machine's memory. Fails with `Call` or `OutOfMemory` where no memfd can be had.
    pub fn new() -> Result<Self> {
        let info = rustix::system::sysinfo();
        // Fields of a C `unsigned long`, whose width is the target's.
        #[allow(clippy::useless_conversion)]
        let total = u64::from(info.totalram).saturating_mul(u64::from(info.mem_unit));
        Self::with_total(total / 2)
    }

    /// May use `total_bytes`.
    pub fn with_total(total_bytes: u64) -> Result<Self> {
        let file =
            rustix::fs::memfd_create("kvcached", MemfdFlags::CLOEXEC).map_err(failed("memfd_create", 0))?;
        Ok(Host {
            owner: std::process::id(),
            granularity: rustix::param::page_size() as u64,
            total_bytes,
            file,
            state: Mutex::default(),
        })
    }

    /// Bytes that the kernel holds for this driver: memory that was created and has been touched.
    pub fn resident_bytes(&self) -> Result<u64> {
        let stat = rustix::fs::fstat(&self.file).map_err(failed("fstat", 0))?;
        Ok(u64::try_from(stat.st_blocks).unwrap_or(0) * 512)
    }

    /// Gives the memory of a run back to the kernel: it reads as zeros from then on. The book and `offsets` hold the same
    /// handles, so that there is always an offset.
    fn punch(&self, call: &'static str, offset: Option<u64>, bytes: u64) -> Result<()> {
        let Some(offset) = offset else { return Ok(()) };
        let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        rustix::fs::fallocate(&self.file, punch, offset, bytes).map_err(failed(call, bytes))
    }

    /// The lock is held across the system calls: what the book says is what the kernel does.
    fn enter(&self, call: &'static str) -> Result<MutexGuard<'_, State>> {
        if std::process::id() != self.owner {
            // The file is shared with the parent: releasing here would punch holes into its memory.
            return Err(DriverError::Forked { call, owner: self.owner });
        }
        Ok(self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl Driver for Host {
    fn device(&self) -> Device {
        Device::Host
    }

    fn granularity(&self) -> u64 {
        self.granularity
    }

    fn reserve(&self, bytes: u64) -> Result<usize> {
        const CALL: &str = "mmap (reserve)";
        check_size(CALL, bytes, self.granularity)?;
        let mut state = self.enter(CALL)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: the kernel chooses the addresses, so that no other memory is concerned.
        let range = unsafe {
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes as usize, ProtFlags::empty(), flags)
        };
        let range = range.map_err(failed(CALL, bytes))?;
        state.book.put_range(range as usize, bytes);
        Ok(range as usize)
    }

    fn free(&self, address: usize, bytes: u64) -> Result<()> {
        let mut state = self.enter("munmap")?;
        state.book.take_range("munmap", address, bytes)?;
        // SAFETY: one whole reservation of ours with nothing mapped in it.
        let freed = unsafe { rustix::mm::munmap(address as *mut c_void, bytes as usize) };
        if freed.is_err() {
            state.book.put_range(address, bytes);
        }
        freed.map_err(failed("munmap", bytes))
    }

    fn create(&self, bytes: u64) -> Result<Handle> {
        const CALL: &str = "ftruncate (create)";
        check_size(CALL, bytes, self.granularity)?;
        let mut state = self.enter(CALL)?;
        if bytes > self.total_bytes.saturating_sub(state.book.held_bytes()) {
            return Err(failed(CALL, bytes)(Errno::NOMEM));
        }
        let offset = match state.runs.take(bytes) {
            Some(offset) => offset,
            None => {
                let offset = state.runs.end;
                let end = offset.checked_add(bytes).ok_or(failed(CALL, bytes)(Errno::NOMEM))?;
                rustix::fs::ftruncate(&self.file, end).map_err(failed(CALL, bytes))?;
                state.runs.end = end;
                offset
            }
        };
        state.next_handle += 1;
        let handle = Handle::from_raw(state.next_handle);
        state.offsets.insert(handle, offset);
        state.book.add_handle(handle, bytes);
        Ok(handle)
    }

    fn release(&self, handle: Handle) -> Result<()> {
        const CALL: &str = "fallocate (release)";
        let mut state = self.enter(CALL)?;
        let held = state.book.take_handle(CALL, handle)?;
        let bytes = held.bytes;
        let offset = state.offsets.get(&handle).copied();
        let punched = self.punch(CALL, offset, bytes);
        if punched.is_err() {
            state.book.put_handle(handle, held);
        } else if let Some(offset) = offset {
            state.offsets.remove(&handle);
            state.runs.give_back(offset, bytes);
        }
        punched
    }

    fn share(&self, handle: Handle) -> Result<()> {
        self.enter("share")?.book.share("share", handle)
    }

    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<()> {
        const CALL: &str = "mmap (map)";
        let mut state = self.enter(CALL)?;
        state.book.add_mapping(CALL, address, bytes, handle)?;
        if state.book.is_shared(handle) {
            // A hole that may be read is the kernel's own page of zeros: it costs nothing, and neighbours stay one area of
            // addresses, of which a process may have some 65,000.
            return Ok(());
        }
        let offset = state.offsets.get(&handle).copied().unwrap_or_default();
        let flags = MapFlags::SHARED | MapFlags::FIXED;
        let at = address as *mut c_void;
        // SAFETY: the addresses are a hole in a reservation of ours, so that nothing else is replaced; the run of the file
        // belongs to this handle alone.
        let mapped = unsafe {
            rustix::mm::mmap(at, bytes as usize, ProtFlags::empty(), flags, self.file.as_fd(), offset)
        };
        if mapped.is_err() {
            state.book.take_mapping(CALL, address, bytes)?;
        }
        mapped.map_err(failed(CALL, bytes))?;
        // SAFETY: advice on our own mapping. A fork has no memory here rather than its parent's.
        if let Err(errno) = unsafe { rustix::mm::madvise(at, bytes as usize, Advice::LinuxDontFork) } {
            tracing::warn!(%errno, "a fork of this process will share its KV cache memory");
        }
        Ok(())
    }

    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<()> {
        let mut state = self.enter("mprotect")?;
        state.book.check_access("mprotect", address, bytes, access)?;
        let flags = match access {
            Access::ReadWrite => MprotectFlags::READ | MprotectFlags::WRITE,
            Access::Read => MprotectFlags::READ,
        };
        // SAFETY: exactly one mapping of ours, of which Rust holds no reference.
        let set = unsafe { rustix::mm::mprotect(address as *mut c_void, bytes as usize, flags) };
        set.map_err(failed("mprotect", bytes))?;
        state.book.opened(address, access);
        Ok(())
    }

    fn clear(&self, mappings: &[(usize, u64)]) -> Result<()> {
        let state = self.enter("clear")?;
        state.book.check_writable("clear", mappings)?;
        for &(address, bytes) in mappings {
            let handle = state.book.check_mapping("clear", address, bytes)?;
            self.punch("fallocate (clear)", state.offsets.get(&handle).copied(), bytes)?;
        }
        Ok(())
    }

    fn unmap(&self, address: usize, bytes: u64) -> Result<()> {
        const CALL: &str = "mmap (unmap)";
        let mut state = self.enter(CALL)?;
        state.book.check_mapping(CALL, address, bytes)?;
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE | MapFlags::FIXED;
        // Replaced rather than unmapped: the addresses stay reserved throughout.
        // SAFETY: exactly one mapping of ours is replaced.
        let hole = unsafe {
            rustix::mm::mmap_anonymous(address as *mut c_void, bytes as usize, ProtFlags::empty(), flags)
        };
        hole.map_err(failed(CALL, bytes))?;
        state.book.take_mapping(CALL, address, bytes).map(|_| ())
    }

    fn identity(&self) -> Result<String> {
        Ok("host".to_owned())
    }

    fn mem_info(&self) -> Result<MemInfo> {
        let held = self.enter("mem_info")?.book.held_bytes();
        Ok(MemInfo { free: self.total_bytes.saturating_sub(held), total: self.total_bytes })
    }

    fn synchronise(&self) -> Result<()> {
        Ok(()) // nothing runs behind this process's back
    }
}

/// The unused runs of the file: offset to bytes, neighbours merged.
#[derive(Debug, Default)]
struct Runs {
    free: BTreeMap<u64, u64>,
    /// Size of the file.
    end: u64,
}

impl Runs {
    /// The first run that is long enough, from its start.
    fn take(&mut self, bytes: u64) -> Option<u64> {
        let (&offset, &length) = self.free.iter().find(|(_, length)| **length >= bytes)?;
        self.free.remove(&offset);
        if length > bytes {
            self.free.insert(offset + bytes, length - bytes);
        }
        Some(offset)
    }

    fn give_back(&mut self, mut offset: u64, mut bytes: u64) {
        if let Some(length) = self.free.remove(&(offset + bytes)) {
            bytes += length;
        }
        if let Some((&before, &length)) = self.free.range(..offset).next_back()
            && before + length == offset
        {
            self.free.remove(&before);
            offset = before;
            bytes += length;
        }
        self.free.insert(offset, bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn runs_merge_with_both_neighbours() {
        let mut runs = Runs { end: 40, ..Runs::default() };
        assert_eq!(runs.take(10), None);
        runs.give_back(0, 10);
        runs.give_back(20, 10);
        assert_eq!(runs.free, BTreeMap::from([(0, 10), (20, 10)]));
        runs.give_back(10, 10);
        assert_eq!(runs.free, BTreeMap::from([(0, 30)]));
        runs.give_back(30, 10);
        assert_eq!(runs.free, BTreeMap::from([(0, 40)]));
        assert_eq!(runs.take(15), Some(0));
        assert_eq!(runs.take(25), Some(15));
        assert_eq!(runs.take(1), None);
    }

    #[test]
    fn the_budget_is_kept_to_the_byte() {
        let host = Host::with_total(3 * 4096 * 16).unwrap();
        let page = host.granularity();
        let whole = host.mem_info().unwrap().total / page * page;
        let a = host.create(whole - page).unwrap();
        assert!(host.create(2 * page).unwrap_err().is_out_of_memory());
        let b = host.create(page).unwrap();
        let refused = host.create(page).unwrap_err();
        assert_eq!(refused, DriverError::OutOfMemory { call: "ftruncate (create)", bytes: page, code: 12 });
        assert_eq!(host.mem_info().unwrap().free, host.total_bytes - whole);
        host.release(a).unwrap();
        host.release(b).unwrap();
        assert_eq!(host.mem_info().unwrap().free, host.total_bytes);
        // One merged run: the whole fits without growing the file.
        host.create(whole).unwrap();
        assert_eq!(host.state.lock().unwrap().runs.end, whole);
    }

    #[test]
    fn half_the_memory_by_default() {
        let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap();
        let kib: u64 = meminfo.split_whitespace().nth(1).unwrap().parse().unwrap();
        assert_eq!(Host::new().unwrap().mem_info().unwrap().total / 1024, kib / 2);
    }

    #[test]
    fn a_failed_call_is_named() {
        let error = failed("mprotect", 8)(Errno::ACCESS);
        assert_eq!(error.to_string(), "mprotect failed: Permission denied (code 13)");
        assert!(failed("mmap", 8)(Errno::NOMEM).is_out_of_memory());
    }

    #[test]
    fn a_fork_is_refused_and_does_not_reach_its_parents_memory() {
        let mut host = Host::with_total(1 << 20).unwrap();
        let page = host.granularity();
        let (address, handle) = (host.reserve(page).unwrap(), host.create(page).unwrap());
        let owner = std::mem::replace(&mut host.owner, u32::MAX);
        let forked =
            |r: Result<()>| assert!(matches!(r, Err(DriverError::Forked { owner: u32::MAX, .. })), "{r:?}");
        forked(host.reserve(page).map(|_| ()));
        forked(host.create(page).map(|_| ()));
        forked(host.map(address, page, handle));
        forked(host.share(handle));
        forked(host.set_access(address, page, Access::ReadWrite));
        forked(host.clear(&[(address, page)]));
        forked(host.unmap(address, page));
        forked(host.release(handle));
        forked(host.free(address, page));
        host.owner = owner;
        host.release(handle).unwrap();
        host.free(address, page).unwrap();
    }

    #[test]
    fn arguments_that_are_not_its_own_are_refused() {
        let host = Host::with_total(1 << 20).unwrap();
        let page = host.granularity();
        let own = [0u8; 64];
        let elsewhere = own.as_ptr() as usize & !(page as usize - 1);
        let handle = host.create(page).unwrap();
        let misuse = |r: Result<()>| assert!(matches!(r, Err(DriverError::Misuse { .. })), "{r:?}");
        misuse(host.map(elsewhere, page, handle));
        misuse(host.unmap(elsewhere, page));
        misuse(host.set_access(elsewhere, page, Access::Read));
        misuse(host.clear(&[(elsewhere, page)]));
        misuse(host.share(Handle::from_raw(99)));
        misuse(host.free(elsewhere, page));
        misuse(host.release(Handle::from_raw(99)));
        misuse(host.reserve(page + 1).map(|_| ()));
        misuse(host.create(0).map(|_| ()));
        host.release(handle).unwrap();
        misuse(host.release(handle));
    }
}
