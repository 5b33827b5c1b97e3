//! `kvcached._core`: bindings of the pure crates, and nothing else. Documented in `_core.pyi`.

use std::cell::Cell;

use pyo3::prelude::*;
use pyo3::types::PyDict;

mod dlpack;
mod errors;
mod geometry;
mod ids;
mod instance;
mod pool;
mod ranks;
mod tensor;

use errors::Raise;
use kvcached_vmm::Device;

/// Lets the crates' warnings (a page lost, memory that could not be given back) reach standard error. Not Python's
/// logging: they come from threads and moments where the interpreter may not be entered.
fn warn_on_stderr() {
    let subscriber = tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_max_level(tracing::Level::WARN)
        .with_ansi(false)
        .finish();
    // Another extension of this process cannot have set ours: this crate has its own copy of `tracing`.
    let _ = tracing::subscriber::set_global_default(subscriber);
}

/// None where the backend's driver library can be used, else why it cannot. Does not start the driver.
#[pyfunction]
fn backend_available(py: Python<'_>, backend: &str) -> PyResult<Option<String>> {
    let device = match backend {
        "host" => Device::Host,
        _ => tensor::parse_device(py, backend)?,
    };
    Ok(py.detach(|| kvcached_vmm::available(device)).err().map(|why| why.to_string()))
}

/// Smallest physical allocation of the device, bytes.
#[pyfunction]
fn granularity(py: Python<'_>, device: &str) -> PyResult<u64> {
    let device = tensor::parse_device(py, device)?;
    py.detach(|| Ok(kvcached_vmm::open(device)?.granularity()))
        .map_err(|e: kvcached_vmm::DriverError| e.raise(py))
}

/// Which piece of hardware the device is.
#[pyfunction]
fn identity(py: Python<'_>, device: &str) -> PyResult<String> {
    let device = tensor::parse_device(py, device)?;
    py.detach(|| kvcached_vmm::open(device)?.identity()).map_err(|e: kvcached_vmm::DriverError| e.raise(py))
}

/// (free, total) bytes of the device.
#[pyfunction]
fn mem_info(py: Python<'_>, device: &str) -> PyResult<(u64, u64)> {
    let device = tensor::parse_device(py, device)?;
    let info = py
        .detach(|| kvcached_vmm::open(device)?.mem_info())
        .map_err(|e: kvcached_vmm::DriverError| e.raise(py))?;
    Ok((info.free, info.total))
}

/// Ranges of addresses that this process has reserved and not freed.
#[pyfunction]
fn live_ranges() -> usize {
    kvcached_vmm::live_ranges()
}

thread_local! {
    /// While this thread forks.
    static FORKING: Cell<Option<kvcached_vmm::Forking>> = const { Cell::new(None) };
}

/// Called before every fork of this process.
#[pyfunction]
fn forking() {
    FORKING.set(Some(kvcached_vmm::forking()));
}

/// Called after it, in the process that forked.
#[pyfunction]
fn has_forked() {
    FORKING.take();
}

/// Called after it, in the fork.
#[pyfunction]
fn forked() {
    FORKING.take();
    kvcached_pool::forked();
}

fn tell_forks(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let hooks = PyDict::new(module.py());
    hooks.set_item("before", wrap_pyfunction!(forking, module)?)?;
    hooks.set_item("after_in_parent", wrap_pyfunction!(has_forked, module)?)?;
    hooks.set_item("after_in_child", wrap_pyfunction!(forked, module)?)?;
    module.py().import("os")?.call_method("register_at_fork", (), Some(&hooks)).map(drop)
}

#[pymodule]
mod _core {
    #[pymodule_export]
    use super::geometry::Geometry;
    #[pymodule_export]
    use super::instance::{InstanceRecord, ask, budgets, instances, kvctl, metric_families};
    #[pymodule_export]
    use super::pool::Pool;
    #[pymodule_export]
    use super::ranks::{RankServer, Ranks};
    #[pymodule_export]
    use super::tensor::{Buffer, FTensor};
    #[pymodule_export]
    use super::{backend_available, granularity, identity, live_ranges, mem_info};

    #[pymodule_init]
    fn init(module: &pyo3::Bound<'_, pyo3::types::PyModule>) -> pyo3::PyResult<()> {
        use pyo3::types::PyModuleMethods;
        super::warn_on_stderr();
        super::tell_forks(module)?;
        module.add("__version__", env!("CARGO_PKG_VERSION"))?;
        super::errors::register(module)
    }
}
