//! Student's t distribution.

/// Probability that T of `freedom` degrees is above `t`.
pub fn above(t: f64, freedom: f64) -> f64 {
    if t.is_infinite() {
        return if t > 0.0 { 0.0 } else { 1.0 };
    }
    let tail = beta(freedom / (freedom + t * t), freedom / 2.0, 0.5) / 2.0;
    if t > 0.0 { tail } else { 1.0 - tail }
}

/// The t that T of `freedom` degrees is above with probability `tail`, for tails up to a half.
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
        match above(middle, freedom) > tail {
            true => low = middle,
            false => high = middle,
        }
    }
    high
}

/// The regularised incomplete beta function, by its continued fraction (DLMF 8.17.22).
fn beta(x: f64, a: f64, b: f64) -> f64 {
    if x <= 0.0 || x >= 1.0 {
        return x.clamp(0.0, 1.0);
    }
    if x > (a + 1.0) / (a + b + 2.0) {
        return 1.0 - beta(1.0 - x, b, a);
    }
    let front =
        (a * x.ln() + b * (1.0 - x).ln() + ln_gamma(a + b) - ln_gamma(a) - ln_gamma(b)).exp() / a;
    // Lentz's way to evaluate it from the front.
    let guard = |value: f64| if value.abs() < 1e-300 { 1e-300 } else { value };
    let (mut c, mut d) = (1.0, 1.0 / guard(1.0 - (a + b) * x / (a + 1.0)));
    let mut result = d;
    for step in 1..500 {
        let m = f64::from(step);
        for numerator in [
            m * (b - m) * x / ((a + 2.0 * m - 1.0) * (a + 2.0 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2.0 * m) * (a + 2.0 * m + 1.0)),
        ] {
            d = 1.0 / guard(1.0 + numerator * d);
            c = guard(1.0 + numerator / c);
            result *= c * d;
        }
        if (c * d - 1.0).abs() < 1e-15 {
            break;
        }
    }
    front * result
}

/// The logarithm of the gamma function for positive arguments: Stirling's series, from where it is accurate.
fn ln_gamma(x: f64) -> f64 {
    let (mut x, mut shift) = (x, 0.0);
    while x < 10.0 {
        shift -= x.ln();
        x += 1.0;
    }
    let series = 1.0 / (12.0 * x) - 1.0 / (360.0 * x.powi(3)) + 1.0 / (1260.0 * x.powi(5))
        - 1.0 / (1680.0 * x.powi(7));
    shift + (x - 0.5) * x.ln() - x + 0.5 * std::f64::consts::TAU.ln() + series
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
