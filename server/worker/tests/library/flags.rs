//! Kernels that run for long, and exchange flags with the program in mapped memory.

use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use gpusession_test_support::cuda::{Cuda, at};

use crate::{begin, granted, succeeds, worker};

/// A kernel that answers one flag after the other.
///
/// Each time it counts the words of its data that are not those of the flag, writes an answer, and
/// then a flag of its own. The words of a flag are multiples of it.
const KERNEL: &CStr = c"
    .version 6.5
    .target sm_75
    .address_size 64
    .visible .entry answer(.param .u64 flags, .param .u64 data, .param .u64 reply, .param .u64 rounds) {
        .reg .pred %p<2>;
        .reg .u32 %r<8>;
        .reg .u64 %rd<7>;
        ld.param.u64 %rd1, [flags];
        ld.param.u64 %rd2, [data];
        ld.param.u64 %rd3, [reply];
        ld.param.u32 %r7, [rounds];
        mov.u32 %r1, 0;
        mov.u32 %r6, 0;
    ROUND:
        add.u32 %r1, %r1, 1;
    WAIT:
        ld.volatile.global.u32 %r2, [%rd1];
        setp.ne.u32 %p1, %r2, %r1;
        @%p1 bra WAIT;
        membar.sys;
        mul.lo.u32 %r2, %r1, 1000003;
        mov.u64 %rd4, 0;
    CHECK:
        add.u64 %rd5, %rd2, %rd4;
        ld.volatile.global.u32 %r3, [%rd5];
        setp.eq.u32 %p1, %r3, %r2;
        @%p1 bra RIGHT;
        add.u32 %r6, %r6, 1;
    RIGHT:
        add.u64 %rd4, %rd4, 1028;
        setp.lt.u64 %p1, %rd4, 262144;
        @%p1 bra CHECK;
        mov.u64 %rd4, 0;
    FILL:
        add.u64 %rd5, %rd3, %rd4;
        st.volatile.global.u32 [%rd5], %r2;
        add.u64 %rd4, %rd4, 4;
        setp.lt.u64 %p1, %rd4, 16384;
        @%p1 bra FILL;
        st.volatile.global.u32 [%rd1+128], %r6;
        membar.sys;
        st.volatile.global.u32 [%rd1+64], %r1;
        setp.lt.u32 %p1, %r1, %r7;
        @%p1 bra ROUND;
        ret;
    }";
const DATA: usize = 262_144 / 4;
const REPLY: usize = 16_384 / 4;

/// Allocates mapped pinned memory, which is zero.
fn mapped(cuda: &Cuda, words: usize) -> &'static [AtomicU32] {
    // CU_MEMHOSTALLOC_DEVICEMAP
    let address = cuda.get("cuMemHostAlloc", &[4 * words as u64, 2]);
    // SAFETY: allocated just now, and never freed.
    let memory = unsafe { std::slice::from_raw_parts(address as *const AtomicU32, words) };
    memory.iter().for_each(|word| word.store(0, Ordering::Relaxed));
    memory
}

/// The kernel's memory, and a stream on which the kernel runs.
struct Exchange {
    flags: &'static [AtomicU32],
    data: &'static [AtomicU32],
    reply: &'static [AtomicU32],
    stream: u64,
}

impl Exchange {
    /// Starts the kernel; the flags lie below the data.
    fn begin(cuda: &Cuda, rounds: u32) -> Self {
        let [flags, data, reply] = [1024, DATA, REPLY].map(|words| mapped(cuda, words));
        assert!(flags.as_ptr() < data.as_ptr());
        let module = cuda.load(KERNEL);
        let function = cuda.get("cuModuleGetFunction", &[module, c"answer".as_ptr() as u64]);
        let stream = cuda.get("cuStreamCreate", &[1]);
        let [a, b, c] = [flags, data, reply].map(|memory| memory.as_ptr() as u64);
        let mut words = [a, b, c, u64::from(rounds)];
        let mut parameters = words.each_mut().map(at);
        let parameters = parameters.as_mut_ptr() as u64;
        cuda.ok("cuLaunchKernel", &[function, 1, 1, 1, 1, 1, 1, 0, stream, parameters, 0]);
        Self { flags, data, reply, stream }
    }

    /// Writes data and then the flag.
    fn ask(&self, round: u32) {
        let word = round.wrapping_mul(1_000_003);
        self.data.iter().for_each(|at| at.store(word, Ordering::Relaxed));
        self.flags[0].store(round, Ordering::Release);
    }

    /// Waits for the kernel's flag, and checks its answer at once.
    fn answered(&self, round: u32) {
        while self.flags[16].load(Ordering::Acquire) != round {
            std::hint::spin_loop();
        }
        let word = round.wrapping_mul(1_000_003);
        let old = self.reply.iter().filter(|at| at.load(Ordering::Relaxed) != word).count();
        assert_eq!(old, 0, "round {round}: a flag before its answer");
        assert_eq!(self.flags[32].load(Ordering::Relaxed), 0, "round {round}: a flag before its data");
    }
}

/// Exchanges flags with a kernel, while one thread calls and another watches.
pub fn exchanges_flags_with_a_kernel() {
    const ROUNDS: u32 = 40;
    let cuda = begin();
    let exchange = Exchange::begin(&cuda, ROUNDS);
    let (other, word) = (cuda.get("cuStreamCreate", &[1]), cuda.allocate(4));
    let answered = AtomicU32::new(0);
    std::thread::scope(|scope| {
        let watcher = scope.spawn(|| {
            for round in 1..=ROUNDS {
                exchange.answered(round);
                answered.store(round, Ordering::SeqCst);
            }
        });
        for round in 1..=ROUNDS {
            exchange.ask(round);
            while answered.load(Ordering::SeqCst) != round {
                assert!(!watcher.is_finished(), "it has failed");
                // Any call that waits sends changes in both directions.
                let mut value = 0u32;
                cuda.ok("cuMemcpyDtoHAsync_v2", &[at(&mut value), word, 4, other]);
                cuda.ok("cuStreamSynchronize", &[other]);
            }
        }
    });
    cuda.ok("cuStreamSynchronize", &[exchange.stream]);
}

/// Sets a kernel's flag, without a call, while another thread waits for the kernel.
pub fn sets_flags_while_a_thread_waits() {
    let cuda = begin();
    let ctx = cuda.get("cuCtxGetCurrent", &[]);
    let event = cuda.get("cuEventCreate", &[0]);
    let word = cuda.allocate(4);
    for call in ["cuStreamSynchronize", "cuCtxSynchronize", "cuEventSynchronize", "cuMemcpyDtoHAsync_v2"] {
        let exchange = Exchange::begin(&cuda, 1);
        cuda.ok("cuEventRecord", &[event, exchange.stream]);
        let waiting = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                cuda.ok("cuCtxSetCurrent", &[ctx]);
                let mut value = 0u32;
                // The bytes go to pageable memory, so the copy waits.
                let copy = [at(&mut value), word, 4, exchange.stream];
                waiting.store(true, Ordering::SeqCst);
                match call {
                    "cuStreamSynchronize" => cuda.ok(call, &[exchange.stream]),
                    "cuCtxSynchronize" => cuda.ok(call, &[]),
                    "cuEventSynchronize" => cuda.ok(call, &[event]),
                    _ => cuda.ok(call, &copy),
                }
                exchange.answered(1);
            });
            while !waiting.load(Ordering::SeqCst) {
                std::thread::yield_now();
            }
            // The thread uploads once as its wait begins; nothing shows when that is over.
            std::thread::sleep(Duration::from_millis(100));
            exchange.ask(1);
        });
    }
}

#[test]
fn a_flag_reaches_a_kernel_that_another_thread_waits_for() {
    let (_machine, worker) = worker(&[]);
    succeeds("sets_flags_while_a_thread_waits", vec![granted(&worker)], &[]);
}

#[test]
fn a_flag_never_precedes_its_data() {
    let (_machine, worker) = worker(&[]);
    succeeds("exchanges_flags_with_a_kernel", vec![granted(&worker)], &[]);
}
