//! Modules, libraries, kernels and functions.

use crate::config::CubinPolicy;
use crate::driver::context::Context;
use crate::driver::device::{BLOCKS_PER_SM, SHARED_OPTIN, SHARED_PER_BLOCK, THREADS_PER_SM};
use crate::driver::{config, driver};
use crate::errors::{self, INVALID_HANDLE, INVALID_VALUE, NOT_FOUND, Result};
use crate::fatbin::{self, Image};
use crate::memory::Allocation;
use crate::ptx;
use crate::ptx::ast::Reference;
use crate::ptx::code::Program;
use crate::ptx::exec::{Consts, resolve_consts};
use crate::registry::{Registry, handle};
use gpusession_image::elf::{self, Variable};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::CString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};

pub static MODULES: Registry<Module> = Registry::new();
pub static LIBRARIES: Registry<Library> = Registry::new();
pub static FUNCTIONS: Registry<Function> = Registry::new();
pub static KERNELS: Registry<Kernel> = Registry::new();

/// Returns the highest PTX version of a driver: 13.0 supports 9.0, and each minor release one more.
fn ptx_version(driver: u32) -> (u32, u32) {
    match driver {
        13000.. => (9, (driver - 13000) / 10),
        _ => (8, (driver.saturating_sub(12000)) / 10),
    }
}

/// A compiled image: bytecode of PTX, or the kernels and variables of machine code.
pub enum Content {
    Program(Arc<Program>),
    Machine { kernels: Vec<elf::Kernel>, variables: Vec<Variable> },
}

/// Compiles an image; the text of an error describes the cause.
pub fn compile(image: Image) -> std::result::Result<Content, (errors::Error, String)> {
    match image {
        Image::Ptx(text) => {
            std::thread::sleep(std::time::Duration::from_millis(config().jit_ms));
            let program =
                ptx::compile(&text).map_err(|e| (errors::INVALID_PTX, format!("ptxas fatal   : {e}")))?;
            if program.version > ptx_version(config().driver_version).max((8, 8)) {
                return Err((errors::UNSUPPORTED_PTX_VERSION, "ptxas fatal   : unsupported .version".into()));
            }
            if program.sm > 75 {
                return Err((
                    errors::NO_BINARY_FOR_GPU,
                    format!("ptxas fatal   : sm_{} is newer than this device", program.sm),
                ));
            }
            Ok(Content::Program(Arc::new(program)))
        }
        Image::Elf(_) if config().cubin == CubinPolicy::Refuse => Err((
            errors::NO_BINARY_FOR_GPU,
            "no kernel image is available for execution on the device".into(),
        )),
        Image::Elf(bytes) => {
            let (kernels, variables) =
                elf::read(&bytes).ok_or((errors::INVALID_IMAGE, "not a machine-code image".to_owned()))?;
            Ok(Content::Machine { kernels, variables })
        }
    }
}

/// Reads and compiles the image at `at`; prints an error on stderr if tracing is on.
///
/// # Safety
/// See [`fatbin::load`].
pub unsafe fn compile_at(at: *const u8) -> std::result::Result<Content, (errors::Error, String)> {
    // SAFETY: as for this function.
    let image = unsafe { fatbin::load(at, 75) }.map_err(|e| (e, String::new()))?;
    compile(image).inspect_err(|(code, text)| {
        if config().trace {
            eprintln!("simgpu: load failed with {}: {text}", code.0);
        }
    })
}

/// Attributes that a program can set.
#[derive(Clone, Default)]
pub struct Settings {
    pub max_dynamic_shared: Option<u32>,
    /// Whether the function has a value of its own, which one of its kernel does not change (H200).
    own_max_dynamic_shared: bool,
    pub others: HashMap<u32, i32>,
}

pub struct Function {
    pub name: CString,
    /// Program and function index; `None` for machine code.
    pub entry: Option<(Arc<Program>, u32)>,
    pub consts: Consts,
    pub params: Vec<(u32, u32)>,
    pub param_size: u32,
    pub settings: Mutex<Settings>,
    /// Handle of the module, which outlives its functions.
    pub module: usize,
    pub context: usize,
    /// Whether a lookup, `cuFuncLoad` or a launch has loaded it; a list of functions does not.
    pub loaded: AtomicBool,
    /// The module's variables, kept alive while a launch is queued.
    _variables: Arc<Vec<Arc<Allocation>>>,
}

impl Function {
    fn info(&self) -> Option<&ptx::code::Func> {
        self.entry.as_ref().map(|(p, f)| &p.funcs[*f as usize])
    }

    pub fn max_threads(&self) -> u32 {
        self.info().map_or(1024, |f| f.max_threads)
    }

    pub fn static_shared(&self) -> u32 {
        self.info().map_or(0, |f| f.shared_size)
    }

    pub fn max_dynamic_shared(&self) -> u32 {
        self.settings
            .lock()
            .max_dynamic_shared
            .unwrap_or(SHARED_PER_BLOCK.saturating_sub(self.static_shared()))
    }

    fn registers(&self) -> u32 {
        self.info().map_or(32, |f| f.rows.clamp(16, 255))
    }

    pub fn attribute(&self, id: u32) -> Option<i32> {
        // The two architectures: that of the code, and that of the device.
        let written_for = self.entry.as_ref().map_or(75, |(p, _)| p.sm);
        if let Some(v) = self.settings.lock().others.get(&id) {
            return Some(*v);
        }
        Some(match id {
            0 => self.max_threads() as i32,
            1 => self.static_shared() as i32,
            2 => self
                .entry
                .as_ref()
                .map_or(0, |(p, _)| p.vars.iter().filter(|v| v.constant).map(|v| v.size as i32).sum()),
            3 => self.info().map_or(0, |f| f.local_size as i32),
            4 => self.registers() as i32,
            5 => written_for as i32,
            6 => 75,
            7 => 0,
            8 => self.max_dynamic_shared() as i32,
            9 => -1,
            10..=17 => 0,
            _ => return None,
        })
    }

    pub fn set_attribute(&self, id: u32, value: i32) -> Result {
        self.set(id, value, true)
    }

    /// Sets an attribute of the function itself, or as one of its kernel.
    fn set(&self, id: u32, value: i32, own: bool) -> Result {
        match id {
            8 => {
                let v = u32::try_from(value).map_err(|_| INVALID_VALUE)?;
                if v + self.static_shared() > SHARED_OPTIN {
                    return Err(INVALID_VALUE);
                }
                let mut settings = self.settings.lock();
                if own || !settings.own_max_dynamic_shared {
                    settings.max_dynamic_shared = Some(v);
                }
                settings.own_max_dynamic_shared |= own;
            }
            9 if (-1..=100).contains(&value) => {
                self.settings.lock().others.insert(id, value);
            }
            10..=15 => {
                self.settings.lock().others.insert(id, value);
            }
            _ => return Err(INVALID_VALUE),
        }
        Ok(())
    }

    /// Returns the number of such blocks that one multiprocessor holds at a time.
    pub fn blocks_per_sm(&self, threads: u32, dynamic: u64) -> u32 {
        let warps = threads.div_ceil(32).max(1);
        let shared = u64::from(self.static_shared()) + dynamic;
        let by_shared =
            u64::from(SHARED_OPTIN).checked_div(shared).map_or(BLOCKS_PER_SM, |n| n.min(16) as u32);
        // Registers are allocated per warp in units of 256.
        let per_warp = (self.registers() * 32).next_multiple_of(256);
        let by_registers = 65536 / (per_warp * warps);
        (THREADS_PER_SM / (warps * 32)).min(BLOCKS_PER_SM).min(by_shared).min(by_registers)
    }
}

pub struct Module {
    pub context: usize,
    pub content: Arc<Content>,
    consts: Consts,
    variables: Arc<Vec<Arc<Allocation>>>,
    names: Vec<(String, usize)>,
    functions: Mutex<HashMap<String, Arc<Function>>>,
    pub library: Option<usize>,
}

impl Module {
    /// Loads an image into a context: allocates and initialises its variables.
    pub fn new(
        ctx: &Arc<Context>,
        content: Arc<Content>,
        library: Option<&Arc<Library>>,
    ) -> Result<Arc<Module>> {
        let space = &driver()?.space;
        let wanted: Vec<(String, u64)> = match &*content {
            Content::Program(p) => p.vars.iter().map(|v| (v.name.clone(), v.size)).collect(),
            Content::Machine { variables, .. } => {
                variables.iter().map(|v| (v.name.clone(), v.size)).collect()
            }
        };
        let mut variables: Vec<Arc<Allocation>> = Vec::new();
        for (name, size) in &wanted {
            // All contexts share the managed variables of a library.
            if let Some(a) = library.and_then(|l| l.managed.get(name)) {
                variables.push(a.clone());
                continue;
            }
            let made = match content.managed(name) {
                true => space.managed(ctx.device, handle(ctx), *size),
                false => space.variable(ctx.device, handle(ctx), *size),
            };
            match made {
                Ok(a) => variables.push(a),
                Err(e) => {
                    variables
                        .iter()
                        .filter(|a| a.context != 0)
                        .for_each(|a| drop(space.remove(a.base, |_| true)));
                    return Err(e);
                }
            }
        }
        let bases: Vec<u64> = variables.iter().map(|a| a.base).collect();
        let mut consts = Consts::default();
        if let Content::Program(p) = &*content {
            for (var, a) in p.vars.iter().zip(&variables).filter(|(_, a)| a.context != 0) {
                let mut bytes = var.init.clone();
                for r in &var.relocs {
                    let target = bases[r.var as usize].wrapping_add(r.offset as u64) >> r.shift;
                    let n = r.bytes as usize;
                    bytes[r.at as usize..][..n].copy_from_slice(&target.to_le_bytes()[..n]);
                }
                bytes.truncate(var.size as usize);
                bytes.resize(var.size as usize, 0);
                // SAFETY: the allocation has `var.size` bytes, and no other code has its address
                // yet.
                unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), a.host_ptr(), bytes.len()) };
            }
            consts = resolve_consts(p, &bases);
        }
        if let Content::Machine { variables: described, .. } = &*content {
            for (var, a) in described.iter().zip(&variables) {
                // SAFETY: the allocation has `var.size` bytes, at least as many as `init`; no other
                // code has its address yet.
                unsafe {
                    a.host_ptr().write_bytes(0, var.size as usize);
                    std::ptr::copy_nonoverlapping(var.init.as_ptr(), a.host_ptr(), var.init.len());
                }
            }
        }
        let names = wanted.into_iter().enumerate().map(|(i, (name, _))| (name, i)).collect();
        let module = Arc::new(Module {
            context: handle(ctx),
            content,
            consts,
            variables: Arc::new(variables),
            names,
            functions: Mutex::default(),
            library: library.map(handle),
        });
        MODULES.insert(module.clone());
        Ok(module)
    }

    pub fn function_names(&self) -> Vec<String> {
        self.content.kernel_names()
    }

    /// Returns a function, which is loaded then.
    pub fn function(self: &Arc<Self>, name: &str) -> Result<Arc<Function>> {
        let function = self.listed(name)?;
        function.loaded.store(true, Ordering::Relaxed);
        Ok(function)
    }

    /// Returns a function, which is loaded by its first use.
    pub fn listed(self: &Arc<Self>, name: &str) -> Result<Arc<Function>> {
        let mut functions = self.functions.lock();
        if let Some(f) = functions.get(name) {
            return Ok(f.clone());
        }
        let (params, param_size) = self.content.params(name).ok_or(NOT_FOUND)?;
        let entry = match &*self.content {
            Content::Program(p) => Some((p.clone(), p.kernels[name])),
            Content::Machine { .. } => None,
        };
        let f = Arc::new(Function {
            name: CString::new(name).map_err(|_| NOT_FOUND)?,
            entry,
            consts: self.consts.clone(),
            params,
            param_size,
            settings: Mutex::default(),
            module: handle(self),
            context: self.context,
            loaded: AtomicBool::new(false),
            _variables: self.variables.clone(),
        });
        FUNCTIONS.insert(f.clone());
        functions.insert(name.to_owned(), f.clone());
        Ok(f)
    }

    /// Returns address and size of a variable.
    pub fn global(&self, name: &str) -> Result<(u64, u64)> {
        let (_, i) = self.names.iter().find(|(n, _)| n == name).ok_or(NOT_FOUND)?;
        Ok((self.variables[*i].base, self.variables[*i].size))
    }

    /// Returns the address of a variable that refers to a texture or a surface.
    pub fn reference(&self, name: &str, kind: Reference) -> Result<u64> {
        let Content::Program(program) = &*self.content else { return Err(NOT_FOUND) };
        let found = program.vars.iter().position(|v| v.name == name && v.reference == Some(kind));
        Ok(self.variables[found.ok_or(NOT_FOUND)?].base)
    }

    pub fn unload(self: &Arc<Self>) {
        let _ = MODULES.remove(handle(self));
        for f in self.functions.lock().drain() {
            let _ = FUNCTIONS.remove(handle(&f.1));
        }
        if let Ok(d) = driver() {
            for a in self.variables.iter().filter(|a| a.context != 0) {
                d.space.remove(a.base, |x| x.id == a.id);
            }
        }
    }
}

impl Content {
    /// Returns offset and size of each parameter of a kernel, and the total size.
    pub fn params(&self, name: &str) -> Option<(Vec<(u32, u32)>, u32)> {
        match self {
            Content::Program(p) => {
                let f = &p.funcs[*p.kernels.get(name)? as usize];
                Some((f.params.iter().map(|s| (s.offset, s.size)).collect(), f.param_size))
            }
            Content::Machine { kernels, .. } => {
                let params = kernels.iter().find(|k| k.name == name)?.params.as_ref()?;
                let end = params.last().map_or(0, |p| p.offset + p.size);
                Some((params.iter().map(|p| (p.offset, p.size)).collect(), end))
            }
        }
    }

    fn managed(&self, name: &str) -> bool {
        matches!(self, Content::Program(p) if p.vars.iter().any(|v| v.managed && v.name == name))
    }

    pub fn kernel_names(&self) -> Vec<String> {
        match self {
            Content::Program(p) => p.kernel_order.clone(),
            Content::Machine { kernels, .. } => kernels.iter().map(|k| k.name.clone()).collect(),
        }
    }
}

/// An image that each context loads at its first use.
pub struct Library {
    pub content: Arc<Content>,
    modules: Mutex<HashMap<usize, Arc<Module>>>,
    kernels: Mutex<HashMap<String, Arc<Kernel>>>,
    /// Managed variables by name.
    pub managed: HashMap<String, Arc<Allocation>>,
}

pub struct Kernel {
    pub name: CString,
    pub library: Weak<Library>,
    settings: Mutex<Settings>,
}

impl Library {
    pub fn new(content: Content) -> Result<Arc<Library>> {
        let mut managed = HashMap::new();
        if let Content::Program(p) = &content {
            for v in p.vars.iter().filter(|v| v.managed) {
                let a = driver()?.space.managed(0, 0, v.size)?;
                // SAFETY: the allocation has `v.size` bytes, and no other code has its address yet.
                unsafe {
                    std::ptr::copy_nonoverlapping(
                        v.init.as_ptr(),
                        a.host_ptr(),
                        v.init.len().min(v.size as usize),
                    )
                };
                managed.insert(v.name.clone(), a);
            }
        }
        let library = Arc::new(Library {
            content: Arc::new(content),
            modules: Mutex::default(),
            kernels: Mutex::default(),
            managed,
        });
        LIBRARIES.insert(library.clone());
        Ok(library)
    }

    pub fn module(self: &Arc<Self>, ctx: &Arc<Context>) -> Result<Arc<Module>> {
        let mut modules = self.modules.lock();
        if let Some(m) = modules.get(&handle(ctx)) {
            return Ok(m.clone());
        }
        let m = Module::new(ctx, self.content.clone(), Some(self))?;
        modules.insert(handle(ctx), m.clone());
        Ok(m)
    }

    pub fn kernel(self: &Arc<Self>, name: &str) -> Result<Arc<Kernel>> {
        if !self.content.kernel_names().iter().any(|n| n == name) {
            return Err(NOT_FOUND);
        }
        let mut kernels = self.kernels.lock();
        if let Some(k) = kernels.get(name) {
            return Ok(k.clone());
        }
        let name_c = CString::new(name).map_err(|_| NOT_FOUND)?;
        let k = Arc::new(Kernel { name: name_c, library: Arc::downgrade(self), settings: Mutex::default() });
        KERNELS.insert(k.clone());
        kernels.insert(name.to_owned(), k.clone());
        Ok(k)
    }

    pub fn unload(self: &Arc<Self>) {
        for (_, k) in self.kernels.lock().drain() {
            let _ = KERNELS.remove(handle(&k));
        }
        for (_, m) in self.modules.lock().drain() {
            m.unload();
        }
        if let Ok(d) = driver() {
            for a in self.managed.values() {
                d.space.remove(a.base, |x| x.id == a.id);
            }
        }
    }
}

impl Kernel {
    /// Returns the kernel as a function of a context.
    pub fn function(&self, ctx: &Arc<Context>) -> Result<Arc<Function>> {
        let library = self.library.upgrade().ok_or(INVALID_HANDLE)?;
        let f = library.module(ctx)?.function(self.name.to_str().map_err(|_| NOT_FOUND)?)?;
        if let Some(v) = self.settings.lock().max_dynamic_shared {
            let mut settings = f.settings.lock();
            if !settings.own_max_dynamic_shared {
                settings.max_dynamic_shared = Some(v);
            }
        }
        Ok(f)
    }

    pub fn set_attribute(&self, ctx: &Arc<Context>, id: u32, value: i32) -> Result {
        self.function(ctx)?.set(id, value, false)?;
        if id == 8 {
            self.settings.lock().max_dynamic_shared = u32::try_from(value).ok();
        }
        Ok(())
    }
}

/// Returns the kernel that the program knows of a library's function, if any.
pub fn kernel_of(f: &Function) -> Option<Arc<Kernel>> {
    KERNELS.all().into_iter().find(|k| {
        let module = k.library.upgrade().and_then(|l| l.modules.lock().get(&f.context).map(handle));
        k.name == f.name && module == Some(f.module)
    })
}

/// Returns the function of a `CUfunction`, which may be a `CUkernel`; a kernel is loaded into
/// `ctx`.
pub fn function(h: usize, ctx: &Arc<Context>) -> Result<Arc<Function>> {
    if let Some(f) = FUNCTIONS.find(h) {
        return Ok(f);
    }
    KERNELS.find(h).ok_or(INVALID_HANDLE)?.function(ctx)
}

/// Drops all modules that were loaded into a context.
pub fn forget_context(ctx: usize) {
    for library in LIBRARIES.all() {
        let gone = library.modules.lock().remove(&ctx);
        if let Some(m) = gone {
            m.unload();
        }
    }
    for m in MODULES.all().into_iter().filter(|m| m.context == ctx) {
        m.unload();
    }
}
