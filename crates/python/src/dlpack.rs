//! DLPack: the C structs of dlpack.h (versions before and after 1.0) and a capsule over one buffer.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::sync::Arc;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi;
use pyo3::prelude::*;

/// `kDLCPU` of dlpack.h.
pub const CPU: i32 = 1;
/// `kDLCUDA` of dlpack.h.
pub const CUDA: i32 = 2;
/// `kDLROCM` of dlpack.h. PyTorch for ROCm calls such a device "cuda:N" and takes this kind for it.
pub const ROCM: i32 = 10;

#[repr(C)]
struct Device {
    kind: i32,
    id: i32,
}

#[repr(C)]
struct DataType {
    code: u8,
    bits: u8,
    lanes: u16,
}

const INT8: DataType = DataType { code: 0, bits: 8, lanes: 1 }; // kDLInt

#[repr(C)]
struct Tensor {
    data: *mut c_void,
    device: Device,
    ndim: i32,
    dtype: DataType,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLManagedTensor`, in a capsule named "dltensor".
#[repr(C)]
struct Legacy {
    tensor: Tensor,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Legacy)>,
}

/// `DLManagedTensorVersioned`, in a capsule named "dltensor_versioned".
#[repr(C)]
struct Versioned {
    major: u32,
    minor: u32,
    manager: *mut c_void,
    deleter: Option<unsafe extern "C" fn(*mut Versioned)>,
    flags: u64,
    tensor: Tensor,
}

/// A managed struct of either kind.
trait Managed: Sized {
    const NAME: &'static CStr;
    fn new(tensor: Tensor) -> Self;
    fn tensor(&mut self) -> &mut Tensor;
}

impl Managed for Legacy {
    const NAME: &'static CStr = c"dltensor";
    fn new(tensor: Tensor) -> Self {
        Legacy { tensor, manager: std::ptr::null_mut(), deleter: Some(delete::<Legacy>) }
    }
    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

impl Managed for Versioned {
    const NAME: &'static CStr = c"dltensor_versioned";
    fn new(tensor: Tensor) -> Self {
        let manager = std::ptr::null_mut();
        Versioned { major: 1, minor: 0, manager, deleter: Some(delete::<Versioned>), flags: 0, tensor }
    }
    fn tensor(&mut self) -> &mut Tensor {
        &mut self.tensor
    }
}

/// What the consumer holds: the struct it reads, the shape and strides that this points at, and
/// what keeps the memory alive.
#[repr(C)]
struct Export<M> {
    managed: M, // first: the consumer's pointer to M is a pointer to the Export
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    _keep: Arc<dyn Any + Send + Sync>,
}

/// The consumer is done with the tensor.
unsafe extern "C" fn delete<M>(managed: *mut M) {
    if !managed.is_null() {
        // SAFETY: `managed` is the first field of a repr(C) Export<M> that `into_capsule` leaked, and a
        // consumer calls its deleter once.
        drop(unsafe { Box::from_raw(managed.cast::<Export<M>>()) });
    }
}

/// The capsule goes. A consumer that took the tensor has renamed it; else the tensor goes too.
unsafe extern "C" fn capsule_gone<M: Managed>(capsule: *mut ffi::PyObject) {
    // SAFETY: CPython calls this with the capsule and the interpreter attached; the pointer under this
    // name is the one that `into_capsule` put there.
    unsafe {
        if ffi::PyCapsule_IsValid(capsule, M::NAME.as_ptr()) == 1 {
            delete(ffi::PyCapsule_GetPointer(capsule, M::NAME.as_ptr()).cast::<M>());
        }
    }
}

fn into_capsule<M: Managed>(
    py: Python<'_>,
    tensor: Tensor,
    shape: Box<[i64]>,
    strides: Box<[i64]>,
    keep: Arc<dyn Any + Send + Sync>,
) -> PyResult<Py<PyAny>> {
    let mut export = Box::new(Export { managed: M::new(tensor), shape, strides, _keep: keep });
    let (shape, strides) = (export.shape.as_mut_ptr(), export.strides.as_mut_ptr());
    let tensor = export.managed.tensor();
    (tensor.shape, tensor.strides) = (shape, strides);
    let raw = Box::into_raw(export);
    // SAFETY: `raw` lives until the capsule's destructor or its consumer calls the deleter.
    unsafe {
        let capsule = ffi::PyCapsule_New(raw.cast(), M::NAME.as_ptr(), Some(capsule_gone::<M>));
        if capsule.is_null() {
            delete(raw.cast::<M>());
            return Err(PyErr::fetch(py));
        }
        Ok(Bound::from_owned_ptr(py, capsule).unbind())
    }
}

/// An int8 tensor of this shape and these strides, in elements, at `address` on `device` (kind, ordinal), keeping `keep`
/// alive.
pub fn bytes(
    py: Python<'_>,
    address: usize,
    (shape, strides): (&[u64], &[u64]),
    (kind, id): (i32, i32),
    versioned: bool,
    keep: Arc<dyn Any + Send + Sync>,
) -> PyResult<Py<PyAny>> {
    let signed = |numbers: &[u64]| {
        let numbers: Result<Box<[i64]>, _> = numbers.iter().map(|n| i64::try_from(*n)).collect();
        numbers.map_err(|_| PyBufferError::new_err("too long for DLPack"))
    };
    let (shape, strides) = (signed(shape)?, signed(strides)?);
    let tensor = Tensor {
        data: std::ptr::with_exposed_provenance_mut(address),
        device: Device { kind, id },
        ndim: shape.len() as i32,
        dtype: INT8,
        shape: std::ptr::null_mut(),
        strides: std::ptr::null_mut(),
        byte_offset: 0,
    };
    if versioned {
        into_capsule::<Versioned>(py, tensor, shape, strides, keep)
    } else {
        into_capsule::<Legacy>(py, tensor, shape, strides, keep)
    }
}
