//! Which backend serves a device, and the one driver that a process has of it.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::driver::{Device, Driver, DriverError};
use crate::gpu::Gpu;
use crate::{cuda, hip, host};

pub(crate) type Opened = HashMap<(u32, Device), Arc<dyn Driver>>;

static OPENED: Mutex<Option<Opened>> = Mutex::new(None);

/// The driver of `device`, opened once a process and kept until it ends.
///
/// Fails with `NoDriver` or `NoSymbol` where the machine has none, with `Call` where the driver refuses. A failure is not
/// remembered. A fork gets a driver of its own: the memory of its parent is not its to manage.
pub fn open(device: Device) -> Result<Arc<dyn Driver>, DriverError> {
    let mut opened = lock();
    let opened = opened.get_or_insert_default();
    let key = (std::process::id(), device);
    if let Some(driver) = opened.get(&key) {
        return Ok(Arc::clone(driver));
    }
    let driver: Arc<dyn Driver> = match device {
        Device::Cuda(ordinal) => Arc::new(Gpu::new(cuda::Cuda::open(ordinal)?)),
        Device::Hip(ordinal) => Arc::new(Gpu::new(hip::Hip::open(ordinal)?)),
        Device::Host => Arc::new(host::Host::new()?),
    };
    opened.insert(key, Arc::clone(&driver));
    Ok(driver)
}

/// Every driver of this process.
pub(crate) fn lock() -> MutexGuard<'static, Option<Opened>> {
    OPENED.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether `device` can be opened as far as can be told without starting the driver.
///
/// For a GPU: the library loads and has every function. Deliberately no `cuInit` or `hipInit`: a process that has started
/// the GPU's library can no longer fork a worker that uses it.
pub fn available(device: Device) -> Result<(), DriverError> {
    match device {
        Device::Host => Ok(()),
        Device::Cuda(_) => match cuda::missing_symbols()?.first() {
            None => Ok(()),
            Some(call) => Err(DriverError::NoSymbol { call }),
        },
        Device::Hip(_) => hip::available(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_is_opened_once() {
        let (a, b) = (open(Device::Host).unwrap(), open(Device::Host).unwrap());
        assert!(Arc::ptr_eq(&a, &b));
        assert_eq!(a.device(), Device::Host);
        available(Device::Host).unwrap();
    }
}
