use thiserror::Error;

/// How much one kind of traffic may flow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rate {
    /// Per second, on average; 0 for no limit.
    pub average: u64,
    /// Per second, in a burst; 0 for none beyond what makes up for a late timer.
    pub max: u64,
    /// Seconds that a burst at `max` may last.
    pub max_length: u64,
}

/// The limits of a disk, or of a group of disks, in QEMU's words (`ThrottleLimits` in its QAPI schema).
/// Bandwidth in bytes.
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
    /// A request that is larger than this many bytes counts in proportion, as one and a half if it is
    /// half as large again; 0: as one whatever its size.
    pub iops_size: u64,
}

/// Why limits are refused.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum ThrottleError {
    /// A total and one of its parts.
    #[error("{0} total and {0} read or write limits exclude each other; give one or the other")]
    TotalAndPart(&'static str),
    /// A burst of something that has no limit.
    #[error("{0}: a burst (max) needs a limit of its own, as in {0}=1000")]
    BurstWithoutLimit(&'static str),
    /// A burst slower than the average.
    #[error("{0}: a burst (max) below the limit would never be reached; make it larger")]
    BurstBelowLimit(&'static str),
    /// A length of no burst.
    #[error("{0}: a length of bursts (max-length) needs a burst, {0} max")]
    LengthWithoutBurst(&'static str),
    /// Beyond what is counted without overflow.
    #[error("{0}: {1} is more than the largest limit, {LIMIT_MAX}")]
    TooLarge(&'static str, u64),
    /// A size per operation without a limit of operations.
    #[error("iops-size without a limit of operations; give iops")]
    SizeWithoutIops,
}

/// Largest rate, and largest product of a burst's rate and length, as in QEMU.
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

    /// Whether anything is limited.
    pub fn any(&self) -> bool {
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

    /// Checks what QEMU checks.
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
    fn limits_that_contradict_each_other_are_refused() {
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
