//! A record's file as memory. The only `unsafe` of this crate.

use std::fs::File;
use std::io;

use memmap2::{MmapOptions, MmapRaw};

use crate::layout::{RECORD_BYTES, Record};

/// The owner's view of its own record; stays valid when the file is closed or its name is removed.
pub(crate) struct MappedRecord {
    map: MmapRaw,
}

impl MappedRecord {
    /// `file` holds at least `RECORD_BYTES` bytes that were written, not merely promised by a length: a store to a page that
    /// the file system could not provide would be a SIGBUS.
    pub(crate) fn new(file: &File) -> io::Result<Self> {
        if file.metadata()?.len() < RECORD_BYTES as u64 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        Ok(Self { map: MmapOptions::new().len(RECORD_BYTES).map_raw(file)? })
    }

    pub(crate) fn record(&self) -> &Record {
        // SAFETY:
        // * Length: `new` mapped `RECORD_BYTES` = `size_of::<Record>()` bytes, readable and writable, and `self.map` keeps them mapped
        //   for as long as the returned reference may live.
        // * Alignment: a mapping starts at a page, `Record` wants 8 bytes.
        // * Validity: `Record` is `repr(C)` of `AtomicU64` alone, for which all bits are valid.
        // * Aliasing: nobody has a `&mut` to these bytes. Other processes may store to them (the same user only: the file is 0600 in
        //   a 0700 directory), and every field of ours is atomic, so that this is no data race here.
        // Should somebody of this user truncate the file, a store is a SIGBUS: loud, and not undefined behaviour.
        unsafe { &*self.map.as_ptr().cast::<Record>() }
    }
}
