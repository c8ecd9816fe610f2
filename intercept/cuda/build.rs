//! Writes the exports that need no hand-written code, the tables of entry points and of errors.
#![allow(
    clippy::expect_used,
    clippy::panic,
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "ends a build"
)]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;

use gpusession_calls::tables::{Library, tables_source};
use gpusession_calls::{Class, Kind, Param, Role};

fn main() {
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let write = |name: &str, text: String| {
        std::fs::write(out.join(name), text).expect("the output folder can be written")
    };
    let calls = gpusession_calls::calls();
    let mut implemented = BTreeSet::new();
    let mut source = String::new();
    for (name, class) in &calls {
        if matches!(class, Class::None(_)) {
            continue;
        }
        implemented.insert((*name).to_string());
        implemented.extend(gpusession_calls::per_thread_variant(name).map(String::from));
        if let Class::Generated { own_client: false, wait, params, .. } = class {
            source.push_str(&function(name, *wait, params));
        }
    }
    source.push_str(&gpusession_calls::unsupported_source(&implemented));
    write("generated.rs", source);
    write("proc_addresses.rs", gpusession_calls::proc_addresses_source());
    write("errors.rs", gpusession_calls::errors_source());
    write("private_tables.rs", tables_source(Library::Libcuda));
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    // A hand-written call of the table that is missing in `src/api` fails this link step, not a
    // program.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-z,defs");
    gpusession_glibc::link();
}

/// Generated lines that find the client of a call.
///
/// Each parameter with a role names a client, and all of them must name the same one.
#[derive(Default)]
struct Route {
    lines: String,
    known: bool,
}

impl Route {
    /// Adds a parameter's client, given as an expression.
    ///
    /// The first one is the call's client; later ones must equal it.
    fn is(&mut self, client: &str) {
        if self.known {
            writeln!(self.lines, "        client.same({client})?;").unwrap();
        } else {
            writeln!(self.lines, "        let client = {client};").unwrap();
        }
        self.known = true;
    }

    /// Adds a parameter's client, which `binding`, the left side of a `let` statement, binds as
    /// `other`.
    fn with(&mut self, binding: &str, value: &str) {
        writeln!(self.lines, "        let {binding} = {value}?;").unwrap();
        self.is("other");
    }
}

/// Returns the expression that reads a number of this type from an answer.
fn number(t: &str) -> String {
    match t {
        "f32" => "f32::from_bits(word(&mut r)? as u32)".into(),
        _ => format!("word(&mut r)? as {t}"),
    }
}

/// The parts of a function's text.
struct Text<'a> {
    declarations: Vec<String>,
    route: String,
    checks: String,
    words: String,
    answers: String,
    /// Parameter with the stream of the call's work.
    stream: Option<&'a str>,
}

/// Returns the text of a function.
fn assemble(name: &str, wait: bool, text: &Text<'_>) -> String {
    let Text { declarations, route, checks, words, answers, stream } = text;
    let twin = gpusession_calls::per_thread_variant(name);
    let head = match twin {
        Some(twin) => format!("fn {name} / {twin} [default] "),
        None => format!("fn {name}"),
    };
    // A call without a per-thread variant always uses the legacy default stream.
    let default = match (twin, stream) {
        (None, Some(_)) => "        let default = crate::streams::Default::Legacy;\n",
        (Some(_), None) => "        let _ = default;\n",
        _ => "",
    };
    let run = if wait {
        let take = if answers.is_empty() { "" } else { "        let mut r = reply.reader();\n" };
        let bind = if answers.is_empty() { "" } else { "let reply = " };
        format!(
            "        {bind}client.call(op::{name}, |w| {{\n{words}        }})?;\n{take}{answers}        Ok(())\n"
        )
    } else {
        let worked = stream.map_or(String::new(), |s| format!("        r#{s}.worked(seq);\n"));
        let bind = if stream.is_some() { "let seq = " } else { "" };
        format!(
            "        {bind}client.post(op::{name}, |w| {{\n{words}        }})?;\n{worked}        client.take_late_error()\n"
        )
    };
    let run = if declarations.is_empty() { run.replace("|w| {\n        }", "|_| {}") } else { run };
    format!(
        "driver! {{\n    {head}({}) {{\n{default}{route}{checks}{run}    }}\n}}\n",
        declarations.join(", ")
    )
}

/// Returns the type of a parameter.
fn type_of(kind: Kind) -> String {
    match kind {
        Kind::Scalar(t) => t.to_string(),
        Kind::Handle(_) | Kind::Result(_) | Kind::InOut(_) => "*mut c_void".into(),
        Kind::Out(t) | Kind::OutOptional(t) => format!("*mut {t}"),
        Kind::In(_) | Kind::InOptional(_) | Kind::Array(..) | Kind::ArrayOptional(..) => {
            "*const c_void".into()
        }
    }
}

/// Returns the line that translates a structure's names of objects into those of the client's
/// worker.
fn own(p: &Param) -> String {
    let n = p.name;
    match p.role {
        Role::Object => format!("        let r#{n} = &objects::own(client, r#{n})?[..];\n"),
        Role::Resource => format!("        let r#{n} = &objects::resource(client, r#{n})?[..];\n"),
        _ => String::new(),
    }
}

/// Returns the expression that translates names in an answer into those that the program knows.
fn told(p: &Param) -> String {
    match p.role {
        Role::Location(at) => format!("&objects::told_location(client, string(&mut r)?, {at})?"),
        Role::Resource => "&objects::told_resource(client, string(&mut r)?)?".into(),
        _ => "string(&mut r)?".into(),
    }
}

#[expect(clippy::too_many_lines, reason = "one `match` over the kinds of parameters")]
fn function(name: &str, wait: bool, params: &[Param]) -> String {
    let mut declarations = Vec::new();
    let mut route = Route::default();
    let mut checks = String::new();
    let mut words = String::new();
    let mut answers = String::new();
    let mut stream = None;
    for p in params {
        let n = p.name;
        declarations.push(format!("r#{n}: {}", type_of(p.kind)));
        let (own, told) = (own(p), told(p));
        match p.kind {
            Kind::Scalar(_) if p.role == Role::Device => {
                route.with(&format!("(other, r#{n})"), &format!("clients::device(r#{n})"));
                writeln!(words, "            w.word(u64::from(r#{n}.local));").unwrap();
            }
            Kind::Scalar(_) if p.role == Role::Object => {
                route.with("other", &format!("clients::by_object(r#{n})"));
                writeln!(words, "            w.word(client.own(r#{n}));").unwrap();
            }
            Kind::Scalar(t) => {
                if p.role == Role::Address {
                    route.with("other", &format!("route::by_address(r#{n})"));
                }
                let word = match t {
                    "u64" | "usize" => format!("r#{n} as u64"),
                    "f32" => format!("u64::from(r#{n}.to_bits())"),
                    _ => format!("u64::from(r#{n} as u32)"),
                };
                writeln!(words, "            w.word({word});").unwrap();
            }
            Kind::Handle("stream") => {
                route.with(&format!("(other, r#{n})"), &format!("find(r#{n}, default)"));
                writeln!(checks, "        r#{n}.usable()?;").unwrap();
                writeln!(words, "            w.word(r#{n}.handle);").unwrap();
                stream.get_or_insert(n);
            }
            Kind::Handle(kind) => {
                if kind == "ctx" {
                    // A context as an argument only works in the client of the current context.
                    route.with("other", "clients::get()");
                }
                route.with("other", &format!("clients::by_object(r#{n} as u64)"));
                if matches!(kind, "texref" | "surfref") {
                    let kind = kind.to_uppercase();
                    writeln!(checks, "        objects::check_kind(r#{n} as u64, handle::{kind})?;").unwrap();
                }
                writeln!(words, "            w.word(r#{n} as u64);").unwrap();
            }
            Kind::Out(t) => {
                writeln!(checks, "        if r#{n}.is_null() {{ return Err(INVALID_VALUE); }}").unwrap();
                let value = match p.role {
                    Role::Object => "client.name(word(&mut r)?)".to_string(),
                    _ => number(t),
                };
                writeln!(answers, "        give(r#{n}, {value})?;").unwrap();
            }
            Kind::OutOptional(t) => {
                writeln!(answers, "        give_optional(r#{n}, {});", number(t)).unwrap()
            }
            Kind::In(len) | Kind::Array(len, _) => {
                let size = match p.kind {
                    Kind::Array(_, count) => {
                        writeln!(checks, "        client.takes_list(r#{count} as usize)?;").unwrap();
                        format!("(r#{count} as usize).checked_mul({len}).ok_or(INVALID_VALUE)?")
                    }
                    _ => len.to_string(),
                };
                let given = format!("bytes(r#{n}, {size})?");
                if let Role::Location(at) = p.role {
                    route.with(
                        &format!("(r#{n}, other)"),
                        &format!("objects::locations({given}, {len}, {at})"),
                    );
                    writeln!(words, "            w.bytes(&r#{n});").unwrap();
                } else {
                    write!(checks, "        let r#{n} = {given};\n{own}").unwrap();
                    writeln!(words, "            w.bytes(r#{n});").unwrap();
                }
            }
            Kind::InOptional(len) | Kind::ArrayOptional(len, _) => {
                let size = match p.kind {
                    Kind::ArrayOptional(_, count) => {
                        format!("(r#{count} as usize).checked_mul({len}).ok_or(INVALID_VALUE)?")
                    }
                    _ => len.to_string(),
                };
                writeln!(
                    checks,
                    "        let r#{n} = if r#{n}.is_null() {{ &[][..] }} else {{ bytes(r#{n}, {size})? }};"
                )
                .unwrap();
                writeln!(words, "            w.bytes(r#{n});").unwrap();
            }
            Kind::Result(len) => writeln!(answers, "        give_bytes(r#{n}, {told}, {len})?;").unwrap(),
            Kind::InOut(len) => {
                writeln!(checks, "        let given = bytes(r#{n}, {len})?;").unwrap();
                writeln!(words, "            w.bytes(given);").unwrap();
                writeln!(answers, "        give_bytes(r#{n}, string(&mut r)?, {len})?;").unwrap();
            }
        }
    }
    if !route.known {
        route.is("clients::get()?");
    }
    assemble(name, wait, &Text { declarations, route: route.lines, checks, words, answers, stream })
}
