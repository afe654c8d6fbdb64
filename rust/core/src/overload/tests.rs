//! The door as a whole, and what it promises.
