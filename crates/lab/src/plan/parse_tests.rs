use super::*;

fn read(text: &str) -> Result<Plan, String> {
    Plan::parse(Path::new("my-plan.toml"), text).map_err(|error| error.to_string())
}

fn names(plan: &Plan) -> Vec<&str> {
    plan.cases.iter().map(|case| case.name.as_str()).collect()
}

const SWEEP: &str = r#"
title = "aio and IOThreads"
budget = "30m"
[config]
device = "virtio-blk"
aio = ["native", "io_uring"]
iothread = ["off", "on"]
[fio]
rw = "randread"
bs = ["512", "4k"]
iodepth = [1, 8]
runtime = "5s"
"#;

#[test]
fn lists_are_axes_and_multiply() {
    let plan = read(SWEEP).unwrap();
    assert_eq!(
        names(&plan),
        [
            "aio=native iothread=off",
            "aio=native iothread=on",
            "aio=io_uring iothread=off",
            "aio=io_uring iothread=on"
        ]
    );
    assert_eq!(plan.workloads.len(), 4);
    assert_eq!(plan.workloads[3].name, "randread 4k, depth 8");
    // Pairs that differ in one setting, each with the first value of that axis.
    assert_eq!(plan.contrasts, [(0, 1), (0, 2), (1, 3), (2, 3)]);
    assert_eq!((plan.name.as_str(), plan.runtime.as_secs()), ("my-plan", 5));
}

#[test]
fn each_value_of_an_axis_is_compared_with_its_first() {
    let plan = read("[config]\nqueues=[1,2,4]\n").unwrap();
    assert_eq!(plan.contrasts, [(0, 1), (0, 2)]);
}

/// Each with the first, and a change that starts from another case than the first.
#[test]
fn single_changes_are_compared_in_addition_to_the_first() {
    let text = r#"
compare = "first-and-one-factor"
[[case]]
name = "now"
cache = "writeback"
[[case]]
name = "cache"
[[case]]
name = "iothread"
iothread = "on"
[[case]]
name = "all"
iothread = "on"
queues = 4
machine = "pc"
"#;
    let plan = read(text).unwrap();
    assert_eq!(plan.contrasts, [(0, 1), (0, 2), (0, 3), (1, 2)]);
    let fewer = plan.without(&["cache".into()]);
    assert_eq!(fewer.contrasts, [(0, 1), (0, 2)]);
}

#[test]
fn cases_are_named_and_compared_as_asked() {
    let text = r#"
compare = "previous"
[config]
cache = "none"
[[case]]
name = "ide"
device = "ide"
machine = "pc"
cache = "writeback"
[[case]]
name = "virtio"
[[case]]
name = "ringdisk"
device = "vhost-user-blk"
[[claim]]
source = "somebody"
from = "ide"
to = "device=virtio-blk"
expect = "gain"
"#;
    let plan = read(text).unwrap();
    assert_eq!(names(&plan), ["ide", "virtio", "ringdisk"]);
    assert_eq!(plan.contrasts, [(0, 1), (1, 2)]);
    assert_eq!(plan.cases[0].settings.cache.word(), "writeback");
    assert!(plan.claims[0].is_about(&plan.cases[0], &plan.cases[1], &plan.workloads[0]));
    assert!(!plan.claims[0].is_about(&plan.cases[1], &plan.cases[2], &plan.workloads[0]));
}

#[test]
fn what_cannot_be_configured_is_left_out_of_a_sweep_and_refused_as_a_case() {
    let plan = read("[config]\naio=['native','threads']\ncache=['none','writeback']\n").unwrap();
    assert_eq!(plan.cases.len(), 3);
    assert!(
        plan.left_out[0].contains("aio=native cache=writeback"),
        "{:?}",
        plan.left_out
    );
    let error = read("[[case]]\naio='native'\ncache='writeback'\n").unwrap_err();
    assert!(
        error.contains("line 2") && error.contains("cache=none"),
        "{error}"
    );
    // An axis that means nothing for some device gives the same configuration again.
    let plan = read("[config]\nmachine='pc'\ndevice=['ide','virtio-blk']\niothread=['off','on']\n")
        .unwrap();
    assert_eq!(plan.cases.len(), 3);
    let plan = read("[config]\naio=['native','threads']\n[[exclude]]\naio='native'\n").unwrap();
    assert_eq!(names(&plan), ["aio=threads"]);
}

#[test]
fn profiles_and_named_loads() {
    let plan = read("[fio]\nprofile='crystaldiskmark'\n").unwrap();
    assert_eq!(plan.workloads.len(), 8);
    let plan = read("[fio]\nbs='8k'\n[[workload]]\nname='a'\nrw='read'\n[[workload]]\nname='b'\niodepth=[1,2]\n").unwrap();
    let names: Vec<_> = plan
        .workloads
        .iter()
        .map(|load| load.name.as_str())
        .collect();
    assert_eq!(names, ["a", "b, iodepth 1", "b, iodepth 2"]);
    assert!(plan.workloads.iter().all(|load| load.bs == 8192));
}

#[test]
fn a_job_file_is_read_from_beside_the_plan() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("my.fio"), "[a]\nrw=randwrite\n").unwrap();
    let file = folder.path().join("p.toml");
    let found = Plan::parse(&file, "[fio]\njob='my.fio'\n").unwrap();
    assert!(found.workloads[0].writes() && found.workloads[0].name == "my.fio");
    let none = Default::default();
    let recorded = |jobs| Plan::recorded(&file, "[fio]\njob='my.fio'\n", jobs);
    assert_eq!(recorded(&found.jobs), Ok(found.clone()));
    assert!(
        recorded(&none)
            .unwrap_err()
            .problem
            .contains("not recorded")
    );
    let error = Plan::parse(&file, "\n[fio]\njob='none.fio'\n").unwrap_err();
    assert_eq!(error.line, 3);
}

#[test]
fn a_mistake_is_told_with_its_line_and_the_nearest_word() {
    let cases = [
        ("\n\n[confg]\na=1\n", 3, "did you mean 'config'"),
        (
            "[config]\ndevice='virtio'\n",
            2,
            "did you mean 'virtio-blk'",
        ),
        (
            "[config]\ncache='none'\nio='native'\n",
            3,
            "did you mean 'aio'",
        ),
        (
            "[config]\naio=['native',\n'iouring']\n",
            3,
            "did you mean 'io_uring'",
        ),
        ("[fio]\nrw='randreed'\n", 2, "did you mean 'randread'"),
        ("[fio]\niodepht=3\n", 2, "did you mean 'iodepth'"),
        ("[fio]\nbs='4q'\n", 2, "4k"),
        ("[fio]\nprofile='crystalmark'\n", 2, "crystaldiskmark"),
        ("budget='soon'\n", 1, "30m"),
        ("guest='win'\n", 1, "linux, ssh, none"),
        (
            "guest='none'\n[config]\ndevice='ide'\nmachine='pc'\n",
            3,
            "is for a guest",
        ),
        (
            "[fio]\nrw='read'\n[config]\ndevice='virtio-blk'\nfixed-buffers='on'\n",
            5,
            "setting of ringdisk",
        ),
        (
            "guest='none'\n[config]\ndevice='vhost-user-blk'\nserver='/x.sock'\nclient='ring'\n",
            5,
            "use client=blkio",
        ),
        ("margin='3\n", 1, ""),
        ("[storage]\nsize='1M'\n", 2, "16M"),
        (
            "[[claim]]\nexpect='gain'\nfrom='nobody'\n",
            1,
            "no comparison",
        ),
        ("guest='ssh'\n", 1, "[ssh]"),
        ("[config]\nqueues=[]\n", 2, "empty"),
        (
            "[[case]]\nname='a'\n[[case]]\nname='a'\nqueues=2\n",
            3,
            "two cases",
        ),
    ];
    assert_mistakes(&cases);
}

/// Each text with the line of its mistake, and words of the message.
fn assert_mistakes(cases: &[(&str, usize, &str)]) {
    for (text, line, words) in cases {
        let error = Plan::parse(Path::new("p"), text).expect_err(text);
        assert_eq!(error.line, *line, "{text}: {error}");
        assert!(error.problem.contains(words), "{text}: {error}");
    }
}

#[test]
fn a_mistake_in_a_whole_configuration_is_told_with_the_line_of_its_key() {
    assert_mistakes(&[
        (
            "guest='none'\n[fio]\nbs='4k'\n[config]\ndevice='vhost-user-blk'\nqueues=2\nguests=4\n",
            7,
            "guests needs a guest",
        ),
        (
            "guest='none'\n[config]\ndevice='vhost-user-blk'\n[[case]]\nname='a'\n[[case]]\nmemory='1G'\n",
            7,
            "memory needs a guest",
        ),
        (
            "guest='none'\n[config]\ndevice='vhost-user-blk'\n[fio]\nfsync=1\nengine='psync'\n",
            5,
            "fsync is fio's",
        ),
        (
            "[fio]\nbs='4k'\n[[workload]]\nname='a'\n[[workload]]\nname='b'\nidle='on'\n",
            7,
            "client = \"ring\"",
        ),
        (
            "[config]\naio=[\n'threads',\n'native']\nvcpus=2\nvolumes=201\n",
            6,
            "at most 200 volumes",
        ),
        ("[fio]\nbs='4k'\nrate='auto'\n", 3, "iodepth of 8"),
        (
            "guest='none'\n[config]\ndevice='vhost-user-blk'\nclient='ring'\n[fio]\nonce='8k'\n",
            6,
            "interleave",
        ),
        (
            "[storage]\nsize='16M'\n[fio]\nrw='read'\nbs='32M'\n",
            5,
            "does not fit",
        ),
        (
            "[[case]]\naio='native'\ncache='writeback'\n",
            2,
            "cache=none",
        ),
        ("[storage]\nsize='1G'\n[ssh]\nuser='x'\n", 3, "needs either"),
        (
            "[config]\nqueues=[1,2]\n[[claim]]\nfrom='queues=1'\nsize='5'\n",
            5,
            "is not a size",
        ),
    ]);
}

#[test]
fn images_neighbours_and_cpus_that_make_no_sense_are_mistakes() {
    let head =
        "guest='none'\ninterleave='loads'\n[config]\ndevice='vhost-user-blk'\nclient='ring'\n";
    for (more, words) in [
        ("format='qcow2'\ncluster-size='96k'\n", "power of two"),
        (
            "format='qcow2'\ncluster-size='4k'\nextended-l2='on'\n",
            "16k",
        ),
        (
            "format='qcow2'\nprefill='off'\nbacking-files=1\n",
            "prefill=on",
        ),
        ("active=2\n", "at most"),
        ("neighbour='on'\n", "off"),
        ("server-cpus='1-0'\n", "0-3"),
        ("load-cpus='0-1'\n", "queues"),
        ("[fio]\nonce='6k'\n", "multiple"),
        ("volumes=2\n[fio]\nonce='4k'\n", "one volume"),
        ("[fio]\nidle='on'\nrate=100\n", "idle"),
    ] {
        let error = read(&format!("{head}{more}")).expect_err(more);
        assert!(
            error.contains("line ") && error.contains(words),
            "{more}: {error}"
        );
    }
    let boots = head.replace("interleave='loads'\n", "") + "[fio]\nonce='4k'\n";
    assert!(read(&boots).unwrap_err().contains("interleave"));
    for (text, words) in [
        ("[config]\nactive=1\n", "guest = \"none\""),
        ("[fio]\nidle='on'\n", "client = \"ring\""),
    ] {
        assert!(read(text).unwrap_err().contains(words), "{text}");
    }
    assert_eq!(
        read("[config]\nprefill=['on','off']\n")
            .unwrap()
            .cases
            .len(),
        2
    );
}

#[test]
fn a_configuration_may_have_cpus_of_its_own() {
    let plan = read(
        "guest='none'\n[cpus]\nload='2-3'\n[config]\ndevice='vhost-user-blk'\nclient='ring'\nqueues=2\n\
         [[case]]\nname='a'\n[[case]]\nname='b'\nserver-cpus='0,4'\n[fio]\niodepth=2\nper-queue='on'\n",
    )
    .unwrap();
    let cpus = |case: usize| plan.cpus(&plan.cases[case].settings);
    assert_eq!((cpus(0).server, cpus(0).load), (vec![0], vec![2, 3]));
    assert_eq!((cpus(1).server, cpus(1).load), (vec![0, 4], vec![2, 3]));
    assert_eq!(
        crate::plan::sockets::depth(&plan.cases[0].settings, &plan.workloads[0]),
        4
    );
}

#[test]
fn values_of_an_axis_that_imply_other_settings_are_compared() {
    for axis in [
        "device='vhost-user-blk'\nserver=['ringdisk','qemu-storage-daemon']\n",
        "device=['host','vhost-user-blk']\n",
        "device='vhost-user-blk'\nbacking=['null','file']\n",
    ] {
        let plan = read(&format!("guest='none'\n[config]\n{axis}")).unwrap();
        assert_eq!(plan.contrasts, [(0, 1)], "{axis}");
        assert_eq!(plan.check_compared(), Ok(()), "{axis}");
    }
}

#[test]
fn configurations_without_a_comparison_are_known() {
    let text = "[config]\naio=['native','threads']\niothread=['off','on']\nqueues=[1,2]\n\
        [[exclude]]\naio='native'\niothread='on'\n[[exclude]]\naio='threads'\niothread='off'\n\
        [[exclude]]\naio='threads'\nqueues=2\n";
    let plan = read(text).unwrap();
    assert_eq!((plan.cases.len(), plan.contrasts.len()), (3, 1));
    plan.check_compared().unwrap();
    let [one] = &plan.uncompared()[..] else {
        panic!("{:?}", plan.uncompared());
    };
    let words = "not measured: aio=threads iothread=on queues=1: ";
    assert!(one.starts_with(words), "{one}");
    let first = read(&format!("compare='first'\n{text}")).unwrap();
    assert_eq!(first.uncompared(), [""; 0]);
    // The two that are left differ in two settings.
    let two = plan.without(&["aio=native iothread=off queues=1".into()]);
    assert_eq!((two.cases.len(), two.uncompared().len()), (2, 2));
    let problem = two.check_compared().unwrap_err();
    for words in ["aio, iothread", "compare = \"first\"", "none of the 2"] {
        assert!(problem.contains(words), "{problem}");
    }
    let one = read("[config]\naio='native'\n").unwrap();
    assert_eq!((one.check_compared(), one.uncompared().len()), (Ok(()), 0));
}

#[test]
fn an_axis_without_its_first_value_is_still_compared() {
    let plan = read("[config]\nqueues=[1,2,4,8]\n").unwrap();
    let fewer = plan.without(&["queues=1".into()]);
    assert_eq!(fewer.contrasts, [(0, 1), (0, 2)]);
    assert_eq!(fewer.uncompared(), [""; 0]);
}

#[test]
fn too_many_combinations_are_a_mistake() {
    let list = (1..=300)
        .map(|n| n.to_string())
        .collect::<Vec<_>>()
        .join(",");
    let error = read(&format!("[config]\nqueues=[{list}]\n")).unwrap_err();
    assert!(error.contains("256 combinations"), "{error}");
}

proptest::proptest! {
    #[test]
    fn any_text_is_a_plan_or_a_mistake_at_a_line_of_it(text in "(\\[+(config|fio|case|workload|claim|storage|exclude|ssh)\\]+\n|[a-z]{1,8} ?= ?[\"'\\[]?[a-z0-9,%:=/]{0,9}[\"'\\]]?\n|(device|aio|bs|rw|iodepth|job|profile|from|expect|size) = [\"'\\[][a-z0-9-]{0,12}[\"'\\]]\n|\\PC{0,5}){0,12}") {
        match Plan::parse(Path::new("p"), &text) {
            Ok(plan) => assert!(!plan.cases.is_empty() && !plan.workloads.is_empty()),
            Err(error) => {
                assert!(!error.problem.is_empty());
                assert!(error.line >= 1 && error.line <= 1 + text.matches('\n').count());
            }
        }
    }
}

#[test]
fn disks_that_are_created_under_a_name_are_raw() {
    let text = "guest = 'none'\n[storage]\ncreate = true\n[config]\ndevice = 'vhost-user-blk'\nformat = 'qcow2'\n";
    let named = format!("{text}backing = '/images/a'\n");
    let problem = Plan::parse(Path::new("plan.toml"), &named).unwrap_err();
    assert!(problem.to_string().contains("format=raw"), "{problem}");
    let own = format!("{text}backing = '/images/'\n");
    Plan::parse(Path::new("plan.toml"), &own).unwrap();
}
