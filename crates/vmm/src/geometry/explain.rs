//! What was chosen, in words.

use std::fmt;

use super::{Choice, Geometry, Layout};

impl Geometry {
    /// One line that says what was chosen and why.
    pub fn explain(&self) -> String {
        let m = u64::from(self.blocks_per_page);
        let handles = match self.layout {
            Layout::Chunked => "1 handle a page".to_owned(),
            Layout::PerLayer => format!("{} handles of {} a page", self.num_buffers, Bytes(self.run_bytes())),
        };
        format!(
            "page {} ({}): {} buffers x {} chunk of {m} blocks ({} tokens), padding {}, {} ids a page, {}: {handles}",
            Bytes(self.page_bytes),
            self.why(),
            self.num_buffers,
            Bytes(self.chunk_bytes()),
            m * u64::from(self.tokens_per_block),
            self.padding(),
            self.ids_per_page,
            self.layout,
        )
    }

    fn why(&self) -> String {
        let why = match self.choice {
            Choice::Nearest { permille } => {
                let percent = percent(permille);
                format!(
                    "nearest 16 MiB with at most {} % padding",
                    percent.strip_suffix(".0").unwrap_or(&percent)
                )
            }
            Choice::LeastPadding => "least padding up to 128 MiB".to_owned(),
            Choice::Smallest if self.layout == Layout::PerLayer => {
                "smallest that backs every buffer".to_owned()
            }
            Choice::Smallest => "smallest that holds a block of every buffer".to_owned(),
            Choice::Asked(least) => format!("smallest of at least {}", Bytes(least)),
        };
        if self.ids_decided { why + ", of those whose ids fit int32" } else { why }
    }

    /// The share of a page that holds no content, and of a padded super-cell where it is.
    fn padding(&self) -> String {
        let all = percent(self.permille(self.waste_bytes()));
        if self.block_bytes == self.content_bytes {
            return format!("{all} %");
        }
        let page = percent(self.permille(self.page_padding()));
        let cell = percent(self.permille(self.waste_bytes() - self.page_padding()));
        let (content, stride) = (self.content_bytes, self.block_bytes);
        format!("{all} % (page {page} %, cell {cell} %: {content} bytes every {stride})")
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Layout::Chunked => "chunked",
            Layout::PerLayer => "per-layer",
        })
    }
}

impl fmt::Display for Geometry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.explain())
    }
}

/// A size as people read it: whole binary units where it is whole.
pub(super) struct Bytes(pub(super) u64);

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = [(1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")];
        match units.into_iter().find(|(size, _)| self.0 >= *size && self.0.is_multiple_of(*size)) {
            Some((size, unit)) => write!(f, "{} {unit}", self.0 / size),
            None => write!(f, "{} bytes", self.0),
        }
    }
}

/// Thousandths as people read them: with one decimal.
pub(super) fn percent(permille: u32) -> String {
    format!("{}.{}", permille / 10, permille % 10)
}
