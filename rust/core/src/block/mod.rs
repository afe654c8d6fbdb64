//! KV blocks: who holds them (`pool`), what they contain (`prefix`), and whom they may serve (`roots`).

mod pool;
mod prefix;
mod roots;

pub use pool::BlockPool;
pub use prefix::{Parent, Published};
pub use roots::RootId;

/// A physical block of the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(u32);

impl BlockId {
    /// The block with this index; indices outside the pool are refused by the pool's calls.
    pub fn new(index: u32) -> Self {
        Self(index)
    }

    /// Index in `[0, num_blocks)`.
    pub fn index(self) -> usize {
        self.0 as usize
    }

    /// The id as it stands in block tables.
    pub fn as_i32(self) -> i32 {
        self.0 as i32
    }

    pub(crate) fn from_table(entry: i32) -> Self {
        Self(entry as u32)
    }
}

/// End of an intrusive list.
pub(crate) const NONE: u32 = u32::MAX;
