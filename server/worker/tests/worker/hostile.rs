//! Hostile clients: garbage, bad handles, absurd counts, foreign lanes, answers left unread.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use gpusession_link::lanes::chunk_header;
use gpusession_proto::frame::{
    CHUNK, DOWN_LANES, FIRST_DOWN_LANE, FIRST_UP_LANE, HEADER, INLINE_MAX, MAX_BODY, Reader, mirror, op,
};
use gpusession_proto::handle;
use gpusession_proto::preface::{self, Code, FLAG_TLS, Refusal};
use gpusession_proto::supervise::{FromWorker, STAGING, ToWorker};
use zerocopy::IntoBytes;

use crate::{
    INVALID_CONTEXT, INVALID_HANDLE, INVALID_IMAGE, INVALID_VALUE, OUT_OF_MEMORY, lane, no_wait, pattern,
    send_chunk, works,
};
use gpusession_test_worker::{
    KEY, MIB, Machine, Random, Raw, TEST_TIMEOUT, WINDOW, Worker, event, exists, frame, frame_of, stream,
};

#[test]
fn garbage_before_admission_disturbs_no_client() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    // A connection that stays silent all the time.
    let silent = worker.stranger(0);
    let client = worker.client(false);

    let good = worker.preface(0, 0);
    let mut version = good;
    version.version = 99.into();
    let mut other = good;
    other.worker = [8; 16];
    let prefaces: [(&[u8], &str); 5] = [
        (&pattern(preface::LEN, 1), "not a gpusession data connection"),
        (&good.as_bytes()[..preface::LEN - 1], "short preface"),
        (&[], "short preface"),
        (version.as_bytes(), "the program speaks version 99: update the server's packages"),
        (other.as_bytes(), "preface for another worker"),
    ];
    for (bytes, reason) in prefaces {
        let mut socket = worker.adopt_with(bytes);
        socket.shutdown(std::net::Shutdown::Write).expect("an open connection");
        let refusal = worker.refusal();
        assert!(refusal.contains(reason), "{refusal}");
        let mut answer = Vec::new();
        let _ = socket.read_to_end(&mut answer);
        // A program of another version gets the reason; the worker hangs up on all else.
        let code = Refusal::read(&answer).map(|refusal| refusal.code);
        let expected = (bytes == version.as_bytes()).then_some(Code::Version);
        assert_eq!((code, answer.is_empty()), (expected, expected.is_none()));
    }

    let mut long = frame(op::HELLO, 1, |w| w.bytes(&[0; 4096]));
    let mut cut = long.clone();
    cut.truncate(HEADER + 100);
    long.extend_from_slice(&[0; 100]);
    let mut odd = frame(op::HELLO, 1, |w| w.word(0));
    odd[0] = 7;
    let greetings: [(Vec<u8>, bool, &str); 9] = [
        (
            b"GET / HTTP/1.1\r\nHost: example.org\r\nAccept: */*\r\n\r\n".to_vec(),
            false,
            "malformed frame: body",
        ),
        (pattern(4096, 2), false, "malformed frame: body"),
        (long, false, "greeting too long"),
        (odd, false, "length not a multiple of 8"),
        (cut, true, "greeting too long"),
        (frame(op::HELLO, 1, |w| w.bytes(&[0; 600]))[..300].to_vec(), true, ""),
        (vec![1, 2, 3], true, ""),
        (frame(op::MEM_INFO, 1, |_| {}), false, "unexpected first frame"),
        (frame(op::LANE, 1, |w| w.bytes(&[0; 32])), false, "unexpected first frame"),
    ];
    for (bytes, close, reason) in greetings {
        let mut stranger = worker.stranger(0);
        stranger.write(&bytes);
        if close {
            stranger.close();
        } else {
            assert!(stranger.hung_up(), "{reason}");
        }
        let refusal = worker.refusal();
        assert!(refusal.contains(reason), "{refusal}, not {reason}");
    }
    // A ticket's length beyond its frame; more windows than the frame holds.
    for body in [vec![u64::MAX], vec![1 << 40, 0, 0]] {
        let mut stranger = worker.stranger(0);
        stranger.write(&frame(op::HELLO, 1, |w| body.iter().for_each(|word| w.word(*word))));
        assert!(stranger.hung_up());
        assert!(worker.refusal().contains("string too long"));
    }
    // Garbage where a TLS handshake is due.
    let mut socket = TcpStream::connect(worker.address).expect("a connection");
    socket.set_read_timeout(Some(TEST_TIMEOUT)).expect("a timeout");
    socket.write_all(worker.preface(0, FLAG_TLS).as_bytes()).expect("a preface");
    socket.write_all(&pattern(500, 4)).expect("garbage");
    worker.refusal();
    drop(socket);

    works(&client);
    assert!(client.heard.0.lock().expect("a list").is_empty());
    drop(silent);
}

#[test]
fn too_many_windows_do_no_harm() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let ticket = worker.ticket().seal(&KEY);
    let mut stranger = worker.stranger(0);
    stranger.write(&frame(op::HELLO, 1, |w| {
        w.bytes(&ticket);
        w.word(u64::MAX);
        w.word(u64::MAX);
    }));
    assert!(stranger.hung_up());
    assert!(worker.refusal().contains("body too short"));
    // Windows that no driver grants: the client is admitted without a window.
    let mut stranger = worker.stranger(0);
    stranger.write(&frame(op::HELLO, 1, |w| {
        w.bytes(&ticket);
        [2, u64::MAX, 1, u64::MAX - 4095].into_iter().for_each(|word| w.word(word));
    }));
    let (header, body) = stranger.frame().expect("an answer");
    let mut r = Reader::new(&body);
    let _ = r.bytes();
    assert_eq!((header.ctx.get(), r.word()), (0, Ok(0)));
    assert_eq!(stranger.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(INVALID_VALUE));
    assert_eq!(stranger.ask_words(op::MEM_INFO, &[]), Ok(0));
}

/// Checks that bytes of an admitted client end its worker, for this reason.
fn ends_with(bytes: &[u8], reason: &str) {
    let machine = Machine::new();
    let (mut worker, mut beside) = (Worker::start(&machine), Worker::start(&machine));
    let (mut guest, mut neighbour) = (worker.guest(), beside.guest());
    guest.write(bytes);
    let told = guest.answer(u64::MAX).expect_err("the end");
    assert!(told.contains(reason), "{told}, not {reason}");
    let ended = worker.ended();
    assert!(ended.contains(reason), "{ended}, not {reason}");
    assert_eq!(neighbour.ask_words(op::MEM_INFO, &[]), Ok(0), "no other program is disturbed");
}

#[test]
fn a_body_longer_than_allowed_ends_the_worker() {
    let mut bytes = frame(op::MEM_INFO, 2, |_| {});
    bytes[..4].copy_from_slice(&(MAX_BODY as u32 + 8).to_le_bytes());
    ends_with(&bytes, "malformed frame: body too long");
    bytes[..4].copy_from_slice(&u32::MAX.to_le_bytes());
    ends_with(&bytes, "malformed frame: body too long");
}

#[test]
fn an_odd_length_ends_the_worker() {
    let mut bytes = frame(op::MEM_INFO, 2, |_| {});
    bytes[0] = 12;
    bytes.extend_from_slice(&[0; 12]);
    ends_with(&bytes, "malformed frame: body length not a multiple of 8");
}

#[test]
fn an_unknown_operation_ends_the_worker() {
    for operation in [0, 19, 199, op::REPLY, op::CHUNK, 9999, u16::MAX] {
        ends_with(&frame(operation, 2, |w| w.word(0)), "malformed frame: unknown operation");
    }
    // A second greeting is an unknown operation, too.
    ends_with(&frame(op::HELLO, 2, |w| w.bytes(&[0; 100])), "malformed frame: unknown operation");
}

#[test]
fn a_body_that_stops_short_ends_the_worker() {
    ends_with(&frame(op::COPY_TO_DEVICE, 2, |w| w.word(WINDOW)), "malformed frame: body too short");
    ends_with(&frame(op::STREAM_CREATE, 2, |_| {}), "malformed frame: body too short");
    ends_with(&frame(op::ALLOC, 2, |w| w.word(WINDOW)), "malformed frame: body too short");
}

#[test]
fn a_string_beyond_its_body_ends_the_worker() {
    for len in [9, 1 << 40, u64::MAX] {
        let bytes = frame(op::IMAGE_HAVE, 2, |w| {
            w.word(len);
            w.word(0);
        });
        ends_with(&bytes, "malformed frame: string too long");
    }
}

#[test]
fn a_frame_cut_off_by_the_end_of_the_connection_ends_the_worker() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    guest.write(&frame(op::COPY_TO_DEVICE, 2, |w| w.bytes(&[1; 1000]))[..500]);
    guest.close();
    worker.ended();
}

#[test]
fn values_that_the_driver_did_not_return_do_not_reach_it() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    // An empty node (kind 3) of a graph, twice.
    let graph = handle::make(handle::GRAPH, 0, 1, 1);
    assert_eq!(guest.ask_words(op::GRAPH_CREATE, &[graph, 0]), Ok(0));
    let mut node = || {
        guest.ask_answer(op::GRAPH_ADD, |w| {
            w.word(graph);
            w.bytes(&[]);
            w.word(3);
        })[0]
    };
    let (node, freed) = (node(), node());
    assert_eq!(guest.ask_words(op::cuGraphNodeGetType, &[freed]), Ok(0));
    assert_eq!(guest.ask_words(op::cuGraphDestroyNode, &[freed]), Ok(0));
    let pool = guest.ask_answer(op::cuDeviceGetDefaultMemPool, |w| w.word(0))[0];
    for bad in [1, 0x4141_4141_4141_4141, u64::MAX, freed, graph] {
        for operation in [
            op::cuArrayGetDescriptor_v2,
            op::cuArray3DGetDescriptor_v2,
            op::cuArrayDestroy,
            op::cuMipmappedArrayDestroy,
            op::cuTexObjectDestroy,
            op::cuTexObjectGetResourceDesc,
            op::cuSurfObjectDestroy,
        ] {
            for bad in [bad, node, pool] {
                assert_eq!(guest.ask_words(operation, &[bad]), Ok(INVALID_HANDLE), "{operation} {bad:#x}");
            }
        }
        for operation in [op::cuMemRelease, op::cuMemGetAllocationPropertiesFromHandle] {
            for bad in [bad, node, pool] {
                assert_eq!(guest.ask_words(operation, &[bad]), Ok(INVALID_VALUE), "{operation} {bad:#x}");
            }
        }
        for operation in [op::cuMemPoolDestroy, op::cuMemPoolTrimTo] {
            for bad in [bad, node] {
                assert_eq!(guest.ask_words(operation, &[bad, 0]), Ok(INVALID_VALUE), "{operation} {bad:#x}");
            }
        }
        for operation in [
            op::cuGraphNodeGetType,
            op::cuGraphDestroyNode,
            op::cuGraphNodeGetLocalId,
            op::cuGraphMemFreeNodeGetParams,
            op::GRAPH_NODE_PARAMS,
        ] {
            for bad in [bad, pool] {
                assert_eq!(guest.ask_words(operation, &[bad, 0]), Ok(INVALID_VALUE), "{operation} {bad:#x}");
            }
        }
        // The nodes on which a node depends (selection 3), and a node that depends on another.
        assert_eq!(guest.ask_words(op::GRAPH_NODES, &[bad, 3, 8]), Ok(INVALID_VALUE), "{bad:#x}");
        let after = guest.ask(op::GRAPH_ADD, |w| {
            w.word(graph);
            w.bytes(&bad.to_le_bytes());
            w.word(3);
        });
        assert_eq!(after, Ok(INVALID_VALUE), "{bad:#x}");
        // A copy out of an array (a CUDA_MEMCPY3D whose source is one).
        let mut copy = [0; 25];
        (copy[4], copy[7], copy[15]) = (3, bad, 2);
        let copied = guest.ask(op::COPY_BOX, |w| {
            w.bytes(copy.as_bytes());
            [0, 0, 0].into_iter().for_each(|word| w.word(word));
        });
        assert_eq!(copied, Ok(INVALID_HANDLE), "{bad:#x}");
    }
    assert_eq!(guest.ask_words(op::cuGraphNodeGetType, &[node]), Ok(0));
    assert_eq!(guest.ask_words(op::GRAPH_DESTROY, &[graph]), Ok(0));
    assert_eq!(guest.ask_words(op::cuGraphNodeGetType, &[node]), Ok(INVALID_VALUE), "its graph is gone");
}

#[test]
fn bad_handles_are_errors_and_nothing_else() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(1), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(2), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::EVENT_DESTROY, &[event(2)]), Ok(0));
    let newer = handle::make(handle::STREAM, 0, 2, 1);
    let bad = [
        3,
        u64::MAX,
        stream(2),
        newer,
        event(2),
        handle::make(0x7f, 0, 1, 1),
        handle::make(handle::FUNC, 0, 1, 0),
    ];
    for bad in bad {
        for operation in [
            op::STREAM_DESTROY,
            op::STREAM_SYNC,
            op::STREAM_QUERY,
            op::EVENT_DESTROY,
            op::EVENT_SYNC,
            op::EVENT_QUERY,
            op::MODULE_UNLOAD,
            op::LIBRARY_UNLOAD,
            op::GRAPH_DESTROY,
            op::GRAPH_EXEC_DESTROY,
            op::CTX_DESTROY,
        ] {
            assert_eq!(guest.ask_words(operation, &[bad]), Ok(INVALID_HANDLE), "{operation} {bad:#x}");
        }
        for operation in [op::EVENT_RECORD, op::EVENT_ELAPSED, op::GRAPH_LAUNCH, op::GRAPH_UPDATE] {
            assert_eq!(
                guest.ask_words(operation, &[bad, bad, 0]),
                Ok(INVALID_HANDLE),
                "{operation} {bad:#x}"
            );
        }
        assert_eq!(guest.ask_words(op::EVENT_RECORD, &[event(1), bad, 0]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(op::STREAM_WAIT_EVENT, &[stream(1), bad, 0]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(op::COPY_FROM_DEVICE, &[WINDOW, 8, bad, 1]), Ok(INVALID_HANDLE));
        // Fill 8 bytes (cuMemsetD8Async), copy device to device, free: on an invalid stream.
        assert_eq!(guest.ask_words(300, &[WINDOW, 0, 8, bad]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(357, &[WINDOW, WINDOW, 8, bad]), Ok(INVALID_HANDLE));
        assert_eq!(guest.ask_words(360, &[WINDOW, bad]), Ok(INVALID_HANDLE));
        let launch = guest.ask(op::LAUNCH, |w| {
            [bad, 1, 1, 1, 0, 0].into_iter().for_each(|word| w.word(word));
            w.bytes(&[]);
            w.bytes(&[]);
        });
        assert_eq!(launch, Ok(INVALID_HANDLE));
    }
    // A new handle must be of its kind and its slot within bounds.
    for bad in [0, event(5), handle::make(handle::STREAM, 0, 1, 1 << 26), u64::MAX] {
        assert_eq!(guest.ask_words(op::STREAM_CREATE, &[bad, 1, 0]), Ok(INVALID_HANDLE), "{bad:#x}");
    }
    // An invalid context.
    for bad in [1, stream(1), handle::make(handle::CTX, 0, 1, 7), u64::MAX] {
        guest.seq += 1;
        let mut bytes = frame(op::MEM_INFO, guest.seq, |_| {});
        bytes[32..40].copy_from_slice(&bad.to_le_bytes());
        guest.write(&bytes);
        assert_eq!(guest.answer(guest.seq), Ok(INVALID_CONTEXT), "{bad:#x}");
    }
    assert_eq!(guest.ask_words(op::EVENT_RECORD, &[event(1), stream(1), 0]), Ok(0));
    assert_eq!(guest.ask_words(op::STREAM_SYNC, &[stream(1)]), Ok(0));
}

#[test]
fn images_that_lie_about_their_length_are_errors() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let mut fatbin = vec![0; 128];
    fatbin[..8].copy_from_slice(&[0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0]);
    let mut elf = vec![0; 64];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    elf[0x3a..0x3e].copy_from_slice(&[64, 0, 200, 0]);
    let mut wrapper = vec![0; 24];
    wrapper[..4].copy_from_slice(&0x4662_43b1_u32.to_le_bytes());
    wrapper[8..16].copy_from_slice(&WINDOW.to_le_bytes());
    let mut images = vec![elf.clone(), wrapper, b".version 7.0 without an end".to_vec()];
    for far in [113_u64, 1 << 30, u64::MAX] {
        fatbin[8..16].copy_from_slice(&far.to_le_bytes());
        elf[0x28..0x30].copy_from_slice(&far.to_le_bytes());
        images.extend([fatbin.clone(), elf.clone()]);
    }
    for (at, image) in images.iter().enumerate() {
        let hash = blake3::hash(image);
        let sent = guest.ask(op::IMAGE_DATA, |w| {
            w.bytes(hash.as_bytes());
            w.word(image.len() as u64);
            w.bytes(image);
        });
        assert_eq!(sent, Ok(0));
        for (operation, kind) in [(op::MODULE_LOAD, handle::MODULE), (op::LIBRARY_LOAD, handle::LIBRARY)] {
            let loaded = guest.ask(operation, |w| {
                w.word(handle::make(kind, 0, 1, 1));
                w.bytes(hash.as_bytes());
                w.word(0);
            });
            assert_eq!(loaded, Ok(INVALID_IMAGE), "image {at}");
        }
    }
    assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(1), 1, 0]), Ok(0), "the worker continues");
}

#[test]
fn absurd_counts_are_errors_and_nothing_else() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    for len in [(1 << 47) + 1, 1 << 48, u64::MAX] {
        assert_eq!(guest.ask_words(op::COPY_FROM_DEVICE, &[WINDOW, len, 0, 1]), Ok(INVALID_VALUE));
        assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, len, 0, 0]), Ok(INVALID_VALUE));
        let copied = guest.ask(op::COPY_BOX, |w| {
            w.bytes(&[0; 200]);
            [0, 2, len].into_iter().for_each(|word| w.word(word));
        });
        assert_eq!(copied, Ok(INVALID_VALUE));
        let image = guest.ask(op::IMAGE_DATA, |w| {
            w.bytes(&[7; 32]);
            w.word(len);
            w.bytes(&[]);
        });
        assert_eq!(image, Ok(INVALID_VALUE));
        let module = guest.ask(op::MODULE_LOAD, |w| {
            w.word(handle::make(handle::MODULE, 0, 1, 1));
            w.bytes(&[7; 32]);
            w.word(len);
        });
        assert_eq!(module, Ok(INVALID_VALUE));
        // cuMemSetAccess with that many descriptors.
        let access = guest.ask(330, |w| {
            w.word(WINDOW);
            w.word(2 * MIB);
            w.bytes(&[]);
            w.word(len);
        });
        assert_eq!(access, Ok(INVALID_VALUE));
        // Memory to create (cuMemCreate), bytes to fill, at a place and of a length.
        let created = guest.ask(326, |w| {
            w.word(len);
            w.bytes(&[0; 32]);
            w.word(0);
        });
        assert!(matches!(created, Ok(status) if status != 0));
        assert!(matches!(guest.ask_words(300, &[WINDOW, 0, len, 0]), Ok(status) if status != 0));
        let written = guest.ask(op::WRITE_HOST, |w| {
            w.word(len);
            w.word(0);
            w.bytes(&[1; 64]);
        });
        assert_eq!(written, Ok(INVALID_VALUE));
    }
    assert_eq!(guest.ask_words(op::GRAPH_CREATE, &[handle::make(handle::GRAPH, 0, 1, 1), 0]), Ok(0));
    let nodes = guest.ask_words(op::GRAPH_NODES, &[handle::make(handle::GRAPH, 0, 1, 1), 0, u64::MAX]);
    assert_eq!(nodes, Ok(0), "the graph has no node, however many the client would take");
    // A request of which the first parts have not come.
    let continued = guest.ask(op::GRAPH_NODES, |w| {
        w.set_continued();
        w.word(handle::make(handle::GRAPH, 0, 1, 1));
        w.word(1 << 40);
    });
    assert_eq!(continued, Ok(OUT_OF_MEMORY));
    // Memory of the client to mirror: too much, beyond the end of addresses, at address 0, empty.
    for (address, len) in
        [(2 * WINDOW, 1 << 48), (2 * WINDOW, u64::MAX), (u64::MAX - 4095, 4096), (0, 4096), (4096, 0)]
    {
        for kind in 0..6 {
            let mirrored = guest.ask_words(op::MIRROR_HOST, &[1, kind, address, len]);
            assert!(
                matches!(mirrored, Ok(status) if status != 0),
                "{kind}: {len} at {address:#x}: {mirrored:?}"
            );
        }
    }
    // At the worker's window, no managed variable, not allocated, an unknown kind.
    for (kind, at) in [
        (mirror::SAME, WINDOW),
        (mirror::MANAGED, WINDOW),
        (mirror::DEVICE, WINDOW + 2 * MIB),
        (mirror::WATCHED, WINDOW),
        (5, WINDOW),
    ] {
        let mirrored = guest.ask_words(op::MIRROR_HOST, &[1, kind, at, 4096]);
        assert!(matches!(mirrored, Ok(status) if status != 0), "{kind}: {mirrored:?}");
    }
    assert_eq!(guest.ask_words(op::UNMIRROR_HOST, &[1]), Ok(INVALID_VALUE));
    // Inline data of another length than announced.
    let copied = guest.ask(op::COPY_TO_DEVICE, |w| {
        [WINDOW, 4096, 0, 1].into_iter().for_each(|word| w.word(word));
        w.bytes(&[1; 100]);
    });
    assert_eq!(copied, Ok(INVALID_VALUE));
    // An invalid node, kernel or memory.
    assert!(matches!(guest.ask_words(348, &[0x1234]), Ok(status) if status != 0));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
}

#[test]
fn graph_of_a_node_ends_with_the_graph_around_it() {
    const CHILD: u64 = 6;
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let graph = |slot| handle::make(handle::GRAPH, 0, 1, slot);
    for slot in 1..=3 {
        assert_eq!(guest.ask_words(op::GRAPH_CREATE, &[graph(slot), 0]), Ok(0));
    }
    let node = guest.ask_answer(op::GRAPH_ADD, |w| {
        [graph(1), 0, CHILD, graph(2)].into_iter().for_each(|word| w.word(word));
    })[0];
    let child = |guest: &mut Raw, parent| guest.ask_words(op::GRAPH_CHILD, &[graph(4), parent, node]);
    assert_eq!(child(&mut guest, graph(3)), Ok(INVALID_VALUE), "the node is in another graph");
    assert_eq!(child(&mut guest, graph(1)), Ok(0));
    assert_eq!(guest.ask_words(op::GRAPH_DESTROY, &[graph(1)]), Ok(0));
    assert!(matches!(guest.ask_words(op::GRAPH_NODES, &[graph(4), 0, 0]), Ok(status) if status != 0));
}

#[test]
fn mirrors_are_bounded_and_copies_stay_within_them() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    const AT: u64 = 0x10_0000;
    const HALF: u64 = STAGING / 4;
    let mirrored = |guest: &mut Raw, id: u64, len: u64| {
        guest.ask_words(op::MIRROR_HOST, &[id, mirror::ANYWHERE, AT + 24, len])
    };
    assert_eq!(mirrored(&mut guest, 1, 4096), Ok(0));
    assert_eq!(mirrored(&mut guest, 1, 4096), Ok(INVALID_VALUE), "a number that is in use");
    assert_eq!(mirrored(&mut guest, 2, HALF), Ok(0));
    // A mirror and the bytes that the client knows are two copies.
    assert_eq!(mirrored(&mut guest, 3, HALF), Ok(OUT_OF_MEMORY));
    worker.wait_for(|m| matches!(m, FromWorker::StagingFull { bytes } if *bytes == STAGING + 2 * 4096));
    assert_eq!(guest.ask_words(op::UNMIRROR_HOST, &[2]), Ok(0));
    assert_eq!(mirrored(&mut guest, 3, HALF), Ok(0), "what is given up counts no more");
    let write = |guest: &mut Raw, offset: u64, len: usize| {
        guest.ask(op::WRITE_HOST, |w| {
            w.word(1);
            w.word(offset);
            w.bytes(&vec![1; len]);
        })
    };
    assert_eq!(write(&mut guest, 4000, 96), Ok(0));
    for (offset, len) in [(4000, 97), (4096, 1), (u64::MAX, 1), (u64::MAX - 7, 8)] {
        assert_eq!(write(&mut guest, offset, len), Ok(INVALID_VALUE), "{len} at {offset}");
    }
    // Copies of one row between device memory and a mirror: source offset, length, regions of
    // source and target.
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let copy = |guest: &mut Raw, offset: u64, len: u64, regions: [u64; 2]| {
        const HOST: u64 = 1;
        const DEVICE: u64 = 2;
        let source = [0, 0, 0, 0, HOST, offset, 0, 0, 0, len, 1];
        let target = [0, 0, 0, 0, DEVICE, 0, WINDOW, 0, 0, len, 1];
        let words: Vec<u8> =
            source.iter().chain(&target).chain(&[len, 1, 1]).flat_map(|w| w.to_le_bytes()).collect();
        guest.ask(op::COPY_HOST, |w| {
            w.word(0);
            regions.iter().for_each(|region| w.word(*region));
            w.bytes(&words);
        })
    };
    assert_eq!(copy(&mut guest, 96, 4000, [1, 0]), Ok(0));
    for (offset, len, regions) in
        [(97, 4000, [1, 0]), (u64::MAX, 8, [1, 0]), (0, 8, [0, 0]), (0, 8, [9, 0]), (0, 8, [1, 1])]
    {
        assert_eq!(
            copy(&mut guest, offset, len, regions),
            Ok(INVALID_VALUE),
            "{len} at {offset} {regions:?}"
        );
    }
}

#[test]
fn lanes_without_the_secret_are_refused() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut early = worker.stranger(FIRST_UP_LANE);
    early.write(&frame(op::LANE, 1, |w| w.bytes(&[0; 32])));
    assert!(early.refusal().contains("lane before the greeting"));
    assert!(worker.refusal().contains("lane before the greeting"));

    let mut guest = worker.guest();
    let right = *blake3::keyed_hash(&guest.secret, &FIRST_UP_LANE.to_le_bytes()).as_bytes();
    let wrong = "lane without the secret of the first one";
    let cases: [(u16, u16, &[u8], &str); 7] = [
        (FIRST_UP_LANE, op::LANE, &[0; 32], wrong),
        (FIRST_UP_LANE, op::LANE, &right[..31], wrong),
        (FIRST_UP_LANE, op::LANE, &[], wrong),
        // The proof of one lane does not fit another.
        (FIRST_UP_LANE + 1, op::LANE, &right, wrong),
        (FIRST_DOWN_LANE, op::LANE, &right, wrong),
        (0, op::LANE, &right, "unexpected first frame"),
        (FIRST_UP_LANE, op::HELLO, &right, "unexpected first frame"),
    ];
    for (number, operation, proof, reason) in cases {
        let mut stranger = worker.stranger(number);
        stranger.write(&frame(operation, 1, |w| w.bytes(proof)));
        // A client that knows the greeting receives the reason; the worker closes any other
        // connection.
        if reason == wrong {
            assert_eq!(stranger.refusal(), wrong);
        } else {
            assert!(stranger.hung_up());
        }
        let refusal = worker.refusal();
        assert!(refusal.contains(reason), "{refusal}, not {reason}");
    }
    for number in [FIRST_DOWN_LANE + DOWN_LANES, u16::MAX] {
        assert!(lane(&worker, &guest, number).refusal().contains("does not exist"));
        assert!(worker.refusal().contains("does not exist"));
    }
    // A lane has one connection: further ones would each keep memory and counters.
    let first = lane(&worker, &guest, FIRST_UP_LANE);
    worker.wait_for(|m| matches!(m, FromWorker::Admitted { lane: FIRST_UP_LANE, .. }));
    assert!(lane(&worker, &guest, FIRST_UP_LANE).refusal().contains("is open already"));
    assert!(worker.refusal().contains("is open already"));
    drop(first);
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
}

#[test]
fn chunks_that_do_not_fit_are_errors() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    // For a transfer that no frame announces.
    send_chunk(&mut up, 1 << 40, 0, &[1; 4096]);
    // Outside the transfer, longer than it, and at an offset that wraps around.
    let outside = [(200_000, 8), (0, 200_008), (199_996, 8), (u64::MAX - 7, 16), (u64::MAX, 8)];
    let mut lanes: Vec<Raw> = (1..5).map(|i| lane(&worker, &guest, FIRST_UP_LANE + i)).collect();
    for (i, (offset, len)) in outside.into_iter().enumerate() {
        send_chunk(&mut lanes[i % 4], guest.seq + 1, offset, &pattern(len, 1));
        let status = guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 200_000, 0, 0]);
        assert_eq!(status, Ok(INVALID_VALUE), "{len} bytes at {offset}");
    }
    let good = pattern(200_000, 2);
    send_chunk(&mut lanes[2], guest.seq + 1, 0, &good);
    assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 200_000, 0, 0]), Ok(0));

    // A malformed chunk ends the lane, and transfers fail instead of waiting forever for bytes.
    let mut long = chunk_header(2, 7, 0, CHUNK + 8, 0);
    long.len = ((CHUNK + 8) as u32).into();
    up.write(long.as_bytes());
    assert!(up.refusal().contains("not a chunk"));
    assert!(worker.refusal().contains("not a chunk"));
    assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 200_000, 0, 0]), Ok(46));
    assert_eq!(guest.ask_words(op::MEM_INFO, &[]), Ok(0));
    guest.close();
    assert_eq!(worker.ended(), "the client's process exited");
}

#[test]
fn chunks_of_a_failed_copy_are_discarded() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    // More chunks than the lane has room for, before and after the failure; the stream is invalid.
    let bytes = pattern(100_000, 3);
    let failing = guest.seq + 1;
    send_chunk(&mut up, failing, 0, &bytes);
    let words = [WINDOW, 10 * 100_000, stream(7), 0];
    assert!(matches!(guest.ask_words(op::COPY_TO_DEVICE, &words), Ok(status) if status != 0));
    for i in 1..10 {
        send_chunk(&mut up, failing, i * 100_000, &bytes);
    }
    send_chunk(&mut up, guest.seq + 1, 0, &bytes);
    assert_eq!(guest.ask_words(op::COPY_TO_DEVICE, &[WINDOW, 100_000, 0, 0]), Ok(0));
    // A copy to the program that fails also ends if no reply is awaited.
    let seq = guest.seq + 1;
    let mut read = frame_of(1, op::COPY_FROM_DEVICE, seq, |w| {
        [WINDOW, 100_000, stream(7), 0].into_iter().for_each(|word| w.word(word));
    });
    no_wait(&mut read);
    guest.seq = seq;
    guest.write(&read);
    let (header, _) = guest.frame().expect("its end");
    assert_eq!((header.op.get(), header.seq.get()), (op::LANDED, seq));
    assert_ne!(header.ctx.get(), 0);
}

#[test]
fn an_address_that_wraps_around_is_an_error() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    let mut up = lane(&worker, &guest, FIRST_UP_LANE);
    send_chunk(&mut up, guest.seq + 1, 8, &[1; 100_000]);
    send_chunk(&mut up, guest.seq + 1, 100_008, &[1; 99_992]);
    let status = guest.ask_words(op::COPY_TO_DEVICE, &[u64::MAX - 3, 199_992, 0, 0]);
    assert!(matches!(status, Ok(status) if status != 0), "{status:?}");
}

/// Returns a `CUDA_MEMCPY3D` of `width` times 2 bytes; memory types are 1 host, 2 device.
fn copy_of_box(source: (u64, u64), target: (u64, u64), width: u64) -> [u64; 25] {
    let mut words = [0; 25];
    let side = |words: &mut [u64], (kind, address): (u64, u64)| {
        words[0] = kind;
        words[if kind == 1 { 1 } else { 2 }] = address;
        (words[5], words[6]) = (width, 2);
    };
    side(&mut words[4..], source);
    side(&mut words[15..], target);
    (words[22], words[23], words[24]) = (width, 2, 1);
    words
}

#[test]
fn boxes_do_not_reach_the_worker_s_own_memory() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 4 * MIB, 0]), Ok(0));
    let device = (2, WINDOW);
    let mut copy = |words: [u64; 25], direction: u64, len: u64| {
        guest.ask(op::COPY_BOX, |w| {
            w.bytes(words.as_bytes());
            [0, direction, len].into_iter().for_each(|word| w.word(word));
            if direction == 1 {
                w.bytes(&vec![1; len as usize]);
            }
        })
    };
    assert_eq!(copy(copy_of_box(device, (1, 0), 4096), 2, 8192), Ok(0));
    assert_eq!(copy(copy_of_box((1, 0), device, 4096), 1, 8192), Ok(0));
    assert_eq!(copy(copy_of_box(device, (2, WINDOW + MIB), 4096), 0, 8192), Ok(0));
    // A packed side that is shorter than the box.
    assert_eq!(copy(copy_of_box((1, 0), device, MIB), 1, 8), Ok(INVALID_VALUE));
    assert_eq!(copy(copy_of_box(device, (1, 0), MIB), 2, 8), Ok(INVALID_VALUE));
    // Host addresses although both sides are on the device.
    assert_eq!(copy(copy_of_box((1, 4096), device, 4096), 0, 8192), Ok(INVALID_VALUE));
    assert_eq!(copy(copy_of_box(device, (1, 4096), 4096), 0, 8192), Ok(INVALID_VALUE));
}

/// Requests more bytes than the worker can send to a client that does not read.
fn ask_for_much(guest: &mut Raw, threads: u32, requests: u64) -> u64 {
    assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 2 * MIB, 0]), Ok(0));
    let first = guest.seq + 1;
    for i in 0..requests {
        guest.seq += 1;
        let request = frame_of(1 + i as u32 % threads, op::COPY_FROM_DEVICE, guest.seq, |w| {
            [WINDOW, INLINE_MAX as u64, 0, 1].into_iter().for_each(|word| w.word(word));
        });
        guest.write(&request);
    }
    first
}

#[test]
fn a_client_that_does_not_read_cannot_keep_its_worker_from_ending() {
    let machine = Machine::new();
    for stop in [true, false] {
        let mut worker = Worker::start(&machine);
        let mut guest = worker.guest();
        ask_for_much(&mut guest, 1, 1000);
        // Waits until the answers have filled all buffers between the two.
        let deadline = Instant::now() + TEST_TIMEOUT;
        let (mut unread, mut since) = (0, Instant::now());
        while unread == 0 || since.elapsed() < Duration::from_millis(200) {
            assert!(Instant::now() < deadline, "no answers");
            let now = waiting_to_be_read(&guest);
            if now != unread {
                (unread, since) = (now, Instant::now());
            }
            std::thread::yield_now();
        }
        if stop {
            worker.tell(&ToWorker::Stop { reason: "enough".into() });
            worker.ended_within(Duration::from_secs(5));
        } else {
            worker.abandoned();
        }
    }
}

fn waiting_to_be_read(guest: &Raw) -> i32 {
    use std::os::fd::AsRawFd;
    let mut bytes: i32 = 0;
    // SAFETY: FIONREAD writes one int, which `bytes` is.
    let done = unsafe { nix::libc::ioctl(guest.stream.as_raw_fd(), nix::libc::FIONREAD, &raw mut bytes) };
    assert_eq!(done, 0);
    bytes
}

#[test]
fn answers_stay_whole_when_the_client_reads_slowly() {
    let machine = Machine::new();
    let mut worker = Worker::start(&machine);
    let mut guest = worker.guest();
    const REQUESTS: u64 = 800;
    let first = ask_for_much(&mut guest, 4, REQUESTS);
    let mut open: std::collections::HashSet<u64> = (first..first + REQUESTS).collect();
    while !open.is_empty() {
        let (header, body) = guest.frame().expect("an answer");
        assert_eq!((header.op.get(), header.ctx.get()), (op::REPLY, 0));
        assert_eq!(body.len(), 8 + INLINE_MAX);
        assert_eq!(Reader::new(&body).bytes().map(<[u8]>::len), Ok(INLINE_MAX));
        assert!(open.remove(&header.seq.get()), "answered once");
    }
}

#[test]
fn random_frames_never_hang_a_worker() {
    let machine = Machine::new();
    // For a longer search: WORKER_FUZZ="seed seconds".
    let wanted = std::env::var("WORKER_FUZZ").unwrap_or_else(|_| "1 4".into());
    let (seed, seconds) = wanted.split_once(' ').expect("two numbers");
    let (seed, seconds): (u64, u64) = (seed.parse().expect("a number"), seconds.parse().expect("a number"));
    let mut random = Random::new(0x9e37_79b9_7f4a_7c15 ^ seed << 17);
    let until = Instant::now() + Duration::from_secs(seconds);
    let (mut rounds, mut calls, mut done) = (0, 0, 0);
    while Instant::now() < until || rounds < 8 || done <= 20 {
        let mut worker = Worker::start(&machine);
        let pid = worker.pid();
        let mut guest = worker.guest();
        assert_eq!(guest.ask_words(op::ALLOC, &[WINDOW, 4 * MIB, 0]), Ok(0));
        for slot in 0..2 {
            assert_eq!(guest.ask_words(op::STREAM_CREATE, &[stream(slot), 1, 0]), Ok(0));
            assert_eq!(guest.ask_words(op::EVENT_CREATE, &[event(slot), 0]), Ok(0));
        }
        let mut sent = Vec::new();
        let (mut expected, mut answered) = (0, 0);
        if rounds % 16 == 0 {
            expected = 1;
            sent = pattern(1 + random.below(5000) as usize, random.draw());
        } else {
            for seq in guest.seq + 1..guest.seq + 1 + random.below(60) {
                let mut bytes = sensible(&mut random, seq);
                expected += 1;
                // Most frames stay as they are, others get a few changed bytes; the length field
                // rarely changes.
                if random.below(16) == 0 {
                    for _ in 0..1 + random.below(3) {
                        let from = if random.below(16) == 0 { 0 } else { 4 };
                        let at = from + random.below((bytes.len() - from) as u64) as usize;
                        bytes[at] = random.draw() as u8;
                    }
                }
                sent.extend_from_slice(&bytes);
            }
        }
        guest.write(&sent);
        // Does not wait for frames that wait for something that never comes.
        let _ = guest.stream.set_read_timeout(Some(Duration::from_millis(100)));
        while answered < expected {
            match guest.frame_if_any() {
                Some((header, _)) if header.op.get() == op::REPLY => {
                    (answered, calls) = (answered + 1, calls + 1);
                    done += u64::from(header.ctx.get() == 0);
                }
                Some(_) => {}
                None => break,
            }
        }
        guest.close();
        worker.exited();
        assert!(!exists(pid));
        rounds += 1;
    }
    println!("{rounds} workers answered {calls} calls, {done} of them with success");
}

/// Returns a frame that is valid by itself, if not after the others.
fn sensible(random: &mut Random, seq: u64) -> Vec<u8> {
    // All but copies of boxes: see `boxes_do_not_reach_the_worker_s_own_memory`.
    let operations: Vec<u16> = (op::CTX_CREATE..=op::SHARE_POINTER_IMPORT)
        .chain(300..=412)
        .filter(|operation| !matches!(operation, 18 | 19 | 29 | 36..=39 | 53..=59 | 63..=69 | &op::COPY_BOX))
        .collect();
    let operation = operations[random.below(operations.len() as u64) as usize];
    let thread = 1 + random.below(3) as u32;
    let slot = random.below(3) as u32;
    let words = random.below(7);
    let kind = match operation {
        3..=9 => handle::CTX,
        20..=29 => handle::STREAM,
        30..=35 => handle::EVENT,
        40..=48 => handle::MODULE,
        49..=60 => handle::FUNC,
        70..=79 if random.below(2) == 0 => handle::EXEC,
        70..=79 => handle::GRAPH,
        _ => handle::STREAM,
    };
    // Small numbers are lengths of strings, too: with them, most frames can be read to their end.
    let small = random.below(4) > 0;
    let len = random.below(100) as usize;
    frame_of(thread, operation, seq, |w| {
        for i in 0..words {
            let word = match random.below(6) {
                _ if i == 0 && (20..80).contains(&operation) => handle::make(kind, 0, 1, slot),
                _ if small && i > 2 => random.below(4),
                0 => WINDOW + random.below(4) * 2 * MIB,
                1 => 2 * MIB,
                2 => random.below(4),
                3 => handle::make(kind, 0, 1, slot),
                4 => stream(slot),
                _ => len as u64,
            };
            w.word(word);
        }
        if random.below(2) == 0 {
            w.bytes(&vec![7; len]);
            w.bytes(&[7; 32]);
        }
        w.words(&[0; 256]);
    })
}
