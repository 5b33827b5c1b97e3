//! What all files of ours are made of: 64-bit words in the machine's order, texts in fields of a fixed size, and a header.

use crate::error::RecordError;
use crate::sizes::MAX_TEXT_BYTES;
use crate::text::is_valid_text;

pub(crate) const WORD: usize = size_of::<u64>();
pub(crate) const TEXT_WORDS: usize = MAX_TEXT_BYTES / WORD;

/// The first three words of a kind of file: what it is, its version, its size.
pub(crate) struct Header {
    /// As people know it.
    pub what: &'static str,
    pub magic: [u8; WORD],
    pub version: u64,
    pub bytes: usize,
    /// What to do about one of another version.
    pub advice: &'static str,
}

impl Header {
    /// A file of this kind with nothing but its header.
    pub fn file(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.bytes];
        bytes[..WORD].copy_from_slice(&self.magic);
        put_word(&mut bytes, WORD, self.version);
        put_word(&mut bytes, 2 * WORD, self.bytes as u64);
        bytes
    }

    /// Whether these are the bytes of such a file, whatever follows the header.
    pub fn check(&self, bytes: &[u8]) -> Result<(), RecordError> {
        if bytes.len() < 3 * WORD {
            return Err(RecordError::Truncated { bytes: bytes.len() });
        }
        if bytes[..WORD] != self.magic {
            return Err(RecordError::Magic);
        }
        let Header { what, version, advice, .. } = *self;
        let found = get_word(bytes, WORD);
        if found != version {
            return Err(RecordError::Version { what, found, reads: version, advice });
        }
        let expected = self.bytes as u64;
        for found in [get_word(bytes, 2 * WORD), bytes.len() as u64] {
            if found != expected {
                return Err(RecordError::Size { what, found, expected });
            }
        }
        Ok(())
    }
}

pub(crate) fn put_word(bytes: &mut [u8], offset: usize, value: u64) {
    bytes[offset..][..WORD].copy_from_slice(&value.to_ne_bytes());
}

pub(crate) fn put_text(bytes: &mut [u8], offset: usize, text: &str) {
    bytes[offset..][..text.len()].copy_from_slice(text.as_bytes());
}

pub(crate) fn get_word(bytes: &[u8], offset: usize) -> u64 {
    let mut word = [0; WORD];
    word.copy_from_slice(&bytes[offset..][..WORD]);
    u64::from_ne_bytes(word)
}

pub(crate) fn get_text(bytes: &[u8], offset: usize, field: &'static str) -> Result<String, RecordError> {
    let padded = &bytes[offset..][..MAX_TEXT_BYTES];
    let text = padded.split(|&byte| byte == 0).next().unwrap_or_default();
    match std::str::from_utf8(text) {
        Ok(text) if is_valid_text(text) => Ok(text.to_owned()),
        _ => Err(RecordError::Text { field }),
    }
}
