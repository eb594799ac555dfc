//! Rings and durable extents of opaque bytes: the local half of tidelog.
//!
//! This crate knows nothing of changes, logs or objects. Unsafe code lives in `ring.rs`, `aligned.rs` and `uring.rs`
//! alone.

pub mod aligned;
pub mod directory;
pub mod disk;
pub mod engine;
pub mod psync;
pub mod ring;
pub mod segment;
pub mod sim;
pub mod uring;
