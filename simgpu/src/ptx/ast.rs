//! Output of the parser: PTX as written, with scopes resolved.

use std::collections::HashMap;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Space {
    Generic,
    Global,
    Const,
    Shared,
    Local,
    Param,
}

/// A scalar type of PTX.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Ty {
    Pred,
    B8,
    B16,
    B32,
    B64,
    U8,
    U16,
    U32,
    U64,
    S8,
    S16,
    S32,
    S64,
    F16,
    F32,
    F64,
}

impl Ty {
    pub fn parse(name: &str) -> Option<Ty> {
        Some(match name {
            "pred" => Ty::Pred,
            "b8" => Ty::B8,
            "b16" => Ty::B16,
            "b32" => Ty::B32,
            "b64" => Ty::B64,
            "u8" => Ty::U8,
            "u16" => Ty::U16,
            "u32" => Ty::U32,
            "u64" => Ty::U64,
            "s8" => Ty::S8,
            "s16" => Ty::S16,
            "s32" => Ty::S32,
            "s64" => Ty::S64,
            "f16" => Ty::F16,
            "f32" => Ty::F32,
            "f64" => Ty::F64,
            _ => return None,
        })
    }

    /// Size in bytes (a predicate counts as one).
    pub fn size(self) -> u32 {
        match self {
            Ty::Pred | Ty::B8 | Ty::U8 | Ty::S8 => 1,
            Ty::B16 | Ty::U16 | Ty::S16 | Ty::F16 => 2,
            Ty::B32 | Ty::U32 | Ty::S32 | Ty::F32 => 4,
            Ty::B64 | Ty::U64 | Ty::S64 | Ty::F64 => 8,
        }
    }
}

/// One element of an initialiser.
#[derive(Debug, Clone, PartialEq)]
pub enum Init {
    Int(u64),
    F32(u32),
    F64(u64),
    /// Address of a symbol plus an offset; `shift` selects one byte of it for `.b8` tables.
    Symbol {
        name: String,
        offset: i64,
        shift: Option<u32>,
    },
}

/// Kind of a variable without bytes of its own, which the program binds to memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reference {
    /// `.texref`
    Texture,
    /// `.surfref`
    Surface,
}

/// A variable or parameter.
#[derive(Debug, Clone)]
pub struct Var {
    pub name: String,
    pub space: Space,
    pub ty: Ty,
    pub align: u32,
    /// Number of elements; 1 for a scalar, 0 for an unsized `extern` array.
    pub count: u64,
    pub init: Vec<Init>,
    pub external: bool,
    /// `.attribute(.managed)`
    pub managed: bool,
    pub reference: Option<Reference>,
}

impl Var {
    pub fn size(&self) -> u64 {
        self.count.saturating_mul(u64::from(self.ty.size()))
    }
}

#[derive(Debug, Clone, PartialEq)]
pub enum Operand {
    /// Register, variable, label or function name.
    Name(String),
    NotName(String),
    Int(u64),
    F32(u32),
    F64(u64),
    /// `name+offset` outside brackets.
    NameOffset(String, i64),
    /// `[base+offset]`; no base for an absolute address.
    Addr {
        base: Option<String>,
        offset: i64,
    },
    /// `[base, {coordinates}]` of a texture or a surface.
    Texel {
        base: String,
        at: Vec<Operand>,
    },
    Vec(Vec<Operand>),
    /// `(a, b)`: the argument and return lists of a call.
    List(Vec<Operand>),
    /// `d|p`
    Pair(Box<Operand>, Box<Operand>),
}

#[derive(Debug, Clone)]
pub struct Inst {
    /// Guard predicate and whether it is negated.
    pub guard: Option<(String, bool)>,
    pub op: String,
    pub args: Vec<Operand>,
    pub line: u32,
}

#[derive(Debug, Clone)]
pub enum Stmt {
    Label(String),
    Inst(Inst),
}

#[derive(Debug, Clone, Default)]
pub struct Body {
    /// Declared registers and their types.
    pub regs: HashMap<String, Ty>,
    /// Variables declared inside the body, call parameters included.
    pub vars: Vec<Var>,
    pub stmts: Vec<Stmt>,
    /// `.branchtargets` and `.calltargets` lists by label.
    pub targets: HashMap<String, Vec<String>>,
    /// `.callprototype` by label: return and argument parameters.
    pub prototypes: HashMap<String, (Vec<Var>, Vec<Var>)>,
}

#[derive(Debug, Clone)]
pub struct Function {
    pub name: String,
    pub entry: bool,
    pub rets: Vec<Var>,
    pub params: Vec<Var>,
    /// `None` for a declaration.
    pub body: Option<Body>,
    pub max_threads: Option<u32>,
}

#[derive(Debug, Clone, Default)]
pub struct Module {
    pub version: (u32, u32),
    /// The number in `.target sm_NN`.
    pub sm: u32,
    pub vars: Vec<Var>,
    pub functions: Vec<Function>,
    /// `.alias new, old`
    pub aliases: Vec<(String, String)>,
}
