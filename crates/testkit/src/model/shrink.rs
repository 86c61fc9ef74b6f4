//! Shortens a failing list of steps while it still fails in the same way.

use std::time::{Duration, Instant};

use super::failure::Failure;
use super::steps::{Case, Request, Step, Tool};

/// A failing case, and its failure.
pub struct Shrunk {
    pub case: Case,
    pub failure: Failure,
    /// How many times the complete case failed again, and how many times it was run again.
    pub again: (u32, u32),
}

/// How many times a case is run to find out whether it fails.
const TRIES: u32 = 5;

/// Removes steps that the failure does not need. `run` runs a case and returns its failure.
pub fn shrink(
    case: &Case,
    failure: Failure,
    limit: Duration,
    mut run: impl FnMut(&Case) -> Option<Failure>,
) -> Shrunk {
    let start = Instant::now();
    let mut again = (0, 0);
    while again.1 < TRIES && start.elapsed() < limit {
        again.1 += 1;
        again.0 += u32::from(run(case).is_some_and(|f| f.kind == failure.kind));
    }
    let mut shrunk = Shrunk {
        case: case.clone(),
        failure,
        again,
    };
    if again.0 == 0 {
        return shrunk;
    }
    // A case with a race is tried often enough that it would almost certainly have failed.
    let tries = if again.0 == again.1 {
        1
    } else {
        3 * TRIES / again.0
    };
    let mut fails = |shrunk: &mut Shrunk, smaller: Case| {
        for _ in 0..tries {
            if start.elapsed() > limit {
                return false;
            }
            if let Some(failure) = run(&smaller).filter(|f| f.kind == shrunk.failure.kind) {
                shrunk.failure = failure;
                shrunk.case = smaller;
                return true;
            }
        }
        false
    };
    // Steps after the one that fails are not needed.
    if let Some(last) = shrunk.failure.step {
        let mut smaller = shrunk.case.clone();
        smaller.steps.truncate(last + 1);
        fails(&mut shrunk, smaller);
    }
    loop {
        let before = size(&shrunk.case);
        let mut part = shrunk.case.steps.len() / 2;
        while part > 0 {
            let mut at = 0;
            while at < shrunk.case.steps.len() {
                let mut smaller = shrunk.case.clone();
                let end = (at + part).min(smaller.steps.len());
                smaller.steps.drain(at..end);
                if !fails(&mut shrunk, smaller) {
                    at += part;
                }
            }
            part /= 2;
        }
        for number in 0..shrunk.case.steps.len() {
            let mut part = requests(&mut shrunk.case.clone(), number).map_or(0, |r| r.len() / 2);
            while part > 0 {
                let mut at = 0;
                while at < requests(&mut shrunk.case, number).map_or(0, |r| r.len()) {
                    let mut smaller = shrunk.case.clone();
                    if let Some(list) = requests(&mut smaller, number) {
                        list.drain(at..(at + part).min(list.len()));
                    }
                    if !fails(&mut shrunk, smaller) {
                        at += part;
                    }
                }
                part /= 2;
            }
        }
        if size(&shrunk.case) == before || start.elapsed() > limit {
            return shrunk;
        }
    }
}

fn requests(case: &mut Case, step: usize) -> Option<&mut Vec<Request>> {
    match &mut case.steps[step] {
        Step::Requests { list, .. } => Some(list),
        Step::Tool(
            Tool::Write(list)
            | Tool::CommitInto(list)
            | Tool::Crash { requests: list, .. }
            | Tool::Daemon { requests: list, .. },
        ) => Some(list),
        _ => None,
    }
}

fn size(case: &Case) -> usize {
    let mut case = case.clone();
    let lists = (0..case.steps.len()).map(|n| requests(&mut case, n).map_or(0, |r| r.len()));
    lists.sum::<usize>() + case.steps.len()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shrinking_keeps_only_the_needed_steps() {
        let case = Case::draw(7);
        let fails = |case: &Case| {
            let kill = |s: &Step| matches!(s, Step::Start(_));
            let there = case.steps.iter().any(kill);
            there.then(|| Failure::new("test", "a start"))
        };
        let failure = fails(&case).expect("it has a start");
        let shrunk = shrink(&case, failure, Duration::from_secs(60), fails);
        assert!(matches!(shrunk.case.steps[..], [Step::Start(_)]));
        assert_eq!(shrunk.again, (TRIES, TRIES));
    }
}
