use super::super::{BlockErrorAction, BlockExportDeleted, BlockIoError, IoOperationType};
use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

fn deleted(id: &str) -> Event {
    Event::BlockExportDeleted(BlockExportDeleted { id: id.into() })
}

fn failed(device: &str, reason: &str) -> Event {
    Event::BlockIoError(BlockIoError {
        qom_path: None,
        device: device.into(),
        node_name: None,
        operation: IoOperationType::Read,
        action: BlockErrorAction::Report,
        nospace: None,
        reason: reason.into(),
    })
}

/// The ids or reasons of the pending events.
fn taken(session: &Subscription, now: Instant) -> Vec<String> {
    let Pending::Events(messages) = session.pending_at(now) else {
        panic!("the session has ended");
    };
    let text = |message: &Arc<Value>| {
        let data = &message["data"];
        let text = data["id"].as_str().or(data["reason"].as_str());
        text.unwrap().to_owned()
    };
    messages.iter().map(text).collect()
}

fn is_awake(session: &Subscription) -> bool {
    let wake = session.wake_fd();
    let mut fds = [PollFd::new(&wake, PollFlags::IN)];
    let at_once = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    poll(&mut fds, Some(&at_once)).unwrap() == 1
}

#[test]
fn session_wakes_only_for_pending_events() {
    let hub = EventHub::new();
    let session = hub.subscribe().unwrap();
    assert!(!is_awake(&session));
    hub.emit(&deleted("a"));
    hub.emit(&deleted("b"));
    assert!(is_awake(&session));
    assert_eq!(taken(&session, Instant::now()), ["a", "b"]);
    assert!(!is_awake(&session));
    // A held event shortens the time that the session may wait.
    for reason in ["1", "2"] {
        hub.emit(&failed("vm1", reason));
        assert!(is_awake(&session));
        session.pending();
    }
    hub.close();
    assert!(is_awake(&session));
}

#[test]
fn every_session_gets_every_event_in_order() {
    let hub = EventHub::new();
    let sessions = [hub.subscribe().unwrap(), hub.subscribe().unwrap()];
    let time = UNIX_EPOCH + Duration::from_micros(5_000_007);
    for id in ["a", "b", "c"] {
        hub.emit_at(&deleted(id), Instant::now(), time);
    }
    for session in &sessions {
        assert_eq!(taken(session, Instant::now()), ["a", "b", "c"]);
        assert_eq!(session.pending(), Pending::Events(vec![]));
    }
    hub.emit_at(&deleted("d"), Instant::now(), time);
    let expected = json!({
        "event": "BLOCK_EXPORT_DELETED",
        "data": { "id": "d" },
        "timestamp": { "seconds": 5, "microseconds": 7 },
    });
    assert_eq!(
        sessions[0].pending(),
        Pending::Events(vec![Arc::new(expected)])
    );
}

#[test]
fn disk_errors_are_limited_and_the_last_is_kept() {
    let hub = EventHub::new();
    let session = hub.subscribe().unwrap();
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let emit = |device, reason, ms| hub.emit_at(&failed(device, reason), at(ms), UNIX_EPOCH);
    emit("vm1", "1", 0);
    emit("vm1", "2", 100);
    emit("vm2", "other disk", 200);
    emit("vm1", "3", 300);
    assert_eq!(taken(&session, at(999)), ["1", "other disk"]);
    assert!(session.timeout().is_some());
    assert_eq!(taken(&session, at(1000)), ["3"]);
    // An event that was held and sent late also starts a period.
    emit("vm1", "4", 1500);
    assert_eq!(taken(&session, at(1999)), [""; 0]);
    assert_eq!(taken(&session, at(2000)), ["4"]);
    // If no event was held, the next one is sent immediately.
    assert_eq!(taken(&session, at(3000)), [""; 0]);
    assert_eq!(session.timeout(), None);
    emit("vm1", "5", 3000);
    assert_eq!(taken(&session, at(3000)), ["5"]);
}

#[test]
fn stuck_session_is_closed_alone() {
    let hub = EventHub::new();
    let (stuck, other) = (hub.subscribe().unwrap(), hub.subscribe().unwrap());
    for _ in 0..WAITING_MAX {
        hub.emit(&deleted("x"));
    }
    assert_eq!(taken(&other, Instant::now()).len(), WAITING_MAX);
    hub.emit(&deleted("one more"));
    assert_eq!(stuck.pending(), Pending::Overflow);
    assert_eq!(taken(&other, Instant::now()), ["one more"]);
}

#[test]
fn kinds_of_events_are_bounded() {
    let hub = EventHub::new();
    let start = Instant::now();
    for disk in 0..=KINDS_MAX {
        hub.emit_at(&failed(&format!("vm{disk}"), ""), start, UNIX_EPOCH);
    }
    assert_eq!(hub.lock().recent.len(), KINDS_MAX);
    // Keys are removed after the period.
    hub.emit_at(&failed("vm", ""), start + PERIOD, UNIX_EPOCH);
    assert_eq!(hub.lock().recent.len(), 1);
}

#[test]
fn session_count_is_limited() {
    let hub = EventHub::new();
    let mut sessions: Vec<_> = (0..SESSIONS_MAX)
        .map(|_| hub.subscribe().unwrap())
        .collect();
    assert!(matches!(hub.subscribe(), Err(TooManySessions::Limit)));
    sessions.pop();
    let session = hub.subscribe().unwrap();
    hub.emit(&deleted("last"));
    hub.close();
    assert!(matches!(hub.subscribe(), Err(TooManySessions::Closed)));
    assert_eq!(taken(&session, Instant::now()), ["last"]);
    assert!(is_awake(&session), "nobody would ask for what comes next");
    assert_eq!(session.pending(), Pending::Closed);
}
