//! `ringdisk export`: what NBD clients find.

use block::{format_size, parse_size};
use control::Client;
use serde_json::{Value, json};

use super::{CommandLineError, CommandResult, Connection, row, table};
use crate::config::nbd::{NbdAddress, id_of};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk export                       list the exports
  ringdisk export vm2                   let NBD clients read disk vm2
  ringdisk export vm2 --bps 100M        at most 100 MiB a second, whatever the VM may have
  ringdisk export vm2 --bitmap nightly  let them query this dirty bitmap as well
  ringdisk export vm2 --listen /run/ringdisk/nbd.sock
  ringdisk export vm2 --remove

  nbdcopy --connections=4 'nbd+unix:///vm2?socket=/run/ringdisk/nbd.sock' vm2.raw

Clients see what the VM writes while they read. For a copy of one moment, use 'ringdisk backup'.")]
pub struct ExportArgs {
    /// Name of the disk
    disk: Option<String>,
    /// Name that clients use; default: that of the disk
    #[arg(long, value_name = "NAME", requires = "disk")]
    name: Option<String>,
    /// Let clients write to the disk; its VM must not use it meanwhile
    #[arg(long, requires = "disk")]
    writable: bool,
    /// Dirty bitmap of the disk that clients may query, as qemu:dirty-bitmap:NAME; may be repeated
    #[arg(long = "bitmap", value_name = "NAME", requires = "disk")]
    bitmaps: Vec<String>,
    /// Limit of bytes per second, of all clients together, as in 100M
    #[arg(long, value_name = "BYTES", requires = "disk")]
    bps: Option<String>,
    /// Limit of operations per second, of all clients together
    #[arg(long, value_name = "N", requires = "disk")]
    iops: Option<u64>,
    /// Socket, or address and port, for clients, if ringdisk does not listen yet (ringdisk serve --nbd)
    #[arg(long, value_name = "ADDRESS", requires = "disk")]
    listen: Option<NbdAddress>,
    /// Remove the export
    #[arg(long, requires = "disk", conflicts_with_all = ["writable", "bitmaps", "bps", "iops", "listen"])]
    remove: bool,
    /// Disconnect the clients of an export that is removed
    #[arg(long, requires = "remove")]
    force: bool,
    #[command(flatten)]
    connection: Connection,
}

pub fn export(args: &ExportArgs) -> CommandResult {
    let mut client = args.connection.open()?;
    let Some(disk) = &args.disk else {
        return list(&mut client, &args.connection);
    };
    let name = args.name.as_ref().unwrap_or(disk);
    if args.remove {
        let mode = if args.force { "hard" } else { "safe" };
        let arguments = json!({ "id": id_of(name), "mode": mode });
        let reply = client.call("block-export-del", arguments)?;
        args.connection
            .say(&reply, &format!("'{name}' is no longer exported"));
        return Ok(());
    }
    let mut arguments = json!({
        "type": "nbd",
        "id": id_of(name),
        "node-name": disk,
        "name": name,
        "writable": args.writable,
    });
    if !args.bitmaps.is_empty() {
        arguments["bitmaps"] = args.bitmaps.clone().into();
    }
    if let Some(bps) = &args.bps {
        let bytes = parse_size(bps).map_err(|e| CommandLineError::Value("bps".into(), e))?;
        arguments["x-ringdisk-bps"] = bytes.into();
    }
    if let Some(iops) = args.iops {
        arguments["x-ringdisk-iops"] = iops.into();
    }
    if let Some(address) = &args.listen
        && client.call("x-ringdisk-nbd", json!({}))?["address"] != address.to_string()
    {
        client.call("nbd-server-start", json!({ "addr": legacy(address)? }))?;
    }
    client.call("block-export-add", arguments)?;
    let server = client.call("x-ringdisk-nbd", json!({}))?;
    let uri = uri(&server, name);
    let reply = json!({ "id": id_of(name), "name": name, "uri": uri });
    args.connection.say(&reply, &uri);
    Ok(())
}

fn legacy(address: &NbdAddress) -> Result<Value, CommandLineError> {
    Ok(match address {
        NbdAddress::Unix(path) => {
            let path = std::path::absolute(path);
            let path = path.map_err(|e| CommandLineError::Here("--listen", e))?;
            json!({ "type": "unix", "data": { "path": path } })
        }
        NbdAddress::Tcp(address) => json!({
            "type": "inet",
            "data": { "host": address.ip().to_string(), "port": address.port().to_string() },
        }),
    })
}

fn list(client: &mut Client, connection: &Connection) -> CommandResult {
    let mut server = client.call("x-ringdisk-nbd", json!({}))?;
    let mut exports = match server["exports"].take() {
        Value::Array(exports) => exports,
        _ => Vec::new(),
    };
    let mut rows = vec![row(["NAME", "DISK", "SIZE", "ACCESS", "CLIENTS", "URI"])];
    for export in &mut exports {
        let name = export["name"].as_str().unwrap_or_default().to_owned();
        let uri = uri(&server, &name);
        let access = match export["writable"].as_bool() {
            Some(true) => "read and write",
            _ => "read",
        };
        rows.push(vec![
            name,
            export["disk"].as_str().unwrap_or_default().to_owned(),
            format_size(export["size"].as_u64().unwrap_or(0)),
            access.to_owned(),
            export["clients"].to_string(),
            uri.clone(),
        ]);
        export["uri"] = uri.into();
    }
    let text = if exports.is_empty() {
        "nothing is exported; 'ringdisk export DISK' exports a disk".to_owned()
    } else {
        table(&rows)
    };
    connection.say(&exports.into(), &text);
    Ok(())
}

/// What clients are given.
pub(super) fn uri(server: &Value, name: &str) -> String {
    let address = server["address"].as_str().unwrap_or_default();
    let scheme = if server["tls"] == true { "nbds" } else { "nbd" };
    match address.parse() {
        Ok(NbdAddress::Tcp(address)) => format!("{scheme}://{address}/{name}"),
        _ => format!("{scheme}+unix:///{name}?socket={address}"),
    }
}
