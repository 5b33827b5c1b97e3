//! The choice of a page: all candidates are compared, for there are few.

use std::cmp::Ordering;

use super::{Choice, Geometry, GeometryError, Layout, Shape, Target};

/// Where the search for a page starts: large enough that driver calls are few, small enough to give back soon.
const PREFERRED_PAGE_BYTES: u64 = 16 << 20;
/// The search ends here.
const SEARCH_PAGE_BYTES: u64 = 128 << 20;
/// No page is larger, whatever is asked for.
pub(super) const MAX_PAGE_BYTES: u64 = 1 << 30;
/// Candidates of one stride that are looked at: every page of up to 128 MiB where the granularity is 4 KiB or more.
const MAX_CANDIDATES: usize = 32_768;

/// See [`Geometry::solve`].
pub(super) fn solve(shape: Shape, target: Target) -> Result<Geometry, GeometryError> {
    check(&shape, &target)?;
    let ladders = ladders(&shape, &target)?;
    let Some(best) = pick(&ladders, &target, |_| true) else {
        return Err(GeometryError::PageTooLarge {
            num_buffers: shape.num_buffers,
            block_bytes: shape.block_bytes,
            page_bytes: ladders
                .iter()
                .filter_map(|ladder| ladder.first(target.page_bytes.unwrap_or(1)))
                .min(),
            advice: "ask for a smaller page",
        });
    };
    match target.num_blocks {
        // The best of all is also the best of those whose ids fit, if its own do.
        Some(num_blocks) if best.ids(num_blocks).is_none() => {
            let fits = pick(&ladders, &target, |candidate| candidate.ids(num_blocks).is_some());
            fits.map(|g| Geometry { ids_decided: true, ..g }).ok_or_else(|| best.too_many_ids(num_blocks))
        }
        _ => Ok(best),
    }
}

fn check(shape: &Shape, target: &Target) -> Result<(), GeometryError> {
    let given = [
        ("num_buffers", u64::from(shape.num_buffers)),
        ("block_bytes", shape.block_bytes),
        ("tokens_per_block", shape.tokens_per_block.into()),
        ("cell_align", shape.cell_align.unwrap_or(1)),
        ("granularity", target.granularity),
        ("page_bytes", target.page_bytes.unwrap_or(1)),
    ];
    match given.into_iter().find(|(_, value)| *value == 0) {
        Some((what, _)) => Err(GeometryError::Zero { what }),
        None => Ok(()),
    }
}

/// The best of the candidates that `keep` likes.
fn pick(ladders: &[Ladder], target: &Target, keep: impl Fn(&Geometry) -> bool) -> Option<Geometry> {
    let smallest = |least: u64| {
        let firsts = ladders.iter().filter_map(|ladder| ladder.upwards(least).find(&keep));
        firsts.min_by_key(|g| (g.page_bytes, g.block_bytes))
    };
    if let Some(asked) = target.page_bytes {
        return smallest(asked).map(|g| Geometry { choice: Choice::Asked(asked), ..g });
    }
    let permille = target.waste_permille;
    let near = ladders.iter().flat_map(Ladder::near).filter(&keep).min_by(|a, b| by_merit(a, b, permille));
    let near = near.map(|g| match lean(&g, permille) {
        true => Geometry { choice: Choice::Nearest { permille }, ..g },
        false => Geometry { choice: Choice::LeastPadding, ..g },
    });
    near.or_else(|| smallest(1))
}

/// Better is less: nearest 16 MiB if the waste is small, else the least share of waste; then the smaller page and stride.
fn by_merit(a: &Geometry, b: &Geometry, permille: u32) -> Ordering {
    let far = |g: &Geometry| g.page_bytes.abs_diff(PREFERRED_PAGE_BYTES);
    let merit = match (lean(a, permille), lean(b, permille)) {
        (true, true) => far(a).cmp(&far(b)),
        // Shares compare as cross products: no rounding, and no overflow up to the largest page.
        (false, false) => (a.waste_bytes() * b.page_bytes).cmp(&(b.waste_bytes() * a.page_bytes)),
        (a_is, b_is) => b_is.cmp(&a_is),
    };
    merit.then((a.page_bytes, a.block_bytes).cmp(&(b.page_bytes, b.block_bytes)))
}

/// Whether so little is wasted that it is as good as nothing.
fn lean(candidate: &Geometry, permille: u32) -> bool {
    candidate.waste_bytes() * 1000 <= candidate.page_bytes * u64::from(permille)
}

/// The candidates of one stride: the multiples of `unit` from `least` on.
struct Ladder {
    shape: Shape,
    layout: Layout,
    stride: u64,
    row_bytes: u64,
    unit: u64,
    least: u64,
}

impl Ladder {
    /// None where even the least page is beyond 64 bits.
    fn new(shape: &Shape, layout: Layout, granularity: u64, stride: u64) -> Option<Ladder> {
        let num_buffers = u64::from(shape.num_buffers);
        let row_bytes = stride.checked_mul(num_buffers)?;
        let run = lcm(granularity, stride)?;
        let unit = match layout {
            Layout::Chunked => run,
            Layout::PerLayer => run.checked_mul(num_buffers)?,
        };
        let least = row_bytes.checked_next_multiple_of(unit)?;
        Some(Ladder { shape: *shape, layout, stride, row_bytes, unit, least })
    }

    /// The smallest page of at least that many bytes; None beyond 64 bits.
    fn first(&self, bytes: u64) -> Option<u64> {
        bytes.max(self.least).checked_next_multiple_of(self.unit)
    }

    /// Candidates from that size up.
    fn upwards(&self, bytes: u64) -> impl Iterator<Item = Geometry> {
        let first = self.first(bytes).map_or(u64::MAX, |page| page / self.unit);
        self.between(first, MAX_PAGE_BYTES)
    }

    /// Candidates of up to 128 MiB; where those are too many, the ones around 16 MiB.
    fn near(&self) -> impl Iterator<Item = Geometry> {
        let preferred = PREFERRED_PAGE_BYTES / self.unit;
        let first = preferred.saturating_sub(MAX_CANDIDATES as u64 / 2).max(self.least / self.unit);
        self.between(first, SEARCH_PAGE_BYTES)
    }

    fn between(&self, first: u64, limit: u64) -> impl Iterator<Item = Geometry> {
        (first..=limit / self.unit).take(MAX_CANDIDATES).map(|times| self.at(times * self.unit))
    }

    fn at(&self, page_bytes: u64) -> Geometry {
        // Fits: no page is larger than 1 GiB.
        let blocks_per_page = (page_bytes / self.row_bytes) as u32;
        Geometry {
            layout: self.layout,
            num_buffers: self.shape.num_buffers,
            block_bytes: self.stride,
            content_bytes: self.shape.block_bytes,
            tokens_per_block: self.shape.tokens_per_block,
            page_bytes,
            blocks_per_page,
            ids_per_page: match self.layout {
                Layout::Chunked => (page_bytes / self.stride) as u32,
                Layout::PerLayer => blocks_per_page,
            },
            choice: Choice::Smallest,
            ids_decided: false,
        }
    }
}

/// The ladders that have a page of at most 1 GiB. Fails with `PageTooLarge` where there is none.
fn ladders(shape: &Shape, target: &Target) -> Result<Vec<Ladder>, GeometryError> {
    let ladder = |stride| Ladder::new(shape, target.layout, target.granularity, stride);
    let mut ladders: Vec<Ladder> = strides(shape).into_iter().filter_map(ladder).collect();
    let least = ladders.iter().map(|ladder| ladder.least).min();
    ladders.retain(|ladder| ladder.least <= MAX_PAGE_BYTES);
    if !ladders.is_empty() {
        return Ok(ladders);
    }
    let chunked = Target { layout: Layout::Chunked, ..*target };
    let chunked_does = target.layout == Layout::PerLayer && self::ladders(shape, &chunked).is_ok();
    Err(GeometryError::PageTooLarge {
        num_buffers: shape.num_buffers,
        block_bytes: shape.block_bytes,
        page_bytes: least,
        advice: match chunked_does {
            true => "use the chunked layout, whose pages are one handle for all buffers",
            false => "use fewer tokens a block, or buffers whose block size divides the granularity",
        },
    })
}

/// From one block to the next: the content at its alignment, and, for the sake of a smaller lcm, at rounder ones as long
/// as that takes no more than twice the content.
fn strides(shape: &Shape) -> Vec<u64> {
    let content = shape.block_bytes;
    let Some(align) = shape.cell_align else { return vec![content] };
    let steps = std::iter::successors(Some(align), |step| step.checked_mul(2));
    let rounded = steps.map_while(|step| content.checked_next_multiple_of(step));
    let most = content.checked_next_multiple_of(align).unwrap_or(content).max(content.saturating_mul(2));
    let mut strides: Vec<u64> = rounded.take_while(|stride| *stride <= most).collect();
    strides.dedup();
    strides
}

fn lcm(a: u64, b: u64) -> Option<u64> {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x).checked_mul(b)
}
