//! Results of fio in the forms in which they are posted. Those in `fuzz/seeds/lab_import` were made with fio 3.33; the others
//! have its field names, and figures that show at once which of them was used.

use super::*;
use serde_json::Value;

const IOPS: f64 = 5000.0;

/// 5,000 requests of 4 KiB a second for 10 s; mean 100 us, median 90 us, 99th percentile 400 us.
fn side(kind: &str) -> Value {
    let mut side = json!({ "io_bytes": 204_800_000, "io_kbytes": 200_000, "bw_bytes": 20_480_000, "bw": 20_000,
        "iops": IOPS, "runtime": 10_000, "total_ios": 50_000 });
    for name in ["clat_ns", "lat_ns"] {
        side[name] = json!({ "mean": 100_000.0, "N": 50_000 });
    }
    side[kind]["percentile"] = json!({ "1.000000": 60_000, "50.000000": 90_000, "90.000000": 150_000,
        "99.000000": 400_000, "99.990000": 900_000 });
    side
}

fn job(name: &str, direction: &str, side: Value) -> Value {
    json!({ "jobname": name, "groupid": 0, "error": 0, direction: side })
}

fn document(key: &str, jobs: &[Value]) -> String {
    json!({ "fio version": "fio-3.36", "timestamp_ms": 1, key: jobs }).to_string()
}

fn plain() -> String {
    document("jobs", &[job("t", "read", side("clat_ns"))])
}

#[track_caller]
fn assert_usual(text: &str) -> Results {
    let results = parse(text.as_bytes()).unwrap();
    assert_eq!(names(&results), ["t"]);
    let sample = &results.loads[0].sample;
    let figures = (sample.iops, sample.bytes_per_s, sample.mean_ns);
    assert_eq!(figures, (IOPS, 20_480_000.0, 100_000.0));
    for (share, us) in [(0.5, 90.0), (0.99, 400.0)] {
        let found = sample.percentile_us(share);
        assert!((found / us - 1.0).abs() < 0.03, "{share}: {found}");
    }
    results
}

#[test]
fn fios_own_figures_are_used() {
    assert_usual(&plain());
    for (direction, kind) in [
        ("mixed", "clat_ns"),
        ("trim", "clat_ns"),
        ("read", "lat_ns"),
    ] {
        let text = document("jobs", &[job("t", direction, side(kind))]);
        let results = assert_usual(&text);
        let is_total = results.notes.iter().any(|note| note.contains("own queue"));
        assert_eq!(is_total, kind == "lat_ns", "{:?}", results.notes);
    }
    // Messages around it, and figures that are no numbers.
    for (before, after) in [
        ("fio: terminating on signal 2 {interrupted}\n", ""),
        (
            "t: (g=0): rw=randread\nfio-3.36\n",
            "\nDisk stats (read/write):\n  vda: ios=1/2\n",
        ),
    ] {
        assert_usual(&format!("{before}{}{after}", plain()));
    }
    assert_usual(&plain().replace("\"bw\":20000", "\"bw\": -nan"));
}

#[test]
fn fio_2_has_other_units() {
    let old = json!({ "io_bytes": 200_000, "bw": 20_000, "iops": IOPS, "runtime": 10_000, "total_ios": 50_000,
        "clat": { "mean": 100.0, "percentile": { "50.000000": 90, "99.000000": 400 } }, "lat": { "mean": 110.0 } });
    let text = document("jobs", &[job("t", "read", old)]).replace("3.36", "2.2.10");
    assert_usual(&text);
    let text = "t: (g=0): rw=randread, bs=4K-4K/4K-4K/4K-4K, ioengine=libaio, iodepth=32\nfio-2.2.10\n\n\
        t: (groupid=0, jobs=1): err= 0: pid=1: Sat Jan  1 00:00:00 2026\n  \
        read : io=200000KB, bw=20000KB/s, iops=5000, runtime= 10000msec\n    \
        clat (usec): min=50, max=950, avg=100.00, stdev= 1.00\n     lat (usec): min=50, max=950, avg=110.00, stdev= 1.00\n    \
        clat percentiles (usec):\n     |  1.00th=[   60], 50.00th=[   90], 99.00th=[  400],\n     | 99.99th=[  900]\n     \
        issued    : total=r=50000/w=0/d=0, short=r=0/w=0/d=0\n";
    assert_usual(text);
}

#[test]
fn the_last_interim_result_counts() {
    let text = include_str!("../../../../../fuzz/seeds/lab_import/fio-status-interval.json");
    let results = parse(text.as_bytes()).unwrap();
    let sample = &results.loads[0].sample;
    assert!((sample.iops - (7527.417747 + 7485.211034)).abs() < 1e-6);
    let mean = (22_650.0 * 100_963.069007 + 22_523.0 * 7921.314567) / (22_650.0 + 22_523.0);
    assert!(
        (sample.mean_ns / mean - 1.0).abs() < 1e-9,
        "{}",
        sample.mean_ns
    );
    // Of the text as well.
    let text = include_str!("../../../../../fuzz/seeds/lab_import/fio-status-interval.txt");
    let results = parse(text.as_bytes()).unwrap();
    assert_eq!(names(&results), ["m"]);
    assert!(results.loads[0].sample.window_s > 2.9);
    // Results of two runs are not interim results of one.
    let two = plain() + "\n" + &plain().replace("50000", "40000");
    assert!(error(&two).contains("several results"), "{}", error(&two));
    assert!(error(&(plain() + "\n{\"fio version\":")).contains("cut off"));
}

#[test]
fn jobs_add_up_only_if_they_ran_together() {
    let two = |change: &dyn Fn(&mut Value)| {
        let mut second = job("t", "write", side("clat_ns"));
        change(&mut second);
        document("jobs", &[job("t", "read", side("clat_ns")), second])
    };
    let results = parse(two(&|_| {}).as_bytes()).unwrap();
    assert_eq!(results.loads[0].sample.iops, 2.0 * IOPS);
    assert_eq!(results.loads[0].sample.mean_ns, 100_000.0);
    let results = parse(two(&|job| job["groupid"] = json!(1)).as_bytes()).unwrap();
    assert_eq!(names(&results), ["t, group 0", "t, group 1"]);
    assert_eq!(results.loads[1].sample.iops, IOPS);
    let mut first = job("t", "read", side("clat_ns"));
    let mut second = first.clone();
    (first["job_start"], second["job_start"]) = (json!(1_000), json!(11_500));
    let text = document("jobs", &[first, second]);
    assert!(
        error(&text).contains("one after the other"),
        "{}",
        error(&text)
    );
    // Each client of `fio --client`, without their sum.
    let clients = ["t", "t", "All clients"].map(|name| job(name, "read", side("clat_ns")));
    let results = parse(document("client_stats", &clients).as_bytes()).unwrap();
    assert_eq!(
        (results.loads.len(), results.loads[0].sample.iops),
        (1, 2.0 * IOPS)
    );
    let failed = plain().replace("\"error\":0", "\"error\":5");
    assert!(error(&failed).contains("error 5"));
}

#[test]
fn text_and_terse_lines_are_read() {
    let text = include_str!("../../../../../fuzz/seeds/lab_import/fio-normal.txt");
    let results = parse(text.as_bytes()).unwrap();
    let sample = &results.loads[0].sample;
    assert_eq!(
        (results.version.as_str(), names(&results)),
        ("fio-3.33", vec!["r"])
    );
    // IOPS=54.5k is rounded, and 163,841 requests in 3.006 s are not.
    assert_eq!(sample.iops, 163_841.0 / 3.006);
    assert_eq!(sample.bytes_per_s, 163_841.0 / 3.006 * 4096.0);
    assert!((sample.mean_ns - 14_947.30).abs() < 1e-6);
    assert!((sample.percentile_us(0.99) / 5.6 - 1.0).abs() < 0.03);
    let text = include_str!("../../../../../fuzz/seeds/lab_import/fio-numjobs.txt");
    let results = parse(text.as_bytes()).unwrap();
    assert_eq!(results.loads[0].sample.iops, (26_866.0 + 26_462.0) / 3.001);

    let terse = include_str!("../../../../../fuzz/seeds/lab_import/fio-terse3.csv");
    let results = parse(terse.as_bytes()).unwrap();
    let sample = &results.loads[0].sample;
    assert_eq!(names(&results), ["r"]);
    assert_eq!(
        (sample.iops, sample.bytes_per_s),
        (58_374.0, 233_499.0 * 1024.0)
    );
    assert!((sample.mean_ns - 14_376.389).abs() < 1e-6);
    let terse5 = include_str!("../../../../../fuzz/seeds/lab_import/fio-terse5.csv");
    let results = parse(terse5.as_bytes()).unwrap();
    assert_eq!(results.loads[0].sample.iops, 52_526.0);
    let interim = format!("{terse}{}", terse.replace(";3020;", ";9020;"));
    assert!(
        error(&interim).contains("different runtimes"),
        "{}",
        error(&interim)
    );
}

#[test]
fn a_file_is_one_repeat_and_a_folder_is_its_files() {
    let folder = tempfile::tempdir().unwrap();
    let runs = folder.path().join("runs");
    std::fs::create_dir(&runs).unwrap();
    for repeat in 0..3 {
        let text = plain().replace("5000.0", &format!("50{repeat}0.0"));
        std::fs::write(runs.join(format!("{repeat}.json")), text).unwrap();
    }
    std::fs::write(runs.join("notes.md"), "what was measured\n").unwrap();
    let output = folder.path().join("result");
    let notes = import(&[format!("a={}", runs.display())], &output).unwrap();
    assert!(
        notes.iter().any(|note| note.contains("notes.md: not used")),
        "{notes:?}"
    );
    assert_eq!(Journal::read(&output).unwrap().cells.len(), 3);
    std::fs::copy(runs.join("0.json"), runs.join("3.json")).unwrap();
    let error = import(&[format!("a={}", runs.display())], &output).unwrap_err();
    assert!(format!("{error:#}").contains("0.json"), "{error:#}");
}

/// Imported results are judged once: five percent with 3 % of noise and eight repeats are found.
#[test]
fn a_difference_of_five_percent_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let noise = [-0.9, 1.3, 0.2, -1.4, 0.7, -0.3, 1.1, -0.7];
    let import = |repeats: usize| {
        let mut files = Vec::new();
        for repeat in 0..repeats {
            for (name, factor, shift) in [("before", 1.0, 0), ("after", 1.05, 3)] {
                let iops = IOPS * factor * (1.0 + 0.03 * noise[(repeat + shift) % noise.len()]);
                let path = folder.path().join(format!("{name}{repeat}.json"));
                std::fs::write(&path, plain().replace("5000.0", &format!("{iops:.3}"))).unwrap();
                files.push(format!("{name}={}", path.display()));
            }
        }
        let output = folder.path().join(format!("result{repeats}"));
        super::import(&files, &output).unwrap();
        let journal = Journal::read(&output).unwrap();
        let analysis = Analysis::of(&journal);
        let question = analysis.questions().pop().unwrap();
        (question.verdict, crate::report::text(&analysis))
    };
    let (verdict, text) = import(8);
    assert_eq!(verdict, Verdict::Gain, "{text}");
    // Too few to tell noise of two levels from a difference.
    assert_eq!(import(4).0, Verdict::Undecided);
}
