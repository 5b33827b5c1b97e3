//! Block and page ids across the border: in from anything that holds integers, out as lists and into arrays.
//!
//! The C interface of buffers is in the stable ABI only from Python 3.11 on, and we serve 3.10: a `memoryview` stands
//! between, which costs one copy of the ids and no loop over Python objects.

use std::fmt::Display;

use pyo3::exceptions::{PyOverflowError, PyTypeError, PyValueError};
use pyo3::ffi;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyList, PyMemoryView, PySlice, PyString, PyTuple};

use crate::errors;

const GIVE: &str = "give ids as a list or tuple of ints or as a one-dimensional array of integers";
const ROOM: &str = "give a writable, contiguous, one-dimensional array of 32- or 64-bit integers";

/// The ids of blocks, as many as there are.
///
/// Raises `BlockError` for one that no block can have, `TypeError` for what holds no ids.
pub fn blocks(ids: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
    let py = ids.py();
    read(ids, &|id| errors::no_such_block(py, id))
}

/// The id of one block. Raises as `blocks`.
pub fn block(id: &Bound<'_, PyAny>) -> PyResult<u32> {
    let py = id.py();
    one(id, &|id| errors::no_such_block(py, id))
}

/// The ids of pages of `whole`, such as "a pool of 3 pages".
///
/// Raises `ValueError` for one that no page can have, `TypeError` for what holds no ids.
pub fn pages(ids: &Bound<'_, PyAny>, whole: impl Fn() -> String) -> PyResult<Vec<u32>> {
    read(ids, &|page| PyValueError::new_err(format!("page {page} is outside {}", whole())))
}

/// How many blocks are asked for. What is beyond 32 bits is more than any pool has: the most that a u32 holds.
///
/// Raises `ValueError` for a negative number.
pub fn count(n: &Bound<'_, PyAny>) -> PyResult<u32> {
    let n = match n.extract::<i64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(n.py()) => {
            if n.lt(0)? {
                i64::MIN
            } else {
                i64::MAX
            }
        }
        other => other?,
    };
    if n < 0 {
        return Err(PyValueError::new_err("a number of blocks must be 0 or more"));
    }
    Ok(u32::try_from(n).unwrap_or(u32::MAX))
}

/// An argument that counts something from 0. What is beyond 64 bits is the most that a u64 holds.
///
/// Raises `KVCachedConfigError` for anything else.
pub fn natural(name: &str, n: &Bound<'_, PyAny>) -> PyResult<u64> {
    let refuse = || errors::config(n.py(), format!("{name}={n}: use an int from 0 on"));
    match n.extract::<u64>() {
        Err(error) if error.is_instance_of::<PyOverflowError>(n.py()) => {
            if n.lt(0)? {
                Err(refuse())
            } else {
                Ok(u64::MAX)
            }
        }
        Err(error) if error.is_instance_of::<PyTypeError>(n.py()) => Err(refuse()),
        other => other,
    }
}

/// Who is told of an id that fits no u32.
type Outside<'a> = &'a dyn Fn(&dyn Display) -> PyErr;

fn read(ids: &Bound<'_, PyAny>, outside: Outside<'_>) -> PyResult<Vec<u32>> {
    if let Ok(list) = ids.cast::<PyList>() {
        return from_list(list, outside);
    }
    if let Ok(tuple) = ids.cast::<PyTuple>() {
        let mut ids = Vec::with_capacity(tuple.len());
        for item in tuple.iter_borrowed() {
            ids.push(small(item).map_or_else(|| one(&item, outside), Ok)?);
        }
        return Ok(ids);
    }
    if ids.is_instance_of::<PyString>() {
        return Err(PyTypeError::new_err(format!("ids are a str: {GIVE}")));
    }
    if let Ok(view) = PyMemoryView::from(ids) {
        return from_view(&view, outside);
    }
    let items =
        ids.try_iter().map_err(|error| because(error, ids, format!("ids are {}: {GIVE}", kind(ids))))?;
    items.map(|item| one(&item?, outside)).collect()
}

fn from_list(list: &Bound<'_, PyList>, outside: Outside<'_>) -> PyResult<Vec<u32>> {
    let mut len = list.len();
    let mut ids = Vec::with_capacity(len);
    while ids.len() < len {
        let index = ids.len();
        // SAFETY: `index` is within the list, and the list keeps the item while no Python code runs, which `small` does
        // not do. No reference is taken: that is half of what reading an id costs.
        let quick = unsafe {
            let item = ffi::PyList_GetItem(list.as_ptr(), index as ffi::Py_ssize_t);
            small(Borrowed::from_ptr(list.py(), item))
        };
        ids.push(match quick {
            Some(id) => id,
            None => {
                let id = one(&list.get_item(index)?, outside)?;
                len = list.len(); // `__index__` may have changed it
                id
            }
        });
    }
    Ok(ids)
}

/// An ordinary int that is an id. Runs no Python code.
fn small(item: Borrowed<'_, '_, PyAny>) -> Option<u32> {
    // SAFETY: the item is alive and was found to be an int, of which the call reads the number, -1 where it overflows.
    let number = unsafe {
        if ffi::PyLong_CheckExact(item.as_ptr()) == 0 {
            return None;
        }
        ffi::PyLong_AsLongAndOverflow(item.as_ptr(), &mut 0)
    };
    u32::try_from(number).ok()
}

fn one(item: &Bound<'_, PyAny>, outside: Outside<'_>) -> PyResult<u32> {
    match item.extract::<i64>() {
        Ok(id) => u32::try_from(id).map_err(|_| outside(&id)),
        Err(error) if error.is_instance_of::<PyOverflowError>(item.py()) => {
            let digits = item.call_method0(intern!(item.py(), "__index__"))?.str().map(|s| s.to_string());
            Err(outside(&digits.unwrap_or_else(|_| "of thousands of digits".to_owned())))
        }
        Err(error) => Err(because(error, item, format!("an id is {}: {GIVE}", kind(item)))),
    }
}

/// "a float", as a person says it.
fn kind(object: &Bound<'_, PyAny>) -> String {
    object.get_type().name().map_or_else(|_| "an object".to_owned(), |name| format!("a {name}"))
}

/// A `TypeError` of the interpreter in words of ours; any other error as it is.
fn because(error: PyErr, object: &Bound<'_, PyAny>, message: String) -> PyErr {
    let py = object.py();
    if !error.is_instance_of::<PyTypeError>(py) {
        return error;
    }
    let ours = PyTypeError::new_err(message);
    ours.set_cause(py, Some(error));
    ours
}

/// One item of a buffer.
#[derive(Clone, Copy)]
struct Integer {
    signed: bool,
    bytes: usize,
}

impl Integer {
    /// What a format of the `struct` module says; None for what is no integer in the byte order of this machine.
    fn of(format: &str, bytes: usize) -> Option<Integer> {
        let native = if cfg!(target_endian = "little") { '<' } else { '>' };
        let signed = match format.trim_start_matches(['@', '=', native]) {
            "b" | "h" | "i" | "l" | "q" | "n" => true,
            "B" | "H" | "I" | "L" | "Q" | "N" => false,
            _ => return None,
        };
        matches!(bytes, 1 | 2 | 4 | 8).then_some(Integer { signed, bytes })
    }
}

/// What one item of a view is; its format where that is no integer.
fn integer(view: &Bound<'_, PyMemoryView>) -> PyResult<Result<Integer, String>> {
    let py = view.py();
    let format = view.getattr(intern!(py, "format"))?.cast_into::<PyString>()?;
    let format = format.to_str()?;
    let bytes = view.getattr(intern!(py, "itemsize"))?.extract()?;
    Ok(Integer::of(format, bytes).ok_or_else(|| format.to_owned()))
}

fn dimensions(view: &Bound<'_, PyMemoryView>) -> PyResult<usize> {
    view.getattr(intern!(view.py(), "ndim"))?.extract()
}

fn from_view(view: &Bound<'_, PyMemoryView>, outside: Outside<'_>) -> PyResult<Vec<u32>> {
    let dimensions = dimensions(view)?;
    if dimensions != 1 {
        return Err(PyTypeError::new_err(format!("ids have {dimensions} dimensions: {GIVE}")));
    }
    let integer = integer(view)?
        .map_err(|format| PyTypeError::new_err(format!("ids have items of format {format:?}: {GIVE}")))?;
    let copied = view.call_method0(intern!(view.py(), "tobytes"))?;
    let bytes = copied.cast::<PyBytes>()?.as_bytes();
    match (integer.signed, integer.bytes) {
        (true, 1) => narrow(bytes, i8::from_ne_bytes, outside),
        (true, 2) => narrow(bytes, i16::from_ne_bytes, outside),
        (true, 4) => narrow(bytes, i32::from_ne_bytes, outside),
        (true, _) => narrow(bytes, i64::from_ne_bytes, outside),
        (false, 1) => narrow(bytes, u8::from_ne_bytes, outside),
        (false, 2) => narrow(bytes, u16::from_ne_bytes, outside),
        (false, 4) => narrow(bytes, u32::from_ne_bytes, outside),
        (false, _) => narrow(bytes, u64::from_ne_bytes, outside),
    }
}

fn narrow<T, const N: usize>(
    bytes: &[u8],
    item: impl Fn([u8; N]) -> T,
    outside: Outside<'_>,
) -> PyResult<Vec<u32>>
where
    T: Copy + Display + TryInto<u32>,
{
    let (items, _) = bytes.as_chunks::<N>();
    let mut ids = Vec::with_capacity(items.len());
    for &bytes in items {
        let id = item(bytes);
        ids.push(id.try_into().map_err(|_| outside(&id))?);
    }
    Ok(ids)
}

/// An array of Python's that takes ids.
pub struct Room<'py> {
    /// Its bytes; None where it has none.
    bytes: Option<Bound<'py, PyAny>>,
    /// Ids that it takes.
    pub len: usize,
    wide: bool,
}

impl<'py> Room<'py> {
    /// Raises `TypeError` for anything but a writable, contiguous, one-dimensional buffer of 32- or 64-bit integers.
    pub fn of(array: &Bound<'py, PyAny>) -> PyResult<Room<'py>> {
        let py = array.py();
        let refuse = |why: String| PyTypeError::new_err(format!("the array {why}: {ROOM}"));
        let view = PyMemoryView::from(array)
            .map_err(|error| because(error, array, format!("{} takes no ids: {ROOM}", kind(array))))?;
        let dimensions = dimensions(&view)?;
        if dimensions != 1 {
            return Err(refuse(format!("has {dimensions} dimensions")));
        }
        if view.getattr(intern!(py, "readonly"))?.is_truthy()? {
            return Err(refuse("is read-only".to_owned()));
        }
        if !view.getattr(intern!(py, "c_contiguous"))?.is_truthy()? {
            return Err(refuse("is not contiguous".to_owned()));
        }
        let wide = match integer(&view)? {
            Ok(Integer { bytes: 8, .. }) => true,
            Ok(Integer { bytes: 4, .. }) => false,
            Ok(Integer { bytes, .. }) => return Err(refuse(format!("has {}-bit items", 8 * bytes))),
            Err(format) => return Err(refuse(format!("has items of format {format:?}"))),
        };
        Room::behind(&view, view.len()?, wide)
    }

    fn behind(view: &Bound<'py, PyMemoryView>, len: usize, wide: bool) -> PyResult<Room<'py>> {
        let py = view.py();
        if len == 0 {
            return Ok(Room { bytes: None, len, wide }); // without items a view cannot be cast
        }
        let bytes = view.call_method1(intern!(py, "cast"), (intern!(py, "B"),))?;
        Ok(Room { bytes: Some(bytes), len, wide })
    }

    /// An array of numpy's own memory for so many int64. Raises `KVCachedConfigError` where numpy is not installed.
    pub fn numpy(py: Python<'py>, len: usize) -> PyResult<(Room<'py>, Bound<'py, PyAny>)> {
        static EMPTY: PyOnceLock<(Py<PyAny>, Py<PyAny>)> = PyOnceLock::new();
        let (empty, int64) = EMPTY.get_or_try_init(py, || {
            let numpy = py.import("numpy").map_err(|error| {
                let why = "alloc_array needs numpy: install it, or use alloc or alloc_into".to_owned();
                let ours = errors::config(py, why);
                ours.set_cause(py, Some(error));
                ours
            })?;
            let int64 = numpy.call_method1("dtype", ("int64",))?;
            PyResult::Ok((numpy.getattr("empty")?.unbind(), int64.unbind()))
        })?;
        let array = empty.bind(py).call1((len, int64))?;
        let view = PyMemoryView::from(&array)?;
        Ok((Room::behind(&view, len, true)?, array))
    }

    /// Writes `ids`, which must be as many as the array takes.
    pub fn fill(&self, py: Python<'py>, ids: &[u32]) -> PyResult<()> {
        let Some(room) = &self.bytes else { return Ok(()) };
        let size = if self.wide { 8 } else { 4 };
        let bytes = PyBytes::new_with(py, ids.len() * size, |bytes| {
            if self.wide {
                let (items, _) = bytes.as_chunks_mut::<8>();
                items.iter_mut().zip(ids).for_each(|(item, &id)| *item = u64::from(id).to_ne_bytes());
            } else {
                let (items, _) = bytes.as_chunks_mut::<4>();
                items.iter_mut().zip(ids).for_each(|(item, &id)| *item = id.to_ne_bytes());
            }
            Ok(())
        })?;
        room.set_item(PySlice::full(py), bytes)
    }
}
