//! The machine of one object, request by request.

mod completing;
mod harness;
mod leaving;
mod racing;
mod random;
mod stuck;
