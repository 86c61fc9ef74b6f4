//! Conditions: `property operator value`, or several of these separated by ` or `.
//!
//! | condition | true if the property | if the property is unknown |
//! |---|---|---|
//! | `p = a\|b` | is one of these | unknown |
//! | `p != a\|b` | is none of these | unknown |
//! | `p isnt a\|b` | is none of these | true |
//! | `p < v`, `<=`, `>`, `>=` | compares so; `v` may be a property | unknown |
//! | `p is given`, `p is default` | is set in the input, or is not | false |
//! | `p is known`, `p is unknown`, `p is absent` | | |
//!
//! Conditions on an absent property (such as the cache mode of a disk that QEMU does not open) are false. A property of the
//! host is unknown rather than absent if there are no facts.

use super::Scope;
use crate::model::{Data, Kind, Origin, PROPERTIES, Table, Value};
use crate::work;

/// Conditions of which at least one must hold.
pub type Clause = Vec<Atom>;

/// One comparison.
#[derive(Clone, Debug, PartialEq)]
pub struct Atom {
    pub property: &'static str,
    test: Test,
}

#[derive(Clone, Debug, PartialEq)]
enum Test {
    In(Vec<Data>),
    NotIn(Vec<Data>),
    IsNot(Vec<Data>),
    Order(Order, Operand),
    Given,
    Default,
    Known,
    Unknown,
    Absent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Less,
    LessEqual,
    Greater,
    GreaterEqual,
}

#[derive(Clone, Debug, PartialEq)]
enum Operand {
    Value(Data),
    Property(&'static str),
}

/// Whether conditions hold.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Holds,
    Fails,
    /// It depends on these unknown properties.
    Unknown(Vec<&'static str>),
}

/// The tables in which properties are looked up, in this order.
#[derive(Clone, Copy, Default)]
pub struct Lookup<'a> {
    /// The disk's or the device's table
    pub own: Option<&'a Table>,
    pub vm: Option<&'a Table>,
    pub host: Option<&'a Table>,
}

impl<'a> Lookup<'a> {
    pub fn get(&self, name: &str) -> Option<&'a Value> {
        [self.own, self.vm, self.host]
            .into_iter()
            .flatten()
            .find_map(|table| table.get(name))
    }
}

/// Parses a clause.
///
/// # Errors
/// A condition is invalid.
pub fn clause(text: &str, scope: Scope) -> Result<Clause, String> {
    text.split(" or ").map(|text| atom(text, scope)).collect()
}

fn atom(text: &str, scope: Scope) -> Result<Atom, String> {
    let mut words = text.split_whitespace();
    let (Some(name), Some(operator)) = (words.next(), words.next()) else {
        return Err(format!("'{text}' is not a condition"));
    };
    let rest: Vec<&str> = words.collect();
    let rest = rest.join(" ");
    let property = PROPERTIES
        .iter()
        .find(|property| property.name == name)
        .ok_or_else(|| format!("there is no property '{name}'"))?;
    let fits = match name.split('.').next().unwrap_or_default() {
        "disk" | "backing" => scope == Scope::Disk,
        "device" => scope == Scope::Device,
        "vm" => matches!(scope, Scope::Disk | Scope::Vm),
        _ => true,
    };
    if !fits {
        return Err(format!("'{name}' is not available in this scope"));
    }
    let one = |text: &str| -> Result<Data, String> {
        let data = match property.kind {
            Kind::Word(_) => Data::Word(text.to_owned().into()),
            Kind::Number => Data::Number(
                crate::qemu::size_of(text).ok_or_else(|| format!("'{text}' is not a number"))?,
            ),
            Kind::Version => Data::Version(
                text.parse()
                    .map_err(|()| format!("'{text}' is not a version"))?,
            ),
        };
        if !property.allows(&data) {
            return Err(format!("{name} is never '{text}'"));
        }
        Ok(data)
    };
    let several = || rest.split('|').map(one).collect::<Result<Vec<_>, _>>();
    let ordered = |order| {
        if matches!(property.kind, Kind::Word(_)) {
            return Err(format!("{name} has no order"));
        }
        let operand = match PROPERTIES.iter().find(|other| other.name == rest) {
            Some(other) if other.kind == property.kind => Operand::Property(other.name),
            Some(other) => return Err(format!("{name} cannot be compared with {}", other.name)),
            None => Operand::Value(one(&rest)?),
        };
        Ok(Test::Order(order, operand))
    };
    let test = match (operator, rest.as_str()) {
        ("=", _) => Test::In(several()?),
        ("!=", _) => Test::NotIn(several()?),
        ("isnt", _) => Test::IsNot(several()?),
        ("<", _) => ordered(Order::Less)?,
        ("<=", _) => ordered(Order::LessEqual)?,
        (">", _) => ordered(Order::Greater)?,
        (">=", _) => ordered(Order::GreaterEqual)?,
        ("is", "given") => Test::Given,
        ("is", "default") => Test::Default,
        ("is", "known") => Test::Known,
        ("is", "unknown") => Test::Unknown,
        ("is", "absent") => Test::Absent,
        _ => return Err(format!("'{text}': there is no operator '{operator}'")),
    };
    Ok(Atom {
        property: property.name,
        test,
    })
}

/// Whether all clauses hold.
pub fn evaluate(clauses: &[Clause], lookup: &Lookup<'_>) -> Verdict {
    let mut unknown = Vec::new();
    for clause in clauses {
        let mut open = Vec::new();
        let mut holds = false;
        for atom in clause {
            match atom.evaluate(lookup) {
                Verdict::Holds => {
                    holds = true;
                    break;
                }
                Verdict::Fails => {}
                Verdict::Unknown(properties) => open.extend(properties),
            }
        }
        if !holds && open.is_empty() {
            return Verdict::Fails;
        }
        if !holds {
            unknown.append(&mut open);
        }
    }
    unknown.sort_unstable();
    unknown.dedup();
    if unknown.is_empty() {
        return Verdict::Holds;
    }
    Verdict::Unknown(unknown)
}

impl Atom {
    /// Whether it compares the property with a value.
    pub fn compares(&self) -> bool {
        !matches!(
            self.test,
            Test::Known | Test::Unknown | Test::Absent | Test::IsNot(_)
        )
    }

    /// The word that the property must be, if it is only one.
    pub(super) fn word(&self) -> Option<&str> {
        match &self.test {
            Test::In(words) => match &words[..] {
                [Data::Word(word)] => Some(word),
                _ => None,
            },
            _ => None,
        }
    }

    /// Whether the host can know the property: it can inspect only files and block devices.
    fn is_possible(&self, lookup: &Lookup<'_>) -> bool {
        let local = || match lookup.get("disk.protocol").map(|value| &value.data) {
            Some(Data::Word(protocol)) => matches!(protocol.as_ref(), "file" | "block"),
            _ => false,
        };
        !self.property.starts_with("backing.") || local()
    }

    fn evaluate(&self, lookup: &Lookup<'_>) -> Verdict {
        work::step();
        let found = lookup.get(self.property);
        let value = match found.map(|value| &value.data) {
            None if may_be_unknown(self.property) && self.is_possible(lookup) => None,
            None => {
                return match self.test {
                    Test::IsNot(_) | Test::Absent => Verdict::Holds,
                    _ => Verdict::Fails,
                };
            }
            Some(Data::Unknown) => None,
            Some(data) => Some(data),
        };
        let truth = |holds: bool| {
            if holds {
                Verdict::Holds
            } else {
                Verdict::Fails
            }
        };
        let unknown = || Verdict::Unknown(vec![self.property]);
        match (&self.test, value) {
            (Test::Known, value) => truth(value.is_some()),
            (Test::Unknown, value) => truth(value.is_none()),
            (Test::IsNot(_), None) => Verdict::Holds,
            (Test::Absent, value) => truth(value.is_none() && found.is_none()),
            (Test::Given | Test::Default, None) => Verdict::Fails,
            (_, None) => unknown(),
            (Test::In(words), Some(data)) => truth(words.contains(data)),
            (Test::NotIn(words) | Test::IsNot(words), Some(data)) => truth(!words.contains(data)),
            (Test::Given, Some(_)) => {
                truth(found.is_some_and(|value| matches!(value.origin, Origin::Given(_))))
            }
            (Test::Default, Some(_)) => {
                truth(found.is_some_and(|value| matches!(value.origin, Origin::Default(_))))
            }
            (Test::Order(order, operand), Some(data)) => {
                let other = match operand {
                    Operand::Value(value) => value,
                    Operand::Property(name) => match lookup.get(name).map(|value| &value.data) {
                        Some(data) if *data != Data::Unknown => data,
                        _ => return Verdict::Unknown(vec![name]),
                    },
                };
                let ordering = match (data, other) {
                    (Data::Number(a), Data::Number(b)) => a.cmp(b),
                    (Data::Version(a), Data::Version(b)) => a.cmp(b),
                    _ => return Verdict::Fails,
                };
                truth(match order {
                    Order::Less => ordering.is_lt(),
                    Order::LessEqual => ordering.is_le(),
                    Order::Greater => ordering.is_gt(),
                    Order::GreaterEqual => ordering.is_ge(),
                })
            }
        }
    }
}

/// Whether an absent property is unknown: the host has it, or only some configurations say it.
fn may_be_unknown(property: &str) -> bool {
    ["host.", "backing.", "ceph.", "device.", "measured."]
        .iter()
        .any(|prefix| property.starts_with(prefix))
        || matches!(
            property,
            "vm.qemu" | "vm.malloc" | "vm.memory" | "disk.store-thin"
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::Span;
    use crate::version::Version;

    #[test]
    fn conditions_hold_or_fail_or_are_unknown() {
        let mut disk = Table::default();
        disk.give("disk.cache", "none", Span::default());
        disk.default_to("disk.queues", 4u64, "QEMU");
        let mut host = Table::default();
        host.set(
            "host.kernel",
            Version(6, 1, 0),
            Origin::Fact("uname".into()),
        );
        let lookup = Lookup {
            own: Some(&disk),
            vm: None,
            host: Some(&host),
        };
        for (text, expected) in [
            ("disk.cache = none|writeback", Some(true)),
            ("disk.cache != none", Some(false)),
            ("disk.cache is given", Some(true)),
            ("disk.queues is given", Some(false)),
            ("disk.queues >= 4", Some(true)),
            ("disk.queues < 4", Some(false)),
            ("host.kernel < 6.2", Some(true)),
            ("host.kernel > 6.1.0", Some(false)),
            ("host.thp = never", None),
            ("host.thp isnt never", Some(true)),
            ("host.thp is unknown", Some(true)),
            ("host.thp = never or disk.cache = none", Some(true)),
            ("host.thp = never or disk.cache = unsafe", None),
            ("disk.aio = threads", Some(false)),
            ("disk.aio isnt threads", Some(true)),
        ] {
            let clause = clause(text, Scope::Disk).unwrap();
            let verdict = evaluate(&[clause], &lookup);
            let answer = match verdict {
                Verdict::Holds => Some(true),
                Verdict::Fails => Some(false),
                Verdict::Unknown(names) => {
                    assert_eq!(names, ["host.thp"]);
                    None
                }
            };
            assert_eq!(answer, expected, "{text}");
        }
    }

    #[test]
    fn invalid_conditions_are_refused() {
        for (text, says) in [
            ("disk.cash = none", "no property"),
            ("disk.cache = fast", "never"),
            ("disk.cache < none", "no order"),
            ("disk.queues = many", "not a number"),
            ("disk.queues", "not a condition"),
            ("disk.queues ~ 3", "no operator"),
            ("device.nvme = yes", "not available"),
            ("disk.queues < host.kernel", "cannot be compared"),
        ] {
            let error = clause(text, Scope::Disk).unwrap_err();
            assert!(error.contains(says), "{text}: {error}");
        }
    }
}
