//! The binary `kvctl`; see the library.

use std::io::{BufWriter, stderr, stdout};
use std::process::exit;

fn main() {
    let mut out = BufWriter::new(stdout().lock());
    let code = kvcached_kvctl::run(std::env::args_os().skip(1), &mut out, &mut stderr().lock());
    // `run` has flushed what could be written; dropping the buffer would only try again.
    exit(code);
}
