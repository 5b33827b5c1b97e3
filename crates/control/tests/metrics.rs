//! What instances count: in a sidecar that comes and goes with the record, and in the form that monitoring takes.
#![allow(clippy::unwrap_used)]

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::Duration;

use kvcached_control::{
    BudgetShare, Counter, InstanceRecord, InstanceView, Kind, Listed, Metrics, RecordError, Sample, Terms,
    Timer, Value, families, list, metrics, remove,
};

fn home() -> (tempfile::TempDir, PathBuf) {
    let home = tempfile::tempdir().unwrap();
    let dir = home.path().join("records");
    (home, dir)
}

fn start(dir: &Path, name: &str) -> InstanceRecord {
    InstanceRecord::create(dir, name, "vllm 0.29.0", "cuda:0", Terms::default()).unwrap()
}

fn view(dir: &Path, name: &str) -> InstanceView {
    let found = list(dir).unwrap().into_iter().find_map(|listed| match listed {
        Listed::Instance(view) if view.name == name => Some(view),
        _ => None,
    });
    found.unwrap()
}

fn files(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn what_is_counted_is_read_figure_by_figure() {
    let (_home, dir) = home();
    let record = start(&dir, "llama");
    let row = record.pool_row("kv").unwrap();
    for (n, counter) in (1..).zip(Counter::ALL) {
        record.metrics().add(counter, n);
        row.metrics().add(counter, 100);
    }
    for (n, timer) in (1..).zip(Timer::ALL) {
        record.metrics().clone().time(timer, Duration::from_millis(n));
        record.metrics().time(timer, Duration::from_secs(100));
    }
    let view = metrics(&view(&dir, "llama")).unwrap().unwrap();
    for (n, counter) in (1..).zip(Counter::ALL) {
        assert_eq!(view.counter(counter), 100 + n, "{counter:?}");
    }
    for (n, timer) in (1..).zip(Timer::ALL) {
        let times = view.timer(timer);
        assert_eq!((times.count(), times.sum), (2, Duration::from_millis(n) + Duration::from_secs(100)));
        assert_eq!(times.buckets.last(), Some(&(None, 1)));
        let (bound, _) = times.buckets.iter().find(|(_, count)| *count > 0).unwrap();
        assert!(
            bound.unwrap() >= Duration::from_millis(n) && bound.unwrap() < Duration::from_millis(2 * n + 1)
        );
    }
}

#[test]
fn who_counts_for_nobody_counts_nothing() {
    let nobody = Metrics::default();
    nobody.add(Counter::PagesMapped, 1);
    nobody.time(Timer::Map, Duration::ZERO);
}

#[test]
fn a_sidecar_goes_with_its_record_however_that_ends() {
    let (_home, dir) = home();
    let record = start(&dir, "a");
    assert_eq!(files(&dir), ["a.kvc", "a.kvm"]);
    let seen = view(&dir, "a");
    record.close();
    assert_eq!(files(&dir), [""; 0]);
    assert_eq!(metrics(&seen).unwrap(), None);
    // Left by the dead: files whose lock nobody holds.
    let record = start(&dir, "a");
    let left: Vec<_> = ["a.kvc", "a.kvm"].map(|name| (name, std::fs::read(dir.join(name)).unwrap())).into();
    record.close();
    let leave = || left.iter().for_each(|(name, bytes)| std::fs::write(dir.join(name), bytes).unwrap());
    leave();
    assert!(list(&dir).unwrap().is_empty());
    assert_eq!(files(&dir), [""; 0], "by whoever lists");
    leave();
    assert!(remove(&dir, "a").unwrap());
    assert!(!files(&dir).contains(&"a.kvm".to_owned()), "by kvctl delete");
    leave();
    let later = start(&dir, "a");
    assert_eq!(metrics(&view(&dir, "a")).unwrap().unwrap().counter(Counter::PagesMapped), 0);
    drop(later);
    assert!(!files(&dir).iter().any(|name| name.starts_with("a.")), "by the next of that name");
}

#[test]
fn a_live_sidecar_stays() {
    let (_home, dir) = home();
    let record = start(&dir, "a");
    for _ in 0..3 {
        list(&dir).unwrap();
        assert!(remove(&dir, "a").is_err());
    }
    assert_eq!(files(&dir).iter().filter(|name| name.ends_with(".kvm")).count(), 1);
    record.metrics().add(Counter::Evictions, 3);
    assert_eq!(metrics(&view(&dir, "a")).unwrap().unwrap().counter(Counter::Evictions), 3);
}

#[test]
fn what_is_no_sidecar_is_an_error_and_stops_nobody() {
    let (_home, dir) = home();
    let record = start(&dir, "a");
    let seen = view(&dir, "a");
    let path = dir.join("a.kvm");
    std::fs::remove_file(&path).unwrap();
    assert_eq!(metrics(&seen).unwrap(), None);
    std::fs::write(&path, b"something else").unwrap();
    assert!(matches!(metrics(&seen), Err(RecordError::Truncated { bytes: 14 })));
    let found = families(&dir, |_| true).unwrap();
    assert!(found.iter().all(|family| family.kind == Kind::Gauge), "what the record shows");
    record.metrics().add(Counter::PagesMapped, 1);
}

#[test]
fn a_name_that_is_taken_leaves_the_holders_sidecar_alone() {
    let (_home, dir) = home();
    let record = start(&dir, "a");
    record.metrics().add(Counter::Evictions, 1);
    assert!(InstanceRecord::create(&dir, "a", "e", "cpu", Terms::default()).is_err());
    assert_eq!(metrics(&view(&dir, "a")).unwrap().unwrap().counter(Counter::Evictions), 1);
    assert_eq!(files(&dir).iter().filter(|name| name.starts_with("a.")).count(), 2);
}

#[test]
fn families_show_every_figure_of_every_instance_once() {
    let (_home, dir) = home();
    let terms = Terms { limit_bytes: Some(70), min_bytes: 5 };
    let a = std::sync::Arc::new(InstanceRecord::create(&dir, "a", "vllm 0.29.0", "cuda:0", terms).unwrap());
    let b = start(&dir, "b");
    let share = BudgetShare::join(&dir, &a, "GPU-1", 100, None).unwrap();
    share.take(30).unwrap();
    a.pool_row("kv").unwrap().set(20, 10, 90, 0);
    let row = a.pool_row("kv").unwrap();
    row.set(20, 10, 90, 0);
    b.metrics().add(Counter::RefusedByLimit, 4);
    let found = families(&dir, |_| true).unwrap();
    let names: BTreeSet<_> = found.iter().map(|family| family.name.as_str()).collect();
    assert_eq!(names.len(), found.len(), "a family is in one piece");
    for family in &found {
        let labels: BTreeSet<_> = family.samples.iter().map(|sample| &sample.labels).collect();
        assert!(labels.len() == family.samples.len() && !labels.is_empty(), "{}", family.name);
        assert!(family.name.starts_with("kvcached_") && !family.help.is_empty());
    }
    let value = |name: &str, wanted: &[(&str, &str)]| {
        let family = found.iter().find(|family| family.name == name)?;
        let has = |sample: &Sample, label: &str, value: &str| {
            sample.labels.iter().any(|(name, found)| *name == label && found == value)
        };
        let matches = family
            .samples
            .iter()
            .find(|sample| wanted.iter().all(|(label, value)| has(sample, label, value)));
        Some(matches?.value.clone())
    };
    let number = |n| Some(Value::Number(n));
    assert_eq!(
        value("kvcached_used_bytes", &[("instance", "a"), ("pool", "kv"), ("device", "cuda:0")]),
        number(20)
    );
    assert_eq!(value("kvcached_limit_bytes", &[("instance", "a")]), number(70));
    assert_eq!(value("kvcached_limit_bytes", &[("instance", "b")]), None, "without a limit");
    assert_eq!(value("kvcached_min_bytes", &[("instance", "b")]), number(0));
    assert_eq!(value("kvcached_budget_bytes", &[("device", "GPU-1")]), number(100));
    assert_eq!(value("kvcached_budget_granted_bytes", &[]), number(30));
    assert_eq!(value("kvcached_budget_free_bytes", &[]), number(70));
    assert_eq!(value("kvcached_refusals_total", &[("instance", "b"), ("by", "limit")]), number(4));
    for name in Counter::ALL.map(|counter| counter.named().name) {
        assert!(
            value(&format!("kvcached_{name}"), &[("instance", "a"), ("engine", "vllm 0.29.0")]).is_some()
        );
    }
    for name in Timer::ALL.map(|timer| timer.named().name) {
        let times = value(&format!("kvcached_{name}"), &[("instance", "b")]);
        assert!(matches!(times, Some(Value::Times(times)) if times.count() == 0));
    }
    let of_b = families(&dir, |view| view.name == "b").unwrap();
    assert!(
        of_b.iter()
            .flat_map(|family| &family.samples)
            .all(|s| s.labels.contains(&("instance", "b".to_owned())))
    );
    assert!(!of_b.iter().any(|family| family.name.contains("budget")), "of which b has no part");
}
