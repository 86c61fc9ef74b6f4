//! What runs of a study say about its claims.

use std::collections::BTreeMap;

use serde::Serialize;

use super::{Part, Run, Storage, Study};
use crate::analysis::{Analysis, ClaimResult, Replication};
use crate::journal::Journal;
use crate::plan::{Claim, Plan};
use crate::report;

/// The results of a study's runs, by name: a journal, or why there is none.
pub type Results = BTreeMap<String, Result<Journal, String>>;

/// A claim with its verdict.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct Finding {
    /// The table or figure.
    pub part: String,
    /// The run.
    pub run: String,
    /// The published figure in words.
    pub figure: String,
    /// The published size.
    pub published: String,
    /// The measured size with its interval; `None` if there is none that may be compared.
    pub measured: Option<String>,
    /// The verdict.
    pub verdict: String,
    /// The reason.
    pub why: String,
    /// The number of comparisons of the claim that were selected.
    pub selected: usize,
    /// The number of all comparisons of the claim.
    pub comparisons: usize,
}

/// All claims of a study, by table and figure.
pub fn findings(study: &Study, results: &Results) -> Vec<Finding> {
    let analyses: BTreeMap<&String, Analysis> = results
        .iter()
        .filter_map(|(name, result)| Some((name, Analysis::of(result.as_ref().ok()?))))
        .collect();
    let of_part = |part: &Part| {
        let Some(run) = study.run_of(part) else {
            return Vec::new();
        };
        let analysis = analyses.get(&run.name);
        let why = results.get(&run.name).and_then(|it| it.as_ref().err());
        claims(run, part, analysis, why)
            .into_iter()
            .filter(|(claim, _)| study.is_claim_of(part, claim))
            .map(|(claim, found)| finding(part, run, &claim, &found))
            .collect()
    };
    study.parts.iter().flat_map(of_part).collect()
}

/// The claims of a run, with the verdicts of its analysis, or with the reason why there is none. They are those of today's
/// recipe: what a source says does not depend on when its loads were measured.
fn claims(
    run: &Run,
    part: &Part,
    analysis: Option<&Analysis>,
    why: Option<&String>,
) -> Vec<(Claim, Replication)> {
    let claims = run
        .plan(&Storage::default())
        .map_or_else(|_| Vec::new(), |plan| plan.claims);
    let needs = |claim: &Claim| match run.needs(&part.only, claim).join(", ") {
        needs if needs.is_empty() => "was not measured".to_owned(),
        needs => format!("needs {needs}"),
    };
    let of_claim = |claim: Claim| {
        let plan = analysis.map(Analysis::plan);
        let recorded = plan.and_then(|plan| recorded(plan, &claim));
        let known = claim.untestable.as_ref().or(recorded).or(why).cloned();
        let is_tested = plan.is_some_and(|plan| plan.tests(&claim));
        let found = match (analysis, known) {
            (Some(analysis), None) if is_tested => analysis.replicate(&claim),
            (Some(analysis), None) if !analysis.journal.header.left_out.is_empty() => {
                analysis.replicate(&claim)
            }
            (_, known) => Replication {
                outcome: ClaimResult::Untestable,
                measured: None,
                interval: None,
                why: known.unwrap_or_else(|| needs(&claim)),
                selected: 0,
                comparisons: claim.comparisons,
            },
        };
        (claim, found)
    };
    claims.into_iter().map(of_claim).collect()
}

/// Why the measured plan could not test a claim, such as a disk that holds no images.
fn recorded<'a>(plan: &'a Plan, claim: &Claim) -> Option<&'a String> {
    let is_it = |it: &&Claim| it.source == claim.source && it.figure == claim.figure;
    plan.claims.iter().find(is_it)?.untestable.as_ref()
}

fn finding(part: &Part, run: &Run, claim: &Claim, found: &Replication) -> Finding {
    Finding {
        part: part.name.clone(),
        run: run.name.clone(),
        figure: claim.figure.clone(),
        published: claim.published(),
        measured: report::measured_size(found),
        verdict: found.outcome.to_string(),
        why: found.why.clone(),
        selected: found.selected,
        comparisons: found.comparisons,
    }
}
