//! `FTensor` and its `Buffer`s.

use std::any::Any;
use std::sync::Arc;

use kvcached_vmm::{Device, FTensor as Inner, VmmError};
use pyo3::exceptions::PyBufferError;
use pyo3::prelude::*;

use crate::dlpack;
use crate::errors::Raise;
use crate::geometry::Geometry;

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
    fn new(py: Python<'_>, device: &str, geometry: &Geometry, num_blocks: u64) -> PyResult<Self> {
        let device = parse_device(py, device)?;
        let geometry = geometry.inner;
        let reserve = || {
            let driver =
                kvcached_vmm::open(device).map_err(|source| VmmError::Driver { page: None, source })?;
            Inner::reserve(driver, geometry, num_blocks)
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
    fn mapped_bytes(&self) -> u64 {
        self.inner.mapped_bytes()
    }

    fn mapped_pages(&self) -> Vec<u32> {
        self.inner.mapped_pages()
    }

    fn quarantined_pages(&self) -> Vec<u32> {
        self.inner.quarantined_pages()
    }

    fn buffers(&self) -> Vec<Buffer> {
        let count = self.inner.geometry().num_buffers();
        (0..count)
            .filter_map(|i| self.inner.buffer(i))
            .map(|(address, bytes)| Buffer {
                tensor: Arc::clone(&self.inner),
                address,
                nbytes: bytes as usize,
            })
            .collect()
    }

    fn map(&self, py: Python<'_>, pages: Vec<u32>) -> PyResult<Vec<u32>> {
        py.detach(|| self.inner.map(&pages)).map_err(|e| e.raise(py))
    }

    fn unmap(&self, py: Python<'_>, pages: Vec<u32>) -> PyResult<()> {
        py.detach(|| self.inner.unmap(&pages)).map_err(|e| e.raise(py))
    }

    fn synchronise(&self, py: Python<'_>) -> PyResult<()> {
        py.detach(|| self.inner.synchronise()).map_err(|e| e.raise(py))
    }
}

/// One buffer of an `FTensor`: a 1-D int8 DLPack exporter that keeps the range alive.
#[pyclass(frozen, module = "kvcached._core")]
pub struct Buffer {
    tensor: Arc<Inner>,
    address: usize,
    nbytes: usize,
}

#[pymethods]
impl Buffer {
    #[getter]
    fn ptr(&self) -> usize {
        self.address
    }

    #[getter]
    fn nbytes(&self) -> usize {
        self.nbytes
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
        dlpack::bytes(py, self.address, self.nbytes, device, versioned, keep)
    }

    fn __dlpack_device__(&self) -> (i32, i32) {
        match self.tensor.device() {
            Device::Cuda(ordinal) => (dlpack::CUDA, ordinal as i32),
            Device::Host => (dlpack::CPU, 0),
        }
    }
}
