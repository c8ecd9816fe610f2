//! Kernels in PTX text, with the sizes of their parameters.
//!
//! Their offsets depend on the architecture: an alignment above 16 bytes counts from the start of a
//! bank of memory, and each architecture places the parameters elsewhere in it.

/// A kernel of a text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Mangled, as the text has it.
    pub name: String,
    /// Bytes of each parameter, in the order of the prototype; `None` for a form that is not known.
    pub sizes: Option<Vec<u32>>,
}

/// Returns the kernels of a text, in its order.
pub fn kernels(text: &[u8]) -> Vec<Kernel> {
    let mut tokens = Tokens(text);
    let mut found = Vec::new();
    while let Some(token) = tokens.next() {
        if token == b".entry"
            && let Some(name) = tokens.next()
        {
            let has_list = tokens.clone().next() == Some(b"(");
            let sizes = if has_list { sizes(&mut tokens) } else { Some(Vec::new()) };
            found.push(Kernel { name: String::from_utf8_lossy(name).into_owned(), sizes });
        }
    }
    found
}

/// Words, strings and single characters of a text without its comments.
#[derive(Clone)]
struct Tokens<'a>(&'a [u8]);

fn in_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'$' | b'%')
}

impl<'a> Iterator for Tokens<'a> {
    type Item = &'a [u8];

    fn next(&mut self) -> Option<&'a [u8]> {
        loop {
            let text = self.0;
            let first = *text.first()?;
            let until = |end: &[u8]| text[1..].windows(end.len()).position(|w| w == end).map(|at| at + 1);
            let len = match first {
                b'/' if text.get(1) == Some(&b'/') => until(b"\n").unwrap_or(text.len()),
                b'/' if text.get(1) == Some(&b'*') => {
                    let body = text.get(2..)?;
                    body.windows(2).position(|w| w == b"*/").map_or(text.len(), |at| at + 4)
                }
                _ if first.is_ascii_whitespace() || first == 0 => 1,
                b'"' => {
                    let len = until(b"\"").map_or(text.len(), |at| at + 1);
                    self.0 = &text[len..];
                    return Some(&text[..len]);
                }
                _ => {
                    let word = text.iter().position(|byte| !in_word(*byte)).unwrap_or(text.len()).max(1);
                    self.0 = &text[word..];
                    return Some(&text[..word]);
                }
            };
            self.0 = &text[len..];
        }
    }
}

/// Reads a list of parameters from its parenthesis on; `None` for a form that is not known.
fn sizes(tokens: &mut Tokens<'_>) -> Option<Vec<u32>> {
    let mut found = Vec::new();
    tokens.next();
    if tokens.clone().next() == Some(b")") {
        return Some(found);
    }
    loop {
        let (size, last) = param(tokens)?;
        found.push(size);
        if last {
            return Some(found);
        }
    }
}

/// Reads one parameter: its size, and whether it is the last one.
fn param(tokens: &mut Tokens<'_>) -> Option<(u32, bool)> {
    if tokens.next()? != b".param" {
        return None;
    }
    let (mut element, mut lanes, mut pointer) = (None, 1, false);
    // Up to the name, which alone has no point.
    loop {
        let word = tokens.next()?;
        match word {
            b".align" => {
                number(tokens.next()?)?;
            }
            b".ptr" => pointer = true,
            // The memory that the parameter leads to.
            b".global" | b".const" | b".local" | b".shared" if pointer => {}
            b".v2" => lanes = 2,
            b".v4" => lanes = 4,
            _ if word.first() == Some(&b'.') => element = Some(size_of(word)?),
            _ if in_word(*word.first()?) => break,
            _ => return None,
        }
    }
    let mut size = u32::checked_mul(element?, lanes)?;
    loop {
        match tokens.next()? {
            b"[" => {
                size = size.checked_mul(number(tokens.next()?)?)?;
                if tokens.next()? != b"]" {
                    return None;
                }
            }
            end @ (b"," | b")") => return Some((size, end == b")")),
            _ => return None,
        }
    }
}

fn number(word: &[u8]) -> Option<u32> {
    std::str::from_utf8(word).ok()?.parse().ok()
}

/// Returns the bytes of a value of a type.
fn size_of(word: &[u8]) -> Option<u32> {
    Some(match word {
        b".b8" | b".u8" | b".s8" => 1,
        b".b16" | b".u16" | b".s16" | b".f16" | b".bf16" => 2,
        b".b32" | b".u32" | b".s32" | b".f32" | b".f16x2" | b".bf16x2" => 4,
        b".b64" | b".u64" | b".s64" | b".f64" => 8,
        b".b128" => 16,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(text: &str) -> Vec<(String, Option<Vec<u32>>)> {
        kernels(text.as_bytes()).into_iter().map(|kernel| (kernel.name, kernel.sizes)).collect()
    }

    /// Text as nvcc 12.4 writes it, and the same kernels as in its ELF image.
    #[test]
    fn parameters_of_nvccs_text_are_found() {
        let text = r#"
//
// .visible .entry comment(.param .u8 a)
/* .entry another() */
.version 8.4
.target sm_75
.file 1 "/tmp/.entry wrong(.param .u8 x)"
.visible .entry small_(
	.param .u8 small__param_0,
	.param .align 1 .b8 small__param_1[3],
	.param .f64 small__param_2,
	.param .u64 .ptr .global .align 1 small__param_3,
	.param .align 16 .b8 small__param_4[16],
	.param .u32 small__param_5
)
.maxntid 128, 1, 1
{
	ld.param.u64 %rd1, [small__param_3];
	ret;
}
.visible .entry none()
{ ret; }
.weak .entry _Z3bigv4$ (.param .align 4 .b8 a[2][1000], .param .v4 .f32 b) { ret; }
"#;
        let expected = [
            ("small_", Some(vec![1, 3, 8, 8, 16, 4])),
            ("none", Some(Vec::new())),
            ("_Z3bigv4$", Some(vec![2000, 16])),
        ];
        assert_eq!(all(text), expected.map(|(name, sizes)| (name.to_string(), sizes)));
    }

    #[test]
    fn a_form_that_is_not_known_has_no_sizes() {
        for params in [
            ".param .texref t",
            ".param .u32",
            ".param .align .b8 a[4]",
            ".reg .u32 a",
            ".param .u32 a[4294967295]",
            ".param .u32 a[",
            ".param .u32 a",
            "",
        ] {
            let found = all(&format!(".entry f({params}"));
            assert_eq!(found, [("f".to_string(), None)], "{params}");
        }
        let after = all(".entry f(.param .texref t) { } .entry g(.param .u16 a) { }");
        assert_eq!(after, [("f".to_string(), None), ("g".to_string(), Some(vec![2]))]);
        for text in ["", ".entry", "/*", "\"", "/", "//", ".entry f"] {
            assert!(all(text).len() <= 1, "{text}");
        }
    }
}
