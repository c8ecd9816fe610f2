//! Lowers a parsed module: lays out memory, numbers registers, resolves names.

use super::ast::{Body, Function, Init, Module, Operand, Space, Stmt, Ty, Var};
use super::code::{
    Addr, CODE_WINDOW, Code, Const, Func, GlobalVar, Instr, Mem, NEGATED, NONE, Program, Reloc, Slot,
    Special, Texel,
};
use super::select;
use super::warp::{LANE_MEMORY_LIMIT, ROW_LIMIT};
use std::collections::HashMap;

/// Upper bound of a module's shared memory, all of which every block gets.
const SHARED_LIMIT: u32 = 16 << 20;

pub type Res<T> = Result<T, String>;

/// Location of a name of module scope.
#[derive(Clone, Copy)]
pub enum Place {
    Var(u32),
    Shared(u32),
}

/// Names visible in every function of the module.
pub struct Scope {
    places: HashMap<String, Place>,
    pub funcs: HashMap<String, u32>,
    /// Functions without a body.
    pub declared: HashMap<String, ()>,
    shared_sizes: HashMap<String, u32>,
    dynamic_shared: Vec<String>,
}

fn align_up(v: u32, align: u32) -> u32 {
    v.next_multiple_of(align.max(1))
}

fn layout(vars: &[Var], mut at: u32, out: &mut Vec<Slot>) -> Res<u32> {
    for v in vars {
        let size = u32::try_from(v.size()).map_err(|_| format!("'{}' is too large", v.name))?;
        at = align_up(at, v.align);
        out.push(Slot { offset: at, size });
        at = at.checked_add(size).ok_or("parameters too large")?;
    }
    Ok(at)
}

pub fn lower(m: &Module) -> Res<Program> {
    let mut prog = Program { version: m.version, sm: m.sm, ..Program::default() };
    let mut scope = Scope {
        places: HashMap::new(),
        funcs: HashMap::new(),
        declared: HashMap::new(),
        shared_sizes: HashMap::new(),
        dynamic_shared: Vec::new(),
    };
    // Linked inputs declare variables that another input defines.
    let defined =
        |v: &Var| !v.external || !m.vars.iter().any(|other| other.name == v.name && !other.external);
    for v in m.vars.iter().filter(|v| defined(v)) {
        place(v, &v.name, &mut prog, &mut scope)?;
    }
    // Static variables of a body belong to the module, under a qualified name.
    for f in &m.functions {
        for v in f.body.iter().flat_map(|b| &b.vars) {
            if matches!(v.space, Space::Shared | Space::Global | Space::Const) {
                place(v, &format!("{}::{}", f.name, v.name), &mut prog, &mut scope)?;
            }
        }
    }
    let end = align_up(prog.shared_total, 16);
    if end > SHARED_LIMIT {
        return Err("too much shared memory".into());
    }
    prog.shared_total = end;
    for name in std::mem::take(&mut scope.dynamic_shared) {
        scope.places.insert(name, Place::Shared(end));
    }
    for v in m.vars.iter().filter(|v| defined(v)) {
        initialise(m, v, &v.name, &mut prog, &scope)?;
    }
    for f in &m.functions {
        for v in f.body.iter().flat_map(|b| &b.vars).filter(|v| !v.init.is_empty()) {
            initialise(m, v, &format!("{}::{}", f.name, v.name), &mut prog, &scope)?;
        }
    }

    let mut bodies = Vec::new();
    for f in &m.functions {
        let Some(body) = &f.body else {
            scope.declared.insert(f.name.clone(), ());
            continue;
        };
        let mut func = Func { name: f.name.clone(), entry: f.entry, ..Func::default() };
        func.max_threads = f.max_threads.unwrap_or(1024).min(1024);
        func.param_size = layout(&f.params, 0, &mut func.params)?;
        func.frame_size = layout(&f.rets, func.param_size, &mut func.rets)?;
        scope.funcs.insert(f.name.clone(), prog.funcs.len() as u32);
        prog.addresses.insert(CODE_WINDOW | name_hash(&f.name), prog.funcs.len() as u32);
        if f.entry {
            prog.kernels.insert(f.name.clone(), prog.funcs.len() as u32);
            prog.kernel_order.push(f.name.clone());
        }
        bodies.push((f, body));
        prog.funcs.push(func);
    }
    for (new, old) in &m.aliases {
        if let Some(&f) = scope.funcs.get(old) {
            scope.funcs.insert(new.clone(), f);
        }
    }
    let mut used = Vec::new();
    for (index, (f, body)) in bodies.iter().enumerate() {
        let mut b = Builder::new(&scope, f, body, std::mem::take(&mut prog.funcs[index]));
        b.func.start = prog.code.len() as u32;
        b.run().map_err(|e| format!("{}: {e}", f.name))?;
        let (func, code, uses) = b.finish(prog.code.len() as u32)?;
        prog.uses_heap |= uses.heap;
        prog.uses_images |= uses.images;
        prog.funcs[index] = func;
        prog.code.extend(code);
        used.push(uses);
    }
    sum_shared(&mut prog, &scope, &used);
    Ok(prog)
}

fn place(v: &Var, name: &str, prog: &mut Program, scope: &mut Scope) -> Res<()> {
    match v.space {
        Space::Shared if v.count == 0 || v.external => scope.dynamic_shared.push(name.to_owned()),
        Space::Shared => {
            let at = align_up(prog.shared_total, v.align);
            let size = u32::try_from(v.size()).map_err(|_| format!("'{name}' is too large"))?;
            prog.shared_total = at.checked_add(size).ok_or("shared memory too large")?;
            scope.shared_sizes.insert(name.to_owned(), size);
            scope.places.insert(name.to_owned(), Place::Shared(at));
        }
        _ => {
            if v.external {
                return Err(format!("unresolved extern variable '{name}'"));
            }
            scope.places.insert(name.to_owned(), Place::Var(prog.vars.len() as u32));
            if v.size() > 1 << 31 {
                return Err(format!("'{name}' is too large"));
            }
            prog.vars.push(GlobalVar {
                name: name.to_owned(),
                constant: v.space == Space::Const,
                managed: v.managed,
                size: v.size(),
                align: u64::from(v.align.max(1)),
                init: Vec::new(),
                relocs: Vec::new(),
                reference: v.reference,
            });
        }
    }
    Ok(())
}

fn initialise(m: &Module, v: &Var, name: &str, prog: &mut Program, scope: &Scope) -> Res<()> {
    let Some(Place::Var(index)) = scope.places.get(name).copied() else { return Ok(()) };
    let width = v.ty.size() as usize;
    let (mut init, mut relocs) = (Vec::with_capacity(v.init.len() * width), Vec::new());
    for item in &v.init {
        let raw = match item {
            Init::Int(x) => *x,
            Init::F32(b) => u64::from(*b),
            Init::F64(b) if v.ty == Ty::F32 => u64::from((f64::from_bits(*b) as f32).to_bits()),
            Init::F64(b) => *b,
            Init::Symbol { name: symbol, offset, shift } => match scope.places.get(symbol) {
                Some(Place::Var(var)) => {
                    relocs.push(Reloc {
                        at: init.len() as u64,
                        var: *var,
                        offset: *offset,
                        bytes: width as u32,
                        shift: shift.unwrap_or(0),
                    });
                    0
                }
                // Function addresses need no relocation: they are the same in every context.
                _ if m.functions.iter().any(|f| f.name == *symbol) => {
                    (CODE_WINDOW | name_hash(symbol)) >> shift.unwrap_or(0)
                }
                _ => return Err(format!("unknown symbol '{symbol}' in an initialiser")),
            },
        };
        init.extend_from_slice(&raw.to_le_bytes()[..width]);
    }
    let var = &mut prog.vars[index as usize];
    var.init = init;
    var.relocs = relocs;
    Ok(())
}

/// Returns the code address of a function, which depends only on its name.
pub fn name_hash(name: &str) -> u64 {
    name.bytes().fold(0xcbf2_9ce4_8422_2325u64, |h, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3))
        & 0x00ff_ffff_ffff_fff0
}

/// Sums the static shared memory of each kernel: its own, and that of all functions it calls.
fn sum_shared(prog: &mut Program, scope: &Scope, used: &[Uses]) {
    for index in 0..prog.funcs.len() {
        let (mut seen, mut todo, mut names) = (vec![false; used.len()], vec![index], Vec::new());
        while let Some(i) = todo.pop() {
            if std::mem::replace(&mut seen[i], true) {
                continue;
            }
            names.extend(used[i].shared.iter().cloned());
            todo.extend(used[i].calls.iter().map(|&c| c as usize));
        }
        names.sort();
        names.dedup();
        prog.funcs[index].shared_size =
            names.iter().filter_map(|n| scope.shared_sizes.get(n)).fold(0, |sum, &s| align_up(sum, 4) + s);
    }
}

/// Variables and functions to which a function refers.
#[derive(Default, Clone)]
pub struct Uses {
    pub shared: Vec<String>,
    pub calls: Vec<u32>,
    pub heap: bool,
    pub images: bool,
}

/// Builds the bytecode of one function.
pub struct Builder<'a> {
    pub scope: &'a Scope,
    pub f: &'a Function,
    pub body: &'a Body,
    pub func: Func,
    pub code: Vec<Instr>,
    pub uses: Uses,
    pub guard: u32,
    rows: HashMap<String, u32>,
    preds: HashMap<String, u32>,
    consts: HashMap<Const, u32>,
    /// Lane-memory offsets of `.local` and `.param` variables.
    frame: HashMap<String, Slot>,
    labels: HashMap<String, u32>,
    /// Position of each label, by its number; `None` until it is defined.
    positions: Vec<Option<u32>>,
    next_row: u32,
    next_pred: u32,
}

/// Flag of a constant row until the final number of registers is known.
const CONST_FLAG: u32 = 1 << 30;

impl<'a> Builder<'a> {
    fn new(scope: &'a Scope, f: &'a Function, body: &'a Body, func: Func) -> Self {
        Builder {
            scope,
            f,
            body,
            func,
            code: Vec::new(),
            uses: Uses::default(),
            guard: NONE,
            rows: HashMap::new(),
            preds: HashMap::new(),
            consts: HashMap::new(),
            frame: HashMap::new(),
            labels: HashMap::new(),
            positions: Vec::new(),
            next_row: 0,
            next_pred: 0,
        }
    }

    fn run(&mut self) -> Res<()> {
        if self.f.entry {
            self.func.frame_size = 0;
        } else {
            for (var, slot) in self.f.params.iter().zip(self.func.params.clone()) {
                self.frame.insert(var.name.clone(), slot);
            }
        }
        for (var, slot) in self.f.rets.iter().zip(self.func.rets.clone()) {
            self.frame.insert(var.name.clone(), slot);
        }
        for v in self.body.vars.iter().filter(|v| matches!(v.space, Space::Local | Space::Param)) {
            let size = u32::try_from(v.size()).map_err(|_| format!("'{}' is too large", v.name))?;
            let slot = self.frame_slot(size, v.align);
            if v.space == Space::Local {
                self.func.local_size += size;
            }
            self.frame.insert(v.name.clone(), slot);
        }
        let body = self.body;
        for stmt in &body.stmts {
            match stmt {
                Stmt::Label(name) => {
                    let id = self.label(name) as usize;
                    self.positions[id] = Some(self.code.len() as u32);
                }
                Stmt::Inst(inst) => {
                    self.guard = match &inst.guard {
                        Some((p, negated)) => self.pred(p)? | if *negated { NEGATED } else { 0 },
                        None => NONE,
                    };
                    select::instruction(self, inst).map_err(|e| format!("line {}: {e}", inst.line))?;
                }
            }
        }
        // Reaching the end of the body returns.
        self.guard = NONE;
        self.emit(Code::Ret);
        Ok(())
    }

    fn finish(mut self, base: u32) -> Res<(Func, Vec<Instr>, Uses)> {
        let const_base = self.next_row;
        let fix = |r: &mut u32| {
            if *r != NONE && *r & CONST_FLAG != 0 {
                *r = const_base + (*r & !CONST_FLAG);
            }
        };
        if self.positions.contains(&None) {
            let missing = self.labels.iter().find(|(_, id)| self.positions[**id as usize].is_none());
            return Err(format!("{}: unknown label '{}'", self.f.name, missing.map_or("", |(n, _)| n)));
        }
        let place = |t: &mut u32| *t = base + self.positions[*t as usize].unwrap_or(0);
        for instr in &mut self.code {
            visit_rows(&mut instr.code, fix);
            match &mut instr.code {
                Code::Bra { target } => place(target),
                Code::Brx { targets, .. } => targets.iter_mut().for_each(place),
                _ => {}
            }
        }
        self.func.const_base = const_base;
        let mut consts = vec![Const::Imm(0); self.consts.len()];
        for (value, row) in &self.consts {
            consts[(row & !CONST_FLAG) as usize] = *value;
        }
        self.func.consts = consts;
        self.func.rows = const_base + self.func.consts.len() as u32;
        self.func.preds = self.next_pred;
        // Every call takes some lane memory, so that endless recursion exhausts it.
        let least = if self.func.entry { 0 } else { 16 };
        self.func.frame_size = align_up(self.func.frame_size.max(least), 16);
        if self.func.frame_size as usize > LANE_MEMORY_LIMIT {
            return Err(format!("{}: too much local memory", self.func.name));
        }
        if self.func.rows as usize > ROW_LIMIT {
            return Err(format!("{}: too many registers", self.func.name));
        }
        Ok((self.func, self.code, self.uses))
    }

    pub fn emit(&mut self, code: Code) {
        self.code.push(Instr { guard: self.guard, code });
    }

    pub fn frame_slot(&mut self, size: u32, align: u32) -> Slot {
        let offset = align_up(self.func.frame_size, align.max(1));
        self.func.frame_size = offset + size;
        Slot { offset, size }
    }

    /// Returns the number of a label, which may be defined later.
    pub fn label(&mut self, name: &str) -> u32 {
        let next = self.positions.len() as u32;
        let id = *self.labels.entry(name.to_owned()).or_insert(next);
        if id == next {
            self.positions.push(None);
        }
        id
    }

    pub fn temp(&mut self) -> u32 {
        self.next_row += 1;
        self.next_row - 1
    }

    pub fn temp_pred(&mut self) -> u32 {
        self.next_pred += 1;
        self.next_pred - 1
    }

    /// Returns the predicate that holds the carry flag.
    pub fn carry_flag(&mut self) -> u32 {
        if let Some(&p) = self.preds.get("%carry") {
            return p;
        }
        let p = self.temp_pred();
        self.preds.insert("%carry".into(), p);
        p
    }

    pub fn constant(&mut self, value: Const) -> u32 {
        let next = self.consts.len() as u32 | CONST_FLAG;
        *self.consts.entry(value).or_insert(next)
    }

    pub fn is_pred(&self, name: &str) -> bool {
        self.body.regs.get(name) == Some(&Ty::Pred)
    }

    pub fn reg_type(&self, name: &str) -> Option<Ty> {
        self.body.regs.get(name).copied()
    }

    pub fn pred(&mut self, name: &str) -> Res<u32> {
        if name == "_" {
            return Ok(NONE);
        }
        if !self.is_pred(name) {
            return Err(format!("'{name}' is not a predicate"));
        }
        if let Some(&p) = self.preds.get(name) {
            return Ok(p);
        }
        let p = self.temp_pred();
        self.preds.insert(name.to_owned(), p);
        Ok(p)
    }

    /// Returns the row of a declared register.
    pub fn reg(&mut self, name: &str) -> Res<u32> {
        if name == "_" {
            return Ok(self.temp());
        }
        match self.reg_type(name) {
            Some(Ty::Pred) => Err(format!("'{name}' is a predicate")),
            None => Err(format!("unknown register '{name}'")),
            Some(_) => {
                if let Some(&r) = self.rows.get(name) {
                    return Ok(r);
                }
                let r = self.temp();
                self.rows.insert(name.to_owned(), r);
                Ok(r)
            }
        }
    }

    pub fn dst(&mut self, op: &Operand) -> Res<u32> {
        match op {
            Operand::Name(n) => self.reg(n),
            other => Err(format!("bad destination {other:?}")),
        }
    }

    fn module_place(&mut self, name: &str) -> Option<Place> {
        let own = format!("{}::{name}", self.f.name);
        let (key, place) = match self.scope.places.get(&own) {
            Some(p) => (own, *p),
            None => (name.to_owned(), *self.scope.places.get(name)?),
        };
        if let Place::Shared(_) = place {
            self.uses.shared.push(key);
        }
        Some(place)
    }

    /// Returns the row of an operand's value; immediates of type `ty` become constants.
    pub fn src(&mut self, op: &Operand, ty: Ty) -> Res<u32> {
        let value = match op {
            Operand::Name(n) => return self.name_value(n, 0),
            Operand::NameOffset(n, off) => return self.name_value(n, *off),
            Operand::Int(v) => match ty {
                Ty::F32 => u64::from((*v as i64 as f32).to_bits()),
                Ty::F64 => (*v as i64 as f64).to_bits(),
                Ty::U32 | Ty::B32 => u64::from(*v as u32),
                Ty::S32 => *v as i32 as i64 as u64,
                Ty::U16 | Ty::B16 => u64::from(*v as u16),
                _ => *v,
            },
            Operand::F32(b) => u64::from(*b),
            Operand::F64(b) if ty == Ty::F32 => u64::from((f64::from_bits(*b) as f32).to_bits()),
            Operand::F64(b) => *b,
            other => return Err(format!("bad operand {other:?}")),
        };
        Ok(self.constant(Const::Imm(value)))
    }

    fn name_value(&mut self, name: &str, offset: i64) -> Res<u32> {
        if self.body.regs.contains_key(name) {
            return self.reg(name);
        }
        if name == "WARP_SZ" {
            return Ok(self.constant(Const::Imm(32)));
        }
        if name.starts_with('%') {
            let which = special(name).ok_or_else(|| format!("unknown register '{name}'"))?;
            let d = self.temp();
            self.emit(Code::Special { d, which });
            return Ok(d);
        }
        if let Some(slot) = self.frame.get(name).copied() {
            let d = self.temp();
            self.emit(Code::FrameAddr { d, offset: slot.offset + offset as u32 });
            return Ok(d);
        }
        if let Some(index) = self.kernel_param(name) {
            return Ok(self.constant(Const::Imm((i64::from(index) + offset) as u64)));
        }
        match self.module_place(name) {
            Some(Place::Var(var)) => return Ok(self.constant(Const::Var { var, offset })),
            Some(Place::Shared(at)) => return Ok(self.constant(Const::Imm((i64::from(at) + offset) as u64))),
            None => {}
        }
        if let Some(&f) = self.scope.funcs.get(name) {
            self.uses.calls.push(f);
            return Ok(self.constant(Const::Imm(CODE_WINDOW | name_hash(name))));
        }
        Err(format!("unknown name '{name}'"))
    }

    fn kernel_param(&self, name: &str) -> Option<u32> {
        if !self.f.entry {
            return None;
        }
        let index = self.f.params.iter().position(|p| p.name == name)?;
        Some(self.func.params[index].offset)
    }

    pub fn slot(&self, name: &str) -> Option<Slot> {
        self.frame.get(name).copied()
    }

    /// Returns the address operand of an access to `space`.
    pub fn addr(&mut self, op: &Operand, space: Space) -> Res<Addr> {
        let Operand::Addr { base, offset } = op else { return Err(format!("bad address {op:?}")) };
        let mem = match space {
            Space::Generic => Mem::Generic,
            Space::Global | Space::Const => Mem::Global,
            Space::Shared => Mem::Shared,
            Space::Local => Mem::Local,
            Space::Param if self.f.entry => Mem::Param,
            Space::Param => Mem::Local,
        };
        let mut addr = Addr { mem, base: NONE, offset: *offset, frame: false };
        let Some(name) = base else { return Ok(addr) };
        if self.body.regs.contains_key(name) {
            addr.base = self.reg(name)?;
        } else if let Some(slot) = self.slot(name) {
            addr = Addr { mem: Mem::Local, base: NONE, offset: i64::from(slot.offset) + offset, frame: true };
        } else if let Some(at) = self.kernel_param(name) {
            addr = Addr { mem: Mem::Param, base: NONE, offset: i64::from(at) + offset, frame: false };
        } else {
            match self.module_place(name) {
                Some(Place::Var(var)) => {
                    addr.base = self.constant(Const::Var { var, offset: 0 });
                    addr.mem = Mem::Global;
                }
                Some(Place::Shared(at)) => {
                    addr.offset += i64::from(at);
                    addr.mem = Mem::Shared;
                }
                None => return Err(format!("unknown name '{name}'")),
            }
        }
        Ok(addr)
    }
}

fn special(name: &str) -> Option<Special> {
    let axis = |c: &str| match c {
        "x" => Some(0u8),
        "y" => Some(1),
        "z" => Some(2),
        _ => None,
    };
    if let Some((head, dim)) = name.split_once('.') {
        let dim = axis(dim)?;
        return Some(match head {
            "%tid" => Special::Tid(dim),
            "%ntid" => Special::Ntid(dim),
            "%ctaid" => Special::Ctaid(dim),
            "%nctaid" => Special::Nctaid(dim),
            _ => return None,
        });
    }
    Some(match name {
        "%laneid" => Special::LaneId,
        "%warpid" => Special::WarpId,
        "%nwarpid" => Special::NWarpId,
        "%smid" => Special::SmId,
        "%nsmid" => Special::NSmId,
        "%gridid" => Special::GridId,
        "%clock" => Special::Clock,
        "%clock_hi" => Special::ClockHi,
        "%clock64" => Special::Clock64,
        "%globaltimer" => Special::GlobalTimer,
        "%globaltimer_lo" => Special::GlobalTimerLo,
        "%globaltimer_hi" => Special::GlobalTimerHi,
        "%lanemask_eq" => Special::LaneMaskEq,
        "%lanemask_le" => Special::LaneMaskLe,
        "%lanemask_lt" => Special::LaneMaskLt,
        "%lanemask_ge" => Special::LaneMaskGe,
        "%lanemask_gt" => Special::LaneMaskGt,
        "%dynamic_smem_size" => Special::DynamicSharedSize,
        "%total_smem_size" => Special::TotalSharedSize,
        n if n.starts_with("%envreg") => Special::EnvReg(n["%envreg".len()..].parse().ok()?),
        _ => return None,
    })
}

fn visit_texel(texel: &mut Texel, f: impl FnMut(&mut u32)) {
    let [x, y, z] = &mut texel.at;
    [&mut texel.object, &mut texel.layer, x, y, z].into_iter().for_each(f);
}

/// Calls `f` on every row index of an instruction (predicates are not rows).
fn visit_rows(code: &mut Code, mut f: impl FnMut(&mut u32)) {
    match code {
        Code::Un { d, a, .. } | Code::Mov { d, a } | Code::Cvta { d, a, .. } => {
            [d, a].into_iter().for_each(f)
        }
        Code::Bin { d, a, b, .. } => [d, a, b].into_iter().for_each(f),
        Code::Tri { d, a, b, c, .. } | Code::Carry { d, a, b, c, .. } => [d, a, b, c].into_iter().for_each(f),
        Code::Quad { d, a, b, c, e, .. } => [d, a, b, c, e].into_iter().for_each(f),
        Code::Pack { d, parts, .. } => {
            f(d);
            parts.iter_mut().for_each(f);
        }
        Code::Unpack { parts, a, .. } => {
            f(a);
            parts.iter_mut().for_each(f);
        }
        Code::SetP { a, b, .. } => [a, b].into_iter().for_each(f),
        Code::Set { d, a, b, .. } | Code::Selp { d, a, b, .. } => [d, a, b].into_iter().for_each(f),
        Code::IsSpace { a, .. } | Code::Nanosleep { a } => f(a),
        Code::Ld { d, at, .. } => {
            d.iter_mut().for_each(&mut f);
            f(&mut at.base);
        }
        Code::St { s, at, .. } => {
            s.iter_mut().for_each(&mut f);
            f(&mut at.base);
        }
        Code::Atom { d, at, b, c, .. } => [d, &mut at.base, b, c].into_iter().for_each(f),
        Code::Brx { index, .. } => f(index),
        Code::Call(site) => {
            if let super::code::Callee::Row(r) = &mut site.callee {
                f(r);
            }
        }
        Code::Bar { id, count, .. } | Code::BarRed { id, count, .. } => [id, count].into_iter().for_each(f),
        Code::BarWarp { mask } | Code::Vote { mask, .. } => f(mask),
        Code::Shfl { a, b, c, mask, .. } => [a, b, c, mask].into_iter().for_each(f),
        Code::Match { a, mask, .. } | Code::Redux { a, mask, .. } => [a, mask].into_iter().for_each(f),
        Code::Fetch(fetch) => {
            fetch.d.iter_mut().chain([&mut fetch.level]).for_each(&mut f);
            fetch.steps.iter_mut().flatten().for_each(&mut f);
            visit_texel(&mut fetch.texel, f);
        }
        Code::Surface(access) => {
            access.values.iter_mut().for_each(&mut f);
            visit_texel(&mut access.texel, f);
        }
        Code::Pred { .. }
        | Code::PredConst { .. }
        | Code::Special { .. }
        | Code::FrameAddr { .. }
        | Code::Bra { .. }
        | Code::Ret
        | Code::Exit
        | Code::Trap
        | Code::ActiveMask { .. }
        | Code::Fence
        | Code::Nop => {}
    }
}
