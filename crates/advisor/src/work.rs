//! Steps of work: options, pairs and elements that are looked at, and conditions that are asked.
//!
//! They are counted in this crate's own tests only, which compare inputs of several sizes by them: unlike time, they are the
//! same in each run.

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
