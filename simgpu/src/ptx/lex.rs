//! Splits PTX text into tokens.

/// One token of PTX text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Tok<'a> {
    /// An identifier, directive or dotted mnemonic: `%r1`, `.reg`, `ld.global.v4.f32`.
    Word(&'a str),
    Int(u64),
    F32(u32),
    F64(u64),
    Str(&'a str),
    Punct(u8),
}

/// A token with the line, from 1, on which it starts.
#[derive(Debug, Clone, Copy)]
pub struct Token<'a> {
    pub tok: Tok<'a>,
    pub line: u32,
}

fn is_word_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'$' || b == b'%' || b == b'.'
}

fn number(text: &str) -> Option<Tok<'_>> {
    let lower = text.to_ascii_lowercase();
    let digits = lower.trim_end_matches('u');
    if let Some(hex) = lower.strip_prefix("0f").filter(|h| h.len() == 8) {
        return u32::from_str_radix(hex, 16).ok().map(Tok::F32);
    }
    if let Some(hex) = lower.strip_prefix("0d").filter(|h| h.len() == 16) {
        return u64::from_str_radix(hex, 16).ok().map(Tok::F64);
    }
    if let Some(hex) = digits.strip_prefix("0x") {
        return u64::from_str_radix(hex, 16).ok().map(Tok::Int);
    }
    if let Some(bin) = digits.strip_prefix("0b") {
        return u64::from_str_radix(bin, 2).ok().map(Tok::Int);
    }
    if lower.contains('.') || lower.contains('e') {
        return lower.parse::<f64>().ok().map(|v| Tok::F64(v.to_bits()));
    }
    if digits.len() > 1 && digits.starts_with('0') {
        return u64::from_str_radix(&digits[1..], 8).ok().map(Tok::Int);
    }
    digits.parse::<u64>().ok().map(Tok::Int)
}

/// Splits `text` into tokens; an error names the line.
pub fn lex(text: &str) -> Result<Vec<Token<'_>>, String> {
    let bytes = text.as_bytes();
    let mut out = Vec::with_capacity(bytes.len() / 4);
    let (mut at, mut line) = (0usize, 1u32);
    while at < bytes.len() {
        let b = bytes[at];
        match b {
            b'\n' => {
                line += 1;
                at += 1;
            }
            b' ' | b'\t' | b'\r' | 0 => at += 1,
            b'/' if bytes.get(at + 1) == Some(&b'/') => {
                while at < bytes.len() && bytes[at] != b'\n' {
                    at += 1;
                }
            }
            b'/' if bytes.get(at + 1) == Some(&b'*') => {
                at += 2;
                while at < bytes.len() && !bytes[at..].starts_with(b"*/") {
                    line += u32::from(bytes[at] == b'\n');
                    at += 1;
                }
                at += 2;
            }
            b'"' => {
                let start = at + 1;
                at = start;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                let body = text.get(start..at).ok_or_else(|| format!("line {line}: unterminated string"))?;
                out.push(Token { tok: Tok::Str(body), line });
                at += 1;
            }
            b'0'..=b'9' => {
                let start = at;
                while at < bytes.len() && (bytes[at].is_ascii_alphanumeric() || bytes[at] == b'.') {
                    at += 1;
                }
                let tok = number(&text[start..at])
                    .ok_or_else(|| format!("line {line}: bad number '{}'", &text[start..at]))?;
                out.push(Token { tok, line });
            }
            _ if is_word_byte(b) => {
                let start = at;
                while at < bytes.len() {
                    if is_word_byte(bytes[at]) {
                        at += 1;
                    } else if bytes[at..].starts_with(b"::") {
                        at += 2;
                    } else {
                        break;
                    }
                }
                out.push(Token { tok: Tok::Word(&text[start..at]), line });
            }
            b'(' | b')' | b'[' | b']' | b'{' | b'}' | b',' | b';' | b':' | b'+' | b'-' | b'@' | b'!'
            | b'|' | b'=' | b'<' | b'>' | b'*' | b'~' | b'&' => {
                out.push(Token { tok: Tok::Punct(b), line });
                at += 1;
            }
            _ => return Err(format!("line {line}: unexpected character 0x{b:02x}")),
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_numbers_and_comments() {
        let toks =
            lex("ld.global.f32 %f1, [%rd1+-4]; // x\n/* y\n */ mov 0f3F800000 0x1F 017 12U .L::b").unwrap();
        let kinds: Vec<_> = toks.iter().map(|t| t.tok).collect();
        assert_eq!(kinds[0], Tok::Word("ld.global.f32"));
        assert!(kinds.contains(&Tok::F32(0x3F80_0000)));
        assert!(
            kinds.contains(&Tok::Int(31)) && kinds.contains(&Tok::Int(15)) && kinds.contains(&Tok::Int(12))
        );
        assert!(kinds.contains(&Tok::Word(".L::b")));
        assert_eq!(toks.last().unwrap().line, 3);
        assert!(lex("add ` x").unwrap_err().contains("line 1"));
    }
}
