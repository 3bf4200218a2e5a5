//! Compares index conversion, embedding lookup and the gradient of the table bit by bit. (`ops/tests/ops` compares them
//! with the CPU's operations.)

use zero_kernels::Dtype;
use zero_kernels::embedding::{Lookup, gather, keys, scatter, sort};
use zero_kernels::indices::{ELSEWHERE, Fault, IndexType, Limits, NO_TARGET, indices};

use crate::{Memory, numbers, on_device, rounded};

/// Converts indices to u32. Returns them, and the recorded fault.
fn taken(of: IndexType, bytes: &[u8], count: u32, limit: u32) -> Option<(Vec<u64>, Fault)> {
    taken_of(of, bytes, count, &Limits::whole(limit))
}

/// Does the same on a rank that holds a part of the table.
fn taken_of(of: IndexType, bytes: &[u8], count: u32, limits: &Limits) -> Option<(Vec<u64>, Fault)> {
    on_device(|device| {
        let mut from = Memory::integers(&bytes.chunks(4).map(word).collect::<Vec<_>>());
        // After the targets, the kernel writes the number of targets that are not ignored.
        let written = count as usize + usize::from(of == IndexType::Targets);
        let (mut to, mut fault) = (Memory::unwritten(written * 4), Memory::integers(&[0; 8]));
        let at = [from.address(), to.address()];
        device.run(&indices(of, count, limits, at, fault.address(), 4));
        // The first recorded fault is not overwritten.
        device.run(&indices(of, count, &Limits::whole(1), at, fault.address(), 5));
        device.run(&indices(of, count, limits, at, fault.address(), 6));
        (to.bytes().chunks(4).map(|bytes| word(bytes).into()).collect(), fault.to_fault())
    })
}

fn word(bytes: &[u8]) -> u32 {
    let mut all = [0; 4];
    all[..bytes.len()].copy_from_slice(bytes);
    u32::from_ne_bytes(all)
}

#[test]
fn the_first_index_out_of_range_is_recorded() {
    const NONE: u64 = u32::MAX as u64;
    let of_i64 = |values: &[i64]| values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>();
    let what = |index: i64, position, limit| Fault { what: 4, details: [index as u64, position, limit] };

    let mut many: Vec<i64> = (0..3000).map(|i| i % 70).collect();
    let Some((found, fault)) = taken(IndexType::I64, &of_i64(&many), 3000, 70) else { return };
    assert!(found.iter().zip(&many).all(|(&found, &want)| found == want as u64));
    // The second launch, with a limit of 1, found the index 1.
    assert_eq!(fault, Fault { what: 5, details: [1, 1, 1] });

    (many[2999], many[1030], many[1025]) = (70, -1, 1 << 32);
    let Some((found, fault)) = taken(IndexType::I64, &of_i64(&many), 3000, 70) else { return };
    let want = many.iter().map(|&index| if (0..70).contains(&index) { index as u64 } else { NONE });
    assert!(found.iter().copied().eq(want));
    assert_eq!(fault, what(1 << 32, 1025, 70));
    many.swap(1025, 1030);
    assert_eq!(taken(IndexType::I64, &of_i64(&many), 3000, 70).map(|(_, fault)| fault), Some(what(-1, 1025, 70)));

    let words: Vec<u8> = [3u32, u32::MAX, 0].iter().flat_map(|x| x.to_ne_bytes()).collect();
    let limit = u32::MAX;
    assert_eq!(taken(IndexType::U32, &words, 3, limit), Some((vec![3, NONE, 0], what(NONE as i64, 1, NONE))));
    assert_eq!(taken(IndexType::U8, &[3, 0, 255, 254], 4, 255), Some((vec![3, 0, NONE, 254], what(255, 2, 255))));
}

#[test]
fn ignored_targets_are_counted() {
    const NONE: u64 = NO_TARGET as u64;
    let of_i64 = |values: &[i64]| values.iter().flat_map(|x| x.to_ne_bytes()).collect::<Vec<_>>();
    let mut many: Vec<i64> = (0..3000).map(|i| if i % 7 == 3 { -100 } else { i % 70 }).collect();
    let targets = many.iter().filter(|&&target| target != -100).count();
    let want = many.iter().map(|&target| if target == -100 { NONE } else { target as u64 });
    let want: Vec<u64> = want.chain([targets as u64]).collect();
    let Some((found, fault)) = taken(IndexType::Targets, &of_i64(&many), 3000, 70) else { return };
    assert_eq!(found, want);
    assert_eq!(fault, Fault { what: 5, details: [1, 1, 1] });
    // Other targets out of range are faults. They count as targets.
    many[1029] = -99;
    let Some((found, fault)) = taken(IndexType::Targets, &of_i64(&many), 3000, 70) else { return };
    assert_eq!((found[1029], found[3000]), (u32::MAX.into(), targets as u64));
    assert_eq!(fault, Fault { what: 4, details: [-99i64 as u64, 1029, 70] });
    let none = taken(IndexType::Targets, &of_i64(&[-100; 3]), 3, 1);
    assert_eq!(none, Some((vec![NONE, NONE, NONE, 0], Fault::default())));
    // −100 is ignored only among targets. As an index it is a fault.
    let Some((_, fault)) = taken(IndexType::I64, &of_i64(&[-100]), 1, 70) else { return };
    assert_eq!(fault, Fault { what: 4, details: [-100i64 as u64, 0, 70] });
}

#[test]
fn rows_are_looked_up() {
    let of = |dtype| Lookup { count: 4, entries: 3, size: 5, dtype };
    for dtype in Dtype::ALL {
        let table = rounded(dtype, &numbers(1, 15));
        let Some(y) = on_device(|device| {
            let (mut table, mut ids) = (Memory::floats(dtype, &table), Memory::integers(&[2, u32::MAX, 0, 2]));
            let mut y = Memory::floats(dtype, &[0.0; 20]);
            device.run(&gather(&of(dtype), table.address(), ids.address(), y.address()).unwrap());
            y.to_floats(dtype).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
        }) else {
            return;
        };
        let row = |id: usize| table[5 * id..5 * id + 5].iter().map(|x| x.to_bits());
        assert!(y[..5].iter().copied().eq(row(2)) && y[10..15].iter().copied().eq(row(0)));
        assert!(y[15..].iter().copied().eq(row(2)) && y[5..10].iter().all(|&x| f32::from_bits(x).is_nan()));
    }
    assert!(gather(&Lookup { count: 0, ..of(Dtype::F32) }, 0, 0, 0).is_none());
}

/// This rank holds rows 3 to 6 of a table of 10. Indices of the other rows become `ELSEWHERE`.
#[test]
fn indices_of_other_ranks_become_elsewhere() {
    let bytes: Vec<u8> = [3i64, 0, 6, 7, 9, 10, -100, 5].iter().flat_map(|x| x.to_ne_bytes()).collect();
    let Some((found, fault)) = taken_of(IndexType::Targets, &bytes, 8, &Limits { all: 10, own: 3..7 }) else { return };
    let [elsewhere, none, ignored] = [ELSEWHERE, u32::MAX, NO_TARGET].map(u64::from);
    assert_eq!(found, [0, elsewhere, 3, elsewhere, elsewhere, none, ignored, 2, 7]);
    assert_eq!(fault, Fault { what: 4, details: [10, 5, 10] });
}

/// Returns indices. Some are frequent, most occur once or never, and every hundredth is invalid.
fn some_indices(count: usize) -> Vec<u32> {
    let index = |i: usize| if i % 100 == 99 { u32::MAX } else { ((i * i * 7 + i) % 211 % (1 + i % 300)) as u32 };
    (0..count).map(index).collect()
}

#[test]
fn positions_are_sorted_by_index() {
    for count in [1, 2000, 2048, 2049, 9000] {
        let ids = some_indices(count);
        let Some(sorted) = on_device(|device| {
            let mut from = Memory::integers(&ids);
            let mut room = Memory::unwritten(8 * keys(count as u32) as usize);
            sort(count as u32, from.address(), room.address()).for_each(|launch| device.run(&launch));
            room.to_integers()
        }) else {
            return;
        };
        let mut want: Vec<u64> = (0..).zip(&ids).map(|(at, &id)| u64::from(id) << 32 | at).collect();
        want.resize(sorted.len(), u64::MAX);
        want.sort_unstable();
        assert!(sorted == want, "{count}");
    }
}

#[test]
fn table_gradients_are_summed_in_order_of_positions() {
    for (count, entries, size) in [(1usize, 4usize, 3usize), (250, 300, 7), (30, 1, 300)] {
        let mut ids = some_indices(count);
        ids.iter_mut().filter(|id| **id != u32::MAX).for_each(|id| *id %= entries as u32);
        for dtype in Dtype::ALL {
            let (dy, before) = (rounded(dtype, &numbers(3, count * size)), numbers(4, entries * size));
            let mut sums = vec![None; entries * size];
            for (row, &id) in dy.chunks(size).zip(&ids).filter(|(_, id)| **id != u32::MAX) {
                for (sum, dy) in sums[id as usize * size..].iter_mut().zip(row) {
                    *sum = Some(sum.unwrap_or(0.0) + dy);
                }
            }
            for add in [false, true] {
                let Some(found) = on_device(|device| {
                    let (mut indices, mut dy) = (Memory::integers(&ids), Memory::floats(dtype, &dy));
                    let mut to = Memory::floats(Dtype::F32, &before);
                    let mut room = Memory::unwritten(8 * keys(count as u32) as usize);
                    sort(count as u32, indices.address(), room.address()).for_each(|launch| device.run(&launch));
                    let [count, entries, size] = [count, entries, size].map(|n| n as u32);
                    let of = Lookup { count, entries, size, dtype };
                    device.run(&scatter(&of, dy.address(), room.address(), to.address(), add).unwrap());
                    to.to_floats(Dtype::F32).iter().map(|x| x.to_bits()).collect::<Vec<_>>()
                }) else {
                    return;
                };
                let whole = |sum: f32, before: f32| if add { before + sum } else { sum };
                let want = sums.iter().zip(&before).map(|(sum, &before)| sum.map_or(before, |sum| whole(sum, before)));
                assert!(found.iter().copied().eq(want.map(f32::to_bits)), "{dtype:?} of {count}×{size}");
            }
        }
    }
}
