//! The server's NVML: the library in the driver's folder, called by the table in `proto/nvml`.

use std::collections::HashMap;
use std::ffi::{CStr, CString, c_void};
use std::path::{Path, PathBuf};

use gpusession_nvml_calls::{self as table, Class, FIELD_VALUES, LIST, Param, TEXT};
use gpusession_proto::readings::{Answer, Query, uuid_bytes};
use libloading::Library;

use crate::driver::MARKER;

/// `nvmlReturn_t`.
pub type Status = u32;

/// `nvmlReturn_t` values that the monitor itself returns.
pub mod status {
    #![allow(missing_docs)]
    pub const INVALID_ARGUMENT: u32 = 2;
    pub const NOT_SUPPORTED: u32 = 3;
    pub const FUNCTION_NOT_FOUND: u32 = 13;
}

/// Type of every NVML function in the table: integers and pointers only, at most six.
///
/// A function with fewer parameters ignores the rest.
type Function = unsafe extern "C" fn(usize, usize, usize, usize, usize, usize) -> Status;

/// Maximum number of reported processes of a card.
const MAX_PROCESSES: usize = 256;

/// A loaded and initialised NVML, with its devices by UUID.
pub struct Nvml {
    library: Library,
    devices: HashMap<[u8; 16], usize>,
}

/// Finds NVML in the driver's folder, since it belongs to the driver.
fn beside(driver: &Path) -> Result<PathBuf, String> {
    let resolved = driver.canonicalize().ok();
    [Some(driver), resolved.as_deref()]
        .into_iter()
        .flatten()
        .filter_map(|d| Some(d.parent()?.join("libnvidia-ml.so.1")))
        .find(|p| p.exists())
        .ok_or_else(|| format!("libnvidia-ml.so.1 not found in the folder of {}", driver.display()))
}

impl Nvml {
    /// Loads the library from the driver's folder, and finds the devices.
    pub fn load(driver: &Path) -> Result<Self, String> {
        let path = beside(driver)?;
        let say = |what: &str, s: Status| format!("{what} of {}: NVML error {s}", path.display());
        // SAFETY: loading runs the library's initialisers; it lies in the folder of the driver that
        // the administrator named.
        let library = unsafe { Library::new(&path) }.map_err(|e| format!("{}: {e}", path.display()))?;
        // SAFETY: reads only whether the symbol is present.
        if unsafe { library.get::<*const c_void>(MARKER) }.is_ok() {
            return Err(format!("{}: it is gpusession's own client library", path.display()));
        }
        let mut nvml = Self { library, devices: HashMap::new() };
        let init = nvml.call("nvmlInit_v2", &[]);
        if init != 0 {
            return Err(say("nvmlInit", init));
        }
        let mut count = 0u32;
        let counted = nvml.call("nvmlDeviceGetCount_v2", &[&raw mut count as usize]);
        if counted != 0 {
            return Err(say("nvmlDeviceGetCount", counted));
        }
        for index in 0..count {
            let mut device = 0usize;
            // A card that has fallen off the bus has no handle; the other cards do.
            if nvml.call("nvmlDeviceGetHandleByIndex_v2", &[index as usize, &raw mut device as usize]) == 0
                && let Some(uuid) = nvml.text("nvmlDeviceGetUUID", &[device]).as_deref().and_then(uuid_bytes)
            {
                nvml.devices.insert(uuid, device);
            }
        }
        Ok(nvml)
    }

    /// Returns UUID and handle of each device.
    pub fn devices(&self) -> impl Iterator<Item = ([u8; 16], usize)> {
        self.devices.iter().map(|(uuid, device)| (*uuid, *device))
    }

    /// Calls an NVML function by name.
    ///
    /// Pointers in `arguments` must be valid for the use that NVML's header states.
    pub fn call(&self, name: &str, arguments: &[usize]) -> Status {
        let Ok(symbol) = CString::new(name) else { return status::FUNCTION_NOT_FOUND };
        // SAFETY: NVML's functions take integers and pointers, and return an nvmlReturn_t. The C
        // ABI lets a function be called with more arguments than it takes.
        let Ok(function) = (unsafe { self.library.get::<Function>(symbol.as_bytes_with_nul()) }) else {
            return status::FUNCTION_NOT_FOUND;
        };
        let a = |i: usize| arguments.get(i).copied().unwrap_or(0);
        // SAFETY: callers pass pointers to locals that are as long as NVML's header says.
        unsafe { function(a(0), a(1), a(2), a(3), a(4), a(5)) }
    }

    /// Returns a text from a function whose last parameters are `(char *, unsigned)`.
    pub fn text(&self, name: &str, before: &[usize]) -> Option<String> {
        let mut room = [0u8; TEXT];
        let arguments = [before, &[room.as_mut_ptr() as usize, TEXT]].concat();
        (self.call(name, &arguments) == 0).then(|| text(&room))
    }

    /// Returns one number of a device from a function whose last parameter points to it.
    pub fn number<T: Copy + Default>(&self, name: &str, device: usize, before: &[usize]) -> Option<T> {
        let mut value = T::default();
        let arguments = [&[device], before, &[&raw mut value as usize]].concat();
        (self.call(name, &arguments) == 0).then_some(value)
    }

    /// Returns the compute processes of a device: process id, and bytes of memory if NVML knows.
    ///
    /// NVML lists the processes under MPS separately; the result includes them.
    pub fn processes(&self, device: usize) -> Vec<(u32, Option<u64>)> {
        let mut all: Vec<(u32, Option<u64>)> = Vec::new();
        for list in ["nvmlDeviceGetComputeRunningProcesses_v3", "nvmlDeviceGetMPSComputeRunningProcesses_v3"]
        {
            for (pid, bytes) in self.listed(list, device).unwrap_or_default() {
                match all.iter_mut().find(|(known, _)| *known == pid) {
                    Some((_, known)) => *known = (*known).max(bytes),
                    None => all.push((pid, bytes)),
                }
            }
        }
        all.truncate(MAX_PROCESSES);
        all
    }

    fn listed(&self, list: &str, device: usize) -> Option<Vec<(u32, Option<u64>)>> {
        #[repr(C)]
        #[derive(Clone, Copy, Default)]
        struct Info {
            pid: u32,
            used: u64,
            gpu_instance: u32,
            compute_instance: u32,
        }
        let mut infos = vec![Info::default(); 1024];
        let mut count = infos.len() as u32;
        let done = self.call(list, &[device, &raw mut count as usize, infos.as_mut_ptr() as usize]);
        if done != 0 {
            return None;
        }
        infos.truncate(count as usize);
        Some(infos.iter().map(|i| (i.pid, Some(i.used).filter(|u| *u != u64::MAX))).collect())
    }

    /// Answers a query about a function of the table.
    pub fn ask(&self, query: &Query) -> Answer {
        match self.try_ask(query) {
            Ok(output) => Answer { status: 0, output },
            Err(status) => Answer { status, output: Vec::new() },
        }
    }

    fn try_ask(&self, query: &Query) -> Result<Vec<u8>, Status> {
        let device = *self.devices.get(&query.device).ok_or(status::INVALID_ARGUMENT)?;
        let (_, call) = table::find(&query.call).ok_or(status::FUNCTION_NOT_FOUND)?;
        let Class::Forward(_, params) = &call.class else { return Err(status::NOT_SUPPORTED) };
        if call.peers(&query.input).is_none() {
            return Err(status::INVALID_ARGUMENT);
        }
        let mut buffers = Buffers::default();
        let mut arguments = vec![device];
        let mut input = &query.input[..];
        for param in params {
            match param {
                Param::Number(n, _) => {
                    let mut word = [0; 8];
                    word[..*n].copy_from_slice(take(&mut input, *n));
                    arguments.push(u64::from_le_bytes(word) as usize);
                }
                Param::Peer => {
                    let uuid: [u8; 16] =
                        take(&mut input, 16).try_into().map_err(|_| status::INVALID_ARGUMENT)?;
                    arguments.push(*self.devices.get(&uuid).ok_or(status::INVALID_ARGUMENT)?);
                }
                Param::Out(n) => arguments.push(buffers.add(*n, &[])),
                Param::Struct(_) => {
                    let size = table::struct_size(input).ok_or(status::INVALID_ARGUMENT)?;
                    arguments.push(buffers.add(size, take(&mut input, size)));
                }
                Param::Text => arguments.extend([buffers.add(TEXT, &[]), TEXT]),
                Param::Bytes(n) => arguments.extend([buffers.add(*n, &[]), *n]),
                Param::List(arrays) => {
                    arguments.push(buffers.add(4, &(LIST as u32).to_le_bytes()));
                    arguments.extend(arrays.iter().map(|size| buffers.add(LIST * size, &[])));
                }
            }
        }
        if call.name == FIELD_VALUES {
            // A query is about one value, whose structure begins with the numbers of field and
            // scope.
            let value = buffers.begin(0, &query.input);
            arguments = vec![device, 1, value];
        }
        let result = self.call(call.name, &arguments);
        match result {
            0 => {}
            // The client sees a card without this reading, as others lack it, too.
            status::FUNCTION_NOT_FOUND => return Err(status::NOT_SUPPORTED),
            error => return Err(error),
        }
        let mut outputs = buffers.0.iter().map(|(buffer, size)| &bytes(buffer)[..*size]);
        let mut next = || outputs.next().unwrap_or_default();
        let mut out = Vec::new();
        for param in params {
            match param {
                Param::Number(..) | Param::Peer => {}
                Param::Out(_) | Param::Struct(_) => out.extend_from_slice(next()),
                Param::Text => {
                    let text = text(next());
                    out.extend_from_slice(&(text.len() as u32).to_le_bytes());
                    out.extend_from_slice(text.as_bytes());
                }
                Param::Bytes(n) => {
                    out.extend_from_slice(&(*n as u32).to_le_bytes());
                    out.extend_from_slice(next());
                }
                Param::List(arrays) => {
                    let count = next().first_chunk().map_or(0, |c| u32::from_le_bytes(*c)).min(LIST as u32);
                    out.extend_from_slice(&count.to_le_bytes());
                    for size in arrays {
                        out.extend_from_slice(&next()[..count as usize * size]);
                    }
                }
            }
        }
        Ok(out)
    }
}

/// Buffers that NVML writes into, one for each output.
///
/// They consist of words, so that every structure is aligned.
#[derive(Default)]
struct Buffers(Vec<(Vec<u64>, usize)>);

impl Buffers {
    /// Adds a zeroed buffer that begins with these bytes; its address stays valid.
    fn add(&mut self, size: usize, begin: &[u8]) -> usize {
        self.0.push((vec![0; size.div_ceil(8)], size));
        self.begin(self.0.len() - 1, begin)
    }

    /// Writes the first bytes of a buffer and returns its address.
    fn begin(&mut self, buffer: usize, begin: &[u8]) -> usize {
        let words = &mut self.0[buffer].0;
        zerocopy::IntoBytes::as_mut_bytes(&mut words[..])[..begin.len()].copy_from_slice(begin);
        words.as_mut_ptr() as usize
    }
}

/// Splits off the next bytes of an input whose length is checked already.
fn take<'a>(input: &mut &'a [u8], n: usize) -> &'a [u8] {
    let (mine, rest) = input.split_at(n);
    *input = rest;
    mine
}

fn bytes(words: &[u64]) -> &[u8] {
    zerocopy::IntoBytes::as_bytes(words)
}

fn text(chars: &[u8]) -> String {
    CStr::from_bytes_until_nul(chars).map(|c| c.to_string_lossy().into_owned()).unwrap_or_default()
}
