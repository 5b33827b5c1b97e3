//! `Geometry`.

use kvcached_vmm::{Geometry as Inner, Shape, Target};
use pyo3::prelude::*;
use pyo3::types::PyRange;

use crate::errors::Raise;

/// Where the blocks of a group lie: pure arithmetic, no memory.
#[pyclass(frozen, eq, module = "kvcached._core")]
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Geometry {
    pub inner: Inner,
}

#[pymethods]
impl Geometry {
    #[staticmethod]
    #[pyo3(signature = (num_buffers, block_bytes, granularity, *, page_bytes = None, tokens_per_block = 1))]
    fn solve(
        py: Python<'_>,
        num_buffers: u32,
        block_bytes: u64,
        granularity: u64,
        page_bytes: Option<u64>,
        tokens_per_block: u32,
    ) -> PyResult<Self> {
        let shape = Shape::new(num_buffers, block_bytes, tokens_per_block);
        let inner = Inner::solve(shape, Target { page_bytes, ..Target::new(granularity) })
            .map_err(|e| e.raise(py))?;
        Ok(Geometry { inner })
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

    fn index(&self, py: Python<'_>, block_id: u32) -> PyResult<u64> {
        self.inner.index(block_id).ok_or_else(|| crate::errors::no_such_block(py, block_id))
    }

    fn pages_of_row<'py>(&self, py: Python<'py>, block_id: u32) -> PyResult<Bound<'py, PyRange>> {
        let pages = self.inner.pages_of_row(block_id);
        PyRange::new(py, pages.start as isize, pages.end as isize)
    }

    fn __repr__(&self) -> String {
        format!("Geometry({})", self.inner.explain())
    }
}
