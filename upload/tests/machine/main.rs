//! The machine of one object, request by request.

mod harness;
mod random;
