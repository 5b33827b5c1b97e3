//! Prometheus' text format, version 0.0.4: <https://prometheus.io/docs/instrumenting/exposition_formats/>. Pure.

use std::fmt::Write;
use std::time::Duration;

use kvcached_control::{Family, Value};

/// Of this text.
pub(super) const CONTENT_TYPE: &str = "text/plain; version=0.0.4; charset=utf-8";

type Label<'a> = (&'a str, &'a str);

pub(super) fn encode(families: &[Family]) -> String {
    let mut text = String::new();
    for family in families {
        let (name, help) = (&family.name, escape(family.help, false));
        let _ = writeln!(text, "# HELP {name} {help}\n# TYPE {name} {}", family.kind.as_str());
        for sample in &family.samples {
            let labels: Vec<Label> =
                sample.labels.iter().map(|(name, value)| (*name, value.as_str())).collect();
            match &sample.value {
                Value::Number(number) => line(&mut text, name, &labels, number),
                Value::Times(times) => {
                    for (bound, count) in times.cumulative() {
                        let bound = bound
                            .as_ref()
                            .map_or("+Inf".to_owned(), |b| Duration::as_secs_f64(b).to_string());
                        let labels = [&labels[..], &[("le", bound.as_str())]].concat();
                        line(&mut text, &format!("{name}_bucket"), &labels, &count);
                    }
                    line(&mut text, &format!("{name}_sum"), &labels, &times.sum.as_secs_f64());
                    line(&mut text, &format!("{name}_count"), &labels, &times.count());
                }
            }
        }
    }
    text
}

fn line(text: &mut String, name: &str, labels: &[Label], value: &dyn std::fmt::Display) {
    let labels: Vec<String> =
        labels.iter().map(|(name, value)| format!("{name}=\"{}\"", escape(value, true))).collect();
    let _ = writeln!(text, "{name}{{{}}} {value}", labels.join(","));
}

fn escape(text: &str, quoted: bool) -> String {
    let text = text.replace('\\', "\\\\").replace('\n', "\\n");
    if quoted { text.replace('"', "\\\"") } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_ends_a_label_is_escaped() {
        let mut text = String::new();
        line(&mut text, "m", &[("a", "x\"y\\z\nw"), ("le", "+Inf")], &7);
        assert_eq!(text, "m{a=\"x\\\"y\\\\z\\nw\",le=\"+Inf\"} 7\n");
        assert_eq!(escape("a \"b\"\n\\", false), "a \"b\"\\n\\\\");
    }
}
