//! The memory map of a model file, and the only `unsafe` line of this crate.
//!
//! Invariants:
//!
//! 1. Only regular files are opened: a pipe or a device would block or never end.
//! 2. The bytes are read-only and live as long as the [`MappedFile`].

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use memmap2::Mmap;

use crate::{ErrorKind, Result};

/// A whole file in memory, read on demand by the operating system.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    /// Maps the file at `path`.
    ///
    /// # Errors
    /// `Io`, `NotAFile`, `Empty`.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let at = |kind: ErrorKind| kind.at(path, "file");
        let metadata = fs::metadata(path).map_err(|error| at(error.into()))?;
        if !metadata.is_file() {
            return Err(at(ErrorKind::NotAFile));
        }
        if metadata.len() == 0 {
            return Err(at(ErrorKind::Empty));
        }
        let file = File::open(path).map_err(|error| at(error.into()))?;
        let map = map_read_only(&file).map_err(|error| at(error.into()))?;
        Ok(Self { path: path.to_path_buf(), map })
    }

    /// Returns the path that the file was opened with.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the bytes of the file.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.map
    }
}

#[allow(unsafe_code)]
fn map_read_only(file: &File) -> std::io::Result<Mmap> {
    // SAFETY: the map is read-only and private to this crate, which hands out `&[u8]` only. Its one
    // demand is that nobody truncates or rewrites the file meanwhile; model files are written once
    // and renamed into place, and a reader that copied gigabytes first would be of no use.
    unsafe { Mmap::map(file) }
}
