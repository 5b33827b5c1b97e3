//! What may be wanted of an instance.

use kvcached_control::Change;
use serde::Serialize;

/// What somebody wants of an instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) enum Wish {
    /// None: no limit.
    #[serde(rename = "limit_bytes")]
    Limit(Option<u64>),
    #[serde(rename = "min_bytes")]
    Min(u64),
}

impl From<Wish> for Change {
    fn from(wish: Wish) -> Self {
        match wish {
            Wish::Limit(limit) => Self { limit_bytes: Some(limit), ..Self::default() },
            Wish::Min(min) => Self { min_bytes: Some(min), ..Self::default() },
        }
    }
}
