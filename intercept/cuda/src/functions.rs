//! Kernels and functions: parameter layout and attributes, so that launches need no round trip.

use std::collections::{HashMap, HashSet};
use std::ffi::{CStr, CString};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};

use gpusession_proto::frame::{Reader, Writer, ability, op};
use gpusession_proto::handle;

use crate::client::{Client, string, word};
use crate::status::{INVALID_HANDLE, INVALID_IMAGE, Result};
use crate::{clients, handles, libraries, signatures, trace};

/// Most bytes of a kernel's parameters, by CUDA's documentation.
const MAX_PARAM_BYTES: usize = 32_764;
/// Most parameters of a kernel, as many as a worker describes.
const MAX_PARAMS: u64 = 4096;
/// Most bytes and parameters of a kernel that the server alone describes: 4 KiB are what every
/// kernel may have.
const BELIEVED_BYTES: u64 = 4096;
const BELIEVED_PARAMS: usize = 1024;

/// Position of a parameter within the parameter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// In bytes from the buffer's start.
    pub offset: u32,
    /// In bytes.
    pub size: u32,
}

/// A kernel (of a library) or a function (of a module).
pub struct Function {
    pub handle: u64,
    /// Mangled, as the image has it.
    pub name: CString,
    how: How,
    /// Handle of its library or module, or of the kernel behind `How::OfKernel`.
    pub parent: u64,
    /// In the order of the prototype.
    pub params: Vec<Param>,
    /// Length of the parameter buffer in bytes.
    pub param_bytes: usize,
    /// Whether the program's image confirms `params`; not known before the first launch.
    proven: OnceLock<bool>,
    /// Clients whose workers know it, as a bit mask: for a kernel those that use it, for a function
    /// one.
    known: Mutex<u64>,
    attributes: Mutex<Attributes>,
    /// Values that the driver has accepted, by client, kind of setting, key and device.
    settings: Mutex<HashMap<(u8, u32, i32, i32), i32>>,
    occupancy: Mutex<Occupancy>,
}

/// Objects of one kind, by slot of their handle.
type BySlot<T> = RwLock<Vec<Option<Arc<T>>>>;

static FUNCTIONS: BySlot<Function> = RwLock::new(Vec::new());
/// Handles of functions.
type ByName = HashMap<Key, u64>;

static BY_NAME: Mutex<Option<ByName>> = Mutex::new(None);
static ACCEPTED: Mutex<Option<HashSet<u64>>> = Mutex::new(None);

/// Device number for "the function's own" in attribute calls.
pub const OWN_DEVICE: i32 = -1;

/// Call that looks a function up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum How {
    /// `cuModuleGetFunction`
    Function = 0,
    /// `cuLibraryGetKernel`
    Kernel = 1,
    /// `cuKernelGetFunction`
    OfKernel = 2,
}

/// Returns a function or kernel by handle.
#[inline]
pub fn find(function: u64) -> Result<Arc<Function>> {
    if handle::kind(function) != handle::FUNC {
        return Err(INVALID_HANDLE);
    }
    let functions = FUNCTIONS.read().unwrap_or_else(PoisonError::into_inner);
    match functions.get(handle::index(function)) {
        Some(Some(found)) if found.handle == function => Ok(found.clone()),
        _ => Err(INVALID_HANDLE),
    }
}

/// Returns a function by handle; a kernel of a library is an error.
pub fn own(function: u64) -> Result<Arc<Function>> {
    let found = find(function)?;
    if found.how == How::Kernel { Err(INVALID_HANDLE) } else { Ok(found) }
}

/// Looks a function up; only the first lookup asks the server.
pub fn get(client: &Client, parent: u64, how: How, name: CString) -> Result<u64> {
    // A kernel's function belongs to the context of the call, and a module's to the module's.
    let ctx = match how {
        How::Kernel => 0,
        How::Function => crate::thread::context().map(|_| 0)?,
        How::OfKernel => crate::thread::context()?,
    };
    let key = (parent, ctx << 2 | how as u64, name);
    if let Some(known) =
        BY_NAME.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().get(&key)
    {
        return Ok(*known);
    }
    // A kernel belongs to all clients, so its handle has the number 0.
    let new = handles::mint(handle::FUNC, if how == How::Kernel { 0 } else { client.number });
    let asked = ask(client, new, parent, how, &key.2).and_then(|(params, attributes)| {
        Ok((Function::new(new, key.2.clone(), how, parent, params)?, attributes))
    });
    let (function, attributes) = asked.inspect_err(|_| handles::retire(new))?;
    Ok(keep(client, key, function, attributes))
}

/// Parent, context with the kind of lookup, and name.
type Key = (u64, u64, CString);

/// Keeps a function that a worker knows; returns its handle, or that of an earlier lookup.
fn keep(client: &Client, key: Key, function: Function, attributes: Attributes) -> u64 {
    *function.known.lock().unwrap_or_else(PoisonError::into_inner) = 1 << client.number;
    *function.attributes.lock().unwrap_or_else(PoisonError::into_inner) = attributes;
    let new = function.handle;
    let slot = handle::index(new);
    let mut functions = FUNCTIONS.write().unwrap_or_else(PoisonError::into_inner);
    let mut names = BY_NAME.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(first) = names.get_or_insert_default().get(&key) {
        // Another thread has looked it up meanwhile, and a function has one handle. The other
        // handle stays with the worker.
        return *first;
    }
    if functions.len() <= slot {
        functions.resize(slot + 1, None);
    }
    functions[slot] = Some(Arc::new(function));
    names.get_or_insert_default().insert(key, new);
    new
}

/// Handles that a load offers to the worker for the functions of a small image.
///
/// So the program's lookups of these need no round trip.
pub struct Offered {
    how: How,
    /// The worker has used none of these; empty for a worker that describes no functions.
    handles: Vec<u64>,
}

impl Offered {
    /// Most functions of a small image: a compiler at run time makes one or a few.
    const MOST: usize = 8;

    /// Makes handles for functions of a module or kernels of a library.
    pub fn new(client: &Client, how: How) -> Self {
        let able = client.abilities & ability::QUICK_LOADS != 0;
        let server = if how == How::Kernel { 0 } else { client.number };
        let count = if able { Self::MOST } else { 0 };
        Self { how, handles: (0..count).map(|_| handles::mint(handle::FUNC, server)).collect() }
    }

    /// Writes the handles for the worker.
    pub fn write(&self, w: &mut Writer<'_>) {
        if !self.handles.is_empty() {
            w.word(self.handles.len() as u64);
            self.handles.iter().for_each(|handle| w.word(*handle));
        }
    }

    /// Keeps the functions that a worker describes in the rest of its reply.
    pub fn take(mut self, client: &Client, parent: u64, mut r: Reader<'_>) -> Result {
        if self.handles.is_empty() {
            return Ok(());
        }
        let count = word(&mut r)? as usize;
        if count > self.handles.len() {
            return Err(INVALID_IMAGE);
        }
        for new in self.handles.drain(..count).collect::<Vec<_>>() {
            let name = CString::new(string(&mut r)?).map_err(|_| INVALID_IMAGE)?;
            let (params, attributes) = described(client, &mut r)?;
            let function = Function::new(new, name.clone(), self.how, parent, params)?;
            keep(client, (parent, self.how as u64, name), function, attributes);
        }
        Ok(())
    }
}

impl Drop for Offered {
    fn drop(&mut self) {
        self.handles.iter().copied().for_each(handles::retire);
    }
}

/// Returns the function of a kernel in the current context.
pub fn of_kernel(client: &Client, kernel: &Function) -> Result<u64> {
    kernel.reach(client)?;
    get(client, kernel.handle, How::OfKernel, kernel.name.clone())
}

/// Answers about occupancy by number of the client, context of a kernel, and question.
type Occupancy = HashMap<(u8, u64, Vec<u8>), u64>;

/// Attributes by number of the client, attribute and device.
type Attributes = HashMap<(u8, i32, i32), i32>;

/// Makes a function known to a worker; returns its parameters and attributes.
fn ask(client: &Client, new: u64, parent: u64, how: How, name: &CStr) -> Result<(Vec<Param>, Attributes)> {
    let body = |w: &mut Writer<'_>| {
        w.word(new);
        w.word(parent);
        w.word(how as u64);
        w.bytes(name.to_bytes());
    };
    described(client, &mut client.call(op::GET_FUNCTION, body)?.reader())
}

/// Reads a worker's description of a function: its parameters and attributes.
fn described(client: &Client, r: &mut Reader<'_>) -> Result<(Vec<Param>, Attributes)> {
    let count = word(r)?;
    if count > MAX_PARAMS {
        return Err(INVALID_IMAGE);
    }
    let mut params = Vec::new();
    for _ in 0..count {
        let both = word(r)?;
        params.push(Param { offset: both as u32, size: (both >> 32) as u32 });
    }
    let count = word(r)?;
    let mut attributes = Attributes::new();
    for attribute in 0..count as i32 {
        let value = word(r)?;
        if value != u64::MAX {
            attributes.insert((client.number, attribute, OWN_DEVICE), value as u32 as i32);
        }
    }
    Ok((params, attributes))
}

/// Returns `true` for parameters that the library takes from a server without proof.
fn believed(params: &[Param]) -> bool {
    let end = params.last().map_or(0, |last| u64::from(last.offset) + u64::from(last.size));
    params.len() <= BELIEVED_PARAMS && end <= BELIEVED_BYTES
}

/// Removes the functions of an unloaded module or library.
pub fn forget(parent: u64) {
    let mut functions = FUNCTIONS.write().unwrap_or_else(PoisonError::into_inner);
    let mut gone = HashSet::new();
    for slot in functions.iter_mut() {
        if let Some(f) = slot
            && (f.parent == parent || gone.contains(&f.parent))
        {
            gone.insert(f.handle);
            *slot = None;
        }
    }
    let mut names = BY_NAME.lock().unwrap_or_else(PoisonError::into_inner);
    names.get_or_insert_default().retain(|_, f| !gone.contains(f));
}

/// Removes the lookups of a destroyed context.
pub fn forget_context(ctx: u64) {
    let mut names = BY_NAME.lock().unwrap_or_else(PoisonError::into_inner);
    names.get_or_insert_default().retain(|(_, asked, _), _| *asked >> 2 != ctx << 2 >> 2);
}

impl Function {
    /// Returns `true` for a kernel of a library, which belongs to no context.
    pub fn is_kernel(&self) -> bool {
        self.how == How::Kernel
    }

    /// Makes a function that no worker knows; an error for a layout that no kernel has.
    ///
    /// The layout is the server's word, and says how many bytes of the program a launch reads.
    pub fn new(handle: u64, name: CString, how: How, parent: u64, params: Vec<Param>) -> Result<Self> {
        let mut param_bytes = 0;
        for param in &params {
            let offset = param.offset as usize;
            let end = offset + param.size as usize;
            // Parameters lie one after the other.
            if offset < param_bytes || end > MAX_PARAM_BYTES {
                return Err(INVALID_IMAGE);
            }
            param_bytes = end;
        }
        Ok(Self {
            handle,
            name,
            how,
            parent,
            params,
            param_bytes,
            proven: OnceLock::new(),
            known: Mutex::default(),
            attributes: Mutex::default(),
            settings: Mutex::default(),
            occupancy: Mutex::default(),
        })
    }

    /// Checks that the program's image describes the parameters as the server does.
    ///
    /// Runs before a launch reads the program's memory by that layout. A program looks up many
    /// kernels that it never launches, and reading an image takes milliseconds.
    #[inline]
    pub fn prove(&self) -> Result {
        if *self.proven.get_or_init(|| self.is_as_its_image_says()) { Ok(()) } else { Err(INVALID_IMAGE) }
    }

    #[cold]
    fn is_as_its_image_says(&self) -> bool {
        let told = || self.params.iter().map(|param| param.size);
        let in_image =
            |longest| signatures::of_module(self.parent).find(&self.name.to_string_lossy(), longest);
        let proven = match self.how {
            How::OfKernel => find(self.parent).is_ok_and(|kernel| {
                kernel.prove().is_ok() && told().eq(kernel.params.iter().map(|param| param.size))
            }),
            How::Function | How::Kernel => match in_image(signatures::QUICK) {
                Some(known) => told().eq(known),
                None => {
                    believed(&self.params)
                        || in_image(signatures::MAX_UNPACKED_BYTES).is_some_and(|k| told().eq(k))
                }
            },
        };
        if !proven {
            trace::why(&format!(
                "kernel {}: server {} describes its parameters otherwise than the program's image; \
                 ask its administrator",
                self.name.to_string_lossy(),
                self.client().map_or("?", |client| client.link.server.as_str()),
            ));
        }
        proven
    }

    /// Returns the client to ask about it: for a kernel the current one.
    pub fn client(&self) -> Result<&'static Client> {
        if self.how == How::Kernel { clients::get() } else { clients::by_object(self.handle) }
    }

    /// Makes a kernel known to a client's worker, unless it is; an error for another client's
    /// function.
    pub fn reach(&self, client: &Client) -> Result {
        let bit = 1 << client.number;
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if *known & bit != 0 {
            return Ok(());
        }
        if self.how != How::Kernel {
            return Err(INVALID_HANDLE);
        }
        libraries::usable_on(self.parent, client)?;
        let (_, told) = ask(client, self.handle, self.parent, self.how, &self.name)?;
        self.attributes.lock().unwrap_or_else(PoisonError::into_inner).extend(told);
        *known |= bit;
        Ok(())
    }

    /// Returns an attribute for a device of the client; only the first call asks the server.
    pub fn attribute(&self, client: &Client, attribute: i32, device: i32) -> Result<i32> {
        let lock = || self.attributes.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (client.number, attribute, device);
        if let Some(value) = lock().get(&key) {
            return Ok(*value);
        }
        self.reach(client)?;
        // The call about a kernel names the device, and needs no context.
        let named =
            if device == OWN_DEVICE && self.is_kernel() && client.devices.len() == 1 { 0 } else { device };
        let reply = client.call(op::FUNC_ATTRIBUTE, |w| {
            w.word(self.handle);
            w.word(attribute as u32 as u64);
            w.word(if named == OWN_DEVICE { u64::MAX } else { named as u64 });
        })?;
        let value = word(&mut reply.reader())? as u32 as i32;
        lock().insert(key, value);
        Ok(value)
    }

    /// Sets an attribute (`what` 0), a cache configuration (1) or a shared-memory configuration
    /// (2).
    ///
    /// Waits for the driver's verdict, unless the driver has accepted this value already.
    pub fn set(&self, client: &Client, what: u32, key: i32, value: i32, device: i32) -> Result {
        let lock = || self.settings.lock().unwrap_or_else(PoisonError::into_inner);
        let setting = (client.number, what, key, device);
        if lock().get(&setting) == Some(&value) {
            return Ok(());
        }
        self.reach(client)?;
        client.call(op::FUNC_SET_ATTRIBUTE, |w| {
            w.word(self.handle);
            w.word(u64::from(what));
            w.word(key as u32 as u64);
            w.word(value as u32 as u64);
            w.word(if device == OWN_DEVICE { u64::MAX } else { device as u64 });
        })?;
        // A setting may change attributes and occupancy.
        self.forget_answers();
        lock().insert(setting, value);
        let functions = FUNCTIONS.read().unwrap_or_else(PoisonError::into_inner);
        for function in functions.iter().flatten().filter(|f| f.shares_settings(self)) {
            function.settings.lock().unwrap_or_else(PoisonError::into_inner).clear();
            function.forget_answers();
        }
        Ok(())
    }

    /// Returns `true` if another handle's setting may change this one's.
    ///
    /// A function without a setting of its own has its kernel's. A function may also be that of a
    /// library's kernel, found in the library's module.
    fn shares_settings(&self, other: &Self) -> bool {
        let kernel = |f: &Self| if f.how == How::OfKernel { f.parent } else { f.handle };
        self.handle != other.handle
            && match (self.how == How::Function, other.how == How::Function) {
                (false, false) => kernel(self) == kernel(other),
                (true, true) => false,
                _ => self.name == other.name,
            }
    }

    /// Returns the current context for a kernel, whose settings differ between contexts, else 0.
    #[inline]
    pub fn context_of_call(&self) -> u64 {
        if self.is_kernel() { crate::thread::current() } else { 0 }
    }

    /// Forgets what the driver has said about the function.
    fn forget_answers(&self) {
        self.attributes.lock().unwrap_or_else(PoisonError::into_inner).clear();
        self.occupancy.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    /// Returns the driver's answer about occupancy; only the first call with a question asks the
    /// server.
    pub fn occupancy(&self, client: &Client, question: Vec<u8>) -> Result<u64> {
        let lock = || self.occupancy.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (client.number, self.context_of_call(), question);
        if let Some(value) = lock().get(&key) {
            return Ok(*value);
        }
        self.reach(client)?;
        let reply = client.call(op::OCCUPANCY, |w| {
            let mut words = key.2.chunks_exact(8);
            let kind = words.next().unwrap_or_default();
            w.word(u64::from_le_bytes(kind.try_into().unwrap_or_default()));
            w.word(self.handle);
            for chunk in words {
                w.word(u64::from_le_bytes(chunk.try_into().unwrap_or_default()));
            }
        })?;
        let value = word(&mut reply.reader())?;
        lock().insert(key, value);
        Ok(value)
    }
}

/// Returns `true` if the driver has accepted a launch of this shape, so that the next one need not
/// wait.
#[inline]
pub fn accepted(shape: u64) -> bool {
    if crate::thread::seen(shape, false) {
        return true;
    }
    let known =
        ACCEPTED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().contains(&shape);
    if known {
        crate::thread::seen(shape, true);
    }
    known
}

/// Notes that the driver has accepted a launch of this shape.
pub fn accept(shape: u64) {
    ACCEPTED.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_default().insert(shape);
    crate::thread::seen(shape, true);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_worker::Program;

    fn function(program: &Program, how: How, name: &CStr) -> Result<u64> {
        // Two parameters, of 8 bytes at 0 and of 4 at 8; three attributes, of which the second is
        // not known.
        let both = |offset: u64, size: u64| offset | size << 32;
        program.answer(op::GET_FUNCTION, 0, &[2, both(0, 8), both(8, 4), 3, 1024, u64::MAX, 64]);
        get(program.client, 71, how, name.into())
    }

    #[test]
    fn function_is_looked_up_once() {
        let program = Program::new();
        let handle = function(&program, How::Function, c"once").unwrap();
        assert_eq!(function(&program, How::Function, c"once"), Ok(handle));
        assert_eq!(program.operations(), [op::GET_FUNCTION]);
        let known = find(handle).unwrap();
        assert_eq!((known.params.len(), known.param_bytes, known.params[1].offset), (2, 12, 8));
        assert!(own(handle).is_ok());
        let kernel = function(&program, How::Kernel, c"once").unwrap();
        assert_ne!(kernel, handle, "a kernel is another object");
        assert_eq!(own(kernel).err(), Some(INVALID_HANDLE));
    }

    #[test]
    fn attribute_is_asked_once_until_a_setting_may_have_changed_it() {
        let program = Program::new();
        let client = program.client;
        let known = find(function(&program, How::Function, c"attributes").unwrap()).unwrap();
        program.frames();
        let attribute = |number| known.attribute(client, number, OWN_DEVICE);
        assert_eq!((attribute(0), attribute(2)), (Ok(1024), Ok(64)), "they came with the function");
        assert!(program.frames().is_empty());
        program.answer(op::FUNC_ATTRIBUTE, 0, &[u64::from(-1i32 as u32)]);
        assert_eq!((attribute(1), attribute(1)), (Ok(-1), Ok(-1)));
        assert_eq!(program.operations(), [op::FUNC_ATTRIBUTE]);
        let set = |value| known.set(client, 0, 8, value, OWN_DEVICE);
        assert_eq!((set(9), set(9)), (Ok(()), Ok(())));
        assert_eq!(program.operations(), [op::FUNC_SET_ATTRIBUTE], "the driver has accepted the value");
        program.answer(op::FUNC_ATTRIBUTE, 0, &[512]);
        assert_eq!(attribute(0), Ok(512));
        program.answer(op::FUNC_SET_ATTRIBUTE, 1, &[]);
        assert_eq!((set(10), set(10)), (Err(1), Ok(())), "a refused value is asked again");
    }

    /// Returns a load's reply that describes functions, with one parameter and attribute each.
    fn load_reply(program: &Program, names: &[&str]) -> gpusession_link::Reply {
        let mut words = vec![names.len() as u64];
        for name in names {
            words.push(name.len() as u64);
            let mut text = [0; 8];
            text[..name.len()].copy_from_slice(name.as_bytes());
            words.push(u64::from_le_bytes(text));
            words.extend([1, 8 << 32, 1, 1024]);
        }
        program.answer(op::MODULE_LOAD, 0, &words);
        program.client.ask(op::MODULE_LOAD, |_| {}).unwrap()
    }

    #[test]
    fn a_load_brings_the_functions_of_a_small_image() {
        let program = Program::able(ability::QUICK_LOADS);
        let offered = Offered::new(program.client, How::Function);
        let handles = offered.handles.clone();
        let reply = load_reply(&program, &["one", "two"]);
        offered.take(program.client, 401, reply.reader()).unwrap();
        program.frames();
        let one = get(program.client, 401, How::Function, c"one".into()).unwrap();
        let two = get(program.client, 401, How::Function, c"two".into()).unwrap();
        assert_eq!([one, two], handles[..2]);
        let function = find(two).unwrap();
        assert_eq!((function.param_bytes, function.attribute(program.client, 0, OWN_DEVICE)), (8, Ok(1024)));
        assert!(program.frames().is_empty(), "no lookup asks");
        program.answer(op::GET_FUNCTION, 500, &[]);
        assert_eq!(get(program.client, 401, How::Function, c"three".into()), Err(500));
        forget(401);
        assert!(find(one).is_err());
    }

    #[test]
    fn a_worker_describes_no_more_functions_than_it_has_handles_for() {
        let program = Program::able(ability::QUICK_LOADS);
        let many = ["f"; Offered::MOST + 1];
        let offered = Offered::new(program.client, How::Function);
        let reply = load_reply(&program, &many);
        assert_eq!(offered.take(program.client, 402, reply.reader()), Err(INVALID_IMAGE));
        // Two of one name: the first one counts.
        let offered = Offered::new(program.client, How::Function);
        let first = offered.handles[0];
        let reply = load_reply(&program, &many[..2]);
        assert_eq!(offered.take(program.client, 402, reply.reader()), Ok(()));
        assert_eq!(get(program.client, 402, How::Function, c"f".into()), Ok(first));
        let program = Program::alone();
        let offered = Offered::new(program.client, How::Kernel);
        let reply = load_reply(&program, &[]);
        assert!(offered.handles.is_empty() && offered.take(program.client, 403, reply.reader()).is_ok());
    }

    #[test]
    fn unloaded_parent_takes_its_functions_along() {
        let program = Program::new();
        program.answer(op::GET_FUNCTION, 0, &[0, 0]);
        let kernel = get(program.client, 91, How::Kernel, c"kernel".into()).unwrap();
        program.answer(op::GET_FUNCTION, 0, &[0, 0]);
        let of_kernel = get(program.client, kernel, How::OfKernel, c"kernel".into()).unwrap();
        let other = function(&program, How::Function, c"stays").unwrap();
        forget(91);
        assert_eq!((find(kernel).err(), find(of_kernel).err()), (Some(INVALID_HANDLE), Some(INVALID_HANDLE)));
        assert!(find(other).is_ok());
        program.frames();
        assert!(get(program.client, 91, How::Kernel, c"kernel".into()).is_ok());
        assert_eq!(program.operations(), [op::GET_FUNCTION], "a new library may have the old handle");
    }

    #[test]
    fn a_server_cannot_name_more_of_a_program_than_a_kernel_takes() {
        let bytes = |params: &[(u32, u32)]| {
            let params = params.iter().map(|&(offset, size)| Param { offset, size }).collect();
            Function::new(1, c"f".into(), How::Function, 2, params).map(|function| function.param_bytes)
        };
        assert_eq!(bytes(&[]), Ok(0));
        assert_eq!(bytes(&[(0, 4), (8, 8), (16, 4)]), Ok(20));
        assert_eq!(bytes(&[(0, 32_764)]), Ok(32_764));
        for layout in [
            [(0, 32_765)].as_slice(),
            &[(0, 16_384), (16_384, 16_384)],
            &[(0, 8), (4, 8)],
            &[(8, 8), (0, 8)],
            &[(u32::MAX, u32::MAX)],
        ] {
            assert_eq!(bytes(layout), Err(INVALID_IMAGE), "{layout:?}");
        }
        // More parameters than a kernel has would be read beyond the program's list.
        let program = Program::new();
        program.answer(op::GET_FUNCTION, 0, &[MAX_PARAMS + 1]);
        assert_eq!(function(&program, How::Function, c"f").err(), Some(INVALID_IMAGE));
    }

    #[test]
    fn a_server_describes_no_more_of_a_program_than_its_image() {
        let program = Program::new();
        let image: &[u8] = b".version 8.4\n.entry f(.param .u64 a, .param .u32 b) { ret; }\0";
        let note = |parent| signatures::note(parent, signatures::Signatures::copied(&image.into()));
        let both = |offset: u64, size: u64| offset | size << 32;
        let get = |parent, how, name: CString, params: &[u64]| {
            let words = [&[params.len() as u64], params, &[0]].concat();
            program.answer(op::GET_FUNCTION, 0, &words);
            get(program.client, parent, how, name)
        };
        let ask = |parent, how, params: &[u64]| {
            let function = get(parent, how, c"f".into(), params)?;
            find(function)?.prove().map(|()| function)
        };
        (301..=307).for_each(note);
        let truth = [both(0, 8), both(8, 4)];
        for (parent, lie) in [
            (301, &[both(0, 8), both(8, 32_756)][..]),
            (302, &[both(0, 8)]),
            (303, &[both(0, 8), both(8, 4), both(12, 4)]),
        ] {
            assert_eq!(ask(parent, How::Function, lie), Err(INVALID_IMAGE), "{lie:?}");
        }
        assert!(ask(304, How::Function, &truth).is_ok());
        let kernel = ask(305, How::Kernel, &truth).unwrap();
        assert!(ask(kernel, How::OfKernel, &truth).is_ok());
        let kernel = ask(306, How::Kernel, &truth).unwrap();
        assert_eq!(ask(kernel, How::OfKernel, &[both(0, 9)]), Err(INVALID_IMAGE));
        let kernel = get(307, How::Kernel, c"f".into(), &[both(0, 9)]).unwrap();
        assert_eq!(ask(kernel, How::OfKernel, &[both(0, 9)]), Err(INVALID_IMAGE), "of a lie");
        // Of an image that the library cannot read, a server may name 4 KiB.
        assert!(ask(315, How::Function, &[both(0, 4096)]).is_ok());
        assert_eq!(ask(316, How::Function, &[both(0, 4097)]), Err(INVALID_IMAGE));
        let many: Vec<u64> = (0..=BELIEVED_PARAMS as u64).map(|i| both(i, 1)).collect();
        assert_eq!(ask(317, How::Function, &many), Err(INVALID_IMAGE));
        assert!(ask(318, How::Function, &many[1..].iter().map(|p| p - 1).collect::<Vec<_>>()).is_ok());
    }

    #[test]
    fn accepted_shape_is_known_to_every_thread() {
        let shape = 0x5a5a_0001;
        assert!(!accepted(shape));
        std::thread::spawn(move || accept(shape)).join().unwrap();
        assert!(accepted(shape) && !accepted(shape + 1));
    }
}
