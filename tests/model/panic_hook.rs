//! Suppresses the panic messages of failing cases while proptest searches and shrinks, which are hundreds.

use std::cell::{Cell, RefCell};
use std::panic;
use std::sync::Once;

thread_local! {
    static SUPPRESSED: Cell<bool> = const { Cell::new(false) };
    /// The location of the last panic. The last failing case is the shortest one.
    static LAST_PANIC: RefCell<String> = const { RefCell::new(String::new()) };
}

/// Runs `search` and also returns the location of the last panic on this thread. Panics of other threads, such as
/// those of the service, are still printed.
pub(super) fn without_panic_messages<T>(search: impl FnOnce() -> T) -> (T, String) {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let print = panic::take_hook();
        panic::set_hook(Box::new(move |panic| {
            if SUPPRESSED.get() {
                LAST_PANIC.set(panic.location().map(ToString::to_string).unwrap_or_default());
            } else {
                print(panic);
            }
        }));
    });
    SUPPRESSED.set(true);
    let result = search();
    SUPPRESSED.set(false);
    (result, LAST_PANIC.take())
}
