//! Which clusters hold metadata, so that nothing else is ever put there: an allocation from refcounts
//! that are wrong, or guest data through an entry that is (CVE-2014-0143 and others began so).

use std::collections::BTreeSet;

/// What is stored where. Tables of clusters are kept as their cluster numbers, runs as ranges.
#[derive(Default)]
pub(crate) struct Metadata {
    /// First cluster, number of clusters, name.
    runs: Vec<(u64, u64, &'static str)>,
    /// L2 tables and refcount blocks that were there at first, sorted: 8 bytes for each, and at most
    /// 4 Mi + 1 Mi of them.
    first: Vec<u64>,
    added: BTreeSet<u64>,
}

impl Metadata {
    /// Adds what is in one piece.
    pub fn add_run(&mut self, first: u64, clusters: u64, name: &'static str) {
        if clusters > 0 {
            self.runs.push((first, clusters, name));
        }
    }

    /// Forgets what is in one piece.
    pub fn remove_run(&mut self, first: u64) {
        self.runs.retain(|&(at, ..)| at != first);
    }

    /// Sets the L2 tables and refcount blocks that there are when an image is opened.
    pub fn set_tables(&mut self, mut tables: Vec<u64>) {
        tables.sort_unstable();
        tables.dedup();
        self.first = tables;
    }

    pub fn add_table(&mut self, cluster: u64) {
        self.added.insert(cluster);
    }

    /// Forgets a table.
    pub fn remove_table(&mut self, cluster: u64) {
        self.added.remove(&cluster);
        if let Ok(place) = self.first.binary_search(&cluster) {
            self.first.remove(place);
        }
    }

    /// What is in one of these clusters.
    pub fn within(&self, first: u64, clusters: u64) -> Option<&'static str> {
        let end = first.saturating_add(clusters);
        let overlaps = |&&(at, len, _): &&(u64, u64, _)| at < end && first < at + len;
        if let Some((_, _, name)) = self.runs.iter().find(overlaps) {
            return Some(name);
        }
        let place = self.first.partition_point(|&at| at < first);
        let table = self.first.get(place).is_some_and(|&at| at < end)
            || self.added.range(first..end).next().is_some();
        table.then_some("an L2 table or refcount block")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_overlaps_is_found() {
        let mut metadata = Metadata::default();
        metadata.add_run(10, 3, "L1");
        metadata.set_tables(vec![30, 20]);
        metadata.add_table(25);
        for (first, clusters, found) in [
            (0, 10, false),
            (12, 1, true),
            (13, 7, false),
            (13, 8, true),
            (25, 1, true),
            (26, 4, false),
            (26, 5, true),
        ] {
            let found_here = metadata.within(first, clusters).is_some();
            assert_eq!(found_here, found, "{first}+{clusters}");
        }
        metadata.remove_run(10);
        metadata.remove_table(20);
        assert_eq!(metadata.within(0, 25), None);
    }
}
