//! Published studies as data: each table and figure, and the recipe that runs it.

pub mod bundle;
pub mod document;
pub mod findings;
pub mod run;

use std::path::Path;

use serde::Deserialize;

use crate::plan::words::{Device, GuestKind, StorageKind, not_one_of};
use crate::plan::{Claim, Filter, Plan, Settings, changes};
use crate::recipes;

/// The name and the text of each study.
pub const STUDIES: [(&str, &str); 5] = [
    ("000", include_str!("../studies/000.toml")),
    ("001", include_str!("../studies/001.toml")),
    ("002", include_str!("../studies/002.toml")),
    ("003", include_str!("../studies/003.toml")),
    ("004", include_str!("../studies/004.toml")),
];

/// A published study.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Study {
    /// The document's title.
    pub title: String,
    /// Its author.
    pub author: String,
    /// Its year.
    pub year: u16,
    /// The start of `source` in claims of this study; a comma and a place follow.
    pub source: String,
    /// What it measured, in a sentence or two.
    pub about: String,
    /// The runs of the lab that measure it.
    #[serde(rename = "run")]
    pub runs: Vec<Run>,
    /// Its tables and figures.
    #[serde(rename = "part")]
    pub parts: Vec<Part>,
}

/// A run of the lab.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Run {
    /// A name, unique in the study.
    pub name: String,
    /// The recipe, if the name is not its.
    pub recipe: Option<String>,
    /// Changes to it, as those of `--set`.
    #[serde(default)]
    pub set: Vec<String>,
    /// The part of it that is run, as `--only`.
    #[serde(default)]
    pub only: Vec<String>,
}

/// A table or figure.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Part {
    /// What it is, and its title.
    pub name: String,
    /// What it shows.
    pub shows: String,
    /// The run that measures it.
    pub run: Option<String>,
    /// The part of that run which is this figure, as `--only`.
    #[serde(default)]
    pub only: Vec<String>,
    /// The places in the sources of its claims.
    #[serde(default)]
    pub claims: Vec<String>,
    /// Why the lab cannot measure it anywhere.
    pub needs: Option<String>,
}

/// The storage on which a study runs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Storage {
    /// The value of `backing`; `None` is what the recipes have, which is local files for most.
    pub backing: Option<String>,
    /// Whether the lab creates and removes these disks.
    pub create: bool,
}

impl Storage {
    /// Images that the lab creates in a pool of a Ceph cluster.
    pub fn pool(pool: &str) -> Self {
        Self {
            backing: Some(format!("rbd:{pool}/lab-{{guest}}-{{volume}}")),
            create: true,
        }
    }
}

impl Study {
    /// The study with this name.
    ///
    /// # Errors
    /// There is none; the message has the nearest name.
    pub fn named(name: &str) -> Result<Study, String> {
        let names: Vec<&str> = STUDIES.iter().map(|study| study.0).collect();
        let found = STUDIES.iter().find(|study| study.0 == name);
        let (name, text) = found.ok_or_else(|| not_one_of(name, &names))?;
        toml::from_str(text).map_err(|e| format!("study {name}: {e}"))
    }

    /// The run of a part; `None` if the lab cannot measure it.
    pub fn run_of(&self, part: &Part) -> Option<&Run> {
        let name = part.run.as_ref()?;
        self.runs.iter().find(|run| &run.name == name)
    }

    /// Whether a claim of a recipe belongs to this part.
    pub fn is_claim_of(&self, part: &Part, claim: &Claim) -> bool {
        let mut places = part.claims.iter();
        places.any(|place| claim.source == format!("{}, {place}", self.source))
    }
}

impl Run {
    /// The recipe's name.
    pub fn recipe(&self) -> &str {
        self.recipe.as_ref().unwrap_or(&self.name)
    }

    /// The text of the plan on this storage.
    ///
    /// # Errors
    /// The recipe cannot use the storage, and needs another.
    pub fn text(&self, storage: &Storage) -> Result<String, String> {
        let text = recipes::text(self.recipe())
            .ok_or_else(|| format!("there is no recipe {}", self.recipe()))?;
        let text = changes::set(text, &self.set)?;
        match &storage.backing {
            Some(backing) => changes::with_backing(&text, backing, storage.create),
            None => Ok(text),
        }
    }

    /// The selected part of the plan on this storage.
    ///
    /// # Errors
    /// As [`Run::text`].
    pub fn plan(&self, storage: &Storage) -> Result<Plan, String> {
        let file = format!("{}.toml", self.recipe());
        let plan =
            Plan::parse(Path::new(&file), &self.text(storage)?).map_err(|e| e.to_string())?;
        plan.selected_by(&filters(&self.only)?)
    }

    /// The command that measures this run of a study, or with `only`, a part of it.
    pub fn command(&self, study: &str, only: &[String]) -> String {
        let quoted = |text: &String| match text.contains([' ', '+', '{', ';']) {
            true => format!("\"{text}\""),
            false => text.clone(),
        };
        let onlys = only.iter().map(|it| format!(" --only {}", quoted(it)));
        format!("ringdisk lab study {study} --run {}", self.name) + &onlys.collect::<String>()
    }

    /// What a claim of this run needs from a host that not every host has; `only` selects its part of the run.
    pub fn needs(&self, only: &[String], claim: &Claim) -> Vec<String> {
        let plan = self.plan(&Storage::default());
        let Ok(plan) = plan.and_then(|plan| plan.selected_by(&filters(only)?)) else {
            return Vec::new();
        };
        let mut sides: Vec<usize> = plan
            .contrasts_of(claim)
            .flat_map(|(from, to)| [from, to])
            .collect();
        if sides.is_empty() {
            sides = (0..plan.cases.len()).collect();
        }
        sides.sort_unstable();
        sides.dedup();
        let settings = || sides.iter().map(|side| &plan.cases[*side].settings);
        let mut needs = Vec::new();
        if plan.guest != GuestKind::None && settings().any(|it| it.device != Device::Host) {
            let most = |of: &dyn Fn(&Settings) -> u16| settings().map(of).max().unwrap_or(1);
            needs.push("KVM".to_owned());
            needs.push(match (most(&|it| it.guests), most(&|it| it.vcpus)) {
                (1, 1) => "a guest of 1 vCPU".into(),
                (1, vcpus) => format!("a guest of {vcpus} vCPUs"),
                (guests, vcpus) => format!("{guests} guests of {vcpus} vCPUs"),
            });
        }
        let named: Vec<String> = settings()
            .filter(|settings| !settings.backing.is_rbd())
            .filter_map(|settings| Some(settings.backing.first()?.to_string()))
            .collect();
        match claim.storage[..] {
            [StorageKind::Rbd] => needs.push("a Ceph cluster (`--pool`)".to_owned()),
            [StorageKind::Device] if named.is_empty() => {
                needs.push("block devices (`--backing`)".to_owned());
            }
            _ => needs.extend(named.into_iter().map(|path| format!("the volume {path}"))),
        }
        if settings().any(|it| it.krbd) {
            needs.push("the kernel's RBD client".into());
        }
        if settings().any(|it| it.hugepages) {
            needs.push("reserved huge pages".into());
        }
        needs
    }
}

/// Filters of `--only`.
pub fn filters(only: &[String]) -> Result<Vec<Filter>, String> {
    only.iter().map(|filter| filter.parse()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn storages() -> [Storage; 4] {
        let backing = |text: &str, create| Storage {
            backing: Some(text.into()),
            create,
        };
        [
            Storage::default(),
            Storage::pool("bench"),
            backing("/dev/vg0/lab-{guest}-{volume}", true),
            backing("/mnt/nfs/", false),
        ]
    }

    #[test]
    fn every_table_and_figure_has_a_run_that_selects_something_or_says_what_it_needs() {
        for (name, _) in STUDIES {
            let study = Study::named(name).unwrap();
            assert!(!study.about.is_empty() && study.year > 2000, "{name}");
            for part in &study.parts {
                let what = format!("{name}: {}", part.name);
                assert_ne!(part.run.is_some(), part.needs.is_some(), "{what}");
                let Some(run) = study.run_of(part) else {
                    assert!(part.run.is_none(), "{what}: no such run");
                    assert!(part.claims.is_empty() && part.only.is_empty(), "{what}");
                    continue;
                };
                let plan = run.plan(&Storage::default());
                let plan = plan.unwrap_or_else(|e| panic!("{what}: {e}"));
                let selected = plan.selected_by(&filters(&part.only).unwrap());
                let selected = selected.unwrap_or_else(|e| panic!("{what}: {e}"));
                // A single configuration is the base of another part's comparison.
                let compares = !selected.contrasts.is_empty() || selected.cases.len() == 1;
                assert!(compares, "{what} compares nothing");
                for place in &part.claims {
                    let source = format!("{}, {place}", study.source);
                    let mut claims = selected
                        .claims
                        .iter()
                        .filter(|claim| claim.source == source);
                    assert!(
                        claims.any(|claim| selected.tests(claim) || claim.untestable.is_some()),
                        "{what}: no comparison for {source}"
                    );
                }
            }
        }
    }

    #[test]
    fn every_claim_of_a_recipe_belongs_to_a_table_or_figure() {
        let studies = STUDIES.map(|(name, _)| Study::named(name).unwrap());
        for study in &studies {
            for run in &study.runs {
                let plan = run.plan(&Storage::default()).unwrap();
                let own = plan
                    .claims
                    .iter()
                    .filter(|it| it.source.starts_with(&study.source));
                for claim in own {
                    let belongs = |part: &Part| study.is_claim_of(part, claim);
                    assert!(
                        study.parts.iter().any(belongs),
                        "{}: {}",
                        study.title,
                        claim.source
                    );
                }
            }
        }
        for (name, text) in recipes::RECIPES {
            let plan = Plan::parse(Path::new("recipe"), text).unwrap();
            for claim in &plan.claims {
                let mut of = studies
                    .iter()
                    .filter(|it| claim.source.starts_with(&it.source));
                let is_run = |it: &Study| it.runs.iter().any(|run| run.recipe() == name);
                assert!(
                    of.all(is_run),
                    "{name}: {} is not run by its study",
                    claim.source
                );
            }
        }
    }

    #[test]
    fn every_run_is_a_plan_on_files_in_a_pool_on_volumes_and_in_a_directory() {
        for (name, _) in STUDIES {
            let study = Study::named(name).unwrap();
            for run in &study.runs {
                let what = format!("{name}: {}", run.name);
                let is_used = |part: &Part| part.run.as_ref() == Some(&run.name);
                assert!(study.parts.iter().any(is_used), "{what} measures no part");
                for storage in storages() {
                    match run.plan(&storage) {
                        Ok(plan) => assert!(!plan.contrasts.is_empty(), "{what} {storage:?}"),
                        Err(why) => assert!(why.contains("--pool"), "{what} {storage:?}: {why}"),
                    }
                }
                assert!(run.plan(&Storage::default()).is_ok(), "{what}");
                assert!(run.plan(&Storage::pool("bench")).is_ok(), "{what}");
            }
        }
    }

    #[test]
    fn a_claim_needs_what_its_two_sides_need() {
        let needs = |study: &str, run: &str, only: &[&str], place: &str| {
            let study = Study::named(study).unwrap();
            let run = study.runs.iter().find(|it| it.name == run).unwrap();
            let only: Vec<String> = only.iter().map(|it| (*it).to_owned()).collect();
            let plan = run.plan(&Storage::default()).unwrap();
            let source = format!("{}, {place}", study.source);
            let claim = plan.claims.iter().find(|it| it.source == source).unwrap();
            run.needs(&only, claim)
        };
        let cluster = "a Ceph cluster (`--pool`)";
        assert_eq!(
            needs("004", "rbd-cache", &[], "sequential writes"),
            [cluster]
        );
        assert_eq!(
            needs("000", "rbd-clients", &["volumes=1"], "baseline"),
            [cluster, "the kernel's RBD client"]
        );
        assert_eq!(
            needs("003", "thin-chunk", &[], "thin pool"),
            [
                "the volume /dev/lab/thin-64k",
                "the volume /dev/lab/thin-4m"
            ]
        );
        let of_guest = needs("000", "ladder", &[], "step 3");
        assert_eq!(of_guest, ["KVM", "a guest of 2 vCPUs", cluster]);
    }

    #[test]
    fn the_same_configurations_on_a_pool_have_no_verdict() {
        let study = Study::named("002").unwrap();
        let run = study.runs.iter().find(|it| it.name == "backends").unwrap();
        let plan = run.plan(&Storage::pool("bench")).unwrap();
        for &(from, to) in &plan.contrasts {
            let (from, to) = (&plan.cases[from], &plan.cases[to]);
            let differences = from.settings.differences(&to.settings);
            assert!(!differences.is_empty(), "{} and {}", from.name, to.name);
        }
        let native = plan
            .claims
            .iter()
            .find(|it| it.source.ends_with("I/O model"));
        let why = native.unwrap().untestable.as_deref().unwrap();
        assert!(why.contains("native: is the same as raw"), "{why}");
    }

    #[test]
    fn an_unknown_study_is_an_error_with_the_known_ones() {
        assert!(Study::named("005").unwrap_err().contains("000, 001"));
    }

    #[test]
    fn commands_can_be_pasted_into_a_shell() {
        let study = Study::named("000").unwrap();
        let part = study
            .parts
            .iter()
            .find(|part| part.name.contains("3. Adding"));
        let part = part.unwrap();
        assert_eq!(
            study.run_of(part).unwrap().command("000", &part.only),
            "ringdisk lab study 000 --run ladder --only \"case=virtio-blk,+ iothread\""
        );
    }
}
