//! The SDK's clients of one bucket: one per lane with connections of its own, credentials, the clock they sign by.
//!
//! Everything that the SDK would do behind our back is off: retries, time limits, the stalled-stream guard, trailing
//! checksums.
#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use aws_config::{BehaviorVersion, Region};
use aws_sdk_s3::Client;
use aws_sdk_s3::config::{
    RequestChecksumCalculation, ResponseChecksumValidation, SharedHttpClient, StalledStreamProtectionConfig,
    retry::RetryConfig, timeout::TimeoutConfig,
};
use aws_smithy_async::time::TimeSource;
use aws_smithy_http_client::Builder as HttpBuilder;
use aws_smithy_http_client::tls::{Provider, rustls_provider::CryptoMode};
use tokio::sync::Mutex as AsyncMutex;

use super::address::Address;
use crate::store::Lane;

/// How long a connection may idle: below the 60 s and more after which servers and balancers drop them without a word.
pub(crate) const IDLE_MAX: Duration = Duration::from_secs(20);

/// The region that servers other than AWS expect in signatures unless they are told otherwise.
const REGION_ELSEWHERE: &str = "us-east-1";

/// Clients made with the same credentials.
#[derive(Debug)]
pub(crate) struct Clients {
    primary: Client,
    hedge: Client,
}

impl Clients {
    pub(crate) fn of(&self, lane: Lane) -> Client {
        match lane {
            Lane::Primary => self.primary.clone(),
            Lane::Hedge => self.hedge.clone(),
        }
    }
}

/// Makes clients at the first request, and anew when their credentials have expired.
#[derive(Debug)]
pub(crate) struct ClientMaker {
    /// Connections of each lane; they outlive the credentials.
    pools: [SharedHttpClient; 2],
    clock: Clock,
    current: Mutex<Option<Arc<Clients>>>,
    /// Held while clients are made, so that they are made once.
    making: AsyncMutex<()>,
}

impl ClientMaker {
    /// With connections that are closed when they were idle for this long.
    pub(crate) fn new(idle_max: Duration) -> ClientMaker {
        let pool = || {
            HttpBuilder::new()
                .tls_provider(Provider::Rustls(CryptoMode::Ring))
                .pool_idle_timeout(idle_max)
                .build_https()
        };
        ClientMaker {
            pools: [pool(), pool()],
            clock: Clock::default(),
            current: Mutex::default(),
            making: AsyncMutex::default(),
        }
    }

    /// The clients to use; made if there are none, or only `expired` ones.
    ///
    /// # Errors
    /// What keeps them from being made, for people.
    pub(crate) async fn clients(
        &self,
        address: &Address,
        expired: Option<&Arc<Clients>>,
    ) -> Result<Arc<Clients>, String> {
        let usable = || {
            let current = self.current.lock().unwrap_or_else(PoisonError::into_inner).clone();
            current.filter(|current| expired.is_none_or(|expired| !Arc::ptr_eq(current, expired)))
        };
        if let Some(clients) = usable() {
            return Ok(clients);
        }
        let _making = self.making.lock().await;
        if let Some(clients) = usable() {
            return Ok(clients);
        }
        let clients = Arc::new(self.make(address).await?);
        *self.current.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::clone(&clients));
        Ok(clients)
    }

    /// Signs by the store's time from here on.
    pub(crate) fn set_time(&self, time: SystemTime) {
        self.clock.set(time);
    }

    async fn make(&self, address: &Address) -> Result<Clients, String> {
        // What asks other services for credentials keeps the SDK's time limits and retries: nobody here knows of them.
        let mut loader = aws_config::defaults(BehaviorVersion::latest()).http_client(self.pools[0].clone());
        if let Some(region) = &address.region {
            loader = loader.region(Region::new(region.clone()));
        }
        if address.anonymous {
            loader = loader.no_credentials();
        }
        let shared = loader.load().await;
        if address.endpoint.is_none() && shared.endpoint_url().is_some() {
            // What the server takes was decided when the bucket was opened.
            let text = "the profile names an endpoint, which is not taken from there: set AWS_ENDPOINT_URL_S3 or, for a \
                        bucket that no handle names yet, say ?endpoint=... in its URL";
            return Err(text.to_owned());
        }
        let mut config = aws_sdk_s3::config::Builder::from(&shared)
            .retry_config(RetryConfig::disabled())
            .timeout_config(TimeoutConfig::disabled())
            .stalled_stream_protection(StalledStreamProtectionConfig::disabled())
            .request_checksum_calculation(RequestChecksumCalculation::WhenRequired)
            .response_checksum_validation(ResponseChecksumValidation::WhenRequired)
            .force_path_style(address.path_style)
            .time_source(self.clock.clone());
        if let Some(endpoint) = &address.endpoint {
            config = config.endpoint_url(endpoint.clone());
        }
        if shared.region().is_none() {
            if address.endpoint.is_none() {
                let text = "no region is known: set AWS_REGION or the region of the profile or, for a bucket that no \
                            handle names yet, say ?region=... in its URL";
                return Err(text.to_owned());
            }
            config = config.region(Region::from_static(REGION_ELSEWHERE));
        }
        let client =
            |pool: &SharedHttpClient| Client::from_conf(config.clone().http_client(pool.clone()).build());
        Ok(Clients { primary: client(&self.pools[0]), hedge: client(&self.pools[1]) })
    }
}

/// This machine's clock, put right by what the store said. For signatures only.
#[derive(Clone, Debug, Default)]
struct Clock {
    /// To be added, in milliseconds.
    offset_ms: Arc<AtomicI64>,
}

impl Clock {
    fn set(&self, time: SystemTime) {
        let ms = |duration: Duration| i64::try_from(duration.as_millis()).unwrap_or(i64::MAX);
        let offset = match time.duration_since(SystemTime::now()) {
            Ok(ahead) => ms(ahead),
            Err(behind) => -ms(behind.duration()),
        };
        self.offset_ms.store(offset, Ordering::Relaxed);
    }
}

impl TimeSource for Clock {
    fn now(&self) -> SystemTime {
        let now = SystemTime::now();
        let offset = self.offset_ms.load(Ordering::Relaxed);
        let by = Duration::from_millis(offset.unsigned_abs());
        let moved = if offset < 0 { now.checked_sub(by) } else { now.checked_add(by) };
        moved.unwrap_or(now)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{BufRead, BufReader, Write};
    use std::net::TcpListener;
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

    fn runtime() -> tokio::runtime::Runtime {
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
    }

    fn anonymous(endpoint: &str) -> Address {
        Address::parse(&format!("s3://bucket?endpoint={endpoint}&anonymous=true"), None).unwrap()
    }

    #[test]
    fn the_sdk_neither_retries_nor_limits_nor_guards() {
        let address = anonymous("http://127.0.0.1:9");
        let clients = runtime().block_on(ClientMaker::new(IDLE_MAX).make(&address)).unwrap();
        for lane in [Lane::Primary, Lane::Hedge] {
            let client = clients.of(lane);
            let config = client.config();
            assert_eq!(config.retry_config().unwrap().max_attempts(), 1);
            assert!(!config.timeout_config().unwrap().has_timeouts());
            let guard = config.stalled_stream_protection().unwrap();
            assert!(!guard.upload_enabled() && !guard.download_enabled());
        }
    }

    #[test]
    fn a_connection_that_was_idle_for_too_long_is_not_used_again() {
        assert!(IDLE_MAX < Duration::from_secs(60), "servers drop them after that");
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = anonymous(&format!("http://{}", listener.local_addr().unwrap()));
        let connections = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&connections);
        thread::spawn(move || {
            for stream in listener.incoming() {
                let Ok(mut stream) = stream else { return };
                counted.fetch_add(1, Ordering::Relaxed);
                thread::spawn(move || {
                    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines();
                    while let Some(Ok(line)) = lines.next() {
                        if line.is_empty() {
                            let _ = stream.write_all(b"HTTP/1.1 204 No Content\r\n\r\n");
                        }
                    }
                });
            }
        });
        const DELETES: usize = 10;
        let delete_all = |idle_max: Duration| {
            let before = connections.load(Ordering::Relaxed);
            runtime().block_on(async {
                let clients = ClientMaker::new(idle_max).make(&address).await.unwrap();
                for _ in 0..DELETES {
                    let client = clients.of(Lane::Primary);
                    client.delete_object().bucket("bucket").key("key").send().await.unwrap();
                }
            });
            connections.load(Ordering::Relaxed) - before
        };
        // The shortest time that there is, and one that is not over before the end.
        assert_eq!(delete_all(Duration::from_nanos(1)), DELETES);
        assert!(delete_all(IDLE_MAX) < DELETES);
    }

    #[test]
    fn the_clock_follows_the_store_in_both_directions() {
        let clock = Clock::default();
        for hours in [3u64, 0] {
            for sign in [1, -1] {
                let by = Duration::from_secs(hours * 3600);
                let there = if sign > 0 { SystemTime::now() + by } else { SystemTime::now() - by };
                clock.set(there);
                let apart = clock.now().duration_since(there).unwrap_or_else(|error| error.duration());
                assert!(apart < Duration::from_secs(60), "{apart:?}");
            }
        }
    }
}
