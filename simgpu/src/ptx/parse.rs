//! Recursive-descent parser for the PTX that nvcc emits.

use super::ast::{Body, Function, Init, Inst, Module, Operand, Reference, Space, Stmt, Ty, Var};
use super::lex::{Tok, Token, lex};
use std::collections::HashMap;

type Res<T> = Result<T, String>;

struct Parser<'a> {
    toks: Vec<Token<'a>>,
    at: usize,
    /// Renamings of nested scopes, innermost last.
    scopes: Vec<HashMap<String, String>>,
    scope_count: u32,
    /// Current nesting depth of lists and blocks.
    depth: u32,
}

/// Parses one PTX translation unit; an error names the line.
pub fn parse(text: &str) -> Res<Module> {
    let mut p = Parser { toks: lex(text)?, at: 0, scopes: Vec::new(), scope_count: 0, depth: 0 };
    p.module()
}

impl<'a> Parser<'a> {
    fn peek(&self) -> Option<Tok<'a>> {
        self.toks.get(self.at).map(|t| t.tok)
    }

    fn peek2(&self) -> Option<Tok<'a>> {
        self.toks.get(self.at + 1).map(|t| t.tok)
    }

    fn line(&self) -> u32 {
        self.toks.get(self.at).or_else(|| self.toks.last()).map_or(0, |t| t.line)
    }

    fn fail<T>(&self, what: &str) -> Res<T> {
        Err(format!("line {}: {what}, found {:?}", self.line(), self.peek()))
    }

    fn next(&mut self) -> Res<Tok<'a>> {
        match self.peek() {
            Some(t) => {
                self.at += 1;
                Ok(t)
            }
            None => self.fail("unexpected end"),
        }
    }

    fn eat(&mut self, p: u8) -> bool {
        let hit = self.peek() == Some(Tok::Punct(p));
        self.at += usize::from(hit);
        hit
    }

    fn expect(&mut self, p: u8) -> Res<()> {
        if self.eat(p) { Ok(()) } else { self.fail(&format!("expected '{}'", p as char)) }
    }

    fn word(&mut self) -> Res<&'a str> {
        match self.peek() {
            Some(Tok::Word(w)) => {
                self.at += 1;
                Ok(w)
            }
            _ => self.fail("expected a name"),
        }
    }

    fn int(&mut self) -> Res<u64> {
        let negative = self.eat(b'-');
        match self.peek() {
            Some(Tok::Int(v)) => {
                self.at += 1;
                Ok(if negative { v.wrapping_neg() } else { v })
            }
            _ => self.fail("expected an integer"),
        }
    }

    fn skip_line(&mut self) {
        let line = self.line();
        while self.at < self.toks.len() && self.toks[self.at].line == line {
            self.at += 1;
        }
    }

    fn skip_to_semicolon(&mut self) -> Res<()> {
        while self.next()? != Tok::Punct(b';') {}
        Ok(())
    }

    fn skip_braces(&mut self) -> Res<()> {
        while self.next()? != Tok::Punct(b'{') {}
        let mut depth = 1;
        while depth > 0 {
            match self.next()? {
                Tok::Punct(b'{') => depth += 1,
                Tok::Punct(b'}') => depth -= 1,
                _ => {}
            }
        }
        Ok(())
    }

    fn module(&mut self) -> Res<Module> {
        let mut m = Module::default();
        while let Some(tok) = self.peek() {
            let Tok::Word(word) = tok else {
                if self.eat(b';') {
                    continue;
                }
                return self.fail("expected a directive");
            };
            match word {
                ".version" => {
                    self.at += 1;
                    m.version = match self.next()? {
                        Tok::F64(bits) => {
                            let v = f64::from_bits(bits);
                            (v as u32, ((v * 10.0).round() as u32) % 10)
                        }
                        Tok::Int(v) => (v as u32, 0),
                        _ => return self.fail("bad .version"),
                    };
                }
                ".target" => {
                    self.at += 1;
                    let name = self.word()?;
                    let digits: String = name.chars().filter(char::is_ascii_digit).collect();
                    m.sm = digits.parse().unwrap_or(0);
                    while self.eat(b',') {
                        self.word()?;
                    }
                }
                ".address_size" => {
                    self.at += 1;
                    if self.int()? != 64 {
                        return self.fail("only 64-bit addresses are supported");
                    }
                }
                ".file" | ".loc" => self.skip_line(),
                ".pragma" => self.skip_to_semicolon()?,
                ".section" => self.skip_braces()?,
                ".alias" => {
                    self.at += 1;
                    let new = self.word()?.to_owned();
                    self.expect(b',')?;
                    let old = self.word()?.to_owned();
                    self.expect(b';')?;
                    m.aliases.push((new, old));
                }
                _ => self.top_level(&mut m)?,
            }
        }
        Ok(m)
    }

    fn top_level(&mut self, m: &mut Module) -> Res<()> {
        let mut external = false;
        loop {
            match self.word()? {
                ".extern" => external = true,
                ".visible" | ".weak" | ".common" => {}
                ".attribute" => {
                    self.attribute()?;
                }
                ".entry" => return self.function(m, true),
                ".func" => return self.function(m, false),
                w @ (".global" | ".const" | ".shared" | ".local") => {
                    let var = self.variable(space_of(w), external)?;
                    m.vars.push(var);
                    return Ok(());
                }
                other => return Err(format!("line {}: unknown directive '{other}'", self.line())),
            }
        }
    }

    /// Parses `(...)` after `.attribute`; returns `true` if it contains `.managed`.
    fn attribute(&mut self) -> Res<bool> {
        self.expect(b'(')?;
        let mut managed = false;
        loop {
            match self.next()? {
                Tok::Punct(b')') => return Ok(managed),
                t => managed |= t == Tok::Word(".managed"),
            }
        }
    }

    /// Parses `.align 4 .b8 name[16] = {...};` after the state space.
    fn variable(&mut self, space: Space, external: bool) -> Res<Var> {
        let mut var = self.declarator(space)?;
        var.external = external;
        if self.eat(b'=') {
            self.initialiser(&mut var.init, None)?;
            if var.count == 0 {
                var.count = var.init.len() as u64;
            }
        }
        self.expect(b';')?;
        Ok(var)
    }

    fn declarator(&mut self, space: Space) -> Res<Var> {
        let mut align = 0;
        let mut managed = false;
        let mut ty = None;
        let mut reference = None;
        let mut lanes = 1u64;
        loop {
            match self.peek() {
                Some(Tok::Word(".align")) => {
                    self.at += 1;
                    align = self.int()? as u32;
                }
                Some(Tok::Word(".attribute")) => {
                    self.at += 1;
                    managed = self.attribute()?;
                }
                // `.param .u64 .ptr .global .align 8 name` describes a pointer parameter further.
                Some(Tok::Word(".ptr")) => {
                    self.at += 1;
                    if let Some(Tok::Word(".global" | ".shared" | ".const" | ".local")) = self.peek() {
                        self.at += 1;
                    }
                    if self.peek() == Some(Tok::Word(".align")) {
                        self.at += 1;
                        self.int()?;
                    }
                }
                Some(Tok::Word(w)) if w.starts_with('.') => {
                    self.at += 1;
                    match &w[1..] {
                        "v2" => lanes = 2,
                        "v4" => lanes = 4,
                        "texref" => (ty, reference) = (Some(Ty::B64), Some(Reference::Texture)),
                        "surfref" => (ty, reference) = (Some(Ty::B64), Some(Reference::Surface)),
                        name => match Ty::parse(name) {
                            Some(t) => ty = Some(t),
                            None => return Err(format!("line {}: unsupported type '{w}'", self.line())),
                        },
                    }
                }
                _ => break,
            }
        }
        let Some(ty) = ty else { return self.fail("expected a type") };
        let name = match self.peek() {
            Some(Tok::Word(_)) => self.word()?.to_owned(),
            // `.callprototype` parameters may be called `_`, and unnamed returns are allowed.
            _ => "_".to_owned(),
        };
        let mut count = lanes;
        while self.eat(b'[') {
            let n = if self.peek() == Some(Tok::Punct(b']')) { 0 } else { self.int()? };
            self.expect(b']')?;
            count = count.checked_mul(n).ok_or_else(|| format!("line {}: array too large", self.line()))?;
        }
        let natural = ty.size() * lanes as u32;
        Ok(Var {
            name,
            space,
            ty,
            align: align.max(natural),
            count,
            init: Vec::new(),
            external: false,
            managed,
            reference,
        })
    }

    fn initialiser(&mut self, out: &mut Vec<Init>, shift: Option<u32>) -> Res<()> {
        if self.eat(b'{') {
            while !self.eat(b'}') {
                self.nested(|p| p.initialiser(out, shift))?;
                self.eat(b',');
            }
            return Ok(());
        }
        match self.peek() {
            Some(Tok::Word("generic")) => {
                self.at += 1;
                self.expect(b'(')?;
                let name = self.word()?.to_owned();
                let mut offset = self.offset()?;
                self.expect(b')')?;
                offset += self.offset()?;
                out.push(Init::Symbol { name, offset, shift });
            }
            Some(Tok::Word(w)) => {
                self.at += 1;
                let offset = self.offset()?;
                out.push(Init::Symbol { name: w.to_owned(), offset, shift });
            }
            Some(Tok::Int(mask)) if self.peek2() == Some(Tok::Punct(b'(')) => {
                // `0xFF00(symbol)`: one byte of an address.
                self.at += 2;
                self.nested(|p| p.initialiser(out, Some(mask.trailing_zeros())))?;
                self.expect(b')')?;
            }
            Some(Tok::F32(bits)) => {
                self.at += 1;
                out.push(Init::F32(bits));
            }
            Some(Tok::F64(bits)) => {
                self.at += 1;
                out.push(Init::F64(bits));
            }
            _ => out.push(Init::Int(self.int()?)),
        }
        Ok(())
    }

    fn offset(&mut self) -> Res<i64> {
        let mut total = 0i64;
        while self.eat(b'+') {
            total = total.wrapping_add(self.int()? as i64);
        }
        if self.peek() == Some(Tok::Punct(b'-')) {
            total = total.wrapping_add(self.int()? as i64);
        }
        Ok(total)
    }

    fn params(&mut self) -> Res<Vec<Var>> {
        let mut out = Vec::new();
        self.expect(b'(')?;
        while !self.eat(b')') {
            match self.word()? {
                ".param" => out.push(self.declarator(Space::Param)?),
                ".reg" => out.push(self.declarator(Space::Param)?),
                w => return Err(format!("line {}: expected .param, found '{w}'", self.line())),
            }
            self.eat(b',');
        }
        Ok(out)
    }

    fn function(&mut self, m: &mut Module, entry: bool) -> Res<()> {
        let rets = if !entry && self.peek() == Some(Tok::Punct(b'(')) { self.params()? } else { Vec::new() };
        let name = self.word()?.to_owned();
        let params = if self.peek() == Some(Tok::Punct(b'(')) { self.params()? } else { Vec::new() };
        let mut f = Function { name, entry, rets, params, body: None, max_threads: None };
        loop {
            match self.peek() {
                Some(Tok::Punct(b';')) => {
                    self.at += 1;
                    break;
                }
                Some(Tok::Punct(b'{')) => {
                    self.at += 1;
                    let mut body = Body::default();
                    self.scopes.clear();
                    self.block(&mut body)?;
                    f.body = Some(body);
                    break;
                }
                Some(Tok::Word(".maxntid" | ".reqntid")) => {
                    self.at += 1;
                    let mut threads = self.int()?;
                    while self.eat(b',') {
                        threads = threads.saturating_mul(self.int()?);
                    }
                    f.max_threads = Some(threads as u32);
                }
                Some(Tok::Word(".minnctapersm" | ".maxnreg" | ".maxnctapersm")) => {
                    self.at += 1;
                    self.int()?;
                }
                Some(Tok::Word(".noreturn")) => self.at += 1,
                Some(Tok::Word(".pragma")) => self.skip_to_semicolon()?,
                _ => return self.fail("expected a function body"),
            }
        }
        // A definition replaces the earlier declaration.
        if let Some(old) = m.functions.iter_mut().find(|g| g.name == f.name) {
            if f.body.is_some() {
                *old = f;
            }
        } else {
            m.functions.push(f);
        }
        Ok(())
    }

    fn declare(&mut self, name: &str) -> String {
        match self.scopes.last_mut() {
            Some(scope) => {
                let unique = format!("{name}@{}", self.scope_count);
                scope.insert(name.to_owned(), unique.clone());
                unique
            }
            None => name.to_owned(),
        }
    }

    fn resolve(&self, name: &str) -> String {
        self.scopes.iter().rev().find_map(|s| s.get(name)).cloned().unwrap_or_else(|| name.to_owned())
    }

    /// Parses statements up to the closing brace.
    fn block(&mut self, body: &mut Body) -> Res<()> {
        loop {
            let line = self.line();
            match self.next()? {
                Tok::Punct(b'}') => return Ok(()),
                Tok::Punct(b';') => {}
                Tok::Punct(b'{') => {
                    if self.scopes.len() == 64 {
                        return self.fail("blocks nested too deeply");
                    }
                    self.scope_count += 1;
                    self.scopes.push(HashMap::new());
                    self.block(body)?;
                    self.scopes.pop();
                }
                Tok::Punct(b'@') => {
                    let negated = self.eat(b'!');
                    let pred = self.word()?;
                    let pred = self.resolve(pred);
                    let op = self.word()?.to_owned();
                    let args = self.operands()?;
                    body.stmts.push(Stmt::Inst(Inst { guard: Some((pred, negated)), op, args, line }));
                }
                Tok::Word(".reg") => self.registers(body)?,
                Tok::Word(w @ (".local" | ".shared" | ".param" | ".const" | ".global")) => {
                    let mut var = self.variable(space_of(w), false)?;
                    var.name = self.declare(&var.name.clone());
                    body.vars.push(var);
                }
                Tok::Word(".pragma") => self.skip_to_semicolon()?,
                Tok::Word(".loc" | ".file") => {
                    self.at -= 1;
                    self.skip_line();
                }
                Tok::Word(w) if self.peek() == Some(Tok::Punct(b':')) => {
                    self.at += 1;
                    match self.peek() {
                        Some(Tok::Word(".branchtargets" | ".calltargets")) => {
                            self.at += 1;
                            let mut list = vec![self.word()?.to_owned()];
                            while self.eat(b',') {
                                list.push(self.word()?.to_owned());
                            }
                            self.expect(b';')?;
                            body.targets.insert(w.to_owned(), list);
                        }
                        Some(Tok::Word(".callprototype")) => {
                            self.at += 1;
                            let rets = if self.peek() == Some(Tok::Punct(b'(')) {
                                self.params()?
                            } else {
                                Vec::new()
                            };
                            self.word()?;
                            let params = if self.peek() == Some(Tok::Punct(b'(')) {
                                self.params()?
                            } else {
                                Vec::new()
                            };
                            self.skip_to_semicolon()?;
                            body.prototypes.insert(w.to_owned(), (rets, params));
                        }
                        _ => body.stmts.push(Stmt::Label(w.to_owned())),
                    }
                }
                Tok::Word(op) => {
                    let args = self.operands()?;
                    body.stmts.push(Stmt::Inst(Inst { guard: None, op: op.to_owned(), args, line }));
                }
                _ => {
                    self.at -= 1;
                    return self.fail("expected a statement");
                }
            }
        }
    }

    fn registers(&mut self, body: &mut Body) -> Res<()> {
        let w = self.word()?;
        let Some(ty) = Ty::parse(w.trim_start_matches('.')) else {
            return Err(format!("line {}: unsupported register type '{w}'", self.line()));
        };
        loop {
            let name = self.word()?;
            if self.eat(b'<') {
                let n = self.int()?;
                self.expect(b'>')?;
                if n > 1 << 20 {
                    return self.fail("too many registers");
                }
                for i in 0..n {
                    let unique = self.declare(&format!("{name}{i}"));
                    body.regs.insert(unique, ty);
                }
            } else {
                let unique = self.declare(name);
                body.regs.insert(unique, ty);
            }
            if !self.eat(b',') {
                break;
            }
        }
        self.expect(b';')
    }

    fn operands(&mut self) -> Res<Vec<Operand>> {
        let mut out = Vec::new();
        while !self.eat(b';') {
            out.push(self.operand()?);
            if !self.eat(b',') {
                self.expect(b';')?;
                break;
            }
        }
        Ok(out)
    }

    fn operand(&mut self) -> Res<Operand> {
        self.nested(Self::operand_here)
    }

    /// Bounds recursion, since the input may be hostile.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Res<T>) -> Res<T> {
        if self.depth == 32 {
            return self.fail("lists nested too deeply");
        }
        self.depth += 1;
        let parsed = parse(self);
        self.depth -= 1;
        parsed
    }

    fn operand_here(&mut self) -> Res<Operand> {
        let first = match self.next()? {
            Tok::Word(w) => {
                let name = self.resolve(w);
                let offset = self.offset()?;
                if offset != 0 { Operand::NameOffset(name, offset) } else { Operand::Name(name) }
            }
            Tok::Punct(b'!') => {
                let w = self.word()?;
                Operand::NotName(self.resolve(w))
            }
            Tok::Punct(b'-') => match self.next()? {
                Tok::Int(v) => Operand::Int(v.wrapping_neg()),
                Tok::F64(v) => Operand::F64((-f64::from_bits(v)).to_bits()),
                _ => return self.fail("expected a number"),
            },
            Tok::Int(v) => Operand::Int(v),
            Tok::F32(v) => Operand::F32(v),
            Tok::F64(v) => Operand::F64(v),
            Tok::Punct(b'[') => {
                let base = match self.peek() {
                    Some(Tok::Word(w)) => {
                        self.at += 1;
                        Some(self.resolve(w))
                    }
                    _ => None,
                };
                if let Some(base) = base.clone()
                    && self.eat(b',')
                {
                    let at = match self.operand()? {
                        Operand::Vec(list) => list,
                        one => vec![one],
                    };
                    self.expect(b']')?;
                    return Ok(Operand::Texel { base, at });
                }
                let mut offset = 0;
                if base.is_none() {
                    offset = self.int()? as i64;
                }
                offset = offset.wrapping_add(self.offset()?);
                self.expect(b']')?;
                Operand::Addr { base, offset }
            }
            Tok::Punct(open @ (b'{' | b'(')) => {
                let close = if open == b'{' { b'}' } else { b')' };
                let mut list = Vec::new();
                while !self.eat(close) {
                    list.push(self.operand()?);
                    self.eat(b',');
                }
                if open == b'{' { Operand::Vec(list) } else { Operand::List(list) }
            }
            _ => {
                self.at -= 1;
                return self.fail("expected an operand");
            }
        };
        if self.eat(b'|') {
            let second = self.operand()?;
            return Ok(Operand::Pair(Box::new(first), Box::new(second)));
        }
        Ok(first)
    }
}

fn space_of(directive: &str) -> Space {
    match directive {
        ".global" => Space::Global,
        ".const" => Space::Const,
        ".shared" => Space::Shared,
        ".local" => Space::Local,
        _ => Space::Param,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parses_a_kernel_with_scopes() {
        let m = parse(
            ".version 8.4\n.target sm_75\n.address_size 64\n.global .align 4 .b8 t[8] = {1,2,3,4,5,6,7,8};\n\
             .global .align 8 .u64 p = generic(t)+4;\n\
             .visible .entry k(.param .u64 k_param_0, .param .align 8 .b8 k_param_1[24])\n{\n\
             .reg .pred %p<2>; .reg .b32 %r<3>;\n ld.param.u32 %r1, [k_param_1+8];\n\
             { .reg .b32 t; mov.b32 t, %r1; add.s32 %r2, t, -1; }\n @!%p1 bra $L1;\n$L1: ret;\n}",
        )
        .unwrap();
        assert_eq!((m.version, m.sm), ((8, 4), 75));
        assert_eq!(m.vars[1].init[0], Init::Symbol { name: "t".into(), offset: 4, shift: None });
        let f = &m.functions[0];
        assert_eq!(f.params[1].size(), 24);
        let body = f.body.as_ref().unwrap();
        assert!(body.regs.contains_key("t@1") && body.regs.contains_key("%r2"));
        let guards = body.stmts.iter().filter(|s| matches!(s, Stmt::Inst(i) if i.guard.is_some())).count();
        assert_eq!(guards, 1);
    }

    #[test]
    fn nesting_is_bounded() {
        for open in ["{", "(", "a|"] {
            let text =
                format!(".version 8.4\n.target sm_75\n.entry k {{ mov.b32 {} ; }}", open.repeat(100_000));
            assert!(parse(&text).is_err());
        }
        assert!(parse(&format!(".version 8.4\n.target sm_75\n.entry k {}", "{".repeat(100_000))).is_err());
    }

    #[test]
    fn errors_name_the_line() {
        assert!(
            parse(".version 8.4\n.target sm_75\n.entry k { add.s32 %r1, ) ; }")
                .unwrap_err()
                .contains("line 3")
        );
    }
}
