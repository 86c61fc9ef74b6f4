//! `ringdisk manual`: manual pages and shell completions, made from the command line's own description.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use thiserror::Error;

#[derive(clap::Args)]
pub struct Args {
    /// Where to put them, a directory that exists
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,
}

#[derive(Debug, Error)]
#[error("{0}: cannot write the manual there: {1}")]
pub struct ManualError(PathBuf, io::Error);

/// Writes `ringdisk.1`, a page for each subcommand, and completions for bash, fish and zsh.
///
/// # Errors
/// They cannot be written.
pub fn run(args: &Args, command: Command) -> Result<(), ManualError> {
    let fail = |e| ManualError(args.directory.clone(), e);
    let mut command = command.disable_help_subcommand(true);
    for shell in [Shell::Bash, Shell::Fish, Shell::Zsh] {
        generate_to(shell, &mut command, "ringdisk", &args.directory).map_err(fail)?;
    }
    command.build();
    for command in std::iter::once(&command).chain(command.get_subcommands()) {
        let name = command.get_display_name().unwrap_or("ringdisk");
        let path = args.directory.join(format!("{name}.1"));
        fs::write(path, page(command).map_err(fail)?).map_err(fail)?;
    }
    Ok(())
}

fn page(command: &Command) -> io::Result<Vec<u8>> {
    let notes = command.get_after_help().map(ToString::to_string);
    let man = Man::new(command.clone());
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    man.render_options_section(&mut page)?;
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    if let Some(notes) = notes {
        // As they stand: their columns would be lost if the lines were filled.
        writeln!(page, ".SH NOTES\n.nf")?;
        for line in notes.lines() {
            writeln!(page, "\\&{}", line.replace('\\', "\\e").replace('-', "\\-"))?;
        }
        writeln!(page, ".fi")?;
    }
    Ok(page)
}
