//! Cuts the stream of an object's bytes into chunks that every bucket takes as parts.
//!
//! Pure. At most [`PUT_BYTES_MAX`] are held back... (to be written)
#![forbid(unsafe_code)]
