//! `RankServer` and `Ranks`.

use std::mem::ManuallyDrop;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use kvcached_ipc::message::Member;
use kvcached_ipc::{Call, Directory, FTensorStore, IpcError, RankServer as Server, Ranks as Inner, RanksConfig};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::errors::Raise;
use crate::ids;
use crate::tensor::FTensor;

/// Serves the memory of one worker to the coordinator of its engine.
#[pyclass(frozen, module = "kvcached._core")]
pub struct RankServer {
    /// Dropped without the GIL.
    inner: ManuallyDrop<Server>,
}

impl Drop for RankServer {
    fn drop(&mut self) {
        // SAFETY: nobody uses the field afterwards.
        let mut inner = Some(unsafe { ManuallyDrop::take(&mut self.inner) });
        // It waits for work that is under way.
        let _ = Python::try_attach(|py| py.detach(|| drop(inner.take())));
    }
}

#[pymethods]
impl RankServer {
    #[new]
    #[pyo3(signature = (*, stage = 0, rank = 0))]
    fn new(py: Python<'_>, stage: u16, rank: u16) -> PyResult<Self> {
        let bind = || Server::bind(Member { stage, rank }, &Directory::of_user()?);
        Ok(RankServer { inner: ManuallyDrop::new(py.detach(bind).map_err(|e| e.raise(py))?) })
    }

    #[pyo3(signature = (ftensor, group = 0))]
    fn add_group(&self, py: Python<'_>, ftensor: &FTensor, group: u32) -> PyResult<()> {
        ftensor.check_owner(py, "RankServer.add_group")?;
        let store = Arc::new(FTensorStore::new(Arc::clone(&ftensor.inner)));
        py.detach(|| self.inner.add_group(group, store)).map_err(|e| e.raise(py))
    }

    #[getter]
    fn address(&self) -> String {
        self.inner.address().display().to_string()
    }

    #[getter]
    fn stage(&self) -> u16 {
        self.inner.member().stage
    }

    #[getter]
    fn rank(&self) -> u16 {
        self.inner.member().rank
    }

    fn answer<'py>(&self, py: Python<'py>, frame: &[u8]) -> PyResult<Bound<'py, PyBytes>> {
        let answer = py.detach(|| self.inner.answer(frame)).map_err(|e| e.raise(py))?;
        Ok(PyBytes::new(py, &answer))
    }

    #[pyo3(signature = (group = 0))]
    fn take_times(&self, py: Python<'_>, group: u32) -> Vec<(&'static str, f64)> {
        let times = py.detach(|| self.inner.take_times(group));
        times.into_iter().map(|(work, took)| (work, took.as_secs_f64())).collect()
    }

    fn stop(&self, py: Python<'_>) {
        py.detach(|| self.inner.stop());
    }
}

/// The coordinator's end of one group: all its ranks, as one.
#[pyclass(frozen, module = "kvcached._core")]
pub struct Ranks {
    /// Dropped without the GIL.
    pub inner: ManuallyDrop<Arc<Inner>>,
}

impl Drop for Ranks {
    fn drop(&mut self) {
        // SAFETY: nobody uses the field afterwards.
        let mut inner = Some(unsafe { ManuallyDrop::take(&mut self.inner) });
        // It says goodbye and joins threads, which may be entering the interpreter.
        let _ = Python::try_attach(|py| py.detach(|| drop(inner.take())));
    }
}

/// What the settings say where the caller says nothing.
fn timeout(py: Python<'_>, timeout_s: Option<f64>) -> PyResult<Duration> {
    let timeout_s = match timeout_s {
        Some(timeout_s) => timeout_s,
        None => {
            let settings = py.import("kvcached.config")?.getattr("Settings")?.call_method0("from_env")?;
            settings.getattr("ipc_timeout_s")?.extract()?
        }
    };
    match Duration::try_from_secs_f64(timeout_s) {
        Ok(timeout) if !timeout.is_zero() => Ok(timeout),
        _ => Err(PyValueError::new_err(format!("timeout_s={timeout_s}: give seconds, more than 0"))),
    }
}

fn config(py: Python<'_>, group: u32, keep: Option<&Bound<'_, PyAny>>, timeout_s: Option<f64>) -> PyResult<RanksConfig> {
    let mut keep = match keep {
        Some(keep) => ids::pages(keep, || "every group".to_owned())?,
        None => vec![0],
    };
    keep.sort_unstable();
    keep.dedup();
    Ok(RanksConfig { group, epoch: RanksConfig::epoch_now(), keep, timeout: timeout(py, timeout_s)? })
}

/// What Python answers to a frame. Called without the GIL, by the threads of the links.
fn ask(call: &Py<PyAny>, member: Member, frame: &[u8]) -> Result<Vec<u8>, String> {
    let answered = Python::try_attach(|py| -> PyResult<Vec<u8>> {
        let frame = PyBytes::new(py, frame);
        call.bind(py).call1((member.stage, member.rank, frame))?.extract()
    });
    match answered {
        Some(answer) => answer.map_err(|error| format!("the call to it failed: {error}")),
        None => Err("the interpreter has ended".to_owned()),
    }
}

impl Ranks {
    fn run<T: Send>(&self, py: Python<'_>, call: impl FnOnce(&Inner) -> Result<T, IpcError> + Send) -> PyResult<T> {
        py.detach(|| call(&self.inner)).map_err(|e| e.raise(py))
    }

    fn of(py: Python<'_>, begin: impl FnOnce() -> Result<Inner, IpcError> + Send) -> PyResult<Self> {
        let inner = py.detach(begin).map_err(|e| e.raise(py))?;
        Ok(Ranks { inner: ManuallyDrop::new(Arc::new(inner)) })
    }

    fn pages(&self, pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        ids::pages(pages, || format!("a group of {} pages", self.inner.num_pages()))
    }
}

#[pymethods]
impl Ranks {
    #[new]
    #[pyo3(signature = (addresses, *, group = 0, keep = None, timeout_s = None))]
    fn new(
        py: Python<'_>,
        addresses: Vec<(u16, u16, PathBuf)>,
        group: u32,
        keep: Option<&Bound<'_, PyAny>>,
        timeout_s: Option<f64>,
    ) -> PyResult<Self> {
        let config = config(py, group, keep, timeout_s)?;
        let members: Vec<_> =
            addresses.into_iter().map(|(stage, rank, address)| (Member { stage, rank }, address)).collect();
        Self::of(py, || Inner::connect(&members, config))
    }

    #[staticmethod]
    #[pyo3(signature = (call, members, *, group = 0, keep = None, timeout_s = None))]
    fn over_callable(
        py: Python<'_>,
        call: Py<PyAny>,
        members: Vec<(u16, u16)>,
        group: u32,
        keep: Option<&Bound<'_, PyAny>>,
        timeout_s: Option<f64>,
    ) -> PyResult<Self> {
        let config = config(py, group, keep, timeout_s)?;
        let members = members.into_iter().map(|(stage, rank)| Member { stage, rank }).collect();
        let call: Arc<Call> = Arc::new(move |member: Member, frame: &[u8]| ask(&call, member, frame));
        Self::of(py, || Inner::over_callable(members, config, call))
    }

    #[getter]
    fn num_members(&self) -> usize {
        self.inner.members().len()
    }

    #[getter]
    fn num_pages(&self) -> u32 {
        self.inner.num_pages()
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
    fn page_bytes(&self) -> u64 {
        self.inner.page_bytes()
    }

    #[getter]
    fn virtual_bytes(&self) -> u64 {
        self.inner.virtual_bytes()
    }

    #[getter]
    fn beside_bytes(&self) -> u64 {
        self.inner.held_beside()
    }

    #[getter]
    fn broken(&self) -> Option<String> {
        self.inner.broken().map(str::to_owned)
    }

    fn map(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let pages = self.pages(pages)?;
        self.run(py, |ranks| ranks.map(&pages))
    }

    fn unmap(&self, py: Python<'_>, pages: &Bound<'_, PyAny>) -> PyResult<()> {
        let pages = self.pages(pages)?;
        self.run(py, |ranks| ranks.unmap(&pages))
    }

    fn synchronise(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Inner::synchronise)
    }

    fn room(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Inner::room)
    }

    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Inner::trim)
    }

    fn close(&self, py: Python<'_>) {
        py.detach(|| self.inner.close());
    }
}
