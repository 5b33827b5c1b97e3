//! The binary `kvctl`; see the library.

use std::env::args_os;
use std::io::{BufWriter, stderr, stdout};
use std::process::exit;

fn main() {
    let mut out = BufWriter::new(stdout().lock());
    let code = kvctl::run(kvctl::words(args_os()), &mut out, &mut stderr().lock());
    // `run` has flushed what could be written; dropping the buffer would only try again.
    exit(code);
}
