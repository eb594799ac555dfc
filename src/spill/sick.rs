//! The spiller of a device that is out of service: blocks go to the uploader from memory.

use std::io;
use std::sync::Arc;

use tidelog_io::aligned::AlignedBuf;
use tidelog_io::segment::BlockPlace;

use super::{FinishedInfo, Spiller};
use crate::block;
use crate::error::SyncError;
use crate::queue::Held;

impl Spiller {
    /// The device is out of service: what is in memory goes to the uploader from there.
    pub(super) fn fall_sick(&mut self, error: Arc<io::Error>) {
        tracing::error!(%error, directory = %self.parts.directory.display(),
            "the local directory is out of service; changes are held in memory only, persists go on from there");
        metrics::gauge!("tidelog_local_tier_failed", "directory" => self.parts.directory.display().to_string()).set(1.0);
        self.parts.ledger.detach();
        let failure = SyncError::LocalTierFailed {
            directory: self.parts.directory.clone(),
            source: Arc::clone(&error),
        };
        let next_number = self.parts.segments.next_number();
        self.sick = Some((error, next_number));
        for (number, buffer, len) in self.parts.segments.take_lost() {
            let (submitted, info) = self.submitted.pop_front().expect("only submitted blocks are lost");
            assert_eq!(number, submitted, "blocks are lost in the order of their numbers");
            let held = Held::uncharged(buffer.into_bytes(len));
            fail_logs(&info, &failure);
            self.send(number, None, len, Some(held), info);
        }
        for (_, answer) in self.syncs.drain(..) {
            answer.give(Err(failure.clone()));
        }
        self.parts.device.fail(&failure);
    }

    pub(super) fn failure(&self) -> Option<SyncError> {
        let (source, _) = self.sick.as_ref()?;
        Some(SyncError::LocalTierFailed {
            directory: self.parts.directory.clone(),
            source: Arc::clone(source),
        })
    }

    pub(super) fn send_from_memory(&mut self, mut buffer: AlignedBuf, len: usize, info: FinishedInfo) {
        let Some(failure) = self.failure() else { return };
        fail_logs(&info, &failure);
        let Some((_, next)) = &mut self.sick else { return };
        let number = *next;
        *next += 1;
        let nowhere = BlockPlace {
            directory: 0,
            segment: u32::MAX,
            epoch: 0,
            index: 0,
            offset: 0,
            number,
            watermark: 0,
        };
        block::seal(&mut buffer[..len], &nowhere);
        let held = Held::uncharged(buffer.into_bytes(len));
        self.send(number, None, len, Some(held), info);
    }
}

/// What is in this block will not become durable, nor what comes after it. Its logs may be closed already.
fn fail_logs(info: &FinishedInfo, failure: &SyncError) {
    info.ends.iter().for_each(|(log, _)| log.fail_waiters(failure));
}
