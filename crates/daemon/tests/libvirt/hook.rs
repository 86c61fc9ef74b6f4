//! The hook that the package installs, under a libvirtd of its own: nothing of the host's libvirt is touched.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

use super::{BINARY, Host, TIMEOUT, is_root};

/// Empty directories for libvirt and ringdisk, and libvirt's user, in a mount namespace.
const SETUP: &str = "
    set -e
    for directory in /etc/libvirt /run/libvirt /run/ringdisk /var/lib/libvirt /var/log/libvirt /var/cache/libvirt; do
        mkdir -p $directory
        mount -t tmpfs tmpfs $directory
    done
    cd \"$1\"
    for file in passwd group; do cp /etc/$file $file; done
    grep -q ^kvm: group || echo kvm:x:64054: >>group
    grep -q ^libvirt-qemu: group || echo libvirt-qemu:x:64055: >>group
    grep -q ^libvirt-qemu: passwd || echo libvirt-qemu:x:64055:64055::/:/bin/false >>passwd
    for file in passwd group; do mount --bind $file /etc/$file; done
    mkdir -p /etc/libvirt/hooks/qemu.d
    printf '%s\\n' 'user = \"root\"' 'group = \"root\"' 'security_driver = \"none\"' 'namespaces = []' \
        'cgroup_controllers = []' 'remember_owner = 0' 'stdio_handler = \"file\"' >/etc/libvirt/qemu.conf
    cp hook /etc/libvirt/hooks/qemu.d/ringdisk
    echo ready
    exec sleep 3600";

/// libvirtd and ringdisk in a mount namespace.
struct Daemons {
    namespace: Child,
    /// In the order in which they are ended.
    children: Vec<Child>,
}

impl Daemons {
    /// Prints a message and returns `None` where that is impossible.
    fn start(host: &Host, test: &str) -> Option<Self> {
        if !is_root() {
            println!("skipped: {test}: only root may start a libvirtd");
            return None;
        }
        let hook = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../packaging/libvirt-hook");
        let hook = fs::read_to_string(hook).unwrap();
        assert!(hook.contains("/usr/bin/ringdisk"));
        fs::write(host.path("hook"), hook.replace("/usr/bin/ringdisk", BINARY)).unwrap();
        fs::set_permissions(host.path("hook"), PermissionsExt::from_mode(0o755)).unwrap();
        let namespace = Command::new("unshare")
            .args(["--mount", "sh", "-c", SETUP, "setup"])
            .arg(host.dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut daemons = Self {
            namespace,
            children: Vec::new(),
        };
        let ready = || daemons.inside("test", &["-e", "/etc/libvirt/hooks/qemu.d/ringdisk"]);
        wait_until("the namespace is ready", || {
            ready().output().unwrap().status.success()
        });
        let directory = host.dir.path().display();
        daemons.children.push(daemons.serve(host));
        let log = fs::File::create(host.path("libvirtd.log")).unwrap();
        let mut libvirtd = daemons.inside("libvirtd", &["--pid-file", &format!("{directory}/pid")]);
        let libvirtd = libvirtd.stderr(log).spawn().unwrap();
        daemons.children.insert(0, libvirtd);
        wait_until("libvirtd answers", || {
            daemons.virsh(&["list"]).status.success()
        });
        Some(daemons)
    }

    fn serve(&self, host: &Host) -> Child {
        let allowed = format!("--allow-dir={}", host.dir.path().display());
        let log = fs::File::create(host.path("ringdisk.log")).unwrap();
        let state = format!("--state={}", host.path("state").display());
        fs::create_dir_all(host.path("state")).unwrap();
        let mut ringdisk = self.inside(BINARY, &["serve", &allowed, &state, "null:1M,name=null"]);
        let ringdisk = ringdisk.stdout(Stdio::null()).stderr(log).spawn().unwrap();
        wait_until("ringdisk answers", || {
            self.ringdisk(&["list"]).status.success()
        });
        ringdisk
    }

    fn inside(&self, program: &str, arguments: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(format!("--mount=/proc/{}/ns/mnt", self.namespace.id()));
        command.arg(program).args(arguments);
        command
    }

    fn virsh(&self, arguments: &[&str]) -> Output {
        let connect = ["-c", "qemu:///system"];
        let mut command = self.inside("virsh", &[&connect, arguments].concat());
        command.output().unwrap()
    }

    /// Runs virsh, which must succeed.
    fn does(&self, arguments: &[&str]) {
        let output = self.virsh(arguments);
        assert!(output.status.success(), "virsh {arguments:?}: {output:?}");
    }

    fn ringdisk(&self, arguments: &[&str]) -> Output {
        let mut command = self.inside(BINARY, arguments);
        // For the virsh that it runs.
        command.env("LIBVIRT_DEFAULT_URI", "qemu:///system");
        command.output().unwrap()
    }

    /// The served disks of domains, each with its file.
    fn disks(&self) -> Vec<(String, String)> {
        let output = self.ringdisk(&["list", "--json"]);
        let disks: Value = serde_json::from_slice(&output.stdout).unwrap();
        let text = |value: &Value| value.as_str().unwrap().to_owned();
        let disks = disks.as_array().unwrap().iter();
        disks
            .filter(|disk| disk["name"] != "null")
            .map(|disk| (text(&disk["name"]), text(&disk["file"])))
            .collect()
    }
}

impl Drop for Daemons {
    fn drop(&mut self) {
        let _ = self.virsh(&["destroy", "guest"]);
        for child in self.children.iter_mut().chain([&mut self.namespace]) {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

fn wait_until(what: &str, is_so: impl Fn() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < TIMEOUT, "never: {what}");
        thread::sleep(Duration::from_millis(50));
    }
}

#[test]
fn hook_serves_the_disks_of_a_domain_while_it_runs() {
    let test = "hook_serves_the_disks_of_a_domain_while_it_runs";
    let Some(host) = Host::new(test) else {
        return;
    };
    for name in ["first.raw", "second.raw", "third.raw", "moved.raw"] {
        host.disk(name);
    }
    let Some(mut daemons) = Daemons::start(&host, test) else {
        return;
    };
    let dir = host.dir.path().display().to_string();
    let file = |name: &str| format!("{dir}/{name}.raw");
    let first = || vec![("guest-vda".to_owned(), file("first"))];
    let disk = format!(
        "<disk type='file' device='disk'><driver name='qemu' type='raw' cache='none'/><source file='{}'/>\
         <target dev='vda' bus='virtio'/></disk>",
        file("first")
    );
    let script = "
        head -c 1048576 /dev/urandom >/tmp/data
        check() { dd if=/tmp/data of=$1 bs=64k oflag=direct conv=notrunc,fsync 2>/tmp/dd
            dd if=$1 bs=64k count=16 iflag=direct 2>/tmp/dd | cmp - /tmp/data; }
        check /dev/vda
        echo plug
        until [ -b /dev/vdb ]; do sleep 0.1; done
        check /dev/vdb
        echo pull
        while [ -b /dev/vdb ]; do sleep 0.1; done
        check /dev/vda
        echo done";
    // Room for disks that come while it runs.
    let port = |index| format!("<controller type='pci' index='{index}' model='pcie-root-port'/>");
    let ports: String = (1..9).map(port).collect();
    let ports = format!("<controller type='pci' index='0' model='pcie-root'/>{ports}");
    let plain = host.domain(script, "", &format!("{disk}{ports}"));
    fs::write(host.path("guest.xml"), &plain).unwrap();
    let domain = format!("{dir}/guest.xml");
    let to = |server: &str| {
        let convert = [
            "check",
            "--fix",
            "--in-place",
            "--yes",
            "--to",
            server,
            &domain,
        ];
        let converted = daemons.ringdisk(&convert);
        assert_eq!(converted.status.code(), Some(1), "{converted:?}");
        fs::read_to_string(&domain).unwrap()
    };
    let converted = to("ringdisk");
    assert!(
        converted.contains("<ringdisk:disk target='vda'") && converted.contains("vhostuser"),
        "{converted}"
    );
    assert!(to("qemu").contains(&format!("<source file='{}'/>", file("first"))));
    to("ringdisk");
    daemons.does(&["define", &domain]);

    // A disk that cannot be served keeps the domain from starting, and the reason is shown.
    fs::rename(file("first"), file("gone")).unwrap();
    let failed = daemons.virsh(&["start", "guest"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(
        !failed.status.success() && said.contains("first.raw"),
        "{said}"
    );
    assert_eq!(daemons.disks(), []);
    fs::rename(file("gone"), file("first")).unwrap();

    // A start, disks that come and go, and a shutdown from inside.
    daemons.does(&["start", "guest"]);
    assert_eq!(daemons.disks(), first());
    host.wait_for_line("plug");
    comes_and_goes(&daemons, &host, &file("second"));
    host.wait_for_line("done");
    wait_until("the disk is released", || daemons.disks().is_empty());

    refused_saved_and_crashed(&daemons, &dir);
    restarted(&mut daemons, &host, first());
    moved(&daemons, &file("moved"));
    fs::write(&domain, plain.replace(&disk, "")).unwrap();
    without_ringdisk(&mut daemons, &domain);
}

/// A disk that is attached to the running domain, and detached again.
fn comes_and_goes(daemons: &Daemons, host: &Host, second: &str) {
    let on_vdb = ["--libvirt", "guest", "--target", "vdb", "--config"];
    let attached = daemons.ringdisk(&[&["attach", second], &on_vdb[..]].concat());
    assert!(attached.status.success(), "{attached:?}");
    host.wait_for_line("pull");
    let configured = daemons.virsh(&["dumpxml", "guest", "--inactive"]);
    let configured = String::from_utf8_lossy(&configured.stdout).into_owned();
    assert!(
        configured.contains("second.raw") && configured.contains("guest-vdb.sock"),
        "{configured}"
    );
    let detached = daemons.ringdisk(&[&["detach", "guest-vdb"], &on_vdb[..]].concat());
    assert!(detached.status.success(), "{detached:?}");
    // The guest may have ended since.
    assert!(daemons.disks().iter().all(|(name, _)| name != "guest-vdb"));
    let configured = daemons.virsh(&["dumpxml", "guest", "--inactive"]);
    let configured = String::from_utf8_lossy(&configured.stdout).into_owned();
    assert!(
        !configured.contains("vdb") && configured.contains("first.raw"),
        "{configured}"
    );
}

/// A domain that libvirt refuses to change, saves and restores, and whose QEMU dies.
fn refused_saved_and_crashed(daemons: &Daemons, dir: &str) {
    let (first, second) = (format!("{dir}/first.raw"), format!("{dir}/second.raw"));
    let first = || vec![("guest-vda".to_owned(), first.clone())];
    // libvirt refuses a target that there is: the disk is detached again.
    daemons.does(&["start", "guest"]);
    let other = format!("{second},name=other");
    let refused = ["attach", &other, "--libvirt", "guest", "--target", "vda"];
    let refused = daemons.ringdisk(&refused);
    assert!(!refused.status.success(), "{refused:?}");
    assert_eq!(daemons.disks(), first());

    // Saved, restored and crashed.
    let saved = format!("{dir}/saved");
    daemons.does(&["save", "guest", &saved]);
    wait_until("the disk is released", || daemons.disks().is_empty());
    daemons.does(&["restore", &saved]);
    assert_eq!(daemons.disks(), first());
    let qemu = format!("{dir}/kernel");
    let killed = Command::new("pkill").args(["-KILL", "-f", &qemu]).status();
    assert!(killed.unwrap().success());
    wait_until("the disk is released", || daemons.disks().is_empty());
}

/// What was attached for a domain is the domain's after a kill as well. Commands at the same time lose nothing of each
/// other's.
fn restarted(daemons: &mut Daemons, host: &Host, first: Vec<(String, String)>) {
    daemons.does(&["start", "guest"]);
    let mut ringdisk = daemons.children.pop().unwrap();
    ringdisk.kill().unwrap();
    ringdisk.wait().unwrap();
    let ringdisk = daemons.serve(host);
    daemons.children.push(ringdisk);
    assert_eq!(daemons.disks(), first);
    let (second, third) = (host.path("second.raw"), host.path("third.raw"));
    let attach = |file: &Path, target: &str| {
        let file = file.display().to_string();
        let domain = ["--libvirt", "guest", "--target", target, "--config"];
        let attached = daemons.ringdisk(&[&["attach", &file], &domain[..]].concat());
        assert!(attached.status.success(), "{attached:?}");
    };
    thread::scope(|scope| {
        scope.spawn(|| attach(&second, "vdb"));
        scope.spawn(|| attach(&third, "vdc"));
    });
    let configured = daemons.virsh(&["dumpxml", "guest", "--inactive"]);
    let configured = String::from_utf8_lossy(&configured.stdout).into_owned();
    for target in ["vda", "vdb", "vdc"] {
        let named = format!("disk target=\"{target}\"");
        assert!(configured.contains(&named), "{named}: {configured}");
    }
    // Another disk's name.
    let other = [
        "detach",
        "guest-vdb",
        "--libvirt",
        "guest",
        "--target",
        "vdc",
    ];
    let refused = daemons.ringdisk(&other);
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("is not vdc of domain guest"), "{said}");
    daemons.does(&["destroy", "guest"]);
    assert_eq!(daemons.disks(), []);
    for target in ["vdb", "vdc"] {
        daemons.does(&["detach-disk", "guest", target, "--config"]);
    }
    let file = &first[0].1;
    let disks = format!("<disks><disk target='vda' file='{file}' cache='none'/></disks>");
    daemons.does(&[&METADATA[..], &[&disks, "--config"]].concat());
}

/// Sets the disks in the metadata of the guest.
const METADATA: [&str; 6] = [
    "metadata",
    "guest",
    "urn:ringdisk:libvirt:1",
    "--key",
    "ringdisk",
    "--set",
];

/// A disk that has moved to another file stays on it, and the domain starts only when its metadata says so.
fn moved(daemons: &Daemons, moved: &str) {
    daemons.does(&["start", "guest"]);
    let replaced = daemons.ringdisk(&["replace", "guest-vda", moved]);
    assert!(replaced.status.success(), "{replaced:?}");
    let on_moved = vec![("guest-vda".to_owned(), moved.to_owned())];
    daemons.does(&["destroy", "guest"]);
    assert_eq!(daemons.disks(), on_moved);
    let failed = daemons.virsh(&["start", "guest"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(!failed.status.success() && said.contains(moved), "{said}");
    assert_eq!(daemons.disks(), on_moved);
    let disks = format!("<disks><disk target='vda' file='{moved}'/></disks>");
    daemons.does(&[&METADATA[..], &[&disks, "--config"]].concat());
    daemons.does(&["start", "guest"]);
    assert_eq!(daemons.disks(), on_moved);
    daemons.does(&["destroy", "guest"]);
    assert_eq!(daemons.disks(), []);

    // What somebody else serves is used, and stays.
    let own = format!("{moved},name=guest-vda,iops=777");
    let attached = daemons.ringdisk(&["attach", &own]);
    assert!(attached.status.success(), "{attached:?}");
    daemons.does(&["start", "guest"]);
    daemons.does(&["destroy", "guest"]);
    assert_eq!(daemons.disks(), on_moved);
    // Another file has its name, and the VM would run on one that has none.
    fs::copy(moved, format!("{moved}.new")).unwrap();
    fs::rename(format!("{moved}.new"), moved).unwrap();
    let failed = daemons.virsh(&["start", "guest"]);
    let said = String::from_utf8_lossy(&failed.stderr).into_owned();
    assert!(
        !failed.status.success() && said.contains("no longer the disk's file"),
        "{said}"
    );
    let detached = daemons.ringdisk(&["detach", "guest-vda"]);
    assert!(detached.status.success(), "{detached:?}");
}

/// Without ringdisk, the domain does not start, and others do.
fn without_ringdisk(daemons: &mut Daemons, domain: &str) {
    let mut ringdisk = daemons.children.pop().unwrap();
    ringdisk.kill().unwrap();
    ringdisk.wait().unwrap();
    assert!(!daemons.virsh(&["start", "guest"]).status.success());
    daemons.does(&["undefine", "guest"]);
    daemons.does(&["define", domain]);
    daemons.does(&["start", "guest"]);
}
