//! References to textures and surfaces, from before their objects; the table has their properties.

use std::ffi::{c_char, c_void};

use gpusession_proto::frame::op;
use gpusession_proto::handle::{MODULE, SURFREF, TEXREF};

use crate::entry::{INVALID_VALUE, Result, driver, give, name};
use crate::{clients, handles, objects, references};

/// Finds a reference of a module; only the first lookup asks the server.
fn find(target: *mut *mut c_void, module: u64, kind: u8, symbol: *const c_char) -> Result {
    let client = clients::by_object(module)?;
    objects::check_kind(module, MODULE)?;
    if target.is_null() {
        return Err(INVALID_VALUE);
    }
    let key = (module, kind, name(symbol)?.to_owned());
    // Held until the end, so that two threads do not name one reference twice.
    let mut known = references::known();
    if let Some(handle) = known.get(&key) {
        return give(target, *handle as *mut c_void);
    }
    let new = client.mint(kind);
    let found = client.call(op::REFERENCE_FIND, |w| {
        w.word(new);
        w.word(module);
        w.bytes(key.2.to_bytes());
    });
    found.inspect_err(|_| handles::retire(new))?;
    known.insert(key, new);
    give(target, new as *mut c_void)
}

driver! {
    fn cuModuleGetTexRef(target: *mut *mut c_void, module: *mut c_void, symbol: *const c_char) {
        find(target, module as u64, TEXREF, symbol)
    }

    fn cuModuleGetSurfRef(target: *mut *mut c_void, module: *mut c_void, symbol: *const c_char) {
        find(target, module as u64, SURFREF, symbol)
    }

    fn cuTexRefCreate(target: *mut *mut c_void) {
        let client = clients::get()?;
        if target.is_null() {
            return Err(INVALID_VALUE);
        }
        let new = client.mint(TEXREF);
        client.call(op::TEXREF_CREATE, |w| w.word(new)).inspect_err(|_| handles::retire(new))?;
        give(target, new as *mut c_void)
    }

    fn cuTexRefDestroy(reference: *mut c_void) {
        let client = clients::by_object(reference as u64)?;
        objects::check_kind(reference as u64, TEXREF)?;
        client.call(op::TEXREF_DESTROY, |w| w.word(reference as u64))?;
        handles::retire(reference as u64);
        Ok(())
    }
}
