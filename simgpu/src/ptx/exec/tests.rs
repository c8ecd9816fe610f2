//! Small kernels, run without a driver.

use super::super::compile;
use super::super::image::Format;
use super::super::sampler::{Mode, Sampler};
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
    run_images(body, grid, block, memory, Images::default())
}

/// As [`run`], with textures and surfaces.
fn run_images(body: &str, grid: u32, block: u32, memory: &mut [u64], images: Images) -> Result<(), Fault> {
    let text = format!(
        ".version 8.4\n.target sm_75\n.address_size 64\n.visible .entry k(.param .u64 out)\n{{\n\
         .reg .pred %p<9>; .reg .b32 %r<20>; .reg .b64 %rd<20>; .reg .f32 %f<9>; .reg .b16 %rs<9>;\n\
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
        images: Arc::new(images),
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
        images: Arc::default(),
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
        images: Arc::default(),
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

/// Words of the tests' memory that belong to an image, after the words that kernels write.
const IMAGE_WORDS: std::ops::Range<usize> = 32..64;

/// The object 7: an image of `extent` in the middle of the memory of a test.
fn images(format: (u32, u32), extent: [u64; 3], layered: bool) -> Images {
    let image = Image::packed(Format::new(format.0, format.1).unwrap(), extent, layered).unwrap();
    let image = Image { base: 0x10000 + IMAGE_WORDS.start as u64 * 4, ..image };
    let sampler = Sampler {
        modes: [Mode::Clamp; 3],
        linear: true,
        normalized: false,
        fractions: false,
        srgb: false,
        border: [0.0; 4],
        between_levels: false,
        bias: 0.0,
        levels: [0.0; 2],
    };
    let texture = Arc::new(Texture { levels: vec![image], sampler });
    Images { textures: HashMap::from([(7, texture)]), surfaces: HashMap::from([(7, image)]) }
}

/// Memory whose words have their own numbers.
fn numbered() -> Vec<u64> {
    (0..64u64).map(|i| (2 * i) | ((2 * i + 1) << 32)).collect()
}

#[test]
fn surfaces_keep_their_bounds() {
    let plane = || images((0x03, 1), [4, 3, 1], false);
    let address = "mov.u64 %rd4, 7; shl.b32 %r3, %r1, 2; sub.s32 %r3, %r3, 4;";
    // Each of six lanes writes one word of the second row, or beyond its ends.
    let mut m = numbered();
    let body = format!("{address} mov.u32 %r4, 1; sust.b.2d.b32.zero [%rd4, {{%r3, %r4}}], {{%r1}};");
    run_images(&body, 1, 6, &mut m, plane()).unwrap();
    assert_eq!(words(&m)[34..42], [34, 35, 1, 2, 3, 4, 40, 41]);
    for (bounds, expected) in [("zero", [0, 36, 37, 38, 39, 0]), ("clamp", [36, 36, 37, 38, 39, 39])] {
        let mut m = numbered();
        let body = format!(
            "{address} mov.u32 %r4, 1; suld.b.2d.b32.{bounds} {{%r5}}, [%rd4, {{%r3, %r4}}]; st.global.u32 [%rd3], %r5;"
        );
        run_images(&body, 1, 6, &mut m, plane()).unwrap();
        assert_eq!(words(&m)[..6], expected);
    }
    // Rows and slices outside, with each sign.
    for at in ["0, 3", "0, -1", "16, 0", "-4, 0", "2147483644, 2147483647"] {
        let (x, y) = at.split_once(", ").unwrap();
        let move_in = format!("mov.u64 %rd4, 7; mov.u32 %r3, {x}; mov.u32 %r4, {y};");
        let mut m = numbered();
        let store = |bounds| format!("{move_in} sust.b.2d.b32.{bounds} [%rd4, {{%r3, %r4}}], {{%r1}};");
        run_images(&store("zero"), 1, 1, &mut m, plane()).unwrap();
        assert_eq!(m, numbered());
        let fault = run_images(&store("trap"), 1, 1, &mut m, plane()).unwrap_err();
        assert!(matches!(fault, Fault::Illegal(_)), "{at}: {fault:?}");
        run_images(&store("clamp"), 1, 1, &mut m, plane()).unwrap();
        assert!(m[..16] == numbered()[..16] && m[22..] == numbered()[22..]);
    }
    let stray = "mov.u64 %rd4, 7; sust.b.2d.b32.trap [%rd4, {2, 0}], {%r1};";
    assert!(matches!(run_images(stray, 1, 1, &mut m, plane()), Err(Fault::Misaligned(_))));
    let unknown = "mov.u64 %rd4, 8; sust.b.2d.b32.zero [%rd4, {0, 0}], {%r1};";
    assert_eq!(run_images(unknown, 1, 1, &mut m, plane()), Err(Fault::Illegal(8)));
    // Memory that was freed meanwhile.
    let freed = images((0x03, 1), [4, 300, 1], false);
    let last = "mov.u64 %rd4, 7; sust.b.2d.b32.trap [%rd4, {0, 299}], {%r1};";
    assert!(matches!(run_images(last, 1, 1, &mut m, freed), Err(Fault::Illegal(_))));
}

#[test]
fn surfaces_have_layers_and_vectors() {
    let mut m = numbered();
    let body = "mov.u64 %rd4, 7; mov.u32 %r3, 1; mov.u32 %r4, 0;\n\
         suld.b.a2d.v2.b32.trap {%r5, %r6}, [%rd4, {%r3, 8, %r3, %r3}]; st.global.v2.u32 [%rd1], {%r5, %r6};\n\
         suld.b.3d.v2.b16.trap {%rs1, %rs2}, [%rd4, {4, %r4, %r3, %r3}]; st.global.v2.u16 [%rd1+8], {%rs1, %rs2};\n\
         suld.b.a1d.b64.trap {%rd5}, [%rd4, {%r3, 8}]; st.global.u64 [%rd1+16], %rd5;\n\
         sust.b.1d.v4.b8.trap [%rd4, {4}], {1, 2, 3, 4};";
    run_images(body, 1, 1, &mut m, images((0x03, 2), [2, 2, 2], true)).unwrap();
    let w = words(&m);
    assert_eq!((w[0], w[1], w[2], w[4], w[5]), (46, 47, 41, 42, 43));
    assert_eq!(w[33], 0x0403_0201);
    // Rows of three bytes: a word may begin at each.
    let mut m = numbered();
    let body = "mov.u64 %rd4, 7; suld.b.2d.b16.trap {%rs1}, [%rd4, {0, 1}]; st.global.u16 [%rd1], %rs1;\n\
         sust.b.2d.b16.trap [%rd4, {0, 3}], {0xabcd};";
    run_images(body, 1, 1, &mut m, images((0x01, 1), [3, 5, 1], false)).unwrap();
    assert_eq!((words(&m)[0] as u16, words(&m)[34]), (0x2100, 0x00ab_cd22));
}

#[test]
fn textures_are_read() {
    let mut m = numbered();
    let body = "mov.u64 %rd4, 7; sub.s32 %r3, %r1, 1;\n\
         tex.1d.v4.s32.s32 {%r5, %r6, %r7, %r8}|%p1, [%rd4, {%r3}]; selp.b32 %r9, %r5, -1, %p1;\n\
         st.global.u32 [%rd3], %r9;";
    run_images(body, 1, 6, &mut m, images((0x0a, 1), [4, 1, 1], false)).unwrap();
    assert_eq!(words(&m)[..6], [32, 32, 33, 34, 35, 35]);
    // Linear filters between floats, in the second layer, and four texels at once.
    let mut m = vec![0; 64];
    for i in 0..24 {
        m[16 + i / 2] |= u64::from((i as f32).to_bits()) << (32 * (i % 2));
    }
    let body = "mov.u64 %rd4, 7; mov.f32 %f1, 0f3FA00000; mov.u32 %r3, 1;\n\
         tex.a2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd4, {%r3, %f1, 0f40000000, %f1}]; st.global.f32 [%rd1], %f2;\n\
         tex.level.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd4, {%f1, 0f3F000000}], 0f40800000; st.global.f32 [%rd1+4], %f2;\n\
         tex.grad.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd4, {%f1, 0f3F000000}], {%f1, %f1}, {%f1, 0f00000000}; st.global.f32 [%rd1+8], %f2;\n\
         tld4.r.2d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd4, {%f1, 0f3F800000}];\n\
         st.global.v4.f32 [%rd1+16], {%f2, %f3, %f4, %f5};";
    run_images(body, 1, 1, &mut m, images((0x20, 1), [4, 3, 2], true)).unwrap();
    let w: Vec<f32> = words(&m)[..8].iter().map(|bits| f32::from_bits(*bits)).collect();
    assert_eq!(w[..3], [18.75, 0.75, 0.75]);
    assert_eq!(w[4..], [4.0, 5.0, 1.0, 0.0]);
    let unknown = "mov.u64 %rd4, 0; tex.1d.v4.f32.f32 {%f2, %f3, %f4, %f5}, [%rd4, {%f1}];";
    assert_eq!(run(unknown, 1, 1, &mut m), Err(Fault::Illegal(0)));
}
