use super::*;
use crate::host::Facts;
use crate::journal::{BootRecord, Header, Record};

/// A result whose boots came to these settings.
fn booted(plan: &str, boots: &[(&str, &[(&str, &str)])]) -> Journal {
    let header = Header {
        version: 1,
        file: "p.toml".into(),
        plan: plan.into(),
        jobs: Default::default(),
        seed: 1,
        started_ms: 0,
        facts: Facts::new(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    };
    let mut text = serde_json::to_string(&Record::Plan(header)).unwrap() + "\n";
    for (case, effective) in boots {
        let effective = effective
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect();
        let boot = BootRecord {
            block: 0,
            case: (*case).into(),
            twin: false,
            effective,
            boot_s: 1.0,
        };
        text += &(serde_json::to_string(&Record::Boot(boot)).unwrap() + "\n");
    }
    Journal::parse(&text).unwrap()
}

#[test]
fn one_setting_is_no_confusion_and_a_second_that_nobody_asked_for_is() {
    let plan = "[config]\niothread = ['off', 'on']\n";
    let of = |queues: &str| {
        let journal = booted(
            plan,
            &[
                ("iothread=off", &[("iothreads", "0"), ("queues", "1")]),
                ("iothread=on", &[("iothreads", "1"), ("queues", queues)]),
            ],
        );
        Analysis::of(&journal).confounded(0, 1)
    };
    assert_eq!(of("1"), None);
    assert_eq!(
        of("4"),
        Some(vec!["iothread".to_owned(), "queues".to_owned()])
    );
}

#[test]
fn what_another_process_serves_is_one_difference() {
    let plan = "[[case]]\nname = 'a'\n[[case]]\nname = 'b'\ndevice = 'vhost-user-blk'\n";
    let journal = booted(
        plan,
        &[
            ("a", &[("cache.direct", "true")]),
            ("b", &[("server", "ringdisk")]),
        ],
    );
    assert_eq!(Analysis::of(&journal).confounded(0, 1), None);
    let journal = booted(
        plan,
        &[
            ("a", &[("queue-size", "256")]),
            ("b", &[("queue-size", "128")]),
        ],
    );
    assert_eq!(
        Analysis::of(&journal).confounded(0, 1),
        Some(vec!["device".to_owned(), "queue-size".to_owned()])
    );
}
