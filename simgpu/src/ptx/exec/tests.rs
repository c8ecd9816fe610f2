//! Small kernels, run without a driver.

use super::super::compile;
use super::*;
use std::sync::Mutex;

struct Sink(Mutex<Vec<u8>>);

impl Host for Sink {
    fn print(&self, text: &[u8]) {
        self.0.lock().unwrap().extend_from_slice(text);
    }
    fn assertion(&self, text: &str) {
        self.0.lock().unwrap().extend_from_slice(text.as_bytes());
    }
    fn malloc(&self, _size: u64) -> u64 {
        0
    }
    fn free(&self, _at: u64) {}
}

/// Runs `k(u64 out)` over `memory` at device address 0x10000.
fn run(body: &str, grid: u32, block: u32, memory: &mut [u64]) -> Result<(), Fault> {
    let text = format!(
        ".version 8.4\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<9>;\n\
         ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x; mov.u32 %r2, %ctaid.x;\n\
         mul.wide.u32 %rd2, %r1, 4; add.s64 %rd3, %rd1, %rd2;\n{body}\nret;\n}}"
    );
    let program = Arc::new(compile(&text).unwrap());
    let env = Env {
        consts: resolve_consts(&program, &[]),
        program,
        func: 0,
        grid: [grid, 1, 1],
        block: [block, 1, 1],
        params: vec![0x10000],
        dynamic_shared: 0,
        workspace: 0,
        mem: Arc::new(MemView {
            spans: vec![Span {
                start: 0x10000,
                end: 0x10000 + memory.len() as u64 * 8,
                host: memory.as_mut_ptr() as usize,
                writable: true,
                devices: 1,
            }],
            keep: Vec::new(),
        }),
        device: 0,
        sms: 40,
        grid_id: 1,
        started: Instant::now(),
        host: Arc::new(Sink(Mutex::new(Vec::new()))),
        cancel: Arc::new(AtomicBool::new(false)),
    };
    for b in 0..env.blocks() {
        let mut block = Block::new(&env, b);
        while !block.run(&env, 1 << 20)? {}
    }
    Ok(())
}

fn words(memory: &[u64]) -> Vec<u32> {
    memory.iter().flat_map(|w| [*w as u32, (*w >> 32) as u32]).collect()
}

#[test]
fn divergence_reconverges() {
    let mut m = vec![0; 64];
    run(
        "and.b32 %r3, %r1, 1; setp.eq.s32 %p1, %r3, 0; @%p1 bra EVEN; mov.u32 %r4, 7; bra.uni JOIN;\n\
         EVEN: mov.u32 %r4, 9;\nJOIN: activemask.b32 %r5; add.s32 %r4, %r4, %r5; st.global.u32 [%rd3], %r4;",
        1,
        32,
        &mut m,
    )
    .unwrap();
    assert_eq!(&words(&m)[..4], &[8, 6, 8, 6]);
}

#[test]
fn loops_shuffles_and_atomics() {
    let mut m = vec![0; 64];
    run(
        "mov.u32 %r3, %r1;\n\
         shfl.sync.bfly.b32 %r4|%p2, %r3, 16, 31, -1; add.s32 %r3, %r3, %r4;\n\
         shfl.sync.bfly.b32 %r4|%p2, %r3, 8, 31, -1; add.s32 %r3, %r3, %r4;\n\
         shfl.sync.bfly.b32 %r4|%p2, %r3, 4, 31, -1; add.s32 %r3, %r3, %r4;\n\
         shfl.sync.bfly.b32 %r4|%p2, %r3, 2, 31, -1; add.s32 %r3, %r3, %r4;\n\
         shfl.sync.bfly.b32 %r4|%p2, %r3, 1, 31, -1; add.s32 %r3, %r3, %r4;\n\
         atom.global.add.u32 %r5, [%rd1], %r3;",
        2,
        32,
        &mut m,
    )
    .unwrap();
    assert_eq!(words(&m)[0], 496 * 32 * 2);
}

#[test]
fn barriers_order_shared_memory() {
    let mut m = vec![0; 64];
    run(
        ".shared .align 4 .b8 tile[512];\n mov.u32 %r3, tile; shl.b32 %r4, %r1, 2; add.s32 %r5, %r3, %r4;\n\
         st.shared.u32 [%r5], %r1; bar.sync 0; mov.u32 %r6, 127; sub.s32 %r6, %r6, %r1; shl.b32 %r6, %r6, 2;\n\
         add.s32 %r6, %r3, %r6; ld.shared.u32 %r7, [%r6]; st.global.u32 [%rd3], %r7;",
        1,
        128,
        &mut m,
    )
    .unwrap();
    assert!(words(&m).iter().enumerate().all(|(i, v)| *v == 127 - i as u32));
}

#[test]
fn a_lane_may_wait_for_its_neighbour() {
    let mut m = vec![0; 64];
    // Lane 0 spins at a low program counter until lane 1 has stored.
    run(
        "setp.ne.s32 %p1, %r1, 0; @%p1 bra OTHER;\nSPIN: ld.volatile.global.u32 %r3, [%rd1+8]; setp.eq.s32 %p2, %r3, 0;\n\
         @%p2 bra SPIN; bra.uni END;\nOTHER: mov.u32 %r4, 5; st.volatile.global.u32 [%rd1+8], %r4;\nEND: st.global.u32 [%rd1+16], %r1;",
        1,
        2,
        &mut m,
    )
    .unwrap();
    assert_eq!(words(&m)[2], 5);
}

#[test]
fn bad_addresses_fault() {
    let mut m = vec![0; 4];
    assert!(matches!(run("st.global.u32 [%rd1+32], %r1;", 1, 1, &mut m), Err(Fault::Illegal(0x10020))));
    assert!(matches!(run("st.global.u32 [%rd1+2], %r1;", 1, 1, &mut m), Err(Fault::Misaligned(0x10002))));
    assert!(matches!(run("st.shared.u32 [0], %r1;", 1, 1, &mut m), Err(Fault::Illegal(_))));
    assert!(matches!(run("trap;", 1, 1, &mut m), Err(Fault::Trap)));
}

#[test]
fn unknown_opcodes_fail_at_load_by_name() {
    let e = compile(
        ".version 8.4\n.target sm_75\n.entry k() { .reg .b32 %r<4>; wgmma.fence.sync.aligned; ret; }",
    )
    .unwrap_err();
    assert!(e.contains("wgmma.fence.sync.aligned") && e.contains("line 3"), "{e}");
}

#[test]
fn functions_return_values_and_recurse() {
    let text = ".version 8.4\n.target sm_75\n.address_size 64\n\
        .func (.param .b32 r) fact(.param .b32 n)\n{ .reg .b32 %r<9>; .reg .pred %p<3>; ld.param.u32 %r1, [n];\n\
          setp.gt.u32 %p1, %r1, 1; @%p1 bra REC; mov.u32 %r2, 1; st.param.b32 [r], %r2; ret;\n\
        REC: add.s32 %r3, %r1, -1; { .param .b32 a; st.param.b32 [a], %r3; .param .b32 v; call.uni (v), fact, (a); ld.param.b32 %r4, [v]; }\n\
          mul.lo.s32 %r5, %r1, %r4; st.param.b32 [r], %r5; ret; }\n\
        .visible .entry k(.param .u64 out) { .reg .b32 %r<9>; .reg .b64 %rd<4>; ld.param.u64 %rd1, [out]; mov.u32 %r1, %tid.x;\n\
          mul.wide.u32 %rd2, %r1, 4; add.s64 %rd1, %rd1, %rd2;\n\
          { .param .b32 a; st.param.b32 [a], %r1; .param .b32 v; call.uni (v), fact, (a); ld.param.b32 %r2, [v]; } st.global.u32 [%rd1], %r2; ret; }";
    let program = Arc::new(compile(text).unwrap());
    let mut m = vec![0u64; 8];
    let env = Env {
        consts: resolve_consts(&program, &[]),
        func: program.kernels["k"],
        program,
        grid: [1; 3],
        block: [10, 1, 1],
        params: vec![0x10000],
        dynamic_shared: 0,
        workspace: 0,
        mem: Arc::new(MemView {
            spans: vec![Span {
                start: 0x10000,
                end: 0x10040,
                host: m.as_mut_ptr() as usize,
                writable: true,
                devices: 1,
            }],
            keep: Vec::new(),
        }),
        device: 0,
        sms: 1,
        grid_id: 1,
        started: Instant::now(),
        host: Arc::new(Sink(Mutex::new(Vec::new()))),
        cancel: Arc::new(AtomicBool::new(false)),
    };
    let mut block = Block::new(&env, 0);
    while !block.run(&env, 1 << 20).unwrap() {}
    assert_eq!(&words(&m)[..10], &[1, 1, 2, 6, 24, 120, 720, 5040, 40320, 362_880]);
}

#[test]
fn endless_recursion_faults() {
    let text = ".version 8.4\n.target sm_75\n.address_size 64\n.func f() { call.uni f; ret; }\n\
        .visible .entry k(.param .u64 out) { call.uni f; ret; }";
    let program = Arc::new(compile(text).unwrap());
    let env = Env {
        consts: resolve_consts(&program, &[]),
        func: program.kernels["k"],
        program,
        grid: [1; 3],
        block: [32, 1, 1],
        params: vec![0],
        dynamic_shared: 0,
        workspace: 0,
        mem: Arc::default(),
        device: 0,
        sms: 1,
        grid_id: 1,
        started: Instant::now(),
        host: Arc::new(Sink(Mutex::new(Vec::new()))),
        cancel: Arc::new(AtomicBool::new(false)),
    };
    let mut block = Block::new(&env, 0);
    let end = loop {
        match block.run(&env, 1 << 20) {
            Ok(false) => {}
            other => break other,
        }
    };
    assert!(matches!(end, Err(Fault::Illegal(_))));
}
