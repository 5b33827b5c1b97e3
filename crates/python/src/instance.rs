//! `InstanceRecord` and `kvctl`.

use std::ffi::OsString;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use kvcached_control::{
    BudgetListed, BudgetShare, Change, ControlError, InstanceRecord as Inner, InstanceView, Listed, Terms,
    Value,
};
use kvcached_pool::{Budgeted, CachePolicy, Cached, Mapper, Pool, PoolError, Share, Shares, Steward};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::Raise;

/// This process as others see it.
#[pyclass(frozen, module = "kvcached._core")]
pub struct InstanceRecord {
    pub inner: Arc<Inner>,
    estate: Mutex<Option<Estate>>,
}

/// What the process has of the devices that it shares, and who looks after that.
struct Estate {
    devices: Vec<String>,
    shares: Arc<Shares>,
    steward: Steward,
}

/// An engine's cached prefixes, by two functions of Python. What they raise is logged: it is no failure of the engines that wait.
struct PythonCache {
    give: Py<PyAny>,
    bytes: Py<PyAny>,
}

impl PythonCache {
    fn ask(&self, call: impl FnOnce(Python<'_>) -> PyResult<u64>) -> u64 {
        // None: the interpreter is about to end, and the memory goes with it.
        match Python::try_attach(call) {
            Some(Ok(bytes)) => bytes,
            Some(Err(error)) => {
                tracing::error!(%error, "an engine did not give its cached prefixes back");
                0
            }
            None => 0,
        }
    }
}

impl Cached for PythonCache {
    fn give(&self, bytes: u64) -> u64 {
        self.ask(|py| self.give.call1(py, (bytes,))?.extract(py))
    }

    fn bytes(&self) -> u64 {
        self.ask(|py| self.bytes.call0(py)?.extract(py))
    }
}

impl InstanceRecord {
    fn estate(&self) -> MutexGuard<'_, Option<Estate>> {
        self.estate.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `mapper`, charged to what this process has of its devices, where it shares them.
    pub fn charged(&self, mapper: Arc<dyn Mapper>) -> Arc<dyn Mapper> {
        match &*self.estate() {
            Some(estate) => Arc::new(Budgeted::new(mapper, Arc::clone(&estate.shares) as Arc<dyn Share>)),
            None => mapper,
        }
    }

    /// Has the steward look after a pool, where there is one.
    pub fn look_after(&self, pool: &Arc<Pool>) -> Result<(), PoolError> {
        self.estate().as_ref().map_or(Ok(()), |estate| estate.steward.watch(pool))
    }
}

#[pymethods]
impl InstanceRecord {
    #[new]
    #[pyo3(signature = (name, engine, device, *, limit_bytes = None, min_bytes = 0))]
    fn new(
        py: Python<'_>,
        name: &str,
        engine: &str,
        device: &str,
        limit_bytes: Option<u64>,
        min_bytes: u64,
    ) -> PyResult<Self> {
        let terms = Terms { limit_bytes, min_bytes };
        let create = || Inner::create(&kvcached_control::default_dir(), name, engine, device, terms);
        let inner = Arc::new(py.detach(create).map_err(|e| e.raise(py))?);
        Ok(InstanceRecord { inner, estate: Mutex::default() })
    }

    #[pyo3(signature = (devices, *, budget_bytes = None, free_watermark_bytes = 0, cache_idle_s = 0.0))]
    fn share(
        &self,
        py: Python<'_>,
        devices: Vec<(String, u64)>,
        budget_bytes: Option<u64>,
        free_watermark_bytes: u64,
        cache_idle_s: f64,
    ) -> PyResult<()> {
        let idle = Duration::try_from_secs_f64(cache_idle_s)
            .map_err(|error| crate::errors::config(py, format!("cache_idle_s={cache_idle_s}: {error}")))?;
        let policy = CachePolicy { free_watermark_bytes, idle: (!idle.is_zero()).then_some(idle) };
        py.detach(|| {
            let mut estate = self.estate();
            if let Some(estate) = &*estate {
                return Err(Refusal::Shared(estate.devices.join(", ")));
            }
            let dir = kvcached_control::default_dir();
            let join = |(device, total): &(String, u64)| {
                BudgetShare::join(&dir, &self.inner, device, *total, budget_bytes)
            };
            let joined: Result<Vec<BudgetShare>, ControlError> = devices.iter().map(join).collect();
            let shares = Arc::new(Shares::new(Arc::clone(&self.inner), joined?));
            let steward = Steward::new(Arc::clone(&self.inner), Arc::clone(&shares), policy)?;
            let devices = devices.into_iter().map(|(device, _)| device).collect();
            *estate = Some(Estate { devices, shares, steward });
            Ok(())
        })
        .map_err(|refusal: Refusal| match refusal {
            Refusal::Shared(devices) => {
                crate::errors::config(py, format!("this instance shares {devices} already"))
            }
            Refusal::Control(error) => error.raise(py),
            Refusal::Pool(error) => error.raise(py),
        })
    }

    #[getter]
    fn shared_devices(&self) -> Option<Vec<String>> {
        self.estate().as_ref().map(|estate| estate.devices.clone())
    }

    fn set_cached(&self, py: Python<'_>, give: Py<PyAny>, nbytes: Py<PyAny>) {
        let cache: Arc<dyn Cached> = Arc::new(PythonCache { give, bytes: nbytes });
        py.detach(|| {
            if let Some(estate) = &*self.estate() {
                estate.steward.set_cached(Some(cache));
            }
        });
    }

    #[getter]
    fn name(&self) -> &str {
        self.inner.name()
    }

    #[getter]
    fn path(&self) -> String {
        self.inner.path().display().to_string()
    }

    /// (limit in bytes or None, minimum in bytes), in force.
    fn terms(&self) -> (Option<u64>, u64) {
        let Terms { limit_bytes, min_bytes } = self.inner.terms();
        (limit_bytes, min_bytes)
    }

    fn close(&self, py: Python<'_>) {
        // The steward may be waiting for the GIL.
        py.detach(|| {
            let estate = self.estate().take();
            drop(estate);
            self.inner.close();
        });
    }
}

impl Drop for InstanceRecord {
    fn drop(&mut self) {
        let mut estate = self.estate.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        // At the end of an interpreter nobody else needs the GIL.
        let _ = Python::try_attach(|py| py.detach(|| drop(estate.take())));
    }
}

/// Why the devices of an instance are not shared.
enum Refusal {
    Shared(String),
    Control(ControlError),
    Pool(PoolError),
}

impl From<ControlError> for Refusal {
    fn from(error: ControlError) -> Self {
        Refusal::Control(error)
    }
}

impl From<PoolError> for Refusal {
    fn from(error: PoolError) -> Self {
        Refusal::Pool(error)
    }
}

/// All live instances, as keyword arguments of `kvcached.control.Instance`.
#[pyfunction]
pub fn instances(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let found = py.detach(|| kvcached_control::list(&kvcached_control::default_dir()));
    let rows = PyList::empty(py);
    for listed in found.map_err(|e| e.raise(py))? {
        let Listed::Instance(view) = listed else { continue };
        let total = view.total();
        let row = PyDict::new(py);
        row.set_item("name", &view.name)?;
        row.set_item("engine", &view.engine)?;
        row.set_item("device", &view.device)?;
        row.set_item("pid", view.pid)?;
        row.set_item("limit_bytes", view.terms.limit_bytes)?;
        row.set_item("min_bytes", view.terms.min_bytes)?;
        row.set_item("used_bytes", total.used_bytes)?;
        row.set_item("reserved_bytes", total.reserved_bytes)?;
        row.set_item("cached_bytes", view.cached_bytes)?;
        row.set_item("quarantined_bytes", total.quarantined_bytes)?;
        row.set_item("virtual_bytes", total.virtual_bytes)?;
        row.set_item("shortage_bytes", view.shortage_bytes)?;
        row.set_item("revision", view.revision)?;
        row.set_item("state", view.outcome.as_str())?;
        rows.append(row)?;
    }
    Ok(rows)
}

/// All shared devices, as `kvcached.control.budgets` takes them.
#[pyfunction]
pub fn budgets(py: Python<'_>) -> PyResult<Bound<'_, PyList>> {
    let found = py.detach(|| kvcached_control::budgets(&kvcached_control::default_dir()));
    let rows = PyList::empty(py);
    for listed in found.map_err(|e| e.raise(py))? {
        let BudgetListed::Budget(view) = listed else { continue };
        let members = PyList::empty(py);
        for member in &view.members {
            let row = PyDict::new(py);
            row.set_item("name", &member.name)?;
            row.set_item("granted_bytes", member.granted_bytes)?;
            row.set_item("min_bytes", member.min_bytes)?;
            row.set_item("shortage_bytes", member.shortage_bytes)?;
            row.set_item("givable_bytes", member.givable_bytes)?;
            members.append(row)?;
        }
        let row = PyDict::new(py);
        row.set_item("device", &view.device)?;
        row.set_item("budget_bytes", view.budget_bytes)?;
        row.set_item("members", members)?;
        rows.append(row)?;
    }
    Ok(rows)
}

/// (name, meaning, kind, samples) of each family; a sample is (labels, number), or (labels, ([(bound in s, count up to it)], sum in s)).
#[pyfunction]
#[pyo3(signature = (instances = None))]
pub fn metric_families(py: Python<'_>, instances: Option<Vec<String>>) -> PyResult<Bound<'_, PyList>> {
    let wanted = |view: &InstanceView| instances.as_ref().is_none_or(|names| names.contains(&view.name));
    let found = py.detach(|| kvcached_control::families(&kvcached_control::default_dir(), wanted));
    let rows = PyList::empty(py);
    for family in found.map_err(|e| e.raise(py))? {
        let samples = PyList::empty(py);
        for sample in &family.samples {
            let labels = PyDict::new(py);
            for (name, value) in &sample.labels {
                labels.set_item(name, value)?;
            }
            match &sample.value {
                Value::Number(number) => samples.append((labels, number))?,
                Value::Times(times) => {
                    let seconds = |bound: Option<Duration>| bound.map_or(f64::INFINITY, |b| b.as_secs_f64());
                    let buckets: Vec<(f64, u64)> =
                        times.cumulative().map(|(bound, count)| (seconds(bound), count)).collect();
                    samples.append((labels, (buckets, times.sum.as_secs_f64())))?;
                }
            }
        }
        rows.append((family.name, family.help, family.kind.as_str(), samples))?;
    }
    Ok(rows)
}

/// Asks an instance for other terms; returns (outcome, revision, limit or None, minimum).
#[pyfunction]
#[pyo3(signature = (name, *, limit = None, min_bytes = None, revision = None, wait_s = 5.0))]
pub fn ask(
    py: Python<'_>,
    name: &str,
    limit: Option<(Option<u64>,)>,
    min_bytes: Option<u64>,
    revision: Option<u64>,
    wait_s: f64,
) -> PyResult<(&'static str, u64, Option<u64>, u64)> {
    let patience = Duration::try_from_secs_f64(wait_s)
        .map_err(|error| crate::errors::config(py, format!("wait_s={wait_s}: {error}")))?;
    let change = Change { limit_bytes: limit.map(|(limit,)| limit), min_bytes, revision };
    let asked = || kvcached_control::ask(&kvcached_control::default_dir(), name, change, patience);
    let answered = py.detach(asked).map_err(|e| e.raise(py))?;
    let Terms { limit_bytes, min_bytes } = answered.terms;
    Ok((answered.outcome.as_str(), answered.revision, limit_bytes, min_bytes))
}

/// Runs `kvctl` on this process's standard output and error; returns its exit code.
#[pyfunction]
pub fn kvctl(py: Python<'_>, args: Vec<OsString>) -> i32 {
    py.detach(|| ::kvctl::run(args, &mut std::io::stdout(), &mut std::io::stderr()))
}
