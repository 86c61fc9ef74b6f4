//! Reports in a real browser: texts do not overlap, none is cut off, and the page fetches nothing.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use harness::histogram::Histogram;
use harness::paths::find_program;
use harness::random::Rng;
use lab::analysis::Analysis;
use lab::journal::{BootRecord, Ceiling, Cell, Header, Journal, Record, Sample};
use lab::plan::{Plan, Workload};
use lab::window::Point;

/// A script that checks the page after it is laid out. Every text must be inside its drawing and must not overlap others.
/// Every block must be as wide as its content, unless it scrolls.
const LOOK: &str = r#"
<script>
window.addEventListener('load', () => {
  const wrong = [];
  for (const svg of document.querySelectorAll('figure svg')) {
    const frame = svg.getBoundingClientRect();
    const texts = [...svg.querySelectorAll('text')].map(text => [text.textContent, text.getBoundingClientRect()]);
    texts.forEach(([word, box], index) => {
      if (box.left < frame.left - 1 || box.right > frame.right + 1 || box.top < frame.top - 1 || box.bottom > frame.bottom + 1)
        wrong.push('cut: ' + word);
      for (const [other, its] of texts.slice(index + 1))
        if (box.left + 1 < its.right && its.left + 1 < box.right && box.top + 2 < its.bottom && its.top + 2 < box.bottom)
          wrong.push('overlap: ' + word + ' | ' + other);
    });
  }
  for (const block of document.querySelectorAll('h1, h2, p, li, td, th, summary, figcaption'))
    if (block.scrollWidth > block.clientWidth + 1) wrong.push('wide: ' + block.textContent.slice(0, 60));
  if (document.documentElement.scrollWidth > window.innerWidth) wrong.push('the page scrolls sideways');
  const figures = [...document.querySelectorAll('figure')].map(figure => figure.getBoundingClientRect());
  figures.forEach((box, index) => figures.slice(index + 1).forEach(its => {
    if (box.left + 1 < its.right && its.left + 1 < box.right && box.top + 1 < its.bottom && its.top + 1 < box.bottom)
      wrong.push('figures overlap');
  }));
  const fetched = performance.getEntriesByType('resource').length;
  document.title = 'looked: ' + document.querySelectorAll('figure svg').length + ' charts, ' + fetched + ' fetched, wrong: ' + wrong.join('; ');
});
</script></body>"#;

/// A result of this plan, as if it had run: each case is a few percent better than the one before.
fn result(plan: &str, blocks: u32) -> Journal {
    let parsed = Plan::parse(Path::new("plan.toml"), plan).unwrap();
    let mut records = vec![Record::Plan(header(plan))];
    records.extend(parsed.workloads.iter().map(|load| {
        Record::Ceiling(Ceiling {
            workload: load.name.clone(),
            disks: 1,
            iops: 500_000.0,
            mean_ns: 60_000.0,
        })
    }));
    let mut rng = Rng::new(7);
    for block in 0..blocks {
        for (arm, case) in parsed.cases.iter().chain(&parsed.cases[..1]).enumerate() {
            let twin = arm == parsed.cases.len();
            let effective = [
                ("driver".to_owned(), "virtio_blk".to_owned()),
                ("queues".to_owned(), (1 + arm % 3).to_string()),
            ];
            records.push(Record::Boot(BootRecord {
                block,
                case: case.name.clone(),
                twin,
                effective: effective.into(),
                boot_s: 2.0,
            }));
            let better = 1.0 + 0.13 * if twin { 0.0 } else { arm as f64 };
            for load in &parsed.workloads {
                let sample = sample(load, better, &mut rng);
                let failed = arm == 1 && block == 1;
                let first_block = block == 0;
                records.push(Record::Cell(Cell {
                    block,
                    case: case.name.clone(),
                    twin,
                    workload: load.name.clone(),
                    error: failed
                        .then(|| "QEMU ended (signal: 9)\nqemu.log:\nits last words".into()),
                    flags: first_block
                        .then(|| "starved: the CPUs had 1 % left".into())
                        .into_iter()
                        .collect(),
                    sample: (!failed).then_some(sample),
                    ..Cell::default()
                }));
            }
        }
    }
    let lines: Vec<String> = records
        .iter()
        .map(|record| serde_json::to_string(record).unwrap() + "\n")
        .collect();
    Journal::parse(&lines.concat()).unwrap()
}

fn header(plan: &str) -> Header {
    let cpu = "A processor with <markup> & a long name of many words, 64 cores";
    Header {
        version: 1,
        file: "plan.toml".into(),
        plan: plan.into(),
        jobs: BTreeMap::new(),
        seed: 42,
        started_ms: 0,
        facts: [("cpu", cpu), ("accelerator", "tcg")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .into(),
        only: Vec::new(),
        left_out: BTreeMap::new(),
    }
}

/// A sample with 3 % of noise; `better` multiplies its IOPS.
fn sample(load: &Workload, better: f64, rng: &mut Rng) -> Sample {
    let depth = f64::from(load.iodepth);
    let iops = 9000.0 * better * depth.powf(0.7) * (0.03 * rng.normal()).exp();
    let mean_ns = 1e9 * depth / iops;
    let mut latencies = Histogram::default();
    for n in 1..60 {
        let ns = mean_ns * 1.1_f64.powi(n - 10);
        latencies.add(ns as u64, 9000 / (1 + n as u64 * n as u64 / 9));
    }
    let point = |second: u32| Point {
        at_s: f64::from(second) + 0.5,
        iops,
        p50_ns: mean_ns as u64,
        p99_ns: (mean_ns * (2.0 + rng.unit())) as u64,
        max_ns: (mean_ns * 9.0) as u64,
    };
    Sample {
        iops,
        bytes_per_s: iops * load.bs as f64,
        mean_ns,
        latencies,
        series: (0..20).map(point).collect(),
        window_s: 20.0,
        cpu_us: Some(9.0 / better),
        switches: Some(1.5),
        ..Sample::default()
    }
}

fn chromium() -> Option<PathBuf> {
    let found = ["chromium", "chromium-browser", "google-chrome"]
        .into_iter()
        .find_map(find_program);
    if found.is_none() {
        println!(
            "skipped: reports in a browser: chromium is missing; `cargo xtask install` installs it"
        );
    }
    found
}

/// Loads a page with a new profile and without a network.
fn browse(browser: &Path, page: &Path, arguments: &[&str]) -> String {
    let profile = tempfile::tempdir().unwrap();
    let output = Command::new(browser)
        .args([
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--hide-scrollbars",
        ])
        .args([
            "--disable-background-networking",
            "--disable-extensions",
            "--host-resolver-rules=MAP * ~NOTFOUND",
        ])
        .arg(format!("--user-data-dir={}", profile.path().display()))
        .args(arguments)
        .arg(format!("file://{}", page.display()))
        .output()
        .unwrap();
    String::from_utf8_lossy(&output.stdout).into_owned()
}

fn look(name: &str, plan: &str, charts_min: usize) {
    let Some(browser) = chromium() else { return };
    let journal = result(plan, 6);
    let analysis = Analysis::of(&journal);
    let folder = tempfile::tempdir().unwrap();
    lab::report::write(&analysis, folder.path()).unwrap();
    let page = fs::read_to_string(folder.path().join("report.html")).unwrap();
    assert!(
        !page.contains("http:") && !page.contains("https:") && !page.contains("<markup>"),
        "{name}"
    );
    let looked_at = folder.path().join("look.html");
    fs::write(&looked_at, page.replace("</body>", LOOK)).unwrap();
    // A large screen, a small screen, and a dark one.
    for arguments in [
        &["--window-size=1280,900", "--dump-dom"][..],
        &["--window-size=500,900", "--dump-dom"],
        &["--window-size=1280,900", "--force-dark-mode", "--dump-dom"],
    ] {
        let dom = browse(&browser, &looked_at, arguments);
        let title = dom
            .split("<title>")
            .nth(1)
            .and_then(|rest| rest.split("</title>").next())
            .unwrap_or_default();
        assert!(
            title.ends_with("0 fetched, wrong: "),
            "{name} {arguments:?}: {title:?}"
        );
        let charts: usize = title
            .split_whitespace()
            .nth(1)
            .and_then(|word| word.parse().ok())
            .unwrap_or(0);
        assert!(charts >= charts_min, "{name}: {title}");
    }
    match find_program("pdftotext") {
        Some(_) => paper(&browser, name, folder.path()),
        None => println!(
            "skipped: reports on paper: pdftotext is missing; `cargo xtask install` installs it"
        ),
    }
    if let Some(kept) = std::env::var_os("RINGDISK_LAB_PICTURES") {
        let picture = Path::new(&kept).join(format!("{name}.png"));
        let shot = format!("--screenshot={}", picture.display());
        browse(
            &browser,
            &folder.path().join("report.html"),
            &["--window-size=1280,2600", &shot],
        );
    }
}

/// On paper, the patches are visible and complete: they cannot be opened with a click.
fn paper(browser: &Path, name: &str, folder: &Path) {
    let pdf = folder.join("report.pdf");
    let print = format!("--print-to-pdf={}", pdf.display());
    let arguments = [&print, "--no-pdf-header-footer"];
    browse(browser, &folder.join("report.html"), &arguments);
    let text = Command::new("pdftotext").arg(&pdf).arg("-").output();
    let text = String::from_utf8_lossy(&text.unwrap().stdout).into_owned();
    let result = fs::read_to_string(folder.join("result.json")).unwrap();
    let result: serde_json::Value = serde_json::from_str(&result).unwrap();
    let patches = result["recommendation"]["patches"].as_object().unwrap();
    // Ignore hyphens, because some of them are only at line breaks.
    let plain = |text: &str| {
        let kept = |c: &char| !c.is_whitespace() && *c != '-';
        text.chars().filter(kept).collect::<String>()
    };
    for (whom, patch) in patches {
        let last = patch.as_str().unwrap().lines().last().unwrap();
        assert!(
            plain(&text).contains(&plain(last)),
            "{name}: {whom}: {last}: {text}"
        );
    }
}

#[test]
fn a_sweep_of_two_axes_with_seven_block_sizes_and_eight_depths() {
    look(
        "aio-iothread",
        lab::recipes::text("aio-iothread").unwrap(),
        30,
    );
}

#[test]
fn a_ladder() {
    look("ladder", lab::recipes::text("ladder").unwrap(), 9);
}

#[test]
fn guests_times_volumes_times_depth() {
    look(
        "rbd-scaling",
        lab::recipes::text("rbd-scaling").unwrap(),
        20,
    );
}

#[test]
fn named_loads_and_long_names() {
    look("desktop", lab::recipes::text("desktop").unwrap(), 10);
    let open = "[config]\nqueues=[1,2]\n[fio]\nrate=[1000,2000,4000,8000]\narrival='poisson'\n";
    look("open-loop", open, 3);
}

/// The checks of the page find errors.
#[test]
fn a_page_with_faults_is_seen_to_have_them() {
    let Some(browser) = chromium() else { return };
    let folder = tempfile::tempdir().unwrap();
    let page = folder.path().join("page.html");
    let svg = "<figure><svg width=\"100\" height=\"40\"><text x=\"5\" y=\"20\">one text</text><text x=\"15\" y=\"20\">another</text>\
        <text x=\"80\" y=\"38\">too long for here</text></svg></figure>";
    fs::write(&page, format!("<html><body>{svg}{LOOK}</html>")).unwrap();
    let dom = browse(&browser, &page, &["--dump-dom"]);
    assert!(
        dom.contains("overlap: one text | another") && dom.contains("cut: too long for here"),
        "{dom}"
    );
}
