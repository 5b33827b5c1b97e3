//! `kvctl doctor`: it looks at the engines that a Python finds, and so is Python (`kvcached.doctor`); here is who starts it.

use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::Command;

use crate::Failure;

/// Of a Python without kvcached.
const NOT_THERE: i32 = 77;
const PROGRAM: &str = "\
import sys
try:
    from kvcached.doctor.__main__ import main
except ModuleNotFoundError as error:
    if error.name != 'kvcached':
        raise
    sys.exit(77)
sys.exit(main())
";

/// Runs it on this process's own standard streams; returns its exit code.
pub(crate) fn run(python: &Path, arguments: &[OsString], out: &mut dyn Write) -> Result<i32, Failure> {
    out.flush()?;
    let ended = Command::new(python).arg("-c").arg(PROGRAM).args(arguments).status();
    let ended = ended.map_err(|source| Failure::Python { python: python.to_path_buf(), source })?;
    match ended.code() {
        Some(NOT_THERE) => Err(Failure::NotInPython { python: python.to_path_buf() }),
        Some(code) => Ok(code),
        None => Err(Failure::PythonKilled { python: python.to_path_buf() }),
    }
}
