//! Thousands of random histories against a small model of stores that lose answers and apply requests late.

use std::collections::BTreeMap;
use std::time::Duration;

use tidelog_upload::bucket::BucketIndex;
use tidelog_upload::multipart::{Answer, AttemptId, Event, Request};
use tidelog_upload::store::{
    Capabilities, ListedObject, ListedPart, Parts, StoreErrorKind, UploadId, UploadedPart,
};
use tidelog_upload::{HedgeOptions, UploadOptions};

use crate::harness::{Flight, Harness, dense, s3, sequential, tag, whole};

struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        (z ^ (z >> 31)) % bound
    }

    fn chance(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }
}

/// The parts of an upload by number: tag and chunk.
type PartsOf = BTreeMap<u32, (String, u32)>;

/// One bucket: contents are lists of chunks.
#[derive(Default)]
struct Model {
    objects: BTreeMap<String, Vec<u32>>,
    uploads: BTreeMap<(String, UploadId), PartsOf>,
}

struct World {
    random: Random,
    chunks: Vec<u64>,
    capabilities: Vec<Capabilities>,
    models: Vec<Model>,
    /// Requests whose caller has gone, and that may still take effect.
    ghosts: Vec<Flight>,
    tags: u64,
}

impl World {
    fn bytes(&self, chunks: &[u32]) -> u64 {
        chunks.iter().map(|chunk| self.chunks[*chunk as usize]).sum()
    }

    fn apply(&mut self, flight: &Flight) -> Result<Answer, StoreErrorKind> {
        self.tags += 1;
        let new_tag = format!("tag{}", self.tags);
        let parts_min = self.capabilities[flight.bucket.0].part_bytes_min;
        let sparse = self.capabilities[flight.bucket.0].sparse;
        let sequential = self.capabilities[flight.bucket.0].parts == Parts::Sequential;
        let chunks = self.chunks.clone();
        let model = &mut self.models[flight.bucket.0];
        let key = |upload: &UploadId| (flight.name.clone(), upload.clone());
        match &flight.request {
            Request::Put { chunks } => {
                let old = model.objects.insert(flight.name.clone(), chunks.clone().collect());
                assert!(old.is_none(), "{} was there", flight.name);
                Ok(Answer::Tag(tag(&new_tag)))
            }
            Request::Create => {
                let id = UploadId(new_tag.into());
                model.uploads.insert(key(&id), PartsOf::new());
                Ok(Answer::Created(id))
            }
            Request::Part { upload, number, chunk } => {
                let parts = model.uploads.get_mut(&key(upload)).ok_or(StoreErrorKind::NoSuchUpload)?;
                assert!(!sequential || *number == parts.len() as u32 + 1, "{number} out of order");
                parts.insert(*number, (new_tag.clone(), *chunk));
                Ok(Answer::Tag(tag(&new_tag)))
            }
            Request::Complete { upload, parts } => {
                let held = model.uploads.get(&key(upload)).ok_or(StoreErrorKind::NoSuchUpload)?;
                let mut content = Vec::new();
                for (index, UploadedPart { number, tag: named }) in parts.iter().enumerate() {
                    let (tag, chunk) = held.get(number).ok_or(StoreErrorKind::InvalidPart)?;
                    let small = chunks[*chunk as usize] < parts_min && index + 1 < parts.len();
                    if *named.0 != **tag || small || (!sparse && *number != index as u32 + 1) {
                        return Err(StoreErrorKind::InvalidPart);
                    }
                    content.push(*chunk);
                }
                model.uploads.remove(&key(upload));
                model.objects.insert(flight.name.clone(), content);
                Ok(Answer::Tag(tag(&new_tag)))
            }
            Request::ListParts { upload } => {
                let parts = model.uploads.get(&key(upload)).ok_or(StoreErrorKind::NoSuchUpload)?;
                let listed = |(number, (name, chunk)): (&u32, &(String, u32))| ListedPart {
                    number: *number,
                    tag: tag(name),
                    bytes: chunks[*chunk as usize],
                };
                Ok(Answer::Parts(parts.iter().map(listed).collect()))
            }
            Request::Abort { upload } => {
                model.uploads.remove(&key(upload));
                Ok(Answer::Done)
            }
            Request::Head => {
                let content = model.objects.get(&flight.name).ok_or(StoreErrorKind::NotFound)?.clone();
                let (name, bytes) = (flight.name.clone(), self.bytes(&content));
                Ok(Answer::Object(ListedObject { name, bytes, tag: tag("x"), modified: None }))
            }
            Request::Delete => {
                model.objects.remove(&flight.name);
                Ok(Answer::Done)
            }
        }
    }

    fn raise_ghost(&mut self) {
        if !self.ghosts.is_empty() {
            let at = self.random.below(self.ghosts.len() as u64) as usize;
            let ghost = self.ghosts.swap_remove(at);
            let _ = self.apply(&ghost);
        }
    }

    /// How a request ends whose answer does not arrive: it took effect, never will, or may later.
    fn lose(&mut self, flight: &Flight) {
        match self.random.below(3) {
            0 => {
                let _ = self.apply(flight);
            }
            1 => self.ghosts.push(flight.clone()),
            _ => {}
        }
    }
}

fn end_one(
    harness: &mut Harness,
    world: &mut World,
    attempt: AttemptId,
    faults: u64,
    sick: Option<BucketIndex>,
) {
    let flight = harness.in_flight[&attempt].clone();
    if harness.cancelled.contains(&attempt) {
        // It had ended before it was cancelled, or it was cut off.
        if world.random.chance(30) {
            let outcome = world.apply(&flight).map_err(|kind| flight.error(kind));
            return harness.ended(attempt, outcome);
        }
        world.lose(&flight);
        return harness.err(attempt, StoreErrorKind::Cancelled);
    }
    let faults = if sick == Some(flight.bucket) { 80 } else { faults };
    if !world.random.chance(faults) {
        let outcome = world.apply(&flight).map_err(|kind| flight.error(kind));
        return harness.ended(attempt, outcome);
    }
    match world.random.below(10) {
        0..3 => harness.err(attempt, StoreErrorKind::Throttled),
        3..5 => {
            world.lose(&flight);
            harness.now = harness.now.max(flight.started + flight.timeout);
            harness.err(attempt, StoreErrorKind::TimedOut(flight.timeout));
        }
        5..7 => {
            world.lose(&flight);
            harness.err(attempt, StoreErrorKind::Interrupted);
        }
        7 if matches!(flight.request, Request::Complete { .. }) => {
            world.lose(&flight);
            harness.err(attempt, StoreErrorKind::InProgress);
        }
        // The store forgets an upload, or a part of it.
        8 => {
            let lost = world.random.below(4) == 0;
            let sequential = world.capabilities[flight.bucket.0].parts == Parts::Sequential;
            let whole = sequential || world.random.chance(50);
            if let Request::Part { upload, .. } | Request::Complete { upload, .. } = &flight.request
                && lost
            {
                let key = (flight.name.clone(), upload.clone());
                let uploads = &mut world.models[flight.bucket.0].uploads;
                if whole {
                    uploads.remove(&key);
                } else if let Some(parts) = uploads.get_mut(&key) {
                    parts.pop_first();
                }
            }
            let outcome = world.apply(&flight).map_err(|kind| flight.error(kind));
            harness.ended(attempt, outcome);
        }
        9 if world.random.chance(3) => harness.err(attempt, StoreErrorKind::Denied),
        _ => harness.err(attempt, StoreErrorKind::Throttled),
    }
}

#[derive(Default)]
struct Tally {
    succeeded: u64,
    pieces: u64,
    failed: u64,
    clean: u64,
}

fn history(seed: u64, tally: &mut Tally) {
    if std::env::var_os("TIDELOG_TRACE").is_some() {
        println!("seed {seed}");
    }
    let mut random = Random(seed);
    let few_numbers = Capabilities { parts_max: 10, ..s3() };
    let resent = Capabilities { resend_part: true, ..dense() };
    let kinds = [s3(), dense(), sequential(), whole(), resent, few_numbers];
    let mixed = random.chance(20);
    let kind = if random.chance(50) { 0 } else { random.below(6) as usize };
    let count = 1 + random.below(4) as usize;
    let mut capabilities = Vec::new();
    for _ in 0..count {
        let kind = if mixed { random.below(6) as usize } else { kind };
        capabilities.push(kinds[kind].clone());
    }
    let mut options = UploadOptions::default();
    if random.chance(20) {
        options.hedging = HedgeOptions::off();
    }
    options.hedging.progress_check = random.chance(30);
    if random.chance(30) {
        options.retain_bytes_max = 20 << 20;
    }
    options.connections = Some(1 + random.below(8) as usize);
    let mut harness = Harness::new(&capabilities, options, seed);
    harness.obey = false;
    let chunk_count = [1, 1, 2, 3, 5, 9][random.below(6) as usize];
    let mut chunks = vec![8 << 20; chunk_count];
    chunks[chunk_count - 1] = random.below(8 << 20);
    let faults = [0, 5, 20, 40][random.below(4) as usize];
    let sick = (random.chance(30)).then(|| BucketIndex(random.below(count as u64) as usize));
    let abort = random.chance(5);
    let models = (0..count).map(|_| Model::default()).collect();
    let mut world =
        World { random, chunks: chunks.clone(), capabilities, models, ghosts: Vec::new(), tags: 0 };
    let (mut given, mut wanted) = (0, false);
    for step in 0.. {
        assert!(step < 20_000, "seed {seed}: no end");
        if harness.settled.is_some() {
            break;
        }
        match world.random.below(10) {
            0 | 1 if given < chunks.len() => {
                given += 1;
                let last = given == chunks.len();
                harness.event(Event::Chunk { bytes: chunks[given - 1], last });
            }
            2 if !wanted && world.random.chance(50) => {
                wanted = true;
                harness.event(Event::Wanted { deadline: None });
            }
            3 => world.raise_ghost(),
            4 if abort && world.random.chance(10) => harness.event(Event::Abort),
            5 => {
                let bodies =
                    harness.find(|f| matches!(f.request, Request::Part { .. } | Request::Put { .. }));
                for attempt in bodies {
                    let acknowledged = world.random.below(8 << 20);
                    harness.event(Event::Progress { attempt, acknowledged });
                }
            }
            6 => {
                let time = [1, 20, 200, 1_000][world.random.below(4) as usize];
                harness.pass(Duration::from_millis(time));
            }
            _ if !harness.in_flight.is_empty() => {
                let at = world.random.below(harness.in_flight.len() as u64) as usize;
                let attempt = *harness.in_flight.keys().nth(at).expect("one in flight");
                // The sick one is often silent.
                if sick == Some(harness.in_flight[&attempt].bucket) && world.random.chance(80) {
                    harness.pass(Duration::from_millis(50));
                } else {
                    end_one(&mut harness, &mut world, attempt, faults, sick);
                }
            }
            _ => {
                if given == chunks.len() && harness.in_flight.is_empty() && harness.settled.is_none() {
                    assert!(harness.machine.deadline().is_some(), "seed {seed}: waits for nothing");
                    harness.pass(Duration::from_millis(100));
                }
            }
        }
    }
    while !world.ghosts.is_empty() {
        world.raise_ghost();
    }
    check_end(seed, &harness, &world, tally);
}

/// The placement holds what was put, and nothing else is left unless that was said.
fn check_end(seed: u64, harness: &Harness, world: &World, tally: &mut Tally) {
    let mut kept = Vec::new();
    match harness.finished.as_ref().expect("an outcome") {
        Ok(placement) => {
            let mut content = Vec::new();
            for piece in &placement.pieces {
                let object = world.models[piece.bucket.0].objects.get(&piece.name);
                let object = object.unwrap_or_else(|| panic!("seed {seed}: {piece:?} is not there"));
                let (mut at, end) = (0, piece.offset + piece.bytes);
                for chunk in object {
                    let bytes = world.chunks[*chunk as usize];
                    if at >= piece.offset
                        && at + bytes <= end
                        && (bytes > 0 || object.len() == 1 || at + bytes == end)
                    {
                        content.push(*chunk);
                    }
                    at += bytes;
                }
                assert!(end <= at, "seed {seed}: {piece:?} is longer than the object");
                kept.push((piece.bucket, &piece.name));
            }
            content.dedup();
            let all: Vec<u32> = (0..world.chunks.len() as u32).collect();
            assert_eq!(content, all, "seed {seed}: {placement:?}");
            assert_eq!(placement.bytes, world.chunks.iter().sum::<u64>());
            tally.succeeded += 1;
            tally.pieces += u64::from(placement.pieces.len() > 1);
        }
        Err(_) => tally.failed += 1,
    }
    assert_eq!(harness.released.len(), harness.stored.len().max(harness.released.len()), "seed {seed}");
    if harness.settled == Some(false) {
        tally.clean += 1;
        for (bucket, model) in world.models.iter().enumerate() {
            for name in model.objects.keys() {
                assert!(
                    kept.contains(&(BucketIndex(bucket), name)),
                    "seed {seed}: {name} is left in {bucket}"
                );
            }
            assert!(model.uploads.is_empty(), "seed {seed}: {:?} is left", model.uploads);
        }
    }
}

#[test]
fn random_histories_keep_the_bytes_and_leave_nothing_unsaid() {
    let seeds = std::env::var("TIDELOG_SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(5_000);
    let first = std::env::var("TIDELOG_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let mut tally = Tally::default();
    for seed in first..first + seeds {
        history(seed, &mut tally);
    }
    // The histories are worth something only if most come to an end and many take the rare paths.
    if seeds >= 1_000 {
        assert!(tally.succeeded * 10 > seeds * 7, "only {} of {seeds} succeeded", tally.succeeded);
        assert!(tally.pieces * 20 > seeds, "only {} of {seeds} have side objects", tally.pieces);
        assert!(tally.failed * 200 > seeds, "only {} of {seeds} failed", tally.failed);
        assert!(tally.clean * 5 > seeds, "only {} of {seeds} left nothing", tally.clean);
    }
}
