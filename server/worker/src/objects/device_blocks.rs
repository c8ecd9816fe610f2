//! Blocks of device memory that have changed since the client last saw them.
//!
//! A kernel hashes the blocks where they are, and the worker copies only those whose hash is
//! another. It runs in the worker's own context, beside the program's kernels.

use std::ffi::c_void;
use std::num::NonZeroUsize;
use std::ptr::NonNull;

use gpusession_proto::changes::BLOCK;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::driver::{Address, Driver, Handle, REGISTER_MAPPED, Status, check, status};
use crate::objects::block_hash::{Hash, KERNEL, KERNEL_KEYS, KEYS, Keys, ptx};

/// Blocks that the device hashes before the worker looks at the hashes: 64 MiB of memory.
const BATCH: usize = 16384;
/// Bytes that the worker copies before it waits for them.
const COPY_BYTES: usize = 2 << 20;
/// With fewer blocks it takes longer to hash them than to copy them.
const FEW: usize = 64;
/// Bytes of a change that the client receives as one part, at most.
const PART_BYTES: usize = 256 << 10;
/// Threads of a block of the kernel; each warp of 32 hashes one block of memory.
const THREADS: u32 = 256;

/// Memory and kernel of one device to find changed blocks with.
pub struct Finder {
    /// Hashes from the device, then copied blocks: registered memory of this process.
    memory: NonNull<c_void>,
    /// The device's address of that memory.
    seen: Address,
    /// The kernel, or null: under MPS, and where the driver cannot compile it.
    kernel: Handle,
}

// SAFETY: the finder owns its memory, and code reaches it only through the lock around all mirrors.
unsafe impl Send for Finder {}

/// A region of device memory, and what the client knows of it.
pub struct Region<'a> {
    pub id: u64,
    pub address: usize,
    pub len: usize,
    pub blocks: &'a mut [Hash],
}

impl Region<'_> {
    fn bytes(&self, first: usize, count: usize) -> usize {
        (count * BLOCK).min(self.len - first * BLOCK)
    }
}

/// Neighbouring blocks of a region.
struct Run {
    region: usize,
    first: usize,
    count: usize,
}

const HASHES: usize = BATCH * size_of::<Hash>();

impl Finder {
    /// Registers memory and compiles the kernel in the current context.
    ///
    /// Under MPS the kernel could stand behind one of the program's that waits for the client, so
    /// there is none.
    pub fn open(driver: &Driver, keys: &Keys, under_mps: bool) -> Result<Self, Status> {
        let len = NonZeroUsize::new(HASHES + COPY_BYTES).ok_or(status::INVALID_VALUE)?;
        let prot = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice.
        let memory = unsafe { mmap_anonymous(None, len, prot, MapFlags::MAP_PRIVATE) }
            .map_err(|_| status::OUT_OF_MEMORY)?;
        let mut seen = 0;
        // SAFETY: just mapped, and unmapped below only; the out pointer is valid.
        let shown =
            check(unsafe { (driver.call.cuMemHostRegister_v2)(memory.as_ptr(), len.get(), REGISTER_MAPPED) })
                .and_then(|()| {
                    // SAFETY: just registered; the out pointer is valid.
                    check(unsafe {
                        (driver.call.cuMemHostGetDevicePointer_v2)(&mut seen, memory.as_ptr(), 0)
                    })
                });
        if let Err(error) = shown {
            // SAFETY: mapped above, and unknown to others. The driver refuses memory that was never
            // registered.
            unsafe {
                (driver.call.cuMemHostUnregister)(memory.as_ptr());
                let _ = munmap(memory, len.get());
            }
            return Err(error);
        }
        let kernel = if under_mps { None } else { compile(driver, keys).ok() };
        let finder = Self { memory, seen, kernel: kernel.unwrap_or(std::ptr::null_mut()) };
        if !finder.kernel.is_null() {
            // The driver loads a kernel at its first launch, for which it may wait for work; later
            // launches run while that work waits for the client.
            finder.hash(driver, std::ptr::null_mut(), seen, 0, 0)?;
            // SAFETY: the default stream of the current context.
            check(unsafe { (driver.call.cuStreamSynchronize)(std::ptr::null_mut()) })?;
        }
        Ok(finder)
    }

    /// Passes each part of the regions that has changed to `changed`: region, offset, bytes.
    pub fn find(
        &mut self,
        driver: &Driver,
        keys: &Keys,
        stream: Handle,
        regions: &mut [Region<'_>],
        mut changed: impl FnMut(u64, u64, &[u8]),
    ) -> Result<(), Status> {
        let mut copies = Copies { finder: self, driver, keys, stream, runs: Vec::new(), used: 0 };
        let blocks: usize = regions.iter().map(|r| r.blocks.len()).sum();
        if copies.finder.kernel.is_null() || blocks < FEW {
            for region in 0..regions.len() {
                let run = Run { region, first: 0, count: regions[region].blocks.len() };
                copies.add(regions, run, &mut changed)?;
            }
            return copies.take(regions, &mut changed);
        }
        let mut batch = Vec::new();
        let mut room = BATCH;
        for region in 0..regions.len() {
            let whole = regions[region].len / BLOCK;
            let mut first = 0;
            while first < whole {
                let count = (whole - first).min(room);
                let source = regions[region].address + first * BLOCK;
                copies.finder.hash(driver, stream, source as Address, BATCH - room, count)?;
                batch.push((Run { region, first, count }, BATCH - room));
                room -= count;
                first += count;
                if room == 0 {
                    copies.compare(regions, &mut batch, &mut changed)?;
                    room = BATCH;
                }
            }
            if whole < regions[region].blocks.len() {
                copies.add(regions, Run { region, first: whole, count: 1 }, &mut changed)?;
            }
        }
        copies.compare(regions, &mut batch, &mut changed)?;
        copies.take(regions, &mut changed)
    }

    /// Lets the device hash whole blocks to a place among the hashes.
    fn hash(
        &self,
        driver: &Driver,
        stream: Handle,
        source: Address,
        at: usize,
        count: usize,
    ) -> Result<(), Status> {
        let (mut source, mut count) = (source, count as u32);
        let mut target = self.seen + (at * size_of::<Hash>()) as Address;
        let arguments: [*mut c_void; 3] =
            [(&raw mut source).cast(), (&raw mut target).cast(), (&raw mut count).cast()];
        let grid = count.div_ceil(THREADS / 32).max(1);
        let (none, arguments) = (std::ptr::null(), arguments.as_ptr().cast());
        // SAFETY: the kernel takes these three arguments, reads `count` blocks of the worker's
        // device memory, and writes as many hashes to the finder's memory, which has room for them.
        check(unsafe {
            (driver.call.cuLaunchKernel)(self.kernel, grid, 1, 1, THREADS, 1, 1, 0, stream, arguments, none)
        })
    }

    /// Returns hashes that the device has written.
    fn hashes(&self, at: usize, count: usize) -> &[Hash] {
        // SAFETY: inside the finder's memory; the stream was synchronized, so no kernel writes.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr().cast::<Hash>().add(at), count) }
    }

    fn piece(&self) -> *mut u8 {
        // SAFETY: the mapping has `COPY_BYTES` bytes behind the hashes.
        unsafe { self.memory.as_ptr().cast::<u8>().add(HASHES) }
    }
}

/// Compiles the kernel and gives it the keys.
fn compile(driver: &Driver, keys: &Keys) -> Result<Handle, Status> {
    let source = std::ffi::CString::new(ptx()).map_err(|_| status::INVALID_IMAGE)?;
    let (mut module, mut kernel) = (std::ptr::null_mut(), std::ptr::null_mut());
    let (none, no_values) = (std::ptr::null(), std::ptr::null());
    // SAFETY: the image is text that ends with a zero byte; the out pointer is valid.
    check(unsafe {
        (driver.call.cuModuleLoadDataEx)(&mut module, source.as_ptr().cast(), 0, none, no_values)
    })?;
    let (mut address, mut size) = (0, 0);
    // SAFETY: the module was just loaded; the out pointers are valid.
    check(unsafe {
        (driver.call.cuModuleGetGlobal_v2)(&mut address, &mut size, module, KERNEL_KEYS.as_ptr())
    })?;
    if size != 4 * KEYS {
        return Err(status::INVALID_IMAGE);
    }
    // SAFETY: the variable has that many bytes; a copy from pageable memory has read it at its
    // return, and the synchronization orders the kernel after it.
    check(unsafe {
        (driver.call.cuMemcpyHtoDAsync_v2)(address, keys.words().as_ptr().cast(), size, std::ptr::null_mut())
    })?;
    // SAFETY: the default stream of the current context.
    check(unsafe { (driver.call.cuStreamSynchronize)(std::ptr::null_mut()) })?;
    // SAFETY: the module was just loaded; the out pointer is valid.
    check(unsafe { (driver.call.cuModuleGetFunction)(&mut kernel, module, KERNEL.as_ptr()) })?;
    Ok(kernel)
}

/// Copies under way into the finder's memory.
struct Copies<'a> {
    finder: &'a mut Finder,
    driver: &'a Driver,
    keys: &'a Keys,
    stream: Handle,
    runs: Vec<(Run, usize)>,
    used: usize,
}

impl Copies<'_> {
    /// Waits for the hashes of a batch, and copies the blocks that differ.
    fn compare(
        &mut self,
        regions: &mut [Region<'_>],
        batch: &mut Vec<(Run, usize)>,
        changed: &mut impl FnMut(u64, u64, &[u8]),
    ) -> Result<(), Status> {
        self.synchronize()?;
        for (Run { region, first, count }, at) in batch.drain(..) {
            let known = &regions[region].blocks[first..first + count];
            let differs: Vec<bool> =
                known.iter().zip(self.finder.hashes(at, count)).map(|(known, now)| known != now).collect();
            let mut start = 0;
            for run in differs.chunk_by(|a, b| a == b) {
                if run[0] {
                    self.add(regions, Run { region, first: first + start, count: run.len() }, changed)?;
                }
                start += run.len();
            }
        }
        Ok(())
    }

    /// Starts to copy blocks; waits for earlier ones where there is no room.
    fn add(
        &mut self,
        regions: &mut [Region<'_>],
        run: Run,
        changed: &mut impl FnMut(u64, u64, &[u8]),
    ) -> Result<(), Status> {
        let Run { region, mut first, mut count } = run;
        while count > 0 {
            if COPY_BYTES - self.used < BLOCK {
                self.take(regions, changed)?;
            }
            let now = count.min((COPY_BYTES - self.used) / BLOCK);
            let source = regions[region].address + first * BLOCK;
            let bytes = regions[region].bytes(first, now);
            // SAFETY: the piece has that much room behind `used`.
            let target = unsafe { self.finder.piece().add(self.used) };
            // SAFETY: the target outlives the copy, which `take` waits for; the source lies within
            // the region.
            check(unsafe {
                (self.driver.call.cuMemcpyDtoHAsync_v2)(target.cast(), source as Address, bytes, self.stream)
            })?;
            self.runs.push((Run { region, first, count: now }, self.used));
            self.used += now * BLOCK;
            first += now;
            count -= now;
        }
        Ok(())
    }

    /// Waits for the copies, and passes on what has changed.
    fn take(
        &mut self,
        regions: &mut [Region<'_>],
        changed: &mut impl FnMut(u64, u64, &[u8]),
    ) -> Result<(), Status> {
        if self.runs.is_empty() {
            return Ok(());
        }
        self.synchronize()?;
        for (Run { region, first, count }, at) in self.runs.drain(..) {
            let region = &mut regions[region];
            let len = region.bytes(first, count);
            // SAFETY: inside the finder's memory; the copies into it have ended.
            let bytes = unsafe { std::slice::from_raw_parts(self.finder.piece().add(at), len) };
            // Hashed again here: the device may have changed them since the kernel read them.
            let differs: Vec<bool> = bytes
                .chunks(BLOCK)
                .zip(&mut region.blocks[first..])
                .map(|(block, known)| {
                    let now = self.keys.hash(block);
                    std::mem::replace(known, now) != now
                })
                .collect();
            let mut start = 0;
            for run in differs.chunk_by(|a, b| a == b) {
                let part = &bytes[start * BLOCK..((start + run.len()) * BLOCK).min(len)];
                if run[0] {
                    let offset = (first + start) * BLOCK;
                    for (i, part) in part.chunks(PART_BYTES).enumerate() {
                        changed(region.id, (offset + i * PART_BYTES) as u64, part);
                    }
                }
                start += run.len();
            }
        }
        self.used = 0;
        Ok(())
    }

    fn synchronize(&self) -> Result<(), Status> {
        // SAFETY: a stream of this worker.
        check(unsafe { (self.driver.call.cuStreamSynchronize)(self.stream) })
    }
}

#[cfg(test)]
mod tests {
    use gpusession_proto::supervise::DeviceLimit;
    use libloading::{Library, Symbol};

    use super::*;
    use crate::contexts::Contexts;

    /// The simulated driver, which executes the kernel.
    fn simulated() -> (&'static Driver, Library) {
        let test = std::env::current_exe().unwrap();
        let path = test
            .ancestors()
            .map(|folder| folder.join("libsimgpu.so"))
            .find(|path| path.exists())
            .expect("libsimgpu.so beside the tests: a dev-dependency builds it");
        let driver = Driver::load(&path).unwrap();
        // SAFETY: the simulated driver is loaded already; its initialisers do not run again.
        (driver, unsafe { Library::new(path) }.unwrap())
    }

    fn allocate(library: &Library, len: usize) -> Address {
        // SAFETY: the function's type in CUDA's header.
        let allocate: Symbol<'_, unsafe extern "C" fn(*mut Address, usize) -> Status> =
            unsafe { library.get(b"cuMemAlloc_v2") }.unwrap();
        let mut address = 0;
        // SAFETY: the out pointer is valid.
        assert_eq!(unsafe { allocate(&mut address, len) }, 0);
        address
    }

    const LEN: usize = 150 * BLOCK + 100;

    /// Memory of a device, which is this process's memory in the simulated driver.
    struct Memory<'a> {
        driver: &'a Driver,
        keys: Keys,
        address: Address,
        blocks: Vec<Hash>,
    }

    impl Memory<'_> {
        fn find(&mut self, finder: &mut Finder, stream: Handle) -> Vec<(u64, u64, Vec<u8>)> {
            let mut found = Vec::new();
            let address = self.address as usize;
            let region = Region { id: 7, address, len: LEN, blocks: &mut self.blocks };
            finder
                .find(self.driver, &self.keys, stream, &mut [region], |id, offset, bytes| {
                    found.push((id, offset, bytes.to_vec()));
                })
                .unwrap();
            found
        }

        fn fill(&self, stream: Handle, offset: usize, len: usize, byte: u8) {
            // SAFETY: inside the memory of the test.
            let filled = unsafe {
                (self.driver.call.cuMemsetD8Async)(self.address + offset as Address, byte, len, stream)
            };
            assert_eq!(filled, 0);
        }
    }

    #[test]
    fn only_changed_blocks_are_found_with_the_kernel_and_without() {
        let (driver, library) = simulated();
        // SAFETY: the call takes flags only.
        assert_eq!(unsafe { (driver.call.cuInit)(0) }, 0);
        let device = DeviceLimit {
            uuid: *b"simgpu\x40\x00\x80\x00gpu-0\x00",
            memory_bytes: 1 << 30,
            sm_percent: 100,
            context_bytes: 0,
        };
        let contexts = Contexts::warm(driver, &[device]).unwrap();
        contexts.open_worker_context(driver, 0, || Ok(()), || ()).unwrap();
        for under_mps in [false, true] {
            contexts
                .within_worker_context(driver, 0, |stream| {
                    let keys = Keys::draw().unwrap();
                    let mut finder = Finder::open(driver, &keys, under_mps).unwrap();
                    assert_eq!(finder.kernel.is_null(), under_mps);
                    let address = allocate(&library, LEN);
                    let blocks = vec![keys.hash(&[0; BLOCK]); LEN.div_ceil(BLOCK)];
                    let mut memory = Memory { driver, keys, address, blocks };
                    memory.fill(stream, 0, LEN, 0);
                    assert_eq!(memory.find(&mut finder, stream), [], "zeros, as the client knows");
                    memory.fill(stream, 3 * BLOCK + 5, BLOCK, 1);
                    memory.fill(stream, 70 * BLOCK, 1, 2);
                    memory.fill(stream, LEN - 1, 1, 3);
                    let mut pair = vec![0; 2 * BLOCK];
                    pair[5..BLOCK + 5].fill(1);
                    let mut single = vec![0; BLOCK];
                    single[0] = 2;
                    let mut last = vec![0; 100];
                    last[99] = 3;
                    let at = |block: usize| (block * BLOCK) as u64;
                    // The short last block needs no kernel, so it may come first.
                    let mut found = memory.find(&mut finder, stream);
                    found.sort();
                    assert_eq!(found, [(7, at(3), pair), (7, at(70), single), (7, at(150), last)]);
                    assert_eq!(memory.find(&mut finder, stream), []);
                    Ok(())
                })
                .unwrap();
        }
    }
}
