//! `ringdisk profile` and `ringdisk lab run --profile` name bottlenecks that a test has planted.

mod no_device;

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use harness::qmp::Qmp;
use lab::journal::Journal;
use lab::profile::measurement::Measurement;
use lab::profile::roles::Role;
use lab::profile::verdict::Stage;
use rustix::process::{Pid, setpriority_process};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};
use testkit::driver::{Device, DeviceConfig};
use testkit::load::{BlockContent, Load};
use testkit::random::Random;
use testkit::server::Server;
use testkit::storage::{Mishaps, Storage};
use testkit::vm::{self, Disk, Vm};

use crate::support::serve_all;

/// A guest finishes within 20 s even if it is emulated; the machine may be busy.
const LIMIT: Duration = Duration::from_secs(300);

/// The reply of `ringdisk profile --json` with more arguments.
fn profile(arguments: &[&str]) -> Value {
    let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .args(["profile", "--json"])
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{errors}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn stage(reply: &Value) -> Stage {
    serde_json::from_value(reply["profile"]["verdict"]["stage"].clone()).unwrap()
}

/// Repeats it for a while, until the limit of the disk is named: a guest that lacks CPU time hides the limit.
fn profile_until_limit(qemu: u32, monitor: &Path) -> Value {
    let (pid, monitor) = (qemu.to_string(), monitor.display().to_string());
    let arguments = ["--pid", &pid, "--qmp", &monitor, "--seconds", "4"];
    let mut reply = profile(&arguments);
    for _ in 0..3 {
        if stage(&reply) == Stage::Limit {
            break;
        }
        reply = profile(&arguments);
    }
    reply
}

fn threads_of<'a>(reply: &'a Value, role: &str) -> Vec<&'a Value> {
    let threads = reply["threads"].as_array().unwrap();
    threads.iter().filter(|its| its["role"] == role).collect()
}

/// Keeps a disk busy until it is dropped.
struct Busy {
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Busy {
    fn start(server: &Server, held: BlockContent) -> Self {
        let config = DeviceConfig {
            slots: 8,
            buffer_len: 4096,
            ..DeviceConfig::default()
        };
        let mut device = Device::connect(server.socket(), &config).unwrap();
        let end = Arc::new(AtomicBool::new(false));
        let ended = end.clone();
        let thread = thread::spawn(move || {
            let mut loads = Load::all(&device, 1024, held, false);
            let mut random = Random(7);
            while !ended.load(Ordering::Relaxed) {
                Load::run(
                    &mut loads,
                    &mut device,
                    &mut random,
                    Duration::from_millis(50),
                );
            }
            Load::finish(&mut loads, &mut device);
        });
        Self {
            end,
            thread: Some(thread),
        }
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.end.store(true, Ordering::Relaxed);
        let ended = self.thread.take().map(JoinHandle::join);
        if !thread::panicking() {
            ended.unwrap().unwrap();
        }
    }
}

/// A server of one disk, named `vm1`, with a control socket.
fn serve(folder: &Path, file: &str, options: &str) -> (Server, String) {
    let control = folder.join("control.qmp").display().to_string();
    let socket = folder.join("disk.sock");
    let server = serve_all(&[
        format!("file={file},name=vm1,socket={}{options}", socket.display()),
        format!("--control={control}"),
    ]);
    (server, control)
}

#[test]
fn limit_of_a_served_disk() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("disk.raw");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let (server, control) = serve(folder.path(), &file.display().to_string(), ",iops=50");
    let busy = Busy::start(&server, BlockContent::Zeroes);
    let reply = profile(&["vm1", "--seconds", "3", "--control", &control]);
    drop(busy);
    assert_eq!(stage(&reply), Stage::Limit, "{reply}");
    let sentence = reply["profile"]["verdict"]["sentence"].as_str().unwrap();
    assert!(sentence.contains("iops=50"), "{sentence}");
    // ringdisk's threads, and those of the front-end, which is this process.
    let io_thread = threads_of(&reply, "server")[0];
    assert_eq!(io_thread["pid"], server.pid());
    assert!(
        io_thread["voluntary-per-s"].as_f64().unwrap() > 0.0,
        "{io_thread}"
    );
    assert_eq!(threads_of(&reply, "client")[0]["pid"], std::process::id());
    let stages = &reply["profile"]["requests"]["stages"];
    assert!(
        stages["limit-ns"].as_f64() > stages["engine-ns"].as_f64(),
        "{stages}"
    );
    let names = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .args(["profile", "vm2", "--control", &control])
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&names.stderr).into_owned();
    assert!(
        !names.status.success() && words.contains("no disk 'vm2'; served are: vm1"),
        "{words}"
    );
}

#[test]
fn disk_that_is_detached_meanwhile() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("disk.raw");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let (_server, control) = serve(folder.path(), &file.display().to_string(), "");
    let ringdisk = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_ringdisk"));
        command.args(arguments).args(["--control", &control]);
        command.stdin(Stdio::null());
        command
    };
    let mut profile = ringdisk(&["profile", "vm1", "--json", "--seconds", "60"]);
    let mut profile = profile
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut words = String::new();
    let mut errors = BufReader::new(profile.stderr.take().unwrap());
    errors.read_line(&mut words).unwrap();
    assert!(words.starts_with("measuring vm1"), "{words}");
    thread::sleep(Duration::from_secs(2));
    let detached = ringdisk(&["detach", "vm1", "--force"]).status().unwrap();
    assert!(detached.success());
    let output = profile.wait_with_output().unwrap();
    let reply: Value = serde_json::from_slice(&output.stdout).unwrap();
    let notes = reply["notes"].to_string();
    assert!(notes.contains("vm1 was detached after"), "{notes}");
    let measured = &reply["profile"];
    assert!(measured["requests"].is_object(), "{reply}");
    assert!(measured["seconds"].as_f64().unwrap() < 50.0, "{reply}");
}

#[test]
fn storage_that_is_slow() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let mount = folder.path().join("mnt");
    fs::create_dir(&mount).unwrap();
    let storage = match Storage::mount(&mount, vec![0; 16 << 20], 1) {
        Ok(storage) => storage,
        Err(e) => {
            println!("skipped: storage_that_is_slow: no FUSE: {e}");
            return;
        }
    };
    let file = storage.file().display().to_string();
    let (server, control) = serve(folder.path(), &file, ",format=raw");
    storage.change(|control| {
        control.mishaps = Mishaps {
            late_ms: 200,
            ..Mishaps::default()
        };
    });
    let busy = Busy::start(&server, BlockContent::Zeroes);
    let reply = profile(&["vm1", "--seconds", "3", "--control", &control]);
    storage.change(|control| control.mishaps = Mishaps::default());
    drop(busy);
    assert_eq!(stage(&reply), Stage::Storage, "{reply}");
    let notes = reply["notes"].to_string();
    assert!(notes.contains("does not count requests below"), "{notes}");
}

#[test]
fn messenger_that_is_busy() {
    let end = Arc::new(AtomicBool::new(false));
    let ended = end.clone();
    let (sender, receiver) = std::sync::mpsc::channel();
    let messenger = thread::Builder::new()
        .name("msgr-worker-0".into())
        .spawn(move || {
            // Other programs must not take the CPU away: the thread would rightly be called starved.
            let own = Some(Pid::from_raw(rustix::thread::gettid().as_raw_nonzero().get()).unwrap());
            sender.send(setpriority_process(own, -20)).unwrap();
            while !ended.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        });
    let prioritized = receiver.recv().unwrap();
    let busiest = |reply: &Value| {
        threads_of(reply, "messenger")[0]["on-cpu"]
            .as_f64()
            .unwrap()
    };
    let look = || profile(&["--pid", &std::process::id().to_string(), "--seconds", "2"]);
    let mut reply = look();
    // The priority does not count against other groups of processes, which may be busy for a while.
    for _ in 0..10 {
        if busiest(&reply) > 0.9 {
            break;
        }
        reply = look();
    }
    end.store(true, Ordering::Relaxed);
    messenger.unwrap().join().unwrap();
    if let Err(e) = prioritized {
        println!("skipped: messenger_that_is_busy: its priority cannot be raised: {e}");
        return;
    }
    assert_eq!(stage(&reply), Stage::Messenger, "{reply}");
    let [thread] = &threads_of(&reply, "messenger")[..] else {
        panic!("there is one: {reply}")
    };
    assert!(thread["on-cpu"].as_f64().unwrap() > 0.9, "{thread}");
}

#[test]
fn flame_graph_of_a_disk_in_use() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let file = folder.path().join("disk.raw");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let (server, control) = serve(folder.path(), &file.display().to_string(), "");
    let busy = Busy::start(&server, BlockContent::Zeroes);
    let drawing = folder.path().join("vm1.svg");
    let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .args(["profile", "vm1", "--seconds", "4", "--control", &control])
        .arg("--flame")
        .arg(&drawing)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    drop(busy);
    let errors = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        // Where perf does not work, the message says so.
        assert!(errors.contains("perf"), "{errors}");
        println!("skipped: flame_graph_of_a_disk_in_use: {errors}");
        return;
    }
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        said.contains("flame graph: ") && said.contains("ON CPU"),
        "{said}"
    );
    let drawing = fs::read_to_string(drawing).unwrap();
    assert!(
        drawing.contains("iothread0: ") && drawing.ends_with("</svg>\n"),
        "{drawing}"
    );
}

/// A process that uses as much CPU time as it gets.
fn burner() -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "taskset", "-c", "0"]);
    command.args(["sh", "-c", "while :; do :; done"]);
    command.stdin(Stdio::null()).spawn().unwrap()
}

fn pin(thread: i32) {
    let mut first = CpuSet::new();
    first.set(0);
    sched_setaffinity(Pid::from_raw(thread), &first).unwrap();
}

#[test]
fn vcpu_that_waits_for_a_cpu() {
    let test = "vcpu_that_waits_for_a_cpu";
    if let Some(missing) = vm::missing(false) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let files = tempfile::tempdir().unwrap();
    // Without storage, only the guest can be slow.
    let (server, control) = serve(files.path(), "null:64M", "");
    let arguments = server.ready["disks"][0]["qemu"].as_array().unwrap().iter();
    let arguments = arguments.filter_map(|its| its.as_str().map(String::from));
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let guest = Vm::new(logs).disk(Disk::Printed(arguments.collect()));
    // A computing process keeps the vCPU from sleeping while others have its CPU.
    let script = "echo ready
        while :; do :; done &
        computing=$!
        while :; do dd if=/dev/vda of=/dev/null bs=4k count=500 iflag=direct 2>/dev/null; done &
        reader=$!
        sleep 3
        echo busy
        sleep 20
        kill $reader $computing";
    let mut reply = None;
    let output = guest.run_watched(script, LIMIT, &mut |line, qemu| {
        if line != "busy" {
            return;
        }
        for thread in threads(qemu) {
            pin(thread);
        }
        let mut burners = [burner(), burner()];
        reply = Some(profile(&["vm1", "--seconds", "4", "--control", &control]));
        for burner in &mut burners {
            burner.kill().unwrap();
            burner.wait().unwrap();
        }
    });
    output.unwrap().checked().unwrap();
    let reply = reply.expect("the guest printed 'busy'");
    assert_eq!(stage(&reply), Stage::StarvedVcpu, "{reply}");
    assert!(!threads_of(&reply, "vcpu").is_empty() && !threads_of(&reply, "main-loop").is_empty());
}

fn threads(pid: u32) -> Vec<i32> {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    let ids = tasks.filter_map(|task| task.unwrap().file_name().to_str()?.parse().ok());
    ids.collect()
}

#[test]
fn lab_names_what_limits_each_configuration() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let plan = "guest = 'none'\nblocks = 1\nuntil = 'blocks'\n[storage]\nsize = '16M'\n\
        [config]\ndevice = 'vhost-user-blk'\nclient = 'ring'\niothread = 'on'\nqueues = 1\n\
        [[case]]\nname = 'limited'\niops = 100\n\
        [[case]]\nname = 'null'\nbacking = 'null'\n\
        [fio]\nruntime = '2s'\nramp = '200ms'\n\
        [[workload]]\nname = 'deep'\nrw = 'randread'\niodepth = 8\n\
        [[workload]]\nname = 'slow'\nrw = 'randread'\nthinktime = '100ms'\niodepth = 1\nburst = 1\n";
    fs::write(folder.path().join("plan.toml"), plan).unwrap();
    let result = folder.path().join("result");
    let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .args(["lab", "run", "--profile"])
        .arg(folder.path().join("plan.toml"))
        .arg("--output")
        .arg(&result)
        .env("XDG_STATE_HOME", folder.path())
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let words = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{words}");
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(
        said.contains("Where the time goes") && said.contains("The limit of the disk holds"),
        "{said}"
    );
    let journal = Journal::read(&result).unwrap();
    let mut stages = Vec::new();
    for cell in &journal.cells {
        let profile = cell.sample.as_ref().unwrap().profile.as_ref().unwrap();
        let Measurement {
            requests, guest, ..
        } = &profile.measurement;
        assert!(
            requests.as_ref().unwrap().stages.is_some() && guest.is_some(),
            "{profile:?}"
        );
        for role in [Role::Server, Role::Client] {
            assert!(
                profile.measurement.role(role).is_some(),
                "{role:?}: {profile:?}"
            );
        }
        stages.push((
            (cell.case.as_str(), cell.workload.as_str()),
            profile.verdict.stage,
        ));
    }
    // The first configuration twice, and the other one.
    assert_eq!(stages.len(), 6);
    for (cell, stage) in stages {
        match cell {
            ("limited", "deep") => assert_eq!(stage, Stage::Limit),
            (_, "slow") => assert_eq!(stage, Stage::Guest),
            _ => {}
        }
    }
    let page = fs::read_to_string(result.join("report.html")).unwrap();
    assert!(
        page.contains("Where the time goes") && page.contains("<b>limit</b>"),
        "{page}"
    );
    let json: Value =
        serde_json::from_str(&fs::read_to_string(result.join("result.json")).unwrap()).unwrap();
    assert_eq!(json["cells"][0]["limits"]["stage"], "limit", "{json}");
}

/// A process that uses as much CPU time as it gets, without a name by which its role would be known.
fn computing() -> Child {
    let mut command = Command::new("setpriv");
    command.args(["--pdeathsig", "KILL", "sh", "-c", "while :; do :; done"]);
    command.stdin(Stdio::null()).spawn().unwrap()
}

#[test]
fn busy_thread_of_unknown_role_is_named() {
    let mut process = computing();
    let reply = profile(&["--pid", &process.id().to_string(), "--seconds", "2"]);
    process.kill().unwrap();
    process.wait().unwrap();
    let sentence = reply["profile"]["verdict"]["sentence"].as_str().unwrap();
    assert!(
        sentence.contains("thread 'sh'") && !sentence.contains("no thread"),
        "{reply}"
    );
}

/// The measurement ends with the process, even if nobody has waited for the process yet.
#[test]
fn process_that_ends() {
    let mut process = computing();
    let pid = process.id().to_string();
    let killer = thread::spawn(move || {
        thread::sleep(Duration::from_secs(2));
        process.kill().unwrap();
        process
    });
    let reply = profile(&["--pid", &pid, "--seconds", "60"]);
    killer.join().unwrap().wait().unwrap();
    let notes = reply["notes"].to_string();
    assert!(
        notes.contains(&format!("process {pid} ended after")),
        "{reply}"
    );
    let thread = &reply["threads"][0];
    let used = thread["on-cpu"].as_f64().unwrap() + thread["runnable"].as_f64().unwrap();
    assert!(used > 0.5, "the time after its end does not count: {reply}");
}

#[test]
fn disk_without_a_vm() {
    let folder = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (_server, control) = serve(folder.path(), "null:64M", "");
    let reply = profile(&["vm1", "--seconds", "1", "--control", &control]);
    assert_eq!(stage(&reply), Stage::Undecided, "{reply}");
    let sentence = reply["profile"]["verdict"]["sentence"].as_str().unwrap();
    assert!(sentence.contains("no VM is connected"), "{sentence}");
}

/// QEMU's monitor tells the roles of threads without names, the requests of QEMU's own disks, and their limits.
#[test]
fn limit_of_a_disk_of_qemu() {
    let test = "limit_of_a_disk_of_qemu";
    if let Some(missing) = vm::missing(false) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("disk.raw");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let monitor = files.path().join("monitor.qmp");
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let guest = Vm::new(logs).qmp(&monitor).disk(Disk::Qemu {
        file,
        cache: "writeback",
        aio: "threads",
        queues: 1,
        serial: "limited".into(),
    });
    let script = "echo ready
        while :; do dd if=/dev/vda of=/dev/null bs=4k count=500 iflag=direct 2>/dev/null; done &
        reader=$!
        sleep 3
        echo busy
        sleep 20
        kill $reader";
    let limit = json!({ "device": "disk0", "iops": 50, "iops_rd": 0, "iops_wr": 0, "bps": 0, "bps_rd": 0, "bps_wr": 0 });
    let mut reply = None;
    let output = guest.run_watched(script, LIMIT, &mut |line, qemu| {
        let set_limit = || {
            let mut qmp = Qmp::connect(&monitor).unwrap();
            qmp.execute("block_set_io_throttle", limit.clone()).unwrap();
        };
        match line {
            "ready" => set_limit(),
            "busy" => reply = Some(profile_until_limit(qemu, &monitor)),
            _ => {}
        }
    });
    output.unwrap().checked().unwrap();
    let reply = reply.expect("the guest printed 'busy'");
    assert_eq!(stage(&reply), Stage::Limit, "{reply}");
    let sentence = reply["profile"]["verdict"]["sentence"].as_str().unwrap();
    assert!(sentence.contains("iops=50"), "{sentence}");
    for role in ["vcpu", "io-thread", "main-loop"] {
        assert!(!threads_of(&reply, role).is_empty(), "{role}: {reply}");
    }
}

/// A limit of a throttle node, which `query-block` does not show as one of the disk.
#[test]
fn limit_of_a_throttle_node_of_qemu() {
    let test = "limit_of_a_throttle_node_of_qemu";
    if let Some(missing) = vm::missing(false) {
        println!("skipped: {test}: {missing}");
        return;
    }
    let files = tempfile::tempdir().unwrap();
    let file = files.path().join("disk.raw");
    fs::File::create(&file).unwrap().set_len(64 << 20).unwrap();
    let monitor = files.path().join("monitor.qmp");
    let logs = Path::new(env!("CARGO_TARGET_TMPDIR")).join("vm").join(test);
    let file = format!("driver=file,node-name=file,filename={}", file.display());
    let arguments = [
        "-object",
        "throttle-group,id=slow,x-iops-total=50",
        "-blockdev",
        &file,
        "-blockdev",
        "driver=throttle,node-name=throttle,file=file,throttle-group=slow",
        "-device",
        "virtio-blk-pci,drive=throttle,id=disk",
    ];
    let guest = Vm::new(logs)
        .qmp(&monitor)
        .disk(Disk::Printed(arguments.map(String::from).to_vec()));
    let script =
        "while :; do dd if=/dev/vda of=/dev/null bs=4k count=500 iflag=direct 2>/dev/null; done &
        reader=$!
        sleep 3
        echo busy
        sleep 20
        kill $reader";
    let mut reply = None;
    let output = guest.run_watched(script, LIMIT, &mut |line, qemu| {
        if line == "busy" {
            reply = Some(profile_until_limit(qemu, &monitor));
        }
    });
    output.unwrap().checked().unwrap();
    let reply = reply.expect("the guest printed 'busy'");
    assert_eq!(stage(&reply), Stage::Limit, "{reply}");
    let sentence = reply["profile"]["verdict"]["sentence"].as_str().unwrap();
    assert!(sentence.contains("iops=50,group=slow"), "{sentence}");
}

/// A monitor like QEMU's, with a vCPU that is this thread of this process. It serves one client.
fn monitor_of_this_process(socket: &Path) -> JoinHandle<()> {
    let listener = UnixListener::bind(socket).unwrap();
    let vcpu = rustix::thread::gettid().as_raw_nonzero().get();
    thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        let mut answers = stream.try_clone().unwrap();
        writeln!(answers, "{}", json!({ "QMP": {} })).unwrap();
        for line in BufReader::new(stream).lines() {
            let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
            let answer = match command["execute"].as_str().unwrap() {
                "query-cpus-fast" => json!([{ "thread-id": vcpu }]),
                _ => json!([]),
            };
            writeln!(answers, "{}", json!({ "return": answer })).unwrap();
        }
    })
}

/// QEMU that was started by a loader or a wrapper has an executable of another name.
#[test]
fn process_that_answers_as_qemu_is_qemu() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let monitor = monitor_of_this_process(&socket);
    let (pid, path) = (std::process::id().to_string(), socket.display().to_string());
    let reply = profile(&["--pid", &pid, "--qmp", &path, "--seconds", "1"]);
    monitor.join().unwrap();
    let vcpu = rustix::thread::gettid().as_raw_nonzero().get();
    assert_eq!(threads_of(&reply, "vcpu")[0]["tid"], vcpu, "{reply}");
    assert!(!threads_of(&reply, "main-loop").is_empty(), "{reply}");
    assert!(!reply["notes"].to_string().contains("neither"), "{reply}");
}

#[test]
fn monitor_of_another_process_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("qmp");
    let monitor = monitor_of_this_process(&socket);
    let mut other = computing();
    let (pid, path) = (other.id().to_string(), socket.display().to_string());
    let words = refused(&["--pid", &pid, "--qmp", &path, "--seconds", "1"]);
    other.kill().unwrap();
    other.wait().unwrap();
    monitor.join().unwrap();
    let opener = format!("process {} opened the socket", std::process::id());
    assert!(
        words.contains(&format!("is not the monitor of process {pid}")) && words.contains(&opener),
        "{words}"
    );
}

/// The error of a command that is refused.
fn refused(arguments: &[&str]) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_ringdisk"))
        .arg("profile")
        .args(arguments)
        .output()
        .unwrap();
    assert!(!output.status.success());
    String::from_utf8_lossy(&output.stderr).into_owned()
}

#[test]
fn mistakes_are_explained() {
    let run = refused;
    assert!(run(&["--pid", "4194305"]).contains("pgrep -a qemu"));
    assert!(run(&["vm1", "--control", "/nonexistent/control"]).contains("ringdisk serve"));
    let own = std::process::id().to_string();
    let words = run(&["--pid", &own, "--qmp", "/nonexistent/qmp", "--seconds", "1"]);
    assert!(
        words.contains("/nonexistent/qmp") && words.contains("omit --qmp"),
        "{words}"
    );
}
