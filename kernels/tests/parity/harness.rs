//! How an operation is judged. A [`Case`] is one call of one operation that can be made for any range of its rows
//! on any backend. From that follow all checks: against the reference within the case's tolerance, and bit for bit
//! between levels, thread counts, and one call for all rows or one for each.

use std::ops::Range;
use std::sync::LazyLock;

use deepinfer_kernels::{Backend, Buffer, Cpu, Element, Reference, SimdLevel};

/// Thread counts of the bitwise checks: alone, what most machines have at least, and an odd number.
const THREADS: [usize; 3] = [1, 2, 3];
/// Elements behind the end of every buffer: inputs hold NaN there, outputs a mark that must survive.
const SLACK: usize = 5;
/// The mark behind outputs, and what outputs hold before the operation.
const MARK: f32 = -12345.0;
/// The same for integers.
const MARK_U32: u32 = 0xDEAD_BEEF;

/// Values of one output.
#[derive(Clone, Debug, PartialEq)]
pub enum Values {
    /// Row after row.
    F32(Vec<f32>),
    /// Row after row.
    U32(Vec<u32>),
    /// Row after row.
    Bytes(Vec<u8>),
    /// Summed over rows.
    Totals(Vec<u32>),
}

impl Values {
    fn len(&self) -> usize {
        match self {
            Values::F32(values) => values.len(),
            Values::U32(values) | Values::Totals(values) => values.len(),
            Values::Bytes(values) => values.len(),
        }
    }
}

/// One named output of an operation.
#[derive(Clone, Debug)]
pub struct Output {
    /// For messages.
    pub name: &'static str,
    /// What came out.
    pub values: Values,
}

/// All outputs of a call.
pub type Answer = Vec<Output>;

/// How far an output may be from the reference.
pub enum Tolerance {
    /// Not at all: moved, rounded to a format, or chosen.
    Exact,
    /// `relative * |want| + absolute`.
    Near {
        /// Part of the wanted value.
        relative: f64,
        /// In any case.
        absolute: f64,
    },
    /// A bound for each element.
    Each(Vec<f64>),
}

/// One operation on one shape with fixed inputs.
pub trait Case {
    /// Shape and formats, for messages.
    fn label(&self) -> String;
    /// Rows of the whole case.
    fn rows(&self) -> usize;
    /// Runs the operation for some rows as if there were no others.
    fn run<B: Backend>(&self, backend: &B, rows: Range<usize>) -> Answer;
    /// A tolerance for each output.
    fn tolerances(&self, want: &Answer) -> Vec<Tolerance>;
}

/// Device memory with `values`, and NaN (or marks) behind them that must not be read.
pub fn upload<B: Backend>(backend: &B, values: &[f32]) -> B::Buf<f32> {
    let mut buffer = backend.alloc(values.len() + SLACK);
    backend.write(&mut buffer, 0, values);
    backend.write(&mut buffer, values.len(), &[f32::NAN; SLACK]);
    buffer
}

/// [`upload`] for an operation that works in place: marks behind the values, which must survive.
pub fn upload_in_place<B: Backend>(backend: &B, values: &[f32]) -> B::Buf<f32> {
    let mut buffer = backend.alloc(values.len() + SLACK);
    backend.write(&mut buffer, 0, values);
    backend.write(&mut buffer, values.len(), &[MARK; SLACK]);
    buffer
}

/// Device memory with integers, and marks behind them.
pub fn upload_u32<B: Backend>(backend: &B, values: &[u32]) -> B::Buf<u32> {
    let mut buffer = backend.alloc(values.len() + SLACK);
    backend.write(&mut buffer, 0, values);
    backend.write(&mut buffer, values.len(), &[MARK_U32; SLACK]);
    buffer
}

/// Device memory for `len` results, full of marks.
pub fn output<B: Backend>(backend: &B, len: usize) -> B::Buf<f32> {
    let mut buffer = backend.alloc(len + SLACK);
    backend.write(&mut buffer, 0, &vec![MARK; len + SLACK]);
    buffer
}

/// Device memory for `len` integer results, full of marks.
pub fn output_u32<B: Backend>(backend: &B, len: usize) -> B::Buf<u32> {
    let mut buffer = backend.alloc(len + SLACK);
    backend.write(&mut buffer, 0, &vec![MARK_U32; len + SLACK]);
    buffer
}

fn download<B: Backend, T: Element>(backend: &B, buffer: &B::Buf<T>, mark: T) -> Vec<T> {
    let mut values = vec![T::default(); buffer.len()];
    backend.read(buffer, 0, &mut values);
    let tail = values.split_off(values.len() - SLACK);
    assert!(tail.iter().all(|v| *v == mark), "written behind the end: {tail:?}");
    values
}

/// Reads a result and checks that nothing was written behind its end.
pub fn floats<B: Backend>(backend: &B, name: &'static str, buffer: &B::Buf<f32>) -> Output {
    Output { name, values: Values::F32(download(backend, buffer, MARK)) }
}

/// [`floats`] for integers.
pub fn integers<B: Backend>(backend: &B, name: &'static str, buffer: &B::Buf<u32>) -> Output {
    Output { name, values: Values::U32(download(backend, buffer, MARK_U32)) }
}

/// Rows of `indices` up to each row's count, then `u32::MAX`: what is valid of a selection.
pub fn valid_indices<B: Backend>(
    backend: &B,
    indices: &B::Buf<u32>,
    counts: &B::Buf<u32>,
    stride: usize,
) -> [Output; 2] {
    let counts = download(backend, counts, MARK_U32);
    let mut indices = download(backend, indices, MARK_U32);
    for (row, &count) in indices.chunks_exact_mut(stride).zip(&counts) {
        row[count as usize..].fill(u32::MAX);
    }
    [
        Output { name: "counts", values: Values::U32(counts) },
        Output { name: "indices", values: Values::U32(indices) },
    ]
}

fn append(all: &mut Answer, more: Answer) {
    if all.is_empty() {
        *all = more;
        return;
    }
    for (all, more) in all.iter_mut().zip(more) {
        match (&mut all.values, more.values) {
            (Values::F32(a), Values::F32(b)) => a.extend(b),
            (Values::U32(a), Values::U32(b)) => a.extend(b),
            (Values::Bytes(a), Values::Bytes(b)) => a.extend(b),
            (Values::Totals(a), Values::Totals(b)) => a.iter_mut().zip(b).for_each(|(a, b)| *a += b),
            _ => panic!("outputs of one operation have the same kinds in every call"),
        }
    }
}

/// Runs the case in pieces of `size` rows.
fn run_in_pieces<B: Backend>(backend: &B, case: &impl Case, size: usize) -> Answer {
    let mut all = Answer::new();
    for first in (0..case.rows()).step_by(size) {
        append(&mut all, case.run(backend, first..(first + size).min(case.rows())));
    }
    all
}

/// The first place where two answers do not have the same bits.
fn first_difference(got: &Answer, want: &Answer) -> Option<String> {
    for (got, want) in got.iter().zip(want) {
        let name = got.name;
        let place = match (&got.values, &want.values) {
            (Values::F32(a), Values::F32(b)) => {
                // A NaN is a NaN, whatever its payload.
                let differ = |(a, b): (&f32, &f32)| a.to_bits() != b.to_bits() && !(a.is_nan() && b.is_nan());
                let place = a.iter().zip(b).position(differ);
                place.map(|i| format!("{name}[{i}]: {:e} and {:e}", a[i], b[i]))
            }
            (Values::U32(a), Values::U32(b)) | (Values::Totals(a), Values::Totals(b)) => {
                let place = a.iter().zip(b).position(|(a, b)| a != b);
                place.map(|i| format!("{name}[{i}]: {} and {}", a[i], b[i]))
            }
            (Values::Bytes(a), Values::Bytes(b)) => {
                let place = a.iter().zip(b).position(|(a, b)| a != b);
                place.map(|i| format!("{name}[{i}]: {:#04x} and {:#04x}", a[i], b[i]))
            }
            _ => Some(format!("{name} is of another kind")),
        };
        if place.is_some() {
            return place;
        }
        if got.values.len() != want.values.len() {
            return Some(format!(
                "{name} has {} elements instead of {}",
                got.values.len(),
                want.values.len()
            ));
        }
    }
    (got.len() != want.len()).then(|| "another number of outputs".into())
}

/// The largest error as a part of what is allowed, with its place. Above one, or no number, it is outside.
fn worst(got: &Answer, want: &Answer, tolerances: &[Tolerance]) -> (f64, String) {
    assert_eq!((got.len(), tolerances.len()), (want.len(), want.len()), "a tolerance for each output");
    let mut worst = (0.0, String::new());
    for ((got, want), tolerance) in got.iter().zip(want).zip(tolerances) {
        let (part, place) = match (&got.values, &want.values, tolerance) {
            (Values::F32(a), Values::F32(b), Tolerance::Near { .. } | Tolerance::Each(_))
                if a.len() == b.len() =>
            {
                worst_float(a, b, tolerance)
            }
            _ => match first_difference(&vec![got.clone()], &vec![want.clone()]) {
                Some(place) => (f64::INFINITY, place),
                None => (0.0, String::new()),
            },
        };
        // A NaN is worse than anything.
        if part.is_nan() || part > worst.0 {
            worst = (if part.is_nan() { f64::INFINITY } else { part }, format!("{} {place}", got.name));
        }
    }
    worst
}

fn worst_float(got: &[f32], want: &[f32], tolerance: &Tolerance) -> (f64, String) {
    let bound = |i: usize| match tolerance {
        Tolerance::Exact => 0.0,
        Tolerance::Near { relative, absolute } => relative * f64::from(want[i]).abs() + absolute,
        Tolerance::Each(bounds) => {
            assert_eq!(bounds.len(), got.len(), "a bound for each element");
            bounds[i]
        }
    };
    // Equal infinities have no distance.
    let part = |i: usize| match got[i] == want[i] {
        true => 0.0,
        false => (f64::from(got[i]) - f64::from(want[i])).abs() / bound(i),
    };
    // `total_cmp` puts NaN on top.
    let worst = (0..got.len()).map(|i| (part(i), i)).max_by(|a, b| a.0.total_cmp(&b.0));
    match worst {
        Some((part, i)) => {
            (part, format!("[{i}]: {:e} instead of {:e}, allowed error {:e}", got[i], want[i], bound(i)))
        }
        None => (0.0, String::new()),
    }
}

/// A case with what the reference says to it.
pub struct Judged<C> {
    case: C,
    want: Answer,
    tolerances: Vec<Tolerance>,
}

/// Asks the reference, once for all tests of an operation.
pub fn judge<C: Case>(cases: Vec<C>) -> Vec<Judged<C>> {
    let judged = cases.into_iter().map(|case| {
        let want = case.run(&Reference, 0..case.rows());
        let tolerances = case.tolerances(&want);
        Judged { case, want, tolerances }
    });
    judged.collect()
}

fn report(failures: &[String], cases: usize) {
    let shown = failures.iter().take(8).cloned().collect::<Vec<_>>().join("\n  ");
    assert!(failures.is_empty(), "{} failures in {cases} cases:\n  {shown}", failures.len());
}

/// A cpu for each level of this machine and each thread count, shared by all tests, which run at the same time.
static CPUS: LazyLock<Vec<Cpu>> = LazyLock::new(|| {
    let levels = SimdLevel::available().into_iter();
    levels
        .flat_map(|level| THREADS.map(|threads| Cpu::with_level(threads, level).expect("an available level")))
        .collect()
});

/// Every case on the cpu at `level` is within its tolerance of the reference.
pub fn matches_the_reference<C: Case>(cases: &[Judged<C>], level: SimdLevel) {
    let Some(cpu) = CPUS.iter().find(|cpu| (cpu.level(), cpu.threads()) == (level, 2)) else {
        println!("skipped: no {level}");
        return;
    };
    let mut failures = Vec::new();
    let mut overall = (0.0, String::new());
    for Judged { case, want, tolerances } in cases {
        let got = case.run(cpu, 0..case.rows());
        let (part, place) = worst(&got, want, tolerances);
        let place = format!("{}: {place}", case.label());
        if part > 1.0 {
            failures.push(place.clone());
        }
        if part > overall.0 {
            overall = (part, place);
        }
    }
    println!("worst error on {level}: {:.3} of the tolerance; {}", overall.0, overall.1);
    report(&failures, cases.len());
}

/// Where a case does not have the same bits at every level, with any number of threads, and in any company of
/// rows, none at all included.
pub fn differences(case: &impl Case) -> Vec<String> {
    let want = case.run(&CPUS[0], 0..case.rows());
    let mut found = Vec::new();
    let mut compare = |got: Answer, want: &Answer, how: String| {
        if let Some(place) = first_difference(&got, want) {
            found.push(format!("{}, {how}: {place}", case.label()));
        }
    };
    for cpu in CPUS.iter() {
        let who = cpu.name();
        compare(case.run(cpu, 0..case.rows()), &want, format!("all rows on {who}"));
        match cpu.threads() {
            1 => compare(case.run(cpu, 0..0), &nothing(&want), format!("no rows on {who}")),
            2 => compare(run_in_pieces(cpu, case, 1), &want, format!("single rows on {who}")),
            _ => compare(run_in_pieces(cpu, case, 3), &want, format!("three rows at a time on {who}")),
        }
    }
    found
}

/// What an answer looks like for no rows.
fn nothing(answer: &Answer) -> Answer {
    let empty = answer.iter().map(|output| Output {
        name: output.name,
        values: match &output.values {
            Values::F32(_) => Values::F32(Vec::new()),
            Values::U32(_) => Values::U32(Vec::new()),
            Values::Bytes(_) => Values::Bytes(Vec::new()),
            Values::Totals(totals) => Values::Totals(vec![0; totals.len()]),
        },
    });
    empty.collect()
}

/// [`differences`] of all cases: there are none.
pub fn has_the_same_bits_everywhere<C: Case>(cases: &[Judged<C>]) {
    let failures: Vec<String> = cases.iter().flat_map(|judged| differences(&judged.case)).collect();
    report(&failures, cases.len());
}

/// The reference itself answers the same for a row in any company, and its tolerances accept it.
pub fn reference_rows_stand_alone<C: Case>(cases: &[Judged<C>]) {
    let mut failures = Vec::new();
    for Judged { case, want, tolerances } in cases {
        let (part, place) = worst(want, want, tolerances);
        assert_eq!((part, place.as_str()), (0.0, ""), "a tolerance accepts what was wanted");
        let pieces = run_in_pieces(&Reference, case, 1);
        let none = case.run(&Reference, 0..0);
        let place = first_difference(&pieces, want).or(first_difference(&none, &nothing(want)));
        failures.extend(place.map(|place| format!("{}: {place}", case.label())));
    }
    report(&failures, cases.len());
}
