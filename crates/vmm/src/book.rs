//! What a driver has given out. It refuses calls that break the laws of virtual memory management before they reach the
//! device, and is what makes [`Driver`](crate::Driver) safe to call.
//!
//! The laws: an address range is freed once and with nothing mapped in it; a mapping lies within one reservation, in a
//! hole; a handle is mapped whole, and once unless it was shared; one that was ever open for writing is not shared, and a
//! shared one is not opened for writing; it is released once and not while mapped; only a mapping is unmapped.
//!
//! `take_*` forgets a thing before the driver is asked to end it, so that no two threads can end it; a caller whose driver
//! call then fails puts it back with `add_*`/`put_*`.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use crate::driver::{Access, DriverError, Handle};

type Result<T> = std::result::Result<T, DriverError>;

/// What is known of a handle.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Held {
    pub bytes: u64,
    /// Places where it is mapped.
    mappings: u32,
    shared: bool,
    /// The widest access that it had at any place at any time.
    widest: Option<Access>,
}

/// One mapping.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Mapping {
    bytes: u64,
    pub handle: Handle,
    access: Option<Access>,
}

/// Ranges, handles and mappings of one driver.
#[derive(Debug, Default)]
pub(crate) struct Book {
    ranges: BTreeMap<usize, u64>,
    mappings: BTreeMap<usize, Mapping>,
    handles: HashMap<Handle, Held>,
    held_bytes: u64,
}

fn misuse<T>(call: &'static str, why: impl fmt::Display) -> Result<T> {
    Err(DriverError::Misuse { call, why: why.to_string() })
}

/// One past the last address.
fn end_of(address: usize, bytes: u64) -> Option<usize> {
    address.checked_add(usize::try_from(bytes).ok()?)
}

/// Refuses sizes that are not whole multiples of the granularity.
pub(crate) fn check_size(call: &'static str, bytes: u64, granularity: u64) -> Result<()> {
    if bytes == 0 || !bytes.is_multiple_of(granularity) {
        return misuse(
            call,
            format_args!("{bytes} bytes are not a multiple of the granularity {granularity}"),
        );
    }
    Ok(())
}

impl Book {
    /// Physical memory that has been created and not released, bytes.
    pub fn held_bytes(&self) -> u64 {
        self.held_bytes
    }

    pub fn put_range(&mut self, address: usize, bytes: u64) {
        self.ranges.insert(address, bytes);
    }

    pub fn take_range(&mut self, call: &'static str, address: usize, bytes: u64) -> Result<()> {
        let Some(end) = end_of(address, bytes).filter(|_| self.ranges.get(&address) == Some(&bytes)) else {
            return misuse(call, format_args!("no reservation of {bytes} bytes at {address:#x}"));
        };
        if let Some((at, _)) = self.mappings.range(address..end).next() {
            return misuse(call, format_args!("memory is mapped at {at:#x}"));
        }
        self.ranges.remove(&address);
        Ok(())
    }

    /// A handle that was created.
    pub fn add_handle(&mut self, handle: Handle, bytes: u64) {
        self.put_handle(handle, Held { bytes, mappings: 0, shared: false, widest: None });
    }

    /// A handle that `take_handle` took.
    pub fn put_handle(&mut self, handle: Handle, held: Held) {
        if self.handles.insert(handle, held).is_none() {
            self.held_bytes = self.held_bytes.saturating_add(held.bytes);
        }
    }

    pub fn take_handle(&mut self, call: &'static str, handle: Handle) -> Result<Held> {
        let held = *self.held(call, handle)?;
        if held.mappings > 0 {
            return misuse(call, format_args!("handle {:#x} is mapped", handle.raw()));
        }
        self.handles.remove(&handle);
        self.held_bytes = self.held_bytes.saturating_sub(held.bytes);
        Ok(held)
    }

    pub fn share(&mut self, call: &'static str, handle: Handle) -> Result<()> {
        let held = self.held(call, handle)?;
        if held.widest == Some(Access::ReadWrite) {
            return misuse(call, format_args!("handle {:#x} was open for writing", handle.raw()));
        }
        held.shared = true;
        Ok(())
    }

    pub fn is_shared(&self, handle: Handle) -> bool {
        self.handles.get(&handle).is_some_and(|held| held.shared)
    }

    pub fn add_mapping(
        &mut self,
        call: &'static str,
        address: usize,
        bytes: u64,
        handle: Handle,
    ) -> Result<()> {
        let reserved = |end: usize| {
            let (start, size) = self.ranges.range(..=address).next_back()?;
            (end <= end_of(*start, *size)?).then_some(end)
        };
        let Some(end) = end_of(address, bytes).filter(|_| bytes > 0).and_then(reserved) else {
            return misuse(call, format_args!("{bytes} bytes at {address:#x} are not reserved"));
        };
        let before = self.mappings.range(..end).next_back();
        if before.is_some_and(|(at, mapping)| end_of(*at, mapping.bytes).is_none_or(|e| e > address)) {
            return misuse(call, format_args!("memory is mapped at {address:#x} already"));
        }
        match self.handles.get_mut(&handle) {
            Some(held) if held.bytes != bytes => {
                return misuse(call, format_args!("no handle {:#x} of {bytes} bytes", handle.raw()));
            }
            Some(held) if held.shared || held.mappings == 0 => held.mappings += 1,
            Some(_) => return misuse(call, format_args!("handle {:#x} is mapped already", handle.raw())),
            None => return misuse(call, format_args!("no handle {:#x} of {bytes} bytes", handle.raw())),
        }
        self.mappings.insert(address, Mapping { bytes, handle, access: None });
        Ok(())
    }

    pub fn check_mapping(&self, call: &'static str, address: usize, bytes: u64) -> Result<Handle> {
        self.mapping(call, address, bytes).map(|mapping| mapping.handle)
    }

    /// Whether a mapping may be opened so. Tells whether the memory under it was ever open.
    pub fn check_access(
        &self,
        call: &'static str,
        address: usize,
        bytes: u64,
        access: Access,
    ) -> Result<bool> {
        let handle = self.check_mapping(call, address, bytes)?;
        if self.is_shared(handle) && access == Access::ReadWrite {
            return misuse(call, format_args!("handle {:#x} is shared: it is for reading", handle.raw()));
        }
        Ok(self.handles.get(&handle).is_some_and(|held| held.widest.is_some()))
    }

    /// A mapping was opened.
    pub fn opened(&mut self, address: usize, access: Access) {
        let Some(mapping) = self.mappings.get_mut(&address) else { return };
        mapping.access = Some(access);
        if let Some(held) = self.handles.get_mut(&mapping.handle)
            && held.widest != Some(Access::ReadWrite)
        {
            held.widest = Some(access);
        }
    }

    /// Whether all of these mappings are open for writing.
    pub fn check_writable(&self, call: &'static str, mappings: &[(usize, u64)]) -> Result<()> {
        for &(address, bytes) in mappings {
            if self.mapping(call, address, bytes)?.access != Some(Access::ReadWrite) {
                return misuse(call, format_args!("the mapping at {address:#x} is not open for writing"));
            }
        }
        Ok(())
    }

    pub fn take_mapping(&mut self, call: &'static str, address: usize, bytes: u64) -> Result<Mapping> {
        let mapping = self.mapping(call, address, bytes)?;
        self.mappings.remove(&address);
        if let Some(held) = self.handles.get_mut(&mapping.handle) {
            held.mappings -= 1;
        }
        Ok(mapping)
    }

    /// A mapping that `take_mapping` took, at its place.
    pub fn put_mapping(&mut self, address: usize, mapping: Mapping) {
        self.mappings.insert(address, mapping);
        if let Some(held) = self.handles.get_mut(&mapping.handle) {
            held.mappings += 1;
        }
    }

    fn held(&mut self, call: &'static str, handle: Handle) -> Result<&mut Held> {
        match self.handles.get_mut(&handle) {
            Some(held) => Ok(held),
            None => misuse(call, format_args!("no such handle: {:#x}", handle.raw())),
        }
    }

    fn mapping(&self, call: &'static str, address: usize, bytes: u64) -> Result<Mapping> {
        match self.mappings.get(&address) {
            Some(mapping) if mapping.bytes == bytes => Ok(*mapping),
            _ => misuse(call, format_args!("no mapping of {bytes} bytes at {address:#x}")),
        }
    }

    /// Every mapping: address and bytes, by address.
    #[cfg(any(test, feature = "sim"))]
    pub fn mappings(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.mappings.iter().map(|(&address, mapping)| (address, mapping.bytes))
    }

    /// Bytes of a handle; 0 where there is none.
    #[cfg(any(test, feature = "sim"))]
    pub fn bytes_of(&self, handle: Handle) -> u64 {
        self.handles.get(&handle).map_or(0, |held| held.bytes)
    }

    /// Every mapping: address, and what the device may do there.
    #[cfg(any(test, feature = "sim"))]
    pub fn accesses(&self) -> impl Iterator<Item = (usize, Option<Access>)> + '_ {
        self.mappings.iter().map(|(&address, mapping)| (address, mapping.access))
    }

    /// Counts of ranges, handles and mappings.
    #[cfg(any(test, feature = "sim"))]
    pub fn counts(&self) -> (usize, usize, usize) {
        (self.ranges.len(), self.handles.len(), self.mappings.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;
    const BASE: usize = 0x10_0000;
    const H: Handle = Handle::from_raw(7);

    fn book() -> Book {
        let mut b = Book::default();
        b.put_range(BASE, 4 * PAGE);
        b.add_handle(H, PAGE);
        b.add_handle(Handle::from_raw(8), PAGE);
        b.add_handle(Handle::from_raw(9), 2 * PAGE);
        b
    }

    fn refused<T: fmt::Debug>(r: Result<T>, law: &str) {
        let said = r.unwrap_err().to_string();
        assert!(said.starts_with("c refused: ") && said.contains(law), "{said}");
    }

    #[test]
    fn mappings_lie_in_holes_of_reservations() {
        let mut b = book();
        refused(b.add_mapping("c", BASE - 4096, PAGE, H), "not reserved");
        refused(b.add_mapping("c", BASE + 4 * 4096, PAGE, H), "not reserved");
        refused(b.add_mapping("c", BASE + 3 * 4096, 2 * PAGE, Handle::from_raw(9)), "not reserved");
        refused(b.add_mapping("c", BASE, 0, H), "not reserved");
        refused(b.add_mapping("c", usize::MAX, PAGE, H), "not reserved");
        refused(b.add_mapping("c", BASE, u64::MAX, H), "not reserved");
        refused(b.add_mapping("c", BASE, 2 * PAGE, H), "no handle");
        refused(b.add_mapping("c", BASE, PAGE, Handle::from_raw(1)), "no handle");
        b.add_mapping("c", BASE + 4096, PAGE, H).unwrap();
        refused(b.add_mapping("c", BASE + 2 * 4096, PAGE, H), "mapped already");
        refused(b.add_mapping("c", BASE + 4096, PAGE, Handle::from_raw(8)), "mapped at");
        refused(b.add_mapping("c", BASE, 2 * PAGE, Handle::from_raw(9)), "mapped at");
        b.add_mapping("c", BASE + 2 * 4096, 2 * PAGE, Handle::from_raw(9)).unwrap();
        b.add_mapping("c", BASE, PAGE, Handle::from_raw(8)).unwrap();
        assert_eq!(b.counts(), (1, 3, 3));
    }

    #[test]
    fn things_end_once_and_in_order() {
        let mut b = book();
        assert_eq!(b.held_bytes(), 4 * PAGE);
        refused(b.take_mapping("c", BASE, PAGE), "no mapping");
        b.add_mapping("c", BASE, PAGE, H).unwrap();
        refused(b.take_handle("c", H), "is mapped");
        refused(b.take_mapping("c", BASE, 2 * PAGE), "no mapping");
        refused(b.take_range("c", BASE, 4 * PAGE), "memory is mapped");
        assert_eq!(b.check_mapping("c", BASE, PAGE), Ok(H));
        assert_eq!(b.take_mapping("c", BASE, PAGE).map(|m| m.handle), Ok(H));
        refused(b.take_mapping("c", BASE, PAGE), "no mapping");
        assert_eq!(b.take_handle("c", H).map(|held| held.bytes), Ok(PAGE));
        refused(b.take_handle("c", H), "no such handle");
        refused(b.take_range("c", BASE, PAGE), "no reservation");
        b.take_range("c", BASE, 4 * PAGE).unwrap();
        refused(b.take_range("c", BASE, 4 * PAGE), "no reservation");
        assert_eq!(b.held_bytes(), 3 * PAGE);
        assert_eq!(b.counts(), (0, 2, 0));
    }

    #[test]
    fn a_shared_handle_is_read_in_many_places_and_written_in_none() {
        let mut b = book();
        refused(b.share("c", Handle::from_raw(1)), "no such handle");
        b.share("c", H).unwrap();
        b.add_mapping("c", BASE, PAGE, H).unwrap();
        b.add_mapping("c", BASE + 4096, PAGE, H).unwrap();
        refused(b.check_access("c", BASE, PAGE, Access::ReadWrite), "for reading");
        assert_eq!(b.check_access("c", BASE, PAGE, Access::Read), Ok(false));
        b.opened(BASE, Access::Read);
        assert_eq!(b.check_access("c", BASE + 4096, PAGE, Access::Read), Ok(true), "the same memory");
        refused(b.check_writable("c", &[(BASE, PAGE)]), "not open for writing");
        b.take_mapping("c", BASE, PAGE).unwrap();
        refused(b.take_handle("c", H), "is mapped");
        b.take_mapping("c", BASE + 4096, PAGE).unwrap();
        b.take_handle("c", H).unwrap();
        // What was written is not shared.
        let other = Handle::from_raw(8);
        b.add_mapping("c", BASE, PAGE, other).unwrap();
        refused(b.check_writable("c", &[(BASE, PAGE)]), "not open for writing");
        b.opened(BASE, Access::ReadWrite);
        b.check_writable("c", &[(BASE, PAGE)]).unwrap();
        b.opened(BASE, Access::Read);
        refused(b.share("c", other), "was open for writing");
    }

    #[test]
    fn what_was_taken_goes_back_as_it_was() {
        let mut b = book();
        b.share("c", H).unwrap();
        b.add_mapping("c", BASE, PAGE, H).unwrap();
        b.add_mapping("c", BASE + 4096, PAGE, H).unwrap();
        let taken = b.take_mapping("c", BASE, PAGE).unwrap();
        b.put_mapping(BASE, taken);
        refused(b.take_handle("c", H), "is mapped");
        b.take_mapping("c", BASE, PAGE).unwrap();
        b.take_mapping("c", BASE + 4096, PAGE).unwrap();
        let held = b.take_handle("c", H).unwrap();
        b.put_handle(H, held);
        assert_eq!(b.held_bytes(), 4 * PAGE);
        refused(b.check_access("c", BASE, PAGE, Access::Read), "no mapping");
        b.add_mapping("c", BASE, PAGE, H).unwrap();
        refused(b.check_access("c", BASE, PAGE, Access::ReadWrite), "for reading");
    }

    #[test]
    fn sizes_are_whole() {
        check_size("c", 8192, 4096).unwrap();
        for bad in [0, 1, 4095, 4097] {
            refused(check_size("c", bad, 4096), "granularity");
        }
    }
}
