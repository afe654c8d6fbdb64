//! Dates for templates (`strftime_now`): the common directives, in UTC, from a time that is passed in.
//!
//! The calendar arithmetic follows Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms" (`civil_from_days`).

use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::{Error, ErrorKind};

const MONTHS: [&str; 12] = [
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
];
const WEEKDAYS: [&str; 7] = ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
/// Longest format and longest result, in bytes.
const MAX_FORMAT_BYTES: usize = 256;

/// A moment, taken apart.
struct Moment {
    year: i64,
    month: usize,
    day: i64,
    day_of_year: i64,
    weekday: usize,
    second_of_day: u64,
}

impl Moment {
    fn new(time: SystemTime) -> Self {
        // A clock before 1970 is not set; the epoch is as good as any other date then.
        let seconds = time.duration_since(UNIX_EPOCH).map_or(0, |elapsed| elapsed.as_secs());
        let days = (seconds / 86_400) as i64;
        let (year, month, day) = civil_from_days(days);
        let leap = i64::from(year % 4 == 0 && (year % 100 != 0 || year % 400 == 0));
        let before = [0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334][month - 1];
        let day_of_year = before + day + if month > 2 { leap } else { 0 };
        Self { year, month, day, day_of_year, weekday: (days % 7) as usize, second_of_day: seconds % 86_400 }
    }
}

/// Year, month (1 to 12) and day of a number of days since 1970-01-01, not negative.
fn civil_from_days(days: i64) -> (i64, usize, i64) {
    let shifted = days + 719_468;
    let era = shifted / 146_097;
    let day_of_era = shifted % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month as usize, day)
}

/// Formats `time` as Python's `strftime` does.
pub(crate) fn strftime(format: &str, time: SystemTime) -> Result<String, Error> {
    if format.len() > MAX_FORMAT_BYTES {
        let len = format.len();
        return Err(invalid(&format!("the format has {len} bytes, but at most {MAX_FORMAT_BYTES} are allowed")));
    }
    let moment = Moment::new(time);
    let mut out = String::new();
    let mut chars = format.chars();
    while let Some(character) = chars.next() {
        if character != '%' {
            out.push(character);
            continue;
        }
        let flag = chars.clone().next().filter(|&flag| flag == '-');
        if flag.is_some() {
            chars.next();
        }
        let directive = chars.next().ok_or_else(|| invalid("the format ends with %"))?;
        write_directive(&mut out, &moment, directive, flag.is_none())?;
    }
    Ok(out)
}

fn invalid(message: &str) -> Error {
    Error::new(ErrorKind::InvalidOperation, format!("strftime_now: {message}"))
}

fn write_directive(out: &mut String, moment: &Moment, directive: char, is_padded: bool) -> Result<(), Error> {
    let hour = (moment.second_of_day / 3_600) as i64;
    let minute = (moment.second_of_day / 60 % 60) as i64;
    let second = (moment.second_of_day % 60) as i64;
    let (number, width) = match directive {
        'Y' => (moment.year, 4),
        'y' => (moment.year % 100, 2),
        'm' => (moment.month as i64, 2),
        'd' => (moment.day, 2),
        'j' => (moment.day_of_year, 3),
        'H' => (hour, 2),
        'I' => ((hour + 11) % 12 + 1, 2),
        'M' => (minute, 2),
        'S' => (second, 2),
        _ => return write_name(out, moment, directive, hour),
    };
    let width = if is_padded { width } else { 1 };
    write!(out, "{number:0width$}").expect("a string takes everything");
    Ok(())
}

fn write_name(out: &mut String, moment: &Moment, directive: char, hour: i64) -> Result<(), Error> {
    match directive {
        'B' => out.push_str(MONTHS[moment.month - 1]),
        'b' | 'h' => out.push_str(&MONTHS[moment.month - 1][..3]),
        'A' => out.push_str(WEEKDAYS[moment.weekday]),
        'a' => out.push_str(&WEEKDAYS[moment.weekday][..3]),
        'p' => out.push_str(if hour < 12 { "AM" } else { "PM" }),
        'e' => write!(out, "{:2}", moment.day).expect("a string takes everything"),
        'F' => write!(out, "{}-{:02}-{:02}", moment.year, moment.month, moment.day).expect("a string takes everything"),
        'Z' => out.push_str("UTC"),
        '%' => out.push('%'),
        _ => return Err(invalid(&format!("%{directive} is not supported"))),
    }
    Ok(())
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn at(seconds: u64, format: &str) -> String {
        strftime(format, UNIX_EPOCH + Duration::from_secs(seconds)).unwrap()
    }

    #[test]
    fn dates_follow_the_calendar() {
        assert_eq!(at(0, "%A %d %B %Y"), "Thursday 01 January 1970");
        assert_eq!(at(951_782_400, "%F %a %j"), "2000-02-29 Tue 060");
        assert_eq!(at(1_735_689_599, "%Y-%m-%d %H:%M:%S %p %I"), "2024-12-31 23:59:59 PM 11");
        assert_eq!(at(1_709_251_200, "%-d %b %y, %-H"), "1 Mar 24, 0");
        assert_eq!(at(4_107_542_400, "%d/%m/%Y 100%%"), "01/03/2100 100%");
    }

    #[test]
    fn unknown_directives_and_long_formats_are_refused() {
        let error = |format: &str| strftime(format, UNIX_EPOCH).unwrap_err().to_string();
        assert!(error("%Q").contains("%Q is not supported"));
        assert!(error("100%").contains("ends with %"));
        assert!(error(&"x".repeat(300)).contains("at most 256"));
    }
}
