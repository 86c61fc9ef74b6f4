//! `ringdisk bitmap`: the dirty bitmaps of disks.

use block::{format_size, parse_size};
use serde_json::{Value, json};

use super::stats::check_present;
use super::{CommandLineError, CommandResult, Connection, answer, is_list, row, table};

#[derive(clap::Args)]
#[command(after_help = "Examples:
  ringdisk bitmap list
  ringdisk bitmap list vm2 --json
  ringdisk bitmap add vm2 nightly --granularity 64k --persistent
  ringdisk bitmap clear vm2 nightly
  ringdisk bitmap merge vm2 nightly --from new")]
pub struct BitmapArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(clap::Subcommand)]
enum Action {
    /// List the dirty bitmaps
    #[command(after_help = "Example:
  ringdisk bitmap list vm2

DIRTY  what was written since the bitmap was added or cleared
STATE  recording; disabled (records nothing); inconsistent (lacks changes, and is of no use any more)
KIND   persistent (stored) or temporary (ends with ringdisk, or with a move of the disk)")]
    List {
        /// Names of disks; default: all
        disks: Vec<String>,
        #[command(flatten)]
        connection: Connection,
    },
    /// Add a bitmap, which records changes from now on
    #[command(after_help = "Example:
  ringdisk bitmap add vm2 nightly --granularity 64k --persistent

A persistent bitmap is stored when ringdisk ends: in the image, or, for raw files and block devices, in the state directory. \
The next ringdisk continues it; one in an image, QEMU too.")]
    Add {
        /// Name of the disk
        disk: String,
        /// Name of the bitmap
        name: String,
        /// Size of the disk for each bit, as in 64k; default: the cluster size of the image, from 4k to 64k
        #[arg(long, value_name = "SIZE")]
        granularity: Option<String>,
        /// Store the bitmap in the image, or in the state directory
        #[arg(long)]
        persistent: bool,
        /// Record nothing until the bitmap is enabled
        #[arg(long)]
        disabled: bool,
        #[command(flatten)]
        connection: Connection,
    },
    /// Remove a bitmap, also where it is stored
    #[command(after_help = "Example:\n  ringdisk bitmap remove vm2 nightly")]
    Remove(One),
    /// Forget what is dirty
    #[command(after_help = "Example:\n  ringdisk bitmap clear vm2 nightly")]
    Clear(One),
    /// Record changes
    #[command(after_help = "Example:\n  ringdisk bitmap enable vm2 nightly")]
    Enable(One),
    /// Record no changes
    #[command(after_help = "Example:\n  ringdisk bitmap disable vm2 nightly")]
    Disable(One),
    /// Add what is dirty in other bitmaps of the disk
    #[command(after_help = "Example:\n  ringdisk bitmap merge vm2 nightly --from new")]
    Merge {
        #[command(flatten)]
        one: One,
        /// A bitmap whose dirty parts are added; several may be given
        #[arg(long, value_name = "NAME", required = true)]
        from: Vec<String>,
    },
}

#[derive(clap::Args)]
struct One {
    /// Name of the disk
    disk: String,
    /// Name of the bitmap
    name: String,
    #[command(flatten)]
    connection: Connection,
}

pub fn bitmap(args: &BitmapArgs) -> CommandResult {
    match &args.action {
        Action::List { disks, connection } => list(disks, connection),
        Action::Add {
            disk,
            name,
            granularity,
            persistent,
            disabled,
            connection,
        } => {
            let mut arguments = json!({
                "node": disk, "name": name, "persistent": persistent, "disabled": disabled
            });
            if let Some(size) = granularity {
                let size = parse_size(size);
                let problem = |e| CommandLineError::Value("granularity".into(), e);
                arguments["granularity"] = size.map_err(problem)?.into();
            }
            let done = format!("disk {disk} has bitmap {name}");
            connection.order("block-dirty-bitmap-add", arguments, &done)
        }
        Action::Remove(one) => one.order("remove", "no longer exists"),
        Action::Clear(one) => one.order("clear", "has no dirty bits"),
        Action::Enable(one) => one.order(
            "enable",
            "records changes; it lacks those made while it did not",
        ),
        Action::Disable(one) => one.order("disable", "records no changes"),
        Action::Merge { one, from } => {
            let One { disk, name, .. } = one;
            let arguments = json!({ "node": disk, "target": name, "bitmaps": from });
            let done = format!(
                "disk {disk}: bitmap {name} has what is dirty in {}",
                from.join(", ")
            );
            one.connection
                .order("block-dirty-bitmap-merge", arguments, &done)
        }
    }
}

impl One {
    fn order(&self, action: &str, done: &str) -> CommandResult {
        let command = format!("block-dirty-bitmap-{action}");
        let arguments = json!({ "node": self.disk, "name": self.name });
        let done = format!("disk {}: bitmap {} {done}", self.disk, self.name);
        self.connection.order(&command, arguments, &done)
    }
}

fn list(names: &[String], connection: &Connection) -> CommandResult {
    let mut client = connection.open()?;
    let nodes = client.call_for("query-named-block-nodes", json!({}), is_list)?;
    let nodes = nodes.as_array().cloned().unwrap_or_default();
    let name_of = |node: &Value| node["node-name"].as_str().unwrap_or_default().to_owned();
    let all: Vec<_> = nodes.iter().map(name_of).collect();
    if let Some(missing) = names.iter().find(|name| !all.contains(name)) {
        check_present(&answer(&mut client)?, missing)?;
        return Err(CommandLineError::NoDisk(missing.clone(), all.join(", ")));
    }
    let heading = ["DISK", "BITMAP", "DIRTY", "GRANULARITY", "STATE", "KIND"];
    let mut rows = vec![row(heading)];
    let mut listed = serde_json::Map::new();
    for node in &nodes {
        let disk = name_of(node);
        if !names.is_empty() && !names.contains(&disk) {
            continue;
        }
        let bitmaps = node["dirty-bitmaps"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        for bitmap in &bitmaps {
            let size = |key: &str| format_size(bitmap[key].as_u64().unwrap_or(0));
            let state = match (&bitmap["inconsistent"], &bitmap["recording"]) {
                (Value::Bool(true), _) => "inconsistent",
                (_, Value::Bool(true)) => "recording",
                _ => "disabled",
            };
            let kind = if bitmap["persistent"] == true {
                "persistent"
            } else {
                "temporary"
            };
            rows.push(vec![
                disk.clone(),
                // It comes from the image, and may be anything.
                (bitmap["name"].as_str().unwrap_or_default())
                    .escape_debug()
                    .to_string(),
                size("count"),
                size("granularity"),
                state.into(),
                kind.into(),
            ]);
        }
        listed.insert(disk, bitmaps.into());
    }
    let text = if rows.len() > 1 {
        table(&rows)
    } else {
        let disks = match names {
            [] => "no disk has".into(),
            [disk] => format!("disk {disk} has no"),
            disks => format!("disks {} have no", disks.join(", ")),
        };
        format!("{disks} dirty bitmaps; 'ringdisk bitmap add DISK NAME' adds one")
    };
    connection.say(&listed.into(), &text);
    Ok(())
}
