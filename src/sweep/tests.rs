use super::*;
use crate::types::{KeyGroup, KeyGroupRange, SequenceNumber};
use crate::{Changelog, Options};

#[test]
fn only_names_that_changelogs_give_are_looked_at() {
    let name = "00000007-00000000000000ff";
    let place = |hash| Place { object: name, group: "orders", hash, has_its_hash: true };
    let hash = name_hash(&format!("orders/{name}"));
    for ending in ["", ".00012.1", ".w2"] {
        assert_eq!(Place::of(&format!("orders/{name}{ending}")), Some(place(None)));
        assert_eq!(Place::of(&format!("{hash}/orders/{name}{ending}")), Some(place(Some(&hash))));
    }
    let other = if hash == "00" { "01" } else { "00" };
    let name_elsewhere = format!("{other}/orders/{name}");
    assert_eq!(Place::of(&name_elsewhere), Some(Place { has_its_hash: false, ..place(Some(other)) }));
    for other in [
        "00000007-00000000000000ff",
        "/00000007-00000000000000ff",
        "orders/notes.txt",
        "orders/00000007",
        "orders/7-00000000000000ff",
        "orders/00000007-00000000000000fg",
        "orders/00000007-00000000000000ff.bak",
        "orders/00000007-00000000000000ff/x",
        "jobs/orders/00000007-00000000000000ff",
        "jobs/4f/orders/00000007-00000000000000ff",
        "4f/jobs/orders/00000007-00000000000000ff",
    ] {
        assert_eq!(Place::of(other), None, "{other}");
    }
}

#[test]
fn what_is_in_deeper_folders_is_of_other_changelogs() {
    let dir = tempfile::tempdir().unwrap();
    let outer = format!("file://{}", dir.path().join("bucket").display());
    let write = |local: &str, url: &str, prefix: &str, hash: bool| {
        let options = Options::new(url, dir.path().join(local)).name_prefix(prefix).hash_prefix(hash);
        let changelog = Changelog::open(options.segment_bytes(1 << 20).local_bytes(4 << 20)).unwrap();
        let mut writer = changelog.create_writer(local, KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(1), local.as_bytes()).unwrap();
        let handle = writer.persist_durably(SequenceNumber::ZERO).wait().unwrap();
        handle.objects().next().unwrap().1.to_owned()
    };
    let plain = write("plain", &outer, "", false);
    let spread = write("spread", &outer, "", true);
    write("by url", &format!("{outer}/app2"), "", false);
    write("by prefix", &outer, "app3", false);
    // Looks like a hash. One object in 256 has even that one.
    let two = if spread.starts_with("4f") { "5f" } else { "4f" };
    for number in 0..3 {
        write(&format!("two {number}"), &outer, two, false);
    }
    let later = SystemTime::now() + 2 * ALIVE_MAX;
    let plan = |url: &str, prefix: &str| {
        let sweeper = Sweeper::open(url).unwrap().prefix(prefix).group("tidelog").live_handles(&[]);
        names(&sweeper.plan(later).unwrap())
    };
    let mut own = [plain, spread];
    own.sort();
    assert_eq!(plan(&outer, ""), own);
    assert_eq!(plan(&format!("{outer}/app2"), "").len(), 1);
    assert_eq!(plan(&outer, "app2").len(), 1);
    assert_eq!(plan(&outer, "app3").len(), 1);
    assert_eq!(plan(&outer, two).len(), 3);
}

#[test]
fn handles_of_other_changelogs_do_not_make_all_stray() {
    let dir = tempfile::tempdir().unwrap();
    let url = |name: &str| format!("file://{}", dir.path().join(name).join("bucket").display());
    let write = |name: &str| {
        let options = Options::new(url(name), dir.path().join(name).join("local"));
        let changelog = Changelog::open(options.segment_bytes(1 << 20).local_bytes(4 << 20)).unwrap();
        let mut writer = changelog.create_writer(name, KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(1), name.as_bytes()).unwrap();
        writer.persist_durably(SequenceNumber::ZERO).wait().unwrap()
    };
    let (here, elsewhere) = (write("here"), write("elsewhere"));
    let later = SystemTime::now() + 2 * ALIVE_MAX;
    let sweeper = || Sweeper::open(&url("here")).unwrap().live_handles(std::slice::from_ref(&elsewhere));
    let refused = sweeper().plan(later).unwrap_err();
    assert!(
        matches!(&refused, SweepError::ForeignHandles { handles: 1, objects: 1, bucket } if *bucket == url("here")),
        "{refused:?}"
    );
    assert_eq!(sweeper().plan(SystemTime::now()).unwrap().strays, [], "nothing would go");
    assert_eq!(sweeper().live_handles(&[here]).plan(later).unwrap().strays, []);
}

#[test]
fn a_bucket_that_dates_things_before_there_was_a_changelog_is_not_believed() {
    let now = SystemTime::now();
    let year_2010 = UNIX_EPOCH + Duration::from_secs(1_289_347_200);
    assert_eq!(age(Some(now - ALIVE_MAX), now), Ok(ALIVE_MAX));
    assert_eq!(age(Some(now + ALIVE_MAX), now), Err(Kept::Young));
    for since in [None, Some(UNIX_EPOCH), Some(year_2010)] {
        assert_eq!(age(since, now), Err(Kept::Undated), "{since:?}");
    }
    let dir = tempfile::tempdir().unwrap();
    let name = dir.path().join("tidelog/00000007-00000000000000ff");
    std::fs::create_dir(name.parent().unwrap()).unwrap();
    for name in [name.clone(), dir.path().join("tidelog/00000008-00000000000000ff#1")] {
        std::fs::File::create(&name).unwrap().set_modified(year_2010).unwrap();
    }
    let sweeper = Sweeper::open(&format!("file://{}", dir.path().display())).unwrap().live_handles(&[]);
    let kept = |count| SweepPlan { kept: BTreeMap::from([(Kept::Undated, count)]), ..Default::default() };
    assert_eq!(sweeper.plan(now).unwrap(), kept(2), "an object and an upload");
}

#[test]
fn what_a_handle_or_a_directory_names_is_spared() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = format!("file://{}", dir.path().join("bucket").display());
    let handle = |name: &str| {
        let local = dir.path().join(name);
        let options = Options::new(&bucket, &local).segment_bytes(1 << 20).local_bytes(4 << 20);
        let changelog = Changelog::open(options).unwrap();
        let mut writer = changelog.create_writer(name, KeyGroupRange::ALL).unwrap();
        writer.append(KeyGroup(1), name.as_bytes()).unwrap();
        writer.persist_durably(SequenceNumber::ZERO).wait().unwrap()
    };
    let [lost, kept, known] = ["lost", "kept", "known"].map(handle);
    std::fs::write(dir.path().join("bucket/tidelog/notes.txt"), "mine").unwrap();
    let later = SystemTime::now() + Duration::from_secs(7200);
    let sweeper = || Sweeper::open(&bucket).unwrap().min_age(Duration::from_secs(3600));
    let plan = |sweeper: &Sweeper, now| names(&sweeper.plan(now).unwrap());
    let file = |handle: &ChangelogHandle| handle.objects().next().unwrap().1.to_owned();
    assert_eq!(plan(&sweeper(), later), [""; 0], "without handles no object is stray");
    let all = sweeper().live_handles(&[]);
    assert_eq!(plan(&all, SystemTime::now()), [""; 0], "nothing is old enough");
    assert_eq!(plan(&all, later).len(), 3);
    assert_eq!(plan(&sweeper().group("others").live_handles(&[]), later), [""; 0]);
    assert_eq!(plan(&sweeper().prefix("other").live_handles(&[]), later), [""; 0]);
    let careful = sweeper().live_handles(std::slice::from_ref(&kept));
    let careful = careful.directory(dir.path().join("known")).unwrap();
    let found = careful.plan(later).unwrap();
    assert_eq!(names(&found), [file(&lost)]);
    assert_eq!(found.kept, BTreeMap::from([(Kept::Known, 1), (Kept::Live, 1)]));
    for stray in found.strays {
        careful.remove(&stray).unwrap();
        careful.remove(&stray).unwrap();
    }
    assert_eq!(plan(&careful, later), [""; 0]);
    assert_eq!(plan(&all, later), {
        let mut left = [file(&kept), file(&known)];
        left.sort();
        left
    });
    assert!(dir.path().join("bucket/tidelog/notes.txt").exists());
    assert!(matches!(sweeper().directory(dir.path()), Err(SweepError::Directory { .. })));
    // The same bucket by another URL.
    let outer = Sweeper::open(&format!("file://{}", dir.path().display())).unwrap().prefix("bucket");
    let outer = outer.min_age(Duration::ZERO).live_handles(&[kept]);
    assert_eq!(plan(&outer, later), [format!("bucket/{}", file(&known))]);
    assert_eq!(plan(&outer.directory(dir.path().join("known")).unwrap(), later), [""; 0]);
}

#[test]
fn a_canary_that_nobody_took_home_is_stray() {
    let dir = tempfile::tempdir().unwrap();
    let name = crate::uploader::canary_name(&Options::new("memory://", "/d").name_prefix("jobs"), 7);
    std::fs::create_dir_all(dir.path().join(&name).parent().unwrap()).unwrap();
    for name in [&name, &format!("{name}0"), "jobs/tidelog/canary-of-mine"] {
        std::fs::write(dir.path().join(name), "tweet").unwrap();
    }
    let bucket = format!("file://{}", dir.path().display());
    let sweeper = |prefix: &str| Sweeper::open(&bucket).unwrap().prefix(prefix).live_handles(&[]);
    let (now, later) = (SystemTime::now(), SystemTime::now() + 2 * ALIVE_MAX);
    let plan = |sweeper: Sweeper, now| names(&sweeper.plan(now).unwrap());
    assert_eq!(plan(sweeper("jobs"), now), [""; 0], "it may fly");
    assert_eq!(plan(sweeper("jobs"), later), [name]);
    assert_eq!(plan(sweeper("jobs").group("others"), later), [""; 0]);
    assert_eq!(plan(sweeper(""), later), [""; 0], "it is of another prefix");
}

fn names(plan: &SweepPlan) -> Vec<String> {
    plan.strays.iter().map(|stray| stray.name.clone()).collect()
}

#[test]
fn old_uploads_that_nobody_knows_are_given_up() {
    let store = tidelog_upload::open_store("memory://sweep").unwrap();
    let name = "tidelog/00000007-00000000000000ff";
    tidelog_upload::block_on(store.create(name)).unwrap();
    tidelog_upload::block_on(store.create("tidelog/other")).unwrap();
    let sweeper = Sweeper::open("memory://sweep").unwrap().min_age(Duration::from_secs(60));
    let after = |hours: u64| sweeper.plan(SystemTime::now() + Duration::from_secs(3600 * hours)).unwrap();
    assert_eq!(names(&after(23)), [""; 0], "its changelog may be alive");
    assert_eq!(after(23).kept, BTreeMap::from([(Kept::Young, 1)]));
    let strays = after(25).strays;
    assert_eq!(strays.iter().map(|stray| stray.name.as_str()).collect::<Vec<_>>(), [name]);
    sweeper.remove(&strays[0]).unwrap();
    assert_eq!(after(25), SweepPlan::default());
}

#[test]
fn uploads_of_a_directory_that_nobody_has_open_are_given_up() {
    let dir = tempfile::tempdir().unwrap();
    let bucket = "memory://owned";
    let sweeper = || Sweeper::open(bucket).unwrap().directory(dir.path()).unwrap();
    let store = tidelog_upload::open_store(bucket).unwrap();
    let name = "tidelog/00000007-00000000000000ff";
    let opened = crate::manifest::ManifestRecord::UploadOpened {
        buckets: vec![bucket.into()],
        object: name.to_owned(),
        token: 255,
        others: Vec::new(),
    };
    let lock = directory::Directory::open(dir.path()).unwrap();
    let mut manifest = directory::Manifest::create(lock.files(), 1).unwrap();
    manifest.append(&[opened.encode()]).unwrap();
    tidelog_upload::block_on(store.create(name)).unwrap();
    let now = SystemTime::now();
    assert_eq!(sweeper().plan(now).unwrap().kept, BTreeMap::from([(Kept::InUse, 1)]));
    assert_eq!(sweeper().plan(now + 2 * ALIVE_MAX).unwrap().strays, []);
    drop(lock);
    let plan = sweeper().plan(now).unwrap();
    assert_eq!(names(&plan), [name]);
    let owner = Some(dir.path().to_owned());
    assert!(matches!(&plan.strays[0].kind, StrayKind::Upload { owner: of, .. } if *of == owner));
    sweeper().remove(&plan.strays[0]).unwrap();
    assert_eq!(sweeper().plan(now).unwrap(), SweepPlan::default());
}
