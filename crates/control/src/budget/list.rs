//! All budgets of a directory, as others see them.

use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use super::file::{device_of, file_name};
use super::layout::{BUDGET_BYTES, BudgetRecord, Slot, check};
use super::share::{lives, now_ns};
use crate::directory::{Directory, read_copy};
use crate::error::{ControlError, RecordError};
use crate::mapping::Mapped;
use crate::text::check_name;

/// One entry of [`budgets`].
#[derive(Debug)]
pub enum BudgetListed {
    /// A device that instances share.
    Budget(BudgetView),
    /// A file that is no budget record of this version.
    Unreadable {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        why: RecordError,
    },
}

/// A device's budget at the moment of reading, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BudgetView {
    /// The device.
    pub device: String,
    /// What all instances may have together.
    pub budget_bytes: u64,
    /// Live instances.
    pub members: Vec<MemberView>,
}

/// One instance's part of a budget, bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemberView {
    /// Name of the instance.
    pub name: String,
    /// Charged to it.
    pub granted_bytes: u64,
    /// Guaranteed to it.
    pub min_bytes: u64,
    /// Refused, and still waited for.
    pub shortage_bytes: u64,
    /// What it could give back.
    pub givable_bytes: u64,
}

impl BudgetView {
    /// What is charged to all instances.
    pub fn granted_bytes(&self) -> u64 {
        self.sum(|member| member.granted_bytes)
    }

    /// What nobody has, whatever is guaranteed.
    pub fn free_bytes(&self) -> u64 {
        self.budget_bytes.saturating_sub(self.granted_bytes())
    }

    /// What instances were refused and wait for.
    pub fn shortage_bytes(&self) -> u64 {
        self.sum(|member| member.shortage_bytes)
    }

    fn sum(&self, bytes: impl Fn(&MemberView) -> u64) -> u64 {
        self.members.iter().fold(0, |sum, member| sum.saturating_add(bytes(member)))
    }
}

/// All budgets whose records lie in `dir`, by device; none where there is no such directory.
///
/// # Errors
///
/// [`ControlError`] when the directory is not ours alone or cannot be read. A single bad file is [`BudgetListed::Unreadable`].
pub fn budgets(dir: &Path) -> Result<Vec<BudgetListed>, ControlError> {
    let Some(directory) = Directory::open(dir)? else { return Ok(Vec::new()) };
    let names = directory.file_names().map_err(|error| ControlError::io("read directory", dir, error))?;
    let devices = names.iter().filter_map(|name| device_of(name)).filter(|device| check_name(device).is_ok());
    let mut listed = Vec::new();
    for device in devices {
        match look_at(&directory, device) {
            Ok(None) => {}
            Ok(Some(view)) => listed.push(BudgetListed::Budget(view)),
            Err(why) => {
                listed.push(BudgetListed::Unreadable { path: directory.join(&file_name(device)), why });
            }
        }
    }
    Ok(listed)
}

/// None for a file that went while we looked, and one by which nobody lives.
fn look_at(directory: &Directory, device: &str) -> Result<Option<BudgetView>, RecordError> {
    let Some(file) = directory.open_file_to_write(&file_name(device))? else { return Ok(None) };
    check(&read_copy(&file, BUDGET_BYTES)?, device)?;
    let mapped = Mapped::<BudgetRecord>::new(&file)?;
    let (record, now) = (mapped.record(), now_ns());
    let live = record.slots.iter().filter(|slot| slot.is_taken() && lives(directory, slot));
    let members: Vec<MemberView> = live.map(|slot: &Slot| member(slot, now)).collect();
    let budget_bytes = record.budget_bytes.load(Ordering::Relaxed);
    // A file that the last instance left when it was killed says nothing.
    Ok((!members.is_empty()).then(|| BudgetView { device: device.to_owned(), budget_bytes, members }))
}

fn member(slot: &Slot, now: u64) -> MemberView {
    let member = slot.member(now);
    MemberView {
        name: slot.owner().0,
        granted_bytes: member.granted,
        min_bytes: member.min,
        shortage_bytes: member.shortage,
        givable_bytes: member.givable,
    }
}
