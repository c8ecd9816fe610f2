//! The `gpusession` program; see the library.

fn main() {
    gpusession::main();
}
