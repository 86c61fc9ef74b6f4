//! Checks which files ringdisk serves for the disks that move to QEMU. `ringdisk replace` or a snapshot may have moved them to
//! files that no configuration names: from the configured file, the VM would start with older data.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use advisor::convert::Moved;
use control::ClientError;
use serde_json::json;

use crate::client::{CommandLineError, Connection, answer};
use crate::config::spec::DiskSpec;
use crate::socket::canonical_path;
use crate::state::Overrides;
use crate::state::left::{DiskId, FileMark, LeftFiles};

/// The state of the service, which has the disks' files while it does not run.
const STATE_OF_SERVICE: &str = "/var/lib/ringdisk/state.json";
const LEFT_OF_SERVICE: &str = "/var/lib/ringdisk/left.json";

/// Checks that the disks have the files that their configuration names, before that is changed. Returns what could not be
/// checked.
///
/// # Errors
/// One has another file.
pub fn check(
    control: Option<&Path>,
    is_changed: bool,
    moved: &[Moved],
) -> Result<Vec<String>, String> {
    if moved.is_empty() {
        return Ok(Vec::new());
    }
    let connection = Connection {
        control: control.map(Path::to_owned),
        json: false,
    };
    let now = match connection.open() {
        Ok(mut client) => {
            let now = served(&mut client).map_err(|e| e.to_string())?;
            check_left(&mut client, moved)?;
            now
        }
        Err(e) => match from_state(control, e) {
            Ok(Some(now)) => {
                check_left_in(Path::new(LEFT_OF_SERVICE), moved)?;
                now
            }
            Ok(None) => {
                check_left_in(Path::new(LEFT_OF_SERVICE), moved)?;
                return Ok(vec![not_checked("no ringdisk runs here")]);
            }
            Err(e) if is_changed => {
                return Err(format!(
                    "no file was changed: ringdisk cannot be asked which file each disk has now: {e}"
                ));
            }
            Err(e) => return Ok(vec![not_checked(&e)]),
        },
    };
    for disk in moved {
        let has_moved = |(socket, file): &&(PathBuf, String)| {
            canonical_path(socket) == canonical_path(Path::new(&disk.socket))
                && !is_same(file, &disk.file)
        };
        if let Some((_, file)) = now.iter().find(has_moved) {
            return Err(format!(
                "no file was changed: {}: ringdisk has moved the disk to {file}, and its configuration or metadata still \
                 names {}; put '{file}' there first",
                disk.place, disk.file
            ));
        }
    }
    Ok(Vec::new())
}

/// Checks that no disk has left its file, whether it is served now or not.
fn check_left(client: &mut control::Client, moved: &[Moved]) -> Result<(), String> {
    for disk in moved {
        let pairs = vec![("file", disk.file.clone()), ("socket", disk.socket.clone())];
        let Ok(spec) = DiskSpec::from_pairs(pairs) else {
            continue;
        };
        match client.call("x-ringdisk-check-file", json!({ "disk": spec.to_string() })) {
            Ok(_) => {}
            // An older ringdisk, which has no record.
            Err(e) if e.to_string().contains("CommandNotFound") => return Ok(()),
            Err(e) => {
                let problem = CommandLineError::from(e);
                return Err(format!("no file was changed: {}: {problem}", disk.place));
            }
        }
    }
    Ok(())
}

/// The same while ringdisk does not run.
fn check_left_in(path: &Path, moved: &[Moved]) -> Result<(), String> {
    let left: LeftFiles = match fs::read(path) {
        Ok(text) => {
            serde_json::from_slice(&text).map_err(|e| format!("{}: {e}", path.display()))?
        }
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(format!("{}: {e}", path.display())),
    };
    for disk in moved {
        let id = DiskId {
            name: String::new(),
            socket: disk.socket.clone(),
        };
        let mark = FileMark::at(Path::new(&disk.file)).map(|mark| (mark, true));
        if let Err(refused) = left.check(&id, false, mark.as_slice()) {
            return Err(format!(
                "no file was changed: {}: a disk was moved from {} to {}, and the former has not changed since, so it lacks what its VM \
                 has written; put '{}' into the configuration or metadata first",
                disk.place, disk.file, refused.to, refused.to
            ));
        }
    }
    Ok(())
}

/// The sockets and files in the state of the service, if it does not run. `None` if this host has none.
fn from_state(
    control: Option<&Path>,
    problem: CommandLineError,
) -> Result<Option<Vec<(PathBuf, String)>>, String> {
    let is_down = matches!(
        problem,
        CommandLineError::Client(ClientError::NoSocket(_) | ClientError::NobodyListens(_))
    );
    if !is_down || control.is_some() {
        return Err(problem.to_string());
    }
    let fail = |e: String| format!("{STATE_OF_SERVICE}: {e}");
    match fs::read(STATE_OF_SERVICE) {
        Ok(state) => in_state(&state).map(Some).map_err(fail),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(e) => Err(fail(e.to_string())),
    }
}

fn not_checked(why: &str) -> String {
    format!(
        "not checked: whether a disk has moved ('ringdisk replace') to another file than its configuration names ({why}); \
         compare with 'ringdisk list' on the VM's host"
    )
}

/// The sockets and files of the disks that the server has, served or not.
fn served(client: &mut control::Client) -> Result<Vec<(PathBuf, String)>, CommandLineError> {
    let answer = answer(client)?;
    let disks = answer["disks"].as_array().into_iter().flatten();
    let pair = |disk: &serde_json::Value| {
        let text = |key: &str| disk[key].as_str();
        Some((text("socket")?.into(), text("file")?.to_owned()))
    };
    Ok(disks.filter_map(pair).collect())
}

fn in_state(text: &[u8]) -> Result<Vec<(PathBuf, String)>, String> {
    let state = Overrides::parse(text)?;
    let pair = |disk: &crate::state::DiskOverride| {
        let default = || format!("/run/ringdisk/{}.sock", disk.disk.name).into();
        let socket = disk.disk.socket.clone().unwrap_or_else(default);
        (socket, disk.disk.file.to_string())
    };
    Ok(state.disks.iter().map(pair).collect())
}

fn is_same(now: &str, configured: &str) -> bool {
    let real = |path: &str| fs::canonicalize(path).ok();
    now == configured || real(now).is_some_and(|now| real(configured) == Some(now))
}
