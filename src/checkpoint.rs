//! Points at which a long computation can be interrupted.
//!
//! A computation reports its progress with [`passed`]. The thread that runs it can install a function with [`scope`], which is
//! called now and then and may block. Without one, nothing happens. So the rules in `domain` know nothing about threads.
//!
//! A computation must not report progress while it holds a lock, or initialises a value that others wait for: they could be
//! the computations for which it gives way. So texts below a few kilobytes, such as those of constants, do not report
//! anything.

use std::cell::{Cell, RefCell};

/// Bytes between two calls of the installed function: counting the tokens of so many takes about ten milliseconds.
const STEP: usize = 64 * 1024;

thread_local! {
    static PASSED: Cell<usize> = const { Cell::new(0) };
    static PAUSE: RefCell<Option<Box<dyn FnMut()>>> = const { RefCell::new(None) };
}

/// Reports that the computation has processed so many bytes.
pub fn passed(bytes: usize) {
    let passed = PASSED.get().saturating_add(bytes);
    if passed < STEP {
        PASSED.set(passed);
        return;
    }
    PASSED.set(0);
    PAUSE.with_borrow_mut(|pause| {
        if let Some(pause) = pause {
            pause();
        }
    });
}

/// Runs a computation that is interrupted by `pause`.
pub fn scope<T>(pause: impl FnMut() + 'static, work: impl FnOnce() -> T) -> T {
    struct Remove;
    impl Drop for Remove {
        fn drop(&mut self) {
            drop(PAUSE.take());
        }
    }
    PASSED.set(0);
    PAUSE.set(Some(Box::new(pause)));
    let _remove = Remove;
    work()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::rc::Rc;

    #[test]
    fn function_is_called_once_per_step_until_its_computation_ends() {
        let calls = Rc::new(Cell::new(0));
        let pause = {
            let calls = Rc::clone(&calls);
            move || calls.set(calls.get() + 1)
        };
        scope(pause, || (0..10).for_each(|_| passed(STEP / 2)));
        passed(STEP);
        assert_eq!((calls.get(), Rc::strong_count(&calls)), (5, 1));
    }
}
