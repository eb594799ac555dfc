//! What changelogs tell each other of their buckets.

use tidelog::{BucketHealth, Changelog, KeyGroup};

use crate::machine::{Machine, SECOND, ZERO, writer};

/// Persists one change, and says whether that took less than a second.
fn persists_soon(machine: &Machine, changelog: &Changelog, name: &str) -> bool {
    let mut writer = writer(changelog, name);
    writer.append(KeyGroup(1), b"one").unwrap();
    machine.within(changelog, SECOND, writer.persist_durably(ZERO)).is_some_and(|handle| handle.is_ok())
}

fn asked_for(machine: &Machine, bucket: usize) -> usize {
    machine.stores[bucket].names.lock().unwrap().len()
}

/// What so many nodes know together that each know the same, after a way through bytes.
fn together(health: &BucketHealth, nodes: usize) -> BucketHealth {
    let mut all = BucketHealth::default();
    for _ in 0..nodes {
        all.add(&BucketHealth::from_bytes(&health.to_bytes()).unwrap());
    }
    BucketHealth::from_bytes(&all.to_bytes()).unwrap()
}

#[test]
fn who_learns_of_a_dead_bucket_avoids_it_from_the_first_checkpoint_on() {
    let machine = Machine::new(3);
    let changelog = machine.open(machine.options());
    assert!(persists_soon(&machine, &changelog, "well"));
    let home = (0..3).find(|bucket| asked_for(&machine, *bucket) > 0).expect("a home");
    machine.stores[home].inner.set_dead(true);
    assert!(persists_soon(&machine, &changelog, "sick"));
    let health = changelog.bucket_health();
    let url = format!("sim://{home}");
    assert!(health.buckets().any(|(bucket, _, bad)| bucket == url && bad > 0.9), "{health:?}");

    let first_checkpoint = |health: Option<BucketHealth>| {
        let other = Machine::new(3);
        other.stores[home].inner.set_dead(true);
        let changelog = other.open(other.options());
        if let Some(health) = health {
            changelog.learn_bucket_health(&health);
        }
        assert!(persists_soon(&other, &changelog, "log"));
        asked_for(&other, home)
    };
    assert_eq!(first_checkpoint(None), 1, "who knows nothing tries the same home");
    assert_eq!(first_checkpoint(Some(together(&health, 4))), 0);
    // What a single node met once may be chance.
    assert_eq!(first_checkpoint(Some(health)), 1);
}

#[test]
fn a_wrong_word_of_all_buckets_stops_no_checkpoint() {
    let sick = Machine::new(3);
    for store in &sick.stores {
        store.inner.set_dead(true);
    }
    let changelog = sick.open(sick.options());
    assert!(!persists_soon(&sick, &changelog, "log"));
    sick.pass(&changelog, 30 * SECOND);
    let health = together(&changelog.bucket_health(), 1000);
    assert_eq!(health.buckets().filter(|(_, good, bad)| *good == 0.0 && *bad > 3.0).count(), 3, "{health:?}");

    let well = Machine::new(3);
    let changelog = well.open(well.options());
    for name in ["first", "second", "third"] {
        changelog.learn_bucket_health(&health);
        assert!(persists_soon(&well, &changelog, name));
        well.pass(&changelog, 10 * SECOND);
    }
    // Nobody says so any more: canaries have found out, and all are used again.
    well.pass(&changelog, 60 * SECOND);
    let bad: f64 = changelog.bucket_health().buckets().map(|(_, _, bad)| bad).sum();
    assert_eq!(bad, 0.0);
    // With one dead, the first to be tried or not, another one takes its place.
    for bucket in 0..3 {
        well.stores[bucket].inner.set_dead(true);
        assert!(persists_soon(&well, &changelog, &format!("without {bucket}")));
        well.stores[bucket].inner.heal();
        well.pass(&changelog, 60 * SECOND);
    }
}
