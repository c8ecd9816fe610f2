//! Questions about graphs.

use std::fs::File;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;

use gpusession_proto::frame::{MAX_LONG_BODY, Reader};
use nix::sys::memfd::{MFdFlags, memfd_create};

use crate::answer::{Answer, Done};
use crate::driver::{Handle, Status, check, status};
use crate::objects::known::{Kind, Owner};
use crate::session::Session;

/// Longest part of a drawing in one answer, in bytes.
const PART_BYTES: usize = 1 << 20;
/// Longest drawing, in bytes.
const MAX_DRAWING: u64 = 1 << 30;
/// Added to a selection if the answer contains the data of the edges.
const WITH_DATA: u64 = 0x100;
/// Words in one answer at most.
const MAX_WORDS: usize = MAX_LONG_BODY / 8 - 2;

/// Nodes of an answer, with the data of the edges.
struct Found {
    from: Vec<Handle>,
    to: Vec<Handle>,
    data: Vec<u64>,
}

/// Asks the driver for nodes; without arrays, for their number.
fn ask(
    session: &Session,
    about: u64,
    which: u64,
    with_data: bool,
    mut arrays: Option<&mut Found>,
) -> Result<usize, Status> {
    const NULL: *mut Handle = std::ptr::null_mut();
    let call = &session.driver.call;
    let mut count = arrays.as_ref().map_or(0, |found| found.from.len());
    let (from, to, data) = match &mut arrays {
        Some(found) => (found.from.as_mut_ptr(), found.to.as_mut_ptr(), found.data.as_mut_ptr().cast()),
        None => (NULL, NULL, std::ptr::null_mut()),
    };
    let graph = || session.graphs.get(about).map(|graph| graph.0);
    let node = about as Handle;
    // SAFETY: the arrays, if not null, have `count` elements; a node is known.
    check(unsafe {
        match (which, with_data) {
            (0, false) => (call.cuGraphGetNodes)(graph()?, from, &mut count),
            (1, false) => (call.cuGraphGetRootNodes)(graph()?, from, &mut count),
            (2, false) => (call.cuGraphGetEdges)(graph()?, from, to, &mut count),
            (2, true) => (call.cuGraphGetEdges_v2)(graph()?, from, to, data, &mut count),
            (3, false) => (call.cuGraphNodeGetDependencies)(node, from, &mut count),
            (3, true) => (call.cuGraphNodeGetDependencies_v2)(node, from, data, &mut count),
            (4, false) => (call.cuGraphNodeGetDependentNodes)(node, from, &mut count),
            (4, true) => (call.cuGraphNodeGetDependentNodes_v2)(node, from, data, &mut count),
            _ => status::INVALID_VALUE,
        }
    })?;
    Ok(count)
}

/// `GRAPH_NODES`: graph or node, selection, maximum number of nodes.
///
/// The selection is 0 for all nodes of a graph, 1 for roots, 2 for edges. It is 3 for the nodes
/// that a node depends on, 4 for the nodes that depend on it. It answers the total number, then
/// nodes; an edge is two nodes, from and to. With data, a word follows for each edge.
pub fn nodes(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (about, which, most) = (r.word()?, r.word()?, r.word()? as usize);
    let (which, with_data) = (which & !WITH_DATA, which & WITH_DATA != 0);
    let owner = match which {
        0..=2 => Owner { of: session.graphs.get(about)?.0 as u64, whole: 0 },
        _ => session.known.owner(Kind::Node, about)?,
    };
    // A question about a node names its neighbours; that about a graph tells its nodes.
    let note = |node: Handle| match which {
        0..=2 => session.known.note(Kind::Node, node as u64, owner),
        _ => session.known.note_new(Kind::Node, node as u64, owner),
    };
    // The driver wants both of nodes and data, or neither.
    let count = ask(session, about, which, with_data, None)?;
    answer.word(count as u64);
    let wanted = most.min(count);
    if wanted > MAX_WORDS / (1 + usize::from(which == 2) + usize::from(with_data)) {
        return Err(status::NOT_SUPPORTED.into());
    }
    let empty = || vec![std::ptr::null_mut(); wanted];
    let mut found = Found { from: empty(), to: empty(), data: vec![0; wanted] };
    let given = if wanted > 0 { ask(session, about, which, with_data, Some(&mut found))? } else { 0 };
    let given = given.min(wanted);
    answer.word(given as u64);
    for i in 0..given {
        note(found.from[i]);
        note(found.to[i]);
        answer.word(found.from[i] as u64);
        if which == 2 {
            answer.word(found.to[i] as u64);
        }
        if with_data {
            answer.word(found.data[i]);
        }
    }
    Ok(())
}

/// `GRAPH_DRAW`: graph, flags, offset; answers the length of the drawing and the part from there.
///
/// The driver writes a file; this one exists only in memory.
pub fn draw(session: &Session, r: &mut Reader<'_>, answer: &mut Answer) -> Done {
    let (graph, flags, offset) = (session.graphs.get(r.word()?)?.0, r.word()? as u32, r.word()?);
    let file = memfd_create(c"drawing", MFdFlags::MFD_CLOEXEC).map_err(|_| status::OUT_OF_MEMORY)?;
    let path = format!("/proc/self/fd/{}\0", file.as_raw_fd());
    // SAFETY: a graph of this worker; the path ends in a zero.
    check(unsafe { (session.driver.call.cuGraphDebugDotPrint)(graph, path.as_ptr().cast(), flags) })?;
    let mut text = Vec::new();
    let read = File::from(file).take(MAX_DRAWING).read_to_end(&mut text);
    read.map_err(|_| status::OUT_OF_MEMORY)?;
    let rest = usize::try_from(offset).ok().and_then(|at| text.get(at..)).ok_or(status::INVALID_VALUE)?;
    answer.word(text.len() as u64);
    answer.bytes(&rest[..rest.len().min(PART_BYTES)]);
    Ok(())
}
