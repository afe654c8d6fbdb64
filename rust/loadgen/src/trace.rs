//! Traces: recorded lengths and, mostly, arrival times, as JSON lines (plain or gzip).

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;

use flate2::read::MultiGzDecoder;
use serde::Deserialize;

use crate::error::{Error, Result};

/// Block size of `hash_ids` where a row does not tell it.
const DEFAULT_HASH_BLOCK: usize = 512;
/// Times that are all multiples of at least this were recorded by a coarse clock.
const COARSE_CLOCK_MS: u64 = 1000;

/// No context is as long; what is above is an error of the file.
const MAX_LENGTH: usize = 100_000_000;

/// One request of a trace.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Row {
    /// When it came, in milliseconds; None in sets of lengths only.
    pub(crate) timestamp_ms: Option<f64>,
    /// Prompt tokens.
    pub(crate) input_length: usize,
    /// Output tokens.
    pub(crate) output_length: usize,
    /// One id for each block of the prompt: equal ids are equal blocks. May be empty.
    #[serde(default)]
    pub(crate) hash_ids: Vec<u64>,
    /// Tokens of such a block.
    #[serde(default = "default_hash_block")]
    pub(crate) hash_block: usize,
}

const fn default_hash_block() -> usize {
    DEFAULT_HASH_BLOCK
}

/// Reads a file that may be compressed with gzip, whatever its name.
pub(crate) fn open(path: &Path) -> Result<Box<dyn BufRead>> {
    let reader = || -> io::Result<Box<dyn BufRead>> {
        let mut file = BufReader::new(File::open(path)?);
        let is_gzip = file.fill_buf()?.starts_with(&[0x1f, 0x8b]);
        let content: Box<dyn Read> = if is_gzip { Box::new(MultiGzDecoder::new(file)) } else { Box::new(file) };
        Ok(Box::new(BufReader::new(content)))
    };
    reader().map_err(|source| Error::Unreadable { path: path.to_owned(), source })
}

/// Reads the rows of a trace, sorted by arrival.
///
/// # Errors
/// `Unreadable`, `Line` for a row without the fields or with a time that is no number, `Empty`.
pub(crate) fn read_trace(path: &Path) -> Result<Vec<Row>> {
    let mut rows: Vec<Row> = Vec::new();
    for (index, line) in open(path)?.lines().enumerate() {
        let line = line.map_err(|source| Error::Unreadable { path: path.to_owned(), source })?;
        if line.trim().is_empty() {
            continue;
        }
        let bad = |reason: String| Error::Line { path: path.to_owned(), line: index + 1, reason };
        let row: Row = serde_json::from_str(&line).map_err(|error| bad(error.to_string()))?;
        for (name, value) in [("input_length", row.input_length), ("output_length", row.output_length)] {
            if value > MAX_LENGTH {
                return Err(bad(format!("{name} is {value}; it must be at most {MAX_LENGTH}")));
            }
        }
        if row.hash_block == 0 {
            return Err(bad("hash_block is 0; it must be at least 1".to_owned()));
        }
        if rows.first().is_some_and(|first| first.timestamp_ms.is_some() != row.timestamp_ms.is_some()) {
            return Err(bad("some rows have a timestamp_ms and some have none".to_owned()));
        }
        rows.push(row);
    }
    if rows.is_empty() {
        return Err(Error::Empty { path: path.to_owned() });
    }
    rows.sort_by(|one, other| one.timestamp_ms.unwrap_or(0.0).total_cmp(&other.timestamp_ms.unwrap_or(0.0)));
    Ok(rows)
}

/// Arrival times of the rows in seconds after the first; None if the trace has none.
///
/// If all times are multiples of a second or more, the recorder's clock was that coarse: requests of
/// one tick are then spread evenly over it.
pub(crate) fn arrival_times_s(rows: &[Row]) -> Option<Vec<f64>> {
    let times: Vec<f64> = rows.iter().map(|row| row.timestamp_ms).collect::<Option<_>>()?;
    let first = *times.first()?;
    let mut times: Vec<f64> = times.iter().map(|time| time - first).collect();
    let is_whole = times.iter().all(|time| time.fract() == 0.0);
    let tick = times.iter().fold(0, |tick, &time| greatest_common_divisor(tick, time as u64));
    if is_whole && tick >= COARSE_CLOCK_MS {
        for group in times.chunk_by_mut(|one, other| *one as u64 == *other as u64) {
            let gap = tick as f64 / group.len() as f64;
            for (index, time) in group.iter_mut().enumerate() {
                *time += gap * index as f64;
            }
        }
    }
    Some(times.iter().map(|time| time / 1e3).collect())
}

fn greatest_common_divisor(mut one: u64, mut other: u64) -> u64 {
    while other != 0 {
        (one, other) = (other, one % other);
    }
    one
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    fn rows_at(times: &[f64]) -> Vec<Row> {
        let row = |&time| Row {
            timestamp_ms: Some(time),
            input_length: 1,
            output_length: 1,
            hash_ids: Vec::new(),
            hash_block: 1,
        };
        times.iter().map(row).collect()
    }

    fn file(content: &[u8]) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(content).expect("it can be written");
        file
    }

    const LINES: &[u8] = b"{\"timestamp_ms\": 5.5, \"input_length\": 3, \"output_length\": 4, \"client_id\": 1}\n\n\
        {\"timestamp_ms\": 0, \"input_length\": 600, \"output_length\": 2, \"hash_ids\": [7, 8], \"hash_block\": 512}\n";

    #[test]
    fn reads_plain_and_compressed_rows_in_order_of_arrival() {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(LINES).expect("memory");
        for content in [LINES.to_vec(), encoder.finish().expect("memory")] {
            let rows = read_trace(file(&content).path()).expect("it is valid");
            let lengths: Vec<_> = rows.iter().map(|row| (row.input_length, row.output_length)).collect();
            assert_eq!(lengths, [(600, 2), (3, 4)]);
            assert_eq!(rows[0].hash_ids, [7, 8]);
            assert_eq!(arrival_times_s(&rows), Some(vec![0.0, 0.0055]));
        }
    }

    #[test]
    fn says_which_line_is_wrong() {
        let file = file(b"{\"input_length\": 3, \"output_length\": 4}\n{\"input_length\": 3}\n");
        let message = read_trace(file.path()).expect_err("a field is missing").to_string();
        assert!(message.contains("line 2: missing field `output_length`"), "{message}");
    }

    #[test]
    fn spreads_the_ticks_of_a_coarse_clock_and_no_others() {
        let coarse = arrival_times_s(&rows_at(&[3000.0, 3000.0, 3000.0, 6000.0, 9000.0, 9000.0]));
        assert_eq!(coarse, Some(vec![0.0, 1.0, 2.0, 3.0, 6.0, 7.5]));
        let fine = arrival_times_s(&rows_at(&[0.0, 0.0, 3000.0, 3001.0]));
        assert_eq!(fine, Some(vec![0.0, 0.0, 3.0, 3.001]));
    }

    #[test]
    fn lengths_alone_have_no_arrival_times() {
        let file = file(b"{\"timestamp_ms\": null, \"input_length\": 3, \"output_length\": 4}\n");
        assert_eq!(arrival_times_s(&read_trace(file.path()).expect("valid")), None);
    }
}
