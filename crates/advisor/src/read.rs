//! Reads a configuration. Its kind is detected from its content.

use std::path::PathBuf;

use crate::defaults;
use crate::input::{Input, Kind, Mistake, ReadError, Reading, Surroundings};
use crate::text::{BYTES_MAX, Source, printable};
use crate::{libvirt, proxmox, qemu, ringdisk};

/// Reads a configuration.
///
/// # Errors
/// The kind is unknown, or the text is invalid. The error says where, and what was expected.
pub fn read(source: Source, surroundings: Surroundings) -> Result<Input, ReadError> {
    let fail = |source: &Source, Mistake { at, problem }| ReadError {
        name: printable(&source.name),
        at: source.position(u32::try_from(at).unwrap_or(u32::MAX)),
        problem,
    };
    if source.text.len() > BYTES_MAX {
        return Err(fail(
            &source,
            Mistake::new(
                0,
                format!("is larger than {BYTES_MAX} bytes; check that this is the right file"),
            ),
        ));
    }
    let kind = detect(&source.text).map_err(|mistake| fail(&source, mistake))?;
    let name = surroundings
        .name
        .clone()
        .unwrap_or_else(|| stem(&source.name));
    let mut reading = Reading::default();
    match kind {
        Kind::Libvirt => libvirt::read(&source.text, &name, &mut reading),
        Kind::Qemu => qemu::read(&source.text, &name, &surroundings, &mut reading),
        Kind::Proxmox => proxmox::read(&source.text, &name, &surroundings, &mut reading),
        Kind::Ringdisk => ringdisk::read(&source.text, &name, &mut reading),
    }
    .map_err(|mistake| fail(&source, mistake))?;
    if let Some(malloc) = surroundings.malloc {
        for vm in &mut reading.vms {
            vm.table
                .derive("vm.malloc", malloc, "from the running process");
        }
    }
    if kind != Kind::Ringdisk {
        reading.vms.iter_mut().for_each(defaults::fill);
    }
    let mut sources = vec![source];
    sources.append(&mut reading.more);
    Ok(Input {
        kind,
        sources,
        vms: reading.vms,
        notes: reading.notes,
        ignores: reading.ignores,
        surroundings,
    })
}

/// The files that a text includes.
pub fn files_named(text: &str) -> Vec<String> {
    if text.trim_start().starts_with('<') {
        Vec::new()
    } else {
        qemu::files_named(text)
    }
}

/// The name of a file without directories and suffix.
fn stem(name: &str) -> String {
    let path = PathBuf::from(name);
    path.file_stem()
        .map_or(name.into(), |stem| stem.to_string_lossy().into_owned())
}

/// Detects the kind of a text.
fn detect(text: &str) -> Result<Kind, Mistake> {
    let start = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    if start.is_empty() {
        return Err(Mistake::new(0, "the file is empty"));
    }
    if start.starts_with('<') {
        return Ok(Kind::Libvirt);
    }
    let has_line = |start: &str| {
        text.lines()
            .any(|line| line.trim_start().starts_with(start))
    };
    if has_line("[Service]") && has_line("Exec") {
        return Err(Mistake::new(
            text.len() - start.len(),
            "is a systemd unit, whose quotes and variables differ from those of a shell; check the running QEMU \
             instead: --pid",
        ));
    }
    if qemu::has_command(text) {
        return Ok(Kind::Qemu);
    }
    if proxmox::looks_like(text) {
        return Ok(Kind::Proxmox);
    }
    if ringdisk::looks_like(text) {
        return Ok(Kind::Ringdisk);
    }
    if let Some((at, variable)) = qemu::variable_program(text) {
        return Err(Mistake::new(
            at,
            format!(
                "the program of this command is a variable ({}), so that it is not known to be QEMU: write the program's name \
                 instead, or check the running process with --pid",
                crate::text::printable(&variable)
            ),
        ));
    }
    Err(Mistake::new(
        text.len() - start.len(),
        "is not a libvirt domain (XML), a QEMU command line, a Proxmox VM configuration or a ringdisk.toml",
    ))
}
