//! `kvctl metrics`: once, or to whoever asks over HTTP.

mod answer;
mod serve;
mod text;

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use kvcached_control::{ControlError, Family, Value, families};
use serde::Serialize;

use crate::Failure;
use crate::args::Metrics;
use crate::view::{Unreadable, look};

/// What `--json` prints: fields are added, never renamed or removed.
#[derive(Serialize)]
struct Families<'a> {
    families: Vec<OneFamily<'a>>,
    unreadable: &'a [Unreadable],
}

#[derive(Serialize)]
struct OneFamily<'a> {
    name: &'a str,
    help: &'a str,
    kind: &'a str,
    samples: Vec<OneSample<'a>>,
}

#[derive(Serialize)]
struct OneSample<'a> {
    labels: BTreeMap<&'a str, &'a str>,
    #[serde(flatten)]
    value: OneValue,
}

#[derive(Serialize)]
#[serde(untagged)]
enum OneValue {
    Number { value: u64 },
    Times { buckets: Vec<Bucket>, sum: f64, count: u64 },
}

/// `le`: seconds; null: no bound.
#[derive(Serialize)]
struct Bucket {
    le: Option<f64>,
    count: u64,
}

pub(crate) fn run(
    dir: &Path,
    args: &Metrics,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<(), Failure> {
    if let Some(address) = args.listen {
        return serve::run(dir, address, out, err);
    }
    let mut figures = Figures::new(dir, err);
    let found = figures.families()?;
    if args.json {
        serde_json::to_writer_pretty(&mut *out, &shown(&found, &figures.unreadable))
            .map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else {
        out.write_all(text::encode(&found).as_bytes())?;
    }
    Ok(())
}

/// Where figures come from, and where it is said what is wrong with them.
struct Figures<'a> {
    dir: &'a Path,
    err: &'a mut dyn Write,
    /// What was warned of last.
    unreadable: Vec<Unreadable>,
}

impl<'a> Figures<'a> {
    fn new(dir: &'a Path, err: &'a mut dyn Write) -> Self {
        Self { dir, err, unreadable: Vec::new() }
    }

    fn families(&mut self) -> Result<Vec<Family>, ControlError> {
        let snapshot = look(self.dir)?;
        if snapshot.unreadable != self.unreadable {
            snapshot.warn(self.err);
            self.unreadable = snapshot.unreadable;
        }
        families(self.dir, |_| true)
    }

    /// For a scrape. A failure is for now: the next one may go well.
    fn text(&mut self) -> Result<String, String> {
        let families =
            self.families().map_err(|error| error.to_string()).inspect_err(|why| self.warn(why))?;
        Ok(text::encode(&families))
    }

    fn warn(&mut self, why: &dyn std::fmt::Display) {
        let _ = writeln!(self.err, "warning: {why}").and_then(|()| self.err.flush()); // nobody is left to tell
    }
}

fn shown<'a>(found: &'a [Family], unreadable: &'a [Unreadable]) -> Families<'a> {
    let families = found.iter().map(|family| OneFamily {
        name: &family.name,
        help: family.help,
        kind: family.kind.as_str(),
        samples: family
            .samples
            .iter()
            .map(|sample| OneSample {
                labels: sample.labels.iter().map(|(name, value)| (*name, value.as_str())).collect(),
                value: match &sample.value {
                    Value::Number(value) => OneValue::Number { value: *value },
                    Value::Times(times) => OneValue::Times {
                        buckets: times
                            .cumulative()
                            .map(|(bound, count)| Bucket {
                                le: bound.as_ref().map(Duration::as_secs_f64),
                                count,
                            })
                            .collect(),
                        sum: times.sum.as_secs_f64(),
                        count: times.count(),
                    },
                },
            })
            .collect(),
    });
    Families { families: families.collect(), unreadable }
}
