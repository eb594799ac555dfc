//! Named objects made of opaque parts: the remote half of tidelog.
//!
//! This crate knows nothing of changes, logs or segments.
#![forbid(unsafe_code)]
