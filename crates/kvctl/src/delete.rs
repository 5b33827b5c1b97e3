//! `kvctl delete`.

use std::io::Write;
use std::path::Path;

use serde::Serialize;

use crate::Failure;

/// What `--json` prints: fields are added, never renamed or removed.
#[derive(Serialize)]
struct Deleted<'a> {
    name: &'a str,
    removed: bool,
}

pub(crate) fn run(dir: &Path, name: &str, json: bool, out: &mut dyn Write) -> Result<(), Failure> {
    if !kvcached_control::remove(dir, name)? {
        return Err(Failure::NoRecord(name.to_owned()));
    }
    if json {
        let deleted = Deleted { name, removed: true };
        serde_json::to_writer_pretty(&mut *out, &deleted).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        writeln!(out, "removed the record of {name}")?;
    }
    Ok(())
}
