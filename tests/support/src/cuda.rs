//! The library as programs load it; each program runs in its own process (`programs!`).

use std::ffi::CStr;
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::process::Output;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use gpusession_proto::grant::{Reply, Request, Want};
use gpusession_proto::message;
use libloading::Library;

/// Returns the path of the library that cargo built together with this test.
pub fn library_file() -> PathBuf {
    let test = std::env::current_exe().unwrap();
    test.ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join("libgpusession_cuda.so"))
        .find(|path| path.exists())
        .expect("libgpusession_cuda.so beside the test")
}

pub fn library() -> Library {
    // SAFETY: the library has no initializers, so loading it runs no code.
    unsafe { Library::new(library_file()) }.unwrap()
}

/// Calls any driver function by its exported name, with integers and addresses as words.
pub fn call(library: &Library, name: &str, arguments: &[u64]) -> i32 {
    type Call =
        unsafe extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64, u64) -> i32;
    let mut a = [0; 14];
    a[..arguments.len()].copy_from_slice(arguments);
    // SAFETY: driver calls take only integers and addresses, which the caller chooses to fit. The C
    // ABI lets a function ignore words that it does not take.
    unsafe {
        library.get::<Call>(name.as_bytes()).unwrap()(
            a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12], a[13],
        )
    }
}

/// An image with a variable, and a kernel that adds one to the word at its parameter's address.
pub const KERNEL: &CStr = c"
    .version 6.5
    .target sm_75
    .address_size 64
    .visible .global .align 8 .u64 variable = 5;
    .visible .entry increment(.param .u64 p) {
        .reg .u64 %rd<3>;
        .reg .u32 %r<3>;
        ld.param.u64 %rd1, [p];
        cvta.to.global.u64 %rd2, %rd1;
        ld.global.u32 %r1, [%rd2];
        add.u32 %r2, %r1, 1;
        st.global.u32 [%rd2], %r2;
        ret;
    }";

/// Returns a value's address, for a call that reads or writes it.
pub fn at<T>(value: &mut T) -> u64 {
    std::ptr::from_mut(value) as u64
}

/// The library after `cuInit`, without a current context.
pub struct Cuda(Library);

impl Cuda {
    pub fn begin() -> Self {
        let cuda = Self(library());
        cuda.ok("cuInit", &[0]);
        cuda
    }

    pub fn call(&self, name: &str, arguments: &[u64]) -> i32 {
        call(&self.0, name, arguments)
    }

    #[track_caller]
    pub fn ok(&self, name: &str, arguments: &[u64]) {
        assert_eq!(self.call(name, arguments), 0, "{name}");
    }

    /// Makes a call whose first argument receives a word, and returns the word.
    #[track_caller]
    pub fn get(&self, name: &str, arguments: &[u64]) -> u64 {
        self.try_get(name, arguments).unwrap_or_else(|status| panic!("{name}: {status}"))
    }

    pub fn try_get(&self, name: &str, arguments: &[u64]) -> Result<u64, i32> {
        let mut value = 0u64;
        match self.call(name, &[&[at(&mut value)], arguments].concat()) {
            0 => Ok(value),
            status => Err(status),
        }
    }

    /// Makes a device's primary context current and returns it.
    pub fn on(&self, device: u64) -> u64 {
        let ctx = self.get("cuDevicePrimaryCtxRetain", &[device]);
        self.ok("cuCtxSetCurrent", &[ctx]);
        ctx
    }

    pub fn allocate(&self, size: u64) -> u64 {
        self.get("cuMemAlloc_v2", &[size])
    }

    pub fn load(&self, image: &CStr) -> u64 {
        self.get("cuModuleLoadData", &[image.as_ptr() as u64])
    }

    /// Returns the kernel of a module loaded from [`KERNEL`].
    pub fn increment(&self, module: u64) -> u64 {
        self.get("cuModuleGetFunction", &[module, c"increment".as_ptr() as u64])
    }

    pub fn launch(&self, function: u64, mut address: u64, stream: u64) -> i32 {
        let mut parameters = [at(&mut address)];
        let parameters = parameters.as_mut_ptr() as u64;
        self.call("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, 0])
    }

    pub fn write(&self, address: u64, bytes: &[u8]) {
        self.ok("cuMemcpyHtoD_v2", &[address, bytes.as_ptr() as u64, bytes.len() as u64]);
    }

    pub fn read(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.ok("cuMemcpyDtoH_v2", &[bytes.as_mut_ptr() as u64, address, len as u64]);
        bytes
    }

    pub fn word(&self, address: u64) -> u32 {
        u32::from_le_bytes(self.read(address, 4).try_into().expect("four bytes"))
    }

    /// Returns the free and the total bytes of the current device.
    pub fn memory(&self) -> (u64, u64) {
        let (mut free, mut total) = (0u64, 0u64);
        self.ok("cuMemGetInfo_v2", &[at(&mut free), at(&mut total)]);
        (free, total)
    }
}

fn answer(mut stream: UnixStream, replies: &[Reply], asked: &mut usize) -> UnixStream {
    let mut prefix = [0; 4];
    stream.read_exact(&mut prefix).unwrap();
    let mut body = vec![0; message::body_len(prefix).unwrap()];
    stream.read_exact(&mut body).unwrap();
    let reply = match message::decode::<Request>(&body).unwrap().want {
        Want::Version => &Reply::Version(13000),
        _ => {
            *asked += 1;
            &replies[(*asked - 1).min(replies.len() - 1)]
        }
    };
    stream.write_all(&message::encode(reply)).unwrap();
    stream
}

/// Runs `body`, with a socket's path, while a daemon serves that socket with these answers.
///
/// The daemon repeats the last answer. Returns the result of `body` and the number of requests for
/// workers.
pub fn beside_daemon<T>(replies: Vec<Reply>, body: impl FnOnce(&Path) -> T) -> (T, usize) {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("grant.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let ended = Arc::new(AtomicBool::new(false));
    let daemon = std::thread::spawn({
        let ended = ended.clone();
        move || {
            let (mut open, mut asked) = (Vec::new(), 0);
            for stream in listener.incoming() {
                if ended.load(Ordering::Relaxed) {
                    break;
                }
                open.push(answer(stream.unwrap(), &replies, &mut asked));
            }
            asked
        }
    });
    let came = body(&socket);
    ended.store(true, Ordering::Relaxed);
    // Wakes the daemon's thread, which then exits.
    UnixStream::connect(&socket).unwrap();
    (came, daemon.join().unwrap())
}

/// Runs a program beside such a daemon; returns its output and the number of requests for workers.
pub fn run(program: &str, replies: Vec<Reply>, variables: &[(&str, String)]) -> (Output, usize) {
    beside_daemon(replies, |socket| {
        crate::program(program)
            .env("GPUSESSION_SOCKET", socket)
            .env("GPUSESSION_TRACE", "why,missing,summary")
            .env_remove("GPUSESSION_TRACE_FILE")
            .env_remove("GPUSESSION_DISABLE")
            .envs(variables.iter().map(|(name, value)| (name, value)))
            .output()
            .unwrap()
    })
}
