//! The wire: arbitrary bytes, and good frames with arbitrary changes. A frame of this version has one form, so that whatever is decoded
//! is encoded to the very bytes it came from.
#![no_main]

mod frames;

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

use kvcached_ipc::message::{Answer, Body, Frame, Member, Message};
use kvcached_ipc::runs::Runs;
use kvcached_ipc::wire::{self, Decoded, HEADER_BYTES, MAX_DETAIL_BYTES, MAX_FRAME_BYTES, MINOR};
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};
use libfuzzer_sys::fuzz_target;

/// Allocations that a decoder may make beside what the bytes account for: the words of an error.
const BESIDE_BYTES: usize = 256;

/// Knows the greatest allocation.
struct Watched;

static GREATEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: `System` does all the work, with the arguments as they came; what is added neither allocates nor unwinds.
unsafe impl GlobalAlloc for Watched {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        GREATEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        GREATEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        GREATEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as above.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as above.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Watched = Watched;

#[derive(Debug)]
enum Input {
    Bytes(Vec<u8>),
    Frame { frame: Frame, minor: u8, changes: Vec<Change> },
}

#[derive(Debug)]
enum Change {
    Set {
        at: usize,
        byte: u8,
    },
    SetWord {
        at: usize,
        word: u32,
    },
    Cut {
        at: usize,
    },
    Append {
        byte: u8,
        count: usize,
    },
    /// The header says again how long the payload is.
    Relength,
}

impl<'a> Arbitrary<'a> for Input {
    fn arbitrary(input: &mut Unstructured<'a>) -> Result<Self> {
        if input.ratio(1, 8)? {
            return Ok(Input::Bytes(input.bytes(input.len())?.to_vec()));
        }
        let (frame, minor) = (frame(input)?, if input.ratio(1, 4)? { u8::arbitrary(input)? } else { MINOR });
        let mut changes = Vec::new();
        while !input.is_empty() {
            changes.push(change(input)?);
        }
        Ok(Input::Frame { frame, minor, changes })
    }
}

fn change(input: &mut Unstructured) -> Result<Change> {
    let at = usize::from(u8::arbitrary(input)?);
    Ok(match input.int_in_range(0u8..=7)? {
        0..=2 => Change::Set { at, byte: u8::arbitrary(input)? },
        3 => Change::SetWord { at, word: u32::arbitrary(input)? },
        4 => Change::Cut { at },
        5 => Change::Append { byte: u8::arbitrary(input)?, count: at },
        _ => Change::Relength,
    })
}

fn frame(input: &mut Unstructured) -> Result<Frame> {
    let message = if input.ratio(1, 2)? {
        Message::Request(frames::request(input, runs)?)
    } else {
        Message::Answer(Answer { beside_bytes: u64::arbitrary(input)?, body: frames::body(input, runs)? })
    };
    let member = Member { stage: u16::arbitrary(input)?, rank: u16::arbitrary(input)? };
    let (epoch, transaction) = (u64::arbitrary(input)?, u64::arbitrary(input)?);
    Ok(Frame { epoch, transaction, group: u32::arbitrary(input)?, member, message })
}

/// As far as it makes a set.
fn runs(input: &mut Unstructured) -> Result<Runs> {
    let mut runs = Vec::new();
    let mut end = 0u32;
    for _ in 0..input.int_in_range(0u8..=5)? {
        let first = end + u32::from(u16::arbitrary(input)?);
        let len = 1 + u32::from(u16::arbitrary(input)?);
        end = first + len + 1;
        runs.push((first, len));
    }
    Ok(Runs::from_runs(runs).unwrap_or_default())
}

/// What comes of bytes that may be anything.
fn decode(bytes: &[u8]) -> Option<Frame> {
    GREATEST.store(0, Ordering::Relaxed);
    let decoded = wire::decode(bytes);
    let greatest = GREATEST.load(Ordering::Relaxed);
    assert!(greatest <= 2 * bytes.len() + BESIDE_BYTES, "{greatest} bytes set aside for {}", bytes.len());
    match &decoded {
        Ok(_) => assert!(bytes.len() <= MAX_FRAME_BYTES),
        Err(error) => assert!(!error.to_string().is_empty()),
    }
    // A reader of a stream sees the header first, whatever of it has come.
    match wire::header(&bytes[..bytes.len().min(HEADER_BYTES)]) {
        Ok(Some(header)) => {
            assert!(decoded.is_err() || HEADER_BYTES + header.payload_bytes == bytes.len());
            if let Ok(Decoded::Unknown(unknown)) = decoded {
                assert_eq!(unknown, header);
                assert!(header.minor > MINOR);
                let refusal = header.refusal(1);
                assert_eq!(wire::decode(&wire::encode(&refusal)), Ok(Decoded::Frame(refusal)));
            }
        }
        Ok(None) => assert!(decoded.is_err() && bytes.len() < HEADER_BYTES),
        Err(error) => assert_eq!(decoded, Err(error)),
    }
    let Ok(Decoded::Frame(frame)) = decoded else { return None };
    let again = wire::encode(&frame);
    if bytes[5] == MINOR {
        assert_eq!(again, bytes, "{frame:?} has two forms");
    } else {
        assert_eq!(
            wire::decode(&again),
            Ok(Decoded::Frame(frame.clone())),
            "what both versions know is the same"
        );
    }
    Some(frame)
}

/// The text of a failure is cut, at a character's end.
fn assert_same_but_cut(sent: &Frame, came: &Frame) {
    let mut sent = sent.clone();
    if let (
        Message::Answer(Answer { body: Body::Failed(mine), .. }),
        Message::Answer(Answer { body: Body::Failed(theirs), .. }),
    ) = (&mut sent.message, &came.message)
    {
        assert!(mine.detail.starts_with(&theirs.detail));
        assert!(theirs.detail.len() <= MAX_DETAIL_BYTES);
        assert!(theirs.detail == mine.detail || theirs.detail.len() > MAX_DETAIL_BYTES - 4);
        mine.detail.clone_from(&theirs.detail);
    }
    assert_eq!(sent, *came);
}

fuzz_target!(|input: Input| {
    let (frame, minor, changes) = match input {
        Input::Bytes(bytes) => return drop(decode(&bytes)),
        Input::Frame { frame, minor, changes } => (frame, minor, changes),
    };
    let mut bytes = wire::encode(&frame);
    assert_same_but_cut(&frame, &decode(&bytes).expect("what is encoded is decoded"));
    // A stream is cut anywhere.
    let part = bytes.len() * usize::from(minor) / 256;
    assert!(decode(&bytes[..part]).is_none());
    bytes[5] = minor;
    assert_same_but_cut(&frame, &decode(&bytes).expect("a newer minor version says at least the same"));
    for change in changes {
        match change {
            Change::Set { at, byte } => bytes.iter_mut().skip(at).take(1).for_each(|to| *to = byte),
            Change::SetWord { at, word } => {
                bytes.iter_mut().skip(at).zip(word.to_le_bytes()).for_each(|(to, byte)| *to = byte);
            }
            Change::Cut { at } => bytes.truncate(at),
            Change::Append { byte, count } => bytes.resize(bytes.len() + count, byte),
            Change::Relength => {
                let payload = bytes.len().saturating_sub(HEADER_BYTES) as u32;
                bytes.iter_mut().skip(8).zip(payload.to_le_bytes()).for_each(|(to, byte)| *to = byte);
            }
        }
        decode(&bytes);
    }
});
