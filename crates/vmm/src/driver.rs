//! What physical memory can be asked for, whoever provides it.

use std::fmt;
use std::str::FromStr;

use thiserror::Error;

/// Where memory comes from. Written as engines write it: `cuda:1`, `cuda` (device 0), `hip:1`, `hip`, `cpu`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Device {
    /// An NVIDIA GPU, by the ordinal that the driver gives it in this process.
    Cuda(u32),
    /// An AMD GPU, likewise.
    Hip(u32),
    /// Ordinary memory of this machine.
    Host,
}

impl fmt::Display for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Device::Cuda(ordinal) => write!(f, "cuda:{ordinal}"),
            Device::Hip(ordinal) => write!(f, "hip:{ordinal}"),
            Device::Host => f.write_str("cpu"),
        }
    }
}

/// A device name that is none.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("no such device: {name:?}; use \"cuda:N\", \"cuda\", \"hip:N\", \"hip\" or \"cpu\"")]
pub struct DeviceNameError {
    /// What was given.
    pub name: String,
}

impl FromStr for Device {
    type Err = DeviceNameError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let unknown = || DeviceNameError { name: name.to_owned() };
        let (backend, ordinal) = name.split_once(':').unwrap_or((name, "0"));
        let device = match backend {
            "cpu" if backend == name => return Ok(Device::Host),
            "cuda" => Device::Cuda,
            "hip" => Device::Hip,
            _ => return Err(unknown()),
        };
        // `u32::from_str` takes a sign, which no device name has.
        if !ordinal.bytes().all(|b| b.is_ascii_digit()) {
            return Err(unknown());
        }
        ordinal.parse().map(device).map_err(|_| unknown())
    }
}

/// Why a driver call did not do what was asked. A call that fails has changed nothing, save where a caller knows better.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum DriverError {
    /// There is no usable driver library.
    #[error("no driver: {why}")]
    NoDriver {
        /// The loader's own words.
        why: String,
    },
    /// The driver library lacks a function that is needed.
    #[error("the driver has no {call}: it is too old")]
    NoSymbol {
        /// The function.
        call: &'static str,
    },
    /// The memory, or the addresses, cannot be had now.
    #[error("out of memory: {call} of {bytes} bytes (code {code})")]
    OutOfMemory {
        /// The call that failed.
        call: &'static str,
        /// What it asked for, bytes.
        bytes: u64,
        /// The driver's code, or the errno.
        code: i32,
    },
    /// The call failed.
    #[error("{call} failed: {name} (code {code})")]
    Call {
        /// The call that failed.
        call: &'static str,
        /// The driver's code, or the errno.
        code: i32,
        /// The code in words.
        name: String,
    },
    /// The arguments break a law of the driver: a defect of the caller. The driver was not asked.
    #[error("{call} refused: {why}")]
    Misuse {
        /// The call that was refused.
        call: &'static str,
        /// The law.
        why: String,
    },
    /// The driver belongs to a process from which this one was forked.
    #[error("{call} refused: the driver was opened by process {owner}, and a fork cannot use it")]
    Forked {
        /// The call that was refused.
        call: &'static str,
        /// Process id of the owner.
        owner: u32,
    },
}

impl DriverError {
    /// Whether waiting and asking again may help.
    pub fn is_out_of_memory(&self) -> bool {
        matches!(self, DriverError::OutOfMemory { .. })
    }
}

/// Physical memory that a driver has created: a name for it, given out once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle(u64);

impl Handle {
    /// A handle under the driver's own number. Every driver refuses a number that it did not give out.
    pub const fn from_raw(raw: u64) -> Self {
        Handle(raw)
    }

    /// The driver's own number.
    pub const fn raw(self) -> u64 {
        self.0
    }
}

/// What the device may do with a mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Access {
    /// Read and write.
    ReadWrite,
    /// Read. A write is an error of the device, as where there is no memory.
    Read,
}

/// Memory of a device, bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemInfo {
    /// What may still be created.
    pub free: u64,
    /// What the device has, or what this backend may use of it.
    pub total: u64,
}

/// Virtual memory management of one device.
///
/// Sizes and addresses are multiples of [`granularity`](Driver::granularity). A handle is mapped whole, and once unless it
/// was shared. A driver refuses ([`DriverError::Misuse`]) addresses and handles that are not its own, so that calling it is safe;
/// *using* memory at an address is up to whoever dereferences it. Safe to call from any thread.
pub trait Driver: Send + Sync + fmt::Debug {
    /// The device.
    fn device(&self) -> Device;

    /// Smallest physical allocation, bytes.
    fn granularity(&self) -> u64;

    /// Reserves `bytes` of addresses without memory; returns the first. Fails with `OutOfMemory` or `Call`.
    fn reserve(&self, bytes: u64) -> Result<usize, DriverError>;

    /// Gives a whole reservation back. Nothing may be mapped in it.
    fn free(&self, address: usize, bytes: u64) -> Result<(), DriverError>;

    /// Takes `bytes` of physical memory that reads as zeros. Fails with `OutOfMemory` or `Call`.
    fn create(&self, bytes: u64) -> Result<Handle, DriverError>;

    /// Gives physical memory back. It may not be mapped.
    fn release(&self, handle: Handle) -> Result<(), DriverError>;

    /// Lets `handle` be mapped at any number of places from now on, all of them for reading only, so that it reads as zeros
    /// everywhere. It must never have been open for writing. A matter of the book alone: the device is not asked.
    fn share(&self, handle: Handle) -> Result<(), DriverError>;

    /// Puts all of `handle`, which has `bytes`, under a hole of a reservation. Not to be touched before `set_access`.
    fn map(&self, address: usize, bytes: u64, handle: Handle) -> Result<(), DriverError>;

    /// Says what the device may do with one mapping.
    fn set_access(&self, address: usize, bytes: u64, access: Access) -> Result<(), DriverError>;

    /// Fills mappings (address and bytes of each), all open for writing, with zeros, and waits for that. Work of others on the
    /// device is not waited for: the caller sees to it that none of it touches them.
    fn clear(&self, mappings: &[(usize, u64)]) -> Result<(), DriverError>;

    /// Makes one mapping a hole again. Does not wait for the device.
    fn unmap(&self, address: usize, bytes: u64) -> Result<(), DriverError>;

    /// Which piece of hardware it is, whatever number a process sees it under: `GPU-<uuid>` in hexadecimal groups, as
    /// `nvidia-smi -L` prints it, or `host`.
    fn identity(&self) -> Result<String, DriverError>;

    /// What the device has.
    fn mem_info(&self) -> Result<MemInfo, DriverError>;

    /// Waits for all work on the device that this process has submitted.
    fn synchronise(&self) -> Result<(), DriverError>;
}

/// A GPU's name by its UUID.
pub(crate) fn gpu_identity(uuid: [u8; 16]) -> String {
    let mut text = String::from("GPU");
    for (place, byte) in uuid.iter().enumerate() {
        if matches!(place, 0 | 4 | 6 | 8 | 10) {
            text.push('-');
        }
        text += &format!("{byte:02x}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn device_names_go_both_ways() {
        for (name, device) in [
            ("cpu", Device::Host),
            ("cuda:0", Device::Cuda(0)),
            ("cuda:17", Device::Cuda(17)),
            ("hip:0", Device::Hip(0)),
            ("hip:3", Device::Hip(3)),
        ] {
            assert_eq!(name.parse(), Ok(device));
            assert_eq!(device.to_string(), name);
        }
        assert_eq!("cuda".parse(), Ok(Device::Cuda(0)));
        assert_eq!("hip".parse(), Ok(Device::Hip(0)));
        let numbers =
            ["cuda:", "cuda:-1", "cuda:+1", "cuda:1 ", "cuda:4294967296", "hip:", "hip:-1", "hip:0:1"];
        for bad in numbers.into_iter().chain(["", ":", ":0", "CPU", "cpu:0", "rocm:0", "hi"]) {
            let said = bad.parse::<Device>().unwrap_err().to_string();
            assert!(said.contains(&format!("{bad:?}")), "{said}");
            assert!(said.contains("\"cuda:N\"") && said.contains("\"hip:N\""), "{said}");
        }
    }

    #[test]
    fn a_uuid_is_written_as_nvidia_smi_does() {
        let uuid = *b"\x00\x01\x02\x03\x04\x05\x06\x07\x08\x09\x0a\x0b\x0c\x0d\xfe\xff";
        assert_eq!(gpu_identity(uuid), "GPU-00010203-0405-0607-0809-0a0b0c0dfeff");
    }

    #[test]
    fn errors_name_call_and_code() {
        let oom = DriverError::OutOfMemory { call: "cuMemCreate", bytes: 4096, code: 2 };
        assert!(oom.is_out_of_memory());
        assert_eq!(oom.to_string(), "out of memory: cuMemCreate of 4096 bytes (code 2)");
        let call = DriverError::Call { call: "cuMemMap", code: 1, name: "CUDA_ERROR_INVALID_VALUE".into() };
        assert!(!call.is_out_of_memory());
        assert_eq!(call.to_string(), "cuMemMap failed: CUDA_ERROR_INVALID_VALUE (code 1)");
    }
}
