//! PTX: text to bytecode to execution.

pub mod ast;
pub mod atomics;
pub mod code;
pub mod exec;
pub mod format;
pub mod image;
pub mod lex;
pub mod lower;
pub mod memory;
pub mod ops;
pub mod parse;
pub mod round;
pub mod rows;
pub mod sampler;
pub mod select;
pub mod special;
pub mod texture;
pub mod warp;

/// Parses and lowers one PTX text.
pub fn compile(text: &str) -> Result<code::Program, String> {
    lower::lower(&parse::parse(text)?)
}
