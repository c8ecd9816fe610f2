//! Tests of regions.

use std::cell::RefCell;

use gpusession_proto::frame::Reader;
use nix::sys::mman::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use super::*;
use crate::fake_worker::Program;

thread_local! {
    /// The program's writes while this thread compares: each precedes the read of a block.
    static WRITES: RefCell<Vec<Box<dyn FnOnce()>>> = const { RefCell::new(Vec::new()) };
}

/// Lets the program write before a block is read.
pub fn program_writes() {
    let write = WRITES.with_borrow_mut(|writes| (!writes.is_empty()).then(|| writes.remove(0)));
    write.into_iter().for_each(|write| write());
}

/// Blocks of memory with a region, and the region.
///
/// Kernels cannot name it, so that other tests do not send its changes.
fn mirrored(program: &Program, kind: u64, blocks: usize) -> (Vec<u8>, Arc<Region>) {
    let memory = vec![0u8; blocks * BLOCK];
    let region = Region::new(program.client, memory.as_ptr() as u64, memory.len() as u64, kind, false, false);
    let region = create(region).unwrap();
    program.frames();
    (memory, region)
}

/// Returns offset and length of each change that the program has sent.
fn sent(program: &Program, region: &Region) -> Vec<(u64, usize)> {
    let changes = sent_to_all(program).into_iter();
    let own = |(id, offset, len)| {
        assert_eq!(id, region.id());
        (offset, len)
    };
    changes.map(own).collect()
}

/// Returns region, offset and length of each change that the program has sent.
fn sent_to_all(program: &Program) -> Vec<(u64, u64, usize)> {
    let mut changes = Vec::new();
    for (operation, body) in program.frames() {
        assert_eq!(operation, op::WRITE_HOST);
        let mut r = Reader::new(&body);
        let id = r.word().unwrap();
        changes::read(&mut r, |offset, bytes| changes.push((id, offset, bytes.len()))).unwrap();
    }
    changes
}

#[test]
fn flag_goes_up_after_data_in_higher_memory() {
    let program = Program::new();
    let (mut flags, flag) = mirrored(&program, mirror::SAME, 2);
    let (mut data, numbers) = mirrored(&program, mirror::SAME, 1);
    flags[64] = 1;
    flags[BLOCK..].fill(9);
    data[..100].fill(9);
    data[200] = 9;
    upload_parts(&[Part::whole(&flag), Part::whole(&numbers)]).unwrap();
    let (first, second) = (flag.id(), numbers.id());
    assert_eq!(
        sent_to_all(&program),
        [(first, BLOCK as u64, BLOCK), (second, 0, 100), (second, 200, 4), (first, 64, 4)]
    );
    discard(&flag).unwrap();
    discard(&numbers).unwrap();
}

#[test]
fn flag_that_is_set_during_an_upload_goes_up_after_its_data() {
    let program = Program::new();
    let (mut data, numbers) = mirrored(&program, mirror::SAME, 1);
    let (mut flags, flag) = mirrored(&program, mirror::SAME, 1);
    let [numbers_at, flag_at] = [&mut data, &mut flags].map(|memory| memory.as_mut_ptr() as usize);
    // SAFETY: memory of this test, which lives until its end.
    let write = |at: usize, value: u64| unsafe { (at as *mut u64).write_volatile(value) };
    WRITES.set(vec![
        Box::new(|| {}),
        Box::new(move || {
            (0..10).for_each(|i| write(numbers_at + 8 * i, u64::MAX));
            write(numbers_at + 512, 9);
            write(flag_at + 64, 1);
        }),
    ]);
    upload_parts(&[Part::whole(&numbers), Part::whole(&flag)]).unwrap();
    let (first, second) = (numbers.id(), flag.id());
    assert_eq!(sent_to_all(&program), [(first, 0, 80), (first, 512, 4), (second, 64, 4)]);
    discard(&flag).unwrap();
    discard(&numbers).unwrap();
}

#[test]
fn launch_sends_only_what_the_program_has_changed() {
    let program = Program::new();
    let (mut memory, region) = mirrored(&program, mirror::SAME, 3);
    region.upload().unwrap();
    assert!(sent(&program, &region).is_empty());
    memory[BLOCK + 8] = 1;
    memory[2 * BLOCK] = 1;
    region.upload_part(BLOCK + 100, 1).unwrap();
    assert_eq!(sent(&program, &region), [(BLOCK as u64 + 8, 4)], "the blocks that a copy names");
    region.upload().unwrap();
    assert_eq!(sent(&program, &region), [(2 * BLOCK as u64, 4)]);
    region.upload().unwrap();
    assert!(sent(&program, &region).is_empty(), "the worker knows all");
    discard(&region).unwrap();
}

/// Waits for the next round of resting blocks.
fn next_round(region: &Region) {
    if let Some(rest) = &region.rest {
        lock(rest).next_round = Instant::now();
    }
}

#[test]
fn pinned_memory_rests_and_wakes() {
    let program = Program::new();
    let blocks = MIN_WATCHED_BYTES / BLOCK;
    let base = program.client.window().allocate_host(MIN_WATCHED_BYTES as u64).unwrap();
    // SAFETY: memory of this test alone, which stays mapped.
    let memory = unsafe { std::slice::from_raw_parts_mut(base as *mut u8, MIN_WATCHED_BYTES) };
    memory.fill(0);
    let region =
        Region::new(program.client, base, MIN_WATCHED_BYTES as u64, mirror::SAME, false, false).resting();
    let region = create(region).unwrap();
    program.frames();
    let watched = || region.watch.as_ref().filter(|watch| watch.works());
    let busy = || {
        let mut pages = 0;
        let all = region.base..region.base + region.len;
        let count = |found: Range<usize>| {
            pages += found.len() / BLOCK;
            Ok::<_, ()>(())
        };
        watched()?.look(all, count).ok()?;
        Some(pages)
    };
    for round in 0..4 {
        next_round(&region);
        region.upload().unwrap();
        assert!(sent(&program, &region).is_empty());
        memory[BLOCK * (3 + round)] = 7;
        region.upload().unwrap();
        assert_eq!(sent(&program, &region), [((BLOCK * (3 + round)) as u64, 4)]);
    }
    // An old kernel, a sandbox, or a test beside this one with a harmful descriptor.
    if let Some(pages) = busy() {
        assert!(pages < blocks, "{pages} of {blocks} pages are compared");
        next_round(&region);
        region.upload().unwrap();
        next_round(&region);
        region.upload().unwrap();
        assert!(busy().is_none_or(|pages| pages == 0), "all pages rest");
    }
    changed(region.id(), 16, &[7; 8]);
    memory[MIN_WATCHED_BYTES - 1] = 9;
    region.upload().unwrap();
    assert_eq!(
        sent(&program, &region),
        [(MIN_WATCHED_BYTES as u64 - 4, 4)],
        "the device's change does not return"
    );
    discard(&region).unwrap();
}

#[test]
fn device_memory_takes_whole_blocks() {
    let program = Program::new();
    let (mut memory, region) = mirrored(&program, mirror::DEVICE, 2);
    memory[BLOCK + 8] = 1;
    region.upload().unwrap();
    assert_eq!(sent(&program, &region), [(BLOCK as u64, BLOCK)]);
    discard(&region).unwrap();
}

#[test]
fn neighbouring_blocks_of_device_memory_are_one_part() {
    let program = Program::new();
    let (mut memory, region) = mirrored(&program, mirror::DEVICE, 3 * MAX_PART_BLOCKS);
    for block in [1, 2, 4, MAX_PART_BLOCKS - 1, MAX_PART_BLOCKS, 3 * MAX_PART_BLOCKS - 1] {
        memory[block * BLOCK + 9] = 1;
    }
    region.upload().unwrap();
    let part = |block: usize, count: usize| ((block * BLOCK) as u64, count * BLOCK);
    assert_eq!(
        sent(&program, &region),
        [
            part(1, 2),
            part(4, 1),
            part(MAX_PART_BLOCKS - 1, 1),
            part(MAX_PART_BLOCKS, 1),
            part(3 * MAX_PART_BLOCKS - 1, 1)
        ],
    );
    region.upload().unwrap();
    assert!(sent(&program, &region).is_empty(), "the worker knows all");
    memory[2 * BLOCK] = 7;
    memory[8 * BLOCK] = 7;
    region.upload_part(3 * BLOCK, 8 * BLOCK).unwrap();
    assert_eq!(sent(&program, &region), [part(8, 1)], "the blocks that a copy names");
    region.upload().unwrap();
    assert_eq!(sent(&program, &region), [part(2, 1)], "the others stay to be sent");
    discard(&region).unwrap();
}

#[test]
fn devices_change_reaches_the_program_and_does_not_return() {
    let program = Program::new();
    let (memory, region) = mirrored(&program, mirror::SAME, 1);
    changed(region.id(), 16, &[7; 8]);
    assert_eq!(memory[16..24], [7; 8]);
    region.upload().unwrap();
    assert!(sent(&program, &region).is_empty());
    for (offset, len) in [(BLOCK as u64 - 4, 8), (u64::MAX, 8), (BLOCK as u64, 1)] {
        changed(region.id(), offset, &vec![9; len]);
    }
    assert!(memory.iter().all(|byte| *byte != 9), "a change beyond the region is dropped");
    discard(&region).unwrap();
    changed(region.id(), 16, &[8; 8]);
    assert_eq!(memory[16..24], [7; 8], "the memory is the program's alone again");
    region.upload().unwrap();
    assert_eq!(program.operations(), [op::UNMIRROR_HOST]);
}

#[test]
fn unmapped_registered_memory_is_not_read_beside_a_wait() {
    let program = Program::new();
    let pages = std::num::NonZero::new(2 * BLOCK).unwrap();
    let (prot, flags) = (ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE);
    // SAFETY: a mapping of this test alone.
    let memory = unsafe { mmap_anonymous(None, pages, prot, flags) }.unwrap();
    let mut region =
        Region::new(program.client, memory.as_ptr() as u64, pages.get() as u64, mirror::SAME, false, false);
    // The device's address of registered memory is another one.
    region.there = 1 << 40;
    let region = create(region).unwrap();
    program.frames();
    // SAFETY: the mapping has this word, and nothing else uses it.
    unsafe { memory.cast::<u64>().write(9) };
    // SAFETY: the second page of the mapping, which the program no longer uses.
    unsafe { munmap(memory.byte_add(BLOCK), BLOCK) }.unwrap();
    upload_parts(&[Part::beside_wait(&region)]).unwrap();
    assert_eq!(sent(&program, &region), [(0, 4)]);
    assert!(drop_region(&region));
}

#[test]
fn upload_reads_what_the_worker_sends_meanwhile() {
    let program = Program::new();
    let (mut memory, region) = mirrored(&program, mirror::SAME, changes::FRAME / BLOCK + 1);
    // The device's change of the first word.
    program.tell_late(op::HOST_CHANGED, 0, &[region.id(), 0, 8, 0x0909_0909_0909_0909]);
    let until = Instant::now() + Duration::from_secs(10);
    let mut round = 0u8;
    while std::hint::black_box(&memory)[..8] != [9; 8] {
        assert!(Instant::now() < until, "nobody has read it");
        round = round % 8 + 1;
        memory[BLOCK..].fill(round);
        region.upload().unwrap();
    }
    discard(&region).unwrap();
}

#[test]
fn region_contains_and_overlaps_by_bytes() {
    let program = Program::new();
    let region = Region::new(program.client, 0x1000, 0x100, mirror::SAME, false, false);
    assert!(region.contains(0x1000, 0x100) && region.contains(0x10ff, 1));
    assert!(!region.contains(0xfff, 2) && !region.contains(0x1001, 0x100));
    assert!(!region.contains(0x1001, usize::MAX), "no overflow");
    assert!(region.overlaps(0xfff, 2) && region.overlaps(0x10ff, 9));
    assert!(!region.overlaps(0xf00, 0x100) && !region.overlaps(0x1100, 1));
}

#[test]
fn refused_mirror_leaves_no_region() {
    let program = Program::new();
    program.answer(op::MIRROR_HOST, 2, &[]);
    let base = 0x7f00_0000_0000;
    let region = Region::new(program.client, base, 64, mirror::ANYWHERE, true, false);
    assert_eq!(create(region).err(), Some(2));
    assert!(find(program.client, base as usize, 64).is_none());
}
