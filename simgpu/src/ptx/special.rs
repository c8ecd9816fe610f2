//! Special registers, and operations between lanes or with a carry.

use super::code::{Carry, Shuffle, Special};
use super::exec::{BlockState, Env};
use super::rows::{Row, lanes};

pub fn extended(k: &Carry, a: u64, b: u64, c: u64, carry: bool) -> (u64, bool) {
    let bits = if k.wide { 64 } else { 32 };
    let cut = |v: u64| if k.wide { v } else { v & 0xffff_ffff };
    let (a, b, c) = (u128::from(cut(a)), u128::from(cut(b)), u128::from(cut(c)));
    let carry = u128::from(k.carry_in && carry);
    let low = |v: u128| cut(v as u64);
    if k.sub {
        let take = b + carry;
        return (low(a.wrapping_sub(take)), a < take);
    }
    let sum = match k.mul {
        None => a + b + carry,
        Some(hi) => {
            let product = a * b;
            u128::from(if hi { low(product >> bits) } else { low(product) }) + c + carry
        }
    };
    (low(sum), sum >> bits != 0)
}

pub fn shuffle(mode: Shuffle, active: u32, d: &Row, a: &Row, b: &Row, c: &Row) -> u32 {
    let values: [u64; 32] = std::array::from_fn(|l| a[l].get());
    let mut bits = 0;
    lanes(active, |l| {
        let lane = l as u32;
        let (b, c) = (b[l].get() as u32 & 31, c[l].get() as u32);
        let (clamp, seg) = (c & 31, (c >> 8) & 31);
        let max = (lane & seg) | (clamp & !seg);
        let min = lane & seg;
        let (from, ok) = match mode {
            Shuffle::Up => {
                let j = lane.wrapping_sub(b);
                (j, (j as i32) >= max as i32)
            }
            Shuffle::Down => (lane + b, lane + b <= max),
            Shuffle::Bfly => (lane ^ b, lane ^ b <= max),
            Shuffle::Idx => {
                let j = min | (b & !seg);
                (j, j <= max)
            }
        };
        d[l].set(values[if ok { from & 31 } else { lane } as usize]);
        bits |= u32::from(ok) << l;
    });
    bits
}

pub fn thread_index(env: &Env, warp: u32, lane: u32) -> [u32; 3] {
    let linear = warp * 32 + lane;
    let [x, y, _] = env.block;
    [linear % x, linear / x % y, linear / x / y]
}

pub fn special(env: &Env, block: &BlockState, warp: u32, lane: u32, which: Special) -> u64 {
    let nanos = || env.started.elapsed().as_nanos() as u64;
    let wall = || {
        std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64)
    };
    let threads = env.block[0] * env.block[1] * env.block[2];
    u64::from(match which {
        Special::Tid(i) => thread_index(env, warp, lane)[usize::from(i)],
        Special::Ntid(i) => env.block[usize::from(i)],
        Special::Ctaid(i) => block.ctaid[usize::from(i)],
        Special::Nctaid(i) => env.grid[usize::from(i)],
        Special::LaneId => lane,
        Special::WarpId => warp,
        Special::NWarpId => threads.div_ceil(32),
        Special::SmId => block.linear as u32 % env.sms,
        Special::NSmId => env.sms,
        Special::LaneMaskEq => 1 << lane,
        Special::LaneMaskLt => (1 << lane) - 1,
        Special::LaneMaskLe => (1u32 << lane) | ((1 << lane) - 1),
        Special::LaneMaskGt => !((1u32 << lane) | ((1 << lane) - 1)),
        Special::LaneMaskGe => !((1 << lane) - 1),
        Special::DynamicSharedSize => env.dynamic_shared,
        Special::TotalSharedSize => env.dynamic_shared + env.program.funcs[env.func as usize].shared_size,
        Special::EnvReg(1) => (env.workspace >> 32) as u32,
        Special::EnvReg(2) => env.workspace as u32,
        Special::EnvReg(_) => 0,
        Special::GridId => return env.grid_id,
        Special::Clock => nanos() as u32,
        Special::ClockHi => (nanos() >> 32) as u32,
        Special::Clock64 => return nanos(),
        Special::GlobalTimer => return wall(),
        Special::GlobalTimerLo => wall() as u32,
        Special::GlobalTimerHi => (wall() >> 32) as u32,
    })
}
