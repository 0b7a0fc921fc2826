//! What this machine has: memory and cores.

use std::fs;
use std::num::NonZeroUsize;
use std::thread::available_parallelism;

/// Cores that this process may use.
pub fn cores() -> usize {
    available_parallelism().map_or(1, NonZeroUsize::get)
}

/// Bytes that this process can still take: what the machine has available, and not more than its control group
/// leaves. `None` where the system does not tell.
pub fn available_memory() -> Option<u64> {
    let machine = fs::read_to_string("/proc/meminfo").ok().as_deref().and_then(mem_available);
    let number = |name: &str| -> Option<u64> {
        fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok()?.trim().parse().ok()
    };
    let group = || Some(number("memory.max")?.saturating_sub(number("memory.current")?));
    match (machine, group()) {
        (Some(machine), Some(group)) => Some(machine.min(group)),
        (machine, group) => machine.or(group),
    }
}

fn mem_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    kib.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_in_bytes() {
        assert_eq!(mem_available("MemTotal: 9 kB\nMemAvailable:   12 kB\n"), Some(12 * 1024));
        assert_eq!(mem_available("MemTotal: 9 kB\n"), None);
    }
}
