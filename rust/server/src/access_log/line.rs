//! One line, as text or as JSON, with the same keys.

use std::fmt::Display;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use super::LogFormat;
use crate::reply::write;

/// A line while it is written.
#[derive(Debug)]
pub(super) struct Line<'a> {
    format: LogFormat,
    out: &'a mut Vec<u8>,
}

impl<'a> Line<'a> {
    pub(super) fn begin(format: LogFormat, out: &'a mut Vec<u8>) -> Self {
        let time = timestamp(SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default());
        match format {
            LogFormat::Text => write!(out, "cbrs: access time={time}"),
            LogFormat::Json => write!(out, "{{\"time\":\"{time}\",\"level\":\"info\",\"logger\":\"cbrs.access\""),
        }
        .expect("memory takes everything");
        Self { format, out }
    }

    fn key(&mut self, key: &str) {
        match self.format {
            LogFormat::Text => write!(self.out, " {key}="),
            LogFormat::Json => write!(self.out, ",\"{key}\":"),
        }
        .expect("memory takes everything");
    }

    /// A text, which may come from a client; in quotes if it could be taken for more than one value.
    pub(super) fn text(&mut self, key: &str, value: &str) {
        self.key(key);
        let is_plain =
            !value.is_empty() && value.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"\\=".contains(&byte));
        if self.format == LogFormat::Text && is_plain {
            self.out.extend_from_slice(value.as_bytes());
        } else {
            write::string(self.out, value);
        }
    }

    pub(super) fn number(&mut self, key: &str, value: impl Display) {
        self.key(key);
        write::integer(self.out, value);
    }

    /// A time to the microsecond.
    pub(super) fn seconds(&mut self, key: &str, time_ns: u64) {
        let micros = time_ns / 1_000;
        self.number(key, format_args!("{}.{:06}", micros / 1_000_000, micros % 1_000_000));
    }

    pub(super) fn end(self) {
        self.out.extend_from_slice(if self.format == LogFormat::Text { b"\n" } else { b"}\n" });
    }
}

/// A time since 1970 as date and time of day in UTC, to the millisecond.
fn timestamp(since_epoch: Duration) -> String {
    let seconds = since_epoch.as_secs();
    let (year, month, day) = civil(seconds / 86_400);
    let (hour, minute, second) = (seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:03}Z", since_epoch.subsec_millis())
}

/// Year, month and day of a number of days since 1970-01-01. Years are counted from March, so that the leap day is their last.
fn civil(days: u64) -> (u64, u64, u64) {
    const DAYS_OF_400_YEARS: u64 = 146_097;
    // Days since 0000-03-01.
    let days = days + 719_468;
    let day_of_era = days % DAYS_OF_400_YEARS;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    // Months of 31, 30, 31, 30, 31 days, and again.
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = (month_from_march + 2) % 12 + 1;
    let year = days / DAYS_OF_400_YEARS * 400 + year_of_era + u64::from(month <= 2);
    (year, month, day)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_told_in_utc() {
        let at = |seconds, millis: u32| timestamp(Duration::new(seconds, millis * 1_000_000));
        assert_eq!(at(0, 7), "1970-01-01T00:00:00.007Z");
        assert_eq!(at(951_782_400, 0), "2000-02-29T00:00:00.000Z");
        assert_eq!(at(1_709_251_199, 999), "2024-02-29T23:59:59.999Z");
        assert_eq!(at(1_798_761_600, 0), "2027-01-01T00:00:00.000Z");
        assert_eq!(at(4_107_542_400, 0), "2100-03-01T00:00:00.000Z");
    }

    #[test]
    fn both_formats_tell_the_same() {
        let write = |format| {
            let mut out = Vec::new();
            let mut line = Line { format, out: &mut out };
            line.text("a", "plain");
            line.text("b", "two \"words\"\n");
            line.number("c", 3);
            line.seconds("d", 1_002_003_004);
            line.end();
            String::from_utf8_lossy(&out).into_owned()
        };
        assert_eq!(write(LogFormat::Text), " a=plain b=\"two \\\"words\\\"\\n\" c=3 d=1.002003\n");
        assert_eq!(write(LogFormat::Json), ",\"a\":\"plain\",\"b\":\"two \\\"words\\\"\\n\",\"c\":3,\"d\":1.002003}\n");
    }
}
