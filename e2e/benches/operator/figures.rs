//! Reading figures: the operator's metrics, its CPU time, the machine's name.

use std::collections::BTreeMap;
use std::time::Duration;
use std::{fmt, fs};

/// Ticks of the kernel's CPU accounting in a second, on every Linux of today.
const TICKS: f64 = 100.0;

/// The middle one.
pub fn median(mut values: Vec<Duration>) -> Duration {
    values.sort_unstable();
    values.get(values.len() / 2).copied().unwrap_or_default()
}

/// CPU time that a process has used, in seconds.
pub fn cpu_seconds(pid: u32) -> f64 {
    stat(pid).map_or(0.0, |stat| stat.seconds)
}

/// CPU time of this process and of all that it has started and that still run, by program.
#[derive(Clone, Debug, Default)]
pub struct Cpu(BTreeMap<String, f64>);

impl Cpu {
    /// Used since an earlier look.
    pub fn since(&self, before: &Self) -> Self {
        let used = |program: &String| before.0.get(program).copied().unwrap_or(0.0);
        Self(self.0.iter().map(|(program, seconds)| (program.clone(), seconds - used(program))).collect())
    }

    /// Of all programs, in seconds.
    pub fn seconds(&self) -> f64 {
        self.0.values().sum()
    }
}

impl fmt::Display for Cpu {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut programs: Vec<_> = self.0.iter().filter(|(_, seconds)| **seconds >= 0.05).collect();
        programs.sort_by(|a, b| b.1.total_cmp(a.1));
        let words: Vec<_> =
            programs.iter().map(|(program, seconds)| format!("{program} {seconds:.1}")).collect();
        f.write_str(&words.join(", "))
    }
}

/// What [`Cpu`] says.
pub fn cpu_of_all() -> Cpu {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let all: BTreeMap<u32, Stat> = pids.filter_map(|pid| Some((pid, stat(pid)?))).collect();
    let ours = std::process::id();
    let descends = |mut pid: u32| {
        while pid != ours {
            match all.get(&pid) {
                Some(stat) if stat.parent != 0 => pid = stat.parent,
                _ => return false,
            }
        }
        true
    };
    let mut cpu = Cpu::default();
    for (_, stat) in all.iter().filter(|(pid, _)| descends(**pid)) {
        *cpu.0.entry(stat.program.clone()).or_default() += stat.seconds;
    }
    cpu
}

/// What the kernel says of a process.
struct Stat {
    /// Its name, cut to 15 characters; the programs of Kubernetes are one binary and named by their first word.
    program: String,
    parent: u32,
    /// CPU time.
    seconds: f64,
}

fn stat(pid: u32) -> Option<Stat> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (head, rest) = stat.rsplit_once(')')?;
    let fields: Vec<&str> = rest.split_whitespace().collect();
    let ticks = |at: usize| fields.get(at)?.parse::<f64>().ok();
    let mut program = head.split_once('(')?.1.to_owned();
    if program == "kubernetes" {
        let words = fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
        program = words.split('\0').nth(1).unwrap_or(&program).to_owned();
    }
    Some(Stat { program, parent: fields.get(1)?.parse().ok()?, seconds: (ticks(11)? + ticks(12)?) / TICKS })
}

/// One line about the machine.
pub fn machine() -> String {
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    let cpu = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu.lines().find_map(|line| line.strip_prefix("model name")).unwrap_or("unknown");
    let memory = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let kib = memory.lines().find_map(|line| line.strip_prefix("MemTotal:")).unwrap_or("0 kB");
    let kib: u64 = kib.trim().trim_end_matches(" kB").parse().unwrap_or(0);
    format!("{cores} cores ({}), {} GiB", model.trim_start_matches([' ', '\t', ':']), kib >> 20)
}

/// The samples of one scrape.
#[derive(Clone, Debug, Default)]
pub struct Metrics(BTreeMap<String, f64>);

impl Metrics {
    /// Reads the text form.
    pub fn read(text: &str) -> Self {
        let lines = text.lines().filter(|line| !line.starts_with('#'));
        let sample = |line: &str| {
            let (name, value) = line.rsplit_once(' ')?;
            Some((name.to_owned(), value.parse().ok()?))
        };
        Self(lines.filter_map(sample).collect())
    }

    /// The sum over all samples of a metric whose labels contain the text.
    pub fn sum(&self, name: &str, labels: &str) -> f64 {
        let of_it = |key: &&String| {
            key.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with('{'))
        };
        self.0.iter().filter(|(key, _)| of_it(key) && key.contains(labels)).map(|(_, value)| value).sum()
    }

    /// The samples of a counter that grew since an earlier scrape, largest first: labels and growth.
    pub fn growth(&self, name: &str, before: &Self) -> Vec<(String, f64)> {
        let of_it = self.0.iter().filter_map(|(key, value)| Some((key, key.strip_prefix(name)?, value)));
        let grown = of_it.map(|(key, labels, value)| {
            let words = labels.split('"').skip(1).step_by(2).collect::<Vec<_>>().join(" ");
            (words, value - before.0.get(key).copied().unwrap_or(0.0))
        });
        let mut grown: Vec<_> = grown.filter(|(_, growth)| *growth > 0.0).collect();
        grown.sort_by(|a, b| b.1.total_cmp(&a.1));
        grown
    }

    /// A quantile of a histogram since an earlier scrape, as the upper bound of its bucket, in seconds.
    pub fn quantile(&self, name: &str, q: f64, before: &Self) -> f64 {
        let bucket = format!("{name}_bucket");
        let mut bounds: BTreeMap<u64, f64> = BTreeMap::new();
        for (key, value) in self.0.iter().filter(|(key, _)| key.starts_with(&bucket)) {
            let Some(bound) = key.split("le=\"").nth(1).and_then(|rest| rest.split('"').next()) else {
                continue;
            };
            let bound: f64 = bound.parse().unwrap_or(f64::INFINITY);
            let gone = before.0.get(key).copied().unwrap_or(0.0);
            // Positive floats keep their order as bits.
            *bounds.entry(bound.to_bits()).or_default() += value - gone;
        }
        let total = bounds.values().next_back().copied().unwrap_or(0.0);
        let found = bounds.iter().find(|(_, count)| **count >= q * total);
        found.map_or(0.0, |(bits, _)| f64::from_bits(*bits))
    }
}
