//! Writes the replay of the calls whose form `proto/calls/calls.txt` describes completely.

use std::fmt::Write as _;
use std::path::PathBuf;

use gpusession_calls::{Class, Kind, Param, Role};

fn main() {
    let mut types = String::new();
    let mut loads = String::new();
    let mut arms = String::new();
    let mut touched = String::new();
    let (mut waits, mut works) = (Vec::new(), Vec::new());
    for (op, operation) in gpusession_calls::operations() {
        let effect = operation.effect.unwrap_or_default();
        waits.extend(effect.waits.then(|| op.to_string()));
        works.extend(effect.works.then(|| op.to_string()));
    }
    let mut takers = Vec::new();
    for (name, class) in gpusession_calls::calls() {
        let Class::Generated { op, params, .. } = class else { continue };
        let arguments: Vec<String> = params.iter().map(|p| c_type(p.kind)).collect();
        member(&mut types, &mut loads, name, &arguments.join(", "));
        if name.contains("Memset") || name.contains("Memcpy") {
            works.push(op.to_string());
        }
        writeln!(arms, "        {op} => {{\n{}        }}", arm(name, &params)).unwrap();
        let handles: String = params
            .iter()
            .filter(|p| !matches!(p.kind, Kind::Out(_) | Kind::OutOptional(_) | Kind::Result(_)))
            .take(6)
            .enumerate()
            .take_while(|(_, p)| matches!(p.kind, Kind::Scalar(_) | Kind::Handle(_)))
            .filter_map(|(i, p)| match p.kind {
                Kind::Handle(kind) => Some(format!("touch(words[{i}], {}); ", kind == "stream")),
                _ => None,
            })
            .collect();
        if !handles.is_empty() {
            writeln!(touched, "        {op} => {{ {handles}}}").unwrap();
        }
        if name.ends_with("Destroy") || matches!(name, "cuMemUnmap" | "cuMemRelease" | "cuMemPoolTrimTo") {
            takers.push(op.to_string());
        }
    }
    let (mut called, mut called_loads) = (String::new(), String::new());
    for (name, types) in gpusession_calls::driver_functions() {
        member(&mut called, &mut called_loads, name, &types.join(", "));
    }
    let functions = structure("Called", "hand-written", &called, &called_loads)
        + &structure("Replayed", "generated", &types, &loads);
    let replay = format!(
        "/// Replays one generated call of a context.\n#[allow(unused_mut, unused_variables)]\n\
         pub fn dispatch(session: &Session, op: u16, ctx: u64, r: &mut Reader<'_>, answer: &mut Answer) -> Done {{\n    \
         match op {{\n{arms}        _ => return Err(BadFrame(\"unknown operation\").into()),\n    }}\n    Ok(())\n}}\n"
    );
    let calls = format!(
        "/// Reports the handles in a generated call's first words, and whether each is a stream.\n#[allow(unused_variables)]\n\
         pub fn touches(op: u16, words: &[u64; 6], touch: &mut dyn FnMut(u64, bool)) {{\n    match op {{\n{touched}        \
         _ => {{}}\n    }}\n}}\n\n\
         /// Returns `true` for operations whose replay may hold its executor up.\npub fn waits(op: u16) -> bool {{\n    matches!(op, {})\n}}\n\n\
         /// Returns `true` for operations that give the GPU work, or copy.\npub fn works(op: u16) -> bool {{\n    matches!(op, {})\n}}\n\n\
         /// Returns `true` for generated calls that destroy what other frames may use without naming it.\n\
         pub fn takes_away(op: u16) -> bool {{\n    matches!(op, {})\n}}\n",
        waits.join(" | "),
        works.join(" | "),
        takers.join(" | ")
    );
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    for (name, source) in [("functions.rs", functions), ("replay.rs", replay), ("calls.rs", calls)] {
        std::fs::write(out.join(name), source).expect("the output folder can be written");
    }
}

/// Adds a function of the driver to the fields of a structure, and to its loader.
fn member(fields: &mut String, loads: &mut String, name: &str, arguments: &str) {
    writeln!(fields, "    #[allow(missing_docs)] pub {name}: unsafe extern \"C\" fn({arguments}) -> Status,")
        .unwrap();
    writeln!(loads, "            {name}: function(symbols, c\"{name}\"),").unwrap();
}

/// Returns a structure of the driver's functions, and its loader.
fn structure(name: &str, callers: &str, fields: &str, loads: &str) -> String {
    format!(
        "/// The driver's functions that {callers} code calls.\n\
         #[allow(non_snake_case)]\npub struct {name} {{\n{fields}}}\n\n\
         impl {name} {{\n    /// # Safety\n    \
         /// The symbols are those of a CUDA driver, which stays loaded.\n    \
         pub unsafe fn load(symbols: &impl Symbols) -> Self {{\n        \
         // SAFETY: the caller vouches for the symbols; the types are those of cuda.h.\n        \
         unsafe {{ Self {{\n{loads}        }} }}\n    }}\n}}\n"
    )
}

fn c_type(kind: Kind) -> String {
    match kind {
        Kind::Scalar(t) => t.into(),
        Kind::Handle(_) => "Handle".into(),
        Kind::Out(t) | Kind::OutOptional(t) => format!("*mut {t}"),
        Kind::In(_) | Kind::InOptional(_) | Kind::Array(..) | Kind::ArrayOptional(..) => {
            "*const c_void".into()
        }
        Kind::Result(_) | Kind::InOut(_) => "*mut c_void".into(),
    }
}

/// Returns the expression of a kind of known values.
fn known(kind: &str) -> String {
    let (first, rest) = kind.split_at(1);
    format!("Kind::{}{rest}", first.to_uppercase())
}

/// Returns `true` if a call ends the value that its first parameter names.
fn ends_first(name: &str, params: &[Param]) -> bool {
    let named = params.first().is_some_and(|p| p.known.is_some() && matches!(p.kind, Kind::Scalar(_)));
    named && (name.contains("Destroy") || name == "cuMemRelease")
}

/// Returns the owner of a value that a call returns.
fn owner(kind: &str, params: &[Param]) -> String {
    let argument = |is: &dyn Fn(&Param) -> bool| params.iter().position(is);
    match kind {
        "node" | "condition" => {
            let graph = argument(&|p| p.kind == Kind::Handle("graph")).expect("a value of a graph names it");
            format!("Owner {{ of: a{graph} as u64, whole: 0 }}")
        }
        "memory" | "pool" => "Owner::default()".into(),
        _ => {
            let whole = argument(&|p| p.known.is_some() && matches!(p.kind, Kind::Scalar(_)));
            let whole = whole.map_or("0".into(), |whole| format!("a{whole}"));
            format!("Owner {{ of: ctx, whole: {whole} }}")
        }
    }
}

/// Returns the lines that check values of a frame, and those that note values of the driver.
fn known_values(name: &str, params: &[Param]) -> (String, String) {
    let (mut checks, mut notes) = (String::new(), String::new());
    for (i, p) in params.iter().enumerate() {
        let v = format!("a{i}");
        if p.role == Role::Resource && matches!(p.kind, Kind::In(_)) {
            writeln!(checks, "            resource(session, &{v})?;").unwrap();
        }
        let Some(kind) = p.known else { continue };
        let table = known(kind);
        match p.kind {
            Kind::Scalar(_) if i == 0 && ends_first(name, params) => {
                writeln!(checks, "            let taken = session.known.take({table}, {v})?;").unwrap();
            }
            Kind::Scalar(_) => writeln!(checks, "            session.known.check({table}, {v})?;").unwrap(),
            Kind::Array(..) => {
                writeln!(checks, "            session.known.check_all({table}, {v}.iter().copied())?;")
                    .unwrap();
            }
            Kind::Out(_) => {
                let owner = owner(kind, params);
                writeln!(notes, "            session.known.note({table}, {v}, {owner});").unwrap();
            }
            _ => panic!("calls.txt: {name}: no worker knows values of this form: {p:?}"),
        }
    }
    (checks, notes)
}

/// Returns the match arm of a call: it reads the arguments, calls, answers with the outputs.
fn arm(name: &str, params: &[Param]) -> String {
    let mut before = String::new();
    let mut counted = String::new();
    let mut after = String::new();
    let mut arguments = Vec::new();
    for (i, p) in params.iter().enumerate() {
        let v = format!("a{i}");
        match p.kind {
            Kind::Scalar("f32") => {
                writeln!(before, "            let {v} = f32::from_bits(r.word()? as u32);").unwrap();
                arguments.push(v);
            }
            Kind::Scalar(t) => {
                writeln!(before, "            let {v} = r.word()? as {t};").unwrap();
                arguments.push(v);
            }
            Kind::Handle("ctx") => {
                writeln!(before, "            let {v} = session.contexts.get(r.word()?)?.0;").unwrap();
                arguments.push(v);
            }
            Kind::Handle("stream") => {
                writeln!(before, "            let {v} = session.stream(r.word()?)?;").unwrap();
                arguments.push(v);
            }
            Kind::Handle("func") => {
                writeln!(before, "            let {v} = session.funcs.get(r.word()?)?.object.0;").unwrap();
                arguments.push(v);
            }
            Kind::Handle(kind @ ("texref" | "surfref")) => {
                writeln!(before, "            let {v} = session.{kind}s.get(r.word()?)?.0.0;").unwrap();
                arguments.push(v);
            }
            Kind::Handle(kind) => {
                let table = if kind == "library" { "libraries".to_string() } else { format!("{kind}s") };
                writeln!(before, "            let {v} = session.{table}.get(r.word()?)?.0;").unwrap();
                arguments.push(v);
            }
            Kind::Out(t) | Kind::OutOptional(t) => {
                writeln!(before, "            let mut {v} = {t}::default();").unwrap();
                let word =
                    if t == "f32" { format!("u64::from({v}.to_bits())") } else { format!("{v} as u64") };
                writeln!(after, "            answer.word({word});").unwrap();
                arguments.push(format!("&mut {v}"));
            }
            Kind::In(n) => {
                writeln!(before, "            let {v} = structure(r.bytes()?, {n})?;").unwrap();
                arguments.push(format!("{v}.as_ptr().cast()"));
            }
            Kind::InOptional(n) => {
                writeln!(before, "            let {v} = optional(r.bytes()?, {n})?;").unwrap();
                arguments.push(format!("{v}.as_ref().map_or(std::ptr::null(), |v| v.as_ptr().cast())"));
            }
            Kind::Result(n) => {
                writeln!(before, "            let mut {v} = [0u64; {}];", n.div_ceil(8)).unwrap();
                writeln!(after, "            answer.bytes(&bytes_of(&{v})[..{n}]);").unwrap();
                arguments.push(format!("{v}.as_mut_ptr().cast()"));
            }
            Kind::InOut(n) => {
                writeln!(before, "            let mut {v} = structure(r.bytes()?, {n})?;").unwrap();
                writeln!(after, "            answer.bytes(&bytes_of(&{v})[..{n}]);").unwrap();
                arguments.push(format!("{v}.as_mut_ptr().cast()"));
            }
            Kind::Array(n, count) | Kind::ArrayOptional(n, count) => {
                let position =
                    params.iter().position(|q| q.name == count).expect("checked by the table's tests");
                writeln!(before, "            let {v} = r.bytes()?;").unwrap();
                let optional = matches!(p.kind, Kind::ArrayOptional(..));
                let read = if optional { "optional" } else { "structure" };
                // The count may come after the array.
                writeln!(
                    counted,
                    "            let {v} = {read}({v}, {n} * bounded(a{position} as u64, MAX_LONG_BODY)?)?;"
                )
                .unwrap();
                arguments.push(if optional {
                    format!("{v}.as_ref().map_or(std::ptr::null(), |v| v.as_ptr().cast())")
                } else {
                    format!("{v}.as_ptr().cast()")
                });
            }
        }
    }
    let (checks, notes) = known_values(name, params);
    let kept = match params.first().and_then(|p| p.known) {
        Some(kind) if ends_first(name, params) => {
            format!(".inspect_err(|_| session.known.put_back({}, a0, taken))", known(kind))
        }
        _ => String::new(),
    };
    format!(
        "{before}{counted}{checks}            // SAFETY: arguments have cuda.h's types; pointers are to memory of the stated size, and handles are the driver's.\n            \
         check(unsafe {{ (session.driver.generated.{name})({}) }}){kept}?;\n{notes}{after}",
        arguments.join(", ")
    )
}
