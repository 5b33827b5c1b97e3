//! `Pool`.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvcached_control::BudgetListed;
use kvcached_ledger::{Layout, PageOrder};
use kvcached_pool::{Mapper, MemoryLimit, Meter, NoMeter, Pool as Inner, PoolConfig, PoolError};
use pyo3::exceptions::{PyAttributeError, PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

use crate::errors::Raise;
use crate::geometry::Geometry;
use crate::ids::{self, Room};
use crate::instance::InstanceRecord;
use crate::ranks::Ranks;
use crate::tensor::FTensor;

/// A ledger over an `FTensor`, or over `Ranks` that have one each: hands out block ids of backed pages.
#[pyclass(frozen, subclass, module = "kvcached._core")]
pub struct Pool {
    /// Dropped without the GIL.
    inner: ManuallyDrop<Arc<Inner>>,
    memory: Py<PyAny>,
    geometry: Geometry,
    num_blocks: u32,
}

/// A limit as Python has it: its state, revision, bytes, the bytes that are occupied, and why it is not met.
type Limit = (&'static str, u64, u64, u64, Option<String>);

fn limit(of: MemoryLimit) -> Limit {
    (of.state.as_str(), of.revision, of.limit_bytes, of.occupied_bytes, of.reason)
}

/// What a pool is made over.
struct Measured {
    mapper: Arc<dyn Mapper>,
    geometry: kvcached_vmm::Geometry,
    num_blocks: u64,
}

fn over_tensor(
    py: Python<'_>,
    ftensor: &FTensor,
    geometry: Option<kvcached_vmm::Geometry>,
    num_blocks: Option<u64>,
) -> PyResult<Measured> {
    ftensor.check_owner(py, "Pool")?;
    let tensor = Arc::clone(&ftensor.inner);
    let geometry = geometry.unwrap_or(*tensor.geometry());
    let num_blocks = num_blocks.unwrap_or(tensor.num_blocks());
    let num_pages = geometry.num_pages(num_blocks).map_err(|e| e.raise(py))?;
    if geometry.page_bytes() != tensor.geometry().page_bytes() || num_pages > tensor.num_pages() {
        return Err(PyValueError::new_err(format!(
            "{num_blocks} blocks need {num_pages} pages of {} bytes, the tensors have {} of {}",
            geometry.page_bytes(),
            tensor.num_pages(),
            tensor.geometry().page_bytes(),
        )));
    }
    Ok(Measured { mapper: tensor, geometry, num_blocks })
}

/// Ranks may have pages of different sizes, where stages have different layers: what must agree is what ids mean.
fn over_ranks(
    py: Python<'_>,
    ranks: &Ranks,
    geometry: Option<kvcached_vmm::Geometry>,
    num_blocks: Option<u64>,
) -> PyResult<Measured> {
    let (Some(geometry), Some(num_blocks)) = (geometry, num_blocks) else {
        return Err(PyTypeError::new_err("a pool over Ranks needs geometry= and num_blocks="));
    };
    let ranks = Arc::clone(&ranks.inner);
    let num_pages = geometry.num_pages(num_blocks).map_err(|e| e.raise(py))?;
    let ids = (geometry.blocks_per_page(), geometry.ids_per_page());
    let theirs = (ranks.blocks_per_page(), ranks.ids_per_page());
    if ids != theirs || num_pages > ranks.num_pages() {
        return Err(PyValueError::new_err(format!(
            "{num_blocks} blocks need {num_pages} pages of {} blocks and {} ids, the ranks have {} of {} and {}",
            ids.0,
            ids.1,
            ranks.num_pages(),
            theirs.0,
            theirs.1,
        )));
    }
    Ok(Measured { mapper: ranks, geometry, num_blocks })
}

impl Drop for Pool {
    fn drop(&mut self) {
        // SAFETY: nobody uses the field afterwards.
        let mut inner = Some(unsafe { ManuallyDrop::take(&mut self.inner) });
        // It shuts down and may wait for the device. At the end of an interpreter nobody else needs the GIL.
        let _ = Python::try_attach(|py| py.detach(|| inner.take().map(end)));
    }
}

/// A pool over memory that is shared with others. Where they hold all of it, it asks for a while: they hear of it and give what they
/// can.
fn start(config: PoolConfig, mapper: &Arc<dyn Mapper>, meter: &Arc<dyn Meter>) -> Result<Inner, PoolError> {
    const PATIENCE: Duration = Duration::from_secs(10);
    const PAUSE: Duration = Duration::from_millis(20);
    let begin = Instant::now();
    loop {
        match Inner::new(config, Arc::clone(mapper), Arc::clone(meter)) {
            Err(PoolError::Exhausted { .. }) if begin.elapsed() < PATIENCE && is_shared() => {
                std::thread::sleep(PAUSE);
            }
            outcome => return outcome,
        }
    }
}

/// Whether some device has several instances.
fn is_shared() -> bool {
    let budgets = kvcached_control::budgets(&kvcached_control::default_dir()).unwrap_or_default();
    budgets.iter().any(|listed| matches!(listed, BudgetListed::Budget(view) if view.members.len() > 1))
}

/// Gives everything back. The instance's steward may be looking at the pool: whoever drops it finds it gone all the same.
fn end(pool: Arc<Inner>) {
    const PATIENCE: Duration = Duration::from_secs(1);
    const PAUSE: Duration = Duration::from_micros(100);
    let _ = pool.shutdown(); // what it says was said by an explicit one, or is logged by the pool's own end
    let begin = Instant::now();
    while Arc::strong_count(&pool) > 1 && begin.elapsed() < PATIENCE {
        std::thread::sleep(PAUSE);
    }
}

impl Pool {
    /// Runs `call` without the GIL: it may wait for the driver or for another thread.
    fn run<T: Send>(
        &self,
        py: Python<'_>,
        call: impl FnOnce(&Inner) -> Result<T, PoolError> + Send,
    ) -> PyResult<T> {
        py.detach(|| call(&self.inner)).map_err(|e| e.raise(py))
    }

    /// What is on hand is had at once; for anything else the GIL is let go.
    fn take(&self, py: Python<'_>, n: u32) -> PyResult<Option<Vec<u32>>> {
        match self.inner.alloc_on_hand(n).map_err(|e| e.raise(py))? {
            Some(ids) => Ok(Some(ids)),
            None => self.run(py, |pool| pool.alloc(n)),
        }
    }

    /// Allocates as many as `room` takes; false, and nothing was written, where they cannot be had.
    fn take_into<'py>(&self, py: Python<'py>, room: &Room<'py>) -> PyResult<bool> {
        let n = u32::try_from(room.len).unwrap_or(u32::MAX); // more than any pool has
        let Some(ids) = self.take(py, n)? else { return Ok(false) };
        self.handed_over(py, &ids, || room.fill(py, &ids))?;
        Ok(true)
    }

    /// What `give` makes of blocks that were just allocated. They are freed where it fails: nobody would know of them.
    fn handed_over<T>(&self, py: Python<'_>, ids: &[u32], give: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
        let given = give();
        if given.is_err() {
            self.inner.free(ids).map_err(|e| e.raise(py))?;
        }
        given
    }

    fn whole(&self) -> String {
        let pages = self.geometry.inner.num_pages(self.num_blocks.into());
        format!("a pool of {} pages", pages.unwrap_or_default())
    }
}

#[pymethods]
impl Pool {
    #[new]
    #[pyo3(signature = (
        memory, *, geometry = None, num_blocks = None, reserve_null_block = false, async_sched = false,
        min_reserved_bytes = 0, max_reserved_bytes = 48 << 20, highest_pages_first = false, record = None,
        pool_name = None, charged = true,
    ))]
    #[expect(clippy::too_many_arguments, reason = "keyword arguments of a Python constructor")]
    fn new(
        py: Python<'_>,
        memory: &Bound<'_, PyAny>,
        geometry: Option<&Geometry>,
        num_blocks: Option<u64>,
        reserve_null_block: bool,
        async_sched: bool,
        min_reserved_bytes: u64,
        max_reserved_bytes: u64,
        highest_pages_first: bool,
        record: Option<&InstanceRecord>,
        pool_name: Option<&str>,
        charged: bool,
    ) -> PyResult<Self> {
        let geometry = geometry.map(|geometry| geometry.inner);
        let Measured { mapper, geometry, num_blocks } = if let Ok(ftensor) = memory.cast::<FTensor>() {
            over_tensor(py, ftensor.get(), geometry, num_blocks)?
        } else if let Ok(ranks) = memory.cast::<Ranks>() {
            over_ranks(py, ranks.get(), geometry, num_blocks)?
        } else {
            let given = memory.get_type().name()?;
            return Err(PyTypeError::new_err(format!(
                "a pool is made over an FTensor or Ranks, not {given}"
            )));
        };
        geometry.id_space(num_blocks).map_err(|e| e.raise(py))?;
        let num_blocks = u32::try_from(num_blocks)?;
        let order = if highest_pages_first { PageOrder::HighestFirst } else { PageOrder::LowestFirst };
        let config = PoolConfig {
            layout: Layout {
                num_blocks,
                blocks_per_page: geometry.blocks_per_page(),
                ids_per_page: geometry.ids_per_page(),
                order,
            },
            null_block: reserve_null_block,
            async_sched,
            min_reserved_bytes,
            max_reserved_bytes,
            patience: PoolConfig::PATIENCE,
        };
        let meter: Arc<dyn Meter> = match record {
            None => Arc::new(NoMeter),
            Some(record) => {
                Arc::new(record.inner.pool_row(pool_name.unwrap_or("pool")).map_err(|e| e.raise(py))?)
            }
        };
        let make = || {
            let Some(record) = record.filter(|_| charged) else {
                return Ok(Arc::new(Inner::new(config, mapper, meter)?));
            };
            let pool = Arc::new(start(config, &record.charged(mapper), &meter)?);
            record.look_after(&pool)?;
            Ok(pool)
        };
        let inner = py.detach(make).map_err(|e: PoolError| e.raise(py))?;
        Ok(Pool {
            inner: ManuallyDrop::new(inner),
            memory: memory.clone().unbind(),
            geometry: Geometry { inner: geometry },
            num_blocks,
        })
    }

    #[getter]
    fn memory(&self, py: Python<'_>) -> Py<PyAny> {
        self.memory.clone_ref(py)
    }

    #[getter]
    fn ftensor(&self, py: Python<'_>) -> PyResult<Py<FTensor>> {
        let ftensor = self.memory.bind(py).cast::<FTensor>();
        let ftensor =
            ftensor.map_err(|_| PyAttributeError::new_err("this pool's tensors are those of its ranks"))?;
        Ok(ftensor.clone().unbind())
    }

    #[getter]
    fn geometry(&self) -> Geometry {
        self.geometry
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.num_blocks
    }

    #[getter]
    fn id_space(&self, py: Python<'_>) -> PyResult<u32> {
        self.geometry.inner.id_space(self.num_blocks.into()).map_err(|e| e.raise(py))
    }

    #[getter]
    fn null_block(&self) -> Option<u32> {
        self.inner.null_block()
    }

    fn alloc<'py>(&self, py: Python<'py>, n: &Bound<'py, PyAny>) -> PyResult<Option<Bound<'py, PyList>>> {
        let ids = self.take(py, ids::count(n)?)?;
        ids.map(|ids| self.handed_over(py, &ids, || PyList::new(py, &ids))).transpose()
    }

    fn alloc_array<'py>(
        &self,
        py: Python<'py>,
        n: &Bound<'py, PyAny>,
    ) -> PyResult<Option<Bound<'py, PyAny>>> {
        let n = ids::count(n)?;
        if n > self.num_blocks {
            return self.take(py, n).map(|_| None); // as `alloc`, and no array is made for them
        }
        let (room, array) = Room::numpy(py, n as usize)?;
        Ok(self.take_into(py, &room)?.then_some(array))
    }

    fn alloc_into<'py>(&self, py: Python<'py>, out: &Bound<'py, PyAny>) -> PyResult<bool> {
        self.take_into(py, &Room::of(out)?)
    }

    fn free(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = ids::blocks(ids)?;
        self.inner.free(&ids).map_err(|e| e.raise(py))
    }

    fn claim(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<()> {
        let ids = ids::blocks(ids)?;
        self.run(py, |pool| pool.claim(&ids))
    }

    fn available_size(&self, py: Python<'_>) -> PyResult<u32> {
        self.inner.available().map_err(|e| e.raise(py))
    }

    fn promised_size(&self, py: Python<'_>) -> PyResult<u32> {
        self.inner.promised().map_err(|e| e.raise(py))
    }

    fn held_size(&self, py: Python<'_>) -> PyResult<u32> {
        self.inner.held().map_err(|e| e.raise(py))
    }

    #[pyo3(signature = (leave_bytes = 0))]
    fn refresh_credit(&self, py: Python<'_>, leave_bytes: u64) -> PyResult<u32> {
        self.run(py, |pool| pool.refresh_credit(leave_bytes))
    }

    fn free_ids(&self, py: Python<'_>) -> PyResult<Vec<u32>> {
        self.run(py, Inner::free_ids)
    }

    fn backed_size(&self, py: Python<'_>) -> PyResult<u32> {
        self.inner.backed().map_err(|e| e.raise(py))
    }

    fn reserve_demand(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<u32> {
        let n = ids::count(n)?;
        self.run(py, |pool| pool.reserve_demand(n))
    }

    fn lacks(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<()> {
        let n = ids::count(n)?;
        self.run(py, |pool| pool.lacks(n))
    }

    fn try_to_reserve(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<bool> {
        let n = ids::count(n)?;
        self.run(py, |pool| pool.try_to_reserve(n))
    }

    fn free_reserved(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Inner::free_reserved)
    }

    fn begin_epoch(&self, py: Python<'_>) -> PyResult<u64> {
        self.inner.begin_epoch().map_err(|e| e.raise(py))
    }

    fn release_through(&self, py: Python<'_>, marker: u64) -> PyResult<()> {
        self.inner.release_through(marker).map_err(|e| e.raise(py))
    }

    #[pyo3(signature = (limit_bytes, *, revision = None))]
    fn set_memory_limit(
        &self,
        py: Python<'_>,
        limit_bytes: &Bound<'_, PyAny>,
        revision: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Limit> {
        let bytes = ids::natural("limit_bytes", limit_bytes)?;
        let revision = revision.map(|revision| ids::natural("revision", revision)).transpose()?;
        self.inner.set_limit(bytes, revision).map(limit).map_err(|e| e.raise(py))
    }

    fn memory_limit_state(&self, py: Python<'_>) -> PyResult<Limit> {
        self.inner.limit().map(limit).map_err(|e| e.raise(py))
    }

    fn trim(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Inner::trim)
    }

    fn clear(&self, py: Python<'_>) -> PyResult<()> {
        self.run(py, Inner::clear)
    }

    fn shutdown(&self, py: Python<'_>) -> PyResult<u64> {
        self.run(py, Inner::shutdown)
    }

    #[pyo3(signature = (timeout_s = 10.0))]
    fn quiesce(&self, py: Python<'_>, timeout_s: f64) -> PyResult<bool> {
        let timeout = Duration::try_from_secs_f64(timeout_s)
            .map_err(|error| PyValueError::new_err(format!("timeout_s={timeout_s}: {error}")))?;
        self.run(py, |pool| pool.quiesce(timeout))
    }

    fn keep_on_hand(&self, py: Python<'_>, n: &Bound<'_, PyAny>) -> PyResult<u32> {
        let n = ids::count(n)?;
        self.inner.keep_on_hand(n).map_err(|e| e.raise(py))
    }

    fn get_page_occupancy(&self, py: Python<'_>, page_ids: &Bound<'_, PyAny>) -> PyResult<Vec<(u32, u32)>> {
        let page_ids = ids::pages(page_ids, || self.whole())?;
        self.inner.occupancy(&page_ids).map_err(|e| e.raise(py))
    }

    fn pages_of(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let ids = ids::blocks(ids)?;
        self.inner.pages_of(&ids).map_err(|e| e.raise(py))
    }

    fn emptied_by(&self, py: Python<'_>, ids: &Bound<'_, PyAny>) -> PyResult<u32> {
        let ids = ids::blocks(ids)?;
        self.inner.emptied_by(&ids).map_err(|e| e.raise(py))
    }

    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let stats = self.inner.stats().map_err(|e| e.raise(py))?;
        let pages = stats.pages;
        let rows = [
            ("free_pages", u64::from(pages.free)),
            ("mapping_pages", pages.mapping.into()),
            ("reserved_pages", pages.reserved.into()),
            ("in_use_pages", pages.in_use.into()),
            ("retired_pages", pages.retired.into()),
            ("unmapping_pages", pages.unmapping.into()),
            ("withdrawn_pages", pages.withdrawn.into()),
            ("quarantined_pages", pages.quarantined.into()),
            ("page_bytes", stats.page_bytes),
            ("num_blocks", stats.num_blocks.into()),
            ("held_blocks", stats.held_blocks.into()),
            ("backed_blocks", stats.backed_blocks.into()),
            ("available_blocks", stats.available_blocks.into()),
            ("set_aside_blocks", stats.set_aside_blocks.into()),
            ("draining_blocks", stats.draining_blocks.into()),
            ("ahead_pages", stats.ahead_pages.into()),
            ("pages_backed_on_demand", stats.tally.on_demand),
            ("pages_backed_ahead", stats.tally.ahead),
            ("pages_given_back_behind", stats.tally.behind),
            ("pager_failures", stats.tally.failures),
            ("used_bytes", stats.usage.used_bytes),
            ("reserved_bytes", stats.usage.reserved_bytes),
            ("beside_bytes", stats.usage.beside_bytes),
            ("virtual_bytes", stats.usage.virtual_bytes),
            ("quarantined_bytes", stats.usage.quarantined_bytes),
            ("mapped_bytes", stats.mapped_bytes),
        ];
        let dict = PyDict::new(py);
        for (name, value) in rows {
            dict.set_item(name, value)?;
        }
        Ok(dict)
    }
}
