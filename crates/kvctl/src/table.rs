//! Snapshots as tables of text.

use std::fmt::Write as _;

use crate::size::binary;
use crate::view::{Budget, Instance, Snapshot};

/// A column's heading, and whether it holds numbers.
type Column = (&'static str, bool);

const TEXT: bool = false;
const NUMBER: bool = true;

const INSTANCES: [Column; 9] = [
    ("NAME", TEXT),
    ("ENGINE", TEXT),
    ("PID", NUMBER),
    ("DEVICE", TEXT),
    ("USED", NUMBER),
    ("RESERVED", NUMBER),
    ("VIRTUAL", NUMBER),
    ("LIMIT", NUMBER),
    ("MIN", NUMBER),
];
const BUDGETS: [Column; 5] =
    [("DEVICE", TEXT), ("BUDGET", NUMBER), ("GRANTED", NUMBER), ("FREE", NUMBER), ("SHORT", NUMBER)];

/// One table of instances, and below it one of what they share.
pub(crate) fn tables(snapshot: &Snapshot) -> String {
    let mut text = match &snapshot.instances[..] {
        [] => "no instances\n".to_owned(),
        instances => table(&INSTANCES, instances.iter().map(instance)),
    };
    if !snapshot.budgets.is_empty() {
        text.push('\n');
        text += &table(&BUDGETS, snapshot.budgets.iter().map(budget));
    }
    text
}

/// A limit, or its absence.
pub(crate) fn limit(limit_bytes: Option<u64>) -> String {
    limit_bytes.map_or_else(|| "none".to_owned(), binary)
}

fn instance(instance: &Instance) -> [String; 9] {
    [
        instance.name.clone(),
        instance.engine.clone(),
        instance.pid.to_string(),
        instance.device.clone(),
        binary(instance.total.used_bytes),
        binary(instance.total.reserved_bytes),
        binary(instance.total.virtual_bytes),
        limit(instance.limit_bytes),
        binary(instance.min_bytes),
    ]
}

fn budget(budget: &Budget) -> [String; 5] {
    [
        budget.device.clone(),
        binary(budget.budget_bytes),
        binary(budget.granted_bytes),
        binary(budget.free_bytes),
        binary(budget.shortage_bytes),
    ]
}

/// Texts to the left, numbers to the right, as wide as what they hold.
fn table<const N: usize>(columns: &[Column; N], rows: impl Iterator<Item = [String; N]>) -> String {
    let rows: Vec<_> = std::iter::once(columns.map(|(heading, _)| heading.to_owned())).chain(rows).collect();
    let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let mut text = String::new();
    for row in &rows {
        let mut line = String::new();
        for ((cell, width), (_, is_number)) in row.iter().zip(widths).zip(columns) {
            // Writing to a string cannot fail.
            let _ =
                if *is_number { write!(line, "{cell:>width$}  ") } else { write!(line, "{cell:<width$}  ") };
        }
        text += line.trim_end();
        text.push('\n');
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::view::Figures;

    #[test]
    fn instances_and_what_they_share() {
        let llama = Instance {
            name: "llama-8b".to_owned(),
            engine: "vllm 0.29.0".to_owned(),
            pid: 4711,
            device: "cuda:0".to_owned(),
            total: Figures {
                used_bytes: 3 << 30,
                reserved_bytes: 64 << 20,
                virtual_bytes: 80 << 30,
                quarantined_bytes: 0,
            },
            limit_bytes: Some(20 << 30),
            min_bytes: 1 << 30,
            ..Instance::default()
        };
        let tiny = Instance {
            name: "tiny".to_owned(),
            engine: "e".to_owned(),
            device: "cpu".to_owned(),
            ..Instance::default()
        };
        let budgets = vec![
            Budget {
                device: "GPU-5f0c9a1e-93c8-4b7e-b0c1-3d2f4f5a6b7c".to_owned(),
                budget_bytes: 140 << 30,
                granted_bytes: 4 << 30,
                free_bytes: 136 << 30,
                shortage_bytes: 1 << 20,
                members: Vec::new(),
            },
            Budget {
                device: "host".to_owned(),
                budget_bytes: 16 << 30,
                free_bytes: 16 << 30,
                ..Budget::default()
            },
        ];
        let snapshot = Snapshot { instances: vec![llama, tiny], budgets, unreadable: Vec::new() };
        assert_eq!(
            tables(&snapshot),
            "\
NAME      ENGINE        PID  DEVICE      USED   RESERVED    VIRTUAL      LIMIT       MIN
llama-8b  vllm 0.29.0  4711  cuda:0  3.00 GiB  64.00 MiB  80.00 GiB  20.00 GiB  1.00 GiB
tiny      e               0  cpu          0 B        0 B        0 B       none       0 B

DEVICE                                        BUDGET   GRANTED        FREE     SHORT
GPU-5f0c9a1e-93c8-4b7e-b0c1-3d2f4f5a6b7c  140.00 GiB  4.00 GiB  136.00 GiB  1.00 MiB
host                                       16.00 GiB       0 B   16.00 GiB       0 B
"
        );
    }
}
