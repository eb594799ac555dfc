//! A child by fork is refused, and cannot hang on threads that it does not have. In a process of its own: its children
//! inherit locks as other threads hold them.

mod common;

use std::io::{Read, Write};
use std::sync::mpsc::channel;
use std::time::Duration;

use common::{open, read};
use fork::{Fork, fork};
use tidelog::{
    CloseError, ControlError, CreateError, Forked, KeyGroup, KeyGroupRange, PersistError, ReadError,
    RegisterError, ReleaseError, SequenceNumber, SyncError,
};

const ZERO: SequenceNumber = SequenceNumber::ZERO;
const PATIENCE: Duration = Duration::from_secs(60);

#[test]
fn a_child_is_refused_and_the_parent_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let earlier = open(dir.path());
    let mut left = earlier.create_writer("left", KeyGroupRange::ALL).unwrap();
    left.append(KeyGroup(0), b"x").unwrap();
    left.sync().wait().unwrap();
    drop((left, earlier));
    let changelog = open(dir.path());
    let mut writer = changelog.create_writer("log", KeyGroupRange::ALL).unwrap();
    writer.append(KeyGroup(1), b"before").unwrap();
    writer.sync().wait().unwrap();
    let held = changelog.recovered()[0].persist_durably(ZERO).wait().unwrap();
    changelog.register("held", std::slice::from_ref(&held)).unwrap();
    let opener = std::process::id();
    let (mut from_child, mut to_parent) = std::io::pipe().unwrap();
    let child = match fork().unwrap() {
        Fork::Child => {
            let refused = |forked: &Forked| forked.opener == opener && std::process::id() != opener;
            let (control, recovered) = (writer.control(), &changelog.recovered()[0]);
            let checks = [
                matches!(writer.sync().wait(), Err(SyncError::Forked(forked)) if refused(&forked)),
                matches!(writer.when_durable(SequenceNumber(9)).wait(), Err(SyncError::Forked(forked)) if refused(&forked)),
                matches!(writer.persist_durably(ZERO).wait(), Err(PersistError::Forked(forked)) if refused(&forked)),
                matches!(control.truncate(SequenceNumber(1)), Err(ControlError::Forked(forked)) if refused(&forked)),
                matches!(control.confirm(SequenceNumber(1)), Err(ControlError::Forked(forked)) if refused(&forked)),
                matches!(changelog.create_writer("child", KeyGroupRange::ALL), Err(CreateError::Forked(forked)) if refused(&forked)),
                matches!(recovered.persist_durably(ZERO).wait(), Err(PersistError::Forked(forked)) if refused(&forked)),
                matches!(changelog.register("child", std::slice::from_ref(&held)), Err(RegisterError::Forked(forked)) if refused(&forked)),
                matches!(changelog.hand_over("child", &[held]), Err(RegisterError::Forked(forked)) if refused(&forked)),
                matches!(changelog.release("held"), Err(ReleaseError::Forked(forked)) if refused(&forked)),
                changelog.holders().is_empty(),
                matches!(recovered.read(KeyGroupRange::ALL), Err(ReadError::Forked(forked)) if refused(&forked)),
            ];
            recovered.discard();
            drop(writer);
            let closed = changelog.close(Duration::from_secs(1));
            let closed =
                matches!(closed, Err(CloseError::Local(SyncError::Forked(forked))) if refused(&forked));
            let _ = to_parent.write_all(&checks.map(u8::from));
            let _ = to_parent.write_all(&[u8::from(closed)]);
            std::process::exit(0);
        }
        Fork::Parent(child) => child,
    };
    drop(to_parent);
    let (sender, said) = channel();
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        let _ = from_child.read_to_end(&mut bytes).map(|_| sender.send(bytes));
    });
    let said = said.recv_timeout(PATIENCE).expect("the child hangs");
    assert_eq!(said, [1; 13], "in the order of the checks, close last");
    assert_eq!(fork::waitpid(child).unwrap(), 0, "it ends in good order");
    writer.append(KeyGroup(1), b"after").unwrap();
    let handle = writer.persist_durably(ZERO).wait().unwrap();
    let values: Vec<_> = read(&[handle], KeyGroupRange::ALL)[&(writer.log(), Some(1))]
        .iter()
        .map(|(_, value)| value.clone())
        .collect();
    assert_eq!(values, [b"before".to_vec(), b"after".to_vec()], "what the child dropped is here");
    let recovered = changelog.recovered()[0].persist_durably(ZERO).wait().unwrap();
    assert_eq!(recovered.to(), SequenceNumber(1), "what the child discarded is here");
    assert_eq!(changelog.holders(), ["held"]);
    drop(writer);
    changelog.close(PATIENCE).unwrap();
}
