//! What the records of a directory say at one moment.
//!
//! Serialised as it is for `--json`, which programs read: fields are added, never renamed or removed.

use std::io::Write;
use std::path::Path;

use kvcached_control::{BudgetListed, BudgetView, ControlError, InstanceView, Listed, MemberView, PoolView};
use serde::Serialize;

/// All instances and all budgets.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Snapshot {
    pub(crate) instances: Vec<Instance>,
    pub(crate) budgets: Vec<Budget>,
    pub(crate) unreadable: Vec<Unreadable>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Instance {
    pub(crate) name: String,
    pub(crate) engine: String,
    pub(crate) pid: u32,
    pub(crate) device: String,
    pub(crate) start_unix_ns: u64,
    pub(crate) heartbeat: u64,
    #[serde(flatten)]
    pub(crate) total: Figures,
    /// None: no limit.
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) min_bytes: u64,
    /// Number of the change that brought the two.
    pub(crate) terms_revision: u64,
    /// What came of the latest change.
    pub(crate) outcome: &'static str,
    pub(crate) cached_bytes: u64,
    pub(crate) shortage_bytes: u64,
    pub(crate) pools: Vec<Pool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Pool {
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) figures: Figures,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Figures {
    pub(crate) used_bytes: u64,
    pub(crate) reserved_bytes: u64,
    pub(crate) virtual_bytes: u64,
    pub(crate) quarantined_bytes: u64,
}

/// What the instances on one device share.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Budget {
    pub(crate) device: String,
    pub(crate) budget_bytes: u64,
    pub(crate) granted_bytes: u64,
    pub(crate) free_bytes: u64,
    pub(crate) shortage_bytes: u64,
    pub(crate) members: Vec<Member>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Member {
    pub(crate) name: String,
    pub(crate) min_bytes: u64,
    pub(crate) granted_bytes: u64,
    pub(crate) shortage_bytes: u64,
    pub(crate) givable_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Unreadable {
    pub(crate) path: String,
    pub(crate) why: String,
}

/// Reads all records of `dir`.
pub(crate) fn look(dir: &Path) -> Result<Snapshot, ControlError> {
    let mut snapshot = Snapshot::default();
    for listed in kvcached_control::list(dir)? {
        match listed {
            Listed::Instance(view) => snapshot.instances.push(view.into()),
            Listed::Unreadable { path, why } => snapshot.unreadable.push(Unreadable::new(&path, &why)),
        }
    }
    for listed in kvcached_control::budgets(dir)? {
        match listed {
            BudgetListed::Budget(view) => snapshot.budgets.push(view.into()),
            BudgetListed::Unreadable { path, why } => snapshot.unreadable.push(Unreadable::new(&path, &why)),
        }
    }
    Ok(snapshot)
}

impl Snapshot {
    /// Without the instances that have another name, and the budgets of which none of the rest is a member. No names: all.
    pub(crate) fn only(mut self, names: &[String]) -> Self {
        if !names.is_empty() {
            self.instances.retain(|instance| names.contains(&instance.name));
            self.budgets.retain(|budget| budget.members.iter().any(|member| names.contains(&member.name)));
        }
        self
    }

    pub(crate) fn instance(&self, name: &str) -> Option<&Instance> {
        self.instances.iter().find(|instance| instance.name == name)
    }

    /// Most bytes that the instance holds on one of its devices.
    pub(crate) fn held_by(&self, name: &str) -> u64 {
        let granted =
            self.budgets.iter().flat_map(|budget| &budget.members).filter(|member| member.name == name);
        let held = self.instance(name).map(Instance::held_bytes);
        granted.map(|member| member.granted_bytes).chain(held).max().unwrap_or(0)
    }

    /// The budgets that the instance lives by, one a device.
    pub(crate) fn budgets_of(&self, name: &str) -> impl Iterator<Item = &Budget> {
        self.budgets.iter().filter(move |budget| budget.members.iter().any(|member| member.name == name))
    }

    /// The smallest of them: what is charged is charged on each of its devices.
    pub(crate) fn budget_of(&self, name: &str) -> Option<&Budget> {
        self.budgets_of(name).min_by_key(|budget| budget.budget_bytes)
    }

    /// Says on `err` what could not be read. A warning never costs the result.
    pub(crate) fn warn(&self, err: &mut dyn Write) {
        for Unreadable { path, why } in &self.unreadable {
            let _ = writeln!(err, "warning: {path} is not shown: {why}");
        }
    }
}

impl Instance {
    /// Memory that it holds.
    pub(crate) fn held_bytes(&self) -> u64 {
        self.total.used_bytes.saturating_add(self.total.reserved_bytes)
    }
}

impl Budget {
    /// What the minimums of the others leave to this one.
    pub(crate) fn unpromised_but_for(&self, name: &str) -> u64 {
        let others = self.members.iter().filter(|member| member.name != name).map(|member| member.min_bytes);
        self.budget_bytes.saturating_sub(others.fold(0, u64::saturating_add))
    }
}

impl Unreadable {
    fn new(path: &Path, why: &dyn std::fmt::Display) -> Self {
        Self { path: path.display().to_string(), why: why.to_string() }
    }
}

impl From<InstanceView> for Instance {
    fn from(view: InstanceView) -> Self {
        Self {
            total: (&view.total()).into(),
            limit_bytes: view.terms.limit_bytes,
            min_bytes: view.terms.min_bytes,
            terms_revision: view.revision,
            outcome: view.outcome.as_str(),
            cached_bytes: view.cached_bytes,
            shortage_bytes: view.shortage_bytes,
            pools: view
                .pools
                .iter()
                .map(|pool| Pool { name: pool.name.clone(), figures: pool.into() })
                .collect(),
            name: view.name,
            engine: view.engine,
            pid: view.pid,
            device: view.device,
            start_unix_ns: view.start_unix_ns,
            heartbeat: view.heartbeat,
        }
    }
}

impl From<BudgetView> for Budget {
    fn from(view: BudgetView) -> Self {
        Self {
            granted_bytes: view.granted_bytes(),
            free_bytes: view.free_bytes(),
            shortage_bytes: view.shortage_bytes(),
            device: view.device,
            budget_bytes: view.budget_bytes,
            members: view.members.into_iter().map(Member::from).collect(),
        }
    }
}

impl From<MemberView> for Member {
    fn from(view: MemberView) -> Self {
        Self {
            name: view.name,
            min_bytes: view.min_bytes,
            granted_bytes: view.granted_bytes,
            shortage_bytes: view.shortage_bytes,
            givable_bytes: view.givable_bytes,
        }
    }
}

impl From<&PoolView> for Figures {
    fn from(pool: &PoolView) -> Self {
        Self {
            used_bytes: pool.used_bytes,
            reserved_bytes: pool.reserved_bytes,
            virtual_bytes: pool.virtual_bytes,
            quarantined_bytes: pool.quarantined_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn budget(device: &str, budget_bytes: u64, members: &[&str]) -> Budget {
        let member = |name: &&str| Member { name: (*name).to_owned(), ..Member::default() };
        let members = members.iter().map(member).collect();
        Budget { device: device.to_owned(), budget_bytes, members, ..Budget::default() }
    }

    fn instance(name: &str) -> Instance {
        Instance { name: name.to_owned(), ..Instance::default() }
    }

    #[test]
    fn names_choose_instances_and_their_budgets() {
        let snapshot = Snapshot {
            instances: vec![instance("a"), instance("b")],
            budgets: vec![budget("x", 200, &["a"]), budget("y", 100, &["a", "b"]), budget("z", 50, &["c"])],
            unreadable: Vec::new(),
        };
        let devices = |of: &Snapshot| of.budgets.iter().map(|b| b.device.clone()).collect::<Vec<_>>();
        assert_eq!(devices(&snapshot.clone().only(&[])), ["x", "y", "z"]);
        let only_b = snapshot.clone().only(&["b".to_owned()]);
        assert_eq!((only_b.instances.len(), devices(&only_b)), (1, vec!["y".to_owned()]));
        assert_eq!(snapshot.budget_of("a").unwrap().device, "y");
        assert_eq!(snapshot.budget_of("d"), None);
    }
}
