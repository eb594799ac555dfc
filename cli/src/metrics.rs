//! `--metrics-addr`: what the library tells of itself, as the text that Prometheus reads.
//!
//! The server is as small as it can be: a thread, one connection at a time, whatever the path. It ends with the process.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::Duration;

use metrics_exporter_prometheus::{PrometheusBuilder, PrometheusHandle};

use crate::Failure;

/// The upper bounds of histograms' buckets, in seconds: from a request in the same rack to a checkpoint that times out.
const BUCKETS_SECONDS: [f64; 17] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0];
/// How often samples are put into their buckets while nobody reads them.
const UPKEEP: Duration = Duration::from_secs(5);
/// A client that is slower keeps the others from their turn.
const CLIENT_WAIT_MAX: Duration = Duration::from_secs(2);
const REQUEST_BYTES_MAX: u64 = 16 << 10;

/// Where metrics are served.
#[derive(clap::Args, Clone, Debug, Default)]
pub struct MetricsArgs {
    /// Serves metrics in Prometheus' text format at this address, as in 127.0.0.1:9464; port 0 takes a free one. Standard
    /// error says which.
    #[arg(long, value_name = "ADDR")]
    pub(crate) metrics_addr: Option<SocketAddr>,
}

impl MetricsArgs {
    /// Starts to collect and to serve, if that was asked for. Before the changelog is opened: what it tells earlier is not
    /// heard.
    ///
    /// # Errors
    /// The address cannot be had.
    pub fn serve(&self) -> Result<(), Failure> {
        let Some(addr) = self.metrics_addr else { return Ok(()) };
        let failed = |error: &dyn std::fmt::Display| {
            Failure::new(format!("cannot serve metrics at {addr}: {error}; choose another --metrics-addr"))
        };
        let listener = TcpListener::bind(addr).map_err(|error| failed(&error))?;
        let bound = listener.local_addr().map_err(|error| failed(&error))?;
        let builder =
            PrometheusBuilder::new().set_buckets(&BUCKETS_SECONDS).map_err(|error| failed(&error))?;
        let recorder = builder.build_recorder();
        let handle = recorder.handle();
        metrics::set_global_recorder(recorder).map_err(|error| failed(&error))?;
        let upkeep = handle.clone();
        let start = |name: &str, body: Box<dyn FnOnce() + Send>| {
            thread::Builder::new().name(name.to_owned()).spawn(body).map_err(|error| failed(&error))
        };
        start(
            "tidelog-upkeep",
            Box::new(move || {
                loop {
                    thread::sleep(UPKEEP);
                    upkeep.run_upkeep();
                }
            }),
        )?;
        start("tidelog-metrics", Box::new(move || serve(&listener, &handle)))?;
        eprintln!("tidelog: metrics at http://{bound}/metrics");
        Ok(())
    }
}

fn serve(listener: &TcpListener, handle: &PrometheusHandle) {
    for client in listener.incoming() {
        let answered = client.and_then(|client| answer(client, handle));
        if let Err(error) = answered {
            // Also what `accept` says when there are too many open files: not at full speed.
            tracing::debug!(%error, "a client that asked for metrics got none");
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Answers one request.
fn answer(client: TcpStream, handle: &PrometheusHandle) -> io::Result<()> {
    client.set_read_timeout(Some(CLIENT_WAIT_MAX))?;
    client.set_write_timeout(Some(CLIENT_WAIT_MAX))?;
    let mut request = BufReader::new(&client).take(REQUEST_BYTES_MAX);
    let mut first = String::new();
    request.read_line(&mut first)?;
    // All of it is read: what is left would reset the connection before the answer has arrived.
    let mut line = String::from("-");
    while !line.trim_end().is_empty() {
        line.clear();
        request.read_line(&mut line)?;
    }
    let (status, body) = match first.split(' ').next() {
        Some("GET") => ("200 OK", handle.render()),
        _ => ("405 Method Not Allowed", "only GET\n".to_owned()),
    };
    let head = format!(
        "HTTP/1.1 {status}\r\nContent-Type: text/plain; version=0.0.4; charset=utf-8\r\nContent-Length: {}\r\n\
         Connection: close\r\n\r\n",
        body.len()
    );
    (&client).write_all(head.as_bytes())?;
    (&client).write_all(body.as_bytes())
}
