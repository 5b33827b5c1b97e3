//! Numbers that more than one room of this crate goes by.

/// Longest text of a record, bytes of UTF-8.
pub const MAX_TEXT_BYTES: usize = 64;
/// Pools that one instance can show.
pub const MAX_POOL_ROWS: usize = 8;
