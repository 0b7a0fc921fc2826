//! Threads that share one operation's work, and the memory they may write at the same time.
//!
//! One of the fenced files. Invariants:
//! - [`Pool::run`] returns only when no thread can touch the closure any more.
//! - A thread that comes late to a run never joins it, so a run never waits for a thread that has not begun: on a
//!   machine whose cores are busy elsewhere, the caller does the work itself.
//! - Nothing here allocates once the buffers have grown to the size of the largest operation.

#![allow(unsafe_code)]

use std::any::Any;
use std::cell::{Cell, UnsafeCell};
use std::marker::PhantomData;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long an idle thread looks for the next run before it sleeps. Longer than the pause between two operations
/// of a step, shorter than anything another process would notice.
const SPIN: Duration = Duration::from_micros(30);

/// Low bits of `Shared::state`: threads inside the run. Then the open bit, then the number of the run.
const ACTIVE: u64 = 0xffff;
const OPEN: u64 = 1 << 16;
const RUN: u64 = 1 << 17;

type Task<'a> = dyn Fn(usize, usize) + Sync + 'a;

/// A value on cache lines of its own.
#[repr(align(128))]
struct Padded<T>(T);

#[derive(Clone, Copy)]
struct Job {
    task: *const Task<'static>,
    tasks: usize,
}

struct Shared {
    /// Number of the run, whether it may be joined, and how many workers are inside.
    state: Padded<AtomicU64>,
    /// Per thread, the next task of its share that nobody has taken.
    next: Box<[Padded<AtomicUsize>]>,
    /// Written by the caller before it opens a run; read by workers that have joined it.
    job: UnsafeCell<Option<Job>>,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    stop: AtomicBool,
    /// Workers in `work`'s wait, so that a caller knows whether to wake anybody.
    sleepers: AtomicUsize,
    /// The caller waits for the last worker to leave.
    caller_waits: AtomicBool,
    gate: Mutex<()>,
    opened: Condvar,
    left: Condvar,
}

// SAFETY: `job` is the only field that is not Sync. It is written by the one caller that holds `Pool::turn` while
// no worker is inside, and read by workers between joining and leaving; the state word orders the two.
unsafe impl Sync for Shared {}
// SAFETY: the pointer in `job` is only followed while the caller of `run` keeps its target alive.
unsafe impl Send for Shared {}

thread_local! {
    /// The pool whose task this thread is executing, and its number there.
    static INSIDE: Cell<Option<(usize, usize)>> = const { Cell::new(None) };
}

/// A poisoned lock only says that a task panicked, and that panic is passed on by `run`.
fn lock<T: ?Sized>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A fixed set of threads; the calling thread is number 0.
pub(crate) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    turn: Mutex<()>,
}

impl Pool {
    /// Starts `threads - 1` threads.
    pub(crate) fn new(threads: usize) -> Self {
        assert!((1..ACTIVE as usize).contains(&threads), "a pool of {threads} threads");
        let shared = Arc::new(Shared {
            state: Padded(AtomicU64::new(0)),
            next: (0..threads).map(|_| Padded(AtomicUsize::new(0))).collect(),
            job: UnsafeCell::new(None),
            panic: Mutex::new(None),
            stop: AtomicBool::new(false),
            sleepers: AtomicUsize::new(0),
            caller_waits: AtomicBool::new(false),
            gate: Mutex::new(()),
            opened: Condvar::new(),
            left: Condvar::new(),
        });
        let workers = (1..threads)
            .map(|number| {
                let shared = Arc::clone(&shared);
                std::thread::Builder::new()
                    .name(format!("kernel-{number}"))
                    .spawn(move || shared.work(number))
                    .expect("the system can start a thread")
            })
            .collect();
        Self { shared, workers, turn: Mutex::new(()) }
    }

    /// Threads of the pool, the caller's included.
    pub(crate) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Calls `task(i, thread)` once for every `i` below `tasks`, on all threads.
    ///
    /// A thread begins with its own share, a contiguous range in ascending order (so the memory that a task asks
    /// for ahead is mostly its own next task's), and then takes what is left of the shares of others.
    ///
    /// Inside a task of the same pool it runs everything on the current thread. A panic of a task is passed on
    /// after all threads have left; tasks that had not begun are then skipped.
    pub(crate) fn run(&self, tasks: usize, task: &Task<'_>) {
        let id = Arc::as_ptr(&self.shared) as usize;
        if let Some((pool, thread)) = INSIDE.get()
            && pool == id
        {
            for i in 0..tasks {
                task(i, thread);
            }
            return;
        }
        if tasks == 0 {
            return;
        }
        let turn = lock(&self.turn);
        let outcome = if tasks == 1 || self.workers.is_empty() {
            let _inside = Inside::enter(id, 0);
            catch_unwind(AssertUnwindSafe(|| {
                for i in 0..tasks {
                    task(i, 0);
                }
            }))
            .err()
        } else {
            self.shared.lead(tasks, task, id)
        };
        drop(turn);
        if let Some(payload) = outcome {
            resume_unwind(payload);
        }
    }

    /// Cuts `out` into pieces of `piece` elements (the last may be shorter) and calls `f(i, thread, piece i)`.
    pub(crate) fn run_pieces<T: Send>(
        &self,
        out: &mut [T],
        piece: usize,
        f: &(dyn Fn(usize, usize, &mut [T]) + Sync),
    ) {
        assert!(piece > 0, "pieces have at least one element");
        let len = out.len();
        let out = DisjointSlice::new(out);
        self.run(len.div_ceil(piece), &|i, thread| {
            let start = i * piece;
            f(i, thread, out.claim(start, piece.min(len - start)));
        });
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.stop.store(true, Ordering::SeqCst);
        self.shared.state.0.fetch_add(RUN, Ordering::SeqCst);
        drop(lock(&self.shared.gate));
        self.shared.opened.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches the panics of tasks, so it ends in no other way than by returning.
            let _ = worker.join();
        }
    }
}

/// Marks the current thread as executing a pool's task until dropped.
struct Inside(Option<(usize, usize)>);

impl Inside {
    fn enter(pool: usize, thread: usize) -> Self {
        Inside(INSIDE.replace(Some((pool, thread))))
    }
}

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.set(self.0);
    }
}

impl Shared {
    /// The caller's side of a run.
    fn lead(&self, tasks: usize, task: &Task<'_>, id: usize) -> Option<Box<dyn Any + Send>> {
        let task: *const Task<'_> = task;
        // SAFETY: only the lifetime changes. This function does not return before `ACTIVE` is 0 and the run is
        // closed, after which no worker reads the pointer.
        let task = unsafe { std::mem::transmute::<*const Task<'_>, *const Task<'static>>(task) };
        // SAFETY: the last run is closed and has nobody inside, and `Pool::turn` excludes other callers.
        unsafe { *self.job.get() = Some(Job { task, tasks }) };
        for thread in 0..self.next.len() {
            self.next[thread].0.store(self.share(thread, tasks), Ordering::Relaxed);
        }
        self.caller_waits.store(false, Ordering::Relaxed);
        // Everything above happens before a worker's join, which reads this word.
        self.state.0.fetch_add(RUN | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(lock(&self.gate));
            self.opened.notify_all();
        }
        self.take_tasks(Job { task, tasks }, id, 0);
        self.state.0.fetch_and(!OPEN, Ordering::SeqCst);
        self.wait_until_left();
        lock(&self.panic).take()
    }

    fn wait_until_left(&self) {
        let empty = || self.state.0.load(Ordering::SeqCst) & ACTIVE == 0;
        if spin_until(empty) {
            return;
        }
        self.caller_waits.store(true, Ordering::SeqCst);
        let mut guard = lock(&self.gate);
        while !empty() {
            guard = self.left.wait(guard).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// First task of a thread's share; the share ends where the next one begins.
    fn share(&self, thread: usize, tasks: usize) -> usize {
        // Without overflow for any number of tasks.
        let threads = self.next.len();
        tasks / threads * thread + (tasks % threads).min(thread)
    }

    /// Takes tasks until there are none. The job's closure is alive for as long as this thread is in the run.
    fn take_tasks(&self, job: Job, id: usize, thread: usize) {
        let _inside = Inside::enter(id, thread);
        let outcome = catch_unwind(AssertUnwindSafe(|| {
            let threads = self.next.len();
            for share in (thread..threads).chain(0..thread) {
                let end = self.share(share + 1, job.tasks);
                loop {
                    let i = self.next[share].0.fetch_add(1, Ordering::Relaxed);
                    if i >= end {
                        break;
                    }
                    // SAFETY: this thread is the caller, or has joined the run and not left it.
                    unsafe { (*job.task)(i, thread) };
                }
            }
        }));
        if let Err(payload) = outcome {
            // The rest is not begun. Half of the range of numbers leaves room for late increments.
            for next in &self.next {
                next.0.store(usize::MAX / 2, Ordering::Relaxed);
            }
            lock(&self.panic).get_or_insert(payload);
        }
    }

    /// A worker's life.
    fn work(&self, thread: usize) {
        let id = std::ptr::from_ref(self) as usize;
        let mut seen = 0;
        loop {
            // `stop` is a reason to wake of its own: it may be set after it was looked at below and before `seen` was
            // read, and then the number of the run says nothing new.
            let wanted =
                || self.stop.load(Ordering::SeqCst) || self.state.0.load(Ordering::SeqCst) / RUN != seen;
            if !spin_until(wanted) {
                let mut guard = lock(&self.gate);
                self.sleepers.fetch_add(1, Ordering::SeqCst);
                while !wanted() {
                    guard = self.opened.wait(guard).unwrap_or_else(PoisonError::into_inner);
                }
                self.sleepers.fetch_sub(1, Ordering::SeqCst);
            }
            if self.stop.load(Ordering::SeqCst) {
                return;
            }
            let joined = self.state.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |state| {
                seen = state / RUN;
                (state & OPEN != 0).then_some(state + 1)
            });
            if joined.is_err() {
                continue;
            }
            // SAFETY: the caller wrote the job before it opened the run that this thread has joined, and writes
            // it again only after this thread has left.
            let job = unsafe { *self.job.get() }.expect("an open run has a job");
            self.take_tasks(job, id, thread);
            let before = self.state.0.fetch_sub(1, Ordering::SeqCst);
            if before & ACTIVE == 1 && self.caller_waits.load(Ordering::SeqCst) {
                drop(lock(&self.gate));
                self.left.notify_all();
            }
        }
    }
}

/// Waits for `done` without sleeping; gives up after [`SPIN`].
fn spin_until(done: impl Fn() -> bool) -> bool {
    if done() {
        return true;
    }
    let start = Instant::now();
    loop {
        for _ in 0..16 {
            std::hint::spin_loop();
            if done() {
                return true;
            }
        }
        if start.elapsed() > SPIN {
            return false;
        }
    }
}

/// An output that several tasks write, each its own part.
///
/// The rule, checked in debug builds as far as the record reaches: in the life of one `DisjointSlice` no element
/// is claimed twice.
pub(crate) struct DisjointSlice<'a, T> {
    start: *mut T,
    len: usize,
    #[cfg(debug_assertions)]
    claims: Mutex<Claims>,
    life: PhantomData<&'a mut [T]>,
}

/// The first claims of a slice; a fixed number, so that a check does not allocate.
#[cfg(debug_assertions)]
struct Claims {
    ranges: [(usize, usize); 64],
    count: usize,
}

// SAFETY: shared use hands out parts that do not overlap, which is sending `&mut [T]` parts to other threads.
unsafe impl<T: Send> Sync for DisjointSlice<'_, T> {}
// SAFETY: the same as for the `&mut [T]` that it stands for.
unsafe impl<T: Send> Send for DisjointSlice<'_, T> {}

impl<'a, T> DisjointSlice<'a, T> {
    /// Borrows `slice` for parallel writing.
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        Self {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            #[cfg(debug_assertions)]
            claims: Mutex::new(Claims { ranges: [(0, 0); 64], count: 0 }),
            life: PhantomData,
        }
    }

    /// The elements `start .. start + len`, which no other claim may touch.
    ///
    /// # Panics
    /// If the range leaves the slice; in debug builds also if an earlier claim overlaps it.
    #[allow(clippy::mut_from_ref)] // The point of the type; see its rule.
    pub(crate) fn claim(&self, start: usize, len: usize) -> &mut [T] {
        assert!(start <= self.len && len <= self.len - start, "claim {start}+{len} of {}", self.len);
        #[cfg(debug_assertions)]
        self.check(start, len);
        // SAFETY: in bounds of a slice that is mutably borrowed for as long as `self`, and by the rule of the
        // type nobody else has these elements.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(start), len) }
    }

    #[cfg(debug_assertions)]
    fn check(&self, start: usize, len: usize) {
        let mut claims = lock(&self.claims);
        let count = claims.count;
        let overlap = claims.ranges[..count].iter().find(|&&(s, l)| start < s + l && s < start + len);
        assert!(overlap.is_none(), "elements {start}+{len} were claimed before: {overlap:?}");
        if count < claims.ranges.len() {
            claims.ranges[count] = (start, len);
            claims.count += 1;
        }
    }
}

/// A cache line of floats, so that buffers begin on one.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _floats: [f32; 16],
}

/// Memory that grows and never shrinks; begins on a cache line.
#[derive(Default)]
pub(crate) struct AlignedBuf(Vec<Line>);

impl AlignedBuf {
    /// `len` floats with whatever was in them.
    pub(crate) fn get(&mut self, len: usize) -> &mut [f32] {
        let lines = len.div_ceil(16);
        if self.0.len() < lines {
            self.0.resize(lines, Line { _floats: [0.0; 16] });
        }
        // SAFETY: `Line` is 16 floats without padding, and `lines * 16 >= len` of them are initialised.
        unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast::<f32>(), len) }
    }
}

/// A buffer per thread of a pool.
pub(crate) struct ThreadScratch(Vec<Mutex<AlignedBuf>>);

impl ThreadScratch {
    /// Empty buffers for `threads` threads.
    pub(crate) fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| Mutex::default()).collect())
    }

    /// The buffer of a thread. Tasks ask for their own, once, and keep it while they compute.
    ///
    /// # Panics
    /// If it is in use: a task inside a task of the same thread would overwrite it.
    pub(crate) fn of(&self, thread: usize) -> MutexGuard<'_, AlignedBuf> {
        match self.0[thread].try_lock() {
            Ok(guard) => guard,
            Err(std::sync::TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(std::sync::TryLockError::WouldBlock) => panic!("scratch of thread {thread} is in use"),
        }
    }
}

/// Buffers that one operation fills and all threads then read.
#[derive(Default)]
pub(crate) struct SharedScratch {
    /// De-interleaved inputs of a matmul.
    pub(crate) inputs: Mutex<AlignedBuf>,
    /// Which inputs belong to which task.
    pub(crate) picks: Mutex<Vec<u32>>,
    /// Plan and intermediate values of the experts.
    pub(crate) experts: Mutex<super::experts::Workspace>,
    /// Products that an operation works on further: mixes of the hyper-connections, router scores.
    pub(crate) linear: Mutex<AlignedBuf>,
}

impl SharedScratch {
    /// Locks one of the buffers for the length of an operation.
    pub(crate) fn hold<T>(buffer: &Mutex<T>) -> MutexGuard<'_, T> {
        lock(buffer)
    }
}

#[cfg(test)]
#[path = "pool_tests.rs"]
mod tests;
