//! The file of a VM in ringdisk's configuration.

use std::fs;
use std::path::{Path, PathBuf};

use advisor::convert;
use advisor::input::{Input, Kind, Surroundings};
use advisor::model::Disk;
use advisor::text::Source;

use super::Args;
use super::in_place::InPlace;

/// Where ringdisk's configuration of the disks of these VMs is written, with `--in-place`.
pub fn config_path(args: &Args, inputs: &[Input]) -> Result<PathBuf, String> {
    if let Some(path) = &args.config {
        return Ok(path.clone());
    }
    let unnamed = |problem: String| {
        format!(
            "no file was changed: the VM needs ringdisk's configuration to start, and {problem}; name its file with --config FILE"
        )
    };
    let name = convert::file_of_vm(inputs);
    let name = name.ok_or_else(|| unnamed("these are several VMs, or have no name".into()))?;
    let directory = &args.disks_d;
    let has_parent = || directory.parent().is_some_and(Path::is_dir);
    let is_there = directory.is_dir() || has_parent() && fs::create_dir(directory).is_ok();
    if !is_there {
        let directory = directory.display();
        return Err(unnamed(format!("there is no directory {directory}")));
    }
    Ok(directory.join(name))
}

/// Adds ringdisk's file for the VM, if the inputs have none of ringdisk's.
pub fn add_config(args: &Args, inputs: &mut Vec<Input>) -> Result<(), String> {
    if inputs.iter().all(|input| input.kind != Kind::Ringdisk)
        && let Some(name) = convert::file_of_vm(inputs)
    {
        let path = args.disks_d.join(name);
        if path.exists() {
            let source = Source::new(path.display().to_string(), super::text(&path)?);
            inputs.push(super::one(args, &path, source, Surroundings::default())?);
        }
    }
    Ok(())
}

/// Says what is to be done with ringdisk's file for a VM whose disks have all moved to QEMU. With `--in-place`, it is removed.
pub fn let_go(args: &Args, before: &[Input], after: &[Input], in_place: &mut InPlace) {
    let Some(path) = without_disks(before, after) else {
        return;
    };
    let next = if args.in_place && path.starts_with(&args.disks_d) {
        in_place.remove(&path);
        "it is removed; 'ringdisk reload' lets them go, before the VM starts"
    } else {
        "remove them there, and run 'ringdisk reload' before the VM starts"
    };
    eprintln!(
        "ringdisk: {}: all its disks have moved to QEMU: {next}",
        path.display()
    );
}

/// Ringdisk's file for a VM, if all its disks are the VM's and have moved to QEMU: nothing is left in it.
fn without_disks(before: &[Input], after: &[Input]) -> Option<PathBuf> {
    let (config, machines): (Vec<_>, Vec<_>) =
        (before.iter()).partition(|input| input.kind == Kind::Ringdisk);
    let [config] = config[..] else {
        return None;
    };
    let served = config.vms.iter().map(|vm| vm.disks.len()).sum::<usize>();
    let there = vhost_user(machines.into_iter());
    let left = vhost_user(after.iter().filter(|input| input.kind != Kind::Ringdisk));
    (served == there && left == 0).then(|| PathBuf::from(&config.sources[0].name))
}

/// The number of disks that QEMU has over vhost-user.
fn vhost_user<'a>(inputs: impl Iterator<Item = &'a Input>) -> usize {
    let disks = inputs.flat_map(|input| &input.vms).flat_map(|vm| &vm.disks);
    let is_ours = |disk: &&Disk| disk.table.word("disk.bus") == Some("vhost-user-blk");
    disks.filter(is_ours).count()
}
