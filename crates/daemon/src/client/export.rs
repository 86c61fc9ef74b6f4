//! `ringdisk export`: what NBD clients find.

use std::fmt::Write as _;

use block::{format_size, parse_size};
use control::Client;
use serde_json::{Value, json};

use super::{CommandLineError, CommandResult, Connection, nbd_server, row, table};
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
    /// Name of the disk; with --remove, of the export
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
        let server = nbd_server(&mut client)?;
        let exports = server["exports"].as_array();
        let mut named = exports
            .into_iter()
            .flatten()
            .filter(|e| e["name"] == **name);
        // Other programs give exports other ids.
        let Some(export) = named.next() else {
            return Err(CommandLineError::NoExport(name.clone()));
        };
        let arguments = json!({ "id": export["id"], "mode": mode });
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
        && nbd_server(&mut client)?["address"] != address.to_string()
    {
        client.call("nbd-server-start", json!({ "addr": legacy(address)? }))?;
    }
    client.call("block-export-add", arguments)?;
    let server = nbd_server(&mut client)?;
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
    let mut server = nbd_server(client)?;
    let mut exports = match server["exports"].take() {
        Value::Array(exports) => exports,
        _ => Vec::new(),
    };
    let mut rows = vec![row(["NAME", "DISK", "SIZE", "ACCESS", "CLIENTS", "URI"])];
    for export in &mut exports {
        let name = export["name"].as_str().unwrap_or_default().to_owned();
        let uri = uri(&server, &name);
        // Its disk is absent.
        let waits = export["waiting"] == true;
        let access = match export["writable"].as_bool() {
            Some(true) => "read and write",
            _ => "read",
        };
        rows.push(vec![
            name,
            export["disk"].as_str().unwrap_or_default().to_owned(),
            (export["size"].as_u64()).map_or_else(|| "-".into(), format_size),
            access.to_owned(),
            if waits {
                "waits for its disk".into()
            } else {
                export["clients"].to_string()
            },
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

/// The URI of an export, for clients ("The NBD Uniform Resource Indicator (URI) specification").
pub(super) fn uri(server: &Value, name: &str) -> String {
    let address = server["address"].as_str().unwrap_or_default();
    let scheme = if server["tls"] == true { "nbds" } else { "nbd" };
    let name = percent_encoded(name);
    match address.parse() {
        Ok(NbdAddress::Tcp(address)) => format!("{scheme}://{address}/{name}"),
        _ => {
            let socket = percent_encoded(address);
            format!("{scheme}+unix:///{name}?socket={socket}")
        }
    }
}

/// All but unreserved characters and slashes are percent-encoded (RFC 3986, sections 2.1 and 2.3). Slashes may stand in paths
/// and queries.
fn percent_encoded(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~/".contains(&byte) {
            encoded.push(byte.into());
        } else {
            let _ = write!(encoded, "%{byte:02X}");
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_percent_encoded() {
        let uri_at = |address: &str, tls: bool, name: &str| {
            uri(&json!({ "address": address, "tls": tls }), name)
        };
        assert_eq!(
            uri_at("/run/ringdisk/nbd.sock", false, "vm1-backup"),
            "nbd+unix:///vm1-backup?socket=/run/ringdisk/nbd.sock"
        );
        assert_eq!(
            uri_at("/run/a b&c/n.sock", true, "50% ?#\u{e4}\n"),
            "nbds+unix:///50%25%20%3F%23%C3%A4%0A?socket=/run/a%20b%26c/n.sock"
        );
        assert_eq!(
            uri_at("[::1]:10809", false, "a b"),
            "nbd://[::1]:10809/a%20b"
        );
    }
}
