//! Modules and libraries: loading, their variables, the names of their functions.

use std::collections::HashMap;
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{Client, string, word};
use crate::entry::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result, give, give_optional, name};
use crate::functions::{self, How};
use crate::images::Image;
use crate::jit::Options;
use crate::ranges::{self, Kind};
use crate::signatures::{self, Signatures};
use crate::status::{INVALID_IMAGE, NO_BINARY_FOR_GPU};
use crate::{clients, handles, images, libraries, linker, mapped, references, thread};

/// Loads a module into the current context.
pub fn load(client: &'static Client, image: &Image<'_>, options: &Options) -> Result<u64> {
    let new = client.mint(handle::MODULE);
    load_on(client, op::MODULE_LOAD, new, image, options).inspect_err(|_| handles::retire(new))?;
    signatures::note(new, Signatures::copied(image));
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
    give(module, load(client, &images::read_image(image)?, &none)? as *mut c_void)
}

fn load_on(
    client: &'static Client,
    operation: u16,
    new: u64,
    image: &Image<'_>,
    options: &Options,
) -> Result {
    let linked = || {
        let together = linker::fat_binaries(client, &image.parts)?;
        load_bytes(client, operation, new, &together, options)
    };
    if image.is_empty() && !image.parts.is_empty() {
        return linked();
    }
    match load_bytes(client, operation, new, image.bytes, options) {
        Err(NO_BINARY_FOR_GPU | INVALID_IMAGE) if !image.parts.is_empty() => linked(),
        loaded => loaded,
    }
}

fn load_bytes(client: &Client, operation: u16, new: u64, image: &[u8], options: &Options) -> Result {
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
/// `signatures` are the image's.
pub fn load_library(image: &Image<'_>, signatures: Signatures, options: &Options) -> Result<u64> {
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
    signatures::note(new, signatures);
    Ok(new)
}

/// Returns the client to ask about a module, or about a library in the current context.
pub fn client_of(parent: u64) -> Result<&'static Client> {
    if handle::kind(parent) == handle::MODULE {
        return clients::by_object(parent);
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
    signatures::forget(parent);
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
        let client = clients::by_object(parent)?;
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
    let client = clients::by_object(module)?;
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
    signatures::note(new, signatures::of_module(library));
    Ok(new)
}

/// Removes the modules of an unloaded library.
pub fn forget_library(library: u64) {
    let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    modules.get_or_insert_default().retain(|(l, _), module| {
        if *l == library {
            signatures::forget(*module);
        }
        *l != library
    });
}

/// Removes the modules, variables and functions that libraries had in a destroyed context.
pub fn forget_context(ctx: u64) {
    functions::forget_context(ctx);
    let mut modules = LIBRARY_MODULES.lock().unwrap_or_else(PoisonError::into_inner);
    modules.get_or_insert_default().retain(|(_, of), module| {
        if *of == ctx {
            signatures::forget(*module);
        }
        *of != ctx
    });
    let mut globals = GLOBALS.lock().unwrap_or_else(PoisonError::into_inner);
    globals.get_or_insert_default().retain(|(_, of, ..), _| *of != ctx);
}
