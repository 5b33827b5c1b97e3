//! The Python exception types, and which Rust error becomes which.

use std::fmt::Display;

use kvcached_control::ControlError;
use kvcached_ipc::IpcError;
use kvcached_pool::{BlockError, PoolError};
use kvcached_vmm::{DeviceNameError, DriverError, GeometryError, VmmError};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyTuple, PyType};

/// One exception type: its name, what it derives from, its docstring.
struct Kind {
    name: &'static str,
    bases: &'static [Base],
    doc: &'static str,
}

/// What an exception derives from.
enum Base {
    Runtime,
    Value,
    Ours(usize),
}

const ERROR: usize = 0;
const CONFIG: usize = 1;
const GEOMETRY: usize = 2;
const UNAVAILABLE: usize = 3;
const DRIVER: usize = 4;
const EXHAUSTED: usize = 5;
const QUARANTINED: usize = 6;
const CONSISTENCY: usize = 7;
const BLOCK: usize = 8;

const KINDS: [Kind; 10] = [
    Kind { name: "KVCachedError", bases: &[Base::Runtime], doc: "Any error of kvcached." },
    Kind {
        name: "KVCachedConfigError",
        bases: &[Base::Ours(ERROR), Base::Value],
        doc: "The user must act: the message says how.",
    },
    Kind {
        name: "GeometryError",
        bases: &[Base::Ours(CONFIG)],
        doc: "No page fits the blocks, or ids would not fit int32.",
    },
    Kind {
        name: "DriverUnavailableError",
        bases: &[Base::Ours(ERROR)],
        doc: "No driver library, or one that lacks a function.",
    },
    Kind {
        name: "DriverError",
        bases: &[Base::Ours(ERROR)],
        doc: "The driver refused a call; what the call had done was undone.",
    },
    Kind {
        name: "KVCachePoolExhausted",
        bases: &[Base::Ours(ERROR)],
        doc: "No memory or no free blocks now: pressure, try again later.",
    },
    Kind {
        name: "MapQuarantinedError",
        bases: &[Base::Ours(ERROR)],
        doc: "An undo failed: the pages named are lost, the pool goes on.",
    },
    Kind {
        name: "StateConsistencyError",
        bases: &[Base::Ours(ERROR)],
        doc: "What is believed and what is mapped may differ: stop using the pool.",
    },
    Kind {
        name: "BlockError",
        bases: &[Base::Ours(ERROR), Base::Value],
        doc: "A block id freed twice or never handed out; nothing was changed.",
    },
    Kind {
        name: "QuarantinedResizeError",
        bases: &[Base::Ours(QUARANTINED)],
        doc: "A smaller limit that lost pages stand in the way of; nothing was changed.",
    },
];

static TYPES: PyOnceLock<Vec<Py<PyType>>> = PyOnceLock::new();

fn types(py: Python<'_>) -> PyResult<&Vec<Py<PyType>>> {
    TYPES.get_or_try_init(py, || {
        let mut made: Vec<Py<PyType>> = Vec::with_capacity(KINDS.len());
        for kind in &KINDS {
            let bases = kind.bases.iter().map(|base| match base {
                Base::Runtime => py.get_type::<PyRuntimeError>(),
                Base::Value => py.get_type::<PyValueError>(),
                Base::Ours(i) => made[*i].bind(py).clone(),
            });
            let bases = PyTuple::new(py, bases.collect::<Vec<_>>())?;
            let attributes = pyo3::types::PyDict::new(py);
            attributes.set_item("__doc__", kind.doc)?;
            attributes.set_item("__module__", "kvcached.errors")?;
            let made_type = py.get_type::<PyType>().call1((kind.name, bases, attributes))?;
            made.push(made_type.cast_into::<PyType>()?.unbind());
        }
        Ok(made)
    })
}

/// Puts the types into the module.
pub fn register(module: &Bound<'_, PyModule>) -> PyResult<()> {
    for (kind, made) in KINDS.iter().zip(types(module.py())?) {
        module.add(kind.name, made)?;
    }
    Ok(())
}

fn raise(py: Python<'_>, kind: usize, message: String) -> PyErr {
    match types(py) {
        Ok(types) => PyErr::from_type(types[kind].bind(py).clone(), message),
        Err(error) => error,
    }
}

/// A Rust error that has a Python type.
pub trait Raise {
    /// The exception; the message is the error's own.
    fn raise(self, py: Python<'_>) -> PyErr;
}

impl Raise for GeometryError {
    fn raise(self, py: Python<'_>) -> PyErr {
        let kind = if matches!(self, GeometryError::NoSuchBlock { .. }) { BLOCK } else { GEOMETRY };
        raise(py, kind, self.to_string())
    }
}

impl Raise for DeviceNameError {
    fn raise(self, py: Python<'_>) -> PyErr {
        raise(py, CONFIG, self.to_string())
    }
}

impl Raise for ControlError {
    fn raise(self, py: Python<'_>) -> PyErr {
        raise(py, CONFIG, self.to_string())
    }
}

impl Raise for IpcError {
    fn raise(self, py: Python<'_>) -> PyErr {
        let kind = match &self {
            IpcError::NotADirectory { .. }
            | IpcError::DirectoryNotOurs { .. }
            | IpcError::DirectoryNotPrivate { .. }
            | IpcError::PathTooLong { .. }
            | IpcError::PeerNotOurs { .. }
            | IpcError::GroupTaken { .. }
            | IpcError::Members { .. } => CONFIG,
            IpcError::NoSuchPage { .. } => return PyValueError::new_err(self.to_string()),
            IpcError::OutOfMemory { .. } => EXHAUSTED,
            IpcError::MapFailed { lost, .. } | IpcError::UnmapFailed { lost, .. } if !lost.is_empty() => QUARANTINED,
            IpcError::MapFailed { .. }
            | IpcError::UnmapFailed { .. }
            | IpcError::Failed { .. }
            | IpcError::Forked { .. } => DRIVER,
            IpcError::Broken { .. } => CONSISTENCY,
            _ => ERROR,
        };
        raise(py, kind, self.to_string())
    }
}

impl Raise for DriverError {
    fn raise(self, py: Python<'_>) -> PyErr {
        let kind = match self {
            DriverError::NoDriver { .. } | DriverError::NoSymbol { .. } => UNAVAILABLE,
            DriverError::OutOfMemory { .. } => EXHAUSTED,
            _ => DRIVER,
        };
        raise(py, kind, self.to_string())
    }
}

impl Raise for VmmError {
    fn raise(self, py: Python<'_>) -> PyErr {
        let message = self.to_string();
        match self {
            VmmError::Driver {
                source: DriverError::NoDriver { .. } | DriverError::NoSymbol { .. }, ..
            } => raise(py, UNAVAILABLE, message),
            VmmError::Driver { .. } | VmmError::CommitUnfinished { .. } => raise(py, DRIVER, message),
            VmmError::Unmap(report) if report.quarantined.is_empty() => raise(py, DRIVER, message),
            VmmError::OutOfMemory { .. } => raise(py, EXHAUSTED, message),
            VmmError::Quarantined { .. }
            | VmmError::Unmap(_)
            | VmmError::InQuarantine { .. }
            | VmmError::AbortLost { .. } => raise(py, QUARANTINED, message),
            VmmError::NotMapped { .. }
            | VmmError::InTransition { .. }
            | VmmError::InTransaction { .. }
            | VmmError::Transaction(_) => raise(py, CONSISTENCY, message),
            VmmError::PageOutOfRange { .. } => PyValueError::new_err(message),
            VmmError::Geometry(error) => error.raise(py),
            _ => raise(py, ERROR, message),
        }
    }
}

impl Raise for BlockError {
    fn raise(self, py: Python<'_>) -> PyErr {
        raise(py, BLOCK, self.to_string())
    }
}

/// An argument that cannot be used; `message` says what would be.
pub fn config(py: Python<'_>, message: String) -> PyErr {
    raise(py, CONFIG, message)
}

/// No block has this id, which may be one that fits no u32. In the words of `BlockError::Unknown`.
pub fn no_such_block(py: Python<'_>, id: &dyn Display) -> PyErr {
    raise(py, BLOCK, format!("no block has id {id}"))
}

impl Raise for PoolError {
    fn raise(self, py: Python<'_>) -> PyErr {
        let kind = match &self {
            PoolError::Layout(_) => CONFIG,
            PoolError::Block(_) => BLOCK,
            PoolError::Epoch(_) | PoolError::StateConsistency { .. } => CONSISTENCY,
            PoolError::NoSuchPage { .. } => return PyValueError::new_err(self.to_string()),
            PoolError::Exhausted { .. } => EXHAUSTED,
            PoolError::Quarantined { .. } => QUARANTINED,
            PoolError::Driver { .. } | PoolError::Forked { .. } => DRIVER,
            PoolError::Shutdown => ERROR,
        };
        raise(py, kind, self.to_string())
    }
}
