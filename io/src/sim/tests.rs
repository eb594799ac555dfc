//! What the simulation promises: the same history from the same seed, and each fault as it says.

use std::io;

use super::*;
use crate::aligned::AlignedBuf;
use crate::disk::{Completion, Disk, FileSlot, Write};

const TICK: Duration = Duration::from_millis(1);

fn buffer_of(byte: u8, len: usize) -> AlignedBuf {
    let mut buffer = AlignedBuf::alone(len).unwrap();
    buffer.fill(byte);
    buffer
}

fn write(disk: &mut SimDisk, file: FileSlot, block: u64, blocks: usize, byte: u8) {
    let (offset, len) = (block * 4096, blocks * 4096);
    disk.submit(Write { token: block, file, offset, buffer: buffer_of(byte, len), len }).unwrap();
}

fn drain(disk: &mut SimDisk) -> Vec<Completion> {
    let mut completions = Vec::new();
    while disk.in_flight() > 0 {
        disk.wait(TICK, &mut completions).unwrap();
    }
    completions
}

fn world_with_file(seed: u64, blocks: u64, durability: Durability) -> (SimWorld, SimDisk, FileSlot) {
    let world = SimWorld::new(seed);
    world.files().create("a", blocks * 4096).unwrap();
    let mut disk = world.disk(16, durability);
    let file = disk.open("a").unwrap();
    (world, disk, file)
}

fn blocks_of(world: &SimWorld) -> Vec<u8> {
    let contents = world.contents("a").unwrap();
    contents
        .chunks(4096)
        .map(|block| if block.iter().all(|&byte| byte == block[0]) { block[0] } else { 255 })
        .collect()
}

#[test]
fn same_seed_same_history() {
    let history = |seed| {
        let (world, mut disk, file) = world_with_file(seed, 64, Durability::Process);
        for fault in [Fault::WriteError, Fault::ShortWrite, Fault::LostWrite, Fault::MisdirectedWrite] {
            world.set_fault(fault, 200);
        }
        let mut tokens = Vec::new();
        for block in 0..16 {
            write(&mut disk, file, block * 4, 4, block as u8 + 1);
        }
        tokens.extend(drain(&mut disk).into_iter().map(|done| (done.token, done.result.is_ok())));
        world.power_cut(seed);
        (tokens, world.contents("a"), world.stats())
    };
    assert_eq!(history(3), history(3));
    assert_ne!(history(3), history(4));
}

#[test]
fn writes_complete_out_of_order() {
    let orders: Vec<Vec<u64>> = (0..8)
        .map(|seed| {
            let (_world, mut disk, file) = world_with_file(seed, 16, Durability::Power);
            for block in 0..8 {
                write(&mut disk, file, block, 1, 1);
            }
            drain(&mut disk).iter().map(|done| done.token).collect()
        })
        .collect();
    assert!(orders.iter().any(|order| !order.is_sorted()));
}

#[test]
fn power_cut_takes_only_what_was_not_promised() {
    let (mut lost, mut kept) = (0, 0);
    for seed in 0..40 {
        let (world, mut disk, file) = world_with_file(seed, 32, Durability::Power);
        write(&mut disk, file, 0, 4, 1);
        drain(&mut disk);
        let mut undurable = world.disk(16, Durability::Process);
        let same = undurable.open("a").unwrap();
        write(&mut undurable, same, 4, 4, 2);
        drain(&mut undurable);
        write(&mut disk, file, 8, 4, 3);
        world.power_cut(seed);
        let blocks = blocks_of(&world);
        assert_eq!(blocks[..4], [1; 4]);
        assert!(blocks[4..8].iter().all(|&byte| byte == 0 || byte == 2));
        assert!(blocks[8..12].iter().all(|&byte| byte == 0 || byte == 3));
        lost += blocks[4..12].iter().filter(|&&byte| byte == 0).count();
        kept += blocks[4..12].iter().filter(|&&byte| byte != 0).count();
        assert!(drain(&mut disk).iter().all(|done| done.result.is_err()));
        assert!(disk.open("a").is_err());
    }
    assert!(lost > 40 && kept > 40, "{lost} sectors lost and {kept} kept");
}

#[test]
fn kill_keeps_what_completed_until_the_power_fails() {
    let lost = (0..20).filter(|&seed| {
        let (world, mut disk, file) = world_with_file(1, 8, Durability::Process);
        write(&mut disk, file, 0, 8, 1);
        drain(&mut disk);
        world.kill(seed);
        assert_eq!(blocks_of(&world), [1; 8]);
        world.power_cut(seed);
        blocks_of(&world).contains(&0)
    });
    assert!(lost.count() > 5);
}

#[test]
fn sectors_of_512_bytes_tear_inside_a_block() {
    let torn = (0..40).any(|seed| {
        let (world, mut disk, file) = world_with_file(seed, 8, Durability::Power);
        world.set_sector_bytes(512);
        write(&mut disk, file, 0, 8, 1);
        world.power_cut(seed);
        blocks_of(&world).contains(&255)
    });
    assert!(torn);
}

#[test]
fn each_planned_write_fault_strikes_once() {
    for fault in [
        Fault::WriteError,
        Fault::ShortWrite,
        Fault::StuckWrite,
        Fault::LostWrite,
        Fault::MisdirectedWrite,
        Fault::BitFlip,
    ] {
        let (world, mut disk, file) = world_with_file(11, 32, Durability::Power);
        world.inject(fault, 0);
        write(&mut disk, file, 8, 8, 1);
        let first = drain(&mut disk).pop().unwrap();
        let stored = blocks_of(&world)[8..16] == [1; 8];
        let fails = matches!(fault, Fault::WriteError | Fault::StuckWrite);
        assert_eq!(first.result.is_err(), fails, "{fault:?}");
        assert_eq!(stored, fault == Fault::ShortWrite, "{fault:?}");
        assert!(first.buffer.iter().all(|&byte| byte == 1));
        assert_eq!(world.stats().faults.get(&fault), Some(&1));
        write(&mut disk, file, 16, 8, 2);
        assert!(drain(&mut disk).pop().unwrap().result.is_ok());
        assert_eq!(blocks_of(&world)[16..24], [2; 8], "{fault:?}");
    }
}

#[test]
fn skipped_operations_count_those_that_could_be_struck() {
    let (world, mut disk, file) = world_with_file(2, 8, Durability::Power);
    world.inject(Fault::WriteError, 2);
    let results: Vec<bool> = (0..4)
        .map(|block| {
            write(&mut disk, file, block, 1, 1);
            drain(&mut disk).pop().unwrap().result.is_ok()
        })
        .collect();
    assert_eq!(results, [true, true, false, true]);
}

#[test]
fn no_room_is_an_error_and_changes_nothing() {
    let (world, mut disk, file) = world_with_file(5, 4, Durability::Power);
    world.set_capacity_bytes(Some(6 * 4096));
    let files = world.files();
    assert_eq!(files.create("b", 3 * 4096).unwrap_err().kind(), io::ErrorKind::StorageFull);
    write(&mut disk, file, 4, 3, 1);
    let error = drain(&mut disk).pop().unwrap().result.unwrap_err();
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert_eq!(files.list().unwrap(), [("a".to_owned(), 4 * 4096)]);
    world.inject(Fault::CreateNoSpace, 0);
    assert_eq!(files.create("b", 4096).unwrap_err().kind(), io::ErrorKind::StorageFull);
    files.create("b", 4096).unwrap();
    assert_eq!(files.create("b", 4096).unwrap_err().kind(), io::ErrorKind::AlreadyExists);
}

#[test]
fn names_are_durable_and_atomic() {
    for seed in 0..60 {
        let world = SimWorld::new(seed);
        let files = world.files();
        files.replace("m", b"old").unwrap();
        files.append("m", b"+").unwrap();
        world.crash_at(seed % 3, Crash::Power);
        let replaced = files.replace("m", b"new");
        let appended = files.append("m", b"!?");
        let removed = files.remove("m");
        let failed = seed % 3;
        assert_eq!([replaced.is_ok(), appended.is_ok(), removed.is_ok()], [failed > 0, failed > 1, false]);
        assert!(world.is_down());
        assert!(files.list().is_err());
        world.restart();
        assert!(files.list().is_err(), "a handle from before the crash is dead");
        let seen = world.contents("m").map(|bytes| String::from_utf8(bytes).unwrap());
        let allowed: &[Option<&str>] = match failed {
            0 => &[Some("old+"), Some("new")],
            1 => &[Some("new"), Some("new!"), Some("new!?"), Some("new!\0"), Some("new\0\0")],
            _ => &[Some("new!?"), None],
        };
        assert!(allowed.contains(&seen.as_deref()), "{seen:?} after a crash in operation {failed}");
    }
}

#[test]
fn what_is_appended_unsynced_outlives_a_kill_and_maybe_a_power_cut() {
    let mut seen = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let world = SimWorld::new(seed);
        let append = || {
            world.files().replace("m", b"old").unwrap();
            world.files().append_unsynced("m", b"+").unwrap();
        };
        append();
        world.kill(seed);
        assert_eq!(world.contents("m").unwrap(), b"old+");
        append();
        world.files().sync("m").unwrap();
        world.power_cut(seed);
        assert_eq!(world.contents("m").unwrap(), b"old+");
        append();
        world.power_cut(seed);
        seen.insert(world.contents("m").unwrap());
    }
    assert_eq!(seen.into_iter().collect::<Vec<_>>(), [b"old\0", b"old+"]);
}

#[test]
fn failed_changes_of_names_leave_either_state() {
    let world = SimWorld::new(1);
    let files = world.files();
    files.replace("m", b"0").unwrap();
    world.set_fault(Fault::FilesError, 1000);
    let mut seen = std::collections::BTreeSet::new();
    for round in 0..20 {
        world.set_contents("m", b"0".to_vec());
        assert!(files.replace("m", b"1").is_err());
        seen.insert(world.contents("m").unwrap());
        assert!(files.create(&format!("f{round}"), 10).is_err());
        assert_eq!(world.contents(&format!("f{round}")), None);
    }
    assert_eq!(seen.len(), 2);
    world.clear_faults();
    world.inject(Fault::ReadError, 0);
    assert!(files.read_at("m", 0, &mut [0; 4]).is_err());
    assert_eq!(files.read_at("m", 0, &mut [0; 4]).unwrap(), 1);
}

#[test]
fn scheduled_crash_in_a_write_stops_everything() {
    for crash in [Crash::Process, Crash::Power] {
        let (world, mut disk, file) = world_with_file(9, 16, Durability::Power);
        world.crash_at(3, crash);
        for block in 0..8 {
            write(&mut disk, file, block, 1, 7);
        }
        let completions = drain(&mut disk);
        assert_eq!(completions.len(), 8);
        let good: Vec<u64> =
            completions.iter().filter(|done| done.result.is_ok()).map(|done| done.token).collect();
        assert_eq!(good.len(), 3);
        assert!(world.is_down());
        world.restart();
        let blocks = blocks_of(&world);
        assert!(good.iter().all(|&block| blocks[block as usize] == 7));
        assert_eq!(world.operations(), 5);
        assert!(disk.open("a").is_err());
        assert!(world.disk(1, Durability::Power).open("a").is_ok());
    }
}

#[test]
fn removed_file_can_still_be_written_by_who_has_it_open() {
    let (world, mut disk, file) = world_with_file(1, 4, Durability::Power);
    world.files().remove("a").unwrap();
    write(&mut disk, file, 0, 1, 1);
    assert!(drain(&mut disk)[0].result.is_ok());
    disk.close(file);
    world.set_capacity_bytes(Some(4096));
    world.files().create("b", 4096).unwrap();
}

#[test]
fn virtual_waits_return_and_move_the_clock() {
    let (world, mut disk, file) = world_with_file(1, 4, Durability::Power);
    world.hold(true);
    write(&mut disk, file, 0, 1, 1);
    let mut completions = Vec::new();
    disk.wait(Duration::from_secs(3600), &mut completions).unwrap();
    assert_eq!((completions.len(), world.now()), (0, Duration::from_secs(3600)));
    world.hold(false);
    disk.wait(TICK, &mut completions).unwrap();
    assert_eq!((completions.len(), world.now()), (1, Duration::from_secs(3600)));
}

#[test]
#[should_panic(expected = "overlap")]
fn overlapping_writes_are_the_callers_mistake() {
    let (_world, mut disk, file) = world_with_file(1, 8, Durability::Power);
    write(&mut disk, file, 0, 4, 1);
    write(&mut disk, file, 3, 2, 1);
}

#[test]
fn flipped_bits_are_read() {
    let world = SimWorld::new(1);
    world.set_contents("x", vec![0; 3]);
    world.flip_bit("x", 2, 7);
    assert_eq!(world.contents("x").unwrap(), [0, 0, 128]);
}
