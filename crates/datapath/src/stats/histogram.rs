//! Latencies in buckets whose width grows with what they hold: 16 to each power of two, so that a
//! value read back is at most 3.2 % off.

use std::sync::atomic::{AtomicU64, Ordering};

/// Buckets to a power of two.
const SUB: usize = 1 << SUB_BITS;
const SUB_BITS: u32 = 4;

/// Longer times, above 137 s, count as this many bits.
const BITS_MAX: u32 = 37;

/// The first 16 hold one nanosecond each; then come 16 for each further bit: 544, or 4352 bytes.
pub(crate) const BUCKETS: usize = SUB + (BITS_MAX - SUB_BITS) as usize * SUB;

/// A histogram that one thread fills while others look at it.
pub(crate) struct AtomicHistogram {
    buckets: [AtomicU64; BUCKETS],
    sum_ns: AtomicU64,
}

impl AtomicHistogram {
    pub fn new() -> Self {
        Self {
            buckets: [const { AtomicU64::new(0) }; BUCKETS],
            sum_ns: AtomicU64::new(0),
        }
    }

    /// `n` more that took this long.
    #[inline]
    pub fn add(&self, time_ns: u64, n: u64) {
        add(&self.buckets[bucket(time_ns)], n);
        add(&self.sum_ns, time_ns.saturating_mul(n));
    }

    pub fn add_to(&self, sum: &mut Histogram) {
        for (i, bucket) in self.buckets.iter().enumerate() {
            let n = bucket.load(Ordering::Relaxed);
            if n > 0 {
                sum.buckets_mut()[i] += n;
            }
        }
        sum.sum_ns = sum.sum_ns.wrapping_add(self.sum_ns.load(Ordering::Relaxed));
    }
}

/// Adds to a counter that only this thread changes: without the locked instruction that several threads would need.
#[inline]
pub(crate) fn add(to: &AtomicU64, n: u64) {
    to.store(
        to.load(Ordering::Relaxed).wrapping_add(n),
        Ordering::Relaxed,
    );
}

#[inline]
fn bucket(time_ns: u64) -> usize {
    let time = time_ns.min((1 << BITS_MAX) - 1);
    if time < SUB as u64 {
        return time as usize;
    }
    let shift = time.ilog2() - SUB_BITS;
    // The highest bit is 1 in each of them.
    SUB + shift as usize * SUB + ((time >> shift) as usize - SUB)
}

/// The bucket's first value, and the first beyond it.
fn bounds(bucket: usize) -> (u64, u64) {
    if bucket < SUB {
        return (bucket as u64, bucket as u64 + 1);
    }
    let shift = bucket / SUB - 1;
    let first = (SUB + bucket % SUB) as u64;
    (first << shift, (first + 1) << shift)
}

/// How many values were in which range.
#[derive(Clone, Debug, Default)]
pub struct Histogram {
    /// `None` until there is a value: most disks see no requests of most kinds.
    buckets: Vec<u64>,
    sum_ns: u64,
}

impl PartialEq for Histogram {
    fn eq(&self, other: &Self) -> bool {
        self.sum_ns == other.sum_ns && self.buckets().eq(other.buckets())
    }
}

impl Eq for Histogram {}

impl Histogram {
    fn buckets_mut(&mut self) -> &mut [u64] {
        self.buckets.resize(BUCKETS, 0);
        &mut self.buckets
    }

    /// Values.
    pub fn count(&self) -> u64 {
        self.buckets.iter().sum()
    }

    /// The sum of all values, in nanoseconds.
    pub fn sum_ns(&self) -> u64 {
        self.sum_ns
    }

    /// Their mean, in nanoseconds; `None` if there are none.
    pub fn mean_ns(&self) -> Option<u64> {
        self.sum_ns.checked_div(self.count())
    }

    /// The value that `percent` of all values do not exceed, in nanoseconds, to 3.2 %; `None` if there
    /// are none.
    pub fn percentile_ns(&self, percent: f64) -> Option<u64> {
        let count = self.count();
        let rank = (count as f64 * percent.clamp(0.0, 100.0) / 100.0).ceil() as u64;
        let mut seen = 0;
        for (i, n) in self.buckets.iter().enumerate() {
            seen += n;
            if seen >= rank.max(1) {
                let (first, end) = bounds(i);
                return Some(first.midpoint(end - 1));
            }
        }
        None
    }

    /// How many values are at most `time_ns`, to the bucket: for cumulative histograms.
    pub fn count_up_to(&self, time_ns: u64) -> u64 {
        self.buckets.iter().take(bucket(time_ns) + 1).sum()
    }

    /// The buckets that are not empty: the first value beyond each in nanoseconds, and the number of values.
    pub fn buckets(&self) -> impl Iterator<Item = (u64, u64)> {
        let all = self.buckets.iter().enumerate();
        all.filter(|(_, n)| **n > 0).map(|(i, n)| (bounds(i).1, *n))
    }

    /// A histogram of what [`buckets`](Self::buckets) and [`sum_ns`](Self::sum_ns) gave.
    pub fn from_buckets(buckets: impl IntoIterator<Item = (u64, u64)>, sum_ns: u64) -> Self {
        let mut histogram = Self {
            sum_ns,
            ..Self::default()
        };
        for (end, n) in buckets {
            let sum = &mut histogram.buckets_mut()[bucket(end.saturating_sub(1))];
            *sum = sum.saturating_add(n);
        }
        histogram
    }

    /// Adds the values of another one.
    pub fn add(&mut self, other: &Self) {
        if !other.buckets.is_empty() {
            let all = self.buckets_mut().iter_mut().zip(&other.buckets);
            all.for_each(|(n, more)| *n += more);
        }
        self.sum_ns = self.sum_ns.wrapping_add(other.sum_ns);
    }

    /// Halves how many values there are of each, so that what is added later counts more.
    pub fn fade(&mut self) {
        self.buckets.iter_mut().for_each(|n| *n /= 2);
        self.sum_ns /= 2;
    }

    /// The values since `earlier`, an older state of the same histogram.
    #[must_use]
    pub fn since(&self, earlier: &Self) -> Self {
        let before = earlier.buckets.iter().chain(std::iter::repeat(&0));
        let both = self.buckets.iter().zip(before);
        Self {
            buckets: both.map(|(n, old)| n.saturating_sub(*old)).collect(),
            sum_ns: self.sum_ns.wrapping_sub(earlier.sum_ns),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buckets_are_adjacent_and_narrow() {
        assert_eq!(bucket(0), 0);
        assert_eq!(bounds(0), (0, 1));
        for i in 1..BUCKETS {
            let (first, end) = bounds(i);
            assert_eq!(first, bounds(i - 1).1);
            assert_eq!((bucket(first), bucket(end - 1)), (i, i));
            let middle = first.midpoint(end - 1) as f64;
            let off = (end as f64 - 1.0 - middle) / (end as f64 - 1.0);
            assert!(off <= 0.032, "{off} at {first}");
        }
        assert_eq!(bounds(BUCKETS - 1).1, 1 << BITS_MAX);
        assert_eq!(bucket(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn percentiles_match_the_values() {
        let filling = AtomicHistogram::new();
        let mut values: Vec<u64> = (1..=10_000).map(|i| i * i).collect();
        values.iter().for_each(|&value| filling.add(value, 1));
        filling.add(7, 10_000);
        values.extend([7; 10_000]);
        values.sort_unstable();
        let mut histogram = Histogram::default();
        filling.add_to(&mut histogram);
        assert_eq!(histogram.count(), 20_000);
        assert_eq!(histogram.sum_ns(), values.iter().sum::<u64>());
        for percent in [0.01, 25.0, 50.0, 75.0, 90.0, 99.0, 99.9, 100.0] {
            let exact = values[(200.0 * percent) as usize - 1] as f64;
            let read = histogram.percentile_ns(percent).unwrap() as f64;
            assert!(
                (read / exact - 1.0).abs() <= 0.033,
                "{percent} %: {read}, {exact}"
            );
        }
        assert_eq!(histogram.count_up_to(7), 10_000 + 2);
        assert_eq!(histogram.buckets().map(|b| b.1).sum::<u64>(), 20_000);

        filling.add(1000, 3);
        let mut later = Histogram::default();
        filling.add_to(&mut later);
        let new = later.since(&histogram);
        assert_eq!((new.count(), new.mean_ns()), (3, Some(1000)));
        assert_eq!(Histogram::default().percentile_ns(50.0), None);
        assert_eq!(Histogram::default().mean_ns(), None);
        histogram.add(&new);
        assert_eq!(histogram, later);
        let copy = Histogram::from_buckets(later.buckets(), later.sum_ns());
        assert_eq!(copy, later);
    }
}
