//! Super-cells: blocks whose components differ in size.

use super::{GeometryError, Shape};

/// One component of a super-cell: what one block holds of one kind of state, for instance a latent or a convolution's state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Component {
    /// Bytes of it in one block.
    pub bytes: u64,
    /// What its address is a multiple of, bytes: a power of two.
    pub align: u64,
}

/// A block that holds several components, each at its alignment, in the order given. A component seen as a tensor starts
/// at its offset and has the stride of the block.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cell {
    offsets: Vec<u64>,
    sizes: Vec<u64>,
    bytes: u64,
    align: u64,
}

impl Cell {
    /// Puts `components` one after the other, each at the next multiple of its alignment. The cell's size is a multiple of
    /// the largest alignment, so that every component of every block lies at its own.
    ///
    /// Fails with `Zero` for no component or an empty one, with `Alignment` for what is no power of two, with
    /// `CellTooLarge` beyond 64 bits.
    pub fn pack(components: &[Component]) -> Result<Cell, GeometryError> {
        let mut cell = Cell { offsets: vec![], sizes: vec![], bytes: 0, align: 1 };
        for &Component { bytes, align } in components {
            if bytes == 0 {
                return Err(GeometryError::Zero { what: "bytes of a component" });
            }
            if !align.is_power_of_two() {
                return Err(GeometryError::Alignment { align });
            }
            let offset = cell.bytes.checked_next_multiple_of(align).ok_or(GeometryError::CellTooLarge)?;
            cell.bytes = offset.checked_add(bytes).ok_or(GeometryError::CellTooLarge)?;
            cell.align = cell.align.max(align);
            cell.offsets.push(offset);
            cell.sizes.push(bytes);
        }
        if components.is_empty() {
            return Err(GeometryError::Zero { what: "components" });
        }
        cell.bytes = cell.bytes.checked_next_multiple_of(cell.align).ok_or(GeometryError::CellTooLarge)?;
        Ok(cell)
    }

    /// Bytes from the start of a block to each component, in the order given.
    pub fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Bytes of the cell, padding between and behind components included.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// What every block's address is a multiple of, bytes.
    pub fn align(&self) -> u64 {
        self.align
    }

    /// Component `i`: bytes from the start of a block to it, and its own. None where there is no such component.
    pub fn component(&self, i: usize) -> Option<(u64, u64)> {
        Some((*self.offsets.get(i)?, *self.sizes.get(i)?))
    }

    /// The shape of a group of `num_buffers` buffers with this cell as their block.
    pub fn shape(&self, num_buffers: u32, tokens_per_block: u32) -> Shape {
        Shape { cell_align: Some(self.align), ..Shape::new(num_buffers, self.bytes, tokens_per_block) }
    }
}
