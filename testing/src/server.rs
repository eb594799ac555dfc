//! An S3 server for tests: the real protocol with signatures that are verified, on a port of the loopback interface,
//! with AWS's semantics unless a bucket's rules say otherwise, and with faults at request.
//!
//! It owns its runtime and its threads, so that tests without tokio use it too; dropping it closes the port and all
//! connections. server/bucket.rs owns the rules, server/fault.rs what goes wrong and when, server/http.rs makes it so,
//! server/s3.rs translates between the protocol and the buckets, server/blob.rs keeps the bytes.

mod blob;
mod bucket;
mod fault;
mod http;
mod s3;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use tidelog_upload::Operation;

use bucket::Bucket;
pub use bucket::BucketRules;
use fault::Faults;
pub(crate) use fault::SplitMix;
pub use fault::{Fault, Rule};

/// The access key that every server knows when it starts.
pub const ACCESS_KEY: &str = "tidelog-access";
/// The secret to [`ACCESS_KEY`], and to every key that follows it.
pub const SECRET_KEY: &str = "tidelog-secret";
/// The region that the server is in.
pub const REGION: &str = "us-east-1";

/// How to start a server. The default listens on a free port, has no buckets and keeps everything in memory.
#[derive(Clone, Debug, Default)]
pub struct ServerOptions {
    /// Where to listen; by default a free port of 127.0.0.1.
    pub address: Option<SocketAddr>,
    /// The buckets, all with the same rules at first.
    pub buckets: Vec<String>,
    /// The rules of the buckets.
    pub rules: BucketRules,
    /// Where bodies are kept, an existing folder; without one, in memory. Files go with their objects and with the
    /// server.
    pub folder: Option<PathBuf>,
    /// For the faults with a probability, and for upload ids.
    pub seed: u64,
}

/// A running server.
///
/// ```
/// use tidelog_testing::{S3Server, ServerOptions};
///
/// let server = S3Server::start(ServerOptions { buckets: vec!["bucket-0".into()], ..Default::default() })?;
/// assert!(server.endpoint().starts_with("http://127.0.0.1:"));
/// assert!(server.objects("bucket-0").is_empty());
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct S3Server {
    address: SocketAddr,
    state: Arc<State>,
    runtime: Option<tokio::runtime::Runtime>,
}

/// A complete object, as an oracle sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectInfo {
    /// Its name.
    pub name: String,
    /// Its length in bytes.
    pub bytes: u64,
    /// Its tag, without quotes.
    pub tag: String,
}

/// An upload neither complete nor aborted, as an oracle sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UploadInfo {
    /// The name of its object.
    pub name: String,
    /// Its id.
    pub id: String,
    /// The number and the bytes of each part that has arrived.
    pub parts: Vec<(u32, u64)>,
}

/// A request whose head has arrived.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Request {
    /// What was asked.
    pub operation: Operation,
    /// Of which bucket.
    pub bucket: String,
    /// Of which object; the prefix of a listing is not told here.
    pub name: String,
    /// The part number, of [`Operation::PutPart`] only.
    pub part: Option<u32>,
    /// The announced length of its body in bytes.
    pub body_bytes: u64,
    /// On which connection, counted from 0.
    pub connection: u64,
}

impl S3Server {
    /// Starts a server.
    ///
    /// # Errors
    /// The port is taken, or a thread cannot be had.
    pub fn start(options: ServerOptions) -> io::Result<S3Server> {
        let listener =
            TcpListener::bind(options.address.unwrap_or_else(|| SocketAddr::from(([127, 0, 0, 1], 0))))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let buckets = options
            .buckets
            .iter()
            .map(|name| (name.clone(), Bucket { rules: options.rules.clone(), ..Bucket::default() }));
        let state = Arc::new(State {
            buckets: Mutex::new(buckets.collect()),
            faults: Mutex::new(Faults::new(options.seed)),
            random: Mutex::new(SplitMix(options.seed ^ 0x5eed)),
            keys: Mutex::new(Keys { valid: ACCESS_KEY.to_owned(), expired: BTreeSet::new() }),
            clock_offset_seconds: Mutex::new(0),
            requests: Mutex::new(Vec::new()),
            connections: AtomicU64::new(0),
            blobs: AtomicU64::new(0),
            folder: options.folder,
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("s3-server")
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        runtime.spawn(http::serve(listener, state.clone()));
        Ok(S3Server { address, state, runtime: Some(runtime) })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Where it listens, as a URL without a path.
    #[must_use]
    pub fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Adds a fault. Several may strike one request: delays add up, and the first added decides the outcome.
    pub fn add_rule(&self, rule: Rule) {
        lock(&self.state.faults).rules.push(rule);
    }

    /// Ends all faults. Requests that they have already struck keep them.
    pub fn clear_rules(&self) {
        lock(&self.state.faults).rules.clear();
    }

    /// Changes the rules of a bucket, which is created if it does not exist.
    pub fn set_bucket_rules(&self, bucket: &str, rules: BucketRules) {
        lock(&self.state.buckets).entry(bucket.to_owned()).or_default().rules = rules;
    }

    /// Lets the credentials in use expire, and returns the access key that is valid from now on. The secret stays
    /// [`SECRET_KEY`].
    pub fn expire_credentials(&self) -> String {
        let mut keys = lock(&self.state.keys);
        let next = format!("{ACCESS_KEY}-{}", keys.expired.len() + 1);
        let old = std::mem::replace(&mut keys.valid, next.clone());
        keys.expired.insert(old);
        next
    }

    /// Sets how far the server's clock is ahead of this machine's. Requests signed for another time than the server's,
    /// by more than fifteen minutes, are refused; all answers carry the server's time.
    pub fn set_clock_offset(&self, seconds: i64) {
        *lock(&self.state.clock_offset_seconds) = seconds;
    }

    /// The objects of a bucket, by name.
    ///
    /// # Panics
    /// There is no such bucket.
    #[must_use]
    pub fn objects(&self, bucket: &str) -> Vec<ObjectInfo> {
        self.with(bucket, |bucket| {
            let info = |(name, object): (&String, &bucket::Object)| ObjectInfo {
                name: name.clone(),
                bytes: object.bytes,
                tag: object.tag.clone(),
            };
            bucket.objects.iter().map(info).collect()
        })
    }

    /// The bytes of an object.
    ///
    /// # Panics
    /// There is no such bucket, or its folder cannot be read.
    #[must_use]
    pub fn object(&self, bucket: &str, name: &str) -> Option<Vec<u8>> {
        let object = self.with(bucket, |bucket| bucket.objects.get(name).cloned())?;
        let mut bytes = Vec::new();
        for piece in blob::pieces(&object.blobs, 0..object.bytes) {
            bytes.extend_from_slice(&piece.expect("the server's own file is readable"));
        }
        Some(bytes)
    }

    /// The uploads of a bucket that are neither complete nor aborted, by name.
    ///
    /// # Panics
    /// There is no such bucket.
    #[must_use]
    pub fn uploads(&self, bucket: &str) -> Vec<UploadInfo> {
        self.with(bucket, |bucket| {
            let info = |((name, id), upload): (&(String, String), &bucket::Upload)| UploadInfo {
                name: name.clone(),
                id: id.clone(),
                parts: upload.parts.iter().map(|(number, part)| (*number, part.blob.bytes)).collect(),
            };
            bucket.uploads.iter().map(info).collect()
        })
    }

    /// Forgets the uploads of a bucket that are open, as a lifecycle rule does.
    ///
    /// # Panics
    /// There is no such bucket.
    pub fn expire_uploads(&self, bucket: &str) {
        self.with(bucket, |bucket| bucket.uploads.clear());
    }

    /// All requests so far, in the order of their arrival, those that were refused or not answered too.
    #[must_use]
    pub fn requests(&self) -> Vec<Request> {
        lock(&self.state.requests).clone()
    }

    /// How many requests of a kind have arrived so far.
    #[must_use]
    pub fn count(&self, operation: Operation) -> usize {
        lock(&self.state.requests).iter().filter(|request| request.operation == operation).count()
    }

    /// How many connections have been accepted so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.state.connections.load(Ordering::Relaxed)
    }

    fn with<R>(&self, bucket: &str, f: impl FnOnce(&mut Bucket) -> R) -> R {
        let mut buckets = lock(&self.state.buckets);
        f(buckets.get_mut(bucket).unwrap_or_else(|| panic!("the test server has no bucket {bucket:?}")))
    }
}

impl Drop for S3Server {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not one that waits: a server may be dropped inside another runtime.
            runtime.shutdown_background();
        }
    }
}

#[derive(Debug)]
struct State {
    buckets: Mutex<BTreeMap<String, Bucket>>,
    faults: Mutex<Faults>,
    random: Mutex<SplitMix>,
    keys: Mutex<Keys>,
    clock_offset_seconds: Mutex<i64>,
    requests: Mutex<Vec<Request>>,
    connections: AtomicU64,
    blobs: AtomicU64,
    folder: Option<PathBuf>,
}

#[derive(Debug)]
struct Keys {
    valid: String,
    expired: BTreeSet<String>,
}

impl State {
    fn random(&self) -> u128 {
        let mut random = lock(&self.random);
        u128::from(random.next()) << 64 | u128::from(random.next())
    }

    /// Where the next body is kept, if not in memory.
    fn blob_path(&self) -> Option<PathBuf> {
        let folder = self.folder.as_ref()?;
        Some(folder.join(format!("blob-{:08}", self.blobs.fetch_add(1, Ordering::Relaxed))))
    }

    fn now(&self) -> SystemTime {
        let offset = *lock(&self.clock_offset_seconds);
        let distance = std::time::Duration::from_secs(offset.unsigned_abs());
        if offset < 0 { SystemTime::now() - distance } else { SystemTime::now() + distance }
    }
}

/// A panic in one request leaves what it had not yet changed, which is good enough for a test that has failed.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
