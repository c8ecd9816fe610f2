//! Runs a program by the driver's calls, and compares its memory with the oracle's.

mod graphs;
pub mod refused;

use crate::driver::{Copy2D, Driver, Handle, KERNELS, LaunchAttribute, LaunchConfig, UpdateResult};
use crate::generate::SIGNALS;
use crate::oracle;
use crate::program::{Build, Kind, Op, Plane, Program, Span, StreamKind, Work, mix};
use anyhow::{Result, ensure};
use std::ffi::c_void;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::Duration;

/// The outcome of one program.
pub struct Outcome {
    pub calls: usize,
    /// A hash of all results of calls, and of the memory at the end.
    pub digest: u64,
    /// Calls of valid steps that failed: step, name, result.
    pub failed: Vec<(usize, &'static str, u32)>,
    /// The results of calls that the driver has to refuse: step, name, result.
    pub refused: Vec<(usize, &'static str, u32)>,
    /// The first wrong byte of each buffer.
    pub wrong: Vec<Wrong>,
}

pub struct Wrong {
    pub buffer: usize,
    pub byte: usize,
    pub found: u8,
    pub expected: u8,
    pub count: usize,
    pub writer: Option<usize>,
}

/// A device of the driver, with the kernels.
pub struct Device {
    driver: Driver,
    context: Handle,
    mix: Handle,
    fold: Handle,
    /// Multiplies the spins of kernels: a card is faster than a simulation.
    spin: u32,
}

// SAFETY: the driver's handles may be used by any thread.
unsafe impl Sync for Device {}

const LEGACY: Handle = 1 as Handle;
const PER_THREAD: Handle = 2 as Handle;

impl Device {
    pub fn open(spin: u32) -> Result<Device> {
        let driver = Driver::load()?;
        let (mut device, mut context, mut module) = (0, null_mut(), null_mut());
        let (mut mix, mut fold) = (null_mut(), null_mut());
        // SAFETY: every pointer is a local of the right type, or a string with a terminator.
        let results = unsafe {
            [
                (driver.cuInit)(0),
                (driver.cuDeviceGet)(&raw mut device, 0),
                (driver.cuDevicePrimaryCtxRetain)(&raw mut context, device),
                (driver.cuCtxSetCurrent)(context),
                (driver.cuModuleLoadData)(&raw mut module, KERNELS.as_ptr().cast()),
                (driver.cuModuleGetFunction)(&raw mut mix, module, c"mix".as_ptr()),
                (driver.cuModuleGetFunction)(&raw mut fold, module, c"fold".as_ptr()),
            ]
        };
        ensure!(results == [0; 7], "CUDA: cannot be started: results of the first calls: {results:?}");
        let device = Device { driver, context, mix, fold, spin };
        device.load_kernels()?;
        Ok(device)
    }

    /// Launches each kernel once, and fills memory.
    ///
    /// The driver loads code at its first use, and waits for streams then. So a first launch behind
    /// a stream that waits for a signal could stop a program for ever.
    fn load_kernels(&self) -> Result<()> {
        const SIZE: usize = 64;
        let driver = &self.driver;
        let mut memory = 0;
        // SAFETY: the pointer is a local of the right type.
        let allocated = unsafe { (driver.cuMemAlloc_v2)(&raw mut memory, SIZE) };
        ensure!(allocated == 0, "CUDA: cannot allocate memory: result {allocated}");
        // Target, source, one word, and no salt or spin.
        let mut values = [memory, memory + SIZE as u64 / 2, 1, 0, 0];
        let mut parameters = values.each_mut().map(|value| (&raw mut *value).cast::<c_void>());
        let mut launch = |kernel| {
            let parameters = parameters.as_mut_ptr();
            // SAFETY: the kernel has these parameters or the first ones; its words are in the
            // memory.
            unsafe { (driver.cuLaunchKernel)(kernel, 1, 1, 1, 1, 1, 1, 0, LEGACY, parameters, null_mut()) }
        };
        let launched = [launch(self.mix), launch(self.fold)];
        // SAFETY: the fills lie in the memory, which is freed after them.
        let filled = unsafe {
            [
                (driver.cuMemsetD8_v2)(memory, 0, SIZE),
                (driver.cuMemsetD16_v2)(memory, 0, SIZE / 2),
                (driver.cuMemsetD32_v2)(memory, 0, SIZE / 4),
                (driver.cuCtxSynchronize)(),
                (driver.cuMemFree_v2)(memory),
            ]
        };
        let done = launched == [0; 2] && filled == [0; 5];
        ensure!(done, "CUDA: kernels cannot run: results of the first ones: {launched:?} {filled:?}");
        Ok(())
    }

    /// Runs a program, whose first thread is the calling one.
    pub fn run(&self, program: &Program) -> Outcome {
        // Memory of a stack, which a driver may treat otherwise than the heap.
        let mut stack = [0u64; STACK / 8];
        let run = Run::new(self, program, stack.as_mut_ptr().cast());
        std::thread::scope(|scope| {
            for thread in 1..program.threads {
                let run = &run;
                scope.spawn(move || run.thread(thread));
            }
            run.thread(0);
        });
        run.finish()
    }
}

const STACK: usize = 256 << 10;

#[derive(Clone, Copy)]
struct Memory {
    host: *mut u8,
    device: u64,
}

struct Graph {
    exec: Handle,
    build: Build,
}

/// The argument of a function of the program.
struct HostCall {
    to: *mut u8,
    from: *const u8,
    words: usize,
    salt: u32,
    sleep: u32,
}

struct Run<'d> {
    device: &'d Device,
    program: &'d Program,
    stack: *mut u8,
    streams: Vec<Handle>,
    events: Vec<Handle>,
    /// Executable graphs that record an event each, and that wait for one.
    recording: Vec<Handle>,
    waiting: Vec<Handle>,
    signals: u64,
    memory: Vec<Mutex<Option<Memory>>>,
    graphs: Mutex<Vec<Option<Graph>>>,
    /// Arguments of functions, which graphs may use until the end.
    host_calls: Mutex<Vec<usize>>,
    results: Mutex<Vec<(usize, &'static str, u32)>>,
    done: Mutex<Vec<bool>>,
    changed: Condvar,
    /// The step that each thread is at, for the report of a program that hangs.
    at: Vec<AtomicU64>,
}

// SAFETY: raw pointers name memory that steps access in an order which the program's checks ensure;
// handles may be used by any thread.
unsafe impl Sync for Run<'_> {}

/// Words of both sides: `to = mix(to, from, salt)`.
///
/// # Safety
/// Both sides have `words` words, which nothing else accesses meanwhile.
unsafe fn mix_words(call: &HostCall) {
    std::thread::sleep(Duration::from_micros(call.sleep.into()));
    for word in 0..call.words {
        // SAFETY: by the caller; words may lie at any address.
        unsafe {
            let to = call.to.cast::<u32>().add(word);
            let from = call.from.cast::<u32>().add(word).read_unaligned();
            to.write_unaligned(mix(to.read_unaligned(), from, call.salt));
        }
    }
}

unsafe extern "C" fn host_function(data: *mut c_void) {
    // SAFETY: `Run::host_call` made the argument, which lives until the program's end; the program
    // orders the memory's other accesses.
    unsafe { mix_words(&*data.cast::<HostCall>()) }
}

/// Whether an event is created with `CU_EVENT_DISABLE_TIMING`.
fn without_timing(event: usize) -> bool {
    event.is_multiple_of(2)
}

impl<'d> Run<'d> {
    fn new(device: &'d Device, program: &'d Program, stack: *mut u8) -> Run<'d> {
        let mut run = Run {
            device,
            program,
            stack,
            streams: Vec::new(),
            events: vec![null_mut(); program.events],
            recording: Vec::new(),
            waiting: Vec::new(),
            signals: 0,
            memory: program.buffers.iter().map(|_| Mutex::new(None)).collect(),
            graphs: Mutex::default(),
            host_calls: Mutex::default(),
            results: Mutex::default(),
            done: Mutex::new(vec![false; program.steps.len()]),
            changed: Condvar::new(),
            at: (0..program.threads).map(|_| AtomicU64::new(0)).collect(),
        };
        let driver = &device.driver;
        for kind in &program.streams {
            let mut stream = null_mut();
            let created = match kind {
                StreamKind::Legacy | StreamKind::PerThread(_) => None,
                StreamKind::Blocking => Some(0),
                StreamKind::NonBlocking => Some(1),
            };
            match (kind, created) {
                (_, Some(flags)) => {
                    // SAFETY: the pointer is a local of the right type.
                    let result = unsafe { (driver.cuStreamCreate)(&raw mut stream, flags) };
                    run.note(0, "cuStreamCreate", result);
                }
                (StreamKind::PerThread(_), None) => stream = PER_THREAD,
                (_, None) => stream = LEGACY,
            }
            run.streams.push(stream);
        }
        for event in 0..program.events {
            let flags = if without_timing(event) { 2 } else { 0 };
            let mut handle = null_mut();
            // SAFETY: the pointer is a local of the right type.
            run.note(0, "cuEventCreate", unsafe { (driver.cuEventCreate)(&raw mut handle, flags) });
            run.events[event] = handle;
            let [recording, waiting] = [driver.cuGraphAddEventRecordNode, driver.cuGraphAddEventWaitNode]
                .map(|add| {
                    let (mut graph, mut node, mut executable) = (null_mut(), null_mut(), null_mut());
                    // SAFETY: the pointers are locals of the right types; the event lives until the
                    // program's end.
                    unsafe {
                        run.note(0, "cuGraphCreate", (driver.cuGraphCreate)(&raw mut graph, 0));
                        let added = add(&raw mut node, graph, std::ptr::null(), 0, handle);
                        run.note(0, "cuGraphAddEventNode", added);
                        let made = (driver.cuGraphInstantiateWithFlags)(&raw mut executable, graph, 0);
                        run.note(0, "cuGraphInstantiateWithFlags", made);
                        run.note(0, "cuGraphDestroy", (driver.cuGraphDestroy)(graph));
                    }
                    executable
                });
            run.recording.push(recording);
            run.waiting.push(waiting);
        }
        let mut signals = 0;
        // SAFETY: the pointer is a local; the fill lies in the memory.
        unsafe {
            run.note(0, "cuMemAlloc", (driver.cuMemAlloc_v2)(&raw mut signals, SIGNALS * 4));
            run.note(0, "cuMemsetD32", (driver.cuMemsetD32_v2)(signals, 0, SIGNALS));
            run.note(0, "cuCtxSynchronize", (driver.cuCtxSynchronize)());
        }
        run.signals = signals;
        run
    }

    fn note(&self, step: usize, name: &'static str, result: u32) {
        self.judge(step, result);
        self.results.lock().expect("no thread panics").push((step, name, result));
    }

    fn thread(&self, thread: usize) {
        // SAFETY: the context lives until the process exits.
        self.note(0, "cuCtxSetCurrent", unsafe { (self.device.driver.cuCtxSetCurrent)(self.device.context) });
        for (number, step) in self.program.steps.iter().enumerate() {
            if step.thread == thread {
                self.at[thread].store(number as u64, Ordering::Relaxed);
                CURRENT[thread].store(number as u64, Ordering::Relaxed);
                self.step(number, &step.op);
                self.done.lock().expect("no thread panics")[number] = true;
                self.changed.notify_all();
            }
        }
    }

    /// Records an event or waits for one.
    fn event(&self, number: usize, op: &Op) {
        let driver = &self.device.driver;
        // SAFETY: the handles live until the program's end.
        let (name, result) = unsafe {
            match *op {
                Op::Record(event, stream) => {
                    ("cuEventRecord", (driver.cuEventRecord)(self.events[event], self.streams[stream]))
                }
                Op::GraphRecord(event, stream) => {
                    ("cuGraphLaunch", (driver.cuGraphLaunch)(self.recording[event], self.streams[stream]))
                }
                Op::GraphWait(stream, event) => {
                    ("cuGraphLaunch", (driver.cuGraphLaunch)(self.waiting[event], self.streams[stream]))
                }
                Op::WaitEvent(stream, event) => (
                    "cuStreamWaitEvent",
                    (driver.cuStreamWaitEvent)(self.streams[stream], self.events[event], 0),
                ),
                Op::SyncEvent(event) => {
                    ("cuEventSynchronize", (driver.cuEventSynchronize)(self.events[event]))
                }
                Op::KernelRecord(event, stream) => return self.launch_recording(number, event, stream),
                _ => return,
            }
        };
        self.note(number, name, result);
    }

    /// Launches a kernel without work that records an event.
    fn launch_recording(&self, number: usize, event: usize, stream: usize) {
        /// `CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT`
        const COMPLETION_EVENT: u32 = 12;
        let driver = &self.device.driver;
        if !without_timing(event) {
            // SAFETY: the handles live until the program's end.
            let recorded = unsafe { (driver.cuEventRecord)(self.events[event], self.streams[stream]) };
            self.note(number, "cuEventRecord", recorded);
            return;
        }
        let attribute = LaunchAttribute { id: COMPLETION_EVENT, event: self.events[event], rest: [0; 7] };
        let config = LaunchConfig {
            grid: [1; 3],
            block: [1; 3],
            shared: 0,
            stream: self.streams[stream],
            attributes: &raw const attribute,
            count: 1,
        };
        let (mut to, mut from) = (self.signals, self.signals);
        let (mut words, mut salt, mut spin) = (0u32, 0u32, 0u32);
        let mut parameters: [*mut c_void; 5] = [
            (&raw mut to).cast(),
            (&raw mut from).cast(),
            (&raw mut words).cast(),
            (&raw mut salt).cast(),
            (&raw mut spin).cast(),
        ];
        // SAFETY: the kernel has these parameters, and accesses no memory without words.
        let launched = unsafe {
            (driver.cuLaunchKernelEx)(&raw const config, self.device.mix, parameters.as_mut_ptr(), null_mut())
        };
        self.note(number, "cuLaunchKernelEx", launched);
    }

    fn step(&self, number: usize, op: &Op) {
        let driver = &self.device.driver;
        let note = |name, result| self.note(number, name, result);
        // SAFETY: handles and memory of a valid program live while a step uses them; pointers are
        // locals of the right types.
        unsafe {
            match op {
                Op::Allocate(buffer) => self.allocate(number, *buffer),
                Op::AllocateIn(buffer, stream) => {
                    let mut device = 0;
                    let size = self.program.buffers[*buffer].size;
                    note(
                        "cuMemAllocAsync",
                        (driver.cuMemAllocAsync)(&raw mut device, size, self.streams[*stream]),
                    );
                    *self.memory[*buffer].lock().expect("no thread panics") =
                        Some(Memory { host: null_mut(), device });
                }
                Op::Free(buffer) => self.free(number, *buffer),
                Op::FreeIn(buffer, stream) => {
                    let memory = self.take(*buffer);
                    note("cuMemFreeAsync", (driver.cuMemFreeAsync)(memory.device, self.streams[*stream]));
                }
                Op::Enqueue(work, stream) => self.enqueue(number, work, self.streams[*stream]),
                Op::Call(work) => self.call(number, work),
                Op::Touch(work) => {
                    if let Work::HostMix { to, from, salt, sleep } = *work {
                        mix_words(&self.host_mix(to, from, salt, sleep));
                    }
                }
                Op::Sleep(time) => std::thread::sleep(Duration::from_micros((*time).into())),
                Op::Record(..)
                | Op::GraphRecord(..)
                | Op::KernelRecord(..)
                | Op::WaitEvent(..)
                | Op::GraphWait(..)
                | Op::SyncEvent(_) => self.event(number, op),
                Op::SyncStream(stream) => {
                    note("cuStreamSynchronize", (driver.cuStreamSynchronize)(self.streams[*stream]))
                }
                Op::SyncContext => note("cuCtxSynchronize", (driver.cuCtxSynchronize)()),
                Op::Query(stream) => {
                    // Ready or not ready: both are right.
                    let result = (driver.cuStreamQuery)(self.streams[*stream]);
                    note("cuStreamQuery", if result == 600 { 0 } else { result });
                }
                Op::Signal(stream, slot) => {
                    let address = self.signals + 4 * *slot as u64;
                    note(
                        "cuStreamWriteValue32",
                        (driver.cuStreamWriteValue32_v2)(self.streams[*stream], address, 1, 0),
                    );
                }
                Op::WaitSignal(stream, slot) => {
                    let address = self.signals + 4 * *slot as u64;
                    note(
                        "cuStreamWaitValue32",
                        (driver.cuStreamWaitValue32_v2)(self.streams[*stream], address, 1, 0),
                    );
                }
                Op::Await(step) => {
                    let mut done = self.done.lock().expect("no thread panics");
                    while !done[*step] {
                        done = self.changed.wait(done).expect("no thread panics");
                    }
                }
                Op::Define(graph, build, nodes) => {
                    let exec = self.instantiate(number, *build, nodes);
                    let mut graphs = self.graphs.lock().expect("no thread panics");
                    while graphs.len() <= *graph {
                        graphs.push(None);
                    }
                    graphs[*graph] = Some(Graph { exec, build: *build });
                }
                Op::Update(graph, nodes) => {
                    let (exec, build) = self.graph(*graph);
                    let fresh = self.build(number, build, nodes);
                    let mut result = UpdateResult::default();
                    note("cuGraphExecUpdate", (driver.cuGraphExecUpdate_v2)(exec, fresh, &raw mut result));
                    note("cuGraphDestroy", (driver.cuGraphDestroy)(fresh));
                }
                Op::Launch(graph, stream) => {
                    let (exec, _) = self.graph(*graph);
                    note("cuGraphLaunch", (driver.cuGraphLaunch)(exec, self.streams[*stream]));
                }
                Op::Destroy(graph) => {
                    let graph = self.graphs.lock().expect("no thread panics")[*graph].take();
                    let exec = graph.map_or(null_mut(), |graph| graph.exec);
                    note("cuGraphExecDestroy", (driver.cuGraphExecDestroy)(exec));
                }
                Op::Refused(invalid) => self.refused(number, *invalid),
            }
        }
    }

    fn graph(&self, graph: usize) -> (Handle, Build) {
        let graphs = self.graphs.lock().expect("no thread panics");
        let graph = graphs[graph].as_ref().expect("a valid program uses live graphs");
        (graph.exec, graph.build)
    }

    fn allocate(&self, number: usize, buffer: usize) {
        let driver = &self.device.driver;
        let size = self.program.buffers[buffer].size;
        let mut memory = Memory { host: null_mut(), device: 0 };
        // SAFETY: pointers are locals; cleared memory has `size` bytes.
        unsafe {
            match self.program.buffers[buffer].kind {
                Kind::Device => {
                    self.note(number, "cuMemAlloc", (driver.cuMemAlloc_v2)(&raw mut memory.device, size))
                }
                Kind::Managed => {
                    self.note(
                        number,
                        "cuMemAllocManaged",
                        (driver.cuMemAllocManaged)(&raw mut memory.device, size, 1),
                    );
                    memory.host = memory.device as *mut u8;
                }
                Kind::Pinned(flags) => {
                    let mut host = null_mut();
                    let result = (driver.cuMemHostAlloc)(&raw mut host, size, flags);
                    self.note(number, "cuMemHostAlloc", result);
                    memory.host = host.cast();
                    if result == 0 {
                        memory.host.write_bytes(0, size);
                    }
                }
                Kind::Registered => {
                    memory.host = heap(size);
                    let flags = 1 | 2;
                    self.note(
                        number,
                        "cuMemHostRegister",
                        (driver.cuMemHostRegister_v2)(memory.host.cast(), size, flags),
                    );
                }
                Kind::Pageable => memory.host = heap(size),
                Kind::Stack => {
                    // Each buffer has its own part.
                    let before =
                        self.program.buffers[..buffer].iter().filter(|other| other.kind == Kind::Stack);
                    let offset: usize = before.map(|other| other.size.next_multiple_of(64)).sum();
                    memory.host = self.stack.add(offset);
                }
                Kind::Pool => unreachable!("a stream allocates it"),
            }
        }
        *self.memory[buffer].lock().expect("no thread panics") = Some(memory);
    }

    fn take(&self, buffer: usize) -> Memory {
        self.memory[buffer]
            .lock()
            .expect("no thread panics")
            .take()
            .expect("a valid program frees live memory")
    }

    fn free(&self, number: usize, buffer: usize) {
        let driver = &self.device.driver;
        let memory = self.take(buffer);
        let size = self.program.buffers[buffer].size;
        // SAFETY: the memory is live, and no work uses it any more.
        unsafe {
            match self.program.buffers[buffer].kind {
                Kind::Device | Kind::Managed | Kind::Pool => {
                    self.note(number, "cuMemFree", (driver.cuMemFree_v2)(memory.device));
                }
                Kind::Pinned(_) => {
                    self.note(number, "cuMemFreeHost", (driver.cuMemFreeHost)(memory.host.cast()))
                }
                Kind::Registered => {
                    self.note(
                        number,
                        "cuMemHostUnregister",
                        (driver.cuMemHostUnregister)(memory.host.cast()),
                    );
                    release(memory.host, size);
                }
                Kind::Pageable => release(memory.host, size),
                Kind::Stack => {}
            }
        }
    }

    fn memory(&self, buffer: usize) -> Memory {
        self.memory[buffer].lock().expect("no thread panics").expect("a valid program uses live memory")
    }

    /// The address by which copies name memory.
    fn address(&self, span: Span) -> u64 {
        let memory = self.memory(span.buffer);
        let start = if memory.host.is_null() { memory.device } else { memory.host as u64 };
        start + span.offset as u64
    }

    /// The address by which kernels name memory.
    fn on_device(&self, number: usize, span: Span) -> u64 {
        let memory = self.memory(span.buffer);
        let mut device = memory.device;
        if device == 0 {
            // SAFETY: the pointer is a local of the right type.
            let result = unsafe {
                (self.device.driver.cuMemHostGetDevicePointer_v2)(&raw mut device, memory.host.cast(), 0)
            };
            self.note(number, "cuMemHostGetDevicePointer", result);
        }
        device + span.offset as u64
    }

    fn host_mix(&self, to: Span, from: Span, salt: u32, sleep: u32) -> HostCall {
        let at = |span: Span| self.memory(span.buffer).host.wrapping_add(span.offset);
        HostCall { to: at(to), from: at(from), words: to.len / 4, salt, sleep }
    }

    /// The argument of a function that the driver calls.
    fn host_call(&self, to: Span, from: Span, salt: u32, sleep: u32) -> *mut c_void {
        let call = Box::into_raw(Box::new(self.host_mix(to, from, salt, sleep)));
        self.host_calls.lock().expect("no thread panics").push(call as usize);
        call.cast()
    }

    fn is_host(&self, span: Span) -> bool {
        let kind = self.program.buffers[span.buffer].kind;
        kind.on_host() && kind != Kind::Managed
    }

    fn enqueue(&self, number: usize, work: &Work, stream: Handle) {
        let driver = &self.device.driver;
        let note = |name, result| self.note(number, name, result);
        // SAFETY: a valid program names live memory, and structures are locals of the right types.
        unsafe {
            match *work {
                Work::Copy { to, from, typed } => {
                    let (target, source, len) = (self.address(to), self.address(from), to.len);
                    match (self.is_host(to), self.is_host(from)) {
                        (false, true) if typed => {
                            note(
                                "cuMemcpyHtoDAsync",
                                (driver.cuMemcpyHtoDAsync_v2)(target, source as *const c_void, len, stream),
                            );
                        }
                        (true, false) if typed => {
                            note(
                                "cuMemcpyDtoHAsync",
                                (driver.cuMemcpyDtoHAsync_v2)(target as *mut c_void, source, len, stream),
                            );
                        }
                        (false, false) if typed => {
                            note(
                                "cuMemcpyDtoDAsync",
                                (driver.cuMemcpyDtoDAsync_v2)(target, source, len, stream),
                            );
                        }
                        _ => note("cuMemcpyAsync", (driver.cuMemcpyAsync)(target, source, len, stream)),
                    }
                }
                Work::Copy2D { to, from, width, height } => {
                    let copy = self.copy_2d(to, from, width, height);
                    note("cuMemcpy2DAsync", (driver.cuMemcpy2DAsync_v2)(&raw const copy, stream));
                }
                Work::Fill { to, value, width } => {
                    let (target, count) = (self.on_device(number, to), to.len / width);
                    match width {
                        1 => note(
                            "cuMemsetD8Async",
                            (driver.cuMemsetD8Async)(target, value as u8, count, stream),
                        ),
                        2 => note(
                            "cuMemsetD16Async",
                            (driver.cuMemsetD16Async)(target, value as u16, count, stream),
                        ),
                        _ => {
                            note("cuMemsetD32Async", (driver.cuMemsetD32Async)(target, value, count, stream))
                        }
                    }
                }
                Work::Mix { .. } | Work::Fold { .. } => {
                    let mut kernel = self.kernel(number, work);
                    let mut parameters = kernel.parameters();
                    let result = (driver.cuLaunchKernel)(
                        kernel.function,
                        kernel.grid,
                        1,
                        1,
                        kernel.block,
                        1,
                        1,
                        0,
                        stream,
                        parameters.as_mut_ptr(),
                        null_mut(),
                    );
                    note("cuLaunchKernel", result);
                }
                Work::HostMix { to, from, salt, sleep } => {
                    let data = self.host_call(to, from, salt, sleep);
                    note("cuLaunchHostFunc", (driver.cuLaunchHostFunc)(stream, host_function, data));
                }
            }
        }
    }

    fn call(&self, number: usize, work: &Work) {
        let driver = &self.device.driver;
        let note = |name, result| self.note(number, name, result);
        // SAFETY: as in `enqueue`.
        unsafe {
            match *work {
                Work::Copy { to, from, typed } => {
                    let (target, source, len) = (self.address(to), self.address(from), to.len);
                    match (self.is_host(to), self.is_host(from)) {
                        (false, true) if typed => {
                            note(
                                "cuMemcpyHtoD",
                                (driver.cuMemcpyHtoD_v2)(target, source as *const c_void, len),
                            );
                        }
                        (true, false) if typed => {
                            note(
                                "cuMemcpyDtoH",
                                (driver.cuMemcpyDtoH_v2)(target as *mut c_void, source, len),
                            );
                        }
                        (false, false) if typed => {
                            note("cuMemcpyDtoD", (driver.cuMemcpyDtoD_v2)(target, source, len))
                        }
                        _ => note("cuMemcpy", (driver.cuMemcpy)(target, source, len)),
                    }
                }
                Work::Copy2D { to, from, width, height } => {
                    let copy = self.copy_2d(to, from, width, height);
                    note("cuMemcpy2D", (driver.cuMemcpy2D_v2)(&raw const copy));
                }
                Work::Fill { to, value, width } => {
                    let (target, count) = (self.on_device(number, to), to.len / width);
                    match width {
                        1 => note("cuMemsetD8", (driver.cuMemsetD8_v2)(target, value as u8, count)),
                        2 => note("cuMemsetD16", (driver.cuMemsetD16_v2)(target, value as u16, count)),
                        _ => note("cuMemsetD32", (driver.cuMemsetD32_v2)(target, value, count)),
                    }
                }
                _ => unreachable!("only copies and fills have synchronous calls"),
            }
        }
    }

    fn copy_2d(&self, to: Plane, from: Plane, width: usize, height: usize) -> Copy2D {
        let side = |plane: Plane| {
            let span = plane.span(width, height);
            let address = self.address(span);
            if self.is_host(span) { (1, address, 0) } else { (2, 0, address) }
        };
        let (src_type, src_host, src_device) = side(from);
        let (dst_type, dst_host, dst_device) = side(to);
        Copy2D {
            src_x: 0,
            src_y: 0,
            src_type,
            src_host: src_host as *const c_void,
            src_device,
            src_array: null_mut(),
            src_pitch: from.pitch,
            dst_x: 0,
            dst_y: 0,
            dst_type,
            dst_host: dst_host as *mut c_void,
            dst_device,
            dst_array: null_mut(),
            dst_pitch: to.pitch,
            width,
            height,
        }
    }

    fn kernel(&self, number: usize, work: &Work) -> Kernel {
        let (to, from, salt, spin, function) = match *work {
            Work::Mix { to, from, salt, spin } => (to, from, salt, spin * self.device.spin, self.device.mix),
            Work::Fold { to, from, salt } => (to, from, salt, 0, self.device.fold),
            _ => unreachable!("only these are kernels"),
        };
        let threads = (to.len / 4) as u32;
        let fold = matches!(work, Work::Fold { .. });
        Kernel {
            function,
            grid: if fold { 1 } else { threads.div_ceil(128).min(8) },
            block: if fold { threads } else { 128 },
            to: self.on_device(number, to),
            from: self.on_device(number, from),
            words: (from.len / 4) as u32,
            salt,
            spin,
        }
    }

    /// Compares the memory, and frees everything.
    fn finish(self) -> Outcome {
        let driver = &self.device.driver;
        let end = self.program.steps.len();
        // SAFETY: no thread runs steps any more; handles are live, and spans lie in their buffers.
        unsafe {
            self.note(end, "cuCtxSynchronize", (driver.cuCtxSynchronize)());
        }
        let mut hash = Hash::new();
        let mut wrong = Vec::new();
        for (buffer, expected) in oracle::result(self.program).into_iter().enumerate() {
            let Some(expected) = expected else { continue };
            let memory = self.memory(buffer);
            let mut found = vec![0u8; expected.len()];
            // SAFETY: both have the buffer's size.
            unsafe {
                if memory.host.is_null() {
                    let result =
                        (driver.cuMemcpyDtoH_v2)(found.as_mut_ptr().cast(), memory.device, found.len());
                    self.note(end, "cuMemcpyDtoH", result);
                } else {
                    found.copy_from_slice(std::slice::from_raw_parts(memory.host, expected.len()));
                }
            }
            hash.add(&found);
            if let Some(byte) = (0..found.len()).find(|byte| found[*byte] != expected[*byte]) {
                let count = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
                let writer = oracle::last_writer(self.program, buffer, byte);
                wrong.push(Wrong {
                    buffer,
                    byte,
                    found: found[byte],
                    expected: expected[byte],
                    count,
                    writer,
                });
            }
            self.free(end, buffer);
        }
        // SAFETY: nothing uses the handles any more.
        unsafe {
            for graph in self.graphs.lock().expect("no thread panics").drain(..).flatten() {
                self.note(end, "cuGraphExecDestroy", (driver.cuGraphExecDestroy)(graph.exec));
            }
            for executable in self.recording.iter().chain(&self.waiting) {
                self.note(end, "cuGraphExecDestroy", (driver.cuGraphExecDestroy)(*executable));
            }
            for event in &self.events {
                self.note(end, "cuEventDestroy", (driver.cuEventDestroy_v2)(*event));
            }
            for (stream, kind) in self.streams.iter().zip(&self.program.streams) {
                if matches!(kind, StreamKind::Blocking | StreamKind::NonBlocking) {
                    self.note(end, "cuStreamDestroy", (driver.cuStreamDestroy_v2)(*stream));
                }
            }
            self.note(end, "cuMemFree", (driver.cuMemFree_v2)(self.signals));
            self.note(end, "cuCtxSynchronize", (driver.cuCtxSynchronize)());
            for call in self.host_calls.lock().expect("no thread panics").drain(..) {
                drop(Box::from_raw(call as *mut HostCall));
            }
        }
        let mut results = self.results.into_inner().expect("no thread panics");
        // Threads note their results in any order; each step's own order is kept.
        results.sort_by_key(|(step, ..)| *step);
        let is_refused =
            |step: usize| self.program.steps.get(step).is_some_and(|step| matches!(step.op, Op::Refused(_)));
        for (step, name, result) in &results {
            if *step > 0 && *step < end {
                hash.add(name.as_bytes());
                hash.add(&result.to_ne_bytes());
            }
        }
        type Results = Vec<(usize, &'static str, u32)>;
        let (refused, valid): (Results, Results) = results.iter().partition(|(step, ..)| is_refused(*step));
        Outcome {
            calls: results.len(),
            digest: hash.0,
            failed: valid.into_iter().filter(|(.., result)| *result != 0).collect(),
            refused,
            wrong,
        }
    }
}

/// The step that each thread is at, for the report of a program that hangs.
pub static CURRENT: [AtomicU64; 4] = [const { AtomicU64::new(0) }; 4];

fn layout(size: usize) -> std::alloc::Layout {
    std::alloc::Layout::from_size_align(size, 4096).expect("a size of a few megabytes")
}

/// Cleared heap memory that begins a page, so that no other memory shares its first page.
fn heap(size: usize) -> *mut u8 {
    // SAFETY: the size is not zero.
    unsafe { std::alloc::alloc_zeroed(layout(size)) }
}

/// # Safety
/// `memory` is from `heap` with this size.
unsafe fn release(memory: *mut u8, size: usize) {
    // SAFETY: by the caller.
    unsafe { std::alloc::dealloc(memory, layout(size)) }
}

struct Kernel {
    function: Handle,
    grid: u32,
    block: u32,
    to: u64,
    from: u64,
    words: u32,
    salt: u32,
    spin: u32,
}

impl Kernel {
    /// Pointers to the parameters, valid while the kernel is.
    fn parameters(&mut self) -> [*mut c_void; 5] {
        [
            (&raw mut self.to).cast(),
            (&raw mut self.from).cast(),
            (&raw mut self.words).cast(),
            (&raw mut self.salt).cast(),
            (&raw mut self.spin).cast(),
        ]
    }
}

/// FNV-1a.
struct Hash(u64);

impl Hash {
    fn new() -> Hash {
        Hash(0xcbf2_9ce4_8422_2325)
    }

    fn add(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = (self.0 ^ u64::from(*byte)).wrapping_mul(0x100_0000_01b3);
        }
    }
}
