use super::super::measurement::*;
use super::*;
use proptest::prelude::*;

/// A thread of a role: on CPU and runnable.
fn thread(role: Role, on_cpu: f64, runnable: f64) -> RoleUse {
    let share = ThreadShare {
        name: format!("{}-0", role.label()),
        on_cpu,
        runnable,
    };
    RoleUse {
        role,
        threads: 1,
        on_cpu,
        runnable,
        asleep: 1.0 - on_cpu - runnable,
        busiest: share.clone(),
        most_delayed: share,
        ..RoleUse::default()
    }
}

/// Microseconds: waiting for a limit, in the image, in the engine, on the way back.
fn served(per_s: f64, stages: [f64; 4], roles: Vec<RoleUse>) -> Measurement {
    let [limit_ns, image_ns, engine_ns, back_ns] = stages.map(|us| us * 1e3);
    Measurement {
        seconds: 10.0,
        roles,
        requests: Some(Requests {
            disks: 1,
            per_s,
            mean_ns: limit_ns + image_ns + engine_ns + back_ns,
            stages: Some(Stages {
                limit_ns,
                image_ns,
                engine_ns,
                back_ns,
            }),
        }),
        ..Measurement::default()
    }
}

/// An idle vCPU and a nearly idle I/O thread.
fn calm() -> Vec<RoleUse> {
    vec![
        thread(Role::Vcpu, 0.2, 0.01),
        thread(Role::Server, 0.1, 0.01),
    ]
}

fn device(busy: f64, mean_us: f64, per_s: f64) -> DeviceUse {
    DeviceUse {
        name: "vda".into(),
        busy,
        in_flight: per_s * mean_us / 1e6,
        per_s,
        mean_ns: mean_us * 1e3,
    }
}

#[track_caller]
fn expect(measured: &Measurement, stage: Stage, words: &[&str]) -> Verdict {
    let verdict = judge(measured);
    assert_eq!(verdict.stage, stage, "{}", verdict.sentence);
    for words in words {
        assert!(
            verdict.sentence.contains(words),
            "{words:?} in {}",
            verdict.sentence
        );
    }
    verdict
}

fn limited() -> Measurement {
    Measurement {
        limit: Some(Limit {
            text: "iops=500".into(),
            used: Some(1.0),
        }),
        // Depth 8 at 500 requests a second.
        ..served(500.0, [15_800.0, 0.0, 190.0, 10.0], calm())
    }
}

#[test]
fn limit_that_holds_requests_back() {
    let verdict = expect(&limited(), Stage::Limit, &["iops=500", "99 %"]);
    assert!(verdict.clear);
}

#[test]
fn limit_that_is_not_reached_is_not_blamed() {
    let measured = Measurement {
        limit: limited().limit,
        ..served(400.0, [5.0, 0.0, 9_900.0, 10.0], calm())
    };
    expect(&measured, Stage::Storage, &["9.9 ms"]);
}

#[test]
fn waiting_without_a_limit_is_undecided() {
    let measured = Measurement {
        limit: None,
        ..limited()
    };
    expect(&measured, Stage::Undecided, &["because", "no limit"]);
}

#[test]
fn limit_above_slow_storage() {
    let at = |used| Measurement {
        seconds: 10.0,
        roles: calm(),
        limit: Some(Limit {
            text: "iops=50".into(),
            used: Some(used),
        }),
        devices: vec![device(0.75, 15_000.0, 50.0)],
        requests: Some(Requests {
            disks: 1,
            per_s: 50.0,
            mean_ns: 20e6,
            stages: None,
        }),
        ..Measurement::default()
    };
    expect(&at(1.0), Stage::Limit, &["100 % of iops=50"]);
    expect(&at(0.92), Stage::Storage, &["vda"]);
}

#[test]
fn slow_storage() {
    let measured = Measurement {
        devices: vec![device(0.99, 900.0, 8_000.0)],
        ..served(8_000.0, [0.0, 1.0, 950.0, 10.0], calm())
    };
    let verdict = expect(
        &measured,
        Stage::Storage,
        &["vda is busy for 99 %", "950 µs"],
    );
    assert!(verdict.clear);
}

#[test]
fn storage_whose_device_is_idle_is_undecided() {
    let measured = Measurement {
        devices: vec![device(0.05, 90.0, 500.0)],
        ..served(500.0, [0.0, 0.0, 16_000.0, 10.0], calm())
    };
    expect(
        &measured,
        Stage::Undecided,
        &["because", "not the reason", "control group"],
    );
    // A device that had no requests, such as that of a file in the page cache, says nothing.
    let cached = Measurement {
        devices: vec![device(0.0, 0.0, 0.0)],
        ..measured
    };
    expect(&cached, Stage::Storage, &[]);
}

#[test]
fn busy_messenger() {
    let roles = |share| {
        vec![
            thread(Role::Server, 0.3, 0.0),
            thread(Role::Messenger, share, 0.02),
        ]
    };
    let with = |share| served(20_000.0, [0.0, 0.0, 1_500.0, 10.0], roles(share));
    expect(&with(0.97), Stage::Messenger, &["97 %", "Ceph messenger-0"]);
    // A near miss: the cluster is waited for.
    let words = "30 % of the busiest ringdisk I/O thread and 80 % of the busiest Ceph messenger";
    expect(&with(0.8), Stage::Storage, &[words]);
}

#[test]
fn two_busy_threads_are_undecided() {
    let roles = vec![
        thread(Role::Server, 0.95, 0.0),
        thread(Role::Messenger, 0.96, 0.0),
    ];
    let measured = served(20_000.0, [0.0, 0.0, 1_500.0, 10.0], roles);
    expect(
        &measured,
        Stage::Undecided,
        &["two threads are busy", "95 %", "96 %"],
    );
}

#[test]
fn busy_io_thread() {
    let roles = vec![
        thread(Role::Vcpu, 0.5, 0.0),
        thread(Role::Server, 0.98, 0.01),
    ];
    let measured = served(300_000.0, [0.0, 3.0, 80.0, 20.0], roles.clone());
    expect(&measured, Stage::Server, &["98 %"]);
    // With polling, it is on CPU as long, but not busy: `busiest` does not count polling.
    let mut polling = measured.clone();
    polling.roles[1].polling = 0.8;
    polling.roles[1].busiest.on_cpu = 0.18;
    polling.roles[1].most_delayed.on_cpu = 0.18;
    expect(&polling, Stage::Storage, &[]);
    // Before the thread fetches them, requests are not counted.
    let elsewhere = served(2_000.0, [0.0, 0.0, 20.0, 5.0], roles);
    expect(&elsewhere, Stage::Server, &["wait in the guest's ring"]);
}

#[test]
fn starved_vcpu() {
    let roles = |on_cpu, runnable| {
        vec![
            thread(Role::Vcpu, on_cpu, runnable),
            thread(Role::Server, 0.05, 0.01),
        ]
    };
    let with = |on_cpu, runnable| served(1_000.0, [0.0, 0.0, 100.0, 10.0], roles(on_cpu, runnable));
    expect(
        &with(0.3, 0.68),
        Stage::StarvedVcpu,
        &["68 %", "no request in flight"],
    );
    // Near misses: it waits for less than half of the time in which the disk has no request.
    expect(
        &with(0.5, 0.48),
        Stage::Undecided,
        &["guest accounts for 46 %", "starved-vcpu for another 43 %"],
    );
    expect(&with(0.45, 0.3), Stage::Guest, &["no request in flight"]);
    // A near miss: it waits a little, because it runs nearly all the time.
    expect(&with(0.75, 0.24), Stage::Guest, &[]);
    expect(&with(0.3, 0.1), Stage::Guest, &[]);
}

#[test]
fn thread_that_serves_other_disks_is_not_the_limit_of_a_guest_that_waits_for_nothing() {
    let roles = vec![
        thread(Role::Client, 0.1, 0.0),
        thread(Role::Server, 0.98, 0.01),
    ];
    let measured = Measurement {
        guest: Some(GuestView {
            per_s: 1_000.0,
            mean_ns: 130_000.0,
            disks: 1,
        }),
        ..served(1_000.0, [0.0, 0.0, 100.0, 10.0], roles)
    };
    expect(&measured, Stage::Guest, &["87 %"]);
}

#[test]
fn starved_vcpu_with_requests_in_the_storage_is_not_the_limit() {
    let roles = vec![
        thread(Role::Vcpu, 0.5, 0.45),
        thread(Role::Server, 0.05, 0.01),
    ];
    let measured = served(8_000.0, [0.0, 0.0, 950.0, 10.0], roles);
    expect(&measured, Stage::Storage, &[]);
}

#[test]
fn starved_io_thread() {
    let roles = vec![
        thread(Role::Vcpu, 0.1, 0.0),
        thread(Role::Server, 0.3, 0.65),
    ];
    let storage = served(8_000.0, [0.0, 0.0, 950.0, 10.0], roles.clone());
    expect(&storage, Stage::StarvedThread, &["65 %"]);
    // A near miss: it is delayed for a third of the time, and the storage takes the rest.
    let less = vec![thread(Role::Vcpu, 0.1, 0.0), thread(Role::Server, 0.3, 0.3)];
    let storage = served(8_000.0, [0.0, 0.0, 950.0, 10.0], less);
    expect(&storage, Stage::Storage, &[]);
    let way_back = served(8_000.0, [0.0, 0.0, 50.0, 900.0], roles);
    expect(
        &way_back,
        Stage::StarvedThread,
        &["until the guest is told"],
    );
}

#[test]
fn slow_guest() {
    let measured = served(400.0, [0.0, 0.0, 100.0, 10.0], calm());
    let verdict = expect(
        &measured,
        Stage::Guest,
        &["96 % of the time", "vCPU is on CPU for 20 %"],
    );
    assert!(verdict.clear);
    let computes = vec![
        thread(Role::Vcpu, 0.99, 0.0),
        thread(Role::Server, 0.1, 0.0),
    ];
    let measured = served(400.0, [0.0, 0.0, 100.0, 10.0], computes);
    expect(&measured, Stage::Guest, &["the guest computes"]);
}

#[test]
fn nearly_no_requests_are_the_guests_choice() {
    let measured = served(0.2, [0.0, 0.0, 900_000.0, 10.0], calm());
    expect(&measured, Stage::Guest, &["100 %"]);
}

#[test]
fn several_disks_have_several_places() {
    let mut measured = served(8_000.0, [0.0, 0.0, 490.0, 10.0], calm());
    expect(&measured, Stage::Storage, &[]);
    // Four requests in flight, on 40 disks.
    measured.requests.as_mut().unwrap().disks = 40;
    expect(&measured, Stage::Guest, &["90 %"]);
}

#[test]
fn busy_client() {
    let roles = vec![
        thread(Role::Client, 0.99, 0.0),
        thread(Role::Server, 0.4, 0.0),
    ];
    let measured = served(100_000.0, [0.0, 0.0, 2.0, 1.0], roles);
    expect(&measured, Stage::Client, &["99 %"]);
}

#[test]
fn time_between_guest_and_server() {
    let view = |roles| Measurement {
        guest: Some(GuestView {
            per_s: 9_000.0,
            mean_ns: 110_000.0,
            disks: 1,
        }),
        ..served(9_000.0, [0.0, 0.0, 15.0, 5.0], roles)
    };
    expect(
        &view(calm()),
        Stage::Undecided,
        &[
            "notifications",
            "no thread runs or waits for a CPU for 90 %",
        ],
    );
    let starved = vec![
        thread(Role::Vcpu, 0.2, 0.75),
        thread(Role::Server, 0.1, 0.0),
    ];
    expect(&view(starved), Stage::StarvedVcpu, &["75 %"]);
}

#[test]
fn parts_without_a_majority_are_undecided() {
    let mut measured = served(1_000.0, [300.0, 300.0, 350.0, 50.0], calm());
    measured.limit = limited().limit;
    expect(
        &measured,
        Stage::Undecided,
        &["no stage takes half", "storage", "35 %"],
    );
}

/// A disk that QEMU opens itself, of which only the guest's view is known.
fn in_qemu(roles: Vec<RoleUse>, devices: Vec<DeviceUse>) -> Measurement {
    Measurement {
        seconds: 10.0,
        roles,
        guest: Some(GuestView {
            per_s: 10_000.0,
            mean_ns: 800_000.0,
            disks: 1,
        }),
        devices,
        ..Measurement::default()
    }
}

#[test]
fn disks_of_qemu() {
    let main_loop = |share| {
        vec![
            thread(Role::MainLoop, share, 0.0),
            thread(Role::Vcpu, 0.3, 0.0),
        ]
    };
    expect(
        &in_qemu(main_loop(0.97), Vec::new()),
        Stage::MainLoop,
        &["97 %"],
    );
    expect(
        &in_qemu(main_loop(0.5), Vec::new()),
        Stage::Undecided,
        &["does not report"],
    );
    let slow = vec![device(1.0, 700.0, 10_000.0)];
    expect(
        &in_qemu(main_loop(0.5), slow.clone()),
        Stage::Storage,
        &["vda"],
    );
    // Most requests never reach the device.
    let cached = vec![device(0.2, 700.0, 1_000.0)];
    expect(&in_qemu(main_loop(0.97), cached), Stage::MainLoop, &[]);
    let io_thread = vec![
        thread(Role::MainLoop, 0.01, 0.0),
        thread(Role::IoThread, 0.95, 0.0),
    ];
    expect(&in_qemu(io_thread, Vec::new()), Stage::IoThread, &["95 %"]);
    let messenger = vec![
        thread(Role::MainLoop, 0.3, 0.0),
        thread(Role::Messenger, 0.99, 0.0),
    ];
    expect(&in_qemu(messenger, Vec::new()), Stage::Messenger, &["99 %"]);
    let cluster = vec![
        thread(Role::MainLoop, 0.3, 0.0),
        thread(Role::Messenger, 0.4, 0.0),
    ];
    expect(
        &in_qemu(cluster, Vec::new()),
        Stage::Storage,
        &["the cluster is waited for"],
    );
    let on_nfs = |share| Measurement {
        uncounted: vec!["/vms/a.raw (nfs4)".into()],
        ..in_qemu(main_loop(share), Vec::new())
    };
    expect(&on_nfs(0.3), Stage::Storage, &["/vms/a.raw (nfs4)"]);
    // A near miss: another disk is on a block device, or a thread is busy.
    let other = Measurement {
        devices: in_qemu(main_loop(0.3), vec![device(0.0, 0.0, 0.0)]).devices,
        ..on_nfs(0.3)
    };
    expect(&other, Stage::Undecided, &[]);
    expect(&on_nfs(0.97), Stage::MainLoop, &["97 %"]);
    let limited = Measurement {
        limit: Some(Limit {
            text: "iops=10000".into(),
            used: Some(0.99),
        }),
        ..in_qemu(main_loop(0.5), Vec::new())
    };
    expect(&limited, Stage::Limit, &["iops=10000"]);
    let io_thread = |on_cpu, runnable| {
        let roles = vec![
            thread(Role::MainLoop, 0.01, 0.0),
            thread(Role::IoThread, on_cpu, runnable),
        ];
        in_qemu(roles, Vec::new())
    };
    expect(&io_thread(0.2, 0.75), Stage::StarvedThread, &["75 %"]);
    // A near miss: it does not wait for a CPU in most of the time.
    expect(
        &io_thread(0.04, 0.39),
        Stage::Undecided,
        &["39 %", "does not explain it"],
    );
}

#[test]
fn threads_alone() {
    let with = |roles, devices| Measurement {
        seconds: 10.0,
        roles,
        devices,
        ..Measurement::default()
    };
    let unknown = ["times of requests are unknown"];
    expect(&with(calm(), Vec::new()), Stage::Undecided, &unknown);
    let main_loop = vec![thread(Role::MainLoop, 0.98, 0.0)];
    let verdict = expect(&with(main_loop, Vec::new()), Stage::MainLoop, &unknown);
    assert!(!verdict.clear);
    let starved = vec![thread(Role::Vcpu, 0.5, 0.5)];
    expect(&with(starved, Vec::new()), Stage::StarvedVcpu, &unknown);
    expect(
        &with(calm(), vec![device(0.97, 500.0, 900.0)]),
        Stage::Storage,
        &["vda"],
    );
}

/// A thread that never sleeps explains everything that waits for it, however much of a CPU it gets.
#[test]
fn thread_that_never_sleeps() {
    let alone = |role, on_cpu, runnable| Measurement {
        seconds: 10.0,
        roles: vec![thread(role, on_cpu, runnable)],
        ..Measurement::default()
    };
    // A program that reads from the page cache, on a host whose CPUs compute.
    let fio = alone(Role::Client, 0.21, 0.79);
    let words = ["'client-0'", "79 %", "runs for 21 %"];
    expect(&fio, Stage::StarvedThread, &words);
    // Each waits for less than half of the time.
    expect(
        &alone(Role::Client, 0.6, 0.38),
        Stage::StarvedThread,
        &["38 %"],
    );
    expect(
        &alone(Role::IoThread, 0.55, 0.4),
        Stage::StarvedThread,
        &["40 %"],
    );
    // It lacks less than half of what it has.
    expect(
        &alone(Role::Client, 0.7, 0.28),
        Stage::Client,
        &["70 %", "28 %"],
    );
    // It sleeps for most of the time, so something else limits.
    let words = ["39 %", "explains no more than that"];
    expect(&alone(Role::IoThread, 0.04, 0.39), Stage::Undecided, &words);
    expect(
        &alone(Role::Vcpu, 0.3, 0.3),
        Stage::Undecided,
        &["explains no more"],
    );
    // With known times, the whole part has this cause.
    let both =
        |role, on_cpu, runnable| vec![thread(Role::Vcpu, 0.1, 0.0), thread(role, on_cpu, runnable)];
    let storage = |role| served(8_000.0, [0.0, 0.0, 950.0, 10.0], both(role, 0.6, 0.35));
    let verdict = expect(&storage(Role::Server), Stage::StarvedThread, &["35 %"]);
    assert!(verdict.share > 0.7, "{verdict:?}");
    let idle = served(
        400.0,
        [0.0, 0.0, 100.0, 10.0],
        both(Role::Client, 0.6, 0.36),
    );
    expect(
        &idle,
        Stage::StarvedThread,
        &["'client-0'", "no request in flight"],
    );
    let in_kernel = in_qemu(both(Role::Client, 0.3, 0.66), Vec::new());
    expect(&in_kernel, Stage::StarvedThread, &["'client-0'", "66 %"]);
    // Two that lack a CPU have one cause.
    let two = vec![
        thread(Role::Server, 0.3, 0.65),
        thread(Role::Messenger, 0.4, 0.58),
    ];
    expect(
        &served(8_000.0, [0.0, 0.0, 950.0, 10.0], two),
        Stage::StarvedThread,
        &["Ceph messenger-0"],
    );
}

/// A thread that is busy, or waits for a CPU, is named whatever its role is.
#[test]
fn no_thread_is_passed_over() {
    let with = |role, on_cpu, runnable| Measurement {
        seconds: 10.0,
        roles: vec![thread(role, on_cpu, runnable)],
        ..Measurement::default()
    };
    let nobody = "no thread runs or waits for a CPU for 90 % of the time (polling aside), and none waits for 20 %";
    for (role, stage) in [
        (Role::Librbd, Stage::Librbd),
        (Role::Blocking, Stage::Worker),
        (Role::Client, Stage::Client),
        (Role::Vcpu, Stage::Undecided),
        (Role::Other, Stage::Undecided),
    ] {
        let name = format!("'{}-0'", role.label());
        expect(&with(role, 0.99, 0.0), stage, &[&name, "99 %"]);
        expect(&with(role, 0.8, 0.15), stage, &[&name, "80 %", "15 %"]);
        expect(&with(role, 0.8, 0.08), Stage::Undecided, &[nobody]);
    }
    for role in Role::ALL.into_iter().filter(|role| *role != Role::Host) {
        let verdict = judge(&with(role, 0.22, 0.78));
        let name = format!("'{}-0' is runnable but waits", role.label());
        assert!(verdict.sentence.contains(&name), "{}", verdict.sentence);
    }
    // A thread that lacks CPU time less than half as long as it runs.
    expect(
        &with(Role::Other, 0.7, 0.29),
        Stage::Undecided,
        &["29 %", "is unknown"],
    );
    // What the host's own threads do says nothing about the disk.
    expect(&with(Role::Host, 0.99, 0.0), Stage::Undecided, &[nobody]);
    // Messengers that wait do not mean that the cluster is waited for, if another thread is busy.
    let other = vec![
        thread(Role::Messenger, 0.4, 0.0),
        thread(Role::Other, 0.97, 0.0),
    ];
    expect(
        &in_qemu(other, Vec::new()),
        Stage::Undecided,
        &["'other-0'", "97 %"],
    );
}

#[test]
fn disk_without_a_vm() {
    let idle = Measurement {
        without_vm: true,
        ..served(0.0, [0.0; 4], calm())
    };
    expect(&idle, Stage::Undecided, &["no VM is connected"]);
    // One that connected meanwhile has requests.
    let busy = Measurement {
        without_vm: true,
        ..served(8_000.0, [0.0, 1.0, 950.0, 10.0], calm())
    };
    expect(&busy, Stage::Storage, &[]);
}

#[test]
fn words_of_stages_are_those_in_json() {
    for stage in [
        Stage::Guest,
        Stage::StarvedVcpu,
        Stage::IoThread,
        Stage::KernelWorker,
        Stage::Librbd,
        Stage::Worker,
        Stage::Undecided,
    ] {
        assert_eq!(serde_json::to_value(stage).unwrap(), stage.word());
    }
}

proptest! {
    #[test]
    fn every_measurement_has_one_sentence(
        per_s in 0.0..1e7_f64, stages in prop::array::uniform4(0.0..1e7_f64), limited in any::<bool>(),
        guest in prop::option::of((0.0..1e7_f64, 0.0..1e9_f64)), disks in 0..9_u32,
        shares in prop::collection::vec((prop::sample::select(Role::ALL.to_vec()), 0.0..1.0_f64, 0.0..1.0_f64), 0..6),
        devices in prop::collection::vec((0.0..1.0_f64, 0.0..1e6_f64, 0.0..1e6_f64), 0..3),
    ) {
        let roles = shares.into_iter().map(|(role, on_cpu, runnable)| thread(role, on_cpu, runnable)).collect();
        let mut measured = served(per_s, stages, roles);
        measured.requests.as_mut().unwrap().disks = disks;
        measured.limit = limited.then(Limit::default);
        measured.guest = guest.map(|(per_s, mean_ns)| GuestView { per_s, mean_ns, disks });
        measured.devices = devices.into_iter().map(|(busy, mean_us, per_s)| device(busy, mean_us, per_s)).collect();
        let verdict = judge(&measured);
        prop_assert!(verdict.sentence.ends_with('.') && !verdict.sentence.contains("NaN"));
        prop_assert_eq!(verdict.stage == Stage::Undecided, verdict.sentence.starts_with("Undecided, because "));
        let is_burdened = |role: Role| {
            let its = measured.role(role).filter(|its| its.role != Role::Host);
            its.is_some_and(|its| its.busiest.on_cpu >= BUSY || its.most_delayed.runnable >= DELAYED)
        };
        prop_assert!(!verdict.sentence.contains("no thread runs") || !Role::ALL.into_iter().any(is_burdened));
        if let Some(parts) = parts(&measured) {
            let sum: f64 = parts.iter().map(|(_, share)| share).sum();
            prop_assert!((sum - 1.0).abs() < 1e-6, "{:?}", parts);
        }
    }
}
