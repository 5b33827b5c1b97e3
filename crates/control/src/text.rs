//! Names and texts: what may be written, and what may be shown on a terminal.

use crate::error::ControlError;
use crate::sizes::MAX_TEXT_BYTES;

const SUFFIX: &str = ".kvc";

/// An instance name is a file's name too, so it is kept to characters that need no quoting anywhere.
pub(crate) fn check_name(name: &str) -> Result<(), ControlError> {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    if name.is_empty() || name.len() > MAX_TEXT_BYTES || name.starts_with('.') || !name.bytes().all(plain) {
        return Err(ControlError::InvalidName { name: name.to_owned() });
    }
    Ok(())
}

/// Control characters are refused both ways: records are shown on terminals, and escape sequences must not reach one.
pub(crate) fn is_valid_text(text: &str) -> bool {
    !text.is_empty() && text.len() <= MAX_TEXT_BYTES && !text.chars().any(char::is_control)
}

pub(crate) fn check_text(field: &'static str, text: &str) -> Result<(), ControlError> {
    if is_valid_text(text) { Ok(()) } else { Err(ControlError::InvalidText { field, text: text.to_owned() }) }
}

pub(crate) fn file_name(instance: &str) -> String {
    format!("{instance}{SUFFIX}")
}

/// Name of the instance whose record has this file name; None for files that are no record.
pub(crate) fn instance_of(file_name: &str) -> Option<&str> {
    file_name.strip_suffix(SUFFIX).filter(|name| check_name(name).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_plain_file_names() {
        for good in ["a", "vllm-0", "Qwen3.0_x", "-", &"n".repeat(64)] {
            assert!(check_name(good).is_ok(), "{good}");
            assert_eq!(instance_of(&file_name(good)), Some(good));
        }
        for bad in ["", ".", "..", ".hidden", "a/b", "a b", "ä", "a\0", "a\n", &"n".repeat(65)] {
            assert!(matches!(check_name(bad), Err(ControlError::InvalidName { .. })), "{bad:?}");
        }
    }

    #[test]
    fn texts_carry_no_control_characters() {
        assert!(is_valid_text("vllm 0.29.0"));
        assert!(is_valid_text("größer"));
        for bad in ["", "\x1b[31mred", "two\nlines", "nul\0", "\u{9b}31m", &"n".repeat(65)] {
            assert!(!is_valid_text(bad), "{bad:?}");
        }
    }
}
