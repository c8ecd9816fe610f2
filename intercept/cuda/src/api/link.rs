//! The driver's linker: inputs go to the worker, logs and the linked image come back.

use std::collections::BTreeMap;
use std::ffi::{c_char, c_void};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{Client, string, word};
use crate::entry::{
    FILE_NOT_FOUND, INVALID_HANDLE, INVALID_VALUE, Result, UNKNOWN, alias, bytes, driver, give,
    give_optional, name,
};
use crate::modules::Options;
use crate::{clients, handles, images, thread};

/// Highest `CUjitInputType`.
const NVVM: i32 = 5;
/// Longest linked image, in bytes.
const MAX_IMAGE: u64 = 4 << 30;

/// One state of the linker.
struct Link {
    client: &'static Client,
    handle: u64,
    /// Options of the whole link, with the program's buffers for the logs.
    options: Options,
    /// The linked image, which the program may read until it destroys the state.
    image: Option<Vec<u8>>,
}

// SAFETY: the addresses in `options` are of the program's buffers, which it keeps for every thread
// until it destroys the state.
unsafe impl Send for Link {}

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

impl Link {
    /// Adds an input to the link.
    fn add(&self, kind: i32, data: &[u8], label: &[u8], options: &Options) -> Result {
        if !(0..=NVVM).contains(&kind) || data.is_empty() {
            return Err(INVALID_VALUE);
        }
        let hash = images::offer(self.client, data)?;
        let reply = self.client.ask(op::LINK_ADD, |w| {
            w.word(self.handle);
            w.word(kind as u64);
            w.bytes(&hash);
            w.bytes(label);
            options.write(w);
        })?;
        self.options.logs(&reply)?;
        self.client.check_status(reply.status)
    }

    /// Links the inputs and fetches the image.
    fn complete(&mut self) -> Result<&[u8]> {
        let client = self.client;
        if self.image.is_none() {
            let reply = client.ask(op::LINK_COMPLETE, |w| w.word(self.handle))?;
            self.options.logs(&reply)?;
            client.check_status(reply.status)?;
            let mut r = reply.reader();
            let (_, _, len) = (string(&mut r)?, string(&mut r)?, word(&mut r)?);
            if len > MAX_IMAGE {
                return Err(UNKNOWN);
            }
            let mut image = Vec::new();
            while (image.len() as u64) < len {
                let reply = client.call(op::LINK_IMAGE, |w| {
                    w.word(self.handle);
                    w.word(image.len() as u64);
                })?;
                let mut r = reply.reader();
                let part = string(&mut r)?;
                if part.is_empty() || part.len() as u64 > len - image.len() as u64 {
                    return Err(UNKNOWN);
                }
                image.extend_from_slice(part);
            }
            self.image = Some(image);
        }
        Ok(self.image.as_deref().unwrap_or_default())
    }
}

driver! {
    fn cuLinkCreate_v2(count: u32, keys: *const i32, values: *const *mut c_void, state: *mut *mut c_void) {
        let client = clients::get()?;
        thread::context()?;
        if state.is_null() {
            return Err(INVALID_VALUE);
        }
        let options = Options::read(count, keys, values)?;
        let new = client.mint(handle::LINK);
        let made = client.call(op::LINK_CREATE, |w| {
            w.word(new);
            options.write(w);
        });
        made.inspect_err(|_| handles::retire(new))?;
        links().insert(new, Arc::new(Mutex::new(Link { client, handle: new, options, image: None })));
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
