//! What the rules need to know about a source file: its functions and its paths.

use super::tokens::{Token, Word, tokens};
use anyhow::Result;

/// A path to another module or to an item in it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Import {
    pub(super) start: Start,
    pub(super) names: Vec<String>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Start {
    CrateRoot,
    /// This many modules above the file's own
    Above(usize),
}

#[derive(Default)]
pub(super) struct Source {
    /// Each function's name and number of lines
    pub(super) functions: Vec<(String, usize)>,
    pub(super) imports: Vec<Import>,
    /// The names that `use` adds to the file's module
    pub(super) aliases: Vec<(String, Import)>,
    /// The child modules that exist only for tests
    pub(super) test_modules: Vec<String>,
}

impl Source {
    /// Skips items with `#[cfg(test)]`.
    pub(super) fn parse(text: &str) -> Result<Self> {
        let mut source = Self::default();
        source.scan(&tokens(text)?, 0);
        Ok(source)
    }

    /// `depth` is the number of `mod name { … }` around the tokens.
    fn scan(&mut self, mut rest: &[Token], depth: usize) {
        while let [token, after @ ..] = rest {
            rest = match token {
                Token::Mark('#') if is_cfg_test(after) => self.skip_item(&after[1..]),
                // The end of a path that does not start with a name, such as `Vec::<u8>::new`
                Token::Mark(_) if let Some(names) = after_colons(rest) => path(names).1,
                Token::Word(word) if word.text == "use" => {
                    let end = position(after, |token| token.is_mark(';'));
                    self.scan_use(&after[..end], &[], depth);
                    &after[end..]
                }
                Token::Word(word) if word.text == "mod" => match after {
                    [Token::Word(_), Token::Group(body), after @ ..] => {
                        self.scan(&body.tokens, depth + 1);
                        after
                    }
                    _ => after,
                },
                Token::Word(word) => {
                    if word.text == "fn" {
                        self.measure(*word, after);
                    }
                    let (names, after) = path(rest);
                    if names.len() > 1 {
                        self.imports.extend(import(&names, depth));
                    }
                    after
                }
                Token::Group(group) => {
                    self.scan(&group.tokens, depth);
                    after
                }
                Token::Mark(_) | Token::Other => after,
            };
        }
    }

    /// Records the function after this `fn`, unless it is only a type or a declaration.
    fn measure(&mut self, keyword: Word, after: &[Token]) {
        let end = position(after, |token| token.is_mark(';') || token.is_braces());
        if let (Some(Token::Word(name)), Some(Token::Group(body))) = (after.first(), after.get(end))
        {
            let lines = body.last_line - keyword.line + 1;
            self.functions.push((name.text.to_owned(), lines));
        }
    }

    /// Records the paths of a `use`; `tree` is without its semicolon.
    fn scan_use(&mut self, tree: &[Token], prefix: &[String], depth: usize) {
        for tree in tree.split(|token| token.is_mark(',')) {
            let (names, after) = path(tree);
            let names = [prefix, &names].concat();
            match after_colons(after).unwrap_or(after) {
                [Token::Group(group)] => self.scan_use(&group.tokens, &names, depth),
                after => self.add_use(names, after, depth),
            }
        }
    }

    /// Records one path of a `use`; `after` is empty, `*` or `as name`.
    fn add_use(&mut self, mut names: Vec<String>, after: &[Token], depth: usize) {
        if names.len() > 1 && names.last().is_some_and(|name| name == "self") {
            names.pop();
        }
        let Some(import) = import(&names, depth) else {
            return;
        };
        let alias = match after {
            [Token::Word(_), Token::Word(alias)] => Some(alias.text.to_owned()),
            [] => names.last().cloned(),
            _ => None,
        };
        self.imports.push(import.clone());
        self.aliases
            .extend(alias.filter(|_| depth == 0).map(|alias| (alias, import)));
    }

    fn skip_item<'a, 't>(&mut self, item: &'a [Token<'t>]) -> &'a [Token<'t>] {
        let end = position(item, |token| token.is_mark(';') || token.is_braces());
        let keyword = position(item, |token| token.is_word("mod"));
        if let Some(Token::Word(name)) = item[..end].get(keyword + 1) {
            self.test_modules.push(name.text.to_owned());
        }
        &item[(end + 1).min(item.len())..]
    }
}

/// The names of the path at the start of the tokens, and the tokens after it.
fn path<'a, 't>(mut rest: &'a [Token<'t>]) -> (Vec<String>, &'a [Token<'t>]) {
    let mut names = Vec::new();
    while let [Token::Word(name), after @ ..] = rest {
        names.push(name.text.to_owned());
        rest = after;
        match after_colons(after) {
            Some(after @ [Token::Word(_), ..]) => rest = after,
            _ => break,
        }
    }
    (names, rest)
}

fn after_colons<'a, 't>(tokens: &'a [Token<'t>]) -> Option<&'a [Token<'t>]> {
    match tokens {
        [Token::Mark(':'), Token::Mark(':'), after @ ..] => Some(after),
        _ => None,
    }
}

/// Replaces the leading `crate`, `self` and `super`; `None` if the path stays in a `mod name { … }` of this file.
fn import(names: &[String], depth: usize) -> Option<Import> {
    if names.first()? == "crate" {
        return Some(Import {
            start: Start::CrateRoot,
            names: names[1..].to_vec(),
        });
    }
    let count = |keyword| names.iter().filter(|name| *name == keyword).count();
    let (supers, selves) = (count("super"), count("self"));
    if depth > supers && supers + selves > 0 {
        return None;
    }
    Some(Import {
        start: Start::Above(supers.saturating_sub(depth)),
        names: names[supers + selves..].to_vec(),
    })
}

fn is_cfg_test(after_hash: &[Token]) -> bool {
    let [Token::Group(attribute), ..] = after_hash else {
        return false;
    };
    match attribute.tokens.as_slice() {
        [name, Token::Group(condition)] => {
            name.is_word("cfg") && matches!(&condition.tokens[..], [test] if test.is_word("test"))
        }
        _ => false,
    }
}

/// The index of the first token that matches, or the number of tokens.
fn position(tokens: &[Token], matches: impl Fn(&Token) -> bool) -> usize {
    tokens.iter().position(matches).unwrap_or(tokens.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn source(text: &str) -> Source {
        Source::parse(text).expect("the source has tokens")
    }

    fn crate_path(names: &[&str]) -> Import {
        import_from(Start::CrateRoot, names)
    }

    fn import_from(start: Start, names: &[&str]) -> Import {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        Import { start, names }
    }

    #[test]
    fn functions_are_measured_from_fn_to_the_last_brace() {
        let text = "/// Fine }\n#[inline]\npub fn outer(f: fn(u8)) {\n    fn inner() {}\n    \
                    let _ = '}';\n    let _ = \"} // \";\n}\ntrait T {\n    fn declared();\n}\n";
        let expected = [("outer".to_owned(), 5), ("inner".to_owned(), 1)];
        assert_eq!(source(text).functions, expected);
    }

    #[test]
    fn each_path_of_a_use_is_an_import() {
        let found = source("use crate::{a::{self, B as C}, d::*};\nuse super::super::e::F;");
        let a = crate_path(&["a"]);
        let b = crate_path(&["a", "B"]);
        let d = crate_path(&["d"]);
        let f = import_from(Start::Above(2), &["e", "F"]);
        assert_eq!(found.imports, [a.clone(), b.clone(), d, f.clone()]);
        let aliases = [("a", a), ("C", b), ("F", f)].map(|(name, path)| (name.to_owned(), path));
        assert_eq!(found.aliases, aliases);
    }

    #[test]
    fn paths_outside_use_are_imports_also_in_macros() {
        let found = source("fn f() { assert!(crate::a::b() < Vec::<u8>::new().len()); }");
        assert_eq!(found.imports, [crate_path(&["a", "b"])]);
    }

    #[test]
    fn super_in_an_inline_module_starts_there() {
        let found =
            source("mod inline { use super::a::B; use super::super::c::D; use self::e::F; }");
        let expected = [
            import_from(Start::Above(0), &["a", "B"]),
            import_from(Start::Above(1), &["c", "D"]),
        ];
        assert_eq!(found.imports, expected);
    }

    #[test]
    fn code_for_tests_is_left_out() {
        let found = source(
            "#[cfg(test)]\nmod tests;\n#[cfg(test)]\nmod more {\n use crate::a; fn f() {} }\n\
             use crate::b;",
        );
        assert_eq!(found.test_modules, ["tests", "more"]);
        assert_eq!(found.imports, [crate_path(&["b"])]);
        assert!(found.functions.is_empty());
    }

    #[test]
    fn unbalanced_brackets_are_an_error() {
        assert!(Source::parse("fn f() { ").is_err());
        assert!(Source::parse("fn f() } ").is_err());
    }
}
