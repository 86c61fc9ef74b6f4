//! The description of all keys: for `ringdisk serve --help`, and for the configuration reference.

use super::disk_keys::DISK_KEYS;
use super::file_keys::{EXPORT_KEYS, GROUP_NAME, MAPPING, THREAD_KEYS, TOP_KEYS};
use super::keys::{self, Key, TABLE_HEAD};
use super::limits;

/// The keys of a disk, for `--help`.
pub fn disk_help() -> String {
    let lines = DISK_KEYS
        .iter()
        .map(|key| key.key.help_lines(key.default().as_deref()));
    let lines = lines.collect::<String>();
    let limits = limits_help();
    format!("{lines}\nLimits of a disk (bytes may have a unit, as in bps=100M):\n{limits}")
}

/// The limits of a disk, for `--help`.
pub fn limits_help() -> String {
    let limits = limits::by_meaning().into_iter();
    let lines = limits.map(|(about, names)| keys::lines(&format!("  {}", names.join(", ")), about));
    lines.collect()
}

/// The headings of the reference that have a table of keys, with that table.
fn tables() -> [(&'static str, String); 6] {
    let rows = |keys: &mut dyn Iterator<Item = &Key>| {
        let rows = keys.map(|key| key.row(key.default));
        TABLE_HEAD.to_owned() + &rows.collect::<String>()
    };
    let disk = DISK_KEYS
        .iter()
        .map(|key| key.key.row(key.default().as_deref()));
    let disk = disk.chain([MAPPING.row(None)]).collect::<String>();
    let limits = limits::by_meaning().into_iter().map(|(about, names)| {
        let names: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
        format!("| {} | {about} |\n", names.join(", "))
    });
    let limits = limits.collect::<String>();
    [
        (
            "Top-level keys",
            rows(&mut TOP_KEYS.iter().map(|top| &top.key)),
        ),
        ("`[[disk]]`", TABLE_HEAD.to_owned() + &disk),
        (
            "`[[iothread]]`",
            rows(&mut THREAD_KEYS.iter().map(|thread| &thread.key)),
        ),
        (
            "`[[export]]`",
            rows(&mut EXPORT_KEYS.iter().map(|export| &export.key)),
        ),
        ("`[[throttle-group]]`", rows(&mut [&GROUP_NAME].into_iter())),
        ("Limits", format!("| key | meaning |\n|---|---|\n{limits}")),
    ]
}

/// The configuration reference with its tables generated again.
///
/// # Errors
/// A heading or the table after it is missing.
pub fn regenerate(document: &str) -> Result<String, String> {
    let mut document = document.to_owned();
    for (heading, table) in tables() {
        let missing = || format!("there is no table of keys after the heading '## {heading}'");
        let heading = format!("\n## {heading}\n");
        let section = document.find(&heading).ok_or_else(missing)? + heading.len();
        let length = document[section..].find("\n## ");
        let end = length.map_or(document.len(), |length| section + length);
        let table_at = document[section..end]
            .find("\n| key |")
            .ok_or_else(missing)?;
        let first = section + table_at + 1;
        let rows = document[first..].split_inclusive('\n');
        let rows = rows.take_while(|line| line.starts_with('|'));
        let last = first + rows.map(str::len).sum::<usize>();
        document.replace_range(first..last, &table);
    }
    Ok(document)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn configuration_reference_is_generated() {
        let document = include_str!("../../../../docs/operating/configuration.md");
        assert!(
            regenerate(document).as_deref() == Ok(document),
            "docs/operating/configuration.md differs from the tables in crates/daemon/src/config; `cargo xtask \
             reference` generates it"
        );
    }

    /// Help is read on terminals of 100 columns, and has no markup.
    #[test]
    fn help_is_plain_text() {
        for line in disk_help().lines() {
            assert!(line.chars().count() <= 100, "{line}");
            assert!(!line.contains('`') && !line.contains("]("), "{line}");
        }
    }

    /// A `|` in a cell would end it.
    #[test]
    fn tables_have_their_columns() {
        for (heading, table) in tables() {
            let columns = |line: &str| line.matches('|').count();
            let mut lines = table.lines();
            let head = lines.next().map(columns);
            assert!(lines.all(|line| Some(columns(line)) == head), "{heading}");
        }
    }
}
