//! `kvctl list`.

use std::io::Write;
use std::path::Path;

use kvcached_control::{InstanceView, Listed, PoolView};
use serde::Serialize;

use crate::Failure;
use crate::size::binary;

pub(crate) fn run(dir: &Path, json: bool, out: &mut dyn Write, err: &mut dyn Write) -> Result<(), Failure> {
    let mut instances = Vec::new();
    let mut unreadable = Vec::new();
    for listed in kvcached_control::list(dir)? {
        match listed {
            Listed::Instance(view) => instances.push(view),
            Listed::Unreadable { path, why } => {
                let (path, why) = (path.display().to_string(), why.to_string());
                let _ = writeln!(err, "warning: {path} is not shown: {why}"); // a warning never costs the result
                unreadable.push(UnreadableJson { path, why });
            }
        }
    }
    if json {
        let instances = instances.iter().map(InstanceJson::from).collect();
        serde_json::to_writer_pretty(&mut *out, &ListJson { instances, unreadable })
            .map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else if instances.is_empty() {
        writeln!(out, "no instances")?;
    } else {
        write_table(&instances, out)?;
    }
    Ok(())
}

const COLUMNS: usize = 7;
const HEADINGS: [&str; COLUMNS] = ["NAME", "ENGINE", "PID", "DEVICE", "USED", "RESERVED", "VIRTUAL"];
const IS_NUMBER: [bool; COLUMNS] = [false, false, true, false, true, true, true];

/// Texts to the left, numbers to the right, as wide as what they hold.
fn write_table(instances: &[InstanceView], out: &mut dyn Write) -> std::io::Result<()> {
    let mut rows = vec![HEADINGS.map(str::to_owned)];
    rows.extend(instances.iter().map(cells));
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; COLUMNS] = std::array::from_fn(width);
    for row in &rows {
        let mut line = String::new();
        for ((cell, width), is_number) in row.iter().zip(widths).zip(IS_NUMBER) {
            line += &if is_number { format!("{cell:>width$}  ") } else { format!("{cell:<width$}  ") };
        }
        writeln!(out, "{}", line.trim_end())?;
    }
    Ok(())
}

fn cells(instance: &InstanceView) -> [String; COLUMNS] {
    let total = instance.total();
    [
        instance.name.clone(),
        instance.engine.clone(),
        instance.pid.to_string(),
        instance.device.clone(),
        binary(total.used_bytes),
        binary(total.reserved_bytes),
        binary(total.virtual_bytes),
    ]
}

// What programs read: fields are added, never renamed or removed.

#[derive(Serialize)]
struct ListJson<'a> {
    instances: Vec<InstanceJson<'a>>,
    unreadable: Vec<UnreadableJson>,
}

#[derive(Serialize)]
struct UnreadableJson {
    path: String,
    why: String,
}

#[derive(Serialize)]
struct InstanceJson<'a> {
    name: &'a str,
    engine: &'a str,
    pid: u32,
    device: &'a str,
    start_unix_ns: u64,
    heartbeat: u64,
    #[serde(flatten)]
    total: FiguresJson,
    pools: Vec<PoolJson<'a>>,
}

#[derive(Serialize)]
struct PoolJson<'a> {
    name: &'a str,
    #[serde(flatten)]
    figures: FiguresJson,
}

#[derive(Serialize)]
struct FiguresJson {
    used_bytes: u64,
    reserved_bytes: u64,
    virtual_bytes: u64,
    quarantined_bytes: u64,
}

impl<'a> From<&'a InstanceView> for InstanceJson<'a> {
    fn from(view: &'a InstanceView) -> Self {
        let pools =
            view.pools.iter().map(|pool| PoolJson { name: &pool.name, figures: pool.into() }).collect();
        Self {
            name: &view.name,
            engine: &view.engine,
            pid: view.pid,
            device: &view.device,
            start_unix_ns: view.start_unix_ns,
            heartbeat: view.heartbeat,
            total: (&view.total()).into(),
            pools,
        }
    }
}

impl From<&PoolView> for FiguresJson {
    fn from(pool: &PoolView) -> Self {
        Self {
            used_bytes: pool.used_bytes,
            reserved_bytes: pool.reserved_bytes,
            virtual_bytes: pool.virtual_bytes,
            quarantined_bytes: pool.quarantined_bytes,
        }
    }
}
