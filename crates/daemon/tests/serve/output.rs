//! The output of `ringdisk serve`, for people and for scripts.

use super::*;

#[test]
fn every_socket_accepts_once_ready_is_printed() {
    for _ in 0..10 {
        let disks = [Disk::new(), Disk::new(), Disk::new()];
        let server = TextServer::serve(&disks.each_ref().map(|d| d.argument("queues=1")));
        for disk in &disks {
            UnixStream::connect(&disk.socket).expect("ringdisk reported that it is ready");
        }
        for disk in &disks {
            let name = disk.file.file_stem().unwrap().to_str().unwrap();
            let says = format!(
                "disk {name}: {} (raw, 16M) at {}",
                disk.file.display(),
                disk.socket.display()
            );
            assert!(
                server.text.contains(&says),
                "{says} is not in {}",
                server.text
            );
        }
        assert_eq!(server.end(Signal::TERM), (Some(0), String::new()));
        for disk in &disks {
            assert!(!disk.socket.exists(), "the socket was left behind");
        }
    }
}

/// A directory name with special characters of shells, QEMU and XML.
const AWKWARD: &str = "a b,c'd\"e&f<g>$h";

/// A disk whose socket lies in such a directory.
fn awkward_disk() -> (Disk, PathBuf, String) {
    let disk = Disk::new();
    let directory = disk.file.parent().unwrap().join(AWKWARD);
    let socket = directory.join("disk.sock");
    let argument = format!(
        "file={},name=vm-1.system,queues=3,queue-size=128,socket={}",
        disk.file.display(),
        socket.display().to_string().replace(',', ",,")
    );
    (disk, socket, argument)
}

#[test]
fn json_is_one_complete_line() {
    let (disk, socket, argument) = awkward_disk();
    let other = Disk::new();
    let server = serve_all(&[argument, other.argument("readonly=on")]);
    let ready = &server.ready;
    assert_eq!(ready["ready"], true);
    let disks = ready["disks"].as_array().unwrap();
    assert_eq!(disks.len(), 2);
    for (key, value) in [
        ("name", "vm-1.system"),
        ("file", disk.file.to_str().unwrap()),
        ("format", "raw"),
        ("socket", socket.to_str().unwrap()),
    ] {
        assert_eq!(disks[0][key], value, "{key}");
    }
    assert_eq!(disks[0]["size"], DISK_BYTES);
    assert_eq!(
        (&disks[0]["queues"], &disks[0]["queue_size"]),
        (&3.into(), &128.into())
    );
    assert_eq!(
        (&disks[0]["readonly"], &disks[1]["readonly"]),
        (&false.into(), &true.into())
    );
    let qemu: Vec<&str> = strings(&disks[0]["qemu"]);
    assert!(qemu.contains(&"vhost-user-blk-pci,chardev=vm-1.system,num-queues=3,queue-size=128"));
    assert_serves(&socket);
}

fn strings(list: &serde_json::Value) -> Vec<&str> {
    let list = list.as_array().unwrap();
    list.iter().map(|a| a.as_str().unwrap()).collect()
}

/// The text output matches the JSON: the shell reads the same arguments, and the XML is well-formed.
#[test]
fn text_matches_json_and_is_valid_shell_and_xml() {
    let (_disk, socket, argument) = awkward_disk();
    let mut server = serve_all(std::slice::from_ref(&argument));
    let ready = server.ready["disks"][0].clone();
    assert!(server.terminate().unwrap().success());
    let server = TextServer::serve(&[argument]);

    let (qemu, libvirt) = server.text.split_once("  libvirt").unwrap();
    let (libvirt, proxmox) = libvirt.split_once("  Proxmox VE").unwrap();
    let lines = qemu.lines().filter(|l| l.starts_with("    "));
    let pasted: String = lines.map(|l| format!("{l}\n")).collect();
    let (others, last) = pasted.trim_end().rsplit_once('\n').unwrap();
    assert!(others.lines().all(|l| l.ends_with(" \\")), "{pasted}");
    assert!(!last.ends_with('\\'), "{pasted}");
    let script = format!("printf '%s\\n' \\\n{pasted}\n");
    let (_, read) = run(Command::new("sh").args(["-c", &script]));
    assert_eq!(read.lines().collect::<Vec<_>>(), strings(&ready["qemu"]));

    let arguments = proxmox.lines().find_map(|l| l.strip_prefix("    "));
    assert_eq!(arguments, ready["proxmox"].as_str());
    let script = format!("printf '%s\\n' {}", arguments.unwrap());
    let (_, read) = run(Command::new("sh").args(["-c", &script]));
    let chardev = strings(&ready["qemu"])[7].to_owned();
    let device = format!("{},bus=pci.2,addr=0x19", strings(&ready["qemu"])[9]);
    let read: Vec<_> = read.lines().skip(4).collect();
    assert_eq!(read, ["-chardev", &chardev, "-device", &device]);

    let lines = libvirt.lines().filter_map(|l| l.strip_prefix("    "));
    let xml: String = lines.map(|l| format!("{l}\n")).collect();
    let elements = elements(&xml);
    let json = [
        &ready["libvirt"]["memoryBacking"],
        &ready["libvirt"]["disk"],
    ];
    let json = json.map(|e| e.as_str().unwrap().to_owned() + "\n").concat();
    assert_eq!(xml, json);
    let attribute = |element: &str, name: &str| {
        let found = elements.iter().find(|(e, _)| e == element);
        let (_, attributes) = found.unwrap_or_else(|| panic!("no {element} in {xml}"));
        let value = attributes.iter().find(|(n, _)| n == name);
        value.map(|(_, v)| v.clone()).unwrap_or_default()
    };
    for (element, name, value) in [
        ("memoryBacking/source", "type", "memfd"),
        ("memoryBacking/access", "mode", "shared"),
        ("disk", "type", "vhostuser"),
        ("disk/driver", "queues", "3"),
        ("disk/driver", "queue_size", "128"),
        ("disk/source", "type", "unix"),
        ("disk/source", "path", socket.to_str().unwrap()),
        ("disk/target", "bus", "virtio"),
    ] {
        assert_eq!(attribute(element, name), value, "{element} {name}");
    }
}

type Element = (String, Vec<(String, String)>);

/// The elements of XML without text content, with their paths and attributes. Panics if it is not well-formed.
fn elements(xml: &str) -> Vec<Element> {
    let (mut elements, mut open) = (Vec::new(), Vec::<&str>::new());
    let mut rest = xml.trim_start();
    while !rest.is_empty() {
        let inside = rest.strip_prefix('<').expect("nothing but elements");
        // No value here has an unescaped '>'; escaped characters are checked below.
        let end = tag_end(inside);
        let tag = &inside[..end];
        rest = inside[end + 1..].trim_start();
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name), "in {xml}");
            continue;
        }
        let (tag, closed) = match tag.strip_suffix('/') {
            Some(tag) => (tag, true),
            None => (tag, false),
        };
        let (name, mut text) = tag.split_once(' ').unwrap_or((tag, ""));
        open.push(name);
        let mut attributes = Vec::new();
        while !text.trim().is_empty() {
            let (name, after) = text.trim_start().split_once("='").expect("name='value'");
            let (value, after) = after.split_once('\'').expect("a closing quote");
            assert!(!value.contains('<'), "in {xml}");
            for part in value.split('&').skip(1) {
                let entity = part.split_once(';').expect("a whole entity").0;
                assert!(["amp", "lt", "gt", "apos", "quot"].contains(&entity));
            }
            let value = value
                .replace("&lt;", "<")
                .replace("&gt;", ">")
                .replace("&apos;", "'")
                .replace("&quot;", "\"")
                .replace("&amp;", "&");
            attributes.push((name.to_owned(), value));
            text = after;
        }
        elements.push((open.join("/"), attributes));
        if closed {
            open.pop();
        }
    }
    assert!(open.is_empty(), "{open:?} stay open in {xml}");
    elements
}

/// The end of a tag: the first '>' outside quotes.
fn tag_end(text: &str) -> usize {
    let mut quoted = false;
    let end = text.char_indices().find(|&(_, c)| {
        quoted ^= c == '\'';
        c == '>' && !quoted
    });
    end.expect("a tag ends").0
}

#[test]
fn qemu_accepts_the_printed_arguments() {
    const QEMU: &str = "qemu-system-x86_64";
    if !is_installed("qemu_accepts_the_printed_arguments", QEMU) {
        return;
    }
    let (_disk, _, argument) = awkward_disk();
    let server = serve_all(&[argument]);
    let mut qemu = Command::new(QEMU)
        .args(strings(&server.ready["disks"][0]["qemu"]))
        .args(["-S", "-display", "none", "-nodefaults", "-qmp", "stdio"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut out = BufReader::new(qemu.stdout.take().unwrap());
    let mut input = qemu.stdin.take().unwrap();
    let mut greeting = String::new();
    out.read_line(&mut greeting).unwrap();
    assert!(greeting.contains("\"QMP\""), "QEMU ended: {greeting}");
    for command in ["qmp_capabilities", "x-query-virtio", "quit"] {
        writeln!(input, "{{\"execute\": \"{command}\"}}").unwrap();
    }
    let mut answers = String::new();
    out.read_to_string(&mut answers).unwrap();
    assert!(answers.contains("virtio-blk"), "{answers}");
    assert_eq!(wait(&mut qemu), Some(0));
    server.wait_for_log(&["front-end connected"]);
}

#[test]
fn help_has_examples() {
    for (args, says) in [
        (&["--help"][..], &["serve", "Exit codes"][..]),
        (
            &["serve", "--help"],
            &[
                "ringdisk serve vm1.raw",
                "queues=4,socket=/run/ringdisk/vm1.sock",
                "--json",
                "SIGTERM",
            ],
        ),
        (&["--version"], &["ringdisk 0."]),
    ] {
        let (code, text) = run(ringdisk().args(args));
        assert_eq!(code, Some(0), "{text}");
        for word in says {
            assert!(text.contains(word), "no '{word}' in {text}");
        }
    }
}

#[test]
fn null_disk_prints_a_warning() {
    let dir = directory();
    let socket = dir.path().join("null.sock");
    let server = serve_all(&[format!("file=null:1G,socket={}", socket.display())]);
    let warning = server.wait_for_log(&["STORES NOTHING"]);
    assert!(warning.contains("WARN"), "{warning}");
    assert_eq!(server.ready["disks"][0]["file"], "null:1G");
    let mut device = Device::connect(&socket, &DeviceConfig::default()).unwrap();
    assert_eq!(device.config().unwrap().capacity, (1 << 30) / 512);
    assert_eq!(device.queues[0].write(0, &content(0, 4096)), OK);
}
