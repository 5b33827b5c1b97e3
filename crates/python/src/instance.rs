//! `InstanceRecord` and `kvctl`.

use std::ffi::OsString;

use kvcached_control::{InstanceRecord as Inner, Terms};
use pyo3::prelude::*;

use crate::errors::Raise;

/// This process as others see it.
#[pyclass(frozen, module = "kvcached._core")]
pub struct InstanceRecord {
    pub inner: Inner,
}

#[pymethods]
impl InstanceRecord {
    #[new]
    fn new(py: Python<'_>, name: &str, engine: &str, device: &str) -> PyResult<Self> {
        let create =
            || Inner::create(&kvcached_control::default_dir(), name, engine, device, Terms::default());
        Ok(InstanceRecord { inner: py.detach(create).map_err(|e| e.raise(py))? })
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn path(&self) -> String {
        self.inner.path().display().to_string()
    }

    fn close(&self) {
        self.inner.close();
    }
}

/// Runs `kvctl` on this process's standard output and error; returns its exit code.
#[pyfunction]
pub fn kvctl(py: Python<'_>, args: Vec<OsString>) -> i32 {
    py.detach(|| kvcached_kvctl::run(args, &mut std::io::stdout(), &mut std::io::stderr()))
}
