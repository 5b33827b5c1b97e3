//! `kvctl limit`, `limit-percent` and `min`.

use std::io::Write;
use std::path::Path;
use std::time::Duration;

use kvcached_control::{Answered, ControlError, Outcome};
use serde::{Serialize, Serializer};

use crate::args::Answer;
use crate::size::{Percentage, binary};
use crate::table::limit;
use crate::view::{Budget, Snapshot, look};
use crate::wish::Wish;
use crate::{EXIT_FAILED, EXIT_OK, EXIT_UNSETTLED, Failure};

/// What became of a wish. Serialised as it is for `--json`: fields are added, never renamed or removed.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Report {
    name: String,
    asked: Wish,
    #[serde(serialize_with = "word")]
    outcome: Outcome,
    /// Number of the change, or of the one that stands in its way.
    revision: u64,
    /// In force.
    limit_bytes: Option<u64>,
    /// In force.
    min_bytes: u64,
    /// Held beyond the limit in force.
    over_bytes: u64,
    /// Of a refusal.
    why: Option<String>,
}

pub(crate) fn run(
    dir: &Path,
    name: &str,
    wish: Wish,
    answer: &Answer,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> Result<i32, Failure> {
    let report = ask(dir, name, wish, answer.wait)?;
    if answer.json {
        serde_json::to_writer_pretty(&mut *out, &report).map_err(std::io::Error::from)?;
        writeln!(out)?;
    } else if report.exit_code() == EXIT_FAILED {
        let _ = writeln!(err, "error: {}", report.sentence()); // nobody is left to tell
    } else {
        writeln!(out, "{}", report.sentence())?;
    }
    Ok(report.exit_code())
}

/// The limit that is this part of the budget that the instance lives by.
pub(crate) fn limit_of_budget(dir: &Path, name: &str, part: Percentage) -> Result<Wish, Failure> {
    let snapshot = look(dir)?;
    if snapshot.instance(name).is_none() {
        return Err(Failure::NoInstance(name.to_owned()));
    }
    let budget = snapshot.budget_of(name).ok_or_else(|| Failure::NoBudget(name.to_owned()))?;
    Ok(Wish::Limit(Some(part.of(budget.budget_bytes))))
}

pub(crate) fn ask(dir: &Path, name: &str, wish: Wish, wait: Duration) -> Result<Report, ControlError> {
    let answered = kvcached_control::ask(dir, name, wish.into(), wait)?;
    Ok(Report::new(name, wish, &answered, &look(dir)?))
}

impl Report {
    /// `after` is what records say now that it has answered.
    fn new(
        name: &str,
        asked: Wish,
        &Answered { revision, outcome, terms }: &Answered,
        after: &Snapshot,
    ) -> Self {
        let limit = terms.limit_bytes.unwrap_or(u64::MAX);
        Self {
            name: name.to_owned(),
            asked,
            outcome,
            revision,
            limit_bytes: terms.limit_bytes,
            min_bytes: terms.min_bytes,
            over_bytes: after.held_by(name).saturating_sub(limit),
            why: (outcome == Outcome::Rejected).then(|| why_rejected(name, asked, after)),
        }
    }

    pub(crate) fn exit_code(&self) -> i32 {
        match self.outcome {
            Outcome::Applied => EXIT_OK,
            Outcome::Deferred | Outcome::Unanswered => EXIT_UNSETTLED,
            _ => EXIT_FAILED,
        }
    }

    /// What is in force, and what is still to come.
    pub(crate) fn sentence(&self) -> String {
        let name = &self.name;
        let terms = format!("limit {}, minimum {}", limit(self.limit_bytes), binary(self.min_bytes));
        match self.outcome {
            Outcome::Applied => format!("applied: {name} has {terms}"),
            Outcome::Deferred if self.over_bytes > 0 => {
                let over = binary(self.over_bytes);
                format!(
                    "deferred: {name} has {terms}; it still holds {over} more, which goes as requests end"
                )
            }
            Outcome::Deferred => format!("deferred: {name} has {terms}, to be met as memory is given back"),
            Outcome::Rejected => {
                let why = self.why.as_deref().unwrap_or_default();
                format!("rejected: {name} keeps {terms}: {why}")
            }
            Outcome::Unanswered => {
                format!("unanswered: {name} has {terms}; what was asked comes into force when it answers")
            }
            _ => {
                format!("rejected: {name} was changed by somebody else meanwhile and has {terms}; ask again")
            }
        }
    }
}

fn word<S: Serializer>(outcome: &Outcome, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(outcome.as_str())
}

/// An instance says only that it refuses. What can be the reason shows in its record and in the budgets that it lives by.
fn why_rejected(name: &str, asked: Wish, after: &Snapshot) -> String {
    match asked {
        Wish::Limit(limit) => {
            let lost = after.instance(name).map_or(0, |instance| instance.total.quarantined_bytes);
            if limit.is_some_and(|limit| limit < lost) {
                return format!("{} are lost to quarantine, and no limit can be below that", binary(lost));
            }
        }
        Wish::Min(min) => {
            let left = |budget: &&Budget| budget.unpromised_but_for(name);
            if let Some(budget) = after.budgets_of(name).min_by_key(left).filter(|budget| left(budget) < min)
            {
                return format!(
                    "the minimums of other instances leave {} of the budget of {}",
                    binary(left(&budget)),
                    budget.device
                );
            }
        }
    }
    "its engine cannot".to_owned()
}

#[cfg(test)]
mod tests {
    use kvcached_control::Terms;

    use super::*;
    use crate::view::{Figures, Instance, Member};

    const GIB: u64 = 1 << 30;

    /// `llama` holds 5 GiB of a budget of 16 GiB, of which 12 GiB are guaranteed to others.
    fn after() -> Snapshot {
        let member = |name: &str, granted_bytes, min_bytes| Member {
            name: name.to_owned(),
            granted_bytes,
            min_bytes,
            ..Member::default()
        };
        let members = vec![member("llama", 5 * GIB, GIB), member("other", 0, 12 * GIB)];
        let total = Figures { used_bytes: 4 * GIB, quarantined_bytes: 2 * GIB, ..Figures::default() };
        Snapshot {
            instances: vec![Instance { name: "llama".to_owned(), total, ..Instance::default() }],
            budgets: vec![Budget {
                device: "host".to_owned(),
                budget_bytes: 16 * GIB,
                members,
                ..Budget::default()
            }],
            ..Snapshot::default()
        }
    }

    fn report(asked: Wish, outcome: Outcome, limit_bytes: Option<u64>) -> Report {
        let terms = Terms { limit_bytes, min_bytes: GIB };
        Report::new("llama", asked, &Answered { revision: 7, outcome, terms }, &after())
    }

    #[test]
    fn every_outcome_has_its_sentence_and_exit_code() {
        use Outcome::{Applied, Conflict, Deferred, Rejected, Stale, Unanswered};
        let eight = Some(8 * GIB);
        let cases = [
            (Wish::Limit(eight), Applied, eight, 0, "applied: llama has limit 8.00 GiB, minimum 1.00 GiB"),
            (Wish::Limit(None), Applied, None, 0, "applied: llama has limit none, minimum 1.00 GiB"),
            (
                Wish::Limit(Some(2 * GIB)),
                Deferred,
                Some(2 * GIB),
                3,
                "deferred: llama has limit 2.00 GiB, minimum 1.00 GiB; it still holds 3.00 GiB more, which goes as requests end",
            ),
            (
                Wish::Min(GIB),
                Deferred,
                None,
                3,
                "deferred: llama has limit none, minimum 1.00 GiB, to be met as memory is given back",
            ),
            (
                Wish::Min(5 * GIB),
                Rejected,
                eight,
                1,
                "rejected: llama keeps limit 8.00 GiB, minimum 1.00 GiB: \
                 the minimums of other instances leave 4.00 GiB of the budget of host",
            ),
            (
                Wish::Limit(None),
                Rejected,
                eight,
                1,
                "rejected: llama keeps limit 8.00 GiB, minimum 1.00 GiB: its engine cannot",
            ),
            (
                Wish::Limit(Some(GIB)),
                Rejected,
                eight,
                1,
                "rejected: llama keeps limit 8.00 GiB, minimum 1.00 GiB: 2.00 GiB are lost to quarantine, and no limit can be below that",
            ),
            (
                Wish::Limit(None),
                Stale,
                eight,
                1,
                "rejected: llama was changed by somebody else meanwhile and has limit 8.00 GiB, minimum 1.00 GiB; ask again",
            ),
            (
                Wish::Limit(None),
                Conflict,
                eight,
                1,
                "rejected: llama was changed by somebody else meanwhile and has limit 8.00 GiB, minimum 1.00 GiB; ask again",
            ),
            (
                Wish::Limit(eight),
                Unanswered,
                None,
                3,
                "unanswered: llama has limit none, minimum 1.00 GiB; what was asked comes into force when it answers",
            ),
        ];
        for (asked, outcome, limit_bytes, code, sentence) in cases {
            let report = report(asked, outcome, limit_bytes);
            assert_eq!((report.sentence().as_str(), report.exit_code()), (sentence, code), "{asked:?}");
        }
    }

    #[test]
    fn a_report_as_json() {
        let limit =
            serde_json::to_string(&report(Wish::Limit(Some(2 * GIB)), Outcome::Deferred, Some(2 * GIB)));
        assert_eq!(
            limit.unwrap(),
            r#"{"name":"llama","asked":{"limit_bytes":2147483648},"outcome":"deferred","revision":7,"limit_bytes":2147483648,"min_bytes":1073741824,"over_bytes":3221225472,"why":null}"#
        );
        let min = serde_json::to_string(&report(Wish::Min(9 * GIB), Outcome::Rejected, Some(8 * GIB)));
        assert_eq!(
            min.unwrap(),
            r#"{"name":"llama","asked":{"min_bytes":9663676416},"outcome":"rejected","revision":7,"limit_bytes":8589934592,"min_bytes":1073741824,"over_bytes":0,"why":"the minimums of other instances leave 4.00 GiB of the budget of host"}"#
        );
    }
}
