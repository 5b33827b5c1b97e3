//! A record's file as memory. The only `unsafe` of this crate.

use std::fs::File;
use std::io;
use std::marker::PhantomData;

use memmap2::{MmapOptions, MmapRaw};

use crate::budget::layout::BudgetRecord;
use crate::layout::Record;
use crate::metrics::layout::Sidecar;

/// A type that a mapped file may be seen as: `repr(C)`, of atomic integers alone, for which all bits are valid, and aligned to at
/// most a page.
///
/// # Safety
///
/// The type must be as said.
pub(crate) unsafe trait Shareable {}

/// A record in a file that this process and others map; stays valid when the file is closed or its name is removed.
pub(crate) struct Mapped<T> {
    map: MmapRaw,
    record: PhantomData<T>,
}

impl<T: Shareable> Mapped<T> {
    /// Maps as many bytes as a `T` has. Fails with `UnexpectedEof` where the file has fewer.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() < size_of::<T>() as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { map: MmapOptions::new().len(size_of::<T>()).map_raw(file)?, record: PhantomData })
    }

    /// What is mapped.
    pub(crate) fn record(&self) -> &T {
        // SAFETY:
        // * Length: `new` mapped `size_of::<T>()` bytes, readable and writable, and `self.map` keeps them mapped for as long as the
        //   returned reference may live.
        // * Alignment: a mapping starts at a page, and a `Shareable` wants no more.
        // * Validity: a `Shareable` is `repr(C)` of atomic integers alone, for which all bits are valid.
        // * Aliasing: nobody has a `&mut` to these bytes. Other processes may store to them (the same user only: the file is 0600 in
        //   a 0700 directory), and every field of ours is atomic, so that this is no data race here.
        // Should somebody of this user truncate the file, a store is a SIGBUS: loud, and not undefined behaviour.
        unsafe { &*self.map.as_ptr().cast::<T>() }
    }
}

// SAFETY: `repr(C)`, of atomic integers alone.
unsafe impl Shareable for Record {}
// SAFETY: `repr(C)`, of atomic integers alone.
unsafe impl Shareable for BudgetRecord {}
// SAFETY: `repr(C)`, of atomic integers alone.
unsafe impl Shareable for Sidecar {}
