//! Prints C++ that compiles if `calls.txt` agrees with NVIDIA's `cuda.h` (`make -C tests/programs
//! verify`): the number of parameters, and the width of each, of each generated call and of each
//! function that the worker's hand-written code calls. A header that is older than a call says
//! nothing about it.

use std::fmt::Write as _;
use std::io::Write as _;

use gpusession_calls::{Class, Kind, calls, driver_functions, symbols};

const PRELUDE: &str = r#"#define __CUDA_API_VERSION_INTERNAL
#include <cuda.h>
#include <algorithm>
#include <tuple>
#include <type_traits>
template <typename F> struct call;
template <typename... A> struct call<CUresult (*)(A...)> {
    static constexpr size_t count = sizeof...(A);
    template <size_t I> using at = std::tuple_element_t<I, std::tuple<A...>>;
};
template <typename T> constexpr size_t width() {
    if constexpr (std::is_void_v<T>) return 0; else return sizeof(T);
}
// Bytes behind a pointer; 0 behind a `void *`, whose structure depends on another parameter.
template <typename P> constexpr size_t behind = width<std::remove_cv_t<std::remove_pointer_t<P>>>();
"#;

/// Returns the bytes of a number's type.
fn bytes(number: &str) -> usize {
    if number.ends_with("32") { 4 } else { 8 }
}

/// Returns the least version of CUDA whose header has a call.
fn since(name: &str) -> u32 {
    symbols().iter().filter(|s| s.call() == name).map(|s| s.version).min().unwrap_or_default()
}

/// Returns the condition under which a C type is as wide as a number of N bytes.
///
/// A smaller number travels in a register of 32 bits; one of 8 bytes may be a handle.
fn scalar(at: &str, bytes: usize) -> String {
    format!("std::max<size_t>(sizeof({at}), 4) == {bytes}")
}

/// Returns the condition under which a C type agrees with a Rust type of `driver.rs`.
///
/// The pointee of a `void *` depends on another parameter, or the worker writes it as bytes.
fn agrees(at: &str, kind: &str) -> String {
    let pointee = kind.strip_prefix("*const ").or_else(|| kind.strip_prefix("*mut "));
    let behind = |bytes: usize| format!("std::is_pointer_v<{at}> && behind<{at}> == {bytes}");
    match pointee {
        Some("c_void") => format!("std::is_pointer_v<{at}>"),
        // A UUID of 16 bytes, which the worker has as a pointer to its first.
        Some("u8" | "[u8; 16]") => behind(16),
        Some("c_char") => behind(1),
        Some("i32" | "u32" | "f32") => behind(4),
        Some(_) => behind(8),
        None => match kind {
            "Handle" | "HostFunction" | "StreamCallback" => format!("std::is_pointer_v<{at}>"),
            "u8" | "i32" | "u32" => scalar(at, 4),
            _ => scalar(at, 8),
        },
    }
}

fn main() -> std::io::Result<()> {
    let mut out = PRELUDE.to_owned();
    for (name, class) in calls() {
        let Class::Generated { params, .. } = class else { continue };
        writeln!(out, "#if CUDA_VERSION >= {}", since(name)).unwrap();
        let of = format!("call<decltype(&{name})>");
        let mut check = |condition: String, of: &str| {
            writeln!(out, "static_assert({condition}, \"calls.txt: {name}: {of}\");").unwrap();
        };
        check(format!("{of}::count == {}", params.len()), "number of parameters");
        for (index, param) in params.iter().enumerate() {
            let at = format!("{of}::at<{index}>");
            // Behind `float *` are a few of them.
            let pointer = |bytes: usize| {
                format!(
                    "std::is_pointer_v<{at}> && (behind<{at}> == {bytes} || behind<{at}> == 0 || std::is_same_v<{at}, float *> && {bytes} % 4 == 0)"
                )
            };
            let condition = match param.kind {
                Kind::Scalar("f32") => format!("std::is_same_v<{at}, float>"),
                Kind::Scalar(number) => scalar(&at, bytes(number)),
                Kind::Handle(_) => format!("std::is_pointer_v<{at}>"),
                Kind::Out(number) | Kind::OutOptional(number) => pointer(bytes(number)),
                Kind::In(n)
                | Kind::InOptional(n)
                | Kind::Result(n)
                | Kind::InOut(n)
                | Kind::Array(n, _)
                | Kind::ArrayOptional(n, _) => pointer(n),
            };
            check(condition, param.name);
        }
        out.push_str("#endif\n");
    }
    for (name, types) in driver_functions() {
        writeln!(out, "#if CUDA_VERSION >= {}", since(name)).unwrap();
        let of = format!("call<decltype(&{name})>");
        let mut conditions = vec![(format!("{of}::count == {}", types.len()), "number of parameters".into())];
        let parameters = types.iter().enumerate();
        conditions.extend(parameters.map(|(i, kind)| {
            (agrees(&format!("{of}::at<{i}>"), kind), format!("parameter {} is no {kind}", i + 1))
        }));
        for (condition, of) in conditions {
            writeln!(out, "static_assert({condition}, \"calls.txt: driver {name}: {of}\");").unwrap();
        }
        out.push_str("#endif\n");
    }
    std::io::stdout().write_all(out.as_bytes())
}
