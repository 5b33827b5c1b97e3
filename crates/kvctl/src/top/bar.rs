//! Bars: how much of a whole is what.

use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};

/// What memory is for. Each has a shade of its own: colours may be switched off, or not be seen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    /// Under blocks of requests.
    Used,
    /// Under cached prefixes.
    Cached,
    /// Under no block, kept for the next.
    Reserved,
    /// Not held.
    Free,
}

pub(crate) const PARTS: [Part; 4] = [Part::Used, Part::Cached, Part::Reserved, Part::Free];

impl Part {
    pub(crate) fn word(self) -> &'static str {
        match self {
            Self::Used => "used",
            Self::Cached => "cached",
            Self::Reserved => "reserved",
            Self::Free => "free",
        }
    }

    pub(crate) fn shade(self) -> &'static str {
        match self {
            Self::Used => "█",
            Self::Cached => "▓",
            Self::Reserved => "▒",
            Self::Free => "░",
        }
    }

    pub(crate) fn style(self, colours: bool) -> Style {
        let colour = match self {
            _ if !colours => return Style::new(),
            Self::Used => Color::Green,
            Self::Cached => Color::Blue,
            Self::Reserved => Color::Yellow,
            Self::Free => Color::DarkGray,
        };
        Style::new().fg(colour)
    }
}

/// Bytes of a whole. What is held beyond the whole makes the bar full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Bar {
    pub(crate) used_bytes: u64,
    pub(crate) cached_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) whole_bytes: u64,
}

impl Bar {
    pub(crate) fn line(&self, width: u16, colours: bool) -> Line<'static> {
        let spans = PARTS.iter().zip(self.cells(width)).filter(|(_, cells)| *cells > 0);
        spans.map(|(part, cells)| Span::styled(part.shade().repeat(cells), part.style(colours))).collect()
    }

    /// Ends are rounded, not lengths, so that the sum is the width.
    fn cells(&self, width: u16) -> [usize; 4] {
        let held = [self.used_bytes, self.cached_bytes, self.reserved_bytes].map(u128::from);
        let whole = held.iter().sum::<u128>().max(self.whole_bytes.into()).max(1);
        let end_of = |bytes: u128| (bytes * u128::from(width) + whole / 2) / whole;
        let mut ends = [0; 4];
        let mut sum = 0;
        for (end, bytes) in ends.iter_mut().zip(held) {
            sum += bytes;
            *end = usize::try_from(end_of(sum)).unwrap_or(usize::MAX);
        }
        ends[3] = width.into();
        [ends[0], ends[1] - ends[0], ends[2] - ends[1], ends[3] - ends[2]]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cells(used_bytes: u64, cached_bytes: u64, reserved_bytes: u64, whole_bytes: u64) -> [usize; 4] {
        Bar { used_bytes, cached_bytes, reserved_bytes, whole_bytes }.cells(10)
    }

    #[test]
    fn a_bar_is_as_wide_as_its_whole() {
        assert_eq!(cells(0, 0, 0, 0), [0, 0, 0, 10]);
        assert_eq!(cells(10, 20, 30, 100), [1, 2, 3, 4]);
        assert_eq!(cells(25, 25, 25, 75), [3, 4, 3, 0]);
        assert_eq!(cells(30, 0, 10, 0), [8, 0, 2, 0], "more than there is");
        assert_eq!(cells(u64::MAX, u64::MAX, 0, u64::MAX), [5, 5, 0, 0]);
        assert_eq!(Bar::default().cells(0), [0; 4]);
    }
}
