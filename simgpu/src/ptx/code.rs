//! The register bytecode that PTX is lowered to.

use super::ast::{Reference, Ty};
use super::rows::{Fn1, Fn2, Fn3, Fn4, FnCmp};
use std::collections::HashMap;

/// No register, no predicate.
pub const NONE: u32 = u32::MAX;
/// Set in a guard whose predicate is negated.
pub const NEGATED: u32 = 1 << 31;

/// Generic addresses of the windows that are not global memory.
pub const SHARED_WINDOW: u64 = 0x1000_0000_0000_0000;
pub const LOCAL_WINDOW: u64 = 0x2000_0000_0000_0000;
pub const PARAM_WINDOW: u64 = 0x3000_0000_0000_0000;
pub const WINDOW_MASK: u64 = 0xf000_0000_0000_0000;
/// Addresses of functions; they are never dereferenced.
pub const CODE_WINDOW: u64 = 0x4000_0000_0000_0000;

/// Memory of an access. Kernel parameters and lane memory are separate from the generic windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mem {
    Generic,
    Global,
    Shared,
    Local,
    Param,
}

#[derive(Debug, Clone, Copy)]
pub struct Addr {
    pub mem: Mem,
    /// Row with the base address, or `NONE`.
    pub base: u32,
    pub offset: i64,
    /// `true` if the offset counts from the function's own lane memory.
    pub frame: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomOp {
    Add,
    Min,
    Max,
    Exch,
    Cas,
    And,
    Or,
    Xor,
    Inc,
    Dec,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Special {
    Tid(u8),
    Ntid(u8),
    Ctaid(u8),
    Nctaid(u8),
    LaneId,
    WarpId,
    NWarpId,
    SmId,
    NSmId,
    GridId,
    Clock,
    ClockHi,
    Clock64,
    GlobalTimer,
    GlobalTimerLo,
    GlobalTimerHi,
    LaneMaskEq,
    LaneMaskLe,
    LaneMaskLt,
    LaneMaskGe,
    LaneMaskGt,
    DynamicSharedSize,
    TotalSharedSize,
    /// Words that the driver passes to a kernel: 1 and 2 are the workspace's address in a
    /// cooperative grid.
    EnvReg(u8),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shuffle {
    Up,
    Down,
    Bfly,
    Idx,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reduce {
    Popc,
    And,
    Or,
    Add,
    Min,
    Max,
    Xor,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vote {
    All,
    Any,
    Uni,
    Ballot,
}

/// Functions that the driver provides to device code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Builtin {
    Vprintf,
    AssertFail,
    Malloc,
    Free,
}

#[derive(Debug, Clone, Copy)]
pub enum Callee {
    Func(u32),
    /// Code address in a row.
    Row(u32),
    Builtin(Builtin),
}

/// A piece of lane memory, relative to the frame.
#[derive(Debug, Clone, Copy)]
pub struct Slot {
    pub offset: u32,
    pub size: u32,
}

#[derive(Debug, Clone)]
pub struct CallSite {
    pub callee: Callee,
    pub args: Vec<Slot>,
    pub rets: Vec<Slot>,
}

/// Combination of a comparison's result with another predicate.
#[derive(Debug, Clone, Copy)]
pub enum Combine {
    None,
    And(u32),
    Or(u32),
    Xor(u32),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PredOp {
    And,
    Or,
    Xor,
    Not,
    Mov,
}

/// Extended-precision integer steps: `add.cc`, `addc`, `sub.cc`, `subc`, `mad.cc`, `madc`.
#[derive(Debug, Clone, Copy)]
pub struct Carry {
    pub sub: bool,
    /// `Some(hi)` for a multiply-add.
    pub mul: Option<bool>,
    pub wide: bool,
    pub carry_in: bool,
    pub carry_out: bool,
    /// The hidden predicate that holds the carry flag.
    pub flag: u32,
}

/// Rows with the object and the coordinates of a texture or surface instruction.
#[derive(Debug, Clone, Copy)]
pub struct Texel {
    pub object: u32,
    /// Row with the layer, or `NONE`.
    pub layer: u32,
    /// The first `dims` are in use.
    pub at: [u32; 3],
    pub dims: u8,
}

/// `tex` and `tld4`
#[derive(Debug, Clone)]
pub struct Fetch {
    pub d: [u32; 4],
    /// Predicate that receives whether the texel has memory, or `NONE`.
    pub hit: u32,
    pub signed: bool,
    pub texel: Texel,
    /// `true` if the coordinates are a direction, which selects a face.
    pub cube: bool,
    /// `true` if the coordinates are integers.
    pub whole: bool,
    /// Row with the level, or `NONE`.
    pub level: u32,
    /// Rows with the steps of the coordinates to the next pixel, right and down, or `NONE`.
    pub steps: [[u32; 3]; 2],
    /// The one channel that `tld4` reads of four texels.
    pub gather: Option<u8>,
}

/// Effect of an access outside a surface.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Bounds {
    Trap,
    Clamp,
    Zero,
}

/// `suld.b` and `sust.b`
#[derive(Debug, Clone)]
pub struct SurfaceAccess {
    pub values: [u32; 4],
    pub n: u8,
    pub ty: Ty,
    pub store: bool,
    /// The first coordinate counts bytes.
    pub texel: Texel,
    pub bounds: Bounds,
}

#[derive(Debug, Clone)]
pub enum Code {
    Un {
        f: Fn1,
        d: u32,
        a: u32,
    },
    Bin {
        f: Fn2,
        d: u32,
        a: u32,
        b: u32,
    },
    Tri {
        f: Fn3,
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    Quad {
        f: Fn4,
        d: u32,
        a: u32,
        b: u32,
        c: u32,
        e: u32,
    },
    Carry {
        k: Carry,
        d: u32,
        a: u32,
        b: u32,
        c: u32,
    },
    /// Copies a whole lane value.
    Mov {
        d: u32,
        a: u32,
    },
    /// Packs `parts` of `bits` each into `d`.
    Pack {
        d: u32,
        parts: [u32; 4],
        n: u8,
        bits: u8,
    },
    Unpack {
        parts: [u32; 4],
        n: u8,
        bits: u8,
        a: u32,
    },
    SetP {
        f: FnCmp,
        p: u32,
        q: u32,
        a: u32,
        b: u32,
        with: Combine,
    },
    /// `set`: all ones (or 1.0) where the comparison holds.
    Set {
        f: FnCmp,
        d: u32,
        a: u32,
        b: u32,
        with: Combine,
        float: bool,
    },
    Selp {
        d: u32,
        a: u32,
        b: u32,
        p: u32,
    },
    Pred {
        op: PredOp,
        d: u32,
        a: u32,
        b: u32,
    },
    PredConst {
        d: u32,
        value: bool,
    },
    Special {
        d: u32,
        which: Special,
    },
    /// Address in the function's lane memory.
    FrameAddr {
        d: u32,
        offset: u32,
    },
    /// Converts a generic address to a window-relative one (`to = true`) or back; global needs
    /// neither.
    Cvta {
        d: u32,
        a: u32,
        window: u64,
        to: bool,
    },
    IsSpace {
        p: u32,
        a: u32,
        mem: Mem,
    },
    Ld {
        d: [u32; 4],
        n: u8,
        ty: Ty,
        at: Addr,
    },
    St {
        s: [u32; 4],
        n: u8,
        ty: Ty,
        at: Addr,
    },
    Atom {
        op: AtomOp,
        ty: Ty,
        d: u32,
        at: Addr,
        b: u32,
        c: u32,
    },
    Bra {
        target: u32,
    },
    Brx {
        targets: Box<[u32]>,
        index: u32,
    },
    Call(Box<CallSite>),
    Ret,
    Exit,
    Trap,
    Bar {
        id: u32,
        count: u32,
        arrive: bool,
    },
    /// `bar.red`: the result goes to row `d`, or to predicate `d` when `op` is not Popc.
    BarRed {
        op: Reduce,
        d: u32,
        id: u32,
        count: u32,
        p: u32,
    },
    BarWarp {
        mask: u32,
    },
    Shfl {
        mode: Shuffle,
        d: u32,
        p: u32,
        a: u32,
        b: u32,
        c: u32,
        mask: u32,
    },
    Vote {
        mode: Vote,
        d: u32,
        p: u32,
        mask: u32,
    },
    Match {
        all: bool,
        wide: bool,
        d: u32,
        p: u32,
        a: u32,
        mask: u32,
    },
    Redux {
        op: Reduce,
        signed: bool,
        d: u32,
        a: u32,
        mask: u32,
    },
    ActiveMask {
        d: u32,
    },
    Fetch(Box<Fetch>),
    Surface(Box<SurfaceAccess>),
    Fence,
    Nanosleep {
        a: u32,
    },
    Nop,
}

#[derive(Debug, Clone)]
pub struct Instr {
    /// Predicate index, `NEGATED` set for `@!p`, or `NONE`.
    pub guard: u32,
    pub code: Code,
}

/// A value that fills a row before a function runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Const {
    Imm(u64),
    /// Address of module variable `var` plus an offset.
    Var {
        var: u32,
        offset: i64,
    },
}

#[derive(Debug, Clone, Default)]
pub struct Func {
    pub name: String,
    pub entry: bool,
    pub start: u32,
    pub rows: u32,
    pub preds: u32,
    /// Rows `const_base..` hold these values.
    pub const_base: u32,
    pub consts: Vec<Const>,
    pub params: Vec<Slot>,
    pub rets: Vec<Slot>,
    /// Bytes of the parameter block of a kernel.
    pub param_size: u32,
    /// Bytes of lane memory per call.
    pub frame_size: u32,
    pub local_size: u32,
    pub shared_size: u32,
    pub max_threads: u32,
}

#[derive(Debug, Clone)]
pub struct Reloc {
    pub at: u64,
    pub var: u32,
    pub offset: i64,
    /// Bytes to write (8, or 1 with `shift`).
    pub bytes: u32,
    pub shift: u32,
}

/// A module-scope variable in global or constant memory.
#[derive(Debug, Clone)]
pub struct GlobalVar {
    pub name: String,
    pub constant: bool,
    pub managed: bool,
    pub size: u64,
    pub align: u64,
    pub init: Vec<u8>,
    pub relocs: Vec<Reloc>,
    pub reference: Option<Reference>,
}

/// A lowered module: code, functions and variables, before its addresses are known.
#[derive(Debug, Default)]
pub struct Program {
    pub version: (u32, u32),
    pub sm: u32,
    pub code: Vec<Instr>,
    pub funcs: Vec<Func>,
    pub kernels: HashMap<String, u32>,
    /// Kernel names in the order of the source.
    pub kernel_order: Vec<String>,
    pub vars: Vec<GlobalVar>,
    /// Functions by code address.
    pub addresses: HashMap<u64, u32>,
    /// Shared memory of all module variables together; dynamic shared memory follows it.
    pub shared_total: u32,
    pub uses_heap: bool,
    /// `true` if it reads textures, or accesses surfaces.
    pub uses_images: bool,
}
