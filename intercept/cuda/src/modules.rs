//! Modules and libraries: loading, their variables, the names of their functions.

use std::collections::{BTreeMap, HashMap};
use std::ffi::{CString, c_char, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use gpusession_proto::frame::op;
use gpusession_proto::handle;

use crate::client::{Client, string, word};
use crate::entry::{INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result, give, give_optional, name};
use crate::functions::{self, How, Offered};
use crate::images::Image;
use crate::jit::Options;
use crate::ranges::{self, Kind};
use crate::signatures::{self, Signatures};
use crate::status::{INVALID_IMAGE, NO_BINARY_FOR_GPU};
use crate::{clients, core_dumps, handles, images, libraries, linker, mapped, references, thread};

/// Place of a module: its context, and the library that it is a part of.
#[derive(Clone, Copy)]
struct Home {
    ctx: u64,
    library: Option<u64>,
}

static MODULES: Mutex<BTreeMap<u64, Home>> = Mutex::new(BTreeMap::new());

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Loads a module into the current context.
pub fn load(client: &'static Client, image: &Image<'_>, options: &Options) -> Result<u64> {
    let new = client.mint(handle::MODULE);
    load_on(client, op::MODULE_LOAD, new, image, options).inspect_err(|_| handles::retire(new))?;
    lock(&MODULES).insert(new, Home { ctx: thread::current(), library: None });
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
    let how = if operation == op::LIBRARY_LOAD { How::Kernel } else { How::Function };
    let offered = Offered::new(client, how);
    let reply = images::with_image(client, image, |hash| {
        client.ask(operation, |w| {
            w.word(new);
            w.bytes(hash);
            options.write(w);
            offered.write(w);
        })
    })?;
    let described = options.give_outputs(options.logs(&reply)?);
    client.check_status(reply.status)?;
    offered.take(client, new, described)
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
        core_dumps::before_library(client);
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

/// A variable, which does not change while its owner is loaded.
#[derive(Clone, Copy)]
struct Global {
    base: u64,
    size: usize,
    /// Module or library whose end frees it.
    owner: u64,
    managed: bool,
}

/// Variables by parent, context (of a managed variable of a library: 0), kind of lookup, and name.
type Globals = HashMap<(u64, u64, u64, CString), Global>;
static GLOBALS: Mutex<Option<Globals>> = Mutex::new(None);

/// Gives the program address and size of a variable; only the first lookup asks the server.
pub fn global(address: *mut u64, size: *mut usize, parent: u64, how: u64, symbol: *const c_char) -> Result {
    const OF_LIBRARY: u64 = 1;
    let client = client_of(parent)?;
    let home = lock(&MODULES).get(&parent).copied();
    // Each context has its own copy of a library's variables, except managed ones.
    let of_library = if how == OF_LIBRARY { thread::current() } else { 0 };
    let ctx = home.map_or(of_library, |home| home.ctx);
    let key = (parent, ctx, how, name(symbol)?.to_owned());
    let known = lock(&GLOBALS).get_or_insert_default().get(&key).copied();
    let global = match known {
        Some(known) => known,
        None => {
            let reply = client.call(op::GET_GLOBAL, |w| {
                w.word(parent);
                w.word(how);
                w.bytes(key.3.as_bytes());
            })?;
            let mut r = reply.reader();
            let (base, size) = (word(&mut r)?, word(&mut r)? as usize);
            let managed = word(&mut r)? != 0;
            client.claims.claim("a variable", base, size as u64)?;
            if managed {
                mapped::map_variable(client, base, size as u64)?;
                if clients::several() && handle::kind(parent) == handle::LIBRARY {
                    libraries::managed_by(parent, client);
                }
            }
            let kind = if managed { Kind::ManagedVariable } else { Kind::Global };
            ranges::add(base, size as u64, kind, if ctx == 0 { client.context() } else { ctx });
            // A library's managed variables live as long as the library.
            let owner = home.and_then(|home| home.library).unwrap_or(parent);
            let new = Global { base, size, owner, managed };
            lock(&GLOBALS).get_or_insert_default().insert(key, new);
            new
        }
    };
    give_optional(address, global.base);
    give_optional(size, global.size);
    Ok(())
}

/// Removes the variables that `gone` selects, whose memory is about to end.
fn forget_globals(gone: impl Fn(&(u64, u64, u64, CString), &Global) -> bool) {
    lock(&GLOBALS).get_or_insert_default().retain(|key, global| {
        let gone = gone(key, global);
        if gone
            && let Some(range) =
                ranges::take(global.base, |k| matches!(k, Kind::Global | Kind::ManagedVariable))
            && range.kind == Kind::ManagedVariable
        {
            // A lost worker has freed it already.
            let _ = mapped::unmap(global.base);
        }
        !gone
    });
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
    forget_globals(|(of, ..), global| *of == parent || global.owner == parent);
    lock(&MODULES).remove(&parent);
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

/// Returns the module of a library in the current context.
pub fn of_library(library: u64) -> Result<u64> {
    let client = client_of(library)?;
    let home = Home { ctx: thread::context()?, library: Some(library) };
    /// Each module has one handle. Other calls need not wait for the worker's answer.
    static ASKING: Mutex<()> = Mutex::new(());
    let _asking = lock(&ASKING);
    let same = |known: &Home| (known.ctx, known.library) == (home.ctx, home.library);
    if let Some((known, _)) = lock(&MODULES).iter().find(|(_, known)| same(known)) {
        return Ok(*known);
    }
    let new = client.mint(handle::MODULE);
    client.call(op::LIBRARY_MODULE, |w| {
        w.word(new);
        w.word(library);
    })?;
    lock(&MODULES).insert(new, home);
    signatures::note(new, signatures::of_module(library));
    Ok(new)
}

/// Removes modules that `gone` selects, which the driver ends with their context or library.
fn forget_modules(gone: impl Fn(&Home) -> bool) {
    let mut ended = Vec::new();
    lock(&MODULES).retain(|module, home| {
        let gone = gone(home);
        ended.extend(gone.then_some(*module));
        !gone
    });
    for module in ended {
        signatures::forget(module);
        functions::forget(module);
    }
}

/// Removes the modules of an unloaded library.
pub fn forget_library(library: u64) {
    forget_modules(|home| home.library == Some(library));
}

/// Removes the modules, variables and functions of a destroyed context.
pub fn forget_context(ctx: u64) {
    functions::forget_context(ctx);
    forget_globals(|(_, of, ..), global| {
        *of == ctx && !(global.managed && handle::kind(global.owner) == handle::LIBRARY)
    });
    forget_modules(|home| home.ctx == ctx);
}
