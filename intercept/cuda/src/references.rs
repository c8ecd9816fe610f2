//! References to textures and surfaces of modules, each with one handle as long as its module.

use std::collections::BTreeMap;
use std::ffi::CString;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::handles;

/// Module, kind of the handle, and name.
type Key = (u64, u8, CString);

static KNOWN: Mutex<BTreeMap<Key, u64>> = Mutex::new(BTreeMap::new());

/// Locks the handles of references.
pub fn known() -> MutexGuard<'static, BTreeMap<Key, u64>> {
    KNOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forgets the references of a module that is unloaded.
pub fn forget(module: u64) {
    known().retain(|(parent, ..), handle| {
        if *parent == module {
            handles::retire(*handle);
        }
        *parent != module
    });
}

#[cfg(test)]
mod tests {
    use gpusession_proto::handle::TEXREF;

    use super::*;

    #[test]
    fn references_end_with_their_module() {
        let (one, other) = (handles::mint(TEXREF, 0), handles::mint(TEXREF, 0));
        known().insert((0x71, TEXREF, c"texture".into()), one);
        known().insert((0x72, TEXREF, c"texture".into()), other);
        forget(0x71);
        let left: Vec<_> = known().values().copied().collect();
        assert_eq!(left, [other]);
        assert_ne!(handles::mint(TEXREF, 0), one, "a slot comes back with another generation");
    }
}
