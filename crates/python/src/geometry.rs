//! `Geometry`.

use kvcached_vmm::{Cell, Component, Geometry as Inner, Layout, Shape, Target};
use pyo3::prelude::*;
use pyo3::types::PyRange;

use crate::errors::Raise;
use crate::ids;

/// Where the blocks of a group lie: pure arithmetic, no memory.
#[pyclass(frozen, eq, module = "kvcached._core")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub inner: Inner,
}

#[pymethods]
impl Geometry {
    #[staticmethod]
    #[pyo3(signature = (
        num_buffers, block_bytes, granularity, *, page_bytes = None, tokens_per_block = 1, layout = "chunked",
        num_blocks = None, waste_permille = 20, cell_align = None,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python function")]
    fn solve(
        py: Python<'_>,
        num_buffers: u32,
        block_bytes: u64,
        granularity: u64,
        page_bytes: Option<u64>,
        tokens_per_block: u32,
        layout: &str,
        num_blocks: Option<u64>,
        waste_permille: u32,
        cell_align: Option<u64>,
    ) -> PyResult<Self> {
        let layout = match layout {
            "chunked" => Layout::Chunked,
            "per-layer" => Layout::PerLayer,
            _ => {
                let why = format!("layout={layout:?}: use \"chunked\" or \"per-layer\"");
                return Err(crate::errors::config(py, why));
            }
        };
        let shape = Shape { cell_align, ..Shape::new(num_buffers, block_bytes, tokens_per_block) };
        let target = Target { page_bytes, layout, num_blocks, waste_permille, ..Target::new(granularity) };
        let inner = Inner::solve(shape, target).map_err(|e| e.raise(py))?;
        Ok(Geometry { inner })
    }

    /// A super-cell: where its components lie in it, its bytes and its alignment.
    #[staticmethod]
    fn pack_cell(py: Python<'_>, components: Vec<(u64, u64)>) -> PyResult<(Vec<u64>, u64, u64)> {
        let components: Vec<_> =
            components.into_iter().map(|(bytes, align)| Component { bytes, align }).collect();
        let cell = Cell::pack(&components).map_err(|e| e.raise(py))?;
        Ok((cell.offsets().to_vec(), cell.bytes(), cell.align()))
    }

    #[getter]
    fn layout(&self) -> String {
        self.inner.layout().to_string()
    }

    #[getter]
    fn content_bytes(&self) -> u64 {
        self.inner.content_bytes()
    }

    #[getter]
    fn runs_per_page(&self) -> u32 {
        self.inner.runs_per_page()
    }

    #[getter]
    fn run_bytes(&self) -> u64 {
        self.inner.run_bytes()
    }

    #[getter]
    fn num_buffers(&self) -> u32 {
        self.inner.num_buffers()
    }

    #[getter]
    fn block_bytes(&self) -> u64 {
        self.inner.block_bytes()
    }

    #[getter]
    fn page_bytes(&self) -> u64 {
        self.inner.page_bytes()
    }

    #[getter]
    fn chunk_bytes(&self) -> u64 {
        self.inner.chunk_bytes()
    }

    #[getter]
    fn waste_bytes(&self) -> u64 {
        self.inner.waste_bytes()
    }

    #[getter]
    fn blocks_per_page(&self) -> u32 {
        self.inner.blocks_per_page()
    }

    #[getter]
    fn ids_per_page(&self) -> u32 {
        self.inner.ids_per_page()
    }

    #[getter]
    fn tokens_per_block(&self) -> u32 {
        self.inner.tokens_per_block()
    }

    #[pyo3(signature = (block_bytes, *, tokens_per_block = 1))]
    fn with_block(&self, py: Python<'_>, block_bytes: u64, tokens_per_block: u32) -> PyResult<Self> {
        let inner = self.inner.with_block(block_bytes, tokens_per_block).map_err(|e| e.raise(py))?;
        Ok(Geometry { inner })
    }

    fn explain(&self) -> String {
        self.inner.explain()
    }

    fn num_pages(&self, py: Python<'_>, num_blocks: u64) -> PyResult<u32> {
        self.inner.num_pages(num_blocks).map_err(|e| e.raise(py))
    }

    fn id_space(&self, py: Python<'_>, num_blocks: u64) -> PyResult<u32> {
        self.inner.id_space(num_blocks).map_err(|e| e.raise(py))
    }

    fn block_id(&self, py: Python<'_>, index: u64) -> PyResult<u32> {
        self.inner.block_id(index).map_err(|e| e.raise(py))
    }

    fn index(&self, py: Python<'_>, block_id: &Bound<'_, PyAny>) -> PyResult<u64> {
        let id = ids::block(block_id)?;
        self.inner.index(id).ok_or_else(|| crate::errors::no_such_block(py, &id))
    }

    fn pages_of_row<'py>(
        &self,
        py: Python<'py>,
        block_id: &Bound<'py, PyAny>,
    ) -> PyResult<Bound<'py, PyRange>> {
        let pages = self.inner.pages_of_row(ids::block(block_id)?);
        PyRange::new(py, pages.start as isize, pages.end as isize)
    }

    fn __repr__(&self) -> String {
        format!("Geometry({})", self.inner.explain())
    }
}
