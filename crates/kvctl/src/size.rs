//! Sizes, percentages and times as people write and read them.

use std::time::Duration;

const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
const LETTERS: [&str; 7] = ["B", "K", "M", "G", "T", "P", "E"];
/// More of them change nothing: a millionth of a GiB is 1 KiB.
const MAX_DECIMALS: usize = 6;
/// As many as 2^64 has.
const MAX_DIGITS: usize = 20;
/// A day. Longer is a mistake.
const MAX_SECONDS: u128 = 86_400;

/// Why a text is none of what is expected. The message says what is.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotUnderstood {
    #[error("a size is a number of bytes or one with K, M, G or T, in binary units: 512M, 1.5GiB")]
    Size,
    #[error("units are binary here: write {0} or {0}iB")]
    DecimalUnit(char),
    #[error("a byte has no fraction")]
    FractionOfAByte,
    #[error("that is more than 64 bits can count")]
    TooLarge,
    #[error("a percentage is a number from 0 to 100: 25, 12.5")]
    Percentage,
    #[error("seconds are a number from {least} to {MAX_SECONDS}: 5, 0.5")]
    Seconds { least: &'static str },
}

/// In the largest binary unit of which there is at least one, with two digits after the point: `1.50 GiB`; whole below 1 KiB: `512 B`.
pub(crate) fn binary(bytes: u64) -> String {
    spelled(bytes, " ", &UNITS)
}

/// The same for narrow columns: `1.50G`. [`size`] reads it.
pub(crate) fn compact(bytes: u64) -> String {
    if bytes == 0 { "0".to_owned() } else { spelled(bytes, "", &LETTERS) }
}

fn spelled(bytes: u64, between: &str, units: &[&str; 7]) -> String {
    if bytes < 1024 {
        return format!("{bytes}{between}{}", units[0]);
    }
    let mut unit = bytes.ilog2() / 10;
    let mut hundredths = in_hundredths(bytes, unit);
    // 1023.996 KiB rounds to 1024.00 KiB, which is written 1.00 MiB
    if hundredths == 102_400 {
        unit += 1;
        hundredths = in_hundredths(bytes, unit);
    }
    format!("{}.{:02}{between}{}", hundredths / 100, hundredths % 100, units[unit as usize])
}

fn in_hundredths(bytes: u64, unit: u32) -> u128 {
    let unit_bytes = 1_u128 << (10 * unit);
    (u128::from(bytes) * 100 + unit_bytes / 2) / unit_bytes
}

/// Bytes of `512`, `512M`, `1.5GiB`; what is no whole number of bytes is rounded down.
pub(crate) fn size(text: &str) -> Result<u64, NotUnderstood> {
    let unit_at = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(unit_at);
    let number = Decimal::parse(number).ok_or(NotUnderstood::Size)?;
    let exponent = binary_exponent(unit)?;
    if exponent == 0 && number.decimals > 0 {
        return Err(NotUnderstood::FractionOfAByte);
    }
    let bytes =
        number.digits.checked_mul(1 << exponent).ok_or(NotUnderstood::TooLarge)? / number.denominator();
    // The largest number is how records say "no limit".
    u64::try_from(bytes).ok().filter(|&bytes| bytes < u64::MAX).ok_or(NotUnderstood::TooLarge)
}

/// [`size`], or None for `none`.
pub(crate) fn size_or_none(text: &str) -> Result<Option<u64>, NotUnderstood> {
    if text == "none" { Ok(None) } else { size(text).map(Some) }
}

/// Of `K`, `k`, `KiB` and so on; no unit is bytes.
fn binary_exponent(unit: &str) -> Result<u32, NotUnderstood> {
    let upper = unit.to_ascii_uppercase();
    for (letter, exponent) in LETTERS.iter().zip((0..).step_by(10)) {
        match upper.strip_prefix(letter) {
            Some("") => return Ok(exponent),
            Some("I" | "IB") if exponent > 0 => return Ok(exponent),
            Some("B") if exponent > 0 => {
                return Err(NotUnderstood::DecimalUnit(char::from(letter.as_bytes()[0])));
            }
            _ => {}
        }
    }
    if unit.is_empty() { Ok(0) } else { Err(NotUnderstood::Size) }
}

/// Part of a whole, from 0 to 100 percent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Percentage(Decimal);

impl Percentage {
    /// Rounded down.
    pub(crate) fn of(self, bytes: u64) -> u64 {
        // At most 2^64 x 10^8: far from the end of 128 bits. At most `bytes`, as the part is at most the whole.
        let part = u128::from(bytes) * self.0.digits / (100 * self.0.denominator());
        u64::try_from(part).unwrap_or(bytes)
    }
}

/// `25`, `12.5`, with or without `%`.
pub(crate) fn percentage(text: &str) -> Result<Percentage, NotUnderstood> {
    let number = Decimal::parse(text.strip_suffix('%').unwrap_or(text)).ok_or(NotUnderstood::Percentage)?;
    if number.digits > 100 * number.denominator() {
        return Err(NotUnderstood::Percentage);
    }
    Ok(Percentage(number))
}

/// How long to wait for something; 0 is not at all.
pub(crate) fn patience(text: &str) -> Result<Duration, NotUnderstood> {
    seconds(text).ok_or(NotUnderstood::Seconds { least: "0" })
}

/// Time between two looks.
pub(crate) fn interval(text: &str) -> Result<Duration, NotUnderstood> {
    seconds(text).filter(|time| time.as_millis() >= 100).ok_or(NotUnderstood::Seconds { least: "0.1" })
}

fn seconds(text: &str) -> Option<Duration> {
    let number = Decimal::parse(text)?;
    if number.digits > MAX_SECONDS * number.denominator() {
        return None;
    }
    let micros = number.digits * 1_000_000 / number.denominator();
    u64::try_from(micros).ok().map(Duration::from_micros)
}

/// `digits / 10^decimals`, exactly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Decimal {
    digits: u128,
    decimals: u32,
}

impl Decimal {
    /// Digits, and digits after a point: no sign, no exponent, nothing that a typing error might be taken for.
    fn parse(text: &str) -> Option<Self> {
        let (whole, fraction) = match text.split_once('.') {
            Some((_, "")) => return None,
            Some(parts) => parts,
            None => (text, ""),
        };
        let all_digits = [whole, fraction].iter().all(|part| part.bytes().all(|byte| byte.is_ascii_digit()));
        if !all_digits || whole.is_empty() || whole.len() > MAX_DIGITS || fraction.len() > MAX_DECIMALS {
            return None;
        }
        let digits = format!("{whole}{fraction}").parse().ok()?;
        Some(Self { digits, decimals: fraction.len().try_into().ok()? })
    }

    fn denominator(self) -> u128 {
        10_u128.pow(self.decimals)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_readable() {
        let cases = [
            (0, "0 B", "0"),
            (1023, "1023 B", "1023B"),
            (1024, "1.00 KiB", "1.00K"),
            (1536, "1.50 KiB", "1.50K"),
            (16 << 20, "16.00 MiB", "16.00M"),
            ((1 << 20) - 1, "1.00 MiB", "1.00M"),
            ((1 << 20) - 6, "1023.99 KiB", "1023.99K"),
            (3 << 29, "1.50 GiB", "1.50G"),
            (143_771 << 20, "140.40 GiB", "140.40G"),
            (u64::MAX, "16.00 EiB", "16.00E"),
        ];
        for (bytes, long, short) in cases {
            assert_eq!((binary(bytes).as_str(), compact(bytes).as_str()), (long, short), "{bytes}");
        }
    }

    #[test]
    fn sizes_are_read_in_binary_units() {
        let cases = [
            ("0", 0),
            ("1", 1),
            ("4096B", 4096),
            ("512M", 512 << 20),
            ("512m", 512 << 20),
            ("512Mi", 512 << 20),
            ("512MiB", 512 << 20),
            ("1.5GiB", 3 << 29),
            ("0.1K", 102),
            ("2T", 2 << 40),
            ("1P", 1 << 50),
            ("15.999999E", 18_446_742_920_788_047_009),
            ("18446744073709551614", u64::MAX - 1),
        ];
        for (text, bytes) in cases {
            assert_eq!(size(text), Ok(bytes), "{text}");
        }
        assert_eq!(size_or_none("none"), Ok(None));
        assert_eq!(size_or_none("1k"), Ok(Some(1024)));
    }

    #[test]
    fn what_is_no_size_is_told() {
        use NotUnderstood::{DecimalUnit, FractionOfAByte, Size, TooLarge};
        for text in [
            "",
            "M",
            "-1",
            "+1",
            "1 G",
            "1.G",
            ".5G",
            "1e9",
            "1_0",
            "1x",
            "1GiBs",
            "1.1234567G",
            "none",
            "٣",
            "1,5G",
        ] {
            assert_eq!(size(text), Err(Size), "{text:?}");
        }
        assert_eq!(size("1GB"), Err(DecimalUnit('G')));
        assert_eq!(size("1mb"), Err(DecimalUnit('M')));
        assert_eq!(size("1.5"), Err(FractionOfAByte));
        assert_eq!(size("1.5B"), Err(FractionOfAByte));
        assert_eq!(size("18446744073709551615"), Err(TooLarge));
        assert_eq!(size("16E"), Err(TooLarge));
        assert_eq!(size("99999999999999999999E"), Err(TooLarge));
    }

    #[test]
    fn a_percentage_is_exact() {
        let of = |text: &str, bytes| percentage(text).map(|percentage| percentage.of(bytes));
        assert_eq!(of("25", 1000), Ok(250));
        assert_eq!(of("12.5%", 1000), Ok(125));
        assert_eq!(of("0", 1000), Ok(0));
        assert_eq!(of("100", u64::MAX), Ok(u64::MAX));
        assert_eq!(of("100.000000", u64::MAX), Ok(u64::MAX));
        assert_eq!(of("33.333333", 3 << 30), Ok(1_073_741_813));
        for text in ["", "%", "100.000001", "101", "-1", "half", "5%%"] {
            assert_eq!(of(text, 1), Err(NotUnderstood::Percentage), "{text:?}");
        }
    }

    #[test]
    fn times_are_seconds() {
        assert_eq!(patience("0"), Ok(Duration::ZERO));
        assert_eq!(patience("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(patience("86400"), Ok(Duration::from_secs(86_400)));
        assert_eq!(interval("0.1"), Ok(Duration::from_millis(100)));
        for text in ["", "-1", "86401", "99999999999999999999.999999", "1s", "inf", "nan"] {
            assert_eq!(patience(text), Err(NotUnderstood::Seconds { least: "0" }), "{text:?}");
        }
        assert_eq!(interval("0.09"), Err(NotUnderstood::Seconds { least: "0.1" }));
    }
}
