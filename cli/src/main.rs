//! The tool `tidelog`.
#![forbid(unsafe_code)]

fn main() {}
