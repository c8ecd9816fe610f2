//! Order between client threads: objects of a frame, and frames that wait.

use gpusession_proto::frame::{CONTINUED, INLINE_MAX, Reader, WAIT, direction, op};
use gpusession_proto::launch;

use crate::calls;
use crate::frame::Frame;
use crate::handles::Table;
use crate::objects::Stream;

mod touched;

pub use touched::{Sum, Touched};

/// Size of `CUDA_MEMCPY3D`, in bytes.
pub const BOX: usize = 200;

/// Returns `true` if the replay waits for the GPU, or for bytes that are still on their way.
pub fn may_block(frame: &Frame) -> bool {
    let operation = frame.header.op.get();
    // A client sends a `STREAM_SYNC` without reply when little is left to wait for: a barrier.
    calls::waits(operation) && (operation != op::STREAM_SYNC || frame.header.flags.get() & WAIT != 0)
}

/// Returns `true` for a copy to the device whose bytes arrive on the lanes.
///
/// Its replay waits for them.
pub fn is_bulk(frame: &Frame) -> bool {
    const INLINE: usize = 3;
    match frame.header.op.get() {
        op::COPY_TO_DEVICE => frame.body.get(INLINE * 8).is_some_and(|inline| *inline == 0),
        op::COPY_BOX => {
            box_on_lanes(word_behind_box(frame, DIRECTION), word_behind_box(frame, LENGTH) as usize)
        }
        _ => false,
    }
}

/// Returns the bytes that come on the lanes for a frame that [`is_bulk`].
pub fn bulk_len(frame: &Frame) -> u64 {
    const LEN: usize = 1;
    match frame.header.op.get() {
        op::COPY_BOX => word_behind_box(frame, LENGTH),
        _ => frame.body.get(8 * LEN..).and_then(|b| b.first_chunk()).map_or(0, |b| u64::from_le_bytes(*b)),
    }
}

/// Returns `true` if the bytes of a `COPY_BOX` come on the lanes.
pub fn box_on_lanes(to: u64, len: usize) -> bool {
    to == direction::UP_BY_LANES || to == direction::UP && len > INLINE_MAX
}

/// Returns `true` for a copy from the device whose bytes the program expects without a reply.
pub fn is_unawaited_download(frame: &Frame) -> bool {
    let download = match frame.header.op.get() {
        op::COPY_FROM_DEVICE => true,
        op::COPY_BOX => word_behind_box(frame, DIRECTION) == direction::DOWN,
        _ => false,
    };
    download && frame.header.flags.get() & WAIT == 0
}

/// Returns `true` for a copy that the replay waits for and the program does not.
///
/// The other streams of its thread need not wait for it either.
pub fn is_unawaited_copy(frame: &Frame) -> bool {
    is_bulk(frame) || is_unawaited_download(frame)
}

/// Returns `true` for a frame that stays behind no kept frame.
///
/// A program's change of shared memory is the device's at once, as on a local card. Kept behind its
/// own thread, it could arrive after another thread's launch. The end of a host function follows
/// its changes, and every kept frame may wait for it.
pub fn overtakes(frame: &Frame) -> bool {
    matches!(frame.header.op.get(), op::WRITE_HOST | op::HOST_FUNC_DONE)
}

/// Returns `true` if an earlier frame, which is not done, is work that a query asks about.
///
/// The answer to the query is then known: a program may ask and continue, as on a local card.
pub fn is_unfinished(query: (&Frame, &Touched), earlier: (&Frame, &Touched)) -> bool {
    let ((query, asked), (earlier, work)) = (query, earlier);
    let named = |objects: &[u64]| asked.objects.first().is_some_and(|object| objects.contains(object));
    match (query.header.op.get(), earlier.header.op.get()) {
        (op::EVENT_QUERY, op::EVENT_RECORD) => work.objects.first().is_some_and(|event| named(&[*event])),
        (op::EVENT_QUERY, op::LAUNCH | op::GRAPH_LAUNCH) => {
            let mut events = Touched::default();
            recorded(earlier).into_iter().for_each(|event| events.object(event));
            named(&events.objects)
        }
        (op::STREAM_QUERY, op::STREAM_CREATE | op::STREAM_DESTROY) => false,
        (op::STREAM_QUERY, _) if work.only_waits => false,
        (op::STREAM_QUERY, _) if asked.default.is_some() => {
            work.default == asked.default && query.header.ctx.get() == earlier.header.ctx.get()
        }
        (op::STREAM_QUERY, _) => named(&work.objects),
        _ => false,
    }
}

/// Returns `true` if a frame asks about work of one of `earlier`, whose sum is `sum`.
pub fn asks_about<'a>(
    query: (&Frame, &Touched),
    sum: &Sum,
    mut earlier: impl Iterator<Item = (&'a Frame, &'a Touched)>,
) -> bool {
    let (frame, asked) = query;
    matches!(frame.header.op.get(), op::EVENT_QUERY | op::STREAM_QUERY)
        && (asked.default.is_some() || asked.objects.first().is_some_and(|object| sum.touches(*object)))
        && earlier.any(|work| is_unfinished(query, work))
}

/// Determines the objects of a frame that matter for the order between client threads.
#[expect(clippy::too_many_lines, reason = "one `match` over the operations")]
pub fn touches(streams: &Table<Stream>, frame: &Frame) -> Touched {
    let mut touched = Touched::default();
    let mut r = Reader::new(&frame.body);
    let mut words = [0; 6];
    for word in &mut words {
        match r.word() {
            Ok(value) => *word = value,
            Err(_) => break,
        }
    }
    if frame.header.op.get() == op::BODY_PART || frame.header.flags.get() & CONTINUED != 0 {
        touched.object(PARTS | u64::from(frame.thread()));
    }
    match frame.header.op.get() {
        op::LAUNCH => {
            touched.object(words[0]);
            touched.stream(streams, words[5]);
            recorded(frame).into_iter().for_each(|event| touched.object(event));
        }
        op::COPY_TO_DEVICE | op::COPY_FROM_DEVICE => touched.stream(streams, words[2]),
        op::COPY_BOX => touched.stream(streams, word_behind_box(frame, STREAM)),
        op::STREAM_SYNC | op::STREAM_QUERY => {
            touched.stream(streams, words[0]);
            touched.only_waits = true;
            // The program did not wait for this frame, and assumes that the work before it is
            // complete.
            touched.barrier = frame.header.flags.get() & WAIT == 0;
        }
        op::EVENT_SYNC | op::EVENT_QUERY => {
            touched.object(words[0]);
            touched.only_waits = true;
        }
        op::EVENT_ELAPSED => {
            touched.object(words[0]);
            touched.object(words[1]);
            touched.only_waits = true;
        }
        op::CTX_SYNC
        | op::FREE
        | op::MODULE_UNLOAD
        | op::LIBRARY_UNLOAD
        | op::CTX_DESTROY
        | op::GREEN_DESTROY
        | op::CORE_DUMP
        | op::PRIMARY_RESET => {
            touched.everything = true;
            touched.only_waits = true;
            // The program may use the context again, in any thread.
            touched.barrier =
                frame.header.op.get() == op::PRIMARY_RESET && frame.header.flags.get() & WAIT == 0;
        }
        // The program may give a freed address to another mirror before the worker has freed it.
        op::UNMIRROR_HOST => {
            touched.everything = true;
            touched.object(MIRRORS);
        }
        op::MIRROR_HOST => {
            touched.object(MIRRORS);
            touched.only_waits = true;
        }
        op::EVENT_RECORD => {
            touched.object(words[0]);
            touched.stream(streams, words[1]);
        }
        op::STREAM_WAIT_EVENT => {
            touched.stream(streams, words[0]);
            touched.object(words[1]);
        }
        op::STREAM_BATCH
        | op::COPY_HOST
        | op::STREAM_CREATE
        | op::STREAM_DESTROY
        | op::CAPTURE_BEGIN
        | op::HOST_FUNC => touched.stream(streams, words[0]),
        // Works on all streams of a context.
        op::CTX_EVENT => {
            touched.everything = true;
            touched.barrier = true;
        }
        op::CAPTURE_UPDATE | op::CAPTURE_INFO | op::MAP_ARRAYS | op::DECOMPRESS => {
            touched.stream(streams, words[0])
        }
        op::DEV_RESOURCE if words[0] == 3 => touched.stream(streams, words[1]),
        op::GRAPH_DRAW | op::USER_OBJECT_CREATE => touched.object(words[0]),
        op::CAPTURE_END => {
            touched.stream(streams, words[0]);
            touched.object(words[1]);
        }
        op::GRAPH_LAUNCH => {
            touched.object(words[0]);
            touched.stream(streams, words[1]);
            words_behind(frame, GRAPH_EVENTS + 1).for_each(|event| touched.object(event));
            // Its other events are in frames before it.
            let continued = frame.header.flags.get() & CONTINUED != 0;
            touched.everything |= continued;
            touched.barrier |= continued;
        }
        op::GRAPH_INSTANTIATE | op::GRAPH_CLONE | op::GRAPH_UPDATE => {
            touched.object(words[0]);
            touched.object(words[1]);
        }
        op::EVENT_CREATE
        | op::EVENT_DESTROY
        | op::SHARE_EVENT
        | op::SHARE_EVENT_OPEN
        | op::GRAPH_CREATE
        | op::GRAPH_DESTROY
        | op::GRAPH_NODES
        | op::GRAPH_ADD
        | op::GRAPH_EXEC_SET
        | op::GRAPH_EXEC_DESTROY
        | op::FUNC_SET_ATTRIBUTE
        | op::LINK_CREATE
        | op::LINK_ADD
        | op::LINK_COMPLETE
        | op::LINK_IMAGE
        | op::LINK_DESTROY
        | op::REFERENCE_FIND
        | op::TEXREF_CREATE
        | op::TEXREF_DESTROY => touched.object(words[0]),
        other if calls::takes_away(other) => {
            touched.everything = true;
            touched.only_waits = true;
        }
        other => calls::touches(other, &words, &mut |handle, stream| {
            if stream { touched.stream(streams, handle) } else { touched.object(handle) }
        }),
    }
    touched
}

/// Word of a `GRAPH_LAUNCH` with the number of events that the graph records.
///
/// These follow, and then those that it waits for. A graph without any lacks the word.
const GRAPH_EVENTS: usize = 2;

/// Returns the words of a frame from this one on.
fn words_behind(frame: &Frame, first: usize) -> impl Iterator<Item = u64> {
    let rest = frame.body.get(8 * first..).unwrap_or_default();
    rest.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes))
}

/// Returns a word of a frame's body; 0 if it has none there.
pub fn word(frame: &Frame, at: usize) -> u64 {
    words_behind(frame, at).next().unwrap_or(0)
}

/// Returns the events that a launch of a kernel or graph records.
fn recorded(frame: &Frame) -> Vec<u64> {
    const ATTRIBUTES: usize = 6;
    let mut words = words_behind(frame, GRAPH_EVENTS);
    if frame.header.op.get() == op::GRAPH_LAUNCH {
        let count = words.next().unwrap_or(0) as usize;
        return words.take(count).collect();
    }
    let attributes = frame.body.get(8 * ATTRIBUTES..).and_then(|rest| Reader::new(rest).bytes().ok());
    launch::events(attributes.unwrap_or_default()).collect()
}

/// Stands for the addresses of all mirrors; no handle has this value.
const MIRRORS: u64 = u64::MAX;
/// Beside a thread's number, stands for the parts of its long request; no handle has this kind.
const PARTS: u64 = 1 << 63;

/// Words behind the description of a `COPY_BOX`.
const STREAM: usize = 0;
const DIRECTION: usize = 1;
const LENGTH: usize = 2;

/// Returns a word of a `COPY_BOX` before any other check; 0 if the frame is too short.
fn word_behind_box(frame: &Frame, word: usize) -> u64 {
    let at = 8 + BOX + 8 * word;
    frame.body.get(at..at + 8).and_then(|word| word.try_into().ok()).map_or(0, u64::from_le_bytes)
}

#[cfg(test)]
pub mod tests {
    use bytes::BytesMut;
    use gpusession_proto::frame::{HEADER, Header, Writer};
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::frame::Body;
    use crate::handles::{Object, kind};

    /// Makes a frame of a client thread.
    pub fn frame(op: u16, thread: u32, seq: u64, waits: bool, words: &[u64]) -> Frame {
        let mut header = Header::empty();
        (header.op, header.thread, header.seq) = (op.into(), thread.into(), seq.into());
        header.flags = if waits { WAIT } else { 0 }.into();
        let mut bytes = Vec::new();
        let mut w = Writer::new(&mut bytes, &header);
        words.iter().for_each(|word| w.word(*word));
        let len = w.finish();
        let mut body = BytesMut::from(&bytes[HEADER..]);
        Frame { header, body: Body::take(&mut body, len) }
    }

    /// Handles of a blocking and of a non-blocking stream.
    pub const BLOCKING: u64 = kind::make(kind::STREAM, 0, 1, 1);
    pub const OTHER: u64 = kind::make(kind::STREAM, 0, 1, 2);

    /// Returns a table with both streams.
    pub fn streams() -> Table<Stream> {
        let streams = Table::new(kind::STREAM);
        for (handle, non_blocking) in [(BLOCKING, false), (OTHER, true)] {
            let object = Object(std::ptr::null_mut());
            streams.put(handle, Stream { object, non_blocking, ctx: 1 }).unwrap();
        }
        streams
    }

    fn event(slot: u32) -> u64 {
        kind::make(kind::EVENT, 0, 1, slot)
    }

    fn launch(stream: u64) -> Frame {
        frame(op::LAUNCH, 1, 1, false, &[77, 0, 0, 0, 0, stream])
    }

    /// Returns `true` if a frame must stay behind an earlier one.
    fn behind(later: &Frame, earlier: &Frame) -> bool {
        let streams = streams();
        touches(&streams, later).depends_on(&touches(&streams, earlier))
    }

    #[test]
    fn streams_are_ordered_as_cuda_orders_them() {
        let copy = |stream| frame(op::COPY_TO_DEVICE, 2, 2, false, &[0, 8, stream, 1]);
        assert!(behind(&copy(BLOCKING), &launch(BLOCKING)));
        assert!(!behind(&copy(OTHER), &launch(BLOCKING)));
        for default in [0, 1, 2] {
            assert!(behind(&copy(default), &launch(BLOCKING)) && behind(&copy(BLOCKING), &launch(default)));
            assert!(!behind(&copy(default), &launch(OTHER)) && !behind(&copy(OTHER), &launch(default)));
            assert!(behind(&copy(default), &launch(default)));
        }
        let unknown = kind::make(kind::STREAM, 0, 1, 9);
        assert!(behind(&copy(unknown), &launch(0)), "a stream that is not known may be a blocking one");
    }

    #[test]
    fn parts_of_a_long_request_stay_in_order() {
        let part = |thread| frame(op::BODY_PART, thread, 1, false, &[7]);
        let mut last = frame(op::GRAPH_ADD, 1, 2, true, &[5]);
        last.header.flags = (WAIT | CONTINUED).into();
        assert!(behind(&part(1), &part(1)) && behind(&last, &part(1)));
        assert!(!behind(&part(2), &part(1)) && !behind(&last, &part(2)));
    }

    #[test]
    fn event_orders_the_streams_that_use_it() {
        let record = frame(op::EVENT_RECORD, 1, 1, false, &[event(3), BLOCKING]);
        let wait = |event| frame(op::STREAM_WAIT_EVENT, 2, 2, false, &[OTHER, event]);
        assert!(behind(&wait(event(3)), &record));
        assert!(!behind(&wait(event(4)), &record));
        let reused = kind::make(kind::EVENT, 0, 2, 3);
        assert!(behind(&frame(op::EVENT_CREATE, 2, 2, false, &[reused]), &record), "the same slot");
    }

    /// Makes a launch with an attribute that records an event.
    fn launch_with(id: u32, event: u64) -> Frame {
        let mut attribute = [0u64; 9];
        (attribute[0], attribute[1]) = (u64::from(id), event);
        let words: Vec<u64> = [77, 0, 0, 0, 0, OTHER, 72].into_iter().chain(attribute).collect();
        frame(op::LAUNCH, 1, 1, false, &words)
    }

    #[test]
    fn event_of_a_launch_or_graph_orders_what_uses_it() {
        let graph = frame(op::GRAPH_LAUNCH, 1, 1, false, &[5, OTHER, 1, event(3), event(4)]);
        let ask = |operation, event| frame(operation, 2, 2, true, &[event]);
        for (launch, recorded) in [(graph, 3), (launch_with(7, event(3)), 3), (launch_with(12, event(3)), 3)]
        {
            let wait = frame(op::STREAM_WAIT_EVENT, 2, 2, false, &[BLOCKING, event(recorded)]);
            assert!(behind(&wait, &launch));
            for operation in [op::EVENT_SYNC, op::EVENT_QUERY, op::EVENT_DESTROY] {
                assert!(behind(&ask(operation, event(recorded)), &launch));
                assert!(!behind(&ask(operation, event(9)), &launch));
            }
            let streams = streams();
            let unfinished = |query: &Frame| {
                is_unfinished((query, &touches(&streams, query)), (&launch, &touches(&streams, &launch)))
            };
            assert!(unfinished(&ask(op::EVENT_QUERY, event(recorded))));
            assert!(!unfinished(&ask(op::EVENT_QUERY, event(4))), "a graph only waits for it");
        }
        let record = frame(op::EVENT_RECORD, 1, 1, false, &[event(4), BLOCKING]);
        let waits = |events: &[u64]| frame(op::GRAPH_LAUNCH, 1, 1, false, &[&[5, OTHER], events].concat());
        assert!(behind(&waits(&[0, event(4)]), &record));
        assert!(!behind(&waits(&[]), &record) && !behind(&waits(&[9]), &record), "a count without events");
        assert!(!behind(&launch_with(8, event(4)), &record), "a priority is no event");
    }

    #[test]
    fn launch_of_a_graph_with_events_in_several_frames_stays_in_order() {
        let mut graph = frame(op::GRAPH_LAUNCH, 1, 1, true, &[5, OTHER, 1 << 20, event(3)]);
        let record = frame(op::EVENT_RECORD, 2, 2, false, &[event(9), BLOCKING]);
        assert!(!behind(&record, &graph) && !behind(&graph, &record));
        graph.header.flags = (WAIT | CONTINUED).into();
        assert!(behind(&record, &graph) && behind(&graph, &record));
    }

    #[test]
    fn frame_that_only_waits_holds_nothing_back() {
        let sync = |waits| frame(op::STREAM_SYNC, 1, 1, waits, &[BLOCKING]);
        assert!(behind(&sync(true), &launch(BLOCKING)));
        assert!(!behind(&launch(BLOCKING), &sync(true)));
        assert!(behind(&launch(OTHER), &sync(false)), "the program counts on it without an answer");
    }

    #[test]
    fn query_of_unfinished_work_has_its_answer() {
        let streams = streams();
        let unfinished = |query: &Frame, earlier: &Frame| {
            is_unfinished((query, &touches(&streams, query)), (earlier, &touches(&streams, earlier)))
        };
        let ask = |stream| frame(op::STREAM_QUERY, 1, 9, true, &[stream]);
        for stream in [BLOCKING, OTHER, 0, 2] {
            assert!(unfinished(&ask(stream), &launch(stream)));
        }
        assert!(unfinished(&ask(1), &launch(0)), "the legacy default stream has two handles");
        for (asked, of) in [(BLOCKING, OTHER), (OTHER, BLOCKING), (BLOCKING, 0), (0, BLOCKING), (2, 0)] {
            assert!(!unfinished(&ask(asked), &launch(of)), "{asked} behind work of {of}");
        }
        let mut elsewhere = launch(0);
        elsewhere.header.ctx = 77.into();
        assert!(!unfinished(&ask(0), &elsewhere), "each context has a default stream");
        for (operation, waits) in
            [(op::STREAM_SYNC, true), (op::STREAM_DESTROY, false), (op::STREAM_CREATE, false)]
        {
            assert!(!unfinished(&ask(OTHER), &frame(operation, 1, 1, waits, &[OTHER])), "no work");
        }
        let ask = |event| frame(op::EVENT_QUERY, 1, 9, true, &[event]);
        let record = frame(op::EVENT_RECORD, 1, 1, false, &[event(3), OTHER]);
        assert!(unfinished(&ask(event(3)), &record) && !unfinished(&ask(event(4)), &record));
        let wait = frame(op::STREAM_WAIT_EVENT, 1, 1, false, &[OTHER, event(3)]);
        assert!(!unfinished(&ask(event(3)), &wait), "a wait is no record");
    }

    /// Returns `true` for a call of the table that by its name only reads a value.
    ///
    /// The program waits for its answer. A value that work of another thread changes meanwhile has
    /// no order on a local card either.
    fn reads(operation: u16) -> bool {
        let name = op::name(operation);
        name.starts_with("cu") && name.contains("Get")
    }

    #[test]
    fn every_operation_is_ordered_or_says_why_not() {
        let operations = gpusession_calls::operations();
        let from_worker = |o: &u16| operations.get(o).is_some_and(|o| o.effect.is_none());
        let streams = streams();
        let stated: Vec<&str> = gpusession_calls::unordered().map(|(name, _)| name).collect();
        let unordered = |operation: &u16| {
            let touched = touches(&streams, &frame(*operation, 1, 1, true, &[BLOCKING; 40]));
            touched.objects.is_empty() && !touched.everything && !touched.every_stream
        };
        let requests = (1..op::COUNT as u16).filter(|o| op::name(*o) != "?" && !from_worker(o));
        let found: Vec<&str> = requests.filter(unordered).filter(|o| !reads(*o)).map(op::name).collect();
        let only = |list: &[&'static str], other: &[&str]| -> Vec<&str> {
            list.iter().filter(|name| !other.contains(name)).copied().collect()
        };
        let forgotten = only(&found, &stated);
        assert!(forgotten.is_empty(), "{forgotten:?}: an arm of `touches`, or `unordered` in calls.txt");
        let ordered = only(&stated, &found);
        assert!(ordered.is_empty(), "{ordered:?}: `touches` has an arm, so not `unordered` in calls.txt");
    }

    #[test]
    fn mirror_stays_behind_the_end_of_another_at_the_same_addresses() {
        let end = frame(op::UNMIRROR_HOST, 1, 1, false, &[5]);
        let begin = frame(op::MIRROR_HOST, 2, 2, true, &[6, 0x1000, 0x1000, 1]);
        assert!(behind(&end, &launch(OTHER)) && behind(&begin, &end));
        assert!(!behind(&begin, &launch(0)) && !behind(&launch(0), &end));
        assert!(!behind(&begin, &begin), "no mirror waits for the beginning of another");
    }

    #[test]
    fn frames_stay_behind_a_reset_that_the_program_does_not_wait_for() {
        let reset = |waits| frame(op::PRIMARY_RESET, 1, 1, waits, &[0]);
        let alloc = frame(op::ALLOC, 2, 2, true, &[0, 2 << 20, 0]);
        assert!(behind(&alloc, &reset(false)), "it would free the new memory");
        assert!(!behind(&alloc, &reset(true)));
    }

    #[test]
    fn end_of_objects_stays_behind_every_frame() {
        for operation in [op::CTX_SYNC, op::FREE, op::MODULE_UNLOAD, op::CTX_DESTROY, op::cuMemUnmap] {
            let end = frame(operation, 2, 2, true, &[5]);
            assert!(behind(&end, &launch(OTHER)), "{operation}");
            assert!(!behind(&launch(OTHER), &end), "{operation}");
        }
    }

    #[test]
    fn box_names_its_stream_behind_the_description() {
        let mut words = vec![BOX as u64];
        words.extend([0; BOX / 8]);
        words.extend([BLOCKING, 0, 0]);
        let copy = frame(op::COPY_BOX, 2, 2, false, &words);
        assert!(behind(&copy, &launch(BLOCKING)) && !behind(&copy, &launch(OTHER)));
        let short = frame(op::COPY_BOX, 2, 2, false, &[1]);
        assert!(behind(&short, &launch(BLOCKING)), "a frame too short counts for the default stream");
    }

    #[test]
    fn box_from_the_device_may_land_without_an_answer() {
        let copy = |direction, len, waits| {
            let mut words = vec![BOX as u64];
            words.extend([0; BOX / 8]);
            words.extend([BLOCKING, direction, len]);
            frame(op::COPY_BOX, 2, 2, waits, &words)
        };
        let long = INLINE_MAX as u64 + 1;
        assert!(is_unawaited_download(&copy(2, 8, false)) && is_unawaited_copy(&copy(2, long, false)));
        assert!(!is_unawaited_download(&copy(2, 8, true)) && !is_unawaited_copy(&copy(0, long, false)));
        assert!(is_bulk(&copy(1, long, false)) && !is_unawaited_download(&copy(1, long, false)));
        assert!(!is_bulk(&copy(1, long - 1, false)) && !is_bulk(&copy(2, long, false)));
        assert!(is_bulk(&copy(direction::UP_BY_LANES, 8, false)), "however few bytes");
    }

    #[test]
    fn bulk_copy_waits_for_bytes_and_no_program_for_it() {
        let copy = |inline| frame(op::COPY_TO_DEVICE, 1, 1, false, &[0, 8, BLOCKING, inline]);
        assert!(is_bulk(&copy(0)) && is_unawaited_copy(&copy(0)));
        assert!(!is_bulk(&copy(1)) && !is_unawaited_copy(&copy(1)));
        let from = |waits| frame(op::COPY_FROM_DEVICE, 1, 1, waits, &[0, 8, BLOCKING, 0]);
        assert!(is_unawaited_copy(&from(false)) && !is_unawaited_copy(&from(true)) && may_block(&from(true)));
        assert!(may_block(&frame(op::STREAM_SYNC, 1, 1, true, &[BLOCKING])));
        assert!(!may_block(&frame(op::STREAM_SYNC, 1, 1, false, &[BLOCKING])));
    }

    /// Call, whether it waits, and words of frames of few objects: many depend on each other.
    fn frames() -> impl Strategy<Value = (u16, bool, Vec<u64>)> {
        let event = |slot: u32| event(slot % 3);
        let stream = prop_oneof![Just(0), Just(2), Just(BLOCKING), Just(OTHER)];
        let calls = vec![
            op::LAUNCH,
            op::EVENT_RECORD,
            op::EVENT_QUERY,
            op::STREAM_QUERY,
            op::STREAM_SYNC,
            op::STREAM_WAIT_EVENT,
            op::CTX_SYNC,
            op::FREE,
            op::UNMIRROR_HOST,
            op::MIRROR_HOST,
            op::GRAPH_LAUNCH,
            op::EVENT_DESTROY,
        ];
        (proptest::sample::select(calls), any::<bool>(), stream, any::<u32>()).prop_map(
            move |(call, waits, stream, slot)| {
                let words = match call {
                    op::LAUNCH => vec![100 + u64::from(slot % 2), 0, 0, 0, 0, stream],
                    op::EVENT_RECORD => vec![event(slot), stream],
                    op::STREAM_WAIT_EVENT => vec![stream, event(slot)],
                    op::STREAM_SYNC | op::STREAM_QUERY => vec![stream],
                    op::GRAPH_LAUNCH => vec![7, stream, 1, event(slot), event(slot + 1)],
                    _ => vec![event(slot)],
                };
                (call, waits, words)
            },
        )
    }

    proptest! {
        #[test]
        fn sum_answers_as_its_frames_do(
            earlier in vec(frames(), 0..12),
            taken in vec(any::<bool>(), 12),
            later in frames(),
        ) {
            let streams = streams();
            let made = |(call, waits, words): (u16, bool, Vec<u64>)| frame(call, 1, 1, waits, &words);
            let (earlier, later) = (earlier.into_iter().map(made).collect::<Vec<_>>(), made(later));
            let touched: Vec<_> = earlier.iter().map(|frame| touches(&streams, frame)).collect();
            let mut sum = Sum::default();
            touched.iter().for_each(|touched| sum.add(touched));
            let mut left = Vec::new();
            for (number, pair) in earlier.iter().zip(&touched).enumerate() {
                if taken[number] {
                    sum.take(pair.1);
                } else {
                    left.push(pair);
                }
            }
            let asked = touches(&streams, &later);
            let query = (&later, &asked);
            prop_assert_eq!(sum.holds(&asked), left.iter().any(|(_, earlier)| asked.depends_on(earlier)));
            prop_assert_eq!(
                asks_about(query, &sum, left.iter().copied()),
                left.iter().any(|work| is_unfinished(query, *work)),
            );
            left.iter().for_each(|(_, touched)| sum.take(touched));
            prop_assert_eq!(sum, Sum::default());
        }
    }
}
