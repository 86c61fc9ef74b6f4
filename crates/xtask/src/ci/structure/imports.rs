//! Import circles between the modules of a crate.
//!
//! The rule applies to modules with the same parent, each with everything below it: if `a` or something below it imports
//! from `b` or from below, nothing below `b` may lead back to `a`. So it covers files and folders. A module may use its
//! ancestors and they may use it: a child sees the private items of its parents anyway.

use super::source::{Import, Source, Start};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// The path of a module; the root's is empty.
type Module = Vec<String>;

type Modules<'a> = BTreeMap<Module, &'a Source>;

/// The modules that each module imports from
type Graph = BTreeMap<Module, BTreeSet<Module>>;

/// Modules in the same folder that import each other in circles.
pub(super) struct Circle {
    pub(super) folder: String,
    pub(super) modules: usize,
    /// One of the shortest circles
    pub(super) example: String,
}

pub(super) fn circles(sources: &BTreeMap<String, Source>) -> Vec<Circle> {
    let mut circles = Vec::new();
    for (root, modules) in crates(sources) {
        for (parent, graph) in graphs_of_siblings(&modules) {
            let found: Vec<_> = graph
                .keys()
                .filter_map(|module| circle(&graph, module))
                .collect();
            if let Some(example) = found.iter().min_by_key(|circle| circle.len()) {
                circles.push(Circle {
                    folder: format!("{root}{}", parent.join("/"))
                        .trim_end_matches('/')
                        .to_owned(),
                    modules: found.len(),
                    example: example.join(" → "),
                });
            }
        }
    }
    circles
}

/// The modules of each crate and of its tests, by the folder of their root.
fn crates(sources: &BTreeMap<String, Source>) -> BTreeMap<&str, Modules<'_>> {
    let mut crates: BTreeMap<&str, Modules> = BTreeMap::new();
    for (path, source) in sources {
        let below_root = ["/src/", "/tests/"]
            .iter()
            .find_map(|root| Some(path.find(root)? + root.len()));
        if let Some(at) = below_root {
            let (root, file) = path.split_at(at);
            let modules = crates.entry(root).or_default();
            modules.insert(module(file), source);
        }
    }
    for modules in crates.values_mut() {
        let tests: Vec<Module> = modules
            .iter()
            .flat_map(|(module, source)| source.test_modules.iter().map(|name| child(module, name)))
            .collect();
        modules.retain(|module, _| !tests.iter().any(|test| module.starts_with(test)));
    }
    crates
}

fn module(file: &str) -> Module {
    let path = file.strip_suffix(".rs").unwrap_or(file);
    let mut names: Module = path.split('/').map(str::to_owned).collect();
    if matches!(
        names.last().map(String::as_str),
        Some("lib" | "main" | "mod")
    ) {
        names.pop();
    }
    names
}

fn child(module: &[String], name: &str) -> Module {
    let mut child = module.to_vec();
    child.push(name.to_owned());
    child
}

/// For each parent, which of its children import from which, with everything below them.
fn graphs_of_siblings(modules: &Modules) -> BTreeMap<Module, Graph> {
    let mut graphs: BTreeMap<Module, Graph> = BTreeMap::new();
    for (module, source) in modules {
        for import in &source.imports {
            let Some(target) = resolve(modules, module, import, 0) else {
                continue;
            };
            let shared = module
                .iter()
                .zip(&target)
                .take_while(|(one, other)| one == other)
                .count();
            if let (Some(from), Some(to)) = (module.get(..=shared), target.get(..=shared)) {
                let graph = graphs.entry(module[..shared].to_vec()).or_default();
                graph.entry(from.to_vec()).or_default().insert(to.to_vec());
            }
        }
    }
    graphs
}

/// The module that defines what is imported; `None` if it is in another crate. Follows names that a module has imported
/// itself, so that `pub use` in a parent is not an import of the parent.
fn resolve(modules: &Modules, from: &[String], import: &Import, depth: usize) -> Option<Module> {
    const DEPTH_MAX: usize = 8;
    let (mut at, mut is_local) = match import.start {
        Start::CrateRoot => (Module::new(), true),
        Start::Above(levels) => (from[..from.len().checked_sub(levels)?].to_vec(), levels > 0),
    };
    for name in &import.names {
        let next = child(&at, name);
        if !modules.contains_key(&next) {
            let mut aliases = modules.get(&at)?.aliases.iter();
            return match aliases.find(|(alias, _)| alias == name) {
                Some((_, path)) if depth < DEPTH_MAX && path != import => {
                    resolve(modules, &at, path, depth + 1)
                }
                _ => is_local.then_some(at),
            };
        }
        (at, is_local) = (next, true);
    }
    Some(at)
}

/// The names on a shortest way from the module back to it.
fn circle(graph: &Graph, start: &Module) -> Option<Vec<String>> {
    let name = |module: &Module| module.last().cloned().unwrap_or_default();
    let mut seen = BTreeSet::new();
    let mut ways = VecDeque::from([(start, vec![name(start)])]);
    while let Some((module, way)) = ways.pop_front() {
        for next in graph.get(module).into_iter().flatten() {
            let mut way = way.clone();
            way.push(name(next));
            if next == start {
                return Some(way);
            }
            if seen.insert(next) {
                ways.push_back((next, way));
            }
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each circle as `folder modules example`.
    fn circles_of(files: &[(&str, &str)]) -> Vec<String> {
        let sources = files.iter().map(|(file, text)| {
            let source = Source::parse(text).expect("the source has tokens");
            (format!("crates/x/src/{file}"), source)
        });
        let found = circles(&sources.collect());
        let lines = found
            .into_iter()
            .map(|circle| format!("{} {} {}", circle.folder, circle.modules, circle.example));
        lines.collect()
    }

    #[test]
    fn siblings_that_import_each_other_are_a_circle() {
        let files = [
            ("lib.rs", "mod a; mod b; mod c; mod d;"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "fn f() { super::c::f() }"),
            ("c.rs", "use super::a::A;"),
            ("d.rs", "use crate::a::A;"),
        ];
        assert_eq!(circles_of(&files), ["crates/x/src 3 a → b → c → a"]);
        assert!(circles_of(&files[..3]).is_empty());
    }

    #[test]
    fn folders_are_a_circle_even_if_no_file_is_in_one() {
        let files = [
            ("lib.rs", "mod outer;"),
            ("outer/mod.rs", "mod a; mod b;"),
            ("outer/a.rs", "mod one; mod two;"),
            ("outer/a/one.rs", "use crate::outer::b::one::X;"),
            ("outer/a/two.rs", ""),
            ("outer/b.rs", "mod one; mod two;"),
            ("outer/b/one.rs", ""),
            ("outer/b/two.rs", "use super::super::a::two::X;"),
        ];
        assert_eq!(circles_of(&files), ["crates/x/src/outer 2 a → b → a"]);
    }

    #[test]
    fn parents_and_children_may_use_each_other() {
        let files = [
            ("lib.rs", "mod a; use a::A; pub struct Root;"),
            ("a.rs", "mod b; use b::B; use crate::Root;"),
            ("a/b.rs", "use super::A; use crate::Root;"),
        ];
        assert!(circles_of(&files).is_empty());
    }

    #[test]
    fn names_are_followed_to_the_module_that_defines_them() {
        let files = [
            ("lib.rs", "mod a; mod b; pub use a::{A, B as Other};"),
            ("a.rs", "use crate::b::B;"),
            ("b.rs", "use crate::Other;"),
        ];
        // `Other` is b's own B, which a passes on: no circle.
        assert!(circles_of(&files).is_empty());
        let files = [files[0], files[1], ("b.rs", "use crate::A;")];
        assert_eq!(circles_of(&files), ["crates/x/src 2 a → b → a"]);
    }

    #[test]
    fn tests_and_other_crates_do_not_count() {
        let files = [
            ("lib.rs", "mod a; mod b;"),
            ("a.rs", "use std::b::B; #[cfg(test)] mod tests;"),
            ("a/tests.rs", "use crate::b::B;"),
            ("b.rs", "use crate::a::A;"),
        ];
        assert!(circles_of(&files).is_empty());
    }
}
