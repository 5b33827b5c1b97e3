//! Sizes as people read them.

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];

/// In the largest binary unit of which there is at least one, with two digits after the point: `1.50 GiB`; whole below 1 KiB: `512 B`.
pub(crate) fn binary(bytes: u64) -> String {
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut unit = bytes.ilog2() / 10;
    let mut hundredths = in_hundredths(bytes, unit);
    // 1023.996 KiB rounds to 1024.00 KiB, which is written 1.00 MiB
    if hundredths == 102_400 {
        unit += 1;
        hundredths = in_hundredths(bytes, unit);
    }
    format!("{}.{:02} {}", hundredths / 100, hundredths % 100, UNITS[unit as usize])
}

fn in_hundredths(bytes: u64, unit: u32) -> u128 {
    let unit_bytes = 1_u128 << (10 * unit);
    (u128::from(bytes) * 100 + unit_bytes / 2) / unit_bytes
}

#[cfg(test)]
mod tests {
    use super::binary;

    #[test]
    fn sizes_are_readable() {
        let cases = [
            (0, "0 B"),
            (1023, "1023 B"),
            (1024, "1.00 KiB"),
            (1536, "1.50 KiB"),
            (16 << 20, "16.00 MiB"),
            ((1 << 20) - 1, "1.00 MiB"),
            ((1 << 20) - 6, "1023.99 KiB"),
            (3 << 29, "1.50 GiB"),
            (143_771 << 20, "140.40 GiB"),
            (u64::MAX, "16.00 EiB"),
        ];
        for (bytes, text) in cases {
            assert_eq!(binary(bytes), text, "{bytes}");
        }
    }
}
