//! A subscriber of `tracing` sees a span for each checkpoint, object, part and request, one within the other.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tidelog::{Changelog, Durability, KeyGroup, KeyGroupRange, Options, Seams, SequenceNumber};
use tidelog_io::sim::{SimRng, SimWorld};
use tidelog_upload::sim::SimStore;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

#[derive(Clone, Debug, Default)]
struct Seen {
    name: &'static str,
    parent: Option<u64>,
    fields: BTreeMap<&'static str, String>,
    handles: u64,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// Remembers the spans of this library.
#[derive(Clone, Default)]
struct Witness {
    /// By their ids, from 1.
    seen: Arc<Mutex<Vec<Seen>>>,
    entered: Arc<Mutex<Vec<u64>>>,
}

impl Subscriber for Witness {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("tidelog")
    }

    fn new_span(&self, attributes: &Attributes<'_>) -> Id {
        let entered = self.entered.lock().unwrap().last().copied();
        let parent = match attributes.is_contextual() {
            true => entered,
            false => attributes.parent().map(Id::into_u64),
        };
        let mut span = Seen { name: attributes.metadata().name(), parent, handles: 1, ..Seen::default() };
        attributes.record(&mut span);
        let mut seen = self.seen.lock().unwrap();
        seen.push(span);
        Id::from_u64(seen.len() as u64)
    }

    fn record(&self, id: &Id, values: &Record<'_>) {
        values.record(&mut self.seen.lock().unwrap()[id.into_u64() as usize - 1]);
    }

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, _: &Event<'_>) {}

    fn enter(&self, id: &Id) {
        self.entered.lock().unwrap().push(id.into_u64());
    }

    fn exit(&self, id: &Id) {
        assert_eq!(self.entered.lock().unwrap().pop(), Some(id.into_u64()));
    }

    fn clone_span(&self, id: &Id) -> Id {
        self.seen.lock().unwrap()[id.into_u64() as usize - 1].handles += 1;
        id.clone()
    }

    fn try_close(&self, id: Id) -> bool {
        let handles = &mut self.seen.lock().unwrap()[id.into_u64() as usize - 1].handles;
        *handles -= 1;
        *handles == 0
    }
}

impl Witness {
    fn named(&self, name: &str) -> Vec<(u64, Seen)> {
        let seen = self.seen.lock().unwrap();
        let of_name = (1..).zip(seen.iter()).filter(|(_, span)| span.name == name);
        of_name.map(|(id, span)| (id, span.clone())).collect()
    }
}

#[test]
fn each_checkpoint_and_each_part_has_a_span() {
    let witness = Witness::default();
    let object = tracing::subscriber::with_default(witness.clone(), checkpoint);
    let checkpoints = witness.named("checkpoint");
    assert_eq!(checkpoints.len(), 1, "{checkpoints:?}");
    assert_eq!(checkpoints[0].1.fields["object"], object);
    assert_eq!(checkpoints[0].1.fields["requests"], "1");
    let objects = witness.named("object");
    assert_eq!(objects.len(), 1, "{objects:?}");
    assert_eq!(objects[0].1.fields["name"], object);
    let parts = witness.named("part");
    assert!(parts.len() > 1, "{parts:?}");
    let requests = witness.named("request");
    for (number, (id, part)) in parts.iter().enumerate() {
        assert_eq!(part.parent, Some(objects[0].0));
        assert_eq!(part.fields["index"], number.to_string());
        assert!(part.fields["bytes"].parse::<u64>().unwrap() > 0);
        let sent: Vec<_> = requests.iter().filter(|(_, request)| request.parent == Some(*id)).collect();
        assert!(!sent.is_empty(), "part {number} was sent");
        assert!(sent.iter().all(|(_, request)| request.fields["operation"].contains("part")), "{sent:?}");
        assert!(sent.iter().all(|(_, request)| request.fields.contains_key("bucket")), "{sent:?}");
    }
    let other = requests.iter().filter(|(_, request)| request.parent == Some(objects[0].0));
    assert!(other.count() >= 2, "the upload was opened and completed: {requests:?}");
    let all = witness.seen.lock().unwrap().clone();
    assert!(all.iter().all(|span| span.handles == 0), "all have ended: {all:?}");
}

/// A checkpoint of several parts, in one bucket; the name of its object.
fn checkpoint() -> String {
    let (start, micros) = (Instant::now(), AtomicU64::new(0));
    let world = SimWorld::new(7);
    let mut random = SimRng::new(1);
    let options = Options::new("sim://0", "/sim")
        .block_bytes(8 << 10)
        .segment_bytes(1 << 20)
        .local_bytes(64 << 20)
        .memory_bytes(64 << 20)
        .lane_bytes(1 << 20);
    let seams = Seams {
        directories: vec![(world.files(), Box::new(world.disk(4, Durability::Power)))],
        stores: vec![Arc::new(SimStore::new(3))],
        clock: Arc::new(move || start + Duration::from_micros(micros.fetch_add(1000, Ordering::Relaxed))),
        random: Box::new(move || random.next_u64()),
    };
    let changelog = Changelog::open_simulated(options, seams).unwrap();
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    // More than goes in one request.
    for number in 0..25_000u64 {
        let value = number.to_le_bytes().repeat(100);
        while writer.try_append(KeyGroup(1), &value).is_err() {
            changelog.step();
        }
    }
    let mut future = writer.persist_durably(SequenceNumber::ZERO);
    for _ in 0..100_000 {
        changelog.step();
        match future.wait_timeout(Duration::ZERO) {
            Ok(handle) => {
                // What follows from the end of the object.
                for _ in 0..1000 {
                    changelog.step();
                }
                return handle.unwrap().objects().next().unwrap().1.to_owned();
            }
            Err(again) => future = again,
        }
    }
    panic!("never answered");
}
