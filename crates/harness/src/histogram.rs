//! Histograms of latencies. Percentiles of several guests are computed from the merged histogram: a mean of percentiles
//! is not a percentile.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The number of requests by latency in nanoseconds, with fio's resolution (1.6 %).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Vec<(u64, u64)>", into = "Vec<(u64, u64)>")]
pub struct Histogram(BTreeMap<u64, u64>);

impl From<Vec<(u64, u64)>> for Histogram {
    fn from(counts: Vec<(u64, u64)>) -> Self {
        let mut histogram = Self::default();
        counts
            .into_iter()
            .for_each(|(latency, requests)| histogram.add(latency, requests));
        histogram
    }
}

impl From<Histogram> for Vec<(u64, u64)> {
    fn from(histogram: Histogram) -> Self {
        histogram.iter().collect()
    }
}

impl Histogram {
    /// Adds requests with the same latency.
    pub fn add(&mut self, latency_ns: u64, requests: u64) {
        if requests > 0 {
            let count = self.0.entry(latency_ns).or_default();
            *count = count.saturating_add(requests);
        }
    }

    /// Adds all requests of another histogram.
    pub fn merge(&mut self, other: &Self) {
        other
            .0
            .iter()
            .for_each(|(latency, requests)| self.add(*latency, *requests));
    }

    /// A copy with a resolution of 3 %.
    #[must_use]
    pub fn coarse(&self) -> Self {
        let mut coarse = Self::default();
        for (latency, requests) in &self.0 {
            let step = 1_u64 << (64 - latency.leading_zeros()).saturating_sub(5);
            coarse.add(latency / step * step + step / 2, *requests);
        }
        coarse
    }

    /// Whether no request was counted.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The number of requests.
    pub fn requests(&self) -> u64 {
        self.0
            .values()
            .fold(0, |sum, requests| sum.saturating_add(*requests))
    }

    /// The latency that `share` (0.99) of the requests do not exceed; `None` without requests.
    pub fn percentile(&self, share: f64) -> Option<u64> {
        let wanted = (share * self.requests() as f64).ceil().max(1.0) as u64;
        let mut seen: u64 = 0;
        let reached = self.0.iter().find(|(_, requests)| {
            seen = seen.saturating_add(**requests);
            seen >= wanted
        });
        reached
            .or(self.0.iter().next_back())
            .map(|(latency, _)| *latency)
    }

    /// The mean latency; `None` without requests.
    pub fn mean(&self) -> Option<f64> {
        let sum: f64 = self
            .0
            .iter()
            .map(|(latency, requests)| *latency as f64 * *requests as f64)
            .sum();
        (!self.0.is_empty()).then(|| sum / self.requests() as f64)
    }

    /// Latencies with their counts, shortest first.
    pub fn iter(&self) -> impl Iterator<Item = (u64, u64)> {
        self.0
            .iter()
            .map(|(latency, requests)| (*latency, *requests))
    }
}

/// The latency in the middle of fio's bin (fio's `stat.c`: 64 bins for each power of two).
pub fn fio_bin_ns(bin: usize) -> u64 {
    const BITS: usize = 6;
    if bin < 2 << BITS {
        return bin as u64;
    }
    let shift = ((bin >> BITS) - 1).min(57);
    let step = (bin % (1 << BITS)) as u64;
    (((1 << BITS) + step) << shift) + (1_u64 << shift) / 2
}

/// Counts latencies while requests run, in fio's bins: adding one needs no search.
#[derive(Clone, Debug)]
pub struct Bins {
    counts: [u64; BINS],
    sum_ns: u64,
    max_ns: u64,
}

/// fio's: 29 groups of 64.
const BINS: usize = 29 << 6;

impl Default for Bins {
    fn default() -> Self {
        Self {
            counts: [0; BINS],
            sum_ns: 0,
            max_ns: 0,
        }
    }
}

impl Bins {
    /// Counts a request.
    pub fn add(&mut self, latency_ns: u64) {
        self.add_many(latency_ns, 1);
    }

    /// Counts requests with the same latency.
    pub fn add_many(&mut self, latency_ns: u64, requests: u64) {
        self.counts[fio_bin(latency_ns)] += requests;
        self.sum_ns = self
            .sum_ns
            .saturating_add(latency_ns.saturating_mul(requests));
        self.max_ns = self.max_ns.max(latency_ns);
    }

    /// Adds all requests of other bins.
    pub fn merge(&mut self, other: &Self) {
        for (requests, more) in self.counts.iter_mut().zip(&other.counts) {
            *requests += more;
        }
        self.sum_ns = self.sum_ns.saturating_add(other.sum_ns);
        self.max_ns = self.max_ns.max(other.max_ns);
    }

    /// The number of requests.
    pub fn requests(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The mean latency, exact; 0 without requests.
    pub fn mean_ns(&self) -> f64 {
        self.sum_ns as f64 / self.requests().max(1) as f64
    }

    /// The longest latency, exact.
    pub fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// Moves all counts to a histogram.
    pub fn move_to(&mut self, histogram: &mut Histogram) {
        for (bin, requests) in self.counts.iter().enumerate() {
            histogram.add(fio_bin_ns(bin), *requests);
        }
        *self = Self::default();
    }
}

/// The bin of a latency; the last bin also counts all longer ones.
fn fio_bin(latency_ns: u64) -> usize {
    let bits = 64 - latency_ns.leading_zeros() as usize;
    let shift = bits.saturating_sub(7);
    let bin = (shift << 6) + (latency_ns >> shift) as usize;
    bin.min(BINS - 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_of_all_requests_together() {
        let (mut quick, mut slow) = (Histogram::default(), Histogram::default());
        quick.add(100, 990);
        quick.add(1_000, 10);
        slow.add(50_000, 10);
        assert_eq!(quick.percentile(0.99), Some(100));
        assert_eq!(quick.percentile(0.991), Some(1_000));
        quick.merge(&slow);
        assert_eq!(quick.requests(), 1_010);
        // The mean of both guests' 99th would be 25,050.
        assert_eq!(quick.percentile(0.99), Some(1_000));
        assert_eq!(quick.percentile(1.0), Some(50_000));
        assert_eq!(Histogram::default().percentile(0.5), None);
        let coarse = quick.coarse();
        assert_eq!(coarse.requests(), quick.requests());
        assert!(
            coarse
                .iter()
                .zip(quick.iter())
                .all(|(a, b)| a.0.abs_diff(b.0) * 20 <= b.0)
        );
    }

    #[test]
    fn bins_are_those_of_fio() {
        assert_eq!([0, 63, 127].map(fio_bin_ns), [0, 63, 127]);
        assert_eq!(fio_bin_ns(128), 129); // 128 and 129
        assert_eq!(fio_bin_ns(191), 255);
        assert_eq!(fio_bin_ns(192), 258); // 256 … 259
        let all: Vec<u64> = (0..1856).map(fio_bin_ns).collect();
        assert!(all.windows(2).all(|pair| pair[0] < pair[1]));
        assert!(fio_bin_ns(usize::MAX) > 0);
        assert!((0..BINS).all(|bin| fio_bin(fio_bin_ns(bin)) == bin));
        assert_eq!(fio_bin(u64::MAX), BINS - 1);
        let mut histogram = Histogram::default();
        let mut counted = Bins::default();
        counted.add_many(1, 2);
        let mut more = Bins::default();
        more.add(300);
        more.add(70_000);
        counted.merge(&more);
        assert_eq!((counted.requests(), counted.max_ns()), (4, 70_000));
        assert_eq!(counted.mean_ns(), 70_302.0 / 4.0);
        counted.move_to(&mut histogram);
        counted.move_to(&mut histogram);
        assert_eq!(
            (histogram.requests(), histogram.percentile(0.5)),
            (4, Some(1))
        );
    }
}
