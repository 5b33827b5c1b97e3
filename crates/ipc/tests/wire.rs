//! The wire: what is sent arrives, and nothing that arrives does harm.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::BTreeSet;

use kvcached_ipc::message::{Answer, Body, Created, Failure, Frame, Member, Message, Refusal, Request};
use kvcached_ipc::runs::{MAX_PAGES, MAX_RUNS, Runs, RunsError};
use kvcached_ipc::wire::{
    Decoded, HEADER_BYTES, MAJOR, MAX_DETAIL_BYTES, MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES, MINOR, WireError,
    decode, encode, header,
};
use proptest::prelude::*;

const KIND: usize = 6;
const LENGTH: usize = 8;

fn frame(message: Message) -> Frame {
    Frame {
        epoch: 0x0102_0304_0506_0708,
        transaction: 9,
        group: 3,
        member: Member { stage: 1, rank: 2 },
        message,
    }
}

fn answer(body: Body) -> Message {
    Message::Answer(Answer { beside_bytes: 0x1000, body })
}

fn runs(pages: &[u32]) -> Runs {
    Runs::from_pages(pages).unwrap()
}

/// A frame around this payload.
fn raw(minor: u8, kind: u16, payload: &[u8]) -> Vec<u8> {
    let mut bytes = encode(&frame(Message::Request(Request::Hello)));
    bytes[5] = minor;
    bytes[KIND..KIND + 2].copy_from_slice(&kind.to_le_bytes());
    bytes[LENGTH..LENGTH + 4].copy_from_slice(&(payload.len() as u32).to_le_bytes());
    bytes.extend(payload);
    bytes
}

fn words(words: &[u32]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn created() -> Created {
    Created {
        page_bytes: 16 << 20,
        virtual_bytes: 1 << 40,
        num_pages: 0x400,
        blocks_per_page: 8,
        ids_per_page: 512,
        mapped: runs(&[0, 1, 5]),
        lost: runs(&[9]),
    }
}

fn failure(detail: &str) -> Failure {
    Failure { out_of_memory: true, lost: runs(&[4]), still_mapped: runs(&[5, 6]), detail: detail.to_owned() }
}

/// One of each kind, with the payload that it has.
fn each_kind() -> Vec<(Message, &'static str)> {
    use Request::*;
    vec![
        (Message::Request(Hello), "0100 "),
        (Message::Request(Map(runs(&[1, 2, 7]))), "0200 02000000 01000000 02000000 07000000 01000000"),
        (Message::Request(Unmap(runs(&[1]))), "0300 01000000 01000000 01000000"),
        (Message::Request(Prepare(runs(&[0, 1]))), "0400 01000000 00000000 02000000"),
        (Message::Request(Commit), "0500"),
        (Message::Request(Abort), "0600"),
        (Message::Request(Query), "0700"),
        (Message::Request(Barrier), "0800"),
        (Message::Request(Trim), "0900"),
        (Message::Request(Room), "0a00"),
        (Message::Request(Bye), "0b00"),
        (
            answer(Body::Created(created())),
            "0180 0010000000000000 0000000100000000 0000000000010000 00040000 08000000 00020000 \
             02000000 00000000 02000000 05000000 01000000 01000000 09000000 01000000",
        ),
        (answer(Body::Mapped { new: runs(&[7]) }), "0280 0010000000000000 01000000 07000000 01000000"),
        (answer(Body::Unmapped), "0380 0010000000000000"),
        (answer(Body::Prepared), "0480 0010000000000000"),
        (answer(Body::Committed), "0580 0010000000000000"),
        (answer(Body::Aborted { lost: Runs::none() }), "0680 0010000000000000 00000000"),
        (
            answer(Body::Failed(failure("no"))),
            "0780 0010000000000000 0100 01000000 04000000 01000000 01000000 05000000 02000000 02000000 6e6f",
        ),
        (answer(Body::Running), "0880 0010000000000000"),
        (answer(Body::Unknown), "0980 0010000000000000"),
        (answer(Body::Passed), "0a80 0010000000000000"),
        (answer(Body::Trimmed { bytes: 5 }), "0b80 0010000000000000 0500000000000000"),
        (answer(Body::Room { free_bytes: 6 }), "0c80 0010000000000000 0600000000000000"),
        (answer(Body::Bye), "0d80 0010000000000000"),
        (answer(Body::Refused(Refusal::StaleEpoch)), "0e80 0010000000000000 0100"),
        (answer(Body::Refused(Refusal::UnknownKind)), "0e80 0010000000000000 0b00"),
    ]
}

/// Whoever changes this changes what releases say to each other: a new kind or more at the end of a payload is a new minor
/// version, anything else a new major one.
#[test]
fn the_bytes_of_every_kind_stay() {
    for (message, expected) in each_kind() {
        let bytes = encode(&frame(message.clone()));
        let expected: String = expected.split_whitespace().collect();
        let (kind, payload) = expected.split_at(4);
        let whole = format!(
            "6b766352 01 00 {kind} {:02x}000000 03000000 0807060504030201 0900000000000000 0100 0200 {payload}",
            payload.len() / 2
        );
        let got: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(got, whole.split_whitespace().collect::<String>(), "{message:?}");
        assert_eq!(decode(&bytes), Ok(Decoded::Frame(frame(message))));
    }
}

#[test]
fn a_frame_cut_anywhere_is_no_frame() {
    for (message, _) in each_kind() {
        let bytes = encode(&frame(message));
        for length in 0..bytes.len() {
            let cut = &bytes[..length];
            assert!(decode(cut).is_err(), "{length} of {bytes:02x?}");
            // Nor is one whose header knows that it is cut.
            if length >= HEADER_BYTES {
                let mut honest = cut.to_vec();
                honest[LENGTH..LENGTH + 4].copy_from_slice(&((length - HEADER_BYTES) as u32).to_le_bytes());
                assert_eq!(decode(&honest), Err(WireError::Truncated), "{honest:02x?}");
            } else {
                assert_eq!(header(cut), Ok(None));
            }
        }
        let mut longer = bytes.clone();
        longer.push(0);
        let expected = bytes.len();
        assert_eq!(decode(&longer), Err(WireError::Length { expected, got: expected + 1 }));
        let known = header(&bytes).unwrap().unwrap();
        assert_eq!(HEADER_BYTES + known.payload_bytes, bytes.len());
    }
}

#[test]
fn a_stranger_is_told_from_the_first_bytes() {
    assert_eq!(header(b"GET / HTTP/1.1"), Err(WireError::Magic(*b"GET ")));
    assert_eq!(header(b"\x80\x04\x95\x10"), Err(WireError::Magic([0x80, 4, 0x95, 0x10])));
    assert_eq!(header(b"kvcR\x02\x07"), Err(WireError::Version { major: 2, minor: 7 }));
    assert_eq!(header(b"kv"), Ok(None));
    let mut other = encode(&frame(Message::Request(Request::Hello)));
    other[4] = MAJOR + 1;
    assert_eq!(decode(&other), Err(WireError::Version { major: MAJOR + 1, minor: MINOR }));
    let text = WireError::Version { major: 2, minor: 7 }.to_string();
    assert!(text.contains("2.7") && text.contains("1.0"), "{text}");
}

#[test]
fn lengths_are_not_believed() {
    let mut endless = encode(&frame(Message::Request(Request::Hello)));
    endless[LENGTH..LENGTH + 4].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(header(&endless), Err(WireError::TooLong { bytes: u32::MAX }));
    let limit = MAX_PAYLOAD_BYTES as u32;
    endless[LENGTH..LENGTH + 4].copy_from_slice(&(limit + 1).to_le_bytes());
    assert_eq!(header(&endless), Err(WireError::TooLong { bytes: limit + 1 }));
    endless[LENGTH..LENGTH + 4].copy_from_slice(&limit.to_le_bytes());
    assert_eq!(header(&endless).unwrap().unwrap().payload_bytes, MAX_PAYLOAD_BYTES);
    // More runs than bytes, up to counts whose bytes no address space holds.
    for count in [1, 2, 1 << 20, u32::MAX / 8 + 1, u32::MAX] {
        assert_eq!(decode(&raw(MINOR, 2, &words(&[count]))), Err(WireError::Truncated), "{count}");
    }
    // A text longer than any, and one longer than there are bytes.
    for length in [3, MAX_DETAIL_BYTES as u32 + 1, u32::MAX] {
        let mut payload = vec![0; 10];
        payload.extend(words(&[0, 0, length]));
        payload.extend(b"no");
        assert!(decode(&raw(MINOR, 0x8007, &payload)).is_err(), "{length}");
    }
}

#[test]
fn hostile_pages_are_refused() {
    let map = |payload: &[u32]| decode(&raw(MINOR, 2, &words(payload)));
    let refused = |error: RunsError| Err(WireError::Runs(error));
    assert_eq!(map(&[1, 5, 0]), refused(RunsError::Empty { first: 5 }));
    assert_eq!(map(&[2, 5, 2, 6, 1]), refused(RunsError::Touching { end: 7, first: 6 }));
    assert_eq!(map(&[2, 5, 2, 7, 1]), refused(RunsError::Touching { end: 7, first: 7 }));
    assert_eq!(map(&[2, 5, 2, 1, 1]), refused(RunsError::Touching { end: 7, first: 1 }));
    assert_eq!(map(&[1, u32::MAX, u32::MAX]), refused(RunsError::Beyond { end: (1 << 33) - 2 }));
    assert_eq!(map(&[1, 1, MAX_PAGES]), refused(RunsError::Beyond { end: u64::from(MAX_PAGES) + 1 }));
    assert!(map(&[1, 0, MAX_PAGES]).is_ok());
}

#[test]
fn what_is_neither_true_nor_a_refusal_nor_text_is_refused() {
    let mut neither = vec![0; 8];
    neither.extend([2, 0]);
    neither.extend(words(&[0, 0, 0]));
    assert_eq!(
        decode(&raw(MINOR, 0x8007, &neither)),
        Err(WireError::Value { what: "truth value", value: 2 })
    );
    for code in [0u16, 12, u16::MAX] {
        let mut payload = vec![0; 8];
        payload.extend(code.to_le_bytes());
        let expected = Err(WireError::Value { what: "refusal", value: code.into() });
        assert_eq!(decode(&raw(MINOR, 0x800e, &payload)), expected);
    }
    let mut text = vec![0; 10];
    text.extend(words(&[0, 0, 2]));
    text.extend([0xff, 0xfe]);
    assert_eq!(decode(&raw(MINOR, 0x8007, &text)), Err(WireError::Text));
}

#[test]
fn a_newer_minor_version_is_understood_as_far_as_it_goes() {
    // A kind that is not known: who asked, and about what, is.
    for kind in [0, 12, 77, 0x800f, 0xffff] {
        let Decoded::Unknown(header) = decode(&raw(MINOR + 1, kind, b"whatever")).unwrap() else { panic!() };
        assert_eq!((header.kind, header.minor, header.payload_bytes), (kind, MINOR + 1, 8));
        assert_eq!(header.is_answer(), kind & 0x8000 != 0);
        let refusal = header.refusal(0x1000);
        assert_eq!(refusal, frame(answer(Body::Refused(Refusal::UnknownKind))));
        // In our own version there is no such kind.
        assert_eq!(decode(&raw(MINOR, kind, b"")), Err(WireError::Kind(kind)));
    }
    // More at the end of what is known.
    for (message, _) in each_kind() {
        let mut bytes = encode(&frame(message.clone()));
        let payload = bytes.split_off(HEADER_BYTES);
        let kind = u16::from_le_bytes([bytes[KIND], bytes[KIND + 1]]);
        let longer = [payload, b"more".to_vec()].concat();
        assert_eq!(decode(&raw(MINOR + 1, kind, &longer)), Ok(Decoded::Frame(frame(message))));
        assert_eq!(decode(&raw(MINOR, kind, &longer)), Err(WireError::Trailing { bytes: 4 }));
    }
}

#[test]
fn the_greatest_frame_fits_and_long_texts_are_cut() {
    let even: Vec<(u32, u32)> = (0..MAX_RUNS as u32).map(|run| (2 * run, 1)).collect();
    let odd: Vec<(u32, u32)> = (0..MAX_RUNS as u32).map(|run| (2 * run + 1, 1)).collect();
    let greatest = Failure {
        out_of_memory: true,
        lost: Runs::from_runs(even.clone()).unwrap(),
        still_mapped: Runs::from_runs(odd.clone()).unwrap(),
        detail: "é".repeat(MAX_DETAIL_BYTES),
    };
    let bytes = encode(&frame(answer(Body::Failed(greatest.clone()))));
    assert!(bytes.len() <= MAX_FRAME_BYTES, "{}", bytes.len());
    let cut = Failure { detail: "é".repeat(MAX_DETAIL_BYTES / 2), ..greatest };
    assert_eq!(decode(&bytes), Ok(Decoded::Frame(frame(answer(Body::Failed(cut))))));
    let mapped = Runs::from_runs(even).unwrap();
    let whole = Created { mapped, lost: Runs::from_runs(odd).unwrap(), ..created() };
    assert!(encode(&frame(answer(Body::Created(whole)))).len() <= MAX_FRAME_BYTES);
    // A character is not cut in two.
    let odd_cut = failure(&format!("x{}", "é".repeat(MAX_DETAIL_BYTES)));
    let Ok(Decoded::Frame(got)) = decode(&encode(&frame(answer(Body::Failed(odd_cut))))) else { panic!() };
    let Message::Answer(Answer { body: Body::Failed(got), .. }) = got.message else { panic!() };
    assert_eq!(got.detail.len(), MAX_DETAIL_BYTES - 1);
}

// ---------------------------------------------------------------- any

fn any_runs() -> impl Strategy<Value = Runs> {
    let pages = prop_oneof![0u32..64, 0..MAX_PAGES];
    prop::collection::btree_set(pages, 0..40)
        .prop_map(|pages: BTreeSet<u32>| Runs::from_pages(&pages.into_iter().collect::<Vec<_>>()).unwrap())
}

fn any_request() -> impl Strategy<Value = Message> {
    prop_oneof![
        Just(Request::Hello),
        any_runs().prop_map(Request::Map),
        any_runs().prop_map(Request::Unmap),
        any_runs().prop_map(Request::Prepare),
        Just(Request::Commit),
        Just(Request::Abort),
        Just(Request::Query),
        Just(Request::Barrier),
        Just(Request::Trim),
        Just(Request::Room),
        Just(Request::Bye),
    ]
    .prop_map(Message::Request)
}

fn any_created() -> impl Strategy<Value = Body> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u32>(), any::<u32>(), any::<u32>());
    (numbers, any_runs(), any_runs()).prop_map(|(numbers, mapped, lost)| {
        let (page_bytes, virtual_bytes, num_pages, blocks_per_page, ids_per_page) = numbers;
        Body::Created(Created {
            page_bytes,
            virtual_bytes,
            num_pages,
            blocks_per_page,
            ids_per_page,
            mapped,
            lost,
        })
    })
}

fn any_failure() -> impl Strategy<Value = Body> {
    (any::<bool>(), any_runs(), any_runs(), "\\PC{0,80}").prop_map(
        |(out_of_memory, lost, still_mapped, detail)| {
            Body::Failed(Failure { out_of_memory, lost, still_mapped, detail })
        },
    )
}

fn any_refusal() -> impl Strategy<Value = Body> {
    use Refusal::*;
    let all = [
        StaleEpoch,
        Decided,
        Different,
        Forgotten,
        Pending,
        Unprepared,
        NoSuchGroup,
        NotMe,
        OutOfRange,
        Overloaded,
        UnknownKind,
    ];
    prop::sample::select(all.to_vec()).prop_map(Body::Refused)
}

fn any_answer() -> impl Strategy<Value = Message> {
    let plain = [
        Body::Unmapped,
        Body::Prepared,
        Body::Committed,
        Body::Running,
        Body::Unknown,
        Body::Passed,
        Body::Bye,
    ];
    let body = prop_oneof![
        prop::sample::select(plain.to_vec()),
        any_created(),
        any_failure(),
        any_refusal(),
        any_runs().prop_map(|new| Body::Mapped { new }),
        any_runs().prop_map(|lost| Body::Aborted { lost }),
        any::<u64>().prop_map(|bytes| Body::Trimmed { bytes }),
        any::<u64>().prop_map(|free_bytes| Body::Room { free_bytes }),
    ];
    (any::<u64>(), body).prop_map(|(beside_bytes, body)| Message::Answer(Answer { beside_bytes, body }))
}

fn any_frame() -> impl Strategy<Value = Frame> {
    let numbers = (any::<u64>(), any::<u64>(), any::<u32>(), any::<u16>(), any::<u16>());
    (numbers, prop_oneof![any_request(), any_answer()]).prop_map(|(numbers, message)| {
        let (epoch, transaction, group, stage, rank) = numbers;
        Frame { epoch, transaction, group, member: Member { stage, rank }, message }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn what_is_sent_arrives(frame in any_frame()) {
        let bytes = encode(&frame);
        prop_assert!(bytes.len() <= MAX_FRAME_BYTES);
        prop_assert_eq!(header(&bytes).unwrap().unwrap().payload_bytes, bytes.len() - HEADER_BYTES);
        prop_assert_eq!(decode(&bytes), Ok(Decoded::Frame(frame)));
    }

    #[test]
    fn any_bytes_are_read_without_harm(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = decode(&bytes);
        let _ = header(&bytes);
    }

    /// Behind a good header, where arbitrary bytes hardly ever get. What is understood is said again in the same bytes.
    #[test]
    fn any_payload_is_read_without_harm(
        minor in MINOR..=MINOR + 1,
        kind in prop_oneof![0u16..16, 0x8000u16..0x8010],
        payload in prop::collection::vec(prop_oneof![3 => Just(0u8), 2 => 0u8..4, 1 => any::<u8>()], 0..120),
    ) {
        let bytes = raw(minor, kind, &payload);
        if let Ok(Decoded::Frame(frame)) = decode(&bytes)
            && minor == MINOR
        {
            prop_assert_eq!(encode(&frame), bytes);
        }
    }

    #[test]
    fn a_changed_byte_does_no_harm(frame in any_frame(), at in any::<prop::sample::Index>(), to in any::<u8>()) {
        let mut bytes = encode(&frame);
        let at = at.index(bytes.len());
        bytes[at] = to;
        let _ = decode(&bytes);
    }
}
