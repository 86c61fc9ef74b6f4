//! Commands that start QEMU, with the position of every byte of their words.

use super::script;
use super::word::{Command, Word};
use crate::text::Span;

/// A comment.
pub type Comment = (String, Span);

/// A script's commands that start QEMU.
#[derive(Debug, Default)]
pub struct Found {
    /// The commands in their order
    pub commands: Vec<Command>,
    /// All comments.
    pub comments: Vec<Comment>,
    /// The first byte that is not understood, and the reason
    pub broken: Option<(usize, &'static str)>,
}

/// Shell keywords before a command.
const RESERVED: &[&str] = &[
    "if", "then", "elif", "else", "while", "until", "do", "!", "{", "time",
];

/// Programs that run the command in their arguments.
const WRAPPERS: &[&str] = &[
    "builtin",
    "catchsegv",
    "cgexec",
    "chroot",
    "chrt",
    "command",
    "doas",
    "env",
    "exec",
    "firejail",
    "gdb",
    "ionice",
    "ltrace",
    "nice",
    "nohup",
    "nsenter",
    "numactl",
    "perf",
    "prlimit",
    "record",
    "rlwrap",
    "runuser",
    "screen",
    "setpriv",
    "setsid",
    "stat",
    "stdbuf",
    "strace",
    "sudo",
    "systemd-run",
    "taskset",
    "time",
    "timeout",
    "unshare",
    "valgrind",
];

/// The commands of a text that start QEMU, and the comments.
pub fn commands(text: &str, source: u16) -> Found {
    let script = script::split(text, source);
    let mut found = Found {
        comments: script.comments,
        broken: script.broken,
        ..Found::default()
    };
    let mut set: Vec<(String, Word)> = Vec::new();
    let mut exported: Vec<(String, Word)> = Vec::new();
    for simple in script.commands {
        let mut words = simple.words.into_iter().peekable();
        while words
            .next_if(|word| RESERVED.contains(&word.text.as_str()))
            .is_some()
        {}
        let mut own = Vec::new();
        while let Some(variable) = words.peek().and_then(assignment) {
            own.push(variable);
            words.next();
        }
        let Some(first) = words.peek() else {
            set.extend(own);
            continue;
        };
        if first.text == "export" {
            for word in words.skip(1) {
                match assignment(&word) {
                    Some(variable) => exported.push(variable),
                    None => {
                        let known = set.iter().position(|(name, _)| *name == word.text);
                        exported.extend(known.map(|place| set.remove(place)));
                    }
                }
            }
            continue;
        }
        let words: Vec<Word> = words.collect();
        let Some(place) = program(&words) else {
            continue;
        };
        let mut variables = exported.clone();
        variables.extend(own);
        // Words before it may also set variables, as in `sudo nice -n 5 env A=b qemu-system-x86_64`.
        variables.extend(words[..place].iter().filter_map(assignment));
        let mut words = words.into_iter().skip(place);
        found.commands.push(Command {
            variables,
            not_exported: set.clone(),
            program: words.next().unwrap_or_default(),
            arguments: words.collect(),
            redirections: simple.redirections,
        });
    }
    found
}

/// The first command with options of QEMU whose program is a variable: where that is, and how it is written.
pub fn variable_program(text: &str) -> Option<(usize, String)> {
    const OPTIONS: &[&str] = &[
        "drive",
        "device",
        "blockdev",
        "machine",
        "M",
        "m",
        "enable-kvm",
    ];
    let is_option = |word: &Word| {
        let option = word.text.trim_start_matches('-');
        word.text.starts_with('-') && OPTIONS.contains(&option)
    };
    script::split(text, 0).commands.iter().find_map(|simple| {
        let place = simple
            .words
            .iter()
            .position(|word| word.text.starts_with('$'))?;
        let (before, rest) = simple.words.split_at(place);
        let (program, arguments) = rest.split_first()?;
        let is_program = !before.iter().any(is_option) && arguments.iter().any(is_option);
        is_program.then(|| (program.outer.start as usize, program.text.clone()))
    })
}

/// QEMU's options in another configuration, which uses no shell.
pub fn arguments(text: &str) -> Option<Command> {
    let mut words = script::arguments(text, 0).words.into_iter();
    Some(Command {
        program: words.next()?,
        arguments: words.collect(),
        ..Command::default()
    })
}

/// The index of the word that names QEMU, directly or as an argument of a program that runs it.
fn program(words: &[Word]) -> Option<usize> {
    let name = |word: &Word| word.text.rsplit('/').next().unwrap_or_default().to_owned();
    let mut after_option = false;
    let mut looks_up = false;
    for (place, word) in words.iter().enumerate() {
        let is_option = word.text.starts_with('-');
        let starts_others = WRAPPERS.contains(&name(word).as_str());
        // The word after an option may be its value, as in `sudo -u qemu qemu-system-x86_64`.
        let is_whole = name(word).starts_with("qemu-system-");
        if is_qemu(&word.text) && (is_whole || !after_option) {
            return (!looks_up && word.unknown.is_empty()).then_some(place);
        }
        let is_value = after_option || word.text.starts_with(|c: char| c.is_ascii_digit());
        let passes = starts_others || is_option || is_value || assignment(word).is_some();
        if !passes || place == 0 && !starts_others {
            return None;
        }
        // `command -v` only prints a program's path.
        looks_up |= place > 0
            && name(&words[0]) == "command"
            && is_option
            && word.text != "-p"
            && word.text != "--";
        after_option = is_option && word.text != "--";
    }
    None
}

/// Whether a word names a QEMU program that runs VMs.
pub fn is_qemu(word: &str) -> bool {
    let name = word.rsplit('/').next().unwrap_or(word);
    name.strip_prefix("qemu-system-").is_some_and(|machine| {
        !machine.is_empty()
            && machine
                .chars()
                .all(|c| c.is_ascii_alphanumeric() || c == '_')
    }) || matches!(name, "qemu-kvm" | "kvm" | "qemu")
}

fn assignment(word: &Word) -> Option<(String, Word)> {
    let (name, value) = word.text.split_once('=')?;
    let good = |c: char| c.is_ascii_alphanumeric() || c == '_';
    if !name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') || !name.chars().all(good) {
        return None;
    }
    Some((name.to_owned(), word.after(name.len() + 1, value)))
}

/// A command line in shell syntax, with one option and its value per line.
pub fn shell(arguments: &[String]) -> String {
    let mut text = String::new();
    for (i, argument) in arguments.iter().enumerate() {
        let value = i > 0 && !argument.starts_with('-') && arguments[i - 1].starts_with('-');
        match (i, value) {
            (0, _) => {}
            (_, true) => text.push(' '),
            (_, false) => text.push_str(" \\\n  "),
        }
        text.push_str(&quoted(argument));
    }
    text.push('\n');
    text
}

/// Quotes a word for a shell if necessary.
pub fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:+@%".contains(c);
    if !word.is_empty() && word.chars().all(plain) {
        word.to_owned()
    } else {
        format!("'{}'", word.replace('\'', r"'\''"))
    }
}

#[cfg(test)]
#[path = "words/tests.rs"]
mod tests;
