//! A profile for people.

use std::fmt::Write as _;

use harness::svg::{Anchor, Svg, short, width};

use super::Profile;
use super::interval::{Interval, ThreadUse};
use super::measurement::{Measurement, RoleUse};
use super::roles::Role;
use super::verdict::{Verdict, time};

/// The most threads that are listed one by one.
const THREADS_MAX: usize = 24;
/// A thread that runs and waits for a smaller share is not listed.
const SHARE_MIN: f64 = 0.0005;

/// The whole report: the sentence, the requests, the threads and the host.
pub fn text(title: &str, interval: &Interval, verdict: &Verdict, notes: &[String]) -> String {
    let measured = &interval.measurement;
    let mut text = format!(
        "{title}, {:.1} s\n{}\n\n",
        measured.seconds, verdict.sentence
    );
    requests(&mut text, measured, interval.stalled);
    threads(&mut text, &interval.threads);
    for device in &measured.devices {
        let _ = writeln!(
            text,
            "device {}: busy {}, {:.1} in flight, {} requests per second, {} each",
            device.name,
            percent(device.busy),
            device.in_flight,
            short(device.per_s),
            time(device.mean_ns)
        );
    }
    if let Some(pressure) = measured.pressure {
        let _ = writeln!(
            text,
            "whole host: tasks waited for a CPU {} of the time, for I/O {}, all of them for I/O {}",
            percent(pressure.cpu_some),
            percent(pressure.io_some),
            percent(pressure.io_full)
        );
    }
    for note in notes {
        let _ = writeln!(text, "note: {note}");
    }
    text
}

fn requests(text: &mut String, measured: &Measurement, stalled: u64) {
    let Some(requests) = &measured.requests else {
        return;
    };
    let _ = writeln!(
        text,
        "requests: {} per second, {} each, {:.1} in flight{}",
        short(requests.per_s),
        time(requests.mean_ns),
        requests.per_s * requests.mean_ns / 1e9,
        match &measured.limit {
            Some(limit) => format!("; limits: {}", limit.text),
            None => String::new(),
        }
    );
    if let Some(stages) = requests.stages {
        let parts = [
            ("limit", stages.limit_ns),
            ("image", stages.image_ns),
            ("engine and storage", stages.engine_ns),
            ("way back", stages.back_ns),
        ];
        let words = parts.map(|(name, ns)| {
            format!(
                "{name} {} ({})",
                time(ns),
                percent(ns / requests.mean_ns.max(1.0))
            )
        });
        let _ = writeln!(text, "stages: {}", words.join(", "));
    }
    if stalled > 0 {
        let _ = writeln!(
            text,
            "{stalled} requests failed, and wait for the storage to work again"
        );
    }
    text.push('\n');
}

fn threads(text: &mut String, threads: &[ThreadUse]) {
    let listed =
        |its: &&ThreadUse| its.role != Role::Host && its.on_cpu + its.runnable >= SHARE_MIN;
    let mut rows = vec![
        [
            "THREAD", "ROLE", "TID", "ON CPU", "RUNNABLE", "ASLEEP", "IN D", "VOL/S", "INVOL/S", "",
        ]
        .map(str::to_owned),
    ];
    rows.extend(threads.iter().filter(listed).take(THREADS_MAX).map(row));
    let rest: Vec<&ThreadUse> = threads.iter().filter(listed).skip(THREADS_MAX).collect();
    let idle = threads
        .iter()
        .filter(|its| its.role != Role::Host && !listed(its))
        .count();
    if !rest.is_empty() {
        rows.push(sum(&format!("{} more threads", rest.len()), &rest));
    }
    let host: Vec<&ThreadUse> = threads
        .iter()
        .filter(|its| its.role == Role::Host)
        .collect();
    if let Some(most) = host.first() {
        let mut row = sum(&format!("{} kernel threads", host.len()), &host);
        row[9] = format!(
            "of the whole host, not only of this disk; most: {}",
            most.name
        );
        rows.push(row);
    }
    *text += &aligned(&rows);
    if idle > 0 {
        let _ = writeln!(text, "{idle} more threads were asleep all the time");
    }
    text.push('\n');
}

fn row(its: &ThreadUse) -> [String; 10] {
    let mut notes = Vec::new();
    if its.polling > SHARE_MIN {
        notes.push(format!("polls for {}", percent(its.polling)));
    }
    if its.started {
        notes.push("started".to_owned());
    }
    if its.ended {
        notes.push("ended".to_owned());
    }
    notes.extend(
        its.waits_in
            .as_ref()
            .map(|place| format!("sleeps in {place}")),
    );
    [
        its.name.clone(),
        its.role.label().to_owned(),
        its.tid.to_string(),
        fine(its.on_cpu),
        fine(its.runnable),
        fine(its.asleep),
        fine(its.uninterruptible),
        short(its.voluntary_per_s.round()),
        short(its.involuntary_per_s.round()),
        notes.join(", "),
    ]
}

fn sum(name: &str, threads: &[&ThreadUse]) -> [String; 10] {
    let sum = |of: fn(&ThreadUse) -> f64| threads.iter().map(|its| of(its)).sum::<f64>();
    [
        name.to_owned(),
        String::new(),
        String::new(),
        fine(sum(|its| its.on_cpu)),
        fine(sum(|its| its.runnable)),
        String::new(),
        String::new(),
        short(sum(|its| its.voluntary_per_s).round()),
        short(sum(|its| its.involuntary_per_s).round()),
        String::new(),
    ]
}

/// Names to the left, figures to the right.
fn aligned(rows: &[[String; 10]]) -> String {
    let mut text = String::new();
    let columns: [usize; 10] = std::array::from_fn(|at| {
        rows.iter()
            .map(|row| row[at].chars().count())
            .max()
            .unwrap_or(0)
    });
    for row in rows {
        let cells = row
            .iter()
            .zip(columns)
            .enumerate()
            .map(|(at, (cell, columns))| match at {
                0 | 1 | 9 => format!("{cell:<columns$}"),
                _ => format!("{cell:>columns$}"),
            });
        text += cells.collect::<Vec<_>>().join("  ").trim_end();
        text.push('\n');
    }
    text
}

fn percent(share: f64) -> String {
    format!("{:.0} %", share * 100.0)
}

fn fine(share: f64) -> String {
    format!("{:.1} %", share * 100.0)
}

/// One bar for each role: on CPU, runnable and asleep, as shares of the time of its threads.
pub fn bars(title: &str, profile: &Profile) -> String {
    const LEFT: f64 = 170.0;
    const BAR: f64 = 300.0;
    const ROW: f64 = 20.0;
    let roles: Vec<&RoleUse> = profile
        .measurement
        .roles
        .iter()
        .filter(|its| its.role != Role::Host)
        .collect();
    let note = |its: &RoleUse| {
        format!(
            "{} on CPU, {} runnable, {} switches/s",
            percent(its.on_cpu),
            percent(its.runnable),
            short((its.voluntary_per_s + its.involuntary_per_s).round())
        )
    };
    let notes = roles
        .iter()
        .map(|its| width(&note(its)))
        .fold(0.0, f64::max);
    let height = 46.0 + ROW * roles.len() as f64;
    let mut svg = Svg::new((LEFT + BAR + 14.0 + notes).max(LEFT + width(title)), height);
    svg.text((0.0, 14.0), Anchor::Start, "t b", title);
    svg.text(
        (LEFT, 32.0),
        Anchor::Start,
        "t s",
        "share of the threads' time: on CPU, runnable, asleep",
    );
    for (number, its) in roles.iter().enumerate() {
        let y = 42.0 + ROW * number as f64;
        let name = match its.threads {
            1 => its.role.label().to_owned(),
            n => format!("{} ({n})", its.role.label()),
        };
        svg.text((LEFT - 6.0, y + 11.0), Anchor::End, "t", &name);
        let whole = (its.on_cpu + its.runnable + its.asleep).max(1e-9);
        let mut x = LEFT;
        for (class, value, what) in [
            ("bar c1", its.on_cpu, "on CPU"),
            ("bar c2", its.runnable, "runnable"),
            ("equal", its.asleep, "asleep"),
        ] {
            let wide = BAR * value / whole;
            let tooltip = format!("{name}: {what} {}", percent(value / whole));
            svg.rect((x, y), (wide, ROW - 6.0), class, "", &tooltip);
            x += wide;
        }
        svg.text(
            (LEFT + BAR + 6.0, y + 11.0),
            Anchor::Start,
            "t s",
            &note(its),
        );
    }
    svg.finish(title)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn thread(tid: i32, role: Role, on_cpu: f64) -> ThreadUse {
        ThreadUse {
            tid,
            name: format!("thread {tid}"),
            role,
            on_cpu,
            asleep: 1.0 - on_cpu,
            voluntary_per_s: 10.0,
            ..ThreadUse::default()
        }
    }

    #[test]
    fn idle_threads_are_counted_and_many_threads_are_summed() {
        let mut threads: Vec<_> = (0..30).map(|tid| thread(tid, Role::Vcpu, 0.5)).collect();
        threads.push(thread(100, Role::Other, 0.0));
        threads.push(thread(101, Role::Host, 0.125));
        threads.push(thread(102, Role::Host, 0.0625));
        let interval = Interval {
            threads,
            ..Interval::default()
        };
        let text = text("vm1", &interval, &Verdict::default(), &["a note".into()]);
        assert!(
            text.contains("thread 23 ") && !text.contains("thread 24 "),
            "{text}"
        );
        assert!(
            text.contains("6 more threads") && text.contains("300.0 %"),
            "{text}"
        );
        assert!(text.contains("1 more threads were asleep"), "{text}");
        assert!(
            text.contains("2 kernel threads") && text.contains("most: thread 101"),
            "{text}"
        );
        assert!(text.contains("note: a note"), "{text}");
    }

    #[test]
    fn bars_fill_their_width_and_escape_names() {
        let profile = Profile {
            measurement: Measurement {
                roles: vec![RoleUse {
                    role: Role::Server,
                    threads: 2,
                    on_cpu: 1.0,
                    runnable: 0.5,
                    asleep: 0.5,
                    ..RoleUse::default()
                }],
                ..Measurement::default()
            },
            ..Profile::default()
        };
        let svg = bars("<case>", &profile);
        assert!(svg.contains("&lt;case&gt;") && svg.contains("ringdisk I/O thread (2)"));
        for part in ["150.0", "75.0"] {
            assert!(svg.contains(&format!("width=\"{part}\"")), "{svg}");
        }
    }
}
