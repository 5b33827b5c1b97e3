//! All that is known of all instances, in the form in which monitoring takes it.
//!
//! Names and types follow <https://prometheus.io/docs/practices/naming/>: base units, counters in `_total`.

use std::path::Path;

use crate::budget::{BudgetListed, BudgetView, budgets};
use crate::error::ControlError;
use crate::list::{Listed, list};
use crate::metrics::{Counter, MetricsView, Named, Timer, TimerView, metrics};
use crate::view::{InstanceView, PoolView};

/// Figures of one meaning.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Family {
    /// As `kvcached_used_bytes`.
    pub name: String,
    /// What it means: one sentence.
    pub help: &'static str,
    /// What may be done with the figures.
    pub kind: Kind,
    /// At least one.
    pub samples: Vec<Sample>,
}

/// What may be done with figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// Rises and falls.
    Gauge,
    /// Rises while its instance lives.
    Counter,
    /// Seconds, in buckets.
    Histogram,
}

impl Kind {
    /// The name, as Prometheus has it.
    pub fn as_str(self) -> &'static str {
        match self {
            Kind::Gauge => "gauge",
            Kind::Counter => "counter",
            Kind::Histogram => "histogram",
        }
    }
}

/// One figure.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Sample {
    /// Names and values.
    pub labels: Vec<(&'static str, String)>,
    /// What it is now.
    pub value: Value,
}

/// What a figure is.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Of a gauge or a counter.
    Number(u64),
    /// Of a histogram.
    Times(TimerView),
}

type PoolFigure = (&'static str, &'static str, fn(&PoolView) -> u64);
type InstanceFigure = (&'static str, &'static str, fn(&InstanceView) -> Option<u64>);
type BudgetFigure = (&'static str, &'static str, fn(&BudgetView) -> u64);

const POOL_FIGURES: [PoolFigure; 4] = [
    ("used_bytes", "Memory under pages that hold blocks.", |pool| pool.used_bytes),
    ("reserved_bytes", "Memory under pages that hold none, and kept beside them.", |pool| {
        pool.reserved_bytes
    }),
    ("virtual_bytes", "Reserved addresses.", |pool| pool.virtual_bytes),
    ("quarantined_bytes", "Memory lost to pages whose mapping is not known.", |pool| pool.quarantined_bytes),
];

const INSTANCE_FIGURES: [InstanceFigure; 4] = [
    ("limit_bytes", "The most memory that the instance may have; absent without a limit.", |instance| {
        instance.terms.limit_bytes
    }),
    ("min_bytes", "Memory that is guaranteed to the instance.", |instance| Some(instance.terms.min_bytes)),
    ("shortage_bytes", "Memory that the instance was refused and waits for.", |instance| {
        Some(instance.shortage_bytes)
    }),
    ("cached_bytes", "Of the used memory, what holds nothing but cached prefixes.", |instance| {
        Some(instance.cached_bytes)
    }),
];

const BUDGET_FIGURES: [BudgetFigure; 4] = [
    ("budget_bytes", "What all instances on a device may have together.", |budget| budget.budget_bytes),
    ("budget_granted_bytes", "What of the budget instances have.", BudgetView::granted_bytes),
    ("budget_free_bytes", "What of the budget nobody has.", BudgetView::free_bytes),
    ("budget_shortage_bytes", "What instances were refused and wait for.", BudgetView::shortage_bytes),
];

/// What all instances of `dir` show, those for which `wanted` holds, and the budgets that they live by. Families without a figure are
/// left out.
///
/// # Errors
///
/// [`ControlError`] when the directory is not ours alone or cannot be read. A file that cannot be read has no figures.
pub fn families(dir: &Path, wanted: impl Fn(&InstanceView) -> bool) -> Result<Vec<Family>, ControlError> {
    let mut instances = vec![];
    for listed in list(dir)? {
        if let Listed::Instance(view) = listed
            && wanted(&view)
        {
            let counted = metrics(&view).ok().flatten();
            instances.push((view, counted));
        }
    }
    let lives_by = |budget: &BudgetView| {
        budget.members.iter().any(|member| instances.iter().any(|(view, _)| view.name == member.name))
    };
    let budgets = budgets(dir)?.into_iter().filter_map(|listed| match listed {
        BudgetListed::Budget(view) if lives_by(&view) => Some(view),
        _ => None,
    });
    let budgets: Vec<BudgetView> = budgets.collect();
    Ok(compose(&instances, &budgets))
}

fn compose(instances: &[(InstanceView, Option<MetricsView>)], budgets: &[BudgetView]) -> Vec<Family> {
    let mut families = vec![];
    let mut add = |kind, named: Named, samples: Vec<Sample>| {
        let name = format!("kvcached_{}", named.name);
        match families.last_mut() {
            _ if samples.is_empty() => {}
            Some(Family { name: last, samples: of_last, .. }) if *last == name => of_last.extend(samples),
            _ => families.push(Family { name, help: named.help, kind, samples }),
        }
    };
    let gauge = |name, help| Named { name, help, label: None };
    for (name, help, figure) in POOL_FIGURES {
        let pools = instances.iter().flat_map(|(view, _)| view.pools.iter().map(move |pool| (view, pool)));
        let samples = pools.map(|(view, pool)| {
            let mut labels = of(view);
            labels.push(("pool", pool.name.clone()));
            Sample { labels, value: Value::Number(figure(pool)) }
        });
        add(Kind::Gauge, gauge(name, help), samples.collect());
    }
    for (name, help, figure) in INSTANCE_FIGURES {
        let samples = instances
            .iter()
            .filter_map(|(view, _)| Some(Sample { labels: of(view), value: Value::Number(figure(view)?) }));
        add(Kind::Gauge, gauge(name, help), samples.collect());
    }
    for (name, help, figure) in BUDGET_FIGURES {
        let samples = budgets.iter().map(|budget| Sample {
            labels: vec![("device", budget.device.clone())],
            value: Value::Number(figure(budget)),
        });
        add(Kind::Gauge, gauge(name, help), samples.collect());
    }
    let counted = |named: Named, value: &dyn Fn(&MetricsView) -> Value| -> Vec<Sample> {
        let counting = instances.iter().filter_map(|(view, counted)| Some((view, counted.as_ref()?)));
        let sample = |(view, counted)| {
            let mut labels = of(view);
            labels.extend(named.label.map(|(name, value)| (name, value.to_owned())));
            Sample { labels, value: value(counted) }
        };
        counting.map(sample).collect()
    };
    for counter in Counter::ALL {
        let named = counter.named();
        add(Kind::Counter, named, counted(named, &|view| Value::Number(view.counter(counter))));
    }
    for timer in Timer::ALL {
        let named = timer.named();
        add(Kind::Histogram, named, counted(named, &|view| Value::Times(view.timer(timer).clone())));
    }
    families
}

fn of(view: &InstanceView) -> Vec<(&'static str, String)> {
    vec![("instance", view.name.clone()), ("engine", view.engine.clone()), ("device", view.device.clone())]
}
