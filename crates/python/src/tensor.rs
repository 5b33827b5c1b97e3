//! `FTensor` and its `Buffer`s.

use std::any::Any;
use std::sync::Arc;

use kvcached_vmm::{Device, FTensor as Inner, Options, Unbacked, VmmError};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::dlpack;
use crate::errors::Raise;
use crate::geometry::Geometry;
use crate::ids;

/// The device of this name.
pub fn parse_device(py: Python<'_>, name: &str) -> PyResult<Device> {
    name.parse::<Device>().map_err(|e| e.raise(py))
}

/// A reserved range of addresses with memory under some of its pages.
#[pyclass(frozen, module = "kvcached._core")]
pub struct FTensor {
    pub inner: Arc<Inner>,
}

#[pymethods]
impl FTensor {
    #[new]
    #[pyo3(signature = (device, geometry, num_blocks, *, unbacked = "hole", cache_bytes = 0))]
    fn new(
        py: Python<'_>,
        device: &str,
        geometry: &Geometry,
        num_blocks: u64,
        unbacked: &str,
        cache_bytes: u64,
    ) -> PyResult<Self> {
        let device = parse_device(py, device)?;
        let geometry = geometry.inner;
        let unbacked = match unbacked {
            "hole" => Unbacked::Hole,
            "zero" => Unbacked::Zero,
            _ => {
                let why = format!("unbacked={unbacked:?}: use \"hole\" or \"zero\"");
                return Err(crate::errors::config(py, why));
            }
        };
        let options = Options { unbacked, cache_bytes };
        let reserve = || {
            let driver =
                kvcached_vmm::open(device).map_err(|source| VmmError::Driver { page: None, source })?;
            Inner::reserve(driver, geometry, num_blocks, options)
        };
        let inner = py.detach(reserve).map_err(|e| e.raise(py))?;
        Ok(FTensor { inner: Arc::new(inner) })
    }

    #[getter]
    fn device(&self) -> String {
        self.inner.device().to_string()
    }

    #[getter]
    fn geometry(&self) -> Geometry {
        Geometry { inner: *self.inner.geometry() }
    }

    #[getter]
    fn num_blocks(&self) -> u64 {
        self.inner.num_blocks()
    }

    #[getter]
    fn num_pages(&self) -> u32 {
        self.inner.num_pages()
    }

    #[getter]
    fn id_space(&self) -> u32 {
        self.inner.id_space()
    }

    #[getter]
    fn virtual_bytes(&self) -> u64 {
        self.inner.virtual_bytes()
    }

    #[getter]
    fn mapped_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_owner(py, "mapped_bytes")?;
        Ok(self.inner.mapped_bytes())
    }

    #[getter]
    fn unbacked(&self) -> &'static str {
        match self.inner.unbacked() {
            Unbacked::Hole => "hole",
            Unbacked::Zero => "zero",
        }
    }

    #[getter]
    fn cached_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_owner(py, "cached_bytes")?;
        Ok(self.inner.cached_bytes())
    }

    #[getter]
    fn leaked_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_owner(py, "leaked_bytes")?;
        Ok(self.inner.leaked_bytes())
    }

    #[getter]
    fn retained_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_owner(py, "retained_bytes")?;
        Ok(self.inner.retained_bytes())
    }

    #[getter]
    fn zero_bytes(&self, py: Python<'_>) -> PyResult<u64> {
        self.check_owner(py, "zero_bytes")?;
        Ok(self.inner.zero_bytes())
    }

    #[getter]
    fn pending_transaction(&self, py: Python<'_>) -> PyResult<Option<u64>> {
        self.check_owner(py, "pending_transaction")?;
        Ok(self.inner.pending_transaction())
    }

    fn mapped_pages(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.check_owner(py, "mapped_pages")?;
        Ok(self.inner.mapped_pages())
    }

    fn quarantined_pages(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.check_owner(py, "quarantined_pages")?;
        Ok(self.inner.quarantined_pages())
    }

    fn buffers(&self, py: Python<'_>) -> PyResult<Vec<Buffer>> {
        self.check_owner(py, "buffers")?;
        let buffers = (0..self.inner.geometry().num_buffers()).filter_map(|i| self.inner.buffer(i));
        Ok(buffers.map(|(address, bytes)| self.view(address, vec![bytes], vec![1])).collect())
    }

    fn component(&self, py: Python<'_>, buffer: u32, offset: u64, nbytes: u64) -> PyResult<Buffer> {
        self.check_owner(py, "component")?;
        let (address, _) = self.place(py, buffer)?;
        let stride = self.inner.geometry().block_bytes();
        if nbytes == 0 || offset.checked_add(nbytes).is_none_or(|end| end > stride) {
            let why = format!("bytes {offset} to {offset} + {nbytes} are not within a block of {stride}");
            return Err(crate::errors::config(py, why));
        }
        let rows = self.inner.id_space().into();
        Ok(self.view(address + offset as usize, vec![rows, nbytes], vec![stride, 1]))
    }

    fn halves(&self, py: Python<'_>, buffer: u32) -> PyResult<Buffer> {
        self.check_owner(py, "halves")?;
        let (address, bytes) = self.place(py, buffer)?;
        self.place(py, buffer.saturating_add(1))?;
        Ok(self.view(address, vec![2, bytes], vec![self.inner.buffer_stride(), 1]))
    }

    fn map(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let pages = self.pages(pages)?;
        py.detach(|| self.inner.map(&pages)).map_err(|e| e.raise(py))
    }

    fn unmap(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = self.pages(pages)?;
        py.detach(|| self.inner.unmap(&pages)).map_err(|e| e.raise(py))
    }

    fn prepare_unmap(&self, py: Python<'_>, transaction: u64, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = self.pages(pages)?;
        py.detach(|| self.inner.prepare_unmap(transaction, &pages)).map_err(|e| e.raise(py))
    }

    fn commit_unmap(&self, py: Python<'_>, transaction: u64) -> PyResult<()> {
        py.detach(|| self.inner.commit_unmap(transaction)).map_err(|e| e.raise(py))
    }

    fn abort_unmap(&self, py: Python<'_>, transaction: u64) -> PyResult<()> {
        py.detach(|| self.inner.abort_unmap(transaction)).map_err(|e| e.raise(py))
    }

    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        py.detach(|| self.inner.trim()).map_err(|e| e.raise(py))
    }

    fn synchronise(&self, py: Python<'_>) -> PyResult<()> {
        self.check_owner(py, "synchronise")?;
        py.detach(|| self.inner.synchronise()).map_err(|e| e.raise(py))
    }
}

impl FTensor {
    /// Refuses in a fork of the process, which has none of the memory.
    pub fn check_owner(&self, py: Python<'_>, call: &'static str) -> PyResult<()> {
        self.inner.check_owner(call).map_err(|e| e.raise(py))
    }

    fn pages(&self, pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        ids::pages(pages, || format!("the range of {} pages", self.inner.num_pages()))
    }

    fn view(&self, address: usize, shape: Vec<u64>, strides: Vec<u64>) -> Buffer {
        Buffer { tensor: Arc::clone(&self.inner), address, shape, strides }
    }

    /// Where a buffer lies, and its bytes.
    fn place(&self, py: Python<'_>, buffer: u32) -> PyResult<(usize, u64)> {
        let count = self.inner.geometry().num_buffers();
        self.inner.buffer(buffer).ok_or_else(|| {
            crate::errors::config(py, format!("there is no buffer {buffer}: the group has {count}, from 0"))
        })
    }
}

/// Bytes of an `FTensor` as one tensor: an int8 DLPack exporter that keeps the range alive.
#[pyclass(frozen, module = "kvcached._core")]
pub struct Buffer {
    tensor: Arc<Inner>,
    address: usize,
    shape: Vec<u64>,
    /// Elements, which are bytes.
    strides: Vec<u64>,
}

#[pymethods]
impl Buffer {
    #[getter]
    fn ptr(&self) -> usize {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> u64 {
        self.shape.iter().product()
    }

    #[getter]
    fn shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.shape)
    }

    #[getter]
    fn strides<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.strides)
    }

    #[pyo3(signature = (*, stream = None, max_version = None, dl_device = None, copy = None))]
    fn __dlpack__(
        &self,
        py: Python<'_>,
        stream: Option<Bound<'_, PyAny>>,
        max_version: Option<(u32, u32)>,
        dl_device: Option<(i32, i32)>,
        copy: Option<bool>,
    ) -> PyResult<Py<PyAny>> {
        self.tensor.check_owner("__dlpack__").map_err(|e| e.raise(py))?;
        let _ = stream; // nothing of ours is pending on any stream
        if copy == Some(true) {
            return Err(PyBufferError::new_err("unbacked memory cannot be copied: ask without copy=True"));
        }
        let device = self.__dlpack_device__();
        if dl_device.is_some_and(|wanted| wanted != device) {
            return Err(PyBufferError::new_err(format!(
                "the buffer lies on DLPack device {device:?} and stays there"
            )));
        }
        let versioned = max_version.is_some_and(|version| version.0 >= 1);
        let keep: Arc<dyn Any + Send + Sync> = Arc::clone(&self.tensor) as _;
        dlpack::bytes(py, self.address, (&self.shape, &self.strides), device, versioned, keep)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        match self.tensor.device() {
            Device::Cuda(ordinal) => (dlpack::CUDA, ordinal as i32),
            Device::Hip(ordinal) => (dlpack::ROCM, ordinal as i32),
            Device::Host => (dlpack::CPU, 0),
        }
    }
}
