//! What tests of the upload stage run against: an S3 server with faults, a TCP proxy with faults, and one suite that
//! every store has to pass.
//!
//! Nothing of tidelog is tested here by itself; the servers know nothing of logs, hedges or drivers.
#![forbid(unsafe_code)]

mod conformance;
mod environment;
mod proxy;
mod server;

pub use conformance::{Row, conformance};
pub use environment::with_credentials;
pub use proxy::{Direction, Fate, Proxy};
pub use server::{
    ACCESS_KEY, BucketRules, Fault, ObjectInfo, REGION, Request, Rule, S3Server, SECRET_KEY, ServerOptions,
    UploadInfo,
};
