//! `kvctl doctor`: it looks at the engines that a Python finds, and so is Python (`kvcached.doctor`); here is who starts it.

use std::env::var_os;
use std::ffi::OsString;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use crate::Failure;

/// A setting (docs/SETTINGS.md). The wheel's console script sets it to its own Python where nobody else has.
const VARIABLE: &str = "KVCACHED_PYTHON";
const DEFAULT: &str = "python3";
/// Of a Python without kvcached.
const NOT_THERE: i32 = 77;
const PROGRAM: &str = "\
import sys
try:
    from kvcached.doctor.__main__ import main
except ModuleNotFoundError as error:
    if (error.name or '').split('.')[0] != 'kvcached':
        raise
    sys.exit(77)
sys.exit(main())
";

/// Runs it on this process's own standard streams; returns its exit code.
pub(crate) fn run(
    python: Option<PathBuf>,
    arguments: &[OsString],
    out: &mut dyn Write,
) -> Result<i32, Failure> {
    out.flush()?;
    let python = python.or_else(|| var_os(VARIABLE).map(PathBuf::from)).unwrap_or_else(|| DEFAULT.into());
    let ended = Command::new(&python).arg("-c").arg(PROGRAM).args(arguments).status();
    match ended.map(|ended| ended.code()) {
        Ok(Some(NOT_THERE)) => Err(Failure::NotInPython { python }),
        Ok(Some(code)) => Ok(code),
        Ok(None) => Err(Failure::PythonKilled { python }),
        Err(source) => Err(Failure::Python { python, source }),
    }
}
