//! `printf` of device code: a format string and a packed argument buffer.

use std::ffi::{CString, c_char, c_int};

/// Source of the arguments.
pub trait Source {
    type Error;
    /// Returns the next argument, of 4 or 8 bytes.
    fn word(&mut self, size: u32) -> Result<u64, Self::Error>;
    /// Returns the string at a device address.
    fn string(&mut self, at: u64) -> Result<Vec<u8>, Self::Error>;
}

enum Value {
    Int(u64, bool),
    Float(f64),
    Text(Vec<u8>),
}

/// Lets the C library format one conversion.
fn one(spec: &str, value: &Value, out: &mut Vec<u8>) {
    let Ok(spec) = CString::new(spec) else { return };
    let text = match value {
        Value::Text(t) => CString::new(t.clone()).unwrap_or_default(),
        _ => CString::default(),
    };
    let mut buffer = vec![0u8; 512];
    loop {
        let (p, len, fmt) = (buffer.as_mut_ptr().cast::<c_char>(), buffer.len(), spec.as_ptr());
        // SAFETY: `spec` holds exactly one conversion, whose argument type is the one passed.
        let n = unsafe {
            match value {
                Value::Int(v, true) => libc::snprintf(p, len, fmt, *v),
                Value::Int(v, false) => libc::snprintf(p, len, fmt, *v as c_int),
                Value::Float(v) => libc::snprintf(p, len, fmt, *v),
                Value::Text(_) => libc::snprintf(p, len, fmt, text.as_ptr()),
            }
        };
        let n = usize::try_from(n).unwrap_or(0);
        if n < buffer.len() {
            out.extend_from_slice(&buffer[..n]);
            return;
        }
        buffer.resize(n + 1, 0);
    }
}

/// Formats into `out` and returns the number of arguments used.
pub fn format<S: Source>(fmt: &[u8], out: &mut Vec<u8>, args: &mut S) -> Result<u32, S::Error> {
    let mut used = 0;
    let mut at = 0;
    while at < fmt.len() {
        if fmt[at] != b'%' {
            out.push(fmt[at]);
            at += 1;
            continue;
        }
        let start = at;
        at += 1;
        if fmt.get(at) == Some(&b'%') {
            out.push(b'%');
            at += 1;
            continue;
        }
        let mut spec = String::from("%");
        let mut long = 0;
        while let Some(&b) = fmt.get(at) {
            match b {
                b'-' | b'+' | b' ' | b'#' | b'.' | b'0'..=b'9' => spec.push(b as char),
                b'*' => {
                    spec.push_str(&(args.word(4)? as i32).to_string());
                    used += 1;
                }
                b'l' | b'j' | b'z' | b't' => long += 1,
                b'h' => spec.push('h'),
                _ => break,
            }
            at += 1;
        }
        let Some(&conversion) = fmt.get(at) else {
            out.extend_from_slice(&fmt[start..]);
            break;
        };
        at += 1;
        let value = match conversion {
            b'd' | b'i' | b'u' | b'o' | b'x' | b'X' | b'c' => {
                let wide = long > 0 && conversion != b'c';
                if wide {
                    spec.push_str("ll");
                }
                Value::Int(args.word(if wide { 8 } else { 4 })?, wide)
            }
            b'p' => Value::Int(args.word(8)?, true),
            b'e' | b'E' | b'f' | b'F' | b'g' | b'G' | b'a' | b'A' => {
                Value::Float(f64::from_bits(args.word(8)?))
            }
            b's' => {
                let p = args.word(8)?;
                Value::Text(if p == 0 { b"(null)".to_vec() } else { args.string(p)? })
            }
            _ => {
                out.extend_from_slice(&fmt[start..at]);
                continue;
            }
        };
        used += 1;
        spec.push(conversion as char);
        one(&spec, &value, out);
    }
    Ok(used)
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Words(Vec<u64>);

    impl Source for Words {
        type Error = ();
        fn word(&mut self, _size: u32) -> Result<u64, ()> {
            Ok(self.0.remove(0))
        }
        fn string(&mut self, _at: u64) -> Result<Vec<u8>, ()> {
            Ok(b"text".to_vec())
        }
    }

    #[test]
    fn formats_like_c() {
        let mut out = Vec::new();
        let mut args = Words(vec![-3i32 as u32 as u64, 1.5f64.to_bits(), 7, 1 << 40, 65]);
        let n = format(b"%3d|%.2f|%s|%lld|%c|%%\n", &mut out, &mut args).unwrap();
        assert_eq!(String::from_utf8(out).unwrap(), " -3|1.50|text|1099511627776|A|%\n");
        assert_eq!(n, 5);
    }
}
