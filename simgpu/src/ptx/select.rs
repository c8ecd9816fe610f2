//! Chooses bytecode for one PTX instruction. An unknown instruction fails at load, by name.

use super::ast::{Inst, Operand, Space, Ty};
use super::code::{
    Addr, AtomOp, Bounds, Builtin, CallSite, Callee, Carry, Code, Combine, Const, Fetch, LOCAL_WINDOW, Mem,
    NEGATED, NONE, PARAM_WINDOW, PredOp, Reduce, SHARED_WINDOW, Shuffle, Slot, SurfaceAccess, Texel, Vote,
};
use super::lower::{Builder, Res};
use super::ops;

fn unknown<T>(op: &str) -> Res<T> {
    Err(format!("unsupported instruction '{op}'"))
}

fn arg(inst: &Inst, i: usize) -> Res<&Operand> {
    inst.args.get(i).ok_or_else(|| format!("'{}' lacks operand {}", inst.op, i + 1))
}

/// Returns a predicate operand with its negation bit.
fn pred_src(b: &mut Builder, op: &Operand) -> Res<u32> {
    match op {
        Operand::Name(n) => b.pred(n),
        Operand::NotName(n) => Ok(b.pred(n)? | NEGATED),
        // Some intrinsics get constant predicates.
        Operand::Int(v) => {
            let d = b.temp_pred();
            b.emit(Code::PredConst { d, value: *v != 0 });
            Ok(d)
        }
        other => Err(format!("bad predicate {other:?}")),
    }
}

/// Returns the destinations of `d` or `d|p`.
fn dst_pair(b: &mut Builder, op: &Operand) -> Res<(u32, u32)> {
    match op {
        Operand::Pair(d, p) => {
            let d = b.dst(d)?;
            match &**p {
                Operand::Name(n) => Ok((d, b.pred(n)?)),
                other => Err(format!("bad predicate {other:?}")),
            }
        }
        other => Ok((b.dst(other)?, NONE)),
    }
}

#[expect(clippy::too_many_lines, reason = "one `match` over the instructions")]
pub fn instruction(b: &mut Builder, inst: &Inst) -> Res<()> {
    let parts: Vec<&str> = inst.op.split('.').collect();
    let (name, mods) = (parts[0], &parts[1..]);
    let types: Vec<Ty> = mods.iter().filter_map(|m| Ty::parse(m)).collect();
    let plain: Vec<&str> = mods.iter().copied().filter(|m| Ty::parse(m).is_none()).collect();
    let ty = types.last().copied();
    let has = |m: &str| plain.contains(&m);
    match name {
        "mov" => mov(b, inst, ty.unwrap_or(Ty::B64)),
        "ld" | "ldu" => load(b, inst, &plain, ty),
        "st" => store(b, inst, &plain, ty),
        "tex" | "tld4" => fetch(b, inst, name == "tld4", &plain, &types),
        "suld" | "sust" => surface(b, inst, name == "sust", &plain, ty),
        "atom" | "red" => atomic(b, inst, name == "red", &plain, ty),
        "cvta" => cvta(b, inst, &plain),
        "cvt" => {
            let [dst, src] = types[..] else { return unknown(&inst.op) };
            let Some(f) = ops::convert(&plain, dst, src) else { return unknown(&inst.op) };
            let a = b.src(arg(inst, 1)?, src)?;
            let d = b.dst(arg(inst, 0)?)?;
            b.emit(Code::Un { f, d, a });
            Ok(())
        }
        "setp" => setp(b, inst, &plain, ty),
        "set" => set(b, inst, &plain, &types),
        "selp" => {
            let ty = ty.unwrap_or(Ty::B64);
            let (x, y) = (b.src(arg(inst, 1)?, ty)?, b.src(arg(inst, 2)?, ty)?);
            let p = pred_src(b, arg(inst, 3)?)?;
            let d = b.dst(arg(inst, 0)?)?;
            b.emit(Code::Selp { d, a: x, b: y, p });
            Ok(())
        }
        "slct" => {
            let [ty, selector] = types[..] else { return unknown(&inst.op) };
            let Some(f) = ops::slct(selector) else { return unknown(&inst.op) };
            let (x, y) = (b.src(arg(inst, 1)?, ty)?, b.src(arg(inst, 2)?, ty)?);
            let c = b.src(arg(inst, 3)?, selector)?;
            let d = b.dst(arg(inst, 0)?)?;
            b.emit(Code::Tri { f, d, a: x, b: y, c });
            Ok(())
        }
        "bra" => {
            let Operand::Name(label) = arg(inst, 0)? else { return unknown(&inst.op) };
            let target = b.label(label);
            b.emit(Code::Bra { target });
            Ok(())
        }
        "brx" => {
            let index = b.src(arg(inst, 0)?, Ty::U32)?;
            let Operand::Name(list) = arg(inst, 1)? else { return unknown(&inst.op) };
            let Some(names) = b.body.targets.get(list) else { return Err(format!("unknown label '{list}'")) };
            let targets = names.iter().map(|n| b.label(n)).collect();
            b.emit(Code::Brx { targets, index });
            Ok(())
        }
        "call" => call(b, inst),
        "ret" => {
            b.emit(if b.f.entry { Code::Exit } else { Code::Ret });
            Ok(())
        }
        "exit" => {
            b.emit(Code::Exit);
            Ok(())
        }
        "trap" => {
            b.emit(Code::Trap);
            Ok(())
        }
        "bar" | "barrier" => barrier(b, inst, &plain),
        "membar" | "fence" => {
            b.emit(Code::Fence);
            Ok(())
        }
        "shfl" => shuffle(b, inst, &plain),
        "vote" => vote(b, inst, &plain),
        "match" => {
            let wide = ty.is_some_and(|t| t.size() == 8);
            let (d, p) = dst_pair(b, arg(inst, 0)?)?;
            let a = b.src(arg(inst, 1)?, Ty::B64)?;
            let mask = b.src(arg(inst, 2)?, Ty::B32)?;
            b.emit(Code::Match { all: has("all"), wide, d, p, a, mask });
            Ok(())
        }
        "redux" => {
            let op = match plain.iter().find_map(|m| reduce(m)) {
                Some(op) => op,
                None => return unknown(&inst.op),
            };
            let d = b.dst(arg(inst, 0)?)?;
            let a = b.src(arg(inst, 1)?, Ty::B32)?;
            let mask = b.src(arg(inst, 2)?, Ty::B32)?;
            b.emit(Code::Redux { op, signed: ty == Some(Ty::S32), d, a, mask });
            Ok(())
        }
        "activemask" => {
            let d = b.dst(arg(inst, 0)?)?;
            b.emit(Code::ActiveMask { d });
            Ok(())
        }
        "isspacep" => {
            let mem = match plain.first() {
                Some(&"global" | &"const") => Mem::Global,
                Some(m) if m.starts_with("shared") => Mem::Shared,
                Some(&"local") => Mem::Local,
                Some(m) if m.starts_with("param") => Mem::Param,
                _ => return unknown(&inst.op),
            };
            let Operand::Name(p) = arg(inst, 0)? else { return unknown(&inst.op) };
            let p = b.pred(p)?;
            let a = b.src(arg(inst, 1)?, Ty::B64)?;
            b.emit(Code::IsSpace { p, a, mem });
            Ok(())
        }
        "nanosleep" => {
            let a = b.src(arg(inst, 0)?, Ty::U32)?;
            b.emit(Code::Nanosleep { a });
            Ok(())
        }
        "pragma" | "prefetch" | "prefetchu" | "discard" | "brkpt" | "applypriority" => {
            b.emit(Code::Nop);
            Ok(())
        }
        "addc" | "subc" | "madc" => carry(b, inst, name, &plain, ty),
        "add" | "sub" | "mad" if has("cc") => carry(b, inst, name, &plain, ty),
        _ => arithmetic(b, inst, name, &plain, &types),
    }
}

fn arithmetic(b: &mut Builder, inst: &Inst, name: &str, mods: &[&str], types: &[Ty]) -> Res<()> {
    let Some(&ty) = types.first() else { return unknown(&inst.op) };
    if ty == Ty::Pred {
        return pred_logic(b, inst, name);
    }
    // The last source of a shift, and the addend of a wide multiply, have types of their own.
    let src_type = |i: usize| match (name, i) {
        ("shl" | "shr", 2) | ("shf", 3) | ("bfe", 2 | 3) | ("bfi", 3 | 4) => Ty::U32,
        ("mad", 3) if mods.contains(&"wide") => Ty::B64,
        _ => ty,
    };
    let n = inst.args.len();
    if n > 5 {
        return unknown(&inst.op);
    }
    let mut rows = [0; 5];
    for (i, operand) in inst.args.iter().enumerate().skip(1) {
        rows[i] = b.src(operand, src_type(i))?;
    }
    let [_, x, y, z, w] = rows;
    let fail = || format!("unsupported instruction '{}'", inst.op);
    let code = match n {
        2 => Code::Un { f: ops::unary(name, mods, ty).ok_or_else(fail)?, d: b.dst(&inst.args[0])?, a: x },
        3 => Code::Bin {
            f: ops::binary(name, mods, ty).ok_or_else(fail)?,
            d: b.dst(&inst.args[0])?,
            a: x,
            b: y,
        },
        4 => Code::Tri {
            f: ops::ternary(name, mods, ty).ok_or_else(fail)?,
            d: b.dst(&inst.args[0])?,
            a: x,
            b: y,
            c: z,
        },
        5 => {
            let f = ops::quaternary(name, ty).ok_or_else(fail)?;
            Code::Quad { f, d: b.dst(&inst.args[0])?, a: x, b: y, c: z, e: w }
        }
        _ => return unknown(&inst.op),
    };
    b.emit(code);
    if let Some(f) = ops::after(mods, ty) {
        let d = b.dst(&inst.args[0])?;
        b.emit(Code::Un { f, d, a: d });
    }
    Ok(())
}

fn pred_logic(b: &mut Builder, inst: &Inst, name: &str) -> Res<()> {
    let op = match name {
        "and" => PredOp::And,
        "or" => PredOp::Or,
        "xor" => PredOp::Xor,
        "not" => PredOp::Not,
        _ => return unknown(&inst.op),
    };
    let x = pred_src(b, arg(inst, 1)?)?;
    let y = if op == PredOp::Not { x } else { pred_src(b, arg(inst, 2)?)? };
    let Operand::Name(d) = arg(inst, 0)? else { return unknown(&inst.op) };
    let d = b.pred(d)?;
    b.emit(Code::Pred { op, d, a: x, b: y });
    Ok(())
}

fn mov(b: &mut Builder, inst: &Inst, ty: Ty) -> Res<()> {
    let (dst, src) = (arg(inst, 0)?, arg(inst, 1)?);
    if ty == Ty::Pred {
        let Operand::Name(d) = dst else { return unknown(&inst.op) };
        let d = b.pred(d)?;
        if let Operand::Int(v) = src {
            b.emit(Code::PredConst { d, value: *v != 0 });
        } else {
            let a = pred_src(b, src)?;
            b.emit(Code::Pred { op: PredOp::Mov, d, a, b: a });
        }
        return Ok(());
    }
    match (dst, src) {
        (Operand::Vec(list), _) => {
            let (mut parts, n) = ([NONE; 4], list.len());
            if n == 0 || n > 4 {
                return unknown(&inst.op);
            }
            let a = b.src(src, ty)?;
            for (p, op) in parts.iter_mut().zip(list) {
                *p = if *op == Operand::Name("_".into()) { NONE } else { b.dst(op)? };
            }
            b.emit(Code::Unpack { parts, n: n as u8, bits: (ty.size() * 8 / n as u32) as u8, a });
        }
        (_, Operand::Vec(list)) => {
            let (mut parts, n) = ([NONE; 4], list.len());
            if n == 0 || n > 4 {
                return unknown(&inst.op);
            }
            for (p, op) in parts.iter_mut().zip(list) {
                *p = b.src(op, Ty::B64)?;
            }
            let d = b.dst(dst)?;
            b.emit(Code::Pack { d, parts, n: n as u8, bits: (ty.size() * 8 / n as u32) as u8 });
        }
        _ => {
            let a = b.src(src, ty)?;
            let d = b.dst(dst)?;
            b.emit(Code::Mov { d, a });
        }
    }
    Ok(())
}

/// Returns state space and vector width; cache hints, scopes and orderings need no code here.
fn access(inst: &Inst, mods: &[&str]) -> Res<(Space, u8)> {
    let (mut space, mut n) = (Space::Generic, 1);
    for m in mods {
        match *m {
            "global" => space = Space::Global,
            "const" => space = Space::Const,
            "shared" | "shared::cta" => space = Space::Shared,
            "local" => space = Space::Local,
            "param" | "param::entry" | "param::func" => space = Space::Param,
            "v2" => n = 2,
            "v4" => n = 4,
            "volatile" | "relaxed" | "acquire" | "release" | "acq_rel" | "weak" | "mmio" | "nc" | "ca"
            | "cg" | "cs" | "lu" | "cv" | "wb" | "wt" | "cta" | "gpu" | "sys" | "cluster" | "noftz"
            | "sc" => {}
            m if m.starts_with("L1::") || m.starts_with("L2::") || m.starts_with("level::") => {}
            _ => return unknown(&inst.op),
        }
    }
    Ok((space, n))
}

fn load(b: &mut Builder, inst: &Inst, mods: &[&str], ty: Option<Ty>) -> Res<()> {
    let Some(ty) = ty else { return unknown(&inst.op) };
    let (space, n) = access(inst, mods)?;
    let at = b.addr(arg(inst, 1)?, space)?;
    let mut d = [NONE; 4];
    match arg(inst, 0)? {
        Operand::Vec(list) if list.len() == usize::from(n) => {
            for (slot, op) in d.iter_mut().zip(list) {
                *slot = b.dst(op)?;
            }
        }
        op if n == 1 => d[0] = b.dst(op)?,
        _ => return unknown(&inst.op),
    }
    b.emit(Code::Ld { d, n, ty, at });
    Ok(())
}

fn store(b: &mut Builder, inst: &Inst, mods: &[&str], ty: Option<Ty>) -> Res<()> {
    let Some(ty) = ty else { return unknown(&inst.op) };
    let (space, n) = access(inst, mods)?;
    let at = b.addr(arg(inst, 0)?, space)?;
    let mut s = [NONE; 4];
    match arg(inst, 1)? {
        Operand::Vec(list) if list.len() == usize::from(n) => {
            for (slot, op) in s.iter_mut().zip(list) {
                *slot = b.src(op, ty)?;
            }
        }
        op if n == 1 => s[0] = b.src(op, ty)?,
        _ => return unknown(&inst.op),
    }
    b.emit(Code::St { s, n, ty, at });
    Ok(())
}

/// Returns the rows of an operand `[object, {coordinates}]`, and whether it names a direction.
fn texel(b: &mut Builder, inst: &Inst, i: usize, geometry: &str, ty: Ty) -> Res<(Texel, bool)> {
    let (layered, dims, cube) = match geometry {
        "1d" => (false, 1, false),
        "2d" => (false, 2, false),
        "3d" => (false, 3, false),
        "a1d" => (true, 1, false),
        "a2d" => (true, 2, false),
        "cube" => (false, 3, true),
        "acube" => (true, 3, true),
        _ => return unknown(&inst.op),
    };
    let Operand::Texel { base, at } = arg(inst, i)? else { return unknown(&inst.op) };
    // Vectors have no three elements; the fourth one is not used.
    let first = usize::from(layered);
    if at.len() < first + dims {
        return unknown(&inst.op);
    }
    b.uses.images = true;
    let mut texel = Texel { object: NONE, layer: NONE, at: [NONE; 3], dims: dims as u8 };
    texel.object = b.src(&Operand::Name(base.clone()), Ty::B64)?;
    if layered {
        texel.layer = b.src(&at[0], Ty::S32)?;
    }
    for (row, op) in texel.at.iter_mut().zip(&at[first..first + dims]) {
        *row = b.src(op, ty)?;
    }
    Ok((texel, cube))
}

fn fetch(b: &mut Builder, inst: &Inst, four: bool, mods: &[&str], types: &[Ty]) -> Res<()> {
    let [ty @ (Ty::F32 | Ty::S32 | Ty::U32), coordinate @ (Ty::F32 | Ty::S32)] = types[..] else {
        return unknown(&inst.op);
    };
    let (mut gather, mut level, mut gradients) = (None, false, false);
    let geometry = match *mods {
        [geometry, "v4"] if !four => geometry,
        ["base", geometry, "v4"] if !four => geometry,
        ["level", geometry, "v4"] if !four => {
            level = true;
            geometry
        }
        ["grad", geometry, "v4"] if !four && !geometry.ends_with("cube") => {
            gradients = true;
            geometry
        }
        [channel, "2d", "v4"] if four => {
            gather = "rgba".find(channel).filter(|_| channel.len() == 1).map(|i| i as u8);
            if gather.is_none() {
                return unknown(&inst.op);
            }
            "2d"
        }
        _ => return unknown(&inst.op),
    };
    let (list, hit) = match arg(inst, 0)? {
        Operand::Vec(list) => (list, NONE),
        Operand::Pair(list, hit) => match (&**list, &**hit) {
            (Operand::Vec(list), Operand::Name(hit)) => (list, b.pred(hit)?),
            _ => return unknown(&inst.op),
        },
        _ => return unknown(&inst.op),
    };
    if list.len() != 4 {
        return unknown(&inst.op);
    }
    let mut d = [NONE; 4];
    for (row, op) in d.iter_mut().zip(list) {
        *row = b.dst(op)?;
    }
    let (texel, cube) = texel(b, inst, 1, geometry, coordinate)?;
    let level = if level { b.src(arg(inst, 2)?, Ty::F32)? } else { NONE };
    let mut steps = [[NONE; 3]; 2];
    for (i, rows) in steps.iter_mut().enumerate().filter(|_| gradients) {
        let list = match arg(inst, 2 + i)? {
            Operand::Vec(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let dims = usize::from(texel.dims);
        if list.len() < dims {
            return unknown(&inst.op);
        }
        for (row, op) in rows.iter_mut().zip(&list[..dims]) {
            *row = b.src(op, Ty::F32)?;
        }
    }
    let (signed, whole) = (ty == Ty::S32, coordinate == Ty::S32);
    b.emit(Code::Fetch(Box::new(Fetch { d, hit, signed, texel, cube, whole, level, steps, gather })));
    Ok(())
}

fn surface(b: &mut Builder, inst: &Inst, store: bool, mods: &[&str], ty: Option<Ty>) -> Res<()> {
    let Some(ty @ (Ty::B8 | Ty::B16 | Ty::B32 | Ty::B64)) = ty else { return unknown(&inst.op) };
    let ["b", geometry, rest @ .., bounds] = mods else { return unknown(&inst.op) };
    let mut n = 1;
    for m in rest {
        match *m {
            "v2" => n = 2,
            "v4" => n = 4,
            "ca" | "cg" | "cs" | "cv" | "wb" | "wt" => {}
            _ => return unknown(&inst.op),
        }
    }
    let bounds = match *bounds {
        "trap" => Bounds::Trap,
        "clamp" => Bounds::Clamp,
        "zero" => Bounds::Zero,
        _ => return unknown(&inst.op),
    };
    let (texel, cube) = texel(b, inst, usize::from(!store), geometry, Ty::S32)?;
    let list = match arg(inst, usize::from(store))? {
        Operand::Vec(list) => list.as_slice(),
        one => std::slice::from_ref(one),
    };
    if cube || list.len() != usize::from(n) {
        return unknown(&inst.op);
    }
    let mut values = [NONE; 4];
    for (row, op) in values.iter_mut().zip(list) {
        *row = if store { b.src(op, ty)? } else { b.dst(op)? };
    }
    b.emit(Code::Surface(Box::new(SurfaceAccess { values, n, ty, store, texel, bounds })));
    Ok(())
}

fn atomic(b: &mut Builder, inst: &Inst, red: bool, mods: &[&str], ty: Option<Ty>) -> Res<()> {
    let Some(ty) = ty.filter(|t| t.size() >= 4) else { return unknown(&inst.op) };
    let mut op = None;
    let mut rest = Vec::new();
    for m in mods {
        match *m {
            "add" => op = Some(AtomOp::Add),
            "min" => op = Some(AtomOp::Min),
            "max" => op = Some(AtomOp::Max),
            "exch" => op = Some(AtomOp::Exch),
            "cas" => op = Some(AtomOp::Cas),
            "and" => op = Some(AtomOp::And),
            "or" => op = Some(AtomOp::Or),
            "xor" => op = Some(AtomOp::Xor),
            "inc" => op = Some(AtomOp::Inc),
            "dec" => op = Some(AtomOp::Dec),
            other => rest.push(other),
        }
    }
    let Some(op) = op else { return unknown(&inst.op) };
    if matches!(ty, Ty::F32 | Ty::F64) && !matches!(op, AtomOp::Add | AtomOp::Exch) {
        return unknown(&inst.op);
    }
    let (space, n) = access(inst, &rest)?;
    if n != 1 {
        return unknown(&inst.op);
    }
    let first = usize::from(!red);
    let at = b.addr(arg(inst, first)?, space)?;
    let x = b.src(arg(inst, first + 1)?, ty)?;
    let y = if op == AtomOp::Cas { b.src(arg(inst, first + 2)?, ty)? } else { x };
    let d = if red { NONE } else { b.dst(arg(inst, 0)?)? };
    b.emit(Code::Atom { op, ty, d, at, b: x, c: y });
    Ok(())
}

fn cvta(b: &mut Builder, inst: &Inst, mods: &[&str]) -> Res<()> {
    let window = match mods.iter().find(|m| **m != "to") {
        Some(&"global" | &"const") => 0,
        Some(m) if m.starts_with("shared") => SHARED_WINDOW,
        Some(&"local") => LOCAL_WINDOW,
        // The parameters of a device function live in lane memory.
        Some(m) if m.starts_with("param") => {
            if b.f.entry {
                PARAM_WINDOW
            } else {
                LOCAL_WINDOW
            }
        }
        _ => return unknown(&inst.op),
    };
    let a = b.src(arg(inst, 1)?, Ty::B64)?;
    let d = b.dst(arg(inst, 0)?)?;
    b.emit(Code::Cvta { d, a, window, to: mods.contains(&"to") });
    Ok(())
}

/// Splits `lt.and.ftz` into the comparison and the combining operation.
fn comparison<'m>(inst: &Inst, mods: &[&'m str]) -> Res<(&'m str, Option<&'m str>)> {
    let (mut cmp, mut with) = (None, None);
    for m in mods {
        match *m {
            "ftz" => {}
            "and" | "or" | "xor" if cmp.is_some() => with = Some(*m),
            other if cmp.is_none() => cmp = Some(other),
            _ => return unknown(&inst.op),
        }
    }
    match cmp {
        Some(c) => Ok((c, with)),
        None => unknown(&inst.op),
    }
}

fn combine(b: &mut Builder, inst: &Inst, with: Option<&str>) -> Res<Combine> {
    Ok(match with {
        None => Combine::None,
        Some(kind) => {
            let c = pred_src(b, arg(inst, 3)?)?;
            match kind {
                "and" => Combine::And(c),
                "or" => Combine::Or(c),
                _ => Combine::Xor(c),
            }
        }
    })
}

fn setp(b: &mut Builder, inst: &Inst, mods: &[&str], ty: Option<Ty>) -> Res<()> {
    let Some(ty) = ty else { return unknown(&inst.op) };
    let (cmp, with) = comparison(inst, mods)?;
    let Some(f) = ops::compare_op(cmp, ty) else { return unknown(&inst.op) };
    let (x, y) = (b.src(arg(inst, 1)?, ty)?, b.src(arg(inst, 2)?, ty)?);
    let with = combine(b, inst, with)?;
    let (p, q) = match arg(inst, 0)? {
        Operand::Name(p) => (b.pred(p)?, NONE),
        Operand::Pair(p, q) => match (&**p, &**q) {
            (Operand::Name(p), Operand::Name(q)) => (b.pred(p)?, b.pred(q)?),
            _ => return unknown(&inst.op),
        },
        _ => return unknown(&inst.op),
    };
    b.emit(Code::SetP { f, p, q, a: x, b: y, with });
    Ok(())
}

fn set(b: &mut Builder, inst: &Inst, mods: &[&str], types: &[Ty]) -> Res<()> {
    let [dst, src] = types[..] else { return unknown(&inst.op) };
    let (cmp, with) = comparison(inst, mods)?;
    let Some(f) = ops::compare_op(cmp, src) else { return unknown(&inst.op) };
    let (x, y) = (b.src(arg(inst, 1)?, src)?, b.src(arg(inst, 2)?, src)?);
    let with = combine(b, inst, with)?;
    let d = b.dst(arg(inst, 0)?)?;
    b.emit(Code::Set { f, d, a: x, b: y, with, float: dst == Ty::F32 });
    Ok(())
}

fn barrier(b: &mut Builder, inst: &Inst, mods: &[&str]) -> Res<()> {
    let kind: Vec<&str> = mods.iter().copied().filter(|m| !matches!(*m, "cta" | "aligned")).collect();
    match kind.as_slice() {
        ["warp", "sync"] => {
            let mask = b.src(arg(inst, 0)?, Ty::B32)?;
            b.emit(Code::BarWarp { mask });
        }
        ["sync"] | ["arrive"] => {
            let id = b.src(arg(inst, 0)?, Ty::U32)?;
            let count = if inst.args.len() > 1 { b.src(arg(inst, 1)?, Ty::U32)? } else { NONE };
            b.emit(Code::Bar { id, count, arrive: kind[0] == "arrive" });
        }
        ["red", op] => {
            let Some(op) = reduce(op) else { return unknown(&inst.op) };
            let d = match arg(inst, 0)? {
                Operand::Name(n) if op != Reduce::Popc => b.pred(n)?,
                other => b.dst(other)?,
            };
            let id = b.src(arg(inst, 1)?, Ty::U32)?;
            let count = if inst.args.len() > 3 { b.src(arg(inst, 2)?, Ty::U32)? } else { NONE };
            let p = pred_src(b, arg(inst, inst.args.len() - 1)?)?;
            b.emit(Code::BarRed { op, d, id, count, p });
        }
        _ => return unknown(&inst.op),
    }
    Ok(())
}

fn reduce(name: &str) -> Option<Reduce> {
    Some(match name {
        "popc" => Reduce::Popc,
        "and" => Reduce::And,
        "or" => Reduce::Or,
        "xor" => Reduce::Xor,
        "add" => Reduce::Add,
        "min" => Reduce::Min,
        "max" => Reduce::Max,
        _ => return None,
    })
}

fn shuffle(b: &mut Builder, inst: &Inst, mods: &[&str]) -> Res<()> {
    let mode = match mods {
        ["sync", "up"] => Shuffle::Up,
        ["sync", "down"] => Shuffle::Down,
        ["sync", "bfly"] => Shuffle::Bfly,
        ["sync", "idx"] => Shuffle::Idx,
        _ => return unknown(&inst.op),
    };
    let (d, p) = dst_pair(b, arg(inst, 0)?)?;
    let a = b.src(arg(inst, 1)?, Ty::B32)?;
    let x = b.src(arg(inst, 2)?, Ty::B32)?;
    let c = b.src(arg(inst, 3)?, Ty::B32)?;
    let mask = b.src(arg(inst, 4)?, Ty::B32)?;
    b.emit(Code::Shfl { mode, d, p, a, b: x, c, mask });
    Ok(())
}

fn vote(b: &mut Builder, inst: &Inst, mods: &[&str]) -> Res<()> {
    // PTX contains both `vote.sync.ballot` and `vote.ballot.sync`.
    let mode = match mods {
        ["sync", mode] | [mode, "sync"] => *mode,
        _ => return unknown(&inst.op),
    };
    let mode = match mode {
        "all" => Vote::All,
        "any" => Vote::Any,
        "uni" => Vote::Uni,
        "ballot" => Vote::Ballot,
        _ => return unknown(&inst.op),
    };
    let p = pred_src(b, arg(inst, 1)?)?;
    let mask = b.src(arg(inst, 2)?, Ty::B32)?;
    let d = match arg(inst, 0)? {
        Operand::Name(n) if mode != Vote::Ballot => b.pred(n)?,
        other => b.dst(other)?,
    };
    b.emit(Code::Vote { mode, d, p, mask });
    Ok(())
}

fn carry(b: &mut Builder, inst: &Inst, name: &str, mods: &[&str], ty: Option<Ty>) -> Res<()> {
    let Some(ty) = ty.filter(|t| t.size() >= 4) else { return unknown(&inst.op) };
    if mods.iter().any(|m| !matches!(*m, "cc" | "lo" | "hi")) {
        return unknown(&inst.op);
    }
    let mul = if name.starts_with("mad") { Some(mods.contains(&"hi")) } else { None };
    if mul.is_some() && matches!(ty, Ty::S32 | Ty::S64) && mods.contains(&"hi") {
        return unknown(&inst.op);
    }
    let k = Carry {
        sub: name.starts_with("sub"),
        mul,
        wide: ty.size() == 8,
        carry_in: name.ends_with('c'),
        carry_out: mods.contains(&"cc"),
        flag: b.carry_flag(),
    };
    let x = b.src(arg(inst, 1)?, ty)?;
    let y = b.src(arg(inst, 2)?, ty)?;
    let z = if mul.is_some() { b.src(arg(inst, 3)?, ty)? } else { x };
    let d = b.dst(arg(inst, 0)?)?;
    b.emit(Code::Carry { k, d, a: x, b: y, c: z });
    Ok(())
}

fn frame_addr(slot: Slot) -> Addr {
    Addr { mem: Mem::Local, base: NONE, offset: i64::from(slot.offset), frame: true }
}

/// Converts call operands to pieces of lane memory; registers are spilled (arguments) or filled
/// (results).
fn call_list(
    b: &mut Builder,
    list: &[Operand],
    results: bool,
    fills: &mut Vec<(u32, Slot, Ty)>,
) -> Res<Vec<Slot>> {
    let mut out = Vec::new();
    for op in list {
        let slot = match op {
            Operand::Name(n) if b.slot(n).is_some() => b.slot(n).unwrap_or(Slot { offset: 0, size: 0 }),
            Operand::Name(n) if b.reg_type(n).is_some() => {
                let ty = b.reg_type(n).unwrap_or(Ty::B64);
                let slot = b.frame_slot(ty.size(), ty.size());
                let row = b.reg(n)?;
                if results {
                    fills.push((row, slot, ty));
                } else {
                    b.emit(Code::St { s: [row, NONE, NONE, NONE], n: 1, ty, at: frame_addr(slot) });
                }
                slot
            }
            Operand::Int(v) if !results => {
                let slot = b.frame_slot(8, 8);
                let row = b.constant(Const::Imm(*v));
                b.emit(Code::St { s: [row, NONE, NONE, NONE], n: 1, ty: Ty::B64, at: frame_addr(slot) });
                slot
            }
            other => return Err(format!("bad call operand {other:?}")),
        };
        out.push(slot);
    }
    Ok(out)
}

fn call(b: &mut Builder, inst: &Inst) -> Res<()> {
    let mut args = inst.args.iter().peekable();
    let mut fills = Vec::new();
    let mut rets = Vec::new();
    if let Some(Operand::List(list)) = args.peek() {
        rets = call_list(b, list, true, &mut fills)?;
        args.next();
    }
    let Some(Operand::Name(target)) = args.next() else { return unknown(&inst.op) };
    let mut slots = Vec::new();
    if let Some(Operand::List(list)) = args.peek() {
        slots = call_list(b, list, false, &mut fills)?;
        args.next();
    }
    let callee = if b.reg_type(target).is_some() {
        Callee::Row(b.reg(target)?)
    } else if let Some(&f) = b.scope.funcs.get(target) {
        b.uses.calls.push(f);
        Callee::Func(f)
    } else {
        Callee::Builtin(match target.as_str() {
            "vprintf" => Builtin::Vprintf,
            "__assertfail" => Builtin::AssertFail,
            "malloc" => Builtin::Malloc,
            "free" => Builtin::Free,
            _ => return Err(format!("unresolved extern function '{target}'")),
        })
    };
    if matches!(callee, Callee::Builtin(Builtin::Malloc)) {
        b.uses.heap = true;
    }
    b.emit(Code::Call(Box::new(CallSite { callee, args: slots, rets })));
    for (row, slot, ty) in fills {
        b.emit(Code::Ld { d: [row, NONE, NONE, NONE], n: 1, ty, at: frame_addr(slot) });
    }
    Ok(())
}
