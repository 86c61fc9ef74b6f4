//! An input that is parsed once for all changes of a round.

use std::cell::OnceCell;
use std::collections::HashMap;

use crate::input::{Input, Kind};
use crate::libvirt::Xml;
use crate::libvirt::metadata::NamedDisk;
use crate::model::Disk;
use crate::qemu::ParsedCommand;
use crate::round::Round;
use crate::setting::Setting;
use crate::target::{Edits, Target};
use crate::text::Span;
use crate::{libvirt, proxmox, qemu, ringdisk};

/// An input, parsed, with what the changes of a round have reserved.
pub struct ParsedInput<'a> {
    pub round: Round<'a>,
    xml: Option<Xml<'a>>,
    commands: Vec<OnceCell<Result<ParsedCommand, String>>>,
}

impl<'a> ParsedInput<'a> {
    /// Parses a domain; commands are parsed at their first use.
    pub fn new(input: &'a Input) -> Self {
        let text = input.sources.first().map_or("", |source| &source.text);
        Self {
            round: Round::new(input),
            xml: match input.kind {
                Kind::Libvirt => Xml::parse(text),
                _ => None,
            },
            commands: input.vms.iter().map(|_| OnceCell::new()).collect(),
        }
    }

    pub fn target(&self, vm: usize, disk: Option<usize>) -> Target<'_> {
        Target::new(&self.round, vm, disk)
    }

    fn xml(&self) -> Result<&Xml<'a>, String> {
        self.xml
            .as_ref()
            .ok_or_else(|| "the text is not XML".into())
    }

    /// The options of a VM's command.
    fn command(&self, vm: usize) -> Result<&ParsedCommand, String> {
        let cell = self.commands.get(vm).ok_or("there is no such VM")?;
        let input = self.round.input;
        let parsed = cell.get_or_init(|| match input.kind {
            Kind::Proxmox => proxmox::command(input),
            _ => ParsedCommand::of(input, vm),
        });
        parsed.as_ref().map_err(Clone::clone)
    }

    /// The edits for a setting.
    ///
    /// # Errors
    /// The reason why the setting cannot be made.
    pub fn edits(&self, target: &Target<'_>, setting: Setting) -> Edits {
        if let (Setting::Virtio | Setting::SingleController, Ok(disk)) = (setting, target.disk()) {
            let os = target.vm()?.table.word("vm.os");
            let is_virtio = disk
                .table
                .word("disk.bus")
                .is_some_and(|bus| bus.starts_with("virtio"));
            if !is_virtio && matches!(os, Some("windows" | "other")) {
                return Err("the guest may have no virtio driver".into());
            }
        }
        match target.input.kind {
            Kind::Libvirt => libvirt::edits(target, self.xml()?, setting),
            Kind::Qemu => qemu::edits(target, self.command(target.vm)?, setting),
            Kind::Proxmox => proxmox::edits(target, || self.command(0), setting),
            Kind::Ringdisk => ringdisk::edits(target, setting),
        }
    }

    /// The edits that preserve the boot order of a domain after disks have moved to virtio under new names.
    ///
    /// # Errors
    /// The input is not a domain.
    pub fn keep_boot_order(&self, vm: usize, moves: &HashMap<Span, String>) -> Edits {
        libvirt::keep_boot_order(&self.target(vm, None), self.xml()?, moves)
    }

    /// The edits that set the number of I/O threads of a domain.
    ///
    /// # Errors
    /// The input is not a domain, or it has no place for the number.
    pub fn count_threads(&self, vm: usize, count: u64) -> Edits {
        libvirt::count_threads(&self.target(vm, None), self.xml()?, count)
    }

    /// The edits that move a disk to ringdisk.
    ///
    /// # Errors
    /// A setting of the disk that ringdisk does not support.
    pub fn move_to_ringdisk(
        &self,
        target: &Target<'_>,
        name: &str,
        socket: &str,
        (queues, queue_size): (u64, u64),
    ) -> Edits {
        match target.input.kind {
            Kind::Libvirt => libvirt::to_ringdisk(target, self.xml()?, socket, queues, queue_size),
            _ => {
                let command = self.command(target.vm)?;
                qemu::to_ringdisk(target, command, name, socket, queues, queue_size)
            }
        }
    }

    /// The edits that move a disk back to QEMU.
    ///
    /// # Errors
    /// The reason why it cannot be moved.
    pub fn move_to_qemu(&self, target: &Target<'_>, storage: &Disk) -> Edits {
        match target.input.kind {
            Kind::Libvirt => libvirt::from_ringdisk(target, self.xml()?, storage),
            _ => qemu::from_ringdisk(target, self.command(target.vm)?, storage),
        }
    }

    /// The edits that name disks in the metadata of their domain, each with its target and its attributes.
    ///
    /// # Errors
    /// The input is no domain, or has no place for them.
    pub fn add_metadata(&self, target: &Target<'_>, disks: &[NamedDisk]) -> Edits {
        libvirt::metadata::add(target, self.xml()?, disks)
    }

    /// The disk as the metadata of its domain describes it to ringdisk's hook.
    ///
    /// # Errors
    /// The metadata names two.
    pub fn named_in_metadata(&self, target: &Target<'_>) -> Result<Option<Disk>, String> {
        match target.input.kind {
            Kind::Libvirt => libvirt::metadata::find(target, self.xml()?),
            _ => Ok(None),
        }
    }

    /// The edits that remove a disk from the metadata of its domain.
    ///
    /// # Errors
    /// The input is no domain.
    pub fn remove_metadata(&self, target: &Target<'_>) -> Edits {
        libvirt::metadata::remove(target, self.xml()?)
    }
}
