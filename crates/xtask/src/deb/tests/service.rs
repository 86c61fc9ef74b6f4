//! Installs the package in a guest with Debian and systemd, and there reloads, upgrades, kills, stops and removes it.

use super::checked;
use crate::packages;
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use testkit::qemu_img as qemu;
use testkit::server::Server;
use testkit::vm::{self, Disk, Vm};

/// It takes some minutes on two busy CPUs without KVM.
const LIMIT: Duration = Duration::from_secs(1200);

/// Boots the guest from a disk that the same program serves, and runs service.sh in it. `old` and `new` are packages of
/// two versions of the program; `built` is the target directory with that program.
pub fn install_and_use(built: &Path, old: &Path, new: &Path, folder: &Path) {
    const TEST: &str = "service::install_and_use";
    let system = match system() {
        Ok(system) => system,
        Err(why) => return println!("skipped: {TEST}: {why:#}"),
    };
    let client = built.join("examples/disk_io");
    if !client.is_file() {
        let client = client.display();
        return println!("skipped: {TEST}: {client} is not built; --workspace builds it");
    }

    let contents = folder.join("contents");
    fs::create_dir(&contents).unwrap();
    fs::write(contents.join("script.sh"), include_str!("service.sh")).unwrap();
    fs::write(contents.join("probe.pl"), include_str!("probe.pl")).unwrap();
    fs::copy(old, contents.join("old.deb")).unwrap();
    fs::copy(new, contents.join("new.deb")).unwrap();
    checked(
        Command::new("strip")
            .arg("-o")
            .args([&contents.join("disk_io"), &client]),
    );
    qemu::img(&contents, "create -q -f qcow2 image.qcow2 64M");
    let archive = folder.join("script.raw");
    checked(
        Command::new("tar")
            .arg("--create")
            .arg("--file")
            .arg(&archive)
            .arg("--directory")
            .args([&contents, Path::new(".")]),
    );
    fs::File::create(folder.join("device.raw"))
        .and_then(|file| file.set_len(64 << 20))
        .unwrap();
    let system = system.display();
    qemu::img(
        folder,
        &format!("create -q -f qcow2 -b {system} -F raw root.qcow2"),
    );

    let disk = |file: &str, serial: &str| {
        let (file, socket) = (
            folder.join(file),
            folder.join(serial).with_extension("sock"),
        );
        let (file, socket) = (file.display(), socket.display());
        format!("file={file},serial={serial},socket={socket},cache=unsafe")
    };
    let mut server = Server::ringdisk(
        built.join("ringdisk"),
        &[
            disk("root.qcow2", "root"),
            disk("script.raw", "script"),
            disk("device.raw", "device"),
            format!("--control={}", folder.join("control.qmp").display()),
            format!("--allow-backing={}", vm::cache_dir().display()),
            format!("--allow-backing={}", folder.display()),
        ],
    )
    .unwrap();
    let mut guest = Vm::new(built.with_file_name("tmp").join("vm/service"))
        .memory_mib(1024)
        .cpus(2)
        .root("root");
    for disk in server.ready["disks"].as_array().unwrap() {
        let arguments = disk["qemu"].as_array().unwrap().iter();
        let arguments = arguments.map(|argument| argument.as_str().unwrap().to_owned());
        guest = guest.disk(Disk::Printed(arguments.collect()));
    }
    let output = guest.run("", LIMIT).unwrap().checked().unwrap();
    println!("the guest ran for {:.0} s", output.elapsed.as_secs_f64());
    let steps: Vec<_> = include_str!("service.sh")
        .lines()
        .filter_map(|line| Some(line.strip_prefix("ok '")?.trim_end_matches('\'')))
        .collect();
    let lines = output.lines.iter();
    let done: Vec<_> = lines.filter_map(|line| line.strip_prefix("ok: ")).collect();
    assert_eq!(done, steps);
    assert!(server.terminate().unwrap().success(), "{}", server.log());
}

fn system() -> Result<std::path::PathBuf> {
    if let Some(missing) = vm::missing(false) {
        anyhow::bail!(missing);
    }
    for program in ["qemu-img", "strip", "tar"] {
        ensure!(vm::find_program(program).is_some(), "{program} is missing");
    }
    packages::debian::disk().context("there is no disk with a Debian to install the package in")
}
