//! Modules and libraries: loading, their variables, the names of their functions.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use gpusession_link::Reply;
use gpusession_proto::frame::{Writer, op};
use gpusession_proto::handle;

use crate::client::{Client, string, word};
use crate::entry::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result, give, give_optional, give_text, name};
use crate::functions::{self, How};
use crate::ranges::{self, Kind};
use crate::{clients, handles, images, libraries, mapped, references, thread};

/// `CU_JIT_*` options whose value is a pointer.
///
/// The reply fills the log buffers; the worker does not get these options.
const WALL_TIME: i32 = 2;
const INFO_LOG: i32 = 3;
const INFO_SIZE: i32 = 4;
const ERROR_LOG: i32 = 5;
const ERROR_SIZE: i32 = 6;
const LEFT_OUT: &[i32] = &[WALL_TIME, INFO_LOG, ERROR_LOG, 17, 18];

/// Options of a load.
pub struct Options {
    pairs: Vec<(i32, u64)>,
    info: *mut c_char,
    info_size: usize,
    error: *mut c_char,
    error_size: usize,
}

impl Options {
    /// Reads the program's two arrays.
    pub fn read(count: u32, keys: *const i32, values: *const *mut c_void) -> Result<Self> {
        let mut options = Self {
            pairs: Vec::new(),
            info: std::ptr::null_mut(),
            info_size: 0,
            error: std::ptr::null_mut(),
            error_size: 0,
        };
        if count > 0 && keys.is_null() {
            return Err(INVALID_VALUE);
        }
        for i in 0..count as usize {
            // SAFETY: by the call's contract both arrays have `count` elements; `keys` is not null,
            // and null `values` are not read.
            let (key, value) = unsafe {
                (
                    keys.add(i).read(),
                    if values.is_null() { std::ptr::null_mut() } else { values.add(i).read() },
                )
            };
            match key {
                INFO_LOG => options.info = value.cast(),
                ERROR_LOG => options.error = value.cast(),
                INFO_SIZE => options.info_size = value as usize & 0xffff_ffff,
                ERROR_SIZE => options.error_size = value as usize & 0xffff_ffff,
                _ => {}
            }
            if !LEFT_OUT.contains(&key) {
                options.pairs.push((key, value as u64));
            }
        }
        Ok(options)
    }

    /// Writes the options for the worker.
    pub fn write(&self, w: &mut Writer<'_>) {
        w.word(self.pairs.len() as u64);
        for (key, value) in &self.pairs {
            w.word(*key as u32 as u64);
            w.word(*value);
        }
    }

    /// Copies the two logs at the start of a reply to the program's buffers.
    pub fn logs(&self, reply: &Reply) -> Result {
        let mut r = reply.reader();
        for (buffer, size) in [(self.info, self.info_size), (self.error, self.error_size)] {
            let text = string(&mut r)?;
            if !buffer.is_null() && size > 0 {
                give_text(buffer, size.min(i32::MAX as usize) as i32, text)?;
            }
        }
        Ok(())
    }
}

/// Loads a module into the current context.
pub fn load(client: &Client, image: &[u8], options: &Options) -> Result<u64> {
    let new = client.mint(handle::MODULE);
    load_on(client, op::MODULE_LOAD, new, image, options).inspect_err(|_| handles::retire(new))?;
    Ok(new)
}

/// `cuModuleLoadData`, which a private table has, too.
pub fn load_data(module: *mut *mut c_void, image: *const c_void) -> Result {
    let client = clients::get()?;
    thread::context()?;
    if module.is_null() {
        return Err(INVALID_VALUE);
    }
    let none = Options::read(0, std::ptr::null(), std::ptr::null())?;
    give(module, load(client, images::bytes(image)?, &none)? as *mut c_void)
}

fn load_on(client: &Client, operation: u16, new: u64, image: &[u8], options: &Options) -> Result {
    let hash = images::offer(client, image)?;
    let reply = client.ask(operation, |w| {
        w.word(new);
        w.bytes(&hash);
        options.write(w);
    })?;
    options.logs(&reply)?;
    client.check_status(reply.status)
}

/// Loads a library, which belongs to no context, on every client.
///
/// One success suffices, because the library may have no code for another client's kind of GPU.
pub fn load_library(image: &[u8], options: &Options) -> Result<u64> {
    let current = clients::get()?;
    let new = handles::mint(handle::LIBRARY, 0);
    let mut failed = Vec::new();
    let mut loaded = false;
    for client in clients::all()?.filter(|c| c.number != current.number).chain([current]) {
        match load_on(client, op::LIBRARY_LOAD, new, image, options) {
            Ok(()) => loaded = true,
            Err(status) => failed.push((client.number, status)),
        }
    }
    match failed.last() {
        Some((_, status)) if !loaded => {
            handles::retire(new);
            return Err(*status);
        }
        Some(_) => libraries::failed_on(new, failed),
        None => {}
    }
    Ok(new)
}

/// Returns the client to ask about a module, or about a library in the current context.
pub fn client_of(parent: u64) -> Result<&'static Client> {
    if handle::kind(parent) == handle::MODULE {
        return clients::of(parent);
    }
    let current = clients::get()?;
    libraries::usable_on(parent, current)?;
    Ok(current)
}

/// Address and size of variables, which do not change.
///
/// The key is parent, context (of a library's variable), kind of lookup, and name.
type Globals = HashMap<(u64, u64, u64, CString), (u64, usize)>;
static GLOBALS: Mutex<Option<Globals>> = Mutex::new(None);

/// Gives the program address and size of a variable; only the first lookup asks the server.
pub fn global(address: *mut u64, size: *mut usize, parent: u64, how: u64, symbol: *const c_char) -> Result {
    const OF_LIBRARY: u64 = 1;
    let client = client_of(parent)?;
    // Each context has its own copy of a library's variables, except managed ones.
    let ctx = if how == OF_LIBRARY { thread::current() } else { 0 };
    let key = (parent, ctx, how, name(symbol)?.to_owned());
    let known =
        GLOBALS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().get(&key).copied();
    let (base, len) = match known {
        Some(known) => known,
        None => {
            let reply = client.call(op::GET_GLOBAL, |w| {
                w.word(parent);
                w.word(how);
                w.bytes(key.3.as_bytes());
            })?;
            let mut r = reply.reader();
            let found = (word(&mut r)?, word(&mut r)? as usize);
            let managed = word(&mut r)? != 0;
            client.claims.claim("a variable", found.0, found.1 as u64)?;
            if managed {
                mapped::map_variable(client, found.0, found.1 as u64)?;
                if clients::several() && handle::kind(parent) == handle::LIBRARY {
                    libraries::managed_by(parent, client);
                }
            }
            let kind = if managed { Kind::ManagedVariable } else { Kind::Global };
            ranges::add(found.0, found.1 as u64, kind, client.context());
            GLOBALS.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(key, found);
            found
        }
    };
    give_optional(address, base);
    give_optional(size, len);
    Ok(())
}

/// Unloads a module or a library.
pub fn unload(parent: u64, kind: u8, operation: u16) -> Result {
    let current = clients::get()?;
    if handle::kind(parent) != kind {
        return Err(INVALID_HANDLE);
    }
    functions::forget(parent);
    references::forget(parent);
    let mut globals = GLOBALS.lock().unwrap_or_else(PoisonError::into_inner);
    globals.get_or_insert_default().retain(|(p, ..), (base, _)| {
        if *p == parent
            && let Some(range) = ranges::take(*base, |k| matches!(k, Kind::Global | Kind::ManagedVariable))
            && range.kind == Kind::ManagedVariable
        {
            // A lost worker has freed it already.
            let _ = mapped::unmap(*base);
        }
        *p != parent
    });
    drop(globals);
    if kind == handle::MODULE {
        let client = clients::of(parent)?;
        client.post(operation, |w| w.word(parent))?;
        handles::retire(parent);
        return client.take_late_error();
    }
    let failed = libraries::forget(parent);
    for client in clients::all()?.filter(|c| !failed.contains(&c.number)) {
        // A lost worker has unloaded it already.
        let _ = client.post(operation, |w| w.word(parent));
    }
    handles::retire(parent);
    current.take_late_error()
}

/// Returns the names of the functions (`how` 0) or kernels (1) of a module or library.
pub fn names(parent: u64, how: u64) -> Result<Vec<CString>> {
    let client = client_of(parent)?;
    let reply = client.call(op::ENUMERATE, |w| {
        w.word(parent);
        w.word(how);
    })?;
    let mut r = reply.reader();
    let count = word(&mut r)?;
    (0..count).map(|_| string(&mut r).and_then(|s| CString::new(s).map_err(|_| NOT_FOUND))).collect()
}

/// Returns the handles of all functions of a module.
pub fn functions_of(module: u64) -> Result<Vec<u64>> {
    if handle::kind(module) != handle::MODULE {
        return Err(INVALID_HANDLE);
    }
    let client = clients::of(module)?;
    let names = names(module, How::Function as u64)?;
    names.into_iter().map(|name| functions::get(client, module, How::Function, name)).collect()
}

/// Modules of libraries, by library and context, so that each has one handle.
static LIBRARY_MODULES: Mutex<Option<HashMap<(u64, u64), u64>>> = Mutex::new(None);

/// Returns the module of a library in the current context.
pub fn of_library(library: u64) -> Result<u64> {
    let client = client_of(library)?;
    let key = (library, thread::context()?);
    let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    let modules = modules.get_or_insert_default();
    if let Some(known) = modules.get(&key) {
        return Ok(*known);
    }
    let new = client.mint(handle::MODULE);
    client.call(op::LIBRARY_MODULE, |w| {
        w.word(new);
        w.word(library);
    })?;
    modules.insert(key, new);
    Ok(new)
}

/// Removes the modules of an unloaded library.
pub fn forget_library(library: u64) {
    let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    modules.get_or_insert_default().retain(|(l, _), _| *l != library);
}

/// Removes the modules, variables and functions that libraries had in a destroyed context.
pub fn forget_context(ctx: u64) {
    functions::forget_context(ctx);
    let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    modules.get_or_insert_default().retain(|(_, of), _| *of != ctx);
    let mut globals = GLOBALS.lock().unwrap_or_else(PoisonError::into_inner);
    globals.get_or_insert_default().retain(|(_, of, ..), _| *of != ctx);
}

#[cfg(test)]
mod tests {
    use gpusession_proto::frame::{HEADER, Header, Reader};

    use super::*;

    #[test]
    fn options_with_pointers_stay_in_the_program() {
        const MAX_REGISTERS: i32 = 0;
        let mut log = [0 as c_char; 16];
        let keys = [MAX_REGISTERS, INFO_LOG, INFO_SIZE, WALL_TIME, ERROR_SIZE];
        // A size comes in the pointer's place; the program sets its low half only.
        let high = 0xdead_0000_0000_0000_u64 as usize;
        let size = (high | log.len()) as *mut c_void;
        let values =
            [32 as *mut c_void, log.as_mut_ptr().cast(), size, log.as_mut_ptr().cast(), high as *mut c_void];
        let options = Options::read(5, keys.as_ptr(), values.as_ptr()).unwrap();
        assert_eq!((options.info, options.info_size), (log.as_mut_ptr(), 16));
        assert_eq!((options.error, options.error_size), (std::ptr::null_mut(), 0));
        let mut frame = Vec::new();
        let mut w = Writer::new(&mut frame, &Header::empty());
        options.write(&mut w);
        w.finish();
        let mut r = Reader::new(&frame[HEADER..]);
        let mut words = [0; 7];
        words.iter_mut().for_each(|word| *word = r.word().unwrap());
        let sizes = [INFO_SIZE as u64, size as u64, ERROR_SIZE as u64, high as u64];
        assert_eq!(words, [3, MAX_REGISTERS as u64, 32, sizes[0], sizes[1], sizes[2], sizes[3]]);
        assert!(r.is_empty(), "no address of the program goes to the worker");
    }

    #[test]
    fn options_without_keys_are_invalid() {
        let none = Options::read(1, std::ptr::null(), std::ptr::null());
        assert_eq!(none.err(), Some(INVALID_VALUE));
        assert!(Options::read(0, std::ptr::null(), std::ptr::null()).is_ok());
        let key = [0];
        assert_eq!(Options::read(1, key.as_ptr(), std::ptr::null()).map(|o| o.pairs), Ok(vec![(0, 0)]));
    }
}
