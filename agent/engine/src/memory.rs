//! Memory of the engine: counted before it is taken, and compared with what the machine has left.

use std::fs;

use deepinfer_kernels::{Backend, Element, RowFormat};

/// Allocates buffers, or only counts what they would take.
///
/// The engine's memory is described once, by the code that allocates it; a counting pass over the same code
/// says how much it will be.
pub(crate) struct Allocator<'a, B> {
    backend: &'a B,
    dry: bool,
    bytes: u64,
}

impl<'a, B: Backend> Allocator<'a, B> {
    /// Allocates.
    pub fn new(backend: &'a B) -> Self {
        Self { backend, dry: false, bytes: 0 }
    }

    /// Counts; everything it returns is empty.
    pub fn counting(backend: &'a B) -> Self {
        Self { backend, dry: true, bytes: 0 }
    }

    /// Bytes so far.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// A buffer of `rows * width` elements.
    pub fn buffer<T: Element>(&mut self, rows: usize, width: usize) -> B::Buf<T> {
        self.bytes += rows as u64 * width as u64 * size_of::<T>() as u64;
        self.backend.alloc(if self.dry { 0 } else { rows * width })
    }

    /// A store of `rows` rows.
    pub fn store(&mut self, format: RowFormat, width: usize, rows: usize) -> B::Store {
        self.bytes += rows as u64 * format.row_bytes(width) as u64;
        self.backend.store(format, width, if self.dry { 0 } else { rows })
    }

    /// Counts `bytes` of memory that others allocate.
    pub fn count(&mut self, bytes: u64) {
        self.bytes += bytes;
    }
}

/// Bytes that this process can still take: the lower of what the machine has available and what its control
/// group leaves. `None` where the system does not tell.
pub(crate) fn available() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(mem_available);
    let group = || {
        let read = |name: &str| fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
        group_available(&read("memory.max")?, &read("memory.current")?, &read("memory.stat")?)
    };
    match (machine, group()) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

/// Reads `MemAvailable` of /proc/meminfo.
fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|l| l.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

/// What a control group leaves: its limit less what is in use, file pages aside, which can be dropped.
fn group_available(max: &str, current: &str, stat: &str) -> Option<u64> {
    let max: u64 = max.trim().parse().ok()?;
    let current: u64 = current.trim().parse().ok()?;
    let file =
        stat.lines().find_map(|l| l.strip_prefix("file ")).and_then(|v| v.trim().parse().ok()).unwrap_or(0);
    Some(max.saturating_sub(current.saturating_sub(file)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_from_the_kernels_tables() {
        let meminfo = "MemTotal:       100 kB\nMemFree:  7 kB\nMemAvailable:      42 kB\n";
        assert_eq!(mem_available(meminfo), Some(42 * 1024));
        assert_eq!(mem_available("MemTotal: 100 kB\n"), None);
        assert_eq!(group_available("1000\n", "700\n", "anon 100\nfile 600\n"), Some(900));
        assert_eq!(group_available("max\n", "700\n", ""), None, "no limit");
        assert_eq!(group_available("100\n", "700\n", ""), Some(0));
    }
}
