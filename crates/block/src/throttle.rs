use thiserror::Error;

/// The limit of one kind of traffic.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Average per second; 0 for no limit.
    pub average: u64,
    /// Burst rate per second; 0 allows no burst, except to compensate for a late timer.
    pub max: u64,
    /// How long a burst at `max` may last, in seconds.
    pub max_length: u64,
}

/// The limits of a disk or of a group of disks, with QEMU's names (`ThrottleLimits` in its QAPI schema).
/// Bandwidth is in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ThrottleLimits {
    /// `bps`, `bps-total`.
    pub bps_total: Rate,
    /// `bps_rd`, `bps-read`.
    pub bps_read: Rate,
    /// `bps_wr`, `bps-write`.
    pub bps_write: Rate,
    /// `iops`, `iops-total`.
    pub iops_total: Rate,
    /// `iops_rd`, `iops-read`.
    pub iops_read: Rate,
    /// `iops_wr`, `iops-write`.
    pub iops_write: Rate,
    /// A request larger than this many bytes counts in proportion to its size (as 1.5 requests if it is 1.5
    /// times as large). With 0, every request counts as one.
    pub iops_size: u64,
}

/// Why throttle limits are rejected.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ThrottleError {
    /// A total limit was combined with a read or write limit.
    #[error("{0} total and {0} read or write limits exclude each other; give one or the other")]
    TotalAndPart(&'static str),
    /// A burst was given for a value without a limit.
    #[error("{0}: a burst (max) needs a limit of its own, as in {0}=1000")]
    BurstWithoutLimit(&'static str),
    /// The burst rate is below the average rate.
    #[error("{0}: a burst (max) below the limit would never be reached; make it larger")]
    BurstBelowLimit(&'static str),
    /// A burst length was given without a burst rate.
    #[error("{0}: a length of bursts (max-length) needs a burst, {0} max")]
    LengthWithoutBurst(&'static str),
    /// A value is larger than the arithmetic supports without overflow.
    #[error("{0}: {1} is more than the largest limit, {LIMIT_MAX}")]
    TooLarge(&'static str, u64),
    /// `iops-size` was given without an operation limit.
    #[error("iops-size without a limit of operations; give iops")]
    SizeWithoutIops,
}

/// The largest rate, and the largest product of a burst's rate and length; the same as in QEMU.
const LIMIT_MAX: u64 = 1_000_000_000_000_000;

impl Default for ThrottleLimits {
    fn default() -> Self {
        Self::NONE
    }
}

impl ThrottleLimits {
    /// No limit.
    pub const NONE: Self = {
        let none = Rate {
            average: 0,
            max: 0,
            max_length: 1,
        };
        Self {
            bps_total: none,
            bps_read: none,
            bps_write: none,
            iops_total: none,
            iops_read: none,
            iops_write: none,
            iops_size: 0,
        }
    };

    /// Whether any limit is set.
    pub fn is_limited(&self) -> bool {
        self.rates().iter().any(|(_, rate)| rate.average > 0)
    }

    fn rates(&self) -> [(&'static str, Rate); 6] {
        [
            ("bps", self.bps_total),
            ("bps_rd", self.bps_read),
            ("bps_wr", self.bps_write),
            ("iops", self.iops_total),
            ("iops_rd", self.iops_read),
            ("iops_wr", self.iops_write),
        ]
    }

    /// Makes the same checks as QEMU.
    ///
    /// # Errors
    /// The limits contradict each other.
    pub fn check(&self) -> Result<(), ThrottleError> {
        let part = |rate: Rate| rate.average > 0 || rate.max > 0;
        for (name, total, parts) in [
            ("bps", self.bps_total, [self.bps_read, self.bps_write]),
            ("iops", self.iops_total, [self.iops_read, self.iops_write]),
        ] {
            if part(total) && parts.into_iter().any(part) {
                return Err(ThrottleError::TotalAndPart(name));
            }
        }
        for (name, rate) in self.rates() {
            if rate.max > 0 && rate.average == 0 {
                return Err(ThrottleError::BurstWithoutLimit(name));
            }
            if rate.max > 0 && rate.max < rate.average {
                return Err(ThrottleError::BurstBelowLimit(name));
            }
            if rate.max_length > 1 && rate.max == 0 {
                return Err(ThrottleError::LengthWithoutBurst(name));
            }
            let burst = rate.max.saturating_mul(rate.max_length.max(1));
            if let Some(&value) = [rate.average, burst].iter().find(|&&n| n > LIMIT_MAX) {
                return Err(ThrottleError::TooLarge(name, value));
            }
        }
        let iops = [self.iops_total, self.iops_read, self.iops_write];
        if self.iops_size > 0 && iops.iter().all(|rate| rate.average == 0) {
            return Err(ThrottleError::SizeWithoutIops);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contradictory_limits_are_refused() {
        let rate = |average, max, max_length| Rate {
            average,
            max,
            max_length,
        };
        let none = ThrottleLimits::NONE;
        assert_eq!(none.check(), Ok(()));
        for (limits, says) in [
            (
                ThrottleLimits {
                    iops_total: rate(1, 0, 1),
                    iops_read: rate(1, 0, 1),
                    ..none
                },
                "exclude each other",
            ),
            (
                ThrottleLimits {
                    bps_read: rate(0, 9, 1),
                    ..none
                },
                "needs a limit",
            ),
            (
                ThrottleLimits {
                    bps_read: rate(10, 9, 1),
                    ..none
                },
                "below the limit",
            ),
            (
                ThrottleLimits {
                    bps_total: rate(10, 0, 2),
                    ..none
                },
                "needs a burst",
            ),
            (
                ThrottleLimits {
                    bps_total: rate(10, LIMIT_MAX, 2),
                    ..none
                },
                "largest limit",
            ),
            (
                ThrottleLimits {
                    iops_size: 4096,
                    bps_total: rate(1, 0, 1),
                    ..none
                },
                "without a limit of operations",
            ),
        ] {
            let error = limits.check().unwrap_err().to_string();
            assert!(error.contains(says), "{error}");
        }
        let good = ThrottleLimits {
            iops_total: rate(100, 1000, 60),
            iops_size: 8192,
            ..none
        };
        assert_eq!(good.check(), Ok(()));
    }
}
