//! A user's own guest: a separate machine as far as the lab knows, reached over a real sshd.

use std::fs;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::process::{Child, Command, Stdio};

use super::{PlanFolder, are_installed, errors, succeed, wait_for};
use testkit::vm::find_program;

struct Sshd(Child);

impl Sshd {
    /// Starts an sshd with keys `host_key` and `user_key` in the folder; returns its port.
    fn start(bench: &PlanFolder) -> (Self, u16) {
        let key = |name: &str| {
            let path = bench.path(name);
            let mut keygen = Command::new("ssh-keygen");
            keygen.args(["-q", "-t", "ed25519", "-N", "", "-f"]);
            assert!(keygen.arg(&path).status().unwrap().success());
            path
        };
        let host_key = key("host_key");
        key("user_key");
        fs::copy(bench.path("user_key.pub"), bench.path("authorized")).unwrap();
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let config = format!(
            "ListenAddress 127.0.0.1:{port}\nHostKey {}\nAuthorizedKeysFile {}\nStrictModes no\nPidFile none\n\
             PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\nPermitRootLogin yes\n",
            host_key.display(),
            bench.path("authorized").display()
        );
        fs::write(bench.path("sshd_config"), config).unwrap();
        // As root, sshd needs this folder, which its service would create.
        let root = rustix::process::geteuid().is_root();
        if root {
            fs::create_dir_all("/run/sshd").unwrap();
            fs::set_permissions("/run/sshd", fs::Permissions::from_mode(0o755)).unwrap();
        }
        // sshd only starts with its full path.
        let sshd = Command::new(find_program("sshd").unwrap())
            .args(["-D", "-E"])
            .arg(bench.path("sshd.log"))
            .arg("-f")
            .arg(bench.path("sshd_config"))
            .stdin(Stdio::null())
            .spawn()
            .unwrap();
        let sshd = Self(sshd);
        wait_for("sshd", || {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port)).is_ok()
        });
        (sshd, port)
    }
}

impl Drop for Sshd {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn ssh_guest_is_measured_and_its_loss_fails_one_cell() {
    let test = "ssh_guest_is_measured_and_its_loss_fails_one_cell";
    if !are_installed(test, &["sshd", "ssh", "ssh-keygen", "fio"]) {
        return;
    }
    let bench = PlanFolder::new("");
    let (sshd, port) = Sshd::start(&bench);
    let disk = bench.path("the disk's file");
    fs::write(&disk, vec![7; 16 << 20]).unwrap();
    let user = Command::new("id").arg("-un").output().unwrap();
    let user = String::from_utf8_lossy(&user.stdout).trim().to_owned();
    let plan = format!(
        "guest = 'ssh'\nblocks = 1\n[ssh]\nhost = '127.0.0.1'\nport = {port}\nuser = '{user}'\nkey = \"{}\"\ndisks = [\"{}\"]\n\
         [fio]\nrw = 'randread'\niodepth = 4\nruntime = '2s'\nramp = '0s'\n",
        bench.path("user_key").display(),
        disk.display()
    );
    fs::write(bench.path("plan.toml"), &plan).unwrap();
    succeed(&mut bench.run());
    let journal = bench.journal();
    assert_eq!(errors(&journal.cells), Vec::<String>::new());
    assert_eq!(journal.cells.len(), 2);
    for cell in &journal.cells {
        let sample = cell.sample.as_ref().unwrap();
        assert!(sample.iops > 0.0 && sample.window_s > 1.0, "{cell:?}");
    }
    bench.assert_report(2);

    // A load that writes needs confirmation: the lab cannot know whose disk it is.
    fs::write(
        bench.path("plan.toml"),
        plan.replace("randread", "randwrite"),
    )
    .unwrap();
    let asked = bench
        .lab("run")
        .arg(bench.path("plan.toml"))
        .output()
        .unwrap();
    assert_eq!(asked.status.code(), Some(2));
    assert!(
        super::output_text(&asked).contains("OVERWRITES"),
        "{}",
        super::output_text(&asked)
    );

    // The guest no longer answers.
    drop(sshd);
    fs::write(bench.path("plan.toml"), plan).unwrap();
    let mut lost = bench.lab("run");
    lost.arg(bench.path("plan.toml"))
        .arg("--output")
        .arg(bench.path("lost"));
    let output = lost.output().unwrap();
    assert_eq!(
        output.status.code(),
        Some(1),
        "{}",
        super::output_text(&output)
    );
    let lost = lab::journal::Journal::read(&bench.path("lost")).unwrap();
    let errors = errors(&lost.cells);
    assert_eq!(errors.len(), 2);
    assert!(
        errors
            .iter()
            .all(|error| error.contains("ssh to") && error.contains("refused")),
        "{errors:?}"
    );
}
