//! The lane: the ring of bytes between one appending thread and the spiller.
//!
//! Owns how frames become visible, when the spiller is woken, who waits for room, and how a lane passes from one thread
//! to another. A frame is a `u64` header, a value, and zeros up to a multiple of 8 bytes; what the header means, what
//! happens to drained bytes, and which lane a writer uses, is decided elsewhere.
//!
//! # Positions
//!
//! A position counts bytes since the lane was made and is never reset, not by a new owner either; its low bits are the
//! offset in the buffer, the others number the lap. A frame never wraps. One that does not fit before the end of the
//! buffer starts with the next lap, and the bytes between are skipped by both sides; positions count them.
//!
//! The consumer finds the end of a lap by the watermark `wrap`: the position where the last shortened lap ended. One is
//! enough. Committing the first frame of lap `L + 2` takes `start(L + 2) + frame - head <= capacity`, so
//! `head > start(L + 1)`: the consumer has released all of lap `L`, and read the watermark of `L` before that (its
//! release of `head` and the producer's acquire order the two). A lap that was filled exactly leaves `wrap` behind its
//! own start, and is read to its end; a frame always fits at the start of a lap, so a watermark of lap `L` is above
//! `start(L)`, and the two cases cannot be confused.
//!
//! # Orderings
//!
//! - Bytes and `wrap` before `tail`: the producer releases `tail`, the consumer acquires it.
//! - Reading before overwriting: the consumer releases `head`, the producer acquires it.
//! - Producer state from owner to owner: `disown` releases `owner`, `try_claim` acquires it. A thread that finds its own
//!   token there wrote it itself, since tokens are never reused, so the check on each push can be relaxed.
//! - Who sleeps and who waits: `ring/wake.rs`.

mod sync;
mod wake;

#[cfg(all(test, loom))]
mod loom_models;
#[cfg(all(test, not(loom)))]
mod tests;

use std::fmt;
use std::io;
use std::slice;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::Thread;
use std::time::Instant;

use sync::{AtomicBool, AtomicU64, Memory, NOBODY, UnsafeCell};
pub use wake::Bell;
use wake::RoomWaiters;

/// What the smallest lane holds, in bytes. (Models need laps of a few frames.)
pub const LANE_BYTES_MIN: usize = if cfg!(loom) { 64 } else { 4096 };

/// How many of the largest frames a lane holds. Two would do for a frame to fit in every empty lane.
const LANE_FRAMES_MIN: usize = if cfg!(loom) { 4 } else { 8 };

/// How many bytes a producer commits between two looks at the bell (a quarter of a lane, if that is less).
const RING_STEP_BYTES: u64 = 64 << 10;

const HEADER_BYTES: u64 = 8;

/// Why a value was not pushed. Nothing has changed, except that a full lane rings its bell.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PushError {
    /// The consumer is behind.
    #[error("the lane is full; wait for room and push again")]
    Full,
    /// Called from inside [`Lane::push_with`] of the same lane.
    #[error("a push from inside the closure that fills a value of the same lane; push after it returns")]
    Nested,
    /// The lane belongs to another thread, or to none.
    #[error("the lane does not belong to this thread; claim it, or use this thread's own")]
    OtherThread,
    /// The value is longer than [`Lane::value_len_max`].
    #[error("the value is larger than an eighth of the lane; send it by the side path")]
    TooLarge,
}

/// A single-producer, single-consumer ring of frames. Shared by `Arc`; any thread may look at its positions.
///
/// Invariants:
/// 1. `drained <= committed <= drained + capacity`, all multiples of 8 and never falling.
/// 2. What lies in `drained..committed`, skipped bytes aside, is whole frames that nobody writes to.
/// 3. Only the thread whose token is in `owner` touches `producer` and the bytes outside `drained..committed`.
///
/// ```
/// use std::sync::Arc;
/// use tidelog_io::ring::{Bell, Lane, PushError};
///
/// let lane = Lane::new(4096, Bell::new(Arc::new(|| {})))?;
/// assert_eq!(lane.push(1, b"tide"), Err(PushError::OtherThread));
/// assert!(lane.try_claim());
/// lane.push(1, b"tide").unwrap();
///
/// let mut consumer = lane.consumer().unwrap();
/// assert_eq!(consumer.peek(), b"\x01\0\0\0\0\0\0\0tide\0\0\0\0");
/// consumer.release(16);
/// assert_eq!(lane.drained(), lane.committed());
/// # std::io::Result::Ok(())
/// ```
pub struct Lane {
    memory: Memory,
    capacity_bytes: u64,
    value_len_max: usize,
    bell: Arc<Bell>,
    owner: AtomicU64,
    has_consumer: AtomicBool,
    /// Written by the producer.
    ours: Line<ProducerLine>,
    /// Written by the consumer.
    head: Line<AtomicU64>,
    room: Line<RoomWaiters>,
}

/// Keeps what different threads write in different pairs of cache lines (adjacent lines are fetched together).
#[repr(align(128))]
struct Line<T>(T);

struct ProducerLine {
    tail: AtomicU64,
    wrap: AtomicU64,
    state: UnsafeCell<Producer>,
}

/// What the owner knows. A push that ends at or below `limit` needs no other check: it cannot be nested, neither wraps
/// nor overtakes the consumer, and passes no point where the bell is due.
struct Producer {
    /// `min(head + capacity, ring_at - 8)`, or 0 while a closure fills a value.
    limit: u64,
    /// The consumer's position as last seen.
    head: u64,
    /// The next position at which the bell is due: a multiple of the step, above `tail`. The capacity is a multiple of
    /// the step, so it is never beyond the end of the lap.
    ring_at: u64,
    busy: bool,
}

/// Where a frame goes.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Claim {
    start: u64,
    end: u64,
}

// SAFETY: the only part that is not already Sync is the `UnsafeCell` of the producer's state, and the memory. Invariants 2
// and 3 say who touches them; the orderings at the head of this file make each hand-over happen before the next use.
unsafe impl Sync for Lane {}

impl Lane {
    /// Maps a lane of `capacity_bytes`, a power of two of at least 4096, that belongs to no thread yet.
    ///
    /// # Errors
    /// `InvalidInput` for another capacity, else what the kernel says about the memory.
    pub fn new(capacity_bytes: usize, bell: Arc<Bell>) -> io::Result<Arc<Self>> {
        if capacity_bytes < LANE_BYTES_MIN || !capacity_bytes.is_power_of_two() {
            let message =
                format!("a lane of {capacity_bytes} bytes: use a power of two of at least {LANE_BYTES_MIN}");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let mut producer = Producer { limit: 0, head: 0, ring_at: 0, busy: false };
        producer.advance(0, capacity_bytes as u64);
        Ok(Arc::new(Self {
            memory: Memory::new(capacity_bytes)?,
            capacity_bytes: capacity_bytes as u64,
            value_len_max: capacity_bytes / LANE_FRAMES_MIN - HEADER_BYTES as usize,
            bell,
            owner: AtomicU64::new(NOBODY),
            has_consumer: AtomicBool::new(false),
            ours: Line(ProducerLine {
                tail: AtomicU64::new(0),
                wrap: AtomicU64::new(0),
                state: UnsafeCell::new(producer),
            }),
            head: Line(AtomicU64::new(0)),
            room: Line(RoomWaiters::new()),
        }))
    }

    /// The size of the ring in bytes.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.capacity_bytes as usize
    }

    /// The longest value that fits, in bytes: a frame takes at most an eighth of the lane.
    #[must_use]
    pub fn value_len_max(&self) -> usize {
        self.value_len_max
    }

    /// Makes a lane that has no owner the calling thread's; `false` if it has one, be it this thread.
    ///
    /// It goes on where the last owner stopped.
    #[must_use]
    pub fn try_claim(&self) -> bool {
        self.owner.compare_exchange(NOBODY, sync::token(), Acquire, Relaxed).is_ok()
    }

    /// Gives the lane up, with all that was pushed, so that any thread may claim it.
    ///
    /// Returns `false` and does nothing if the lane is not the calling thread's, or if called from inside
    /// [`push_with`](Lane::push_with).
    pub fn disown(&self) -> bool {
        // SAFETY: this thread is the owner (`with_producer`).
        let free = self.is_mine() && unsafe { self.with_producer(|producer| !producer.busy) };
        if free {
            self.owner.store(NOBODY, Release);
        }
        free
    }

    /// Whether the lane is the calling thread's.
    #[inline]
    #[must_use]
    pub fn is_mine(&self) -> bool {
        self.owner.load(Relaxed) == sync::token_if_any()
    }

    /// Copies a frame of `header` and `value` into the lane and publishes it.
    ///
    /// # Errors
    /// [`PushError`]; nothing was pushed.
    #[inline]
    pub fn push(&self, header: u64, value: &[u8]) -> Result<(), PushError> {
        if !self.is_mine() {
            return Err(PushError::OtherThread);
        }
        if value.len() > self.value_len_max {
            return Err(PushError::TooLarge);
        }
        let start = self.ours.0.tail.load(Relaxed);
        let end = start + frame_bytes(value.len());
        // SAFETY: this thread is the owner, as just checked.
        if end > unsafe { self.with_producer(|producer| producer.limit) } {
            return self.push_slow(header, value);
        }
        // SAFETY: as above; and a frame that ends below the limit lies before the end of the buffer, beyond what is
        // committed, and not in what the consumer may still read.
        unsafe { self.write(Claim { start, end }, header, value) };
        self.ours.0.tail.store(end, Release);
        Ok(())
    }

    /// Publishes a frame whose value of `len` bytes is written in place by `fill`, which gets them zeroed.
    ///
    /// If `fill` panics nothing is pushed, and the lane is as before. Inside `fill`, pushes into this lane fail with
    /// [`PushError::Nested`].
    ///
    /// # Errors
    /// [`PushError`]; nothing was pushed and `fill` was not called.
    #[inline]
    pub fn push_with<R>(
        &self,
        header: u64,
        len: usize,
        fill: impl FnOnce(&mut [u8]) -> R,
    ) -> Result<R, PushError> {
        let claim = self.claim(len)?;
        // SAFETY: this thread is the owner, or the claim had failed.
        unsafe {
            self.with_producer(|producer| {
                producer.busy = true;
                producer.limit = 0;
            });
        }
        let busy = Busy { lane: self };
        // SAFETY: the claim is ours to write until it is committed: `busy` makes any other push and `disown` fail. The
        // slice is 8 bytes into the claim and ends inside it, and all of the claim is initialised memory.
        let value = unsafe {
            self.memory.will_write(self.offset(claim.start), claim.end - claim.start);
            let frame = self.memory.at(self.offset(claim.start));
            frame.cast::<u64>().write(header.to_le());
            let value = frame.add(HEADER_BYTES as usize);
            value.write_bytes(0, (claim.end - claim.start - HEADER_BYTES) as usize);
            slice::from_raw_parts_mut(value, len)
        };
        let result = fill(value);
        drop(busy);
        self.commit(claim);
        Ok(result)
    }

    /// Where the published frames end, as a position in bytes.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.ours.0.tail.load(Acquire)
    }

    /// Up to where the consumer has released the lane, as a position in bytes. Everything pushed before a look at
    /// [`committed`](Lane::committed) is drained when this has reached what it said.
    #[must_use]
    pub fn drained(&self) -> u64 {
        self.head.0.load(Acquire)
    }

    /// Wakes the consumer if it sleeps without having seen what this thread has pushed.
    pub fn ring_bell(&self) {
        self.bell.ring();
    }

    /// Ready when a value of `len` bytes would fit now, or never; else the waker of `cx` is called after the consumer has
    /// released enough for at least a quarter of the lane to be free, and the bell is rung. Callable from any thread.
    ///
    /// Room is not reserved: the owner may find it taken by another of its writers.
    pub fn poll_room(&self, len: usize, cx: &mut Context<'_>) -> Poll<()> {
        if self.would_fit(len) {
            return Poll::Ready(());
        }
        self.room.0.wait(cx.waker());
        if self.would_fit(len) {
            return Poll::Ready(());
        }
        self.bell.ring();
        Poll::Pending
    }

    /// Wakes all who wait for room, though there is none: they have something else to look at.
    pub fn wake_waiting(&self) {
        self.room.0.wake();
    }

    /// Blocks until a value of `len` bytes would fit, or never would, and then returns `true`; `false` at `deadline`.
    #[must_use]
    pub fn wait_for_room(&self, len: usize, deadline: Instant) -> bool {
        struct Unpark(Thread);
        impl Wake for Unpark {
            fn wake(self: Arc<Self>) {
                self.0.unpark();
            }
        }
        if self.would_fit(len) {
            return true;
        }
        let waker = Waker::from(Arc::new(Unpark(std::thread::current())));
        let mut cx = Context::from_waker(&waker);
        loop {
            if self.poll_room(len, &mut cx).is_ready() {
                return true;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            std::thread::park_timeout(left);
        }
    }

    /// The draining end, or `None` while there is another.
    #[must_use]
    pub fn consumer(self: &Arc<Self>) -> Option<Consumer> {
        self.has_consumer.compare_exchange(false, true, Acquire, Relaxed).ok()?;
        Some(Consumer { head: self.head.0.load(Relaxed), peeked_bytes: 0, lane: self.clone() })
    }

    /// The rest of [`push`](Lane::push): once in 64 KiB, at the end of a lap, when nearly full, and when it fails.
    #[cold]
    #[inline(never)]
    fn push_slow(&self, header: u64, value: &[u8]) -> Result<(), PushError> {
        let claim = self.claim(value.len())?;
        // SAFETY: the claim succeeded, so this thread is the owner and the claimed bytes are free.
        unsafe { self.write(claim, header, value) };
        self.commit(claim);
        Ok(())
    }

    /// Finds the place of the next frame. Changes nothing that another claim would see, so it may be abandoned.
    #[inline]
    fn claim(&self, value_len: usize) -> Result<Claim, PushError> {
        if !self.is_mine() {
            return Err(PushError::OtherThread);
        }
        if value_len > self.value_len_max {
            return Err(PushError::TooLarge);
        }
        let tail = self.ours.0.tail.load(Relaxed);
        let frame_bytes = frame_bytes(value_len);
        // SAFETY: this thread is the owner, as just checked.
        let found = unsafe {
            self.with_producer(|producer| {
                if producer.busy {
                    return Err(PushError::Nested);
                }
                let claim = self.place(tail, frame_bytes);
                if claim.end - producer.head > self.capacity_bytes {
                    producer.head = self.head.0.load(Acquire);
                    if claim.end - producer.head > self.capacity_bytes {
                        return Err(PushError::Full);
                    }
                }
                Ok(claim)
            })
        };
        if found == Err(PushError::Full) {
            self.bell.ring();
        }
        found
    }

    /// Publishes a claim that has been written.
    #[inline]
    fn commit(&self, claim: Claim) {
        let tail = self.ours.0.tail.load(Relaxed);
        // SAFETY: whoever holds a claim is the owner.
        let due = unsafe {
            self.with_producer(|producer| {
                let due = claim.end >= producer.ring_at;
                producer.advance(claim.end, self.capacity_bytes);
                due
            })
        };
        if claim.start != tail {
            self.ours.0.wrap.store(tail, Relaxed);
        }
        self.ours.0.tail.store(claim.end, Release);
        // The bell calls foreign code, which may push into this lane: nothing of ours is borrowed here.
        if due {
            self.bell.ring();
        }
    }

    fn would_fit(&self, value_len: usize) -> bool {
        if value_len > self.value_len_max {
            return true;
        }
        // In this order, so that tail >= head: the consumer had seen a tail as high before it released that head.
        let head = self.drained();
        let claim = self.place(self.committed(), frame_bytes(value_len));
        claim.end - head <= self.capacity_bytes
    }

    #[inline]
    fn place(&self, tail: u64, frame_bytes: u64) -> Claim {
        let lap_end = self.lap_start(tail) + self.capacity_bytes;
        let start = if tail + frame_bytes <= lap_end { tail } else { lap_end };
        Claim { start, end: start + frame_bytes }
    }

    /// # Safety
    /// The calling thread is the owner, and [`place`](Lane::place) or the limit say that the claim is free.
    #[inline(always)]
    unsafe fn write(&self, claim: Claim, header: u64, value: &[u8]) {
        let offset = self.offset(claim.start);
        self.memory.will_write(offset, claim.end - claim.start);
        // SAFETY: the claim is free, inside the buffer (frames do not wrap), 8-aligned as all positions are, and long
        // enough for the header and the value with its padding.
        unsafe {
            let frame = self.memory.at(offset);
            frame.cast::<u64>().write(header.to_le());
            copy_padded(value, frame.add(HEADER_BYTES as usize));
        }
    }

    /// # Safety
    /// The calling thread is the owner, and `f` calls nothing that could come back here.
    #[inline(always)]
    unsafe fn with_producer<R>(&self, f: impl FnOnce(&mut Producer) -> R) -> R {
        // SAFETY: only the owner gets here, one call at a time, so this is the only reference.
        self.ours.0.state.with_mut(|producer| f(unsafe { &mut *producer }))
    }

    #[inline]
    fn offset(&self, position: u64) -> u64 {
        position & (self.capacity_bytes - 1)
    }

    #[inline]
    fn lap_start(&self, position: u64) -> u64 {
        position & !(self.capacity_bytes - 1)
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("capacity_bytes", &self.capacity_bytes)
            .field("drained", &self.drained())
            .field("committed", &self.committed())
            .field("owned", &(self.owner.load(Relaxed) != NOBODY))
            .finish_non_exhaustive()
    }
}

impl Producer {
    #[inline]
    fn advance(&mut self, tail: u64, capacity_bytes: u64) {
        let step_bytes = RING_STEP_BYTES.min(capacity_bytes / 4);
        self.ring_at = (tail & !(step_bytes - 1)) + step_bytes;
        self.set_limit(capacity_bytes);
    }

    #[inline]
    fn set_limit(&mut self, capacity_bytes: u64) {
        self.limit = (self.head + capacity_bytes).min(self.ring_at - HEADER_BYTES);
    }
}

/// Marks that a closure fills a value; ends with it, by panic too.
struct Busy<'a> {
    lane: &'a Lane,
}

impl Drop for Busy<'_> {
    fn drop(&mut self) {
        // SAFETY: made by the owner, and the lane does not change hands while it lives (`disown`).
        unsafe {
            self.lane.with_producer(|producer| {
                producer.busy = false;
                producer.set_limit(self.lane.capacity_bytes);
            });
        }
    }
}

/// The draining end of a lane. Dropped, it leaves what it did not release to the next one.
pub struct Consumer {
    lane: Arc<Lane>,
    /// Where the next bytes are. Beyond the lane's own head only by bytes that were skipped at the end of a lap.
    head: u64,
    peeked_bytes: usize,
}

impl Consumer {
    /// The published frames from [`position`](Consumer::position) up to the end, or to the end of a lap; empty if there
    /// are none. They stay until they are released.
    pub fn peek(&mut self) -> &[u8] {
        let lane = &*self.lane;
        let tail = lane.ours.0.tail.load(Acquire);
        let lap_end = lane.lap_start(self.head) + lane.capacity_bytes;
        let mut end = tail;
        if tail > lap_end {
            let wrap = lane.ours.0.wrap.load(Relaxed);
            end = if wrap > lane.lap_start(self.head) { wrap } else { lap_end };
            if self.head == end {
                // A lap is skipped to only by a frame committed there, so there is something to read.
                self.head = lap_end;
                end = tail;
            }
        }
        debug_assert!(self.head <= end && end - lane.lap_start(self.head) <= lane.capacity_bytes);
        let offset = lane.offset(self.head);
        self.peeked_bytes = (end - self.head) as usize;
        lane.memory.will_read(offset, end - self.head);
        // SAFETY: head..end is committed, of one lap, and thus inside the buffer; the producer does not write there
        // before it is released, which takes `&mut self` and so ends this borrow.
        unsafe { slice::from_raw_parts(lane.memory.at(offset), self.peeked_bytes) }
    }

    /// The position in bytes of the first byte that [`peek`](Consumer::peek) gave last.
    #[must_use]
    pub fn position(&self) -> u64 {
        self.head
    }

    /// Gives the first `bytes` bytes of the last [`peek`](Consumer::peek) back to the producer: whole frames.
    ///
    /// # Panics
    /// If that is more than was peeked and not yet released, or not a multiple of 8.
    pub fn release(&mut self, bytes: usize) {
        assert!(
            bytes <= self.peeked_bytes && bytes.is_multiple_of(8),
            "release of {bytes} bytes, not whole frames of the {} peeked",
            self.peeked_bytes
        );
        if bytes == 0 {
            return;
        }
        let lane = &*self.lane;
        lane.memory.will_read(lane.offset(self.head), bytes as u64);
        self.peeked_bytes -= bytes;
        self.head += bytes as u64;
        lane.head.0.store(self.head, Release);
        // Who waits is woken once a quarter of the lane is free, which any value fits: woken for every frame it would
        // find room for a few and sleep again. Draining goes on to the end, so that point is always reached.
        let held = lane.ours.0.tail.load(Relaxed) - self.head;
        if held <= lane.capacity_bytes / 4 * 3 {
            lane.room.0.wake();
        }
    }

    /// The lane that this drains.
    #[must_use]
    pub fn lane(&self) -> &Arc<Lane> {
        &self.lane
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        self.lane.has_consumer.store(false, Release);
    }
}

impl fmt::Debug for Consumer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Consumer").field("position", &self.head).field("lane", &self.lane).finish()
    }
}

/// The bytes of a frame: callers have checked `value_len` against the lane's maximum, so this cannot overflow.
#[inline(always)]
fn frame_bytes(value_len: usize) -> u64 {
    HEADER_BYTES + ((value_len as u64 + 7) & !7)
}

/// Copies `value` to `to` and zeros up to a multiple of 8 bytes.
///
/// Short values are copied by a few moves of fixed size, which may overlap: a call of memcpy costs more than they do.
///
/// # Safety
/// `to` is 8-aligned and valid for writes of that many bytes, none of them in `value`.
#[inline(always)]
unsafe fn copy_padded(value: &[u8], to: *mut u8) {
    /// # Safety
    /// Both are valid for `N` bytes.
    #[inline(always)]
    unsafe fn copy<const N: usize>(from: *const u8, to: *mut u8) {
        // SAFETY: the caller's promise; an array of bytes needs no alignment.
        unsafe { to.cast::<[u8; N]>().write(from.cast::<[u8; N]>().read()) };
    }

    let (from, len) = (value.as_ptr(), value.len());
    if len == 0 {
        return;
    }
    // SAFETY: every move below starts at 0 or later and ends at `len` or before, on both sides; the word of padding
    // starts below `len` at a multiple of 8, so it ends inside the padded length.
    unsafe {
        to.add((len - 1) & !7).cast::<u64>().write(0);
        match len {
            1..4 => {
                copy::<1>(from, to);
                copy::<1>(from.add(len / 2), to.add(len / 2));
                copy::<1>(from.add(len - 1), to.add(len - 1));
            }
            4..8 => {
                copy::<4>(from, to);
                copy::<4>(from.add(len - 4), to.add(len - 4));
            }
            8..16 => {
                copy::<8>(from, to);
                copy::<8>(from.add(len - 8), to.add(len - 8));
            }
            16..=32 => {
                copy::<16>(from, to);
                copy::<16>(from.add(len - 16), to.add(len - 16));
            }
            33..=64 => {
                copy::<32>(from, to);
                copy::<32>(from.add(len - 32), to.add(len - 32));
            }
            _ => to.copy_from_nonoverlapping(from, len),
        }
    }
}
