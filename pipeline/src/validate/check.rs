//! The result of checking one precondition: the reason if it does not hold.

pub(super) type Check = Result<(), String>;

pub(super) fn ensure(condition: bool, reason: impl FnOnce() -> String) -> Check {
    if condition { Ok(()) } else { Err(reason()) }
}
