//! Links shared libraries so that they load on glibc 2.28.
//!
//! Other people's programs load these libraries, perhaps in a container whose glibc is older than
//! that of the build machine. The libraries' build scripts call [`link`].
//!
//! glibc has had most functions that Rust's standard library calls for long, but some have newer
//! symbol versions: those that moved from libpthread and libdl into libc (2.32 to 2.34), those that
//! became real functions (`stat64`), and those with a new error convention (`exp2`). Every glibc
//! still has the old versions, so the linker redirects each such call (`--wrap`) to a stub that
//! names the old version.

use std::path::PathBuf;
use std::process::Command;

/// A function, and the symbol version or the C code for its stub.
type Named = (&'static str, &'static str);

/// Functions with an older version in every glibc, and that version on x86-64.
const OLDER: &[Named] = &[
    ("dlclose", "2.2.5"),
    ("dlerror", "2.2.5"),
    ("dlopen", "2.2.5"),
    ("dlsym", "2.2.5"),
    ("exp", "2.2.5"),
    ("exp2", "2.2.5"),
    ("log", "2.2.5"),
    ("log2", "2.2.5"),
    ("pow", "2.2.5"),
    ("pthread_attr_getguardsize", "2.2.5"),
    ("pthread_attr_getstack", "2.2.5"),
    ("pthread_attr_setstacksize", "2.2.5"),
    ("pthread_create", "2.2.5"),
    ("pthread_detach", "2.2.5"),
    ("pthread_getattr_np", "2.2.5"),
    ("pthread_getspecific", "2.2.5"),
    ("pthread_join", "2.2.5"),
    ("pthread_key_create", "2.2.5"),
    ("pthread_key_delete", "2.2.5"),
    ("pthread_kill", "2.2.5"),
    ("pthread_once", "2.2.5"),
    ("pthread_setname_np", "2.12"),
    ("pthread_setspecific", "2.2.5"),
    ("pthread_sigmask", "2.2.5"),
];

/// Functions that old glibcs do not export, and C code for them that uses exported functions.
const ABSENT: &[Named] = &[
    (
        "fstat64",
        "extern int __fxstat64(int, int, void *);\nint __wrap_fstat64(int fd, void *out) { return __fxstat64(1, fd, out); }",
    ),
    (
        "fstatat64",
        "extern int __fxstatat64(int, int, const char *, void *, int);\nint __wrap_fstatat64(int folder, const char *path, void *out, int flags) { return __fxstatat64(1, folder, path, out, flags); }",
    ),
    ("gettid", "extern long syscall(long, ...);\nint __wrap_gettid(void) { return (int)syscall(186); }"),
    (
        "lstat64",
        "extern int __lxstat64(int, const char *, void *);\nint __wrap_lstat64(const char *path, void *out) { return __lxstat64(1, path, out); }",
    ),
    (
        "stat64",
        "extern int __xstat64(int, const char *, void *);\nint __wrap_stat64(const char *path, void *out) { return __xstat64(1, path, out); }",
    ),
];

/// Makes the calling build script's shared library load on glibc 2.28.
///
/// Does nothing on targets other than x86-64 with glibc.
///
/// # Panics
/// If the C compiler, which also links the library, cannot be run.
pub fn link() {
    link_only(|_| true);
}

/// Does this for the functions that `wanted` selects.
///
/// For a library that must not name functions that it does not call.
///
/// # Panics
/// As [`link`].
pub fn link_only(wanted: impl Fn(&str) -> bool) {
    let target = |what: &str| std::env::var(format!("CARGO_CFG_TARGET_{what}")).unwrap_or_default();
    if target("ARCH") != "x86_64" || target("ENV") != "gnu" {
        return;
    }
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let (source, object) = (out.join("older.c"), out.join("older.o"));
    let older = || OLDER.iter().filter(|(name, _)| wanted(name));
    let absent = || ABSENT.iter().filter(|(name, _)| wanted(name));
    std::fs::write(&source, stubs(older(), absent())).expect("the output folder can be written");
    let compiler = std::env::var_os("CC").unwrap_or_else(|| "cc".into());
    let done = Command::new(&compiler)
        .args(["-c", "-O2", "-fPIC", "-fvisibility=hidden", "-fno-builtin", "-ffunction-sections", "-o"])
        .args([&object, &source])
        .status();
    assert!(
        done.is_ok_and(|status| status.success()),
        "{} cannot compile {}",
        compiler.display(),
        source.display()
    );
    println!("cargo::rustc-cdylib-link-arg={}", object.display());
    for (name, _) in older().chain(absent()) {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--wrap={name}");
    }
    // Before 2.34 the functions are in these two libraries, which are empty in newer glibcs.
    for library in ["libpthread.so.0", "libdl.so.2"] {
        println!("cargo::rustc-cdylib-link-arg=-Wl,--push-state,--no-as-needed,-l:{library},--pop-state");
    }
}

fn stubs(
    older: impl Iterator<Item = &'static Named>,
    absent: impl Iterator<Item = &'static Named>,
) -> String {
    let mut text = String::new();
    for (name, version) in older {
        text.push_str(&format!(
            "__asm__(\".section .text.older_{name},\\\"ax\\\",@progbits\\n.globl __wrap_{name}\\n.hidden __wrap_{name}\\n\
             .type __wrap_{name},@function\\n__wrap_{name}: jmp older_{name}@PLT\\n.size __wrap_{name},.-__wrap_{name}\\n\
             .symver older_{name},{name}@GLIBC_{version}\\n\");\n"
        ));
    }
    for (_, code) in absent {
        text.push_str(code);
        text.push('\n');
    }
    text
}
