//! A search without the noise of its tries: each case that fails panics, hundreds of times while it is cut short.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    static SEARCHING: Cell<bool> = const { Cell::new(false) };
    /// Where the last case failed. The last one that failed is the shortest.
    static FAILED_AT: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Also returns where the last panic on this thread was. Those of other threads, as the service's, are printed as ever.
pub(super) fn quietly<T>(search: impl FnOnce() -> T) -> (T, String) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if SEARCHING.get() {
                FAILED_AT.set(panic.location().map(ToString::to_string).unwrap_or_default());
            } else {
                print(panic);
            }
        }));
    });
    SEARCHING.set(true);
    let result = search();
    SEARCHING.set(false);
    (result, FAILED_AT.take())
}
