use super::*;
use crate::generate;

const BUFFERS: [Buffer; 3] = [
    Buffer { kind: Kind::Device, size: 1024 },
    Buffer { kind: Kind::Pinned(0), size: 1024 },
    Buffer { kind: Kind::Pageable, size: 1024 },
];
const STREAMS: [StreamKind; 4] =
    [StreamKind::Legacy, StreamKind::Blocking, StreamKind::NonBlocking, StreamKind::NonBlocking];

fn span(buffer: usize) -> Span {
    Span { buffer, offset: 0, len: 1024 }
}

fn copy(to: usize, from: usize) -> Work {
    Work::Copy { to: span(to), from: span(from), typed: true }
}

/// Applies steps of the first thread; the last one has this outcome.
fn last(threads: usize, steps: &[(usize, Op)]) -> Result<(), Conflict> {
    last_of(&STREAMS, threads, steps)
}

fn last_of(kinds: &[StreamKind], threads: usize, steps: &[(usize, Op)]) -> Result<(), Conflict> {
    let mut order = Order::new(threads, kinds, &BUFFERS, 2);
    for buffer in 0..3 {
        order.apply(&Step { thread: 0, op: Op::Allocate(buffer) }).expect("the buffer is new");
    }
    let (last, before) = steps.split_last().expect("a test has steps");
    for (thread, op) in before {
        order.apply(&Step { thread: *thread, op: op.clone() }).expect("valid before the last step");
    }
    order.apply(&Step { thread: last.0, op: last.1.clone() })
}

#[test]
fn a_stream_must_be_ordered_behind_the_stream_that_wrote() {
    let wrote = Op::Enqueue(copy(0, 1), 2);
    let reads = Op::Enqueue(copy(1, 0), 3);
    let conflict = last(1, &[(0, wrote.clone()), (0, reads.clone())]);
    assert!(matches!(conflict, Err(Conflict::Stream(3, Stamp { agent: 3, .. }))), "{conflict:?}");
    let by_event = [(0, wrote.clone()), (0, Op::Record(0, 2)), (0, Op::WaitEvent(3, 0)), (0, reads.clone())];
    assert_eq!(last(1, &by_event), Ok(()));
    assert_eq!(last(1, &[(0, wrote), (0, Op::SyncStream(2)), (0, reads)]), Ok(()));
}

#[test]
fn the_legacy_stream_orders_blocking_streams_only() {
    let wrote = Op::Enqueue(copy(0, 1), 1);
    let in_legacy = Op::Enqueue(copy(1, 0), 0);
    assert_eq!(last(1, &[(0, wrote), (0, in_legacy.clone())]), Ok(()));
    let apart = Op::Enqueue(copy(0, 1), 2);
    assert!(last(1, &[(0, apart), (0, in_legacy)]).is_err());
}

#[test]
fn an_event_in_a_stream_without_work_does_not_wait_for_the_legacy_stream() {
    let in_legacy = Op::Call(Work::Fill { to: span(0), value: 0, width: 4 });
    let by_event = [(0, Op::Record(0, 1)), (0, Op::WaitEvent(2, 0)), (0, Op::Enqueue(copy(1, 0), 2))];
    let steps = |before: &[(usize, Op)]| [before, &by_event].concat();
    let filled = Op::Enqueue(Work::Fill { to: span(1), value: 0, width: 4 }, 1);
    assert!(last(1, &steps(&[(0, in_legacy.clone())])).is_err(), "no work between");
    assert_eq!(last(1, &steps(&[(0, in_legacy), (0, filled)])), Ok(()));
}

#[test]
fn an_early_read_of_pinned_memory_needs_an_event_of_the_writer() {
    // The legacy stream writes pinned memory that a blocking stream copies.
    let wrote = (0, Op::Enqueue(Work::Fill { to: span(1), value: 0, width: 4 }, 0));
    let read = (0, Op::Enqueue(copy(0, 1), 1));
    let event = |stream| [(0, Op::Record(0, stream)), (0, Op::WaitEvent(1, 0))];
    assert!(last(1, &[wrote.clone(), read.clone()]).is_err());
    let direct = [std::slice::from_ref(&wrote), &event(0), std::slice::from_ref(&read)].concat();
    assert_eq!(last(1, &direct), Ok(()));
    // Work on a third stream that follows the legacy one does not stand for it.
    let third = (0, Op::Enqueue(Work::Fill { to: span(0), value: 0, width: 4 }, 3));
    let kinds = [StreamKind::Legacy, StreamKind::Blocking, StreamKind::NonBlocking, StreamKind::Blocking];
    let indirect = [&[wrote, third][..], &event(3), &[read]].concat();
    assert!(last_of(&kinds, 1, &indirect).is_err());
}

#[test]
fn kept_programs_are_valid() {
    for text in [include_str!("../../programs/65428.json"), include_str!("../../programs/71651.json")] {
        let program: Program = serde_json::from_str(text).expect("a program");
        assert_eq!(Order::check(&program), Ok(()), "{}", program.seed);
    }
}

#[test]
fn the_program_has_pageable_memory_when_the_copy_returns() {
    let defined = Op::Call(Work::Fill { to: span(0), value: 0, width: 4 });
    let touch = |buffer| Op::Touch(Work::HostMix { to: span(buffer), from: span(buffer), salt: 1, sleep: 0 });
    let copied = |buffer| Op::Enqueue(copy(buffer, 0), 1);
    assert_eq!(last(1, &[(0, defined.clone()), (0, copied(2)), (0, touch(2))]), Ok(()));
    assert!(last(1, &[(0, defined), (0, copied(1)), (0, touch(1))]).is_err(), "pinned memory comes later");
}

#[test]
fn threads_are_ordered_by_waiting_for_each_other() {
    let touch = Op::Touch(Work::HostMix { to: span(2), from: span(1), salt: 1, sleep: 0 });
    let conflict = last(2, &[(0, touch.clone()), (1, touch.clone())]);
    assert!(matches!(conflict, Err(Conflict::Thread(Stamp { agent: 0, .. }))), "{conflict:?}");
    assert_eq!(last(2, &[(0, touch.clone()), (1, Op::Await(3)), (1, touch)]), Ok(()));
}

#[test]
fn nodes_that_share_memory_need_an_edge() {
    let define = |after| {
        let node = |lane, after| Node { work: copy(1, 0), lane, after };
        Op::Define(0, Build::Nodes, vec![node(0, Vec::new()), node(1, after)])
    };
    let defined = (0, Op::Call(Work::Fill { to: span(0), value: 0, width: 4 }));
    assert_eq!(last(1, &[defined.clone(), (0, define(Vec::new()))]), Err(Conflict::Nodes(0, 1)));
    assert_eq!(last(1, &[defined, (0, define(vec![0]))]), Ok(()));
}

#[test]
fn a_graph_reads_pageable_memory_when_it_is_launched() {
    let node = |work, lane, after| Node { work, lane, after };
    let define = |nodes| (0, Op::Define(0, Build::Nodes, nodes));
    let defined = |buffer| (0, Op::Call(Work::Fill { to: span(buffer), value: 0, width: 4 }));
    let filled = [
        defined(0),
        defined(1),
        (0, Op::Touch(Work::HostMix { to: span(2), from: span(1), salt: 1, sleep: 0 })),
    ];
    let steps = |more: &[(usize, Op)]| [&filled[..], more].concat();
    let launch = (0, Op::Launch(0, 1));
    let graph = define(vec![node(copy(0, 2), 0, Vec::new())]);
    assert_eq!(last(1, &steps(&[graph.clone(), launch.clone()])), Ok(()));
    // A host function that precedes the launch on its stream, and one in the graph.
    let before = Work::HostMix { to: span(2), from: span(1), salt: 1, sleep: 0 };
    let written = (0, Op::Enqueue(before, 1));
    assert!(matches!(
        last(1, &steps(&[graph.clone(), written.clone(), launch.clone()])),
        Err(Conflict::Thread(_))
    ));
    let waited = (0, Op::SyncStream(1));
    assert_eq!(last(1, &steps(&[graph, written, waited, launch])), Ok(()));
    let both = define(vec![node(before, 0, Vec::new()), node(copy(0, 2), 0, Vec::new())]);
    assert_eq!(last(1, &steps(&[both])), Err(Conflict::Impossible));
}

#[test]
fn a_free_comes_after_the_end_of_a_graph_that_names_the_buffer() {
    let kinds = [StreamKind::NonBlocking];
    let buffers = [Buffer { kind: Kind::Pinned(0), size: 256 }];
    let mut order = Order::new(2, &kinds, &buffers, 0);
    let fill = Work::Fill { to: Span { buffer: 0, offset: 0, len: 64 }, value: 1, width: 4 };
    let graph = vec![Node { work: fill, lane: 0, after: Vec::new() }];
    let mut on = |thread, op| order.apply(&Step { thread, op });
    on(0, Op::Allocate(0)).unwrap();
    on(1, Op::Await(0)).unwrap();
    on(1, Op::Define(0, Build::Nodes, graph)).unwrap();
    assert!(on(0, Op::Free(0)).is_err(), "the graph names it");
    on(1, Op::Destroy(0)).unwrap();
    assert!(matches!(on(0, Op::Free(0)), Err(Conflict::Thread(_))), "another thread destroyed the graph");
    on(0, Op::Await(3)).unwrap();
    on(0, Op::Free(0)).unwrap();
}

#[test]
fn a_refused_step_changes_nothing() {
    // A step that is refused once for a race is refused again for the same one.
    for seed in 0..20 {
        let program = generate::program(seed);
        let mut order = Order::new(program.threads, &program.streams, &program.buffers, program.events);
        for step in &program.steps {
            for other in &program.steps[..program.steps.len().min(8)] {
                let (mut first, mut second) = (order.clone(), order.clone());
                if let Err(conflict) = first.apply(other) {
                    assert_eq!(first.apply(other), Err(conflict));
                    assert_eq!(second.apply(step), Ok(()));
                    assert_eq!(first.apply(step), Ok(()), "seed {seed}: {other:?} left something");
                }
            }
            order.apply(step).expect("generated programs are valid");
        }
    }
}

#[test]
fn generated_programs_use_every_operation() {
    let mut names = std::collections::BTreeSet::new();
    for seed in 0..400 {
        let program = generate::program(seed);
        assert_eq!(Order::check(&program), Ok(()), "seed {seed}");
        for step in &program.steps {
            let name = format!("{:?}", step.op);
            names.insert(name.split(['(', ' ']).next().expect("a name").to_owned());
        }
    }
    assert_eq!(names.len(), 25, "{names:?}");
}
