//! Prometheus' text format, version 0.0.4.

use std::fmt::Display;
use std::io::Write;

use cbrs_core::histogram::Histogram;

/// Stands before the name of every family.
const PREFIX: &str = "cbrs:";

/// A page while it is written; every sample has the label `model_name`.
#[derive(Debug)]
pub(super) struct Page {
    out: Vec<u8>,
    /// `model_name="…"`
    model: String,
}

/// A finite number, or `NaN`.
fn finite(value: f64) -> f64 {
    if value.is_finite() { value } else { f64::NAN }
}

/// A label as it stands in a sample.
fn label(name: &str, value: &str) -> String {
    let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
    format!("{name}=\"{value}\"")
}

impl Page {
    pub(super) fn new(model: &str) -> Self {
        Self { out: Vec::with_capacity(32 << 10), model: label("model_name", model) }
    }

    pub(super) fn into_bytes(self) -> Vec<u8> {
        self.out
    }

    fn head(&mut self, name: &str, kind: &str, help: &str) {
        writeln!(self.out, "# HELP {PREFIX}{name} {help}\n# TYPE {PREFIX}{name} {kind}")
            .expect("memory takes everything");
    }

    fn sample(&mut self, name: &str, labels: &[(&str, &str)], value: impl Display) {
        let out = &mut self.out;
        write!(out, "{PREFIX}{name}{{{}", self.model).expect("memory takes everything");
        for &(name, value) in labels {
            write!(out, ",{}", label(name, value)).expect("memory takes everything");
        }
        writeln!(out, "}} {value}").expect("memory takes everything");
    }

    /// A number that goes up and down.
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: f64) {
        self.head(name, "gauge", help);
        self.sample(name, &[], finite(value));
    }

    /// A gauge with a sample for each value of a label.
    pub(super) fn gauges<const N: usize>(&mut self, name: &str, help: &str, label: &str, values: [(&str, u64); N]) {
        self.head(name, "gauge", help);
        for (value, number) in values {
            self.sample(name, &[(label, value)], number);
        }
    }

    /// A number that only goes up.
    pub(super) fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, "counter", help);
        self.sample(name, &[], value);
    }

    /// A counter with a sample for each combination of labels.
    pub(super) fn counters<const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        labels: &[&str; N],
        values: impl IntoIterator<Item = ([impl AsRef<str>; N], u64)>,
    ) {
        self.head(name, "counter", help);
        for (values, number) in values {
            let pairs: Vec<(&str, &str)> = labels.iter().copied().zip(values.iter().map(AsRef::as_ref)).collect();
            self.sample(name, &pairs, number);
        }
    }

    /// A histogram whose values are shown divided by `unit`.
    pub(super) fn histogram(&mut self, name: &str, help: &str, histogram: &Histogram, unit: f64) {
        self.head(name, "histogram", help);
        let bounds = histogram.bounds().iter().map(|&bound| (bound as f64 / unit).to_string());
        let bucket = format!("{name}_bucket");
        let mut total = 0;
        for (bound, count) in bounds.chain(["+Inf".to_owned()]).zip(histogram.counts()) {
            total += count;
            self.sample(&bucket, &[("le", &bound)], total);
        }
        self.sample(&format!("{name}_sum"), &[], histogram.sum() as f64 / unit);
        self.sample(&format!("{name}_count"), &[], total);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_are_escaped() {
        let mut page = Page::new("a\"b\\c\nd");
        page.gauge("x", "Help.", f64::INFINITY);
        let expected = "# HELP cbrs:x Help.\n# TYPE cbrs:x gauge\ncbrs:x{model_name=\"a\\\"b\\\\c\\nd\"} NaN\n";
        assert_eq!(String::from_utf8_lossy(&page.into_bytes()), expected);
    }

    #[test]
    fn buckets_are_cumulative() {
        let histogram = Histogram::new(&[500, 1_000]);
        histogram.record_many(400, 2);
        histogram.record(2_000);
        let mut page = Page::new("m");
        page.histogram("t", "Help.", &histogram, 1e3);
        let expected = "# HELP cbrs:t Help.\n# TYPE cbrs:t histogram\n\
                        cbrs:t_bucket{model_name=\"m\",le=\"0.5\"} 2\n\
                        cbrs:t_bucket{model_name=\"m\",le=\"1\"} 2\n\
                        cbrs:t_bucket{model_name=\"m\",le=\"+Inf\"} 3\n\
                        cbrs:t_sum{model_name=\"m\"} 2.8\n\
                        cbrs:t_count{model_name=\"m\"} 3\n";
        assert_eq!(String::from_utf8_lossy(&page.into_bytes()), expected);
    }
}
