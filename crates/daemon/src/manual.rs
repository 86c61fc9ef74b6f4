//! `ringdisk manual`: manual pages and shell completions, made from the command line's own description.

use std::fs;
use std::io::{self, Write};
use std::path::PathBuf;

use clap::Command;
use clap_complete::{Shell, generate_to};
use clap_mangen::Man;
use thiserror::Error;

use crate::config::reference;

#[derive(clap::Args)]
pub struct Args {
    /// Existing directory for the files
    #[arg(value_name = "DIRECTORY")]
    directory: PathBuf,

    /// Only generate the tables of keys in the configuration reference again, which DIRECTORY names
    #[arg(long, hide = true)]
    reference: bool,
}

#[derive(Debug, Error)]
pub enum ManualError {
    #[error("{0}: cannot write the manual there: {1}")]
    Write(PathBuf, io::Error),
    #[error("{0}: {1}")]
    Reference(PathBuf, String),
}

/// Writes `ringdisk.1`, a page for each subcommand, and completions for bash, fish and zsh.
///
/// # Errors
/// They cannot be written.
pub fn run(args: &Args, command: Command) -> Result<(), ManualError> {
    let fail = |e| ManualError::Write(args.directory.clone(), e);
    if args.reference {
        let text = fs::read_to_string(&args.directory).map_err(fail)?;
        let text = reference::regenerate(&text)
            .map_err(|problem| ManualError::Reference(args.directory.clone(), problem))?;
        return fs::write(&args.directory, text).map_err(fail);
    }
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
