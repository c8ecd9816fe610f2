//! Calls of the driver's linker.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::op;

use crate::entry::{
    FILE_NOT_FOUND, INVALID_HANDLE, INVALID_VALUE, Result, alias, bytes, driver, give, give_optional, name,
};
use crate::jit::Options;
use crate::linker::{self, Link};
use crate::{clients, handles, thread};

type Links = BTreeMap<u64, Arc<Mutex<Link>>>;
static LINKS: Mutex<Links> = Mutex::new(BTreeMap::new());

fn links() -> MutexGuard<'static, Links> {
    LINKS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Calls `run` with the state behind a handle.
fn with<T>(state: *mut c_void, run: impl FnOnce(&mut Link) -> Result<T>) -> Result<T> {
    clients::get()?;
    let found = links().get(&(state as u64)).cloned().ok_or(INVALID_HANDLE)?;
    let mut link = found.lock().unwrap_or_else(PoisonError::into_inner);
    run(&mut link)
}

driver! {
    fn cuLinkCreate_v2(count: u32, keys: *const i32, values: *const *mut c_void, state: *mut *mut c_void) {
        let client = clients::get()?;
        thread::context()?;
        if state.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        options.begin()?;
        let link = linker::create(client, options)?;
        let new = link.handle;
        links().insert(new, Arc::new(Mutex::new(link)));
        give(state, new as *mut c_void)
    }

    fn cuLinkAddData_v2(
        state: *mut c_void, kind: i32, data: *const c_void, len: usize, label: *const c_char, count: u32, keys: *const i32,
        values: *const *mut c_void,
    ) {
        let options = Options::read(count, keys, values)?;
        let label = if label.is_null() { c"" } else { name(label)? };
        with(state, |link| link.add(kind, bytes(data, len)?, label.to_bytes(), &options))
    }

    fn cuLinkAddFile_v2(
        state: *mut c_void, kind: i32, path: *const c_char, count: u32, keys: *const i32, values: *const *mut c_void,
    ) {
        let options = Options::read(count, keys, values)?;
        let path = name(path)?;
        with(state, |link| {
            let file = std::fs::read(path.to_str().map_err(|_| INVALID_VALUE)?).map_err(|_| FILE_NOT_FOUND)?;
            link.add(kind, &file, path.to_bytes(), &options)
        })
    }

    fn cuLinkComplete(state: *mut c_void, image: *mut *const c_void, len: *mut usize) {
        if image.is_null() {
            return Err(INVALID_VALUE);
        }
        with(state, |link| {
            let linked = link.complete()?;
            give_optional(len, linked.len());
            give(image, linked.as_ptr().cast())
        })
    }

    fn cuLinkDestroy(state: *mut c_void) {
        clients::get()?;
        let gone = links().remove(&(state as u64)).ok_or(INVALID_HANDLE)?;
        let client = gone.lock().unwrap_or_else(PoisonError::into_inner).client;
        client.call(op::LINK_DESTROY, |w| w.word(state as u64))?;
        handles::retire(state as u64);
        Ok(())
    }
}

alias! {
    cuLinkCreate = cuLinkCreate_v2(count: u32, keys: *const i32, values: *const *mut c_void, state: *mut *mut c_void);
    cuLinkAddData = cuLinkAddData_v2(
        state: *mut c_void, kind: i32, data: *const c_void, len: usize, label: *const c_char, count: u32, keys: *const i32,
        values: *const *mut c_void,
    );
    cuLinkAddFile = cuLinkAddFile_v2(
        state: *mut c_void, kind: i32, path: *const c_char, count: u32, keys: *const i32, values: *const *mut c_void,
    );
}
