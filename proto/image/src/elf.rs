//! ELF images of machine code: kernels with their parameters, variables.
//!
//! Source of the attributes: `cuobjdump -elf` of images that nvcc makes.

use crate::bytes::{part, text_at, u16_at, u32_at, u64_at};

/// Prefix of the section that describes a function; the function's name follows.
const INFO: &[u8] = b".nv.info.";
/// Section without bytes in the image.
const NO_BITS: u32 = 8;
const SYMBOLS: u32 = 2;

/// Form of an attribute whose value stands behind it.
const LONG: u8 = 4;
const PARAM_CBANK: u8 = 0x0a;
const KPARAM_INFO: u8 = 0x17;
const CBANK_PARAM_SIZE: u8 = 0x19;
/// Parameters beyond the 4 KiB that older images may have.
const KPARAM_INFO_V2: u8 = 0x45;

/// Position of a parameter within a kernel's parameter buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// In bytes from the buffer's start.
    pub offset: u32,
    /// In bytes.
    pub size: u32,
}

/// A kernel of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Mangled, as the image has it.
    pub name: String,
    /// In the order of the prototype; `None` for a form that is not known.
    pub params: Option<Vec<Param>>,
}

struct Section<'a> {
    name: &'a [u8],
    kind: u32,
    link: u32,
    bytes: &'a [u8],
}

/// A variable; bytes after `init` are zero.
pub struct Variable {
    /// Symbol, by which the driver finds it.
    pub name: String,
    /// In bytes.
    pub size: u64,
    /// Initial bytes, at most `size`.
    pub init: Vec<u8>,
}

fn sections(image: &[u8]) -> Option<Vec<Section<'_>>> {
    let (at, size) = (u64_at(image, 0x28)?, u64::from(u16_at(image, 0x3a)?));
    let (count, names) = (u64::from(u16_at(image, 0x3c)?), u64::from(u16_at(image, 0x3e)?));
    let header = |i: u64| part(image, at.checked_add(i.checked_mul(size)?)?, size);
    let body = |header: &[u8]| part(image, u64_at(header, 0x18)?, u64_at(header, 0x20)?);
    let names = body(header(names)?)?;
    (0..count)
        .map(|i| {
            let header = header(i)?;
            let kind = u32_at(header, 4)?;
            Some(Section {
                name: text_at(names, u32_at(header, 0)? as usize)?,
                kind,
                link: u32_at(header, 0x28)?,
                bytes: if kind == NO_BITS { &[] } else { body(header)? },
            })
        })
        .collect()
}

/// Returns the functions that an image describes, kernels among them; `None` if it is damaged.
pub fn functions(image: &[u8]) -> Option<Vec<Kernel>> {
    Some(described(&sections(image)?))
}

fn described(sections: &[Section<'_>]) -> Vec<Kernel> {
    let of = |section: &Section<'_>| {
        let name = section.name.strip_prefix(INFO)?;
        Some(Kernel { name: String::from_utf8_lossy(name).into_owned(), params: params(section.bytes) })
    };
    sections.iter().filter_map(of).collect()
}

/// Returns an image's kernels and variables; `None` if it is damaged.
pub fn read(image: &[u8]) -> Option<(Vec<Kernel>, Vec<Variable>)> {
    const OBJECT: u8 = 1;
    const FUNCTION: u8 = 2;
    const ENTRY: u8 = 0x10;
    let sections = sections(image)?;
    let (mut kernels, mut variables, mut entries) = (described(&sections), Vec::new(), Vec::new());
    let Some(symbols) = sections.iter().find(|s| s.kind == SYMBOLS) else {
        return Some((kernels, variables));
    };
    let strings = sections.get(symbols.link as usize)?.bytes;
    for symbol in symbols.bytes.chunks_exact(24) {
        let name = || {
            let name = text_at(strings, u32_at(symbol, 0)? as usize)?;
            Some(String::from_utf8_lossy(name).into_owned())
        };
        match symbol[4] & 15 {
            FUNCTION if symbol[5] & ENTRY != 0 => entries.push(name()?),
            OBJECT => {
                let (at, size) = (u64_at(symbol, 8)?, u64_at(symbol, 16)?);
                let bytes = sections.get(usize::from(u16_at(symbol, 6)?)).map_or(&[][..], |s| s.bytes);
                let init = usize::try_from(at).ok().and_then(|at| bytes.get(at..)).unwrap_or_default();
                let init = &init[..init.len().min(usize::try_from(size).ok()?)];
                variables.push(Variable { name: name()?, size, init: init.to_vec() });
            }
            _ => {}
        }
    }
    // Device functions are described, too; only symbols that are marked as entries are kernels.
    if !entries.is_empty() {
        kernels.retain(|kernel| entries.contains(&kernel.name));
    }
    Some((kernels, variables))
}

/// Reads the parameters among a function's attributes.
fn params(mut attributes: &[u8]) -> Option<Vec<Param>> {
    let mut found = Vec::new();
    let mut takes_some = false;
    while attributes.len() >= 4 {
        let (form, attribute, value) = (attributes[0], attributes[1], u16_at(attributes, 2)?);
        attributes = &attributes[4..];
        takes_some |= attribute == PARAM_CBANK || attribute == CBANK_PARAM_SIZE && value != 0;
        if form != LONG {
            continue;
        }
        let body = part(attributes, 0, u64::from(value))?;
        attributes = &attributes[body.len()..];
        if attribute != KPARAM_INFO && attribute != KPARAM_INFO_V2 {
            continue;
        }
        let (ordinal, offset) = (u16_at(body, 4)?, u32::from(u16_at(body, 6)?));
        // The older form has flags below the size.
        let size =
            if attribute == KPARAM_INFO { u32_at(body, 8)? >> 18 } else { u32::from(u16_at(body, 8)?) };
        found.push((ordinal, Param { offset, size }));
    }
    found.sort_unstable_by_key(|(ordinal, _)| *ordinal);
    let complete = found.iter().enumerate().all(|(i, (ordinal, _))| usize::from(*ordinal) == i);
    let missing = found.is_empty() && takes_some;
    (complete && !missing).then(|| found.into_iter().map(|(_, param)| param).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Makes an image with these sections (name, kind, link, bytes) behind one of names.
    fn image(sections: &[(&str, u32, u32, &[u8])]) -> Vec<u8> {
        let mut names = b"\0".to_vec();
        let mut bodies = Vec::new();
        let mut headers = vec![0; 64];
        let mut add = |name: usize, kind: u32, link: u32, bytes: &[u8]| {
            let mut header = [0; 64];
            header[..4].copy_from_slice(&(name as u32).to_le_bytes());
            header[4..8].copy_from_slice(&kind.to_le_bytes());
            header[0x18..0x20].copy_from_slice(&(64 + bodies.len() as u64).to_le_bytes());
            header[0x20..0x28].copy_from_slice(&(bytes.len() as u64).to_le_bytes());
            header[0x28..0x2c].copy_from_slice(&link.to_le_bytes());
            bodies.extend_from_slice(bytes);
            headers.extend_from_slice(&header);
        };
        for (name, kind, link, bytes) in sections {
            add(names.len(), *kind, *link, bytes);
            names.extend_from_slice(name.as_bytes());
            names.push(0);
        }
        add(0, 3, 0, &names);
        let count = sections.len() as u16 + 2;
        let mut image = vec![0; 64];
        image[..6].copy_from_slice(&[0x7f, b'E', b'L', b'F', 2, 1]);
        image[0x28..0x30].copy_from_slice(&(64 + bodies.len() as u64).to_le_bytes());
        for (at, value) in [(0x3a, 64), (0x3c, count), (0x3e, count - 1)] {
            image[at..at + 2].copy_from_slice(&u16::to_le_bytes(value));
        }
        [image, bodies, headers].concat()
    }

    fn hex(text: &str) -> Vec<u8> {
        let digits: Vec<_> = text.bytes().filter(|b| *b != b' ').collect();
        digits.chunks(2).map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap()).collect()
    }

    fn layout(params: Option<Vec<Param>>) -> Option<Vec<(u32, u32)>> {
        params.map(|params| params.iter().map(|p| (p.offset, p.size)).collect())
    }

    /// Attributes as nvcc 12.4 writes them, without those that describe no parameter.
    #[test]
    fn parameters_of_nvccs_images_are_found() {
        // f(char, struct of 3 bytes, double, int *, float4, int)
        let small = hex("040a0800 0600000060013400 03193400 \
             04170c00 000000000500300000f01100 04170c00 000000000400200000f04100 \
             04170c00 000000000300100000f02100 04170c00 000000000200080000f02100 \
             04170c00 000000000100010000f00d00 04170c00 000000000000000000f00500");
        let expected = vec![(0, 1), (1, 3), (8, 8), (16, 8), (32, 16), (48, 4)];
        assert_eq!(layout(params(&small)), Some(expected.clone()));
        // f(struct of 8000 bytes, int *, char)
        let large = hex("040a0800 08000000801a491f 0319491f 04450c00 000000000200481f01000000 \
             04450c00 000000000100401f08000000 04450c00 0000000000000000401f0000");
        assert_eq!(layout(params(&large)), Some(vec![(0, 8000), (8000, 8), (8008, 1)]));
        assert_eq!(params(&hex("0401080000000000 00000000")), Some(Vec::new()), "a kernel without any");
        assert_eq!(params(&hex("040a0800 0600000060013400 03193400")), None, "not described");
        assert_eq!(params(&small[..small.len() - 4]), None, "cut off");
        let gap = hex("04170c00 000000000100010000f00d00");
        assert_eq!(params(&gap), None, "the first one is missing");
        let image = image(&[(".nv.info", 1, 0, &gap), (".nv.info.f", 1, 0, &small), (".text.f", 1, 0, &[])]);
        let found = functions(&image).unwrap();
        let [kernel] = &found[..] else { panic!("{found:?}") };
        assert_eq!((kernel.name.as_str(), layout(kernel.params.clone())), ("f", Some(expected)));
    }

    #[test]
    fn entries_and_variables_are_symbols() {
        let symbol = |name: u32, kind: u8, other: u8, section: u16, at: u64, size: u64| {
            let mut symbol = name.to_le_bytes().to_vec();
            symbol.extend([kind, other]);
            symbol.extend(section.to_le_bytes());
            symbol.extend([at.to_le_bytes(), size.to_le_bytes()].concat());
            symbol
        };
        let strings = b"\0kernel\0variable\0";
        let symbols = [symbol(1, 2, 0x10, 5, 0, 8), symbol(8, 1, 0, 5, 4, 16)].concat();
        let image = image(&[
            (".nv.info.kernel", 1, 0, &[]),
            (".nv.info.helper", 1, 0, &[]),
            (".strtab", 3, 0, strings),
            (".symtab", SYMBOLS, 3, &symbols),
            (".nv.global.init", 1, 0, &[0, 0, 0, 0, 7, 8]),
        ]);
        let (kernels, variables) = read(&image).unwrap();
        assert_eq!(kernels, [Kernel { name: "kernel".into(), params: Some(Vec::new()) }]);
        let [variable] = &variables[..] else { panic!() };
        assert_eq!(
            (variable.name.as_str(), variable.size, &variable.init[..]),
            ("variable", 16, &[7, 8][..])
        );
    }

    #[test]
    fn no_changed_byte_leads_outside() {
        let attributes = hex("03190400 04170c00 000000000000000000f01100");
        let whole = image(&[(".nv.info.f", 1, 0, &attributes), (".symtab", SYMBOLS, 1, &[2; 48])]);
        assert!(functions(&whole).is_some());
        for at in 0..whole.len() {
            for value in [0, 1, 0x7f, 0x80, 0xff] {
                let mut changed = whole.clone();
                changed[at] = value;
                let _ = (functions(&changed), read(&changed), functions(&whole[..at]));
            }
        }
    }
}
