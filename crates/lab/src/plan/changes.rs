//! Changes to a plan's text from the command line.

use std::path::Path;

use toml::{Table, Value};

/// Returns the text with the values of `KEY=VALUE` or `TABLE.KEY=VALUE`. Commas separate the values of a list; a value with
/// commas of its own is a string in TOML's list, `["host,x2apic=off"]`. A value of `[config]` also replaces that of each case.
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
            _ if values.starts_with('[') => list(values).map_err(|e| format!("{change}: {e}"))?,
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
    make_claims_optional(&mut plan);
    toml::to_string(&plan).map_err(|e| format!("{e}"))
}

/// A list in TOML.
fn list(text: &str) -> Result<Value, String> {
    let table: Table = format!("list = {text}")
        .parse()
        .map_err(|e: toml::de::Error| e.message().trim().to_owned())?;
    match table.get("list") {
        Some(list) if table.len() == 1 => Ok(list.clone()),
        _ => Err("a list in TOML, such as [\"a\", \"b\"], is one value".into()),
    }
}

/// A change may remove what a claim compares.
fn make_claims_optional(plan: &mut Table) {
    let claims = plan.get_mut("claim").and_then(Value::as_array_mut);
    for claim in claims.into_iter().flatten().filter_map(Value::as_table_mut) {
        claim.insert("optional".into(), true.into());
    }
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

/// The disks of a plan each of whose cases names its own: [`with_backing`] leaves them. `None` for other plans.
pub fn own_disks(text: &str) -> Option<Vec<String>> {
    let plan: Table = text.parse().ok()?;
    let cases = plan.get("case").and_then(Value::as_array)?;
    let own = |case: &Value| Some(case.get("backing")?.as_str()?.to_owned());
    let disks: Option<Vec<String>> = cases.iter().map(own).collect();
    disks.filter(|disks| !disks.is_empty())
}

/// Returns the text with this storage for all configurations that do not name their own; with `create`, the lab creates and
/// removes it. Configurations that this storage cannot hold are left out, and their claims say so.
///
/// # Errors
/// The text is not TOML, or the plan is about Ceph and the storage is not in a cluster.
pub fn with_backing(text: &str, backing: &str, create: bool) -> Result<String, String> {
    let mut plan: Table = text.parse().map_err(|e| format!("{e}"))?;
    let is_rbd = |backing: &str| backing.starts_with("rbd:");
    let own = |table: &Table| Some(table.get("backing")?.as_str()?.to_owned());
    let common = plan.get("config").and_then(Value::as_table).and_then(own);
    if common.is_some_and(|common| is_rbd(&common)) && !is_rbd(backing) {
        return Err("needs a Ceph cluster: --pool POOL".into());
    }
    if own_disks(text).is_some() {
        return Ok(text.into());
    }
    let cases = plan.get("case").and_then(Value::as_array);
    let cases: Vec<&Table> = cases
        .into_iter()
        .flatten()
        .filter_map(Value::as_table)
        .collect();
    let is_impossible = |case: &Table| {
        let format = case.get("format").and_then(Value::as_str);
        format == Some("qcow2") && own(case).is_none() && !backing.ends_with('/')
    };
    let name = |case: &Table| Some(case.get("name")?.as_str()?.to_owned());
    let impossible: Vec<String> = cases
        .into_iter()
        .filter(|case| is_impossible(case))
        .filter_map(name)
        .collect();
    for (table, key, value) in [("config", "backing", Value::from(backing))]
        .into_iter()
        .chain(create.then(|| ("storage", "create", Value::from(true))))
    {
        let table = plan
            .entry(table)
            .or_insert_with(|| Value::Table(Table::new()));
        let table = table.as_table_mut().ok_or("a table of the plan is none")?;
        table.insert(key.into(), value);
    }
    let list = |plan: &mut Table, key: &str| {
        plan.get_mut(key)
            .and_then(Value::as_array_mut)
            .map(std::mem::take)
    };
    if let Some(mut cases) = list(&mut plan, "case") {
        cases.retain(|case| !case.as_table().is_some_and(is_impossible));
        plan.insert("case".into(), cases.into());
    }
    if let Some(mut claims) = list(&mut plan, "claim") {
        for claim in claims.iter_mut().filter_map(Value::as_table_mut) {
            let names = ["from", "to"].map(|key| claim.get(key).and_then(Value::as_str));
            if names
                .into_iter()
                .flatten()
                .any(|name| impossible.iter().any(|it| it == name))
            {
                claim.retain(|key, _| !["from", "to", "at"].contains(&key));
                let why = "needs a directory for image files: --backing /DIRECTORY/";
                claim.insert("untestable".into(), why.into());
            }
        }
        plan.insert("claim".into(), claims.into());
    }
    make_claims_optional(&mut plan);
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
        let cpu = set(
            "",
            &["config.cpu=[\"host,kvm-pv-eoi=off\", \"host\"]".into()],
        )
        .unwrap();
        let cpus = parse(&cpu).cases;
        assert_eq!(cpus[0].settings.get("cpu"), "host,kvm-pv-eoi=off");
        assert_eq!(cpus[1].settings.get("cpu"), "host");
        assert!(set("", &["config.cpu=[\"host".into()]).is_err());
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
    fn a_change_may_remove_what_a_claim_compares() {
        let plan = "[config]\nqueues = [1, 2]\n[[claim]]\nfrom = \"queues=1\"\nto = \"queues=2\"\nsize = \"+5 %\"\n";
        assert_eq!(parse(plan).claims[0].untestable, None);
        let changed = parse(&set(plan, &["config.queues=2,4".into()]).unwrap());
        assert!(changed.claims[0].untestable.is_some());
        // The case that differed is now the same.
        let cases = "[config]\nqueues = 1\n[[case]]\nname = \"a\"\n[[case]]\nname = \"b\"\nqueues = 2\n\
            [[claim]]\nfrom = \"a\"\nto = \"b\"\nexpect = \"gain\"\n";
        assert_eq!(parse(cases).claims[0].untestable, None);
        let changed = parse(&set(cases, &["config.queues=2".into()]).unwrap());
        assert!(changed.claims[0].untestable.is_some());
        let typing_error = plan.replace("from = \"queues=1\"", "from = \"queues=3\"");
        assert!(Plan::parse(Path::new("plan.toml"), &typing_error).is_err());
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

    #[test]
    fn configurations_that_storage_makes_the_same_are_not_compared() {
        let plan = "compare = \"previous\"\n[config]\ncache = \"none\"\naio = \"threads\"\n[[case]]\nname = \"raw\"\n\
            [[case]]\nname = \"native\"\naio = \"native\"\n[[case]]\nname = \"raw again\"\n\
            [[case]]\nname = \"scsi\"\ndevice = \"virtio-scsi\"\n\
            [[claim]]\nfrom = \"raw\"\nto = \"native\"\nexpect = \"gain\"\n";
        assert_eq!(parse(plan).cases.len(), 4);
        let pool = parse(&with_backing(plan, "rbd:bench/x", true).unwrap());
        let names: Vec<_> = pool.cases.iter().map(|case| case.name.as_str()).collect();
        // The second raw case is the user's own test of the noise.
        assert_eq!(names, ["raw", "raw again", "scsi"]);
        assert_eq!(pool.left_out, ["native: is the same as raw here"]);
        assert_eq!(
            pool.claims[0].untestable.as_deref(),
            Some("left out: native: is the same as raw here")
        );
    }

    #[test]
    fn storage_of_the_users_takes_the_place_of_files_but_not_of_what_a_case_names() {
        let plan = "[config]\naio = \"threads\"\n[[case]]\nname = \"raw\"\n[[case]]\nname = \"null\"\nbacking = \"null\"\n\
            [[case]]\nname = \"qcow2\"\nformat = \"qcow2\"\n[[claim]]\nfrom = \"qcow2\"\nto = \"raw\"\nexpect = \"gain\"\n";
        let of = |backing: &str, create| parse(&with_backing(plan, backing, create).unwrap());
        let pool = of("rbd:bench/lab-{guest}-{volume}", true);
        let names: Vec<_> = pool
            .cases
            .iter()
            .map(|case| (case.name.as_str(), case.settings.get("backing")))
            .collect();
        let image = "rbd:bench/lab-{guest}-{volume}".to_owned();
        assert_eq!(names, [("raw", image), ("null", "null".to_owned())]);
        assert!(pool.create && pool.claims[0].untestable.is_some());
        let directory = of("/mnt/nfs/", false);
        assert_eq!((directory.cases.len(), directory.create), (3, false));
        assert_eq!(directory.claims[0].untestable, None);
        let without = with_backing(plan, "/dev/vg/lab-{guest}-{volume}", true).unwrap();
        assert!(!without.contains("qcow2"), "{without}");
        let ceph = "[config]\nbacking = \"rbd:rbd/x\"\n";
        assert!(
            with_backing(ceph, "/dev/sdb", false)
                .unwrap_err()
                .contains("--pool")
        );
        assert!(with_backing(ceph, "rbd:bench/y", false).is_ok());
    }
}
