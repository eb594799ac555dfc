//! A word on standard error while something takes long, so that nobody takes waiting for hanging.

use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

/// How long nothing is said.
const FIRST: Duration = Duration::from_secs(3);
/// How long until it is said again.
const AGAIN: Duration = Duration::from_secs(15);

/// Says from time to time what is being waited for, until it is dropped.
pub struct Patience {
    told: Sender<String>,
}

impl Patience {
    /// Begins to wait for what `why` says.
    pub fn new(why: impl Into<String>) -> Patience {
        let (told, what) = mpsc::channel::<String>();
        let mut why = why.into();
        let begun = Instant::now();
        // It ends by itself, and nobody waits for it: at worst a last line comes late.
        thread::spawn(move || {
            let mut next = begun + FIRST;
            loop {
                match what.recv_timeout(next.saturating_duration_since(Instant::now())) {
                    Ok(newer) => why = newer,
                    Err(RecvTimeoutError::Disconnected) => return,
                    Err(RecvTimeoutError::Timeout) => {
                        next += AGAIN;
                        let seconds = begun.elapsed().as_secs();
                        // Nobody may be reading.
                        let _ = writeln!(std::io::stderr(), "tidelog: {why}; {seconds} s so far");
                    }
                }
            }
        });
        Patience { told }
    }

    /// What is being waited for now.
    pub fn say(&self, why: String) {
        // It listens until this is dropped.
        let _ = self.told.send(why);
    }
}
