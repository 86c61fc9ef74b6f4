//! Counts steps of work: visited options, pairs and elements, and evaluated conditions.
//!
//! Only this crate's tests count them, to compare inputs of several sizes. Unlike time, steps are reproducible.

/// Counts one step.
#[inline]
pub fn step() {
    #[cfg(test)]
    tests::STEPS.set(tests::STEPS.get() + 1);
}

#[cfg(test)]
pub mod tests {
    use std::cell::Cell;

    thread_local! {
        pub static STEPS: Cell<u64> = const { Cell::new(0) };
    }
}
