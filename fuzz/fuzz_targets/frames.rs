//! Arbitrary messages. How many pages they are about is the target's to say.

use kvcached_ipc::message::{Body, Created, Failure, Refusal, Request};
use kvcached_ipc::runs::Runs;
use libfuzzer_sys::arbitrary::{Arbitrary, Result, Unstructured};

pub type Pages = fn(&mut Unstructured) -> Result<Runs>;

pub fn request(input: &mut Unstructured, pages: Pages) -> Result<Request> {
    Ok(match input.int_in_range(0u8..=10)? {
        0 => Request::Hello,
        1 => Request::Map(pages(input)?),
        2 => Request::Unmap(pages(input)?),
        3 => Request::Prepare(pages(input)?),
        4 => Request::Commit,
        5 => Request::Abort,
        6 => Request::Query,
        7 => Request::Barrier,
        8 => Request::Trim,
        9 => Request::Room,
        _ => Request::Bye,
    })
}

pub fn body(input: &mut Unstructured, pages: Pages) -> Result<Body> {
    Ok(match input.int_in_range(0u8..=13)? {
        0 => Body::Created(Created {
            page_bytes: u64::arbitrary(input)?,
            virtual_bytes: u64::arbitrary(input)?,
            num_pages: u32::arbitrary(input)?,
            blocks_per_page: u32::arbitrary(input)?,
            ids_per_page: u32::arbitrary(input)?,
            mapped: pages(input)?,
            lost: pages(input)?,
        }),
        1 => Body::Mapped { new: pages(input)? },
        2 => Body::Unmapped,
        3 => Body::Prepared,
        4 => Body::Committed,
        5 => Body::Aborted { lost: pages(input)? },
        6 => Body::Failed(Failure {
            out_of_memory: bool::arbitrary(input)?,
            lost: pages(input)?,
            still_mapped: pages(input)?,
            detail: <&str>::arbitrary(input)?.repeat(input.int_in_range(0..=300)?),
        }),
        7 => Body::Running,
        8 => Body::Unknown,
        9 => Body::Passed,
        10 => Body::Trimmed { bytes: u64::arbitrary(input)? },
        11 => Body::Room { free_bytes: u64::arbitrary(input)? },
        12 => Body::Bye,
        _ => Body::Refused(*input.choose(&Refusal::ALL)?),
    })
}
