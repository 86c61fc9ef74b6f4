//! The documents of the package: those of the project, without links to what is not installed.

use crate::ci::documents::normalised;
use anyhow::{Context, Result};
use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Where documents are in the project, and where in the package.
const FOLDERS: [(&str, &str); 2] = [("docs", ""), ("docs/operating", "operating")];
const KINDS: [&str; 3] = ["md", "png", "svg"];

/// Writes the documents of the project at `root` into `to`.
pub(super) fn write(root: &Path, to: &Path) -> Result<()> {
    let files = installed_files(root)?;
    let _ = fs::remove_dir_all(to);
    for (from, name) in &files {
        let (source, into) = (root.join(from), to.join(name));
        let parent = into.parent().context("a file has a directory")?;
        fs::create_dir_all(parent).with_context(|| format!("making {}", parent.display()))?;
        let copied = match from.extension().is_some_and(|it| it == "md") {
            true => fs::read_to_string(&source)
                .and_then(|text| fs::write(&into, with_installed_links(&text, from, &files))),
            false => fs::copy(&source, &into).map(drop),
        };
        copied.with_context(|| format!("copying {} to {}", source.display(), into.display()))?;
    }
    Ok(())
}

/// The files, by their paths in the project, with those in the package.
fn installed_files(root: &Path) -> Result<BTreeMap<PathBuf, PathBuf>> {
    let changelog = PathBuf::from("CHANGELOG.md");
    let mut files = BTreeMap::from([(changelog.clone(), changelog)]);
    for (folder, to) in FOLDERS {
        let there = root.join(folder);
        let entries =
            fs::read_dir(&there).with_context(|| format!("reading {}", there.display()))?;
        for name in entries
            .flatten()
            .map(|entry| PathBuf::from(entry.file_name()))
        {
            let kind = name.extension().and_then(|kind| kind.to_str());
            if kind.is_some_and(|kind| KINDS.contains(&kind)) {
                files.insert(Path::new(folder).join(&name), Path::new(to).join(&name));
            }
        }
    }
    Ok(files)
}

/// A document whose links lead to files that are installed; of other links, only the text stays.
fn with_installed_links(text: &str, from: &Path, files: &BTreeMap<PathBuf, PathBuf>) -> String {
    let mut out = String::new();
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("](") {
        let Some((target, next)) = after.split_once(')') else {
            break;
        };
        out.push_str(before);
        rest = next;
        let end = target.find(['#', ' ']).unwrap_or(target.len());
        let (path, part) = target.split_at(end);
        let to = files.get(&normalised(&from.with_file_name(path)));
        if path.is_empty() || path.contains("://") {
            out.push_str(&format!("]({target})"));
        } else if let Some(to) = to {
            let folders = files[from].components().count() - 1;
            out.push_str(&format!(
                "]({}{}{part})",
                "../".repeat(folders),
                to.display()
            ));
        } else {
            drop_opening(&mut out);
        }
    }
    out + rest
}

/// Removes the bracket that opened the text of a link, and what marks it as a picture.
fn drop_opening(out: &mut String) {
    let mut depth = 0;
    for (at, byte) in out
        .bytes()
        .enumerate()
        .collect::<Vec<_>>()
        .into_iter()
        .rev()
    {
        match byte {
            b']' => depth += 1,
            b'[' if depth > 0 => depth -= 1,
            b'[' => {
                out.remove(at);
                if out[..at].ends_with('!') {
                    out.remove(at - 1);
                }
                return;
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ci::documents::links_in;

    #[test]
    fn links_lead_to_installed_files_only() {
        let files = installed_files(&crate::root()).unwrap();
        let from = Path::new("docs/operating/nbd.md");
        let text = "[a](../backup.md#b), ![c [d]](../../crates/e.png), [f](#g) [h](https://i/) [j](nbd.md)";
        let wanted = "[a](../backup.md#b), c [d], [f](#g) [h](https://i/) [j](../operating/nbd.md)";
        assert_eq!(with_installed_links(text, from, &files), wanted);

        let folder = tempfile::tempdir().unwrap();
        write(&crate::root(), folder.path()).unwrap();
        let mut links = 0;
        for name in files
            .values()
            .filter(|it| it.extension().is_some_and(|it| it == "md"))
        {
            let path = folder.path().join(name);
            for link in links_in(&fs::read_to_string(&path).unwrap()) {
                let target = link.split('#').next().unwrap();
                let is_there = path.with_file_name(target).exists() || target.is_empty();
                assert!(is_there || target.contains("://"), "{name:?}: {link}");
                links += 1;
            }
        }
        assert!(links > 100, "{links}");
    }
}
