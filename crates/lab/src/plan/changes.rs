//! Changes to a plan's text from the command line.

use std::path::Path;

use toml::{Table, Value};

/// Returns the text with the values of `KEY=VALUE` or `TABLE.KEY=VALUE`. Commas separate the values of a list. A value of
/// `[config]` also replaces that of each case.
///
/// # Errors
/// The text is not TOML, or a change has no key.
pub fn set(text: &str, changes: &[String]) -> Result<String, String> {
    let mut plan: Table = text.parse().map_err(|e| format!("{e}"))?;
    for change in changes {
        let (key, values) = change
            .split_once('=')
            .ok_or_else(|| format!("'{change}' is not KEY=VALUE or TABLE.KEY=VALUE"))?;
        let value = match values.split(',').collect::<Vec<_>>()[..] {
            [value] => Value::from(value),
            ref values => Value::from(values.to_vec()),
        };
        if let Some(("config", key)) = key.split_once('.') {
            let cases = plan.get_mut("case").and_then(Value::as_array_mut);
            for case in cases.into_iter().flatten() {
                case.as_table_mut().map(|case| case.remove(key));
            }
        }
        let changed = match key.split_once('.') {
            None => plan.insert(key.into(), value),
            Some((table, key)) => {
                let table_value = plan
                    .entry(table)
                    .or_insert_with(|| Value::Table(Table::new()));
                let table_value = table_value
                    .as_table_mut()
                    .ok_or_else(|| format!("{change}: {table} is not a table"))?;
                table_value.insert(key.into(), value)
            }
        };
        drop(changed);
    }
    toml::to_string(&plan).map_err(|e| format!("{e}"))
}

/// Returns the text with another case before the last: the last case with another build of ringdisk.
///
/// # Errors
/// The text is not TOML, or ringdisk does not serve its last case.
pub fn with_baseline(text: &str, build: &Path) -> Result<String, String> {
    let mut plan: Table = text.parse().map_err(|e| format!("{e}"))?;
    let build = std::path::absolute(build).map_err(|e| format!("{}: {e}", build.display()))?;
    let cases = plan.get_mut("case").and_then(Value::as_array_mut);
    let cases = cases.ok_or("--baseline needs a plan with [[case]]")?;
    let last = cases.pop().ok_or("--baseline needs a plan with [[case]]")?;
    let mut baseline = last
        .as_table()
        .filter(|case| {
            case.get("server")
                .is_none_or(|it| it.as_str() == Some("ringdisk"))
        })
        .ok_or("--baseline needs a plan whose last case is served by ringdisk")?
        .clone();
    baseline.insert("name".into(), "baseline".into());
    let server = format!("ringdisk:{}", build.display());
    baseline.insert("server".into(), server.into());
    cases.push(baseline.into());
    cases.push(last);
    toml::to_string(&plan).map_err(|e| format!("{e}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::Plan;

    const PLAN: &str = "guest = \"none\"\ncompare = \"last\"\n[config]\ndevice = \"vhost-user-blk\"\n\
        [[case]]\nname = \"a\"\nserver = \"qemu-storage-daemon\"\n[[case]]\nname = \"b\"\nserver = \"ringdisk\"\n";

    fn parse(text: &str) -> Plan {
        Plan::parse(Path::new("plan.toml"), text).unwrap()
    }

    #[test]
    fn values_take_the_place_of_the_plans() {
        let changes = ["blocks=4", "fio.iodepth=1,32", "fio.runtime=500ms"].map(str::to_owned);
        let plan = parse(&set(PLAN, &changes).unwrap());
        let ringdisk = parse(&set(PLAN, &["config.server=ringdisk".into()]).unwrap());
        assert_eq!(ringdisk.cases[0].settings.get("server"), "ringdisk");
        assert_eq!((plan.blocks_max, plan.workloads.len()), (4, 2));
        assert_eq!(plan.runtime.as_millis(), 500);
        assert!(
            set(PLAN, &["blocks".into()])
                .unwrap_err()
                .contains("KEY=VALUE")
        );
        assert!(
            set(PLAN, &["guest.x=1".into()])
                .unwrap_err()
                .contains("not a table")
        );
    }

    #[test]
    fn another_build_stands_before_the_last_case() {
        let plan = parse(&with_baseline(PLAN, Path::new("/old")).unwrap());
        let cases: Vec<_> = plan
            .cases
            .iter()
            .map(|case| (case.name.as_str(), case.settings.get("server")))
            .collect();
        assert_eq!(cases[1], ("baseline", "ringdisk:/old".to_owned()));
        assert_eq!(cases[2].0, "b");
        assert_eq!(plan.contrasts, [(0, 2), (1, 2)]);
        assert!(with_baseline("guest = \"none\"\n", Path::new("/old")).is_err());
    }
}
