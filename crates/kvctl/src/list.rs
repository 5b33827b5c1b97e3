//! `kvctl list`.

use std::io::Write;
use std::path::Path;

use crate::Failure;
use crate::table::tables;
use crate::view::look;

pub(crate) fn run(dir: &Path, json: bool, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    let snapshot = look(dir)?;
    snapshot.warn(err);
    if json {
        serde_json::to_writer_pretty(&mut *out, &snapshot).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        out.write_all(tables(&snapshot).as_bytes())?;
    }
    Ok(())
}
