//! The machine of one object, request by request.

mod completing;
mod harness;
mod racing;
mod random;
