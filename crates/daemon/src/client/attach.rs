//! `ringdisk attach` and `ringdisk detach`.

use serde_json::json;

use super::domain::{self, DomainArgs};
use super::{CommandLineError, CommandResult, Connection};
use crate::config::disk_text;
use crate::config::spec::DiskSpec;

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk attach file=/dev/vg0/vm2,queues=4,iops=20000
  ringdisk attach /dev/vg0/data --libvirt vm2 --target vdb     also attaches it to the running domain
  ringdisk attach /dev/vg0/data --libvirt vm2 --target vdb --config     and to its next start

'ringdisk serve --help' lists the options of a disk. Relative paths are relative to the working directory.")]
pub struct AttachArgs {
    /// A path, or key=value pairs separated by commas
    disk: String,
    #[command(flatten)]
    domain: DomainArgs,
    #[command(flatten)]
    connection: Connection,
}

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk detach vm2
  ringdisk detach vm2-vdb --libvirt vm2 --target vdb     first from the running domain

ringdisk finishes the requests in flight and makes the VM's data durable.")]
pub struct DetachArgs {
    /// Name of the disk
    name: String,
    /// Detach the disk even if a VM is connected to it
    #[arg(long)]
    force: bool,
    #[command(flatten)]
    domain: DomainArgs,
    #[command(flatten)]
    connection: Connection,
}

pub fn attach(args: &AttachArgs) -> CommandResult {
    let here = std::env::current_dir()
        .map_err(|e| CommandLineError::Here("cannot find the current directory", e))?;
    // Parsed here too, so that a mistake is found before anything else.
    let mut disk: DiskSpec = args.disk.parse()?;
    let mut text = args.disk.clone();
    let domain = args.domain.domain()?;
    let has_name =
        disk_text::pairs(&args.disk).is_ok_and(|pairs| pairs.iter().any(|(key, _)| key == "name"));
    if let Some(domain) = &domain {
        if !has_name {
            disk.name = domain.disk_name();
        }
        domain.set_labels(&mut disk);
        text = disk.to_string();
    }
    let arguments = json!({ "disk": text, "directory": here.to_string_lossy() });
    let mut client = args.connection.open()?;
    let reply = client.call_for("x-ringdisk-attach", arguments, |reply| {
        reply["paste"].is_string()
    })?;
    if let Some(domain) = domain {
        let disk = disk.in_directory(&here);
        domain
            .attach(&args.connection, &disk, &reply)
            .inspect_err(|_| domain::undo(&mut client, &disk.name))?;
        let done = format!("disk {} is attached to the domain", disk.name);
        args.connection.say(&reply, &done);
        return Ok(());
    }
    let text = reply["paste"].as_str().unwrap_or_default();
    args.connection.say(&reply, text);
    Ok(())
}

pub fn detach(args: &DetachArgs) -> CommandResult {
    let connection = &args.connection;
    let arguments = json!({ "id": args.name, "force": args.force });
    let done = format!("disk {} is no longer served", args.name);
    let Some(domain) = args.domain.domain()? else {
        return connection.order("x-ringdisk-detach", arguments, &done);
    };
    let mut client = connection.open()?;
    domain.detach(connection, &mut client, &args.name)?;
    let detached = client.call("x-ringdisk-detach", arguments);
    // If the domain has ended, the hook may have detached the disk already.
    if detached.is_ok() || super::disk_now(&mut client, &args.name)?.is_none() {
        connection.say(&json!({}), &done);
        return Ok(());
    }
    Ok(detached.map(drop)?)
}
