//! Student's t distribution. statrs computes the incomplete beta function; its own quantiles of t are wrong in the far
//! tails of 1 degree of freedom, so they are searched for here.

use statrs::function::beta::beta_reg;

/// The probability that T with `freedom` degrees of freedom exceeds `t`.
pub fn above(t: f64, freedom: f64) -> f64 {
    if t.is_infinite() {
        return if t > 0.0 { 0.0 } else { 1.0 };
    }
    let tail = beta_reg(freedom / 2.0, 0.5, freedom / (freedom + t * t)) / 2.0;
    if t > 0.0 { tail } else { 1.0 - tail }
}

/// The value that T with `freedom` degrees of freedom exceeds with probability `tail`, for `tail` up to 0.5.
pub fn quantile(tail: f64, freedom: f64) -> f64 {
    let (mut low, mut high) = (0.0_f64, 1.0_f64);
    while above(high, freedom) > tail && high < 1e15 {
        low = high;
        high *= 2.0;
    }
    for _ in 0..200 {
        let middle = f64::midpoint(low, high);
        if middle <= low || middle >= high {
            break;
        }
        if above(middle, freedom) > tail {
            low = middle
        } else {
            high = middle
        }
    }
    high
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        let table = [
            (0.025, 1.0, 12.706_204_7),
            (0.025, 2.0, 4.302_652_73),
            (0.025, 10.0, 2.228_138_85),
            (0.005, 5.0, 4.032_142_98),
            (0.0005, 30.0, 3.645_958_6),
            (0.05, 1000.0, 1.646_378_8),
            (1e-9, 1.0, 318_309_886.18),
        ];
        for (tail, freedom, t) in table {
            let found = quantile(tail, freedom);
            assert!((found / t - 1.0).abs() < 1e-6, "{tail} {freedom}: {found}");
            assert!((above(found, freedom) / tail - 1.0).abs() < 1e-6);
        }
        assert!((above(0.0, 4.0) - 0.5).abs() < 1e-12);
        assert!((above(-2.0, 4.0) + above(2.0, 4.0) - 1.0).abs() < 1e-12);
    }
}
