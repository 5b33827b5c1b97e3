//! Frames as bytes. Fixed header, then a payload whose length the header says; all numbers little-endian.
//!
//! | at | bytes | what |
//! |---|---|---|
//! | 0 | 4 | magic `kvcR` |
//! | 4 | 1 | major version: another one is refused |
//! | 5 | 1 | minor version: a greater one may know more kinds, and say more at the end of a payload |
//! | 6 | 2 | kind; the top bit is set in an answer |
//! | 8 | 4 | bytes of the payload |
//! | 12 | 4 | group |
//! | 16 | 8 | epoch |
//! | 24 | 8 | transaction |
//! | 32 | 2 | stage |
//! | 34 | 2 | rank |
//!
//! A payload is made of integers, of sets of pages (number of runs, then first page and length of each: `u32`), and of text
//! (bytes, then UTF-8). An answer's begins with `beside_bytes`. Decoding never panics, whatever comes, and sets aside no more
//! memory than the bytes at hand account for.

use thiserror::Error;

use crate::message::{
    Answer, Body, Created, Epoch, Failure, Frame, Member, Message, Refusal, Request, TransactionId,
};
use crate::runs::{MAX_RUNS, Runs, RunsError};

/// The first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"kvcR";
/// Peers of different majors do not understand each other.
pub const MAJOR: u8 = 1;
/// A peer of a greater minor may say more than this one knows; what both know is the same.
pub const MINOR: u8 = 0;
/// Bytes before the payload.
pub const HEADER_BYTES: usize = 36;
/// Longer texts are cut when they are sent, and refused when they come.
pub const MAX_DETAIL_BYTES: usize = 1024;
/// The greatest payload: two sets of pages, a text, and the numbers beside them.
pub const MAX_PAYLOAD_BYTES: usize = 2 * (4 + 8 * MAX_RUNS) + 4 + MAX_DETAIL_BYTES + 64;
/// The greatest frame.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_PAYLOAD_BYTES;

const ANSWER: u16 = 1 << 15;

/// What frames say of themselves before the payload.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Header {
    /// The sender's minor version.
    pub minor: u8,
    /// What is said, as a number.
    pub kind: u16,
    /// Bytes that follow the header, at most [`MAX_PAYLOAD_BYTES`].
    pub payload_bytes: usize,
    /// As in [`Frame`].
    pub epoch: Epoch,
    /// As in [`Frame`].
    pub transaction: TransactionId,
    /// As in [`Frame`].
    pub group: u32,
    /// As in [`Frame`].
    pub member: Member,
}

impl Header {
    /// Whether a rank says it.
    pub fn is_answer(&self) -> bool {
        self.kind & ANSWER != 0
    }

    /// What a rank answers to a request of a kind that it does not know.
    pub fn refusal(&self, beside_bytes: u64) -> Frame {
        let body = Body::Refused(Refusal::UnknownKind);
        Frame {
            epoch: self.epoch,
            transaction: self.transaction,
            group: self.group,
            member: self.member,
            message: Message::Answer(Answer { beside_bytes, body }),
        }
    }
}

/// What came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Decoded {
    /// A frame.
    Frame(Frame),
    /// A frame of a newer minor version, of a kind that this one does not know.
    Unknown(Header),
}

/// Why bytes are no frame of ours. The connection that they came over is of no more use.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum WireError {
    /// Something else speaks there.
    #[error("this is no frame: it begins with {0:02x?}")]
    Magic([u8; 4]),
    /// The peer is another release.
    #[error(
        "the peer speaks version {major}.{minor} of the protocol, this is {MAJOR}.{MINOR}: update one of the two"
    )]
    Version {
        /// The peer's.
        major: u8,
        /// The peer's.
        minor: u8,
    },
    /// Longer than any frame.
    #[error("a payload of {bytes} bytes is longer than the greatest, {MAX_PAYLOAD_BYTES}")]
    TooLong {
        /// What the header says.
        bytes: u32,
    },
    /// The header says another length than there is.
    #[error("the frame has {got} bytes and says that it has {expected}")]
    Length {
        /// By the header.
        expected: usize,
        /// At hand.
        got: usize,
    },
    /// The payload ends before what it must hold.
    #[error("the payload ends early")]
    Truncated,
    /// The payload goes on after what it may hold.
    #[error("{bytes} bytes too many at the end of the payload")]
    Trailing {
        /// How many.
        bytes: usize,
    },
    /// No such kind in this version.
    #[error("there is no kind {0:#06x}")]
    Kind(u16),
    /// No such value there.
    #[error("{value} is no {what}")]
    Value {
        /// What it should be.
        what: &'static str,
        /// What it is.
        value: u32,
    },
    /// The text is not UTF-8, or too long.
    #[error("the text is not UTF-8 or longer than {MAX_DETAIL_BYTES} bytes")]
    Text,
    /// The pages are no set.
    #[error(transparent)]
    Runs(#[from] RunsError),
}

type Result<T> = std::result::Result<T, WireError>;

// ---------------------------------------------------------------- out

/// The frame's bytes, at most [`MAX_FRAME_BYTES`]. A longer text is cut.
pub fn encode(frame: &Frame) -> Vec<u8> {
    let mut payload = Writer(Vec::new());
    let kind = match &frame.message {
        Message::Request(request) => payload.request(request),
        Message::Answer(answer) => payload.answer(answer) | ANSWER,
    };
    let mut out = Writer(Vec::with_capacity(HEADER_BYTES + payload.0.len()));
    out.0.extend(MAGIC);
    out.0.extend([MAJOR, MINOR]);
    out.u16(kind);
    out.u32(payload.0.len() as u32);
    out.u32(frame.group);
    out.u64(frame.epoch);
    out.u64(frame.transaction);
    out.u16(frame.member.stage);
    out.u16(frame.member.rank);
    out.0.append(&mut payload.0);
    out.0
}

/// The text as far as it may be sent.
fn cut(text: &str) -> &str {
    let within =
        text.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MAX_DETAIL_BYTES);
    &text[..within.last().unwrap_or(0)]
}

struct Writer(Vec<u8>);

impl Writer {
    fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }

    fn runs(&mut self, runs: &Runs) {
        self.u32(runs.runs().len() as u32);
        for &(first, len) in runs.runs() {
            self.u32(first);
            self.u32(len);
        }
    }

    fn text(&mut self, text: &str) {
        let text = cut(text);
        self.u32(text.len() as u32);
        self.0.extend(text.as_bytes());
    }

    fn request(&mut self, request: &Request) -> u16 {
        match request {
            Request::Hello => 1,
            Request::Map(pages) => self.of(2, pages),
            Request::Unmap(pages) => self.of(3, pages),
            Request::Prepare(pages) => self.of(4, pages),
            Request::Commit => 5,
            Request::Abort => 6,
            Request::Query => 7,
            Request::Barrier => 8,
            Request::Trim => 9,
            Request::Room => 10,
            Request::Bye => 11,
        }
    }

    fn of(&mut self, kind: u16, pages: &Runs) -> u16 {
        self.runs(pages);
        kind
    }

    fn answer(&mut self, answer: &Answer) -> u16 {
        self.u64(answer.beside_bytes);
        match &answer.body {
            Body::Created(created) => self.created(created),
            Body::Mapped { new } => self.of(2, new),
            Body::Unmapped => 3,
            Body::Prepared => 4,
            Body::Committed => 5,
            Body::Aborted { lost } => self.of(6, lost),
            Body::Failed(failure) => self.failure(failure),
            Body::Running => 8,
            Body::Unknown => 9,
            Body::Passed => 10,
            Body::Trimmed { bytes } => {
                self.u64(*bytes);
                11
            }
            Body::Room { free_bytes } => {
                self.u64(*free_bytes);
                12
            }
            Body::Bye => 13,
            Body::Refused(refusal) => {
                self.u16(refusal_code(*refusal));
                14
            }
        }
    }

    fn created(&mut self, created: &Created) -> u16 {
        self.u64(created.page_bytes);
        self.u64(created.virtual_bytes);
        self.u32(created.num_pages);
        self.u32(created.blocks_per_page);
        self.u32(created.ids_per_page);
        self.runs(&created.mapped);
        self.of(1, &created.lost)
    }

    fn failure(&mut self, failure: &Failure) -> u16 {
        self.u16(u16::from(failure.out_of_memory));
        self.runs(&failure.lost);
        self.runs(&failure.still_mapped);
        self.text(&failure.detail);
        7
    }
}

/// From 1, in the order of `Refusal::ALL`.
fn refusal_code(refusal: Refusal) -> u16 {
    Refusal::ALL.iter().position(|known| *known == refusal).map_or(0, |index| index as u16 + 1)
}

fn refusal(code: u16) -> Result<Refusal> {
    let known = usize::from(code).checked_sub(1).and_then(|index| Refusal::ALL.get(index));
    known.copied().ok_or(WireError::Value { what: "refusal", value: code.into() })
}

// ---------------------------------------------------------------- in

/// The header at the beginning of these bytes; `None` where there are fewer than [`HEADER_BYTES`] and those are no fault.
/// A frame's bytes are the header's and `payload_bytes` more.
pub fn header(bytes: &[u8]) -> Result<Option<Header>> {
    let mut reader = Reader(bytes);
    if let Some(magic) = bytes.first_chunk::<4>()
        && *magic != MAGIC
    {
        return Err(WireError::Magic(*magic));
    }
    if let Some(&[_, _, _, _, major, minor]) = bytes.first_chunk::<6>()
        && major != MAJOR
    {
        return Err(WireError::Version { major, minor });
    }
    if bytes.len() < HEADER_BYTES {
        return Ok(None);
    }
    reader.take(5)?;
    let minor = reader.take(1)?[0];
    let kind = reader.u16()?;
    let length = reader.u32()?;
    let payload_bytes = length as usize;
    if payload_bytes > MAX_PAYLOAD_BYTES {
        return Err(WireError::TooLong { bytes: length });
    }
    let group = reader.u32()?;
    let epoch = reader.u64()?;
    let transaction = reader.u64()?;
    let member = Member { stage: reader.u16()?, rank: reader.u16()? };
    Ok(Some(Header { minor, kind, payload_bytes, epoch, transaction, group, member }))
}

/// What these bytes say, which are one whole frame.
pub fn decode(bytes: &[u8]) -> Result<Decoded> {
    let header = header(bytes)?.ok_or(WireError::Truncated)?;
    let payload = &bytes[HEADER_BYTES..];
    if payload.len() != header.payload_bytes {
        let expected = HEADER_BYTES + header.payload_bytes;
        return Err(WireError::Length { expected, got: bytes.len() });
    }
    let mut reader = Reader(payload);
    let message = if header.is_answer() {
        reader.answer(header.kind & !ANSWER)?.map(Message::Answer)
    } else {
        reader.request(header.kind)?.map(Message::Request)
    };
    let newer = header.minor > MINOR;
    let Some(message) = message else {
        return if newer { Ok(Decoded::Unknown(header)) } else { Err(WireError::Kind(header.kind)) };
    };
    if !newer && !reader.0.is_empty() {
        return Err(WireError::Trailing { bytes: reader.0.len() });
    }
    let Header { epoch, transaction, group, member, .. } = header;
    Ok(Decoded::Frame(Frame { epoch, transaction, group, member, message }))
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count).ok_or(WireError::Truncated)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(WireError::Truncated)?;
        self.0 = rest;
        Ok(*taken)
    }

    fn u16(&mut self) -> Result<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn u32(&mut self) -> Result<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64> {
        self.array().map(u64::from_le_bytes)
    }

    /// The number of runs is believed only as far as there are bytes.
    fn runs(&mut self) -> Result<Runs> {
        let count = self.u32()? as usize;
        let bytes = count.checked_mul(8).ok_or(WireError::Truncated)?;
        let mut each = Reader(self.take(bytes)?);
        let runs: Result<Vec<(u32, u32)>> = (0..count).map(|_| Ok((each.u32()?, each.u32()?))).collect();
        Ok(Runs::from_runs(runs?)?)
    }

    fn text(&mut self) -> Result<String> {
        let count = self.u32()? as usize;
        if count > MAX_DETAIL_BYTES {
            return Err(WireError::Text);
        }
        let bytes = self.take(count)?;
        std::str::from_utf8(bytes).map(str::to_owned).map_err(|_| WireError::Text)
    }

    fn boolean(&mut self) -> Result<bool> {
        match self.u16()? {
            0 => Ok(false),
            1 => Ok(true),
            value => Err(WireError::Value { what: "truth value", value: value.into() }),
        }
    }

    /// `None`: no such kind.
    fn request(&mut self, kind: u16) -> Result<Option<Request>> {
        Ok(Some(match kind {
            1 => Request::Hello,
            2 => Request::Map(self.runs()?),
            3 => Request::Unmap(self.runs()?),
            4 => Request::Prepare(self.runs()?),
            5 => Request::Commit,
            6 => Request::Abort,
            7 => Request::Query,
            8 => Request::Barrier,
            9 => Request::Trim,
            10 => Request::Room,
            11 => Request::Bye,
            _ => return Ok(None),
        }))
    }

    /// `None`: no such kind.
    fn answer(&mut self, kind: u16) -> Result<Option<Answer>> {
        if !(1..=14).contains(&kind) {
            return Ok(None);
        }
        let beside_bytes = self.u64()?;
        let body = match kind {
            1 => Body::Created(self.created()?),
            2 => Body::Mapped { new: self.runs()? },
            3 => Body::Unmapped,
            4 => Body::Prepared,
            5 => Body::Committed,
            6 => Body::Aborted { lost: self.runs()? },
            7 => Body::Failed(self.failure()?),
            8 => Body::Running,
            9 => Body::Unknown,
            10 => Body::Passed,
            11 => Body::Trimmed { bytes: self.u64()? },
            12 => Body::Room { free_bytes: self.u64()? },
            13 => Body::Bye,
            _ => Body::Refused(refusal(self.u16()?)?),
        };
        Ok(Some(Answer { beside_bytes, body }))
    }

    fn created(&mut self) -> Result<Created> {
        Ok(Created {
            page_bytes: self.u64()?,
            virtual_bytes: self.u64()?,
            num_pages: self.u32()?,
            blocks_per_page: self.u32()?,
            ids_per_page: self.u32()?,
            mapped: self.runs()?,
            lost: self.runs()?,
        })
    }

    fn failure(&mut self) -> Result<Failure> {
        Ok(Failure {
            out_of_memory: self.boolean()?,
            lost: self.runs()?,
            still_mapped: self.runs()?,
            detail: self.text()?,
        })
    }
}
