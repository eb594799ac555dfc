//! A TCP proxy for tests: each connection has a fate, chosen by its number.
//!
//! It owns its runtime; dropping it closes the port and all connections. What the bytes mean is none of its business.

use std::fmt;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, sleep_until, timeout};

use crate::server::SplitMix;

/// What is passed on at a time.
const STEP_BYTES: usize = 16 * 1024;
/// How long what is still on its way is waited for when a connection is closed in good order.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(1);

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// From the client to the server.
    Up,
    /// From the server to the client.
    Down,
}

/// What becomes of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Nothing special.
    Healthy,
    /// No more than so many bytes a second, in each direction.
    Throttled {
        /// The rate.
        bytes_per_second: u64,
    },
    /// Nothing more is passed on in either direction after so many bytes in one; the connection stays open.
    Stalled {
        /// Where the bytes are counted.
        direction: Direction,
        /// How many are passed on.
        after_bytes: u64,
    },
    /// Reset on both sides after so many bytes in one direction.
    Reset {
        /// Where the bytes are counted.
        direction: Direction,
        /// How many are passed on.
        after_bytes: u64,
    },
    /// Closed in good order on both sides after so many bytes in one direction.
    Truncated {
        /// Where the bytes are counted.
        direction: Direction,
        /// How many are passed on.
        after_bytes: u64,
    },
    /// Closed in good order when no byte has come from either side for this long.
    IdleClosed {
        /// How long.
        after: Duration,
    },
    /// Accepted, and then nothing.
    Dead,
}

/// The fate of each connection by its number, from 0.
type Plan = Box<dyn FnMut(u64) -> Fate + Send>;

/// A running proxy.
///
/// ```
/// use std::io::{Read, Write};
/// use std::net::{TcpListener, TcpStream};
/// use tidelog_testing::{Direction, Fate, Proxy};
///
/// let server = TcpListener::bind("127.0.0.1:0")?;
/// let proxy = Proxy::start(server.local_addr()?)?;
/// proxy.set(|index| match index {
///     0 => Fate::Truncated { direction: Direction::Down, after_bytes: 2 },
///     _ => Fate::Healthy,
/// });
/// let mut client = TcpStream::connect(proxy.address())?;
/// server.accept()?.0.write_all(b"hello")?;
/// let mut read = Vec::new();
/// client.read_to_end(&mut read)?;
/// assert_eq!(read, b"he");
/// # Ok::<(), std::io::Error>(())
/// ```
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    runtime: Option<tokio::runtime::Runtime>,
}

impl fmt::Debug for Proxy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Proxy").field("address", &self.address).finish_non_exhaustive()
    }
}

struct Shared {
    target: SocketAddr,
    plan: Mutex<Plan>,
    connections: AtomicU64,
    bytes_up: AtomicU64,
    bytes_down: AtomicU64,
    /// What has been ordered for all connections that were open then, with the number of those accepted before.
    order: watch::Sender<Order>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Order {
    frozen_below: u64,
    reset_below: u64,
}

impl Proxy {
    /// Starts a proxy to `target` on a free port of 127.0.0.1. All connections are healthy until [`set`](Proxy::set).
    ///
    /// # Errors
    /// No port or no thread can be had.
    pub fn start(target: SocketAddr) -> io::Result<Proxy> {
        let listener = TcpListener::bind(SocketAddr::from(([127, 0, 0, 1], 0)))?;
        listener.set_nonblocking(true)?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared {
            target,
            plan: Mutex::new(Box::new(|_| Fate::Healthy)),
            connections: AtomicU64::new(0),
            bytes_up: AtomicU64::new(0),
            bytes_down: AtomicU64::new(0),
            order: watch::Sender::new(Order::default()),
        });
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("proxy")
            .enable_all()
            .build()?;
        let listener = {
            let _inside = runtime.enter();
            tokio::net::TcpListener::from_std(listener)?
        };
        let accepting = shared.clone();
        runtime.spawn(async move {
            loop {
                match listener.accept().await {
                    Ok((stream, _)) => {
                        let index = accepting.connections.fetch_add(1, Ordering::Relaxed);
                        let fate = (accepting.plan.lock().unwrap_or_else(PoisonError::into_inner))(index);
                        tokio::spawn(serve(stream, index, fate, accepting.clone()));
                    }
                    // Out of descriptors, most likely: give the tests' connections time to end.
                    Err(_) => sleep(Duration::from_millis(10)).await,
                }
            }
        });
        Ok(Proxy { address, shared, runtime: Some(runtime) })
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

    /// Sets the fates of connections accepted from now on, by their number since the start of the proxy.
    pub fn set(&self, plan: impl FnMut(u64) -> Fate + Send + 'static) {
        *self.shared.plan.lock().unwrap_or_else(PoisonError::into_inner) = Box::new(plan);
    }

    /// Gives each connection from now on this fate with this probability, else a healthy life.
    pub fn set_with_probability(&self, probability: f64, fate: Fate, seed: u64) {
        let mut random = SplitMix(seed);
        self.set(move |_| if random.chance(probability) { fate } else { Fate::Healthy });
    }

    /// Passes nothing on any more, on all connections that are open now; they stay open, as after an outage of the
    /// network.
    pub fn freeze(&self) {
        let below = self.connections();
        self.shared.order.send_modify(|order| order.frozen_below = below);
    }

    /// Resets all connections that are open now.
    pub fn reset(&self) {
        let below = self.connections();
        self.shared.order.send_modify(|order| order.reset_below = below);
    }

    /// How many connections have been accepted so far.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.shared.connections.load(Ordering::Relaxed)
    }

    /// How many bytes have been passed on so far.
    #[must_use]
    pub fn bytes(&self, direction: Direction) -> u64 {
        self.shared.passed(direction).load(Ordering::Relaxed)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        if let Some(runtime) = self.runtime.take() {
            // Not one that waits: a proxy may be dropped inside another runtime.
            runtime.shutdown_background();
        }
    }
}

impl Shared {
    fn passed(&self, direction: Direction) -> &AtomicU64 {
        match direction {
            Direction::Up => &self.bytes_up,
            Direction::Down => &self.bytes_down,
        }
    }
}

/// How a connection ends.
enum End {
    Close,
    Reset,
}

struct Connection {
    index: u64,
    fate: Fate,
    shared: Arc<Shared>,
    stalled: AtomicBool,
    last_byte: Mutex<Instant>,
}

async fn serve(mut client: TcpStream, index: u64, fate: Fate, shared: Arc<Shared>) {
    let mut orders = shared.order.subscribe();
    let mut reset = pin!(async move {
        // Fails only when the proxy is gone, and this task with it.
        let _ = orders.wait_for(|order| index < order.reset_below).await;
    });
    if fate == Fate::Dead {
        reset.await;
        let _ = client.set_zero_linger();
        return;
    }
    let Ok(mut server) = TcpStream::connect(shared.target).await else {
        let _ = client.set_zero_linger();
        return;
    };
    let _ = (client.set_nodelay(true), server.set_nodelay(true));
    let connection = Connection {
        index,
        fate,
        shared,
        stalled: AtomicBool::new(false),
        last_byte: Mutex::new(Instant::now()),
    };
    let (mut client_read, mut client_write) = client.split();
    let (mut server_read, mut server_write) = server.split();
    let end = {
        let mut up = pin!(connection.pass_on(Direction::Up, &mut client_read, &mut server_write));
        let mut down = pin!(connection.pass_on(Direction::Down, &mut server_read, &mut client_write));
        let both = async {
            // After one side has said all, the other may still speak.
            tokio::select! {
                end = &mut up => match end { None => down.await, some => some },
                end = &mut down => match end { None => up.await, some => some },
            }
        };
        tokio::select! {
            end = both => end.unwrap_or(End::Close),
            () = connection.idle() => End::Close,
            () = &mut reset => End::Reset,
        }
    };
    match end {
        End::Reset => {
            let _ = (client.set_zero_linger(), server.set_zero_linger());
        }
        End::Close => {
            let _ = (client_write.shutdown().await, server_write.shutdown().await);
            // Bytes left unread would turn the close into a reset.
            let rest = async { tokio::join!(drain(&mut client_read), drain(&mut server_read)) };
            let _ = timeout(DRAIN_TIME_MAX, rest).await;
        }
    }
}

impl Connection {
    /// Returns when nothing more comes, and how both sides end if it is to end for both.
    async fn pass_on(
        &self,
        direction: Direction,
        from: &mut (impl AsyncRead + Unpin),
        to: &mut (impl AsyncWrite + Unpin),
    ) -> Option<End> {
        let limit = match self.fate {
            Fate::Stalled { direction: at, after_bytes }
            | Fate::Reset { direction: at, after_bytes }
            | Fate::Truncated { direction: at, after_bytes }
                if at == direction =>
            {
                after_bytes
            }
            _ => u64::MAX,
        };
        let mut passed = 0;
        let mut buffer = vec![0; STEP_BYTES];
        loop {
            if passed == limit {
                match self.fate {
                    Fate::Reset { .. } => return Some(End::Reset),
                    Fate::Truncated { .. } => return Some(End::Close),
                    _ => {
                        self.stalled.store(true, Ordering::Relaxed);
                        std::future::pending().await
                    }
                }
            }
            let bytes = match from.read(&mut buffer).await {
                Ok(0) => {
                    let _ = to.shutdown().await;
                    return None;
                }
                Ok(bytes) => (bytes as u64).min(limit - passed),
                Err(_) => return Some(End::Reset),
            };
            *self.last_byte.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
            if let Fate::Throttled { bytes_per_second } = self.fate {
                sleep(Duration::from_secs_f64(bytes as f64 / bytes_per_second.max(1) as f64)).await;
            }
            let frozen = self.index < self.shared.order.borrow().frozen_below;
            if frozen || self.stalled.load(Ordering::Relaxed) {
                std::future::pending::<()>().await;
            }
            if to.write_all(&buffer[..bytes as usize]).await.is_err() {
                return Some(End::Reset);
            }
            passed += bytes;
            self.shared.passed(direction).fetch_add(bytes, Ordering::Relaxed);
        }
    }

    /// Returns when the connection has been idle for longer than its fate allows.
    async fn idle(&self) {
        let Fate::IdleClosed { after } = self.fate else { return std::future::pending().await };
        loop {
            let end = *self.last_byte.lock().unwrap_or_else(PoisonError::into_inner) + after;
            if end <= Instant::now() {
                return;
            }
            sleep_until(end).await;
        }
    }
}

async fn drain(from: &mut (impl AsyncRead + Unpin)) {
    let mut buffer = vec![0; STEP_BYTES];
    while matches!(from.read(&mut buffer).await, Ok(1..)) {}
}
