//! A model of one or several safetensors files.
//!
//! A folder holds `model.safetensors`, or `model.safetensors.index.json` and the files that the index
//! names.
//!
//! Invariants:
//!
//! 1. Only files inside the folder are opened: an index may name plain `.safetensors` file names, and
//!    a symbolic link may not lead out of the folder. The one exception is the layout of the Hugging
//!    Face cache, where `snapshots/<revision>` links into the `blobs` folder of the same repository.
//! 2. A tensor is in exactly one file.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Component, Path, PathBuf};

use serde::Deserialize;

use super::header::UniqueKeys;
use super::{SafetensorsFile, TensorInfo};
use crate::decode::Part;
use crate::error::shown;
use crate::limits::MAX_JSON_BYTES;
use crate::mapped::MappedFile;
use crate::{ErrorKind, Result};

const SINGLE_NAME: &str = "model.safetensors";
const INDEX_NAME: &str = "model.safetensors.index.json";
const WEIGHT_MAP: &str = "weight_map";

/// A model: its files and which tensor is in which.
#[derive(Debug)]
pub struct Checkpoint {
    path: PathBuf,
    files: Vec<SafetensorsFile>,
    /// Tensor name to the number of its file.
    tensors: BTreeMap<String, usize>,
}

impl Checkpoint {
    /// Opens a folder, or one `.safetensors` file.
    ///
    /// # Errors
    /// Whatever is wrong with the folder, the index or a file.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        if !path.is_dir() {
            return Self::from_files(path, vec![SafetensorsFile::open(path)?]);
        }
        let single = path.join(SINGLE_NAME);
        if single.try_exists().unwrap_or(false) {
            check_inside(path, &single)?;
            return Self::from_files(path, vec![SafetensorsFile::open(&single)?]);
        }
        let index = path.join(INDEX_NAME);
        if index.try_exists().unwrap_or(false) {
            check_inside(path, &index)?;
            return Self::open_sharded(path, &index);
        }
        Err(ErrorKind::Missing.at(path, format!("{SINGLE_NAME} or {INDEX_NAME}")))
    }

    fn from_files(path: &Path, files: Vec<SafetensorsFile>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (number, file) in files.iter().enumerate() {
            for info in file.tensors() {
                if let Some(first) = tensors.insert(info.name.clone(), number) {
                    let name = |number: usize| files[number].path().display().to_string();
                    let kind = ErrorKind::InTwoFiles { first: name(first), second: name(number) };
                    return Err(kind.at(file.path(), format!("tensor {}", info.name)));
                }
            }
        }
        Ok(Self { path: path.to_path_buf(), files, tensors })
    }

    fn open_sharded(folder: &Path, index: &Path) -> Result<Self> {
        let weight_map = read_weight_map(index)?;
        let mut numbers: BTreeMap<&str, usize> = BTreeMap::new();
        let mut files = Vec::new();
        for shard in weight_map.values() {
            if numbers.contains_key(shard.as_str()) {
                continue;
            }
            let path = shard_path(folder, shard).map_err(|kind| kind.at(index, WEIGHT_MAP))?;
            check_inside(folder, &path)?;
            numbers.insert(shard, files.len());
            files.push(SafetensorsFile::open(&path)?);
        }
        let mut checkpoint = Self::from_files(folder, files)?;
        // What the index does not list is not part of the model.
        checkpoint.tensors.retain(|name, _| weight_map.contains_key(name));
        for (name, shard) in &weight_map {
            let number = numbers[shard.as_str()];
            if checkpoint.tensors.get(name) != Some(&number) {
                let file = checkpoint.files[number].path();
                return Err(ErrorKind::Missing.at(file, format!("tensor {name}")));
            }
        }
        Ok(checkpoint)
    }

    /// Returns the path that the checkpoint was opened with.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of all tensors, sorted.
    pub fn tensor_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns one tensor.
    ///
    /// # Errors
    /// `Missing`.
    pub fn tensor(&self, name: &str) -> Result<&TensorInfo> {
        self.file_of(name)?.tensor(name)
    }

    /// Decodes a tensor to float32; see [`SafetensorsFile::tensor_f32`].
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    pub fn tensor_f32(&self, name: &str) -> Result<Vec<f32>> {
        self.file_of(name)?.tensor_f32(name)
    }

    /// Decodes a tensor to the bits of bfloat16; see [`SafetensorsFile::tensor_bf16`].
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    pub fn tensor_bf16(&self, name: &str) -> Result<Vec<u16>> {
        self.file_of(name)?.tensor_bf16(name)
    }

    /// Decodes a part of a tensor to float32; see [`SafetensorsFile::part_f32`].
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    ///
    /// # Panics
    /// If the tensor has no such part ([`Part::is_of`]).
    pub fn part_f32(&self, name: &str, part: &Part) -> Result<Vec<f32>> {
        self.file_of(name)?.part_f32(name, part)
    }

    /// Decodes a part of a tensor to the bits of bfloat16; see [`SafetensorsFile::part_bf16`].
    ///
    /// # Errors
    /// `Missing`, `UnsupportedTensorType`.
    ///
    /// # Panics
    /// If the tensor has no such part ([`Part::is_of`]).
    pub fn part_bf16(&self, name: &str, part: &Part) -> Result<Vec<u16>> {
        self.file_of(name)?.part_bf16(name, part)
    }

    fn file_of(&self, name: &str) -> Result<&SafetensorsFile> {
        let number = self.tensors.get(name);
        number
            .map(|&number| &self.files[number])
            .ok_or_else(|| ErrorKind::Missing.at(&self.path, format!("tensor {name}")))
    }
}

/// The part of an index that is used.
#[derive(Deserialize)]
struct Index<'a> {
    #[serde(borrow)]
    weight_map: UniqueKeys<'a>,
}

/// Reads which tensor is in which file.
fn read_weight_map(index: &Path) -> Result<BTreeMap<String, String>> {
    let at = |kind: ErrorKind| kind.at(index, WEIGHT_MAP);
    let map = MappedFile::open(index)?;
    let found = map.bytes().len() as u64;
    ErrorKind::check_limit(found, MAX_JSON_BYTES).map_err(|kind| kind.at(index, "file"))?;
    let text = std::str::from_utf8(map.bytes()).map_err(|_| at(ErrorKind::NotUtf8))?;
    let index: Index<'_> = serde_json::from_str(text).map_err(|error| at(error.into()))?;
    let mut weight_map = BTreeMap::new();
    for (name, shard) in index.weight_map.0 {
        let shard: String = serde_json::from_str(shard.get()).map_err(|error| at(error.into()))?;
        weight_map.insert(name, shard);
    }
    Ok(weight_map)
}

/// Turns a name from the index into a path in the folder.
fn shard_path(folder: &Path, shard: &str) -> Result<PathBuf, ErrorKind> {
    let name = Path::new(shard);
    let mut parts = name.components();
    let is_plain = matches!((parts.next(), parts.next()), (Some(Component::Normal(_)), None))
        && !shard.contains(['/', '\\', '\0'])
        && name.extension().is_some_and(|extension| extension == "safetensors");
    if is_plain { Ok(folder.join(name)) } else { Err(ErrorKind::UnsafePath { found: shown(shard) }) }
}

/// Refuses a file that is a link out of `folder`.
fn check_inside(folder: &Path, file: &Path) -> Result<()> {
    let at = |kind: ErrorKind| kind.at(file, "file");
    let folder = fs::canonicalize(folder).map_err(|error| at(error.into()))?;
    let target = fs::canonicalize(file).map_err(|error| at(error.into()))?;
    let parent = target.parent();
    let is_inside = parent == Some(&folder);
    if is_inside || blobs_folder(&folder).is_some_and(|blobs| parent == Some(&blobs)) {
        return Ok(());
    }
    Err(at(ErrorKind::LinkOutside { target }))
}

/// Returns `…/blobs` for a folder `…/snapshots/<revision>`.
fn blobs_folder(folder: &Path) -> Option<PathBuf> {
    let snapshots = folder.parent()?;
    let is_snapshot = snapshots.file_name().is_some_and(|name| name == "snapshots");
    is_snapshot.then(|| snapshots.parent().map(|repository| repository.join("blobs"))).flatten()
}
