//! The result of a program: its steps, one after the other.

use crate::program::{FACTOR, Node, Op, Program, Span, Work, mix};

/// The contents of each buffer at the program's end; `None` for one that is freed or never lived.
pub fn result(program: &Program) -> Vec<Option<Vec<u8>>> {
    let mut memory: Vec<Option<Vec<u8>>> = vec![None; program.buffers.len()];
    let mut graphs: Vec<Vec<Node>> = Vec::new();
    for step in &program.steps {
        match &step.op {
            Op::Allocate(buffer) | Op::AllocateIn(buffer, _) => {
                memory[*buffer] = Some(vec![0; program.buffers[*buffer].size]);
            }
            Op::Free(buffer) | Op::FreeIn(buffer, _) => memory[*buffer] = None,
            Op::Enqueue(work, _) | Op::Call(work) | Op::Touch(work) => perform(&mut memory, work),
            Op::Define(_, _, nodes) => graphs.push(nodes.clone()),
            Op::Update(graph, nodes) => graphs[*graph].clone_from(nodes),
            Op::Launch(graph, _) => graphs[*graph].iter().for_each(|node| perform(&mut memory, &node.work)),
            _ => {}
        }
    }
    memory
}

/// Returns the last step that wrote a byte.
pub fn last_writer(program: &Program, buffer: usize, byte: usize) -> Option<usize> {
    let mut graphs: Vec<&[Node]> = Vec::new();
    let mut last = None;
    for (number, step) in program.steps.iter().enumerate() {
        let writes = |work: &Work| {
            work.accesses().iter().any(|access| {
                let span = access.span;
                access.write && span.buffer == buffer && (span.offset..span.offset + span.len).contains(&byte)
            })
        };
        let wrote = match &step.op {
            Op::Enqueue(work, _) | Op::Call(work) | Op::Touch(work) => writes(work),
            Op::Define(_, _, nodes) => {
                graphs.push(nodes);
                false
            }
            Op::Update(graph, nodes) => {
                graphs[*graph] = nodes;
                false
            }
            Op::Launch(graph, _) => graphs[*graph].iter().any(|node| writes(&node.work)),
            _ => false,
        };
        if wrote {
            last = Some(number);
        }
    }
    last
}

type Memory = [Option<Vec<u8>>];

fn read(memory: &Memory, span: Span) -> Vec<u8> {
    let bytes = memory[span.buffer].as_ref().expect("a valid program uses live memory");
    bytes[span.offset..span.offset + span.len].to_vec()
}

fn slice(memory: &mut Memory, span: Span) -> &mut [u8] {
    let bytes = memory[span.buffer].as_mut().expect("a valid program uses live memory");
    &mut bytes[span.offset..span.offset + span.len]
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u32> + '_ {
    bytes.chunks_exact(4).map(|word| u32::from_ne_bytes(word.try_into().expect("four bytes")))
}

fn perform(memory: &mut Memory, work: &Work) {
    match *work {
        Work::Copy { to, from, .. } => {
            let bytes = read(memory, from);
            slice(memory, to).copy_from_slice(&bytes);
        }
        Work::Copy2D { to, from, width, height } => {
            for row in 0..height {
                let of = |plane: crate::program::Plane| Span {
                    buffer: plane.buffer,
                    offset: plane.offset + row * plane.pitch,
                    len: width,
                };
                let bytes = read(memory, of(from));
                slice(memory, of(to)).copy_from_slice(&bytes);
            }
        }
        Work::Fill { to, value, width } => {
            for element in slice(memory, to).chunks_exact_mut(width) {
                element.copy_from_slice(&value.to_ne_bytes()[..width]);
            }
        }
        Work::Mix { to, from, salt, .. } | Work::HostMix { to, from, salt, .. } => {
            let from = read(memory, from);
            for (to, from) in slice(memory, to).chunks_exact_mut(4).zip(words(&from)) {
                let old = u32::from_ne_bytes(to.try_into().expect("four bytes"));
                to.copy_from_slice(&mix(old, from, salt).to_ne_bytes());
            }
        }
        Work::Fold { to, from, salt } => {
            let from: Vec<u32> = words(&read(memory, from)).collect();
            let to = slice(memory, to);
            let threads = to.len() / 4;
            for (thread, word) in to.chunks_exact_mut(4).enumerate() {
                let mut sum = u32::from_ne_bytes(word.try_into().expect("four bytes"));
                for from in from.iter().skip(thread).step_by(threads) {
                    sum = sum.wrapping_mul(FACTOR).wrapping_add(*from);
                }
                word.copy_from_slice(&(sum ^ salt).to_ne_bytes());
            }
        }
    }
}
