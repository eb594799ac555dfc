//! Waiting: a word on standard error while something takes long, so that nobody takes waiting for hanging, and an end.

use std::fmt::Display;
use std::io::Write;
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::{Duration, Instant};

use crate::{Failure, parse_time};

/// How long nothing is said.
const FIRST: Duration = Duration::from_secs(3);
/// How long until it is said again.
const AGAIN: Duration = Duration::from_secs(15);

/// When to give buckets up that send nothing.
#[derive(clap::Args, Clone, Copy, Debug)]
pub struct PatienceArgs {
    /// Gives up when nothing has come from a bucket for so long (ms, s).
    #[arg(long, value_name = "TIME", default_value = "120s", value_parser = parse_time)]
    patience: Duration,
}

impl PatienceArgs {
    /// Waits for something from `place`, and says so from time to time. `answer` waits for so long; when it has nothing then,
    /// it tells by any count what has come on the way to it: while that grows, patience begins anew.
    ///
    /// # Errors
    /// Nothing came in time: names `place`, and what to do.
    pub fn wait_for<T>(
        self,
        place: impl Display,
        mut answer: impl FnMut(Duration) -> Result<T, u64>,
    ) -> Result<T, Failure> {
        let mut begun = Instant::now();
        let mut next = FIRST;
        let mut known = None;
        loop {
            let left = next.min(self.patience).saturating_sub(begun.elapsed());
            // At first, what is known without waiting.
            match answer(known.map_or(Duration::ZERO, |_| left)) {
                Ok(answer) => return Ok(answer),
                Err(come) if known != Some(come) => {
                    known = Some(come);
                    (begun, next) = (Instant::now(), FIRST);
                    continue;
                }
                Err(_) => {}
            }
            let waited = begun.elapsed();
            if waited >= self.patience {
                return Err(Failure::new(format!(
                    "nothing has come from {place} for {:?}: see whether its server is up and can be reached, as `tidelog \
                     doctor --bucket` does; if it is only slow, give --patience more",
                    self.patience
                )));
            }
            if waited >= next {
                next = waited + AGAIN;
                say(format_args!("nothing comes from {place}"), waited);
            }
        }
    }
}

fn say(what: impl Display, waited: Duration) {
    // Nobody may be reading.
    let _ = writeln!(std::io::stderr(), "tidelog: {what}; {} s so far", waited.as_secs());
}

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
                        say(&why, begun.elapsed());
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
