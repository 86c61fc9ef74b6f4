//! Which clusters hold metadata. Nothing else may be written there, neither by an allocation from wrong
//! refcounts nor as guest data through a wrong entry (CVE-2014-0143 and others began that way).

use std::collections::BTreeSet;

use super::types::{HostCluster, Run};

/// The clusters that hold metadata: L2 tables and refcount blocks one by one, larger structures as runs.
#[derive(Default)]
pub(crate) struct Metadata {
    /// With their names.
    runs: Vec<(Run, &'static str)>,
    /// L2 tables and refcount blocks that the image had when it was opened, sorted: 8 bytes each, and at most
    /// 4 Mi + 1 Mi of them.
    first: Vec<HostCluster>,
    added: BTreeSet<HostCluster>,
}

impl Metadata {
    /// Adds a structure that is a contiguous run.
    pub fn add_run(&mut self, run: Run, name: &'static str) {
        if run.clusters > 0 {
            self.runs.push((run, name));
        }
    }

    /// Removes the run that begins at `first`.
    pub fn remove_run(&mut self, first: HostCluster) {
        self.runs.retain(|(run, _)| run.first != first);
    }

    /// Sets the L2 tables and refcount blocks of an image that is being opened.
    pub fn set_tables(&mut self, mut tables: Vec<HostCluster>) {
        tables.sort_unstable();
        tables.dedup();
        self.first = tables;
    }

    pub fn add_table(&mut self, cluster: HostCluster) {
        self.added.insert(cluster);
    }

    /// Removes a table.
    pub fn remove_table(&mut self, cluster: HostCluster) {
        self.added.remove(&cluster);
        if let Ok(index) = self.first.binary_search(&cluster) {
            self.first.remove(index);
        }
    }

    /// The name of a structure that is in one of these clusters, if any.
    pub fn within(&self, clusters: Run) -> Option<&'static str> {
        let (first, end) = (clusters.first, clusters.end());
        let overlaps = |(run, _): &&(Run, _)| run.first < end && first < run.end();
        if let Some((_, name)) = self.runs.iter().find(overlaps) {
            return Some(name);
        }
        let index = self.first.partition_point(|&at| at < first);
        let table = self.first.get(index).is_some_and(|&at| at < end)
            || self.added.range(first..end).next().is_some();
        table.then_some("an L2 table or refcount block")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn overlaps_are_found() {
        let mut metadata = Metadata::default();
        let cluster = HostCluster::new;
        let run = |first, clusters| Run {
            first: cluster(first),
            clusters,
        };
        metadata.add_run(run(10, 3), "L1");
        metadata.set_tables(vec![cluster(30), cluster(20)]);
        metadata.add_table(cluster(25));
        for (first, clusters, found) in [
            (0, 10, false),
            (12, 1, true),
            (13, 7, false),
            (13, 8, true),
            (25, 1, true),
            (26, 4, false),
            (26, 5, true),
        ] {
            let found_here = metadata.within(run(first, clusters)).is_some();
            assert_eq!(found_here, found, "{first}+{clusters}");
        }
        metadata.remove_run(cluster(10));
        metadata.remove_table(cluster(20));
        assert_eq!(metadata.within(run(0, 25)), None);
    }
}
