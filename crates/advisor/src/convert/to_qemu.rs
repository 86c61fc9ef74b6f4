//! Moves disks from ringdisk back to QEMU.

use super::{Converted, Moved, of_proxmox, with_edits, with_text};
use crate::input::{Input, Kind};
use crate::model::Disk;
use crate::parsed::ParsedInput;
use crate::served::{self, Request};
use crate::text::{Edit, apply};

/// A disk in ringdisk's configuration.
struct Configured {
    /// The number of its input.
    input: usize,
    disk: Disk,
    is_moved: bool,
}

impl Configured {
    /// Whether ringdisk serves it there.
    fn is_at(&self, socket: &str) -> bool {
        let Disk { name, .. } = &self.disk;
        match &self.disk.socket {
            Some(own) => own == socket,
            // The directory depends on who runs ringdisk.
            None => socket.ends_with(&format!("/ringdisk/{name}.sock")),
        }
    }
}

/// Converts all disks that can be converted.
pub fn to_qemu(inputs: Vec<Input>) -> Result<Converted, String> {
    let mut back = Back {
        configured: configured(&inputs),
        messages: Vec::new(),
        moved: Vec::new(),
    };
    let mut changed = Vec::new();
    for mut input in inputs {
        if input.kind == Kind::Proxmox {
            changed.push(back.proxmox(input));
            continue;
        }
        for vm in 0..input.vms.len() {
            for disk in 0..input.vms[vm].disks.len() {
                input = back.disk(input, vm, disk);
            }
        }
        changed.push(input);
    }
    if back.moved.is_empty() {
        return Err(match back.messages.as_slice() {
            [] => "there is no vhost-user-blk disk".into(),
            messages => messages.join("; "),
        });
    }
    for (number, input) in changed.iter_mut().enumerate() {
        let gone = back
            .configured
            .iter()
            .filter(|disk| disk.is_moved && disk.input == number);
        let edits: Vec<_> = gone.map(|gone| Edit::replace(gone.disk.span, "")).collect();
        if !edits.is_empty() {
            // Not read again: it may be empty now.
            input.sources = apply(&input.sources, &edits).ok_or("two changes overlap")?;
            for source in &mut input.sources {
                if source.text.trim().is_empty() {
                    // ringdisk takes an empty file for one that is being written.
                    source.text = "# QEMU has the disks again.\n".into();
                }
            }
            input.vms.clear();
        }
    }
    Ok(Converted {
        inputs: changed,
        messages: back.messages,
        config: None,
        moved: back.moved,
    })
}

fn configured(inputs: &[Input]) -> Vec<Configured> {
    let of_ringdisk = inputs.iter().enumerate();
    of_ringdisk
        .filter(|(_, input)| input.kind == Kind::Ringdisk)
        .flat_map(|(number, input)| {
            let disks = input.vms.iter().flat_map(|vm| &vm.disks);
            disks.map(move |disk| Configured {
                input: number,
                disk: disk.clone(),
                is_moved: false,
            })
        })
        .collect()
}

struct Back {
    configured: Vec<Configured>,
    messages: Vec<String>,
    moved: Vec<Moved>,
}

impl Back {
    /// A VM of Proxmox, whose configuration has the drives as they were.
    fn proxmox(&mut self, input: Input) -> Input {
        let (number, storages) = of_proxmox(&input);
        let request = Request {
            vm: &number,
            drives: &[],
            snippets: None,
            storages,
        };
        let text = &input.sources[0].text;
        let changed = served::served(text, &request).and_then(|served| {
            let changed = with_text(&input, served::disable(text, &request)?.text)?;
            for disk in served {
                let drives = changed.vms.iter().flat_map(|vm| &vm.disks);
                let file = drives.into_iter().find(|drive| drive.name == disk.drive);
                self.moved.push(Moved {
                    place: format!("VM {number} {}", disk.drive),
                    socket: disk.socket,
                    file: file.map_or(disk.volume, |drive| drive.file.clone()),
                });
            }
            Ok(changed)
        });
        changed.unwrap_or_else(|problem| {
            self.messages.push(format!("VM {number}: {problem}"));
            input
        })
    }

    /// Converts a disk, if it is one that QEMU has from a server.
    fn disk(&mut self, input: Input, vm: usize, at: usize) -> Input {
        let Some(disk) = input.vms.get(vm).and_then(|vm| vm.disks.get(at)) else {
            return input;
        };
        let is_ours = disk.table.word("disk.bus") == Some("vhost-user-blk")
            && !disk.table.is_yes("disk.served");
        if !is_ours {
            return input;
        }
        let place = format!("{} {}", input.vms[vm].name, disk.name);
        let socket = disk.file.clone();
        match self.converted(&input, vm, at, &place) {
            Ok((changed, file)) => {
                self.moved.push(Moved {
                    place,
                    socket,
                    file,
                });
                changed
            }
            Err(reason) => {
                let message = format!("{place} is not converted: {reason}");
                self.messages.push(message);
                input
            }
        }
    }

    /// The input with a converted disk, and its storage.
    fn converted(
        &mut self,
        input: &Input,
        vm: usize,
        at: usize,
        place: &str,
    ) -> Result<(Input, String), String> {
        let parsed = ParsedInput::new(input);
        let target = parsed.target(vm, Some(at));
        let socket = &target.disk()?.file;
        let named = parsed.named_in_metadata(&target)?;
        let mut there = (self.configured.iter_mut()).filter(|disk| disk.is_at(socket));
        let configured = there.next();
        if there.next().is_some() {
            return Err(format!(
                "ringdisk's configuration has two disks at its socket {socket}"
            ));
        }
        let storage = match (&named, &configured) {
            (Some(named), Some(configured)) if named.file != configured.disk.file => {
                return Err(format!(
                    "the domain's metadata names {}, and ringdisk's configuration {}; remove the one that is wrong",
                    named.file, configured.disk.file
                ));
            }
            (Some(named), _) => named,
            (None, Some(configured)) => &configured.disk,
            (None, None) => {
                return Err(format!(
                    "no domain's metadata and no given configuration of ringdisk has a disk at its socket {socket}; \
                     name the configuration as well"
                ));
            }
        };
        if let Some(other) = storage.others.first() {
            return Err(format!("QEMU's disk would lose {other}"));
        }
        let format = storage.table.word("disk.format").unwrap_or("raw");
        if !matches!(format, "" | "raw" | "qcow2") {
            return Err(format!("its format, '{format}', is not one of ringdisk's"));
        }
        if storage.file.is_empty() {
            return Err("neither the metadata nor the configuration names its file".into());
        }
        if input.kind == Kind::Libvirt
            && !storage.file.contains(':')
            && !storage.file.starts_with('/')
        {
            return Err(format!("its file, {}, is no absolute path", storage.file));
        }
        if let Some((kind, _)) = storage.file.split_once(':')
            && !storage.file.starts_with('/')
        {
            return Err(format!(
                "its storage is {}, and only files and block devices are converted; write its {kind}: storage manually",
                storage.file
            ));
        }
        let mut edits = parsed.move_to_qemu(&target, storage)?;
        if named.is_some() {
            edits.extend(parsed.remove_metadata(&target)?);
        }
        let changed = with_edits(input, &edits)?;
        if storage.carried.has_own_limits {
            self.messages
                .push(format!("{place}: it keeps only the limits of its group"));
        }
        let file = storage.file.clone();
        if let Some(configured) = configured {
            configured.is_moved = true;
            self.messages.push(format!(
                "{place}: ringdisk's configuration has it no more; 'ringdisk reload' before the VM starts"
            ));
        }
        Ok((changed, file))
    }
}
