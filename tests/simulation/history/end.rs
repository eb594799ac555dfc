//! How a history ends: on a healthy machine everything is answered, everybody can go on, and nothing is left behind.

use std::time::Duration;

use super::{History, Over, Wait, Way};

/// Within this many steps of a healthy machine everything must be settled; each is long enough for retries to come due.
const SETTLE_STEPS_MAX: usize = 2_000;
const SETTLE_STEP: Duration = Duration::from_millis(20);
impl History {
    /// On a healthy machine everything that was asked for is answered, and everybody can go on.
    pub fn settle(&mut self) -> Result<(), Over> {
        self.heal();
        self.finish_readings();
        self.step_until("every future resolves", |history| history.waits.is_empty())
    }

    fn step_until(&mut self, what: &str, done: impl Fn(&History) -> bool) -> Result<(), Over> {
        for _ in 0..SETTLE_STEPS_MAX {
            if done(self) {
                return Ok(());
            }
            self.machine.pass(SETTLE_STEP);
            self.step_now()?;
        }
        if self.silent_faults {
            // A block that cannot be read keeps the disk from being freed.
            return Err(Over);
        }
        panic!("within {SETTLE_STEPS_MAX} steps of a healthy machine: {what}; {}", self.describe());
    }

    /// What is still there, for whoever looks for the reason.
    fn describe(&self) -> String {
        use std::fmt::Write;
        let mut text = String::new();
        for wait in &self.waits {
            let _ = match wait {
                Wait::Sync { log, to, .. } => write!(text, "log {log}: sync to {to}; "),
                Wait::Durable { log, to, .. } => write!(text, "log {log}: durable to {to}; "),
                Wait::Persist { log, from, to, .. } => write!(text, "log {log}: persist {from}..{to}; "),
            };
        }
        let uploads = self.uploads_left_over();
        let _ = write!(text, "left over: {:?}, uploads {uploads:?}", self.left_over());
        text
    }

    /// The end of every history: all that was promised is there, everybody can go on, and nothing is left behind when
    /// nothing is needed.
    pub fn finish(&mut self) -> Result<(), Over> {
        say!(self, "the end begins");
        self.ends = true;
        self.machine.call_crash_off();
        self.settle()?;
        for live in 0..self.live.len() {
            let len = self.machine.shape.value_bytes_max;
            let mut appended = false;
            for _ in 0..SETTLE_STEPS_MAX {
                appended = self.append(live, len, Way::Append);
                if appended {
                    break;
                }
                self.machine.pass(SETTLE_STEP);
                self.step_now()?;
            }
            assert!(appended || self.silent_faults, "a healthy machine has no room for a large value");
            self.sync(live);
            self.persist(live);
        }
        for found in 0..self.found.len() {
            self.read_found(found, false);
            self.persist_found(found);
        }
        self.settle()?;
        for found in 0..self.found.len() {
            self.read_found(found, false);
        }
        for log in 0..self.model.logs.len() {
            self.check_some_handles(log);
        }
        say!(self, "nothing is needed any more");
        for log in 0..self.model.logs.len() {
            let to = self.model.logs[log].next();
            self.truncate(log, to);
        }
        while !self.live.is_empty() {
            self.truncate_and_close(0);
        }
        for found in 0..self.found.len() {
            self.discard_found(found);
        }
        let sick = self.sick;
        self.settle()?;
        for _ in 0..SETTLE_STEPS_MAX / 10 {
            self.machine.pass(SETTLE_STEP);
            self.step_now()?;
        }
        // Of what holders have, nothing was deleted meanwhile.
        self.check_holders();
        self.release_all();
        if !sick && !self.silent_faults {
            self.step_until("no object is left", |history| history.left_over().is_empty())?;
        }
        self.close(true)?;
        if self.silent_faults {
            return Ok(());
        }
        // What was forgotten while there was no disk to record it comes back, and goes for good.
        assert!(sick || self.holders_known() == 0, "a holder was not forgotten");
        self.release_all();
        for found in 0..self.found.len() {
            assert!(sick, "log {} was not forgotten", self.found[found].recovered.log());
            self.discard_found(found);
        }
        self.settle()?;
        self.step_until("no object or upload is left", |history| {
            history.left_over().is_empty() && history.uploads_left_over().is_empty()
        })
    }

    /// Objects that nobody needs when no log is left.
    fn left_over(&self) -> Vec<(String, String)> {
        let objects = self.machine.objects().into_keys();
        objects.filter(|object| !self.orphans.contains(object) && !self.holds.is_undecided(object)).collect()
    }

    fn uploads_left_over(&self) -> Vec<String> {
        let uploads = self.machine.open_uploads().into_iter();
        uploads.filter(|upload| !self.orphan_uploads.contains(upload)).collect()
    }
}
