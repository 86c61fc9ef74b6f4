//! The samples in `fuzz/seeds/lab_import` are made from the programs' sources: DiskSpd's has the elements, their order and the
//! number formats of `XmlResultParser::ParseResults` and `Profile::GetXml` (2.2.0, run with `-L`), including a path with an `&`
//! that DiskSpd does not escape; CrystalDiskMark's has the template and the formats of `SaveText` and `GetResultString`.

mod fio;

use super::*;
use crate::analysis::Analysis;
use crate::journal::Journal;
use crate::stats::Verdict;

#[test]
fn repeats_of_two_configurations_are_compared() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for (name, iops) in [("slow", 1000), ("fast", 1500)] {
        for repeat in 0..6 {
            let path = folder.path().join(format!("{name}{repeat}.json"));
            let side = json!({ "total_ios": 9000, "io_bytes": 36_864_000, "iops": iops + repeat, "runtime": 9000,
                "clat_ns": { "percentile": { "50.0": 1000, "99.0": 2000 } } });
            let json = json!({ "fio version": "fio-3.36", "jobs": [{ "jobname": "a\"b", "error": 0, "read": side }] });
            std::fs::write(&path, json.to_string()).unwrap();
            files.push(format!("{name}={}", path.display()));
        }
    }
    let output = folder.path().join("result");
    import(&files, &output).unwrap();
    let journal = Journal::read(&output).unwrap();
    let analysis = Analysis::of(&journal);
    let question = &analysis.questions()[1];
    assert_eq!((question.verdict, question.pairs), (Verdict::Gain, 6));
    assert!((question.gain.unwrap() - 0.5).abs() < 0.01);
    assert!(import(&["x".into()], &output).is_err());
}

const DISKSPD: &str = include_str!("../../../../fuzz/seeds/lab_import/diskspd.xml");
const CRYSTALDISKMARK: &str = include_str!("../../../../fuzz/seeds/lab_import/crystaldiskmark.txt");

fn names(results: &Results) -> Vec<&str> {
    results
        .loads
        .iter()
        .map(|load| load.name.as_str())
        .collect()
}

fn error(text: &str) -> String {
    format!("{:#}", parse(text.as_bytes()).unwrap_err())
}

#[test]
fn diskspd_results_have_rates_and_latencies() {
    let results = parse(DISKSPD.as_bytes()).unwrap();
    assert_eq!(
        (results.tool, results.version.as_str()),
        ("diskspd", "2.2.0")
    );
    assert_eq!(
        names(&results),
        ["randread 4k depth 32, 4 threads", "write 1m depth 8"]
    );
    let sample = &results.loads[0].sample;
    let requests = 600_000.0 + 590_000.0 + 610_000.0 + 600_300.0;
    assert_eq!(sample.iops, requests / 30.01);
    assert_eq!(sample.bytes_per_s, requests * 4096.0 / 30.01);
    assert_eq!((sample.mean_ns, sample.window_s), (1_680_000.0, 30.01));
    assert_eq!(sample.latencies.requests(), 2_400_300);
    // DiskSpd says 1.627 ms and 2.280 ms; a stored histogram has a resolution of 3 %.
    for (share, us) in [(0.5, 1627.0), (0.99, 2280.0)] {
        let found = sample.percentile_us(share);
        assert!((found / us - 1.0).abs() < 0.03, "{share}: {found}");
    }
}

#[test]
fn diskspd_text_has_the_same_figures() {
    let text = include_str!("../../../../fuzz/seeds/lab_import/diskspd.txt");
    let results = parse(text.as_bytes()).unwrap();
    assert_eq!(
        names(&results),
        ["randrw 30 % writes 4k depth 32, 4 threads"]
    );
    let sample = &results.loads[0].sample;
    assert_eq!((sample.iops, sample.bytes_per_s), (5000.0, 20_480_000.0));
    assert_eq!((sample.mean_ns, sample.window_s), (12_800_000.0, 30.0));
    for (share, us) in [(0.5, 11_500.0), (0.99, 41_000.0)] {
        let found = sample.percentile_us(share);
        assert!((found / us - 1.0).abs() < 0.03, "{share}: {found}");
    }
    let (cut, _) = text.split_once("Results for").unwrap();
    let cut = format!("{cut}Results for timespan 1:\n");
    assert!(error(&cut).contains("took no time"));
}

#[test]
fn text_of_powershell_is_utf_16() {
    for (mark, bytes) in [
        (0xfeff_u16, u16::to_le_bytes as fn(u16) -> [u8; 2]),
        (0xfeff, u16::to_be_bytes),
    ] {
        let units = std::iter::once(mark).chain(DISKSPD.encode_utf16());
        let text: Vec<u8> = units.flat_map(bytes).collect();
        assert_eq!(names(&parse(&text).unwrap()).len(), 2);
    }
    let marked = format!("\u{feff}{CRYSTALDISKMARK}");
    assert_eq!(parse(marked.as_bytes()).unwrap().tool, "crystaldiskmark");
}

#[test]
fn crystaldiskmark_results_have_rates_and_means() {
    let results = parse(CRYSTALDISKMARK.as_bytes()).unwrap();
    assert_eq!(
        (results.tool, results.version.as_str()),
        ("crystaldiskmark", "8.0.6")
    );
    assert_eq!(
        names(&results),
        [
            "read 1m depth 8",
            "read 1m depth 1",
            "randread 4k depth 32",
            "randread 4k depth 1",
            // The third write was not run.
            "write 1m depth 8",
            "write 1m depth 1",
            "randwrite 4k depth 1",
            "rw 30 % writes 1m depth 8",
            "rw 30 % writes 1m depth 1",
            "randrw 30 % writes 4k depth 32",
            "randrw 30 % writes 4k depth 1",
        ]
    );
    let load = &results.loads[3];
    assert_eq!(
        (load.sample.iops, load.sample.bytes_per_s),
        (14_974.1, 61_334_000.0)
    );
    assert_eq!((load.sample.mean_ns, load.sample.window_s), (66_210.0, 5.0));
    let older = CRYSTALDISKMARK
        .replace("SEQ ", "Sequential ")
        .replace("RND ", "Random ");
    assert_eq!(names(&parse(older.as_bytes()).unwrap()), names(&results));
    assert!(load.sample.latencies.is_empty() && load.flag.unwrap().contains("best of its passes"));
}

#[test]
fn what_is_no_result_is_refused_with_the_next_step() {
    for (text, says) in [
        ("", "neither JSON, text or terse output of fio"),
        ("hello", "neither JSON, text or terse output of fio"),
        ("<html></html>", "run diskspd with -Rxml"),
        (&DISKSPD[..DISKSPD.len() - 200], "was the run cut off?"),
        (
            &DISKSPD.replace("AverageTotalMilliseconds", "X"),
            "run diskspd with -L",
        ),
        (
            &DISKSPD.replace(
                "<TestTimeSeconds>30.01</TestTimeSeconds>",
                "<Error>The test was interrupted</Error>",
            ),
            "was interrupted",
        ),
        (&DISKSPD.replace("30.01", "0.00"), "took no time"),
        (&DISKSPD.replace("30.01", "nan"), "'nan' is not a number"),
        (
            &DISKSPD.replace(
                "<Percentile>99</Percentile>",
                "<Percentile>101</Percentile>",
            ),
            "not a percentile",
        ),
        (
            &DISKSPD.replace("<IOCount>60020<", "<IOCount>-1<"),
            "'-1' is not a whole number",
        ),
        (&"<a>".repeat(100_000), "levels deep"),
        (
            &format!("<Results>{}", "<TimeSpan></TimeSpan>".repeat(300)),
            "more than 256 time spans",
        ),
        (
            &CRYSTALDISKMARK.replace("MB/s [", "GB/s ["),
            "is not a result",
        ),
        (
            &CRYSTALDISKMARK.replace(
                "SEQ    1MiB (Q=  8, T= 1):",
                "Sequential Read (Q= 32,T= 1) :",
            ),
            "versions before 7",
        ),
        (&CRYSTALDISKMARK[..330], "no test was run"),
        ("{\"jobs\":[]}", "has no jobs of fio"),
        (
            &DISKSPD.replace("<BytesCount>", "<BytesCount>99999999"),
            "too large to be measured",
        ),
    ] {
        let error = error(text);
        assert!(error.contains(says), "{says}: {error}");
    }
}

/// A boot may write one file for each load, or one for all.
#[test]
fn repeats_are_counted_for_each_load() {
    let folder = tempfile::tempdir().unwrap();
    let mut files = Vec::new();
    for (index, depth) in [1, 32, 1, 32].into_iter().enumerate() {
        let path = folder.path().join(format!("{index}.xml"));
        let text = DISKSPD
            .replace("<RequestCount>32<", &format!("<RequestCount>{depth}<"))
            .replace("30.01", &format!("30.0{}", index + 2));
        std::fs::write(&path, text).unwrap();
        files.push(format!("a={}", path.display()));
    }
    let output = folder.path().join("result");
    import(&files, &output).unwrap();
    let cells = Journal::read(&output).unwrap().cells;
    let blocks = |load: &str| {
        cells
            .iter()
            .filter(|cell| cell.workload == load)
            .map(|cell| cell.block)
            .collect::<Vec<_>>()
    };
    assert_eq!(blocks("randread 4k depth 1, 4 threads"), [0, 1]);
    assert_eq!(blocks("randread 4k depth 32, 4 threads"), [0, 1]);
    assert_eq!(blocks("write 1m depth 8"), [0, 1, 2, 3]);
}

#[test]
fn results_of_different_tools_are_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).unwrap();
        path.display().to_string()
    };
    let (xml, text) = (file("a.xml", DISKSPD), file("b.txt", CRYSTALDISKMARK));
    let newer = file("c.xml", &DISKSPD.replace("2.2.0", "2.3.0"));
    let output = folder.path().join("result");
    for other in [text, newer] {
        let error = import(&[format!("a={xml}"), format!("b={other}")], &output).unwrap_err();
        assert!(error.to_string().contains("not comparable"), "{error}");
    }
    import(&[format!("a={xml}")], &output).unwrap();
    assert_eq!(
        Journal::read(&output).unwrap().header.facts["diskspd"],
        "2.2.0"
    );
}

/// CrystalDiskMark has no percentiles, so reports have none of its results.
#[test]
fn missing_percentiles_are_not_zero() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("a.txt");
    std::fs::write(&path, CRYSTALDISKMARK).unwrap();
    let output = folder.path().join("result");
    import(&[format!("a={}", path.display())], &output).unwrap();
    let journal = Journal::read(&output).unwrap();
    let analysis = Analysis::of(&journal);
    let files = crate::report::files(&analysis).unwrap();
    let (_, cells) = files
        .iter()
        .find(|(name, _)| name.ends_with("cells.csv"))
        .unwrap();
    let row = cells
        .lines()
        .find(|line| line.contains("randread 4k depth 1,"))
        .unwrap();
    assert!(
        row.contains(",14974.100,61334000.000,66.210,,,,5.000,"),
        "{row}"
    );
}
